"""Write the table of named tasks into the documentation, from the registry.

Run it after a change of a named task or of lm_eval's version; a test fails while the two differ.
"""

from __future__ import annotations

from pathlib import Path

from mlflow_compress.items.named_tasks import tasks_markdown

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tasks.md"
BEGIN, END = "<!-- tasks: written by tools/write_task_table.py -->", "<!-- end of tasks -->"


def with_table(text: str) -> str:
    """Return a page's text with the table between its marks."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{tasks_markdown()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
