"""Compression libraries, each imported by its own file alone."""
