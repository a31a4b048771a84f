"""What one update computes: joined rows, chunks, forward pass, correction, and retry when memory runs out."""
