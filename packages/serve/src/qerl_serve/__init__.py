"""A server that speaks the Tinker API over one packed copy of the weights."""
