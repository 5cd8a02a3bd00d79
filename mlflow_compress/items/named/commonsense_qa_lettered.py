"""CommonsenseQA as lettered multiple choice, without the options E and F, because it has five options.

The validation split is used, because the test answers are not public.
"""

from __future__ import annotations

from mlflow_compress.items.sources.hub_choice import Source, labelled, register

register(
    "commonsense_qa_lettered",
    Source(dataset="tau/commonsense_qa", test="validation", category="common sense", question=labelled),
    licence="MIT",
    items="1,221 validation, five options",
)
