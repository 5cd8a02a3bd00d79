"""What is scored, and in which order: encoded requests, corpus windows, packed batches."""
