"""The engine that runs any model of transformers, on any device."""
