"""Blind ratings by people: the sheet, its key, and what the ratings say."""
