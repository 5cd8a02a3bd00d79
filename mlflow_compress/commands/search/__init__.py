"""`search`: mixed precision within a budget."""
