"""GGUF files: names, blocks, models."""
