"""Checkpoint folders: loading, device placement, hashes, file formats and our own architectures."""
