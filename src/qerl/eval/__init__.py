"""Scoring of policies: commands call `run`, `policy` loads what is scored, `evaluate` computes the scores."""
