"""Figures, one file per figure. Each takes data and returns a matplotlib figure with title and caption."""
