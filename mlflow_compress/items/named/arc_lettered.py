"""ARC as lettered multiple choice: the answer is a letter. The harness's own tasks score the texts of the options."""

from __future__ import annotations

from mlflow_compress.items.sources.hub_choice import Source, labelled, register

for _name, _config, _items in (
    ("arc_challenge_lettered", "ARC-Challenge", "1,172 test"),
    ("arc_easy_lettered", "ARC-Easy", "2,376 test"),
):
    register(
        _name,
        Source(dataset="allenai/ai2_arc", config=_config, test="test", category="science", question=labelled),
        licence="CC BY-SA 4.0",
        items=f"{_items} (with four options: each also with the options E and F)",
    )
