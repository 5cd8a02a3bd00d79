"""The scoring engine: scores all requests in one pass, and returns every record that the metrics read.

`engine` is the entry point, and runs the passes. `plan` encodes requests and packs them into batches that share
prefixes. `forward` runs the model: its body, and its head at the scored positions. `kernels` reduce logits to
statistics. `baseline_store` keeps a baseline's states on disk, `journal` unfinished results. `generation` generates.
"""
