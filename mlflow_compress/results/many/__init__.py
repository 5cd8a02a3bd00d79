"""Results about many variants: a sweep, a search, a report."""
