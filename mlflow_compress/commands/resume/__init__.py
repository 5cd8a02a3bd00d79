"""`resume`: does again what was killed."""
