"""How fast a model is in the runtime that it is meant for: one process per model, timed in turn with its baseline."""
