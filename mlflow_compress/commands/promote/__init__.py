"""`promote`, `approve`, `rollback` and `history`: which version has a registry alias, and why."""
