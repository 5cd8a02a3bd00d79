"""How fast a model is in the runtime that it is meant for: one process per model, timed in turn with its baseline.

`model_process` runs a file `in_*` in the runtime's own environment.
"""
