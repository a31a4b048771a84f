"""Benchmarks of speed, memory and agreement on a GPU, run from the repository's root: `python -m bench`.

They are not part of the installed package. `results/` holds their result files.
"""
