"""Where texts come from: files, data sets in hub layout, named corpora."""
