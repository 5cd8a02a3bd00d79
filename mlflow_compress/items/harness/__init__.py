"""Tasks of lm-evaluation-harness by name: its prompts and metrics, our engine and records.

The only package that imports `lm_eval`, and only inside functions: its import and its index of 14,000 names take
seconds.
`catalogue` finds and loads tasks, `build` turns them into ours, `own` computes the harness's metrics from our records.
"""
