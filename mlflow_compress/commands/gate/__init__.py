"""Gate."""
