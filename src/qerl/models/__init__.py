"""From a name to a loaded model: the Hub, GGUF files, chat templates, and whether two copies are one base."""
