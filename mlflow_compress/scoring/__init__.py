"""The scoring engine: scores all requests in one pass, and returns every record that the metrics read.

`engine` is the entry point. `plan` encodes requests and packs them into batches that share prefixes. `forward` runs the
model: its body, and its head at the scored positions. `kernels` reduce logits to statistics. `baseline_store` keeps a
baseline's states on disk, `journal` unfinished results. `execution` runs a pass, `generation` generates text.
"""
