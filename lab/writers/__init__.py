"""Writers of the numbers, tables and figures of README and docs from bench/results, and of some results."""
