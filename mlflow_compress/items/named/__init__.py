"""Tasks by name, registered in `items.named_tasks`: a new one is a new file here."""
