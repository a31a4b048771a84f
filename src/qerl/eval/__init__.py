"""Scoring policies: `run` is what commands call, `policy` what is scored, `evaluate` gives the numbers."""
