"""Tasks by name, registered in `tasks.catalogue`: a new one is a new file here."""
