"""`gc`: which runs of a shared store may be deleted, and what that frees."""
