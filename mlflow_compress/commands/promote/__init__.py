"""`promote`, `rollback`, `history` and `policy`: which version has a registry alias, and why."""
