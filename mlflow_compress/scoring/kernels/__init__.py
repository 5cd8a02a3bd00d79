"""Statistics of rows of logits: normaliser, entropy, divergences, top tokens."""
