"""Reads files that people and other programs wrote: strictly, with one clear error each."""
