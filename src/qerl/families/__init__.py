"""Which model families are taken, decided from config.json, and the parts of a loaded model."""
