"""Tests tell right from wrong, never fast from slow: none asks a clock, or waits so many seconds, without a reason."""

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CLOCKS = {
    "time": {"time", "time_ns", "monotonic", "perf_counter", "process_time", "thread_time", "sleep"},
    "asyncio": {"sleep"},
}
PATIENT = 60  # seconds; nothing below is a limit that only a hang reaches
# By method, which of its arguments is a number of seconds.
SECONDS = {"wait": 0, "join": 0, "poll": 0, "settimeout": 0, "get": 1, "acquire": 1, "communicate": 1, "wait_for": 1}
WORDS = re.compile(rf"sleep|{'|'.join(CLOCKS)}|({'|'.join(SECONDS)})\(")

ALLOWED = {
    "waiting.py: until": "it looks again in 10 ms at what every test waits for",
    "clock.py: _Asyncio.wait_for": "one turn of the event loop, no time",
    "e2e/test_server_away.py: HELD": "a child looks again whether it may go on",
    "unit/test_warm_python.py: ENDS_LATE": "a child looks again whether it may end",
    "unit/test_warm_python.py: test_what_only_later_forks_need_is_imported_or_called_while_the_first_runs": "as above",
    "unit/test_judges_mt_bench.py: test_a_silent_endpoint_times_out": "no answer comes, however long the time-out is",
    "unit/test_clocks.py: test_the_check_finds": "what the check must find",
}
"""File and function of every use, or the name of a script that a test writes, and why it tells no speed."""


def uses(
    node: ast.AST, constants: dict[str, float], clocks: dict[str, str], place: str = ""
) -> Iterator[tuple[str, ast.AST]]:
    """Yield every use below a node of a clock, or of a limit in seconds, with the definitions that it stands in."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        place = f"{place}.{node.name}".lstrip(".")
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and not place:
        place = node.targets[0].id
    if _is_clock(node, clocks) or (isinstance(node, ast.Call) and _is_limit(node, constants)):
        yield place, node
    if (text := _text(node)) is not None:
        if _of_script(text):
            yield place, node
        return
    for child in ast.iter_child_nodes(node):
        yield from uses(child, constants, clocks, place)


def uses_of(source: str) -> list[tuple[str, ast.AST]]:
    """Return every use in the source of a module."""
    tree = ast.parse(source)
    assigned = [node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)]
    constants = {node.targets[0].id: value for node in assigned if (value := _number(node.value, {})) is not None}
    imports = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    clocks = {alias.asname or alias.name: alias.name for alias in imports if alias.name in CLOCKS}
    return [*uses(tree, constants, clocks)]


def _is_clock(node: ast.AST, clocks: dict[str, str]) -> bool:
    if isinstance(node, ast.ImportFrom):
        return any(alias.name in CLOCKS.get(node.module or "", ()) for alias in node.names)
    named = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return named and node.attr in CLOCKS.get(clocks.get(node.value.id, ""), ())


def _is_limit(call: ast.Call, constants: dict[str, float]) -> bool:
    given = [keyword.value for keyword in call.keywords if (keyword.arg or "").endswith("timeout")]
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    at = SECONDS.get(name, len(call.args))
    # The second argument of a dictionary's `get` is a default, and that of a queue's stands behind a truth value.
    if name not in ("get", "acquire") or (call.args and isinstance(getattr(call.args[0], "value", None), bool)):
        given += call.args[at : at + 1]
    return any(0 < (_number(one, constants) or 0) < PATIENT for one in given)


def _number(node: ast.AST, constants: dict[str, float]) -> float | None:
    if isinstance(node, ast.Name):
        return constants.get(node.id)
    value = node.value if isinstance(node, ast.Constant) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _text(node: ast.AST) -> str | None:
    """Return a text, with a name in the place of each of its braces."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "_" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _of_script(text: str) -> bool:
    """Return whether a text is Python that uses a clock or a limit; of what cannot be parsed, the words decide."""
    if not WORDS.search(text):
        return False
    try:
        return bool(uses_of(textwrap.dedent(text)))
    except (SyntaxError, ValueError):
        return any(re.search(rf"\b{module}\.({'|'.join(names)})\(", text) for module, names in CLOCKS.items())


def test_no_test_asks_a_clock_or_waits_so_many_seconds_without_a_reason() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("*.py")):
        name = path.relative_to(TESTS).as_posix()
        for place, node in uses_of(path.read_text(encoding="utf-8")):
            found.setdefault(f"{name}: {place}", []).append(f"{name}:{node.lineno}: {ast.unparse(node)[:80]}")
    new = sorted(found.keys() - ALLOWED.keys())
    assert [line for key in new for line in found[key]] == []  # see CONTRIBUTING.md, "Tests"
    assert ALLOWED.keys() - found.keys() == set()  # what no longer occurs needs no reason


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.sleep(1)",
        "import time as clock\nnow = clock.monotonic",
        "from time import perf_counter",
        "import asyncio\nasync def f():\n    await asyncio.sleep(0)",
        "f(timeout=5)",
        "f(judge_timeout=0.1)",
        "LIMIT = 30\nf(timeout=LIMIT)",
        "thread.join(10)",
        "event.wait(0.5)",
        "queue.get(True, 3)",
        "process.communicate(None, 20)",
        "SCRIPT = 'import time\\ntime.sleep(60)'",
        "SCRIPT = f'import time\\nprint({x!r})\\ntime.sleep({y})'",
        "f('python -c \"import time; time.sleep(60)\"')",
        "f('if {x}:\\n  thread.join(1)')",
    ],
)
def test_the_check_finds(source: str) -> None:
    assert uses_of(source)


@pytest.mark.parametrize(
    "source",
    [
        "import time\nmonkeypatch.setattr(time, 'time', lambda: 2e9)",
        "thread.join()\nevent.wait()\nprocess.communicate()",
        "f(timeout=None, lease_timeout=-1)\nlock.acquire(timeout=0)",
        "f(timeout=60)",
        "row.get('seconds', 5)\n', '.join(names)\nconnection.poll()",
        "datetime.min.time()\nself.time()",
        "'The time of a sleep is not told.'",
    ],
)
def test_the_check_passes(source: str) -> None:
    assert not uses_of(source)
