"""Export of trained models: `run` is the entry point of the command, `merge` writes merged weights."""
