"""Every command and code block of the documentation is executed, or says why it is not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlflow_compress.commands.command import all_commands
from mlflow_compress.config import given_parameters
from tests.docs.blocks import DOCS, PAGES, ROOT, Block, blocks_of

BLOCKS = {page: blocks_of(page) for page in PAGES}
EVERY = [block for blocks in BLOCKS.values() for block in blocks]
PROGRAMS = {"sh": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}


def _pages_that_run() -> list[object]:
    pages = []
    for page, blocks in BLOCKS.items():
        if any("run" in block.marks for block in blocks):
            slow = any("slow" in block.marks for block in blocks)
            pages.append(
                pytest.param(page, marks=pytest.mark.slow if slow else (), id=page.relative_to(DOCS).as_posix())
            )
    return pages


def _words(text: str) -> list[str]:
    """Return the lines with "#" for what differs between processors: numbers, the rules of tables, digits of hashes."""
    pattern = r"-{9,}|\b[0-9a-f]{8}\b|[-+]?\d[\d,.]*(e-\d+)?"
    return [" ".join(re.sub(pattern, "#", line).split()) for line in text.splitlines()]


def test_printed_lines_may_differ_in_numbers_alone() -> None:
    assert _words("1. a (9 items): 3.2e-05 <= 5") == _words("1. a (10 items): 3.191e-05 <= 5") != _words("1. a: 1 > 5")


@pytest.mark.parametrize("page", _pages_that_run())
def test_a_page_s_commands_work_in_an_empty_folder(page: Path, tmp_path: Path, entry_points: Path) -> None:
    # A reader's environment: the installed commands, no tracking store of another test, no key.
    left_out = ("MLFLOW_", "OPENAI_", "PYTEST_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment["PYTHONPATH"] = f"{entry_points}{os.pathsep}{ROOT}"
    for block in BLOCKS[page]:
        if "file" in block.marks:
            (tmp_path / block.attributes["title"]).write_text(block.text)
    output = ""
    for block in BLOCKS[page]:
        if "printed" in block.marks:
            assert [line for line in _words(block.text) if line not in _words(output)] == [], output[-4000:]
        if "run" in block.marks:
            done = subprocess.run(
                [*PROGRAMS[block.language], block.text],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, f"{block.text}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            output = done.stdout


def _fault(block: Block) -> str:
    """Return what is wrong with a block's marks, or nothing."""
    kinds = [mark for mark in ("run", "file", "shown", "printed") if mark in block.marks]
    if not block.head.startswith("{.") or len(kinds) != 1:
        return "needs a head such as {.sh .run}, with one of .run, .file, .printed and .shown"
    if unknown := set(block.marks[1:]) - {"run", "file", "shown", "printed", "wrapped", "slow", "readme"}:
        return f"has unknown marks {unknown}"
    if kinds == ["run"] and block.language not in PROGRAMS:
        return f"cannot be run: only {sorted(PROGRAMS)} can"
    if kinds == ["shown"] and not block.attributes.get("reason"):
        return "is not executed and gives no reason"
    if kinds == ["file"] and not block.attributes.get("title"):
        return "is a file without a name"
    return ""


@pytest.mark.parametrize("block", EVERY, ids=lambda block: f"{block.page}: {block.text.splitlines()[0][:40]}")
def test_every_block_is_executed_or_says_why_not(block: Block) -> None:
    assert not _fault(block), f"{block.page}: the block {block.head!r} {_fault(block)}"


@pytest.mark.parametrize(
    ("head", "wrong"),
    [
        ("sh", "needs a head"),
        ("{.sh}", "needs a head"),
        ("{.sh .run .shown}", "needs a head"),
        ("{.sh .runn .shown}", "unknown marks"),
        ("{.console .run}", "cannot be run"),
        ("{.console .shown}", "gives no reason"),
        ("{.json .file}", "without a name"),
    ],
)
def test_a_wrong_head_is_found(head: str, wrong: str) -> None:
    assert wrong in _fault(Block("page.md", head, "true"))


def test_the_readme_s_commands_are_those_of_getting_started() -> None:
    readme = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    shown = [block.text for block in EVERY if "readme" in block.marks]
    assert shown and shown == readme


def test_every_parameter_that_a_page_names_exists() -> None:
    commands = {one.typed: one.parameters for one in all_commands().values() if one.parameters}
    verbs = "|".join(sorted(commands, reverse=True))
    known = {name for cls in commands.values() for name in given_parameters(cls)} | {"config"}
    for page in PAGES:
        text = page.read_text()
        named = set(re.findall(r"-P (\w+)=", text))
        for verb, options in re.findall(f"mlflow-compress ({verbs}) ([^\n`|]*)", text):
            accepted = {*given_parameters(commands[verb]), "config", "help"}
            assert set(re.findall(r"--(\w+)", options)) <= accepted, f"{page.name}: {verb} {options}"
        assert named <= known, f"{page.name}: {named - known}"
