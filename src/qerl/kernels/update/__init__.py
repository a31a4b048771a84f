"""Kernels of the update's forward and backward pass."""
