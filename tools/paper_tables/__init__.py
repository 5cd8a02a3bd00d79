"""The papers' printed tables, recomputed: which cells follow from the others by our functions, and which do not.

One module per source. Each returns `Check` rows (an identity, counted over cells, with every cell that breaks it) and
`Claim` rows (a number in the text beside ours). `tools/write_papers_page.py` writes them into `docs/papers.md`.
"""
