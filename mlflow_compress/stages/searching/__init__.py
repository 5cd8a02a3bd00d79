"""The search: formats for every group of layers by measured costs, one checkpoint, and what stands beside it."""
