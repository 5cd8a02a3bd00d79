"""`speed`: times the variant in turn with its baseline."""
