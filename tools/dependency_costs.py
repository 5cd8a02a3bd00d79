"""What each direct dependency of the package costs: MB on the disk and, on request, seconds of its installation.

    python tools/dependency_costs.py [--seconds]

"Alone" is what an installation without this dependency would not have: the package, and what only it needs. "With all"
is everything that it needs, also what others need as well. Of extras, where they are installed, it is what they add.
Seconds are processor seconds of `pip install` of the package itself, once it is in pip's cache.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
INSTALLED: dict[str, Distribution] = {canonicalize_name(one.metadata["Name"]): one for one in distributions()}


def megabytes(names: Iterable[str]) -> float:
    """Return the size of distributions' files in MB, compiled Python files included; mlflow's three share files."""
    files = {Path(str(file.locate())) for name in names for file in INSTALLED[name].files or []}
    return sum(file.stat().st_size for file in files if file.is_file()) / 1e6


def needed(names: Iterable[str]) -> set[str]:
    """Return all installed distributions that some distributions need, themselves included."""
    reached: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in reached or name not in INSTALLED:
            continue
        reached.add(name)
        requirements = map(Requirement, INSTALLED[name].requires or [])
        waiting += [canonicalize_name(r.name) for r in requirements if not r.marker or r.marker.evaluate({"extra": ""})]
    return reached


def seconds(name: str) -> float:
    """Return the processor seconds that pip takes to install a distribution."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
    with tempfile.TemporaryDirectory() as folder:
        before = os.times()
        subprocess.run(
            [*pip, "--target", folder, f"{name}=={INSTALLED[name].version}"], check=True, capture_output=True
        )
        after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    """Print a row per direct dependency as Markdown, the largest first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", action="store_true", help="also install each alone, into a temporary folder")
    timed = parser.parse_args().seconds
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    direct = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    everything = needed(direct)
    rows = [
        (
            megabytes(everything - needed(direct - {name})),
            megabytes([name]),
            megabytes(needed([name])),
            name,
            f"{seconds(name):.1f}" if timed else "",
        )
        for name in sorted(direct)
    ]
    print("| dependency | MB | alone | with all |" + (" seconds |" if timed else ""))
    print("| --- |" + " --- |" * (4 if timed else 3))
    for freed, own, with_all, name, took in sorted(rows, key=lambda row: (-row[1], -row[0])):
        print(f"| `{name}` | {own:.1f} | {freed:.1f} | {with_all:.1f} |" + (f" {took} |" if timed else ""))
    for extra, lines in project["optional-dependencies"].items():
        added = needed(canonicalize_name(Requirement(line).name) for line in lines) - everything
        if added and extra not in ("test", "docs"):
            print(f"| extra `{extra}` | | {megabytes(added):.1f} | |" + ("  |" if timed else ""))
    print(f"\nIn total {megabytes(everything):,.0f} MB, beside torch {megabytes(everything - {'torch'}):,.0f} MB.")


if __name__ == "__main__":
    main()
