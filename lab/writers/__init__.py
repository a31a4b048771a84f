"""What writes the numbers, tables and figures of README and docs from bench/results, and some of these."""
