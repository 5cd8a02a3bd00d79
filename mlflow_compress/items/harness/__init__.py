"""Tasks of lm-evaluation-harness: its prompts and metrics, with our engine and records.

`harness_tasks` loads tasks, `build` turns them into ours, `harness_metrics` computes the harness's metrics from our
records. No other package of `items` imports `lm_eval`. It is imported inside functions only, because the import and the
index of 14,000 names take seconds.
"""
