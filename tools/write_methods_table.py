"""Write the tables of methods, and of what vLLM does with them, into the documentation.

Run it after a method is new or changed; a test compares.
"""

from __future__ import annotations

from pathlib import Path

from mlflow_compress.compression.method_table import methods_markdown, vllm_as_markdown

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "methods.md"
BEGIN, END = "<!-- methods: written by tools/write_methods_table.py -->\n", "\n<!-- end of methods -->"


VLLM_PAGE = ROOT / "docs" / "how-to" / "vllm.md"
VLLM_BEGIN, VLLM_END = "<!-- vllm: written by tools/write_methods_table.py -->\n", "\n<!-- end of vllm -->"


def with_table(text: str) -> str:
    """Return the text of docs/methods.md with the present table between its two marks."""
    return _between(text, BEGIN, methods_markdown(), END)


def with_vllm_table(text: str) -> str:
    """Return the text of docs/how-to/vllm.md with the present table between its two marks."""
    return _between(text, VLLM_BEGIN, vllm_as_markdown(), VLLM_END)


def _between(text: str, begin: str, table: str, end: str) -> str:
    before, rest = text.split(begin)
    return before + begin + table + end + rest.split(end)[1]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
    VLLM_PAGE.write_text(with_vllm_table(VLLM_PAGE.read_text()))
