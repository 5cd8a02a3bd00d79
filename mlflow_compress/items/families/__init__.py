"""Task families: how an item becomes requests, one file per family."""
