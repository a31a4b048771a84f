"""Supported model families, decided from config.json, and the parts of a loaded model."""
