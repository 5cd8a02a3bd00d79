"""Prompt styles of lettered questions, one file per style, registered in `items.prompt_style`."""
