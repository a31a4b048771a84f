"""Scoring policies: `run` is what the commands call, `policy` what is scored, `evaluate` gives the numbers."""
