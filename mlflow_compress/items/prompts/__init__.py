"""Prompt styles of lettered questions, registered in `items.prompt_style`: a new one is a new file here."""
