"""The fenced blocks of the documentation, and what their marks say about them.

```{.sh .run}                       executed, in order, in one empty folder per page; `.slow` where that takes minutes
```{.python .run}                   executed in the same folder
```{.json .file title="a.jsonl"}    a file that the page tells the reader to save; written before anything runs
```{.text .printed}                 what the executed block before it prints, but for its numbers; `.wrapped` with long lines
```{.console .shown reason="..."}   not executed, and why
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^```(?P<head>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its marks, its attributes and its text."""

    page: str
    head: str
    text: str

    @property
    def marks(self) -> list[str]:
        return re.findall(r"(?<=\.)[\w-]+", _ATTRIBUTE.sub("", self.head))

    @property
    def language(self) -> str:
        return self.marks[0] if self.marks else ""

    @property
    def attributes(self) -> dict[str, str]:
        return dict(_ATTRIBUTE.findall(self.head))


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of one page, in order."""
    name = page.relative_to(DOCS).as_posix()
    return [Block(name, found["head"].strip(), found["body"]) for found in _FENCE.finditer(page.read_text())]


PAGES = sorted(DOCS.rglob("*.md"))
