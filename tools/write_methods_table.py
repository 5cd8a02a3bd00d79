"""Write the README's table of methods from the registry. Run it after a method is new or changed; a test compares."""

from __future__ import annotations

from pathlib import Path

from mlflow_compress.compress.table import as_markdown

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- methods: written by tools/write_methods_table.py -->\n", "\n<!-- end of methods -->"


def with_table(readme: str) -> str:
    """Return the README's text with the present table between its two marks."""
    before, rest = readme.split(BEGIN)
    return before + BEGIN + as_markdown() + END + rest.split(END)[1]


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
