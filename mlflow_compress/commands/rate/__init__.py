"""`blind` and `ratings`: people rate answers without names."""
