"""Change lines of the code at random, and count how many of the changes the tests notice.

    PYTHONPATH=.:tools coverage run --data-file=lines --source=mlflow_compress -m pytest -p mutants \
        tests/unit tests/contract tests/golden --junitxml=seconds.xml
    PYTHONPATH=. python tools/mutants.py --lines lines --seconds seconds.xml --json mutants.json

A mutant is this package with one change in `metrics`, `decide` or `scoring`: `<` for `<=`, `-` for `+`, another number,
no `not`. For each, the tests that execute the changed line run, the quickest first, until one fails. What none of them
notices is printed. With the same seed and the same code the mutants are the same, so that the tests can be compared
before and after a change of theirs; tests written since need a coverage file of their own (both options take several).

mutmut 3 is not used: it makes every mutant of every file and draws no sample, changes nothing outside of functions, and
begins with two runs of the whole suite in a copy of its own.
"""

import argparse
import ast
import gc
import json
import math
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from coverage import Coverage, CoverageData

ROOT = Path(__file__).resolve().parents[1]
OURS = ("mlflow_compress", "tests", "tools", "benchmarks", "conftest", "__main__")
MAX_TESTS, MAX_SECONDS = 40, 20.0  # of one mutant
OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def changed(node: ast.AST) -> ast.expr | None:
    """Return another expression in place of this one; None where there is none to be drawn."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in OTHER:
            return ast.Compare(node.left, [OTHER[type(operator)]()], node.comparators)
        case ast.BinOp(left, operator, right) if type(operator) in OTHER:
            return ast.BinOp(left, OTHER[type(operator)](), right)
        case ast.BoolOp(operator, values):
            return ast.BoolOp(OTHER[type(operator)](), values)
        case ast.UnaryOp(ast.Not(), operand):
            return operand
        case ast.Constant(bool() as value):
            return ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            return ast.Constant(value + 1)
        case ast.Call(ast.Name(("min" | "max") as name), arguments, keywords):
            return ast.Call(ast.Name("max" if name == "min" else "min"), arguments, keywords)
    return None


def changes_nothing(node: ast.AST, field: str) -> bool:
    """Return whether no result depends on this: types, messages, how a class is written."""
    match node:
        case ast.JoinedStr() | ast.Raise() | ast.If(test=ast.Name("TYPE_CHECKING")) | ast.keyword("strict"):
            return True
        case ast.Call(ast.Name("dataclass")) | ast.Call(ast.Attribute(ast.Name("logger" | "warnings"))):
            return True
    return field in ("annotation", "returns")


def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Let coverage write which test executes a line, when this file is a plug-in of pytest (`-p mutants`)."""
    if recording := Coverage.current():
        recording.switch_context(item.nodeid)


def name_of(node: ast.AST) -> str | None:
    """Return the name, or the attribute, that stands here."""
    return getattr(node, "id", getattr(node, "attr", None))


@dataclass(frozen=True)
class Mutant:
    """One change: the file with it, and the lines whose tests may notice it, the best first."""

    file: str
    line: int
    change: str
    source: bytes
    lines: tuple[set[int], ...]

    @classmethod
    def of(cls, file: str, source: bytes, node: ast.expr, new: ast.expr, scopes: list[ast.AST]) -> "Mutant":
        """Return the mutant with `new` in place of `node`, which stands within `scopes`, the outermost first."""
        starts = [0, *(match.end() for match in re.finditer(b"\n", source))]
        last = node.end_lineno or node.lineno
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[last - 1] + (node.end_col_offset or 0)
        text = ast.unparse(ast.fix_missing_locations(new))
        text = text if isinstance(new, ast.Constant) else f"({text})"
        old = " ".join(source[begin:end].decode().split())
        statement = next(scope for scope in reversed(scopes) if isinstance(scope, ast.stmt))
        function = next((scope for scope in reversed(scopes) if isinstance(scope, FUNCTIONS)), None)
        if function is None:  # executed by an import, not by a test: what counts is who reads the names
            names = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            own = inside = {n.lineno for n in ast.walk(scopes[0]) if isinstance(n, ast.expr) and name_of(n) in names}
        else:  # a decorator, or a default, is executed by an import too
            inside = set(range(function.body[0].lineno, (function.end_lineno or 0) + 1))
            own = inside if function is statement else set(range(statement.lineno, last + 1))
        changed_source = source[:begin] + text.encode() + source[end:]
        return cls(file, node.lineno, f"{old} -> {text}", changed_source, (own, inside))

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.change}"


def mutants_of(file: Path) -> Iterator[Mutant]:
    """Yield every mutant of a file."""
    source = file.read_bytes()

    def below(node: ast.AST, scopes: list[ast.AST]) -> Iterator[Mutant]:
        if (new := changed(node)) is not None:
            yield Mutant.of(str(file.relative_to(ROOT)), source, node, new, scopes)  # type: ignore[arg-type]
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Name | ast.Attribute):
            yield Mutant.of(str(file.relative_to(ROOT)), source, node.value, ast.Constant(None), [*scopes, node])
        for field, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not changes_nothing(child, field):
                    yield from below(child, [*scopes, node])

    return below(ast.parse(source), [])


def draw(packages: list[str], number: int, seed: int) -> list[Mutant]:
    """Return one mutant of each of `number` lines."""
    by_line = defaultdict(list)
    for package in packages:
        for file in sorted((ROOT / "mlflow_compress" / package).rglob("*.py")):
            for mutant in mutants_of(file):
                by_line[mutant.file, mutant.line].append(mutant)
    generator = random.Random(seed)
    lines = generator.sample(sorted(by_line), number)
    return [generator.choice(by_line[line]) for line in sorted(lines)]


