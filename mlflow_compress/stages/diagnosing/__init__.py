"""The diagnose stage: where a variant's movement comes from."""
