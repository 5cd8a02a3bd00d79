"""An extension of griffe: the comment beside or above a field of a class is its description in the API reference."""

import tokenize
from functools import cache
from pathlib import Path

import griffe


@cache
def comments_of(path: Path) -> dict[int, str]:
    """Return the comments of a file by line."""
    with path.open("rb") as file:
        return {
            t.start[0]: t.string.lstrip("# ") for t in tokenize.tokenize(file.readline) if t.type == tokenize.COMMENT
        }


class FieldComments(griffe.Extension):
    """Gives each field without a docstring its comment."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **more: object) -> None:
        """Read the comment on the field's lines, or else those right above it."""
        if attr.docstring is not None or attr.lineno is None or not isinstance(attr.filepath, Path):
            return
        comments = comments_of(attr.filepath)
        found = [comments[line] for line in range(attr.lineno, (attr.endlineno or attr.lineno) + 1) if line in comments]
        above = attr.lineno - 1
        while not found and above in comments:
            above -= 1
        found = found or [comments[line] for line in range(above + 1, attr.lineno)]
        if found:
            attr.docstring = griffe.Docstring(" ".join(found).rstrip(".") + ".", parent=attr)
