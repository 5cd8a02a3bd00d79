"""What counts as a line of code and as a public name."""

import ast

from tools.code_lines import code_lines, public_names

SOURCE = '''"""A module.

Two lines more.
"""

import os  # a comment behind code counts with it

LIMIT = 3
"""What explains a constant is no code."""


class Open:
    # a comment alone is none
    def method(self) -> str:
        """Return a text."""
        return (
            """a text of
            two lines that is returned"""
        )

    def _own(self) -> None: ...


class _Hidden:
    def method(self) -> None: ...


def function() -> None:
    def inside() -> None: ...
'''


def test_comments_docstrings_and_empty_lines_are_no_code() -> None:
    assert code_lines(SOURCE) == 13  # two above the first class, seven in it, two and two below


def test_names_are_public_where_all_that_they_are_in_is() -> None:
    assert [*public_names(ast.parse(SOURCE))] == ["Open", "method", "function"]
