"""Fixtures: tiny random models of each family and a tiny chat tokenizer, made in memory."""
