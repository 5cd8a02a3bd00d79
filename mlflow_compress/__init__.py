"""Compress a causal language model many ways and measure how far each variant has moved from its baseline."""

__version__ = "0.1.0"
