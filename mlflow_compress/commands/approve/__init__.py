"""`approve`: lets a version that waits have its alias, if the decision on it still holds."""
