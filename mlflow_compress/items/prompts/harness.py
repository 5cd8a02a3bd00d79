"""The prompt of lm-evaluation-harness's `mmlu` (0.4.13), byte for byte. Today it is the same as `hendrycks`.

It has a name of its own because a test compares it with the harness, even if `hendrycks` should change.
"""

from __future__ import annotations

from mlflow_compress.items.prompt_style import PROMPTS
from mlflow_compress.items.prompts import hendrycks

PROMPTS.register("harness")(hendrycks.STYLE)
