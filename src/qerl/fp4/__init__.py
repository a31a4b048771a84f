"""Four-bit weights: the format, checkpoints in it, and the modules that compute with it."""
