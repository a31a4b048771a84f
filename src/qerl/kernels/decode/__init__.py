"""Kernels of a decode step, one file each."""
