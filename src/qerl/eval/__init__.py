"""Scoring policies: `evaluate` for the numbers, `adapter_check` for the proof that an adapter is in use."""
