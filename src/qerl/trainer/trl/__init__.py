"""What touches TRL's internals, beside the trainer's own overrides: it may break when the pin moves."""
