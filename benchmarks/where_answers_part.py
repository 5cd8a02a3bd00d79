"""The table of docs/how-to/where-answers-part.md: greedy answers of the demo and of three roundings of it.

    python benchmarks/where_answers_part.py

Everything is kept in a temporary folder. No number of the table is a timing.
"""

import tempfile
from pathlib import Path

import mlflow_compress as mc
from mlflow_compress.metrics import key
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.numbers import interval_text, scale_of

COLUMNS = {
    "judge/identical_answers_pct": "same answer",
    "judge/first_divergent_token": "first divergent token",
    "judge/share_of_divergent_tokens_pct": "divergent tokens",
    "judge/kl_to_fork": "KL to the fork",
    "judge/kl_behind_fork": "KL behind it",
    "distance/traces_kl": "KL, own text",
}


def cell(result: MetricResult | None) -> str:
    """Return a value with its interval, as the report writes it, or a dash where there is none."""
    return "-" if result is None else interval_text(result, scale_of(key(result.name).unit), difference=False)


def main() -> None:
    """Print the table."""
    print("| variant | " + " | ".join(COLUMNS.values()) + " |")
    print("|" + " --- |" * (len(COLUMNS) + 1))
    with tempfile.TemporaryDirectory() as folder:
        for bits in (8, 4, 3):
            variant = mc.compress("demo", "rtn", bits=bits, store=folder, output_dir=str(Path(folder) / "out"))
            answers = mc.judge(
                variant, judges="divergent_tokens", answer_args={"num_samples": 2, "max_new_tokens": 8}, store=folder
            )
            found = {**answers.pooled, **mc.evaluate(variant, tasks="traces", store=folder).pooled}
            print(f"| {variant.name} | " + " | ".join(cell(found.get(name)) for name in COLUMNS) + " |", flush=True)


if __name__ == "__main__":
    main()
