"""Main."""
