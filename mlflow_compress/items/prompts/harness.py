"""The prompt of lm-evaluation-harness's `mmlu` (0.4.13), byte for byte: the same text as `hendrycks`.

The name says what is meant; a test holds it to the harness itself, whatever becomes of the other.
"""

from __future__ import annotations

from mlflow_compress.items.prompt_style import PROMPTS
from mlflow_compress.items.prompts import hendrycks

PROMPTS.register("harness")(hendrycks.STYLE)
