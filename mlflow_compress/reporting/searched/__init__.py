"""What a search has found, as text and tables."""
