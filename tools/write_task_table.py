"""Write the table of named tasks into the README, from the registry.

Run it after a change of a named task or of lm_eval's version; a test fails while the two differ.
"""

from __future__ import annotations

from pathlib import Path

from mlflow_compress.tasks.table import as_markdown

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- tasks: written by tools/write_task_table.py -->", "<!-- end of tasks -->"


def with_table(text: str) -> str:
    """Return the README's text with the table between its marks."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{as_markdown()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
