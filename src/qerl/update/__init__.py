"""What one update computes: joined rows, chunks, forward pass, losses, and retry when memory runs out."""
