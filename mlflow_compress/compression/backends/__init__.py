"""Compression libraries; each is imported only by the file named after it."""
