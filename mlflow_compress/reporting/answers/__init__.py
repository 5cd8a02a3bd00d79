"""The answers of baseline and variant to the same instructions: side by side, to be rated, and what judges took."""