class Tests:
    """Which tests execute a line, and the seconds of each."""

    def __init__(self, recorded: list[str], times: list[str]) -> None:
        self.seconds: dict[str, float] = {}
        for file in times:
            for case in ElementTree.parse(file).iter("testcase"):
                if len(case) == 0:  # neither failed nor skipped
                    name = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
                    self.seconds[name] = float(case.attrib["time"])
        self.executed: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for data in map(CoverageData, recorded):
            data.read()
            for file in data.measured_files():
                name = f"mlflow_compress/{file.rpartition('/mlflow_compress/')[2]}"  # of this or another checkout
                for line, contexts in data.contexts_by_lineno(file).items():
                    self.executed[name][line] |= self.seconds.keys() & contexts

    def keep(self, there: set[str]) -> None:
        """Forget tests that are gone since they were recorded."""
        for lines in self.executed.values():
            for tests in lines.values():
                tests &= there

    def of(self, mutant: Mutant) -> list[str]:
        """Return the quickest tests of a mutant: of its line, or, where no test shows that, of its function or file."""
        lines = self.executed[mutant.file]
        for some in (*mutant.lines, lines.keys()):
            if tests := set().union(*(lines[line] for line in some if line in lines)):
                break
        chosen, spent = [], 0.0
        for test in sorted(tests, key=lambda test: (self.seconds[test], test))[:MAX_TESTS]:
            if (spent := spent + self.seconds[test]) > MAX_SECONDS:
                break
            chosen.append(test)
        return chosen


def in_fork(arguments: list[str], folder: Path, log: Path, *, seconds: float = math.inf) -> int:
    """Run pytest in a fork of this process, which has imported what is slow to import. Return its exit code."""
    if (pid := os.fork()) == 0:
        os.setpgid(0, 0)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        if seconds < math.inf:  # a change may make a loop without an end
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
        for name in [name for name in sys.modules if name.partition(".")[0] == "mlflow_compress"]:
            del sys.modules[name]  # plug-ins, which MLflow has imported from the checkout
        sys.path[:] = [str(folder), *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT)]
        os.environ["PYTHONPATH"] = str(folder)
        code = 3
        try:
            loaded = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # libraries that a plug-in of pytest brings
            code = pytest.main(["-q", "--tb=no", "-p", "no:cacheprovider", *loaded, *arguments])
        except BaseException:  # noqa: BLE001 - the fork ends here
            traceback.print_exc()
        sys.stdout.flush()
        log.with_suffix(".modules").write_text("\n".join(sys.modules))
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def copied(folder: Path) -> Path:
    """Copy this checkout, as far as git knows it, with ../shared beside it."""
    checkout = folder / "checkout"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in files.strip("\0").split("\0"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, checkout / name)
    (folder / "shared").symlink_to((ROOT.parent / "shared").resolve())
    # Whether compiled code is of its source: two changes of a file within a second have the same time and size.
    command = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "mlflow_compress"]
    subprocess.run(command, cwd=checkout, check=True)
    return checkout


def main() -> None:
    """Print the counts, and every mutant that no test notices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", nargs="+", required=True)
    parser.add_argument("--seconds", nargs="+", required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--before", type=Path, help="what an earlier run has written: its killers run first")
    parser.add_argument("--packages", nargs="+", default=["metrics", "decide", "scoring"])
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    mutants, tests = draw(options.packages, options.number, options.seed), Tests(options.lines, options.seconds)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        checkout, log = copied(Path(name)), Path(name, "log")
        files = sorted({test.partition("::")[0] for test in tests.seconds})
        if code := in_fork(["--collect-only", *(file for file in files if (checkout / file).exists())], checkout, log):
            sys.exit(f"pytest --collect-only ended with {code}:\n{log.read_text()[-3000:]}")
        tests.keep(set(log.read_text().splitlines()))
        for module in log.with_suffix(".modules").read_text().splitlines():  # then a fork imports the package alone
            if module.partition(".")[0] not in OURS:
                with suppress(Exception):
                    import_module(module)
        gc.freeze()
        earlier = json.loads(options.before.read_text()) if options.before else []
        killer = {result["mutant"]: result["killed_by"] for result in earlier}
        for mutant in mutants:
            file, chosen = checkout / mutant.file, tests.of(mutant)
            chosen.sort(key=lambda test: test != killer.get(str(mutant)))
            before = file.read_bytes()
            file.write_bytes(mutant.source)
            for compiled in file.parent.glob("__pycache__/*.nb[ic]"):  # by numba: holds constants of other modules
                compiled.unlink()
            code = 0
            for part in (chosen[:8], chosen[8:]):  # most are noticed by the first: then no other file is imported
                if part and not code:
                    code = in_fork(["-x", *part], checkout, log, seconds=2 * MAX_SECONDS)
            file.write_bytes(before)
            found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", log.read_text(), re.MULTILINE) if code else None
            by = found[1] if found else f"exit code {code}"
            results.append({"mutant": str(mutant), "killed_by": by if code else None, "tests": len(chosen)})
            options.json.write_text(json.dumps(results, indent=1))
        killers = sorted({by for result in results if "::" in (by := result["killed_by"] or "")})
        if killers and in_fork(killers, checkout, log):
            print(f"Not to be trusted, because these tests fail without a change too:\n{log.read_text()[-3000:]}")
    survived = [result for result in results if result["killed_by"] is None]
    print(f"{len(results)} mutants, {len(results) - len(survived)} killed, {len(survived)} not:")
    for result in survived:
        worse = "killed before: " if killer.get(result["mutant"]) else ""
        print(f"  {worse}{result['mutant']}  ({result['tests']} tests)")


if __name__ == "__main__":
    main()
