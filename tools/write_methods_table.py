"""Write the table of methods into the documentation, from the registry.

Run it after a method is new or changed; a test compares.
"""

from __future__ import annotations

from pathlib import Path

from mlflow_compress.compression.method_table import as_markdown

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "methods.md"
BEGIN, END = "<!-- methods: written by tools/write_methods_table.py -->\n", "\n<!-- end of methods -->"


def with_table(text: str) -> str:
    """Return a page's text with the present table between its two marks."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + as_markdown() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
