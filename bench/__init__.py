"""Benchmarks of speed, memory and agreement on a GPU, run from the repository's root: `python -m bench`.

They are no part of the package that is installed. `results/` holds what they wrote.
"""
