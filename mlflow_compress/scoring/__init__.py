"""The scoring engine: many requests, one pass, every record that the metrics read.

`loading` opens a checkpoint, `requests` tokenizes as lm-evaluation-harness does, `trie` and `plan` share prefixes,
`body` runs the model's body, `head` its head at the scored positions only, `divergence` compares two distributions,
`store` keeps a baseline's head inputs, `engine` puts them together, `corpus` cuts llama.cpp's windows.
"""
