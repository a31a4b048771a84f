"""What one update computes: packed rows, chunks, forward pass, losses, and retry when memory runs out."""
