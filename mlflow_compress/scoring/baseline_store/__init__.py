"""The baseline's states on disk: written once, read when a variant is compared."""
