"""Promotion decisions from numbers alone: gates, ranks and reasons."""
