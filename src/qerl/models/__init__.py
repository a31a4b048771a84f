"""From a model name to a loaded model: the Hub, GGUF files, chat templates, fingerprints of base models."""
