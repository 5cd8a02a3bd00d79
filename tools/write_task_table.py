"""Write the table of named tasks into the documentation, from the registry.

Run it after a change of a named task or of lm_eval's version; a test fails while the two differ.
"""

from pathlib import Path

from mlflow_compress.items.named_tasks import TASK_COLUMNS, task_rows

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tasks.md"
BEGIN, END = "<!-- tasks: written by tools/write_task_table.py -->", "<!-- end of tasks -->"


def with_table(text: str) -> str:
    """Return a page's text with the table between its marks."""
    before, rest = text.split(BEGIN)
    lines = ["| " + " | ".join(TASK_COLUMNS) + " |", "|" + "---|" * len(TASK_COLUMNS)]
    for name, *middle, extra, digest in task_rows():
        lines.append("| " + " | ".join([f"`{name}`", *middle, f"`{extra}`" if extra else "", f"`{digest}`"]) + " |")
    table = "\n".join(lines)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
