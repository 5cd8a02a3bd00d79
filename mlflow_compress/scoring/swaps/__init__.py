"""Measures how far a model moves when some of its modules are replaced by a variant's."""
