"""`forecast`: flips to expect on items that a variant was not run on."""
