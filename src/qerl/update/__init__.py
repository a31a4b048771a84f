"""Computation of an update: packed rows, chunks, forward pass, losses, and retry when memory runs out."""
