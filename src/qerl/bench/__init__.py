"""Benchmarks that print a table and write JSON."""
