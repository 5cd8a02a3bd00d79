"""Rate."""
