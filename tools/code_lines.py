"""Count lines of code, public names and options: python tools/code_lines.py [FOLDER, this checkout by default].

A line of code has a token that is neither a comment nor in a docstring. Public names are classes, functions and methods
without an underscore, in a module or in such a class. Options are the different names over all commands.
"""

import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

_SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
_OPTIONS = """
from mlflow_compress.commands.command import all_commands
from mlflow_compress.config import given_parameters
commands = all_commands().values()
names = {name for one in commands if one.parameters is not None for name in given_parameters(one.parameters)}
names |= {flag.lstrip("-") for one in commands for argument in one.arguments for flag in argument.flags[-1:]}
print(len(commands), len(names))
"""


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the lines of all texts that stand alone: docstrings, and what explains the constant above."""
    alone = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    texts = [node for node in alone if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {line for text in texts for line in range(text.lineno, (text.end_lineno or text.lineno) + 1)}


def code_lines(source: str) -> int:
    """Return the number of lines of code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _SILENT and token.string:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(ast.parse(source)))


def public_names(node: ast.AST) -> Iterator[str]:
    """Iterate over the public classes, functions and methods; what is inside a function is nobody's to know."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and child.name[0] != "_":
            yield child.name
            yield from public_names(child) if isinstance(child, ast.ClassDef) else ()


if __name__ == "__main__":
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    for name in ("mlflow_compress", "tests"):
        sources = [path.read_text(encoding="utf-8") for path in sorted((root / name).rglob("*.py"))]
        names = sum(len([*public_names(ast.parse(source))]) for source in sources)
        print(f"{name}: {sum(map(code_lines, sources)):,} lines of code, {names:,} public names")
    commands, options = subprocess.check_output([sys.executable, "-c", _OPTIONS], cwd=root, text=True).split()
    print(f"{options} options of {commands} commands")
