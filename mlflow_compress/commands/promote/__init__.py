"""Promote."""
