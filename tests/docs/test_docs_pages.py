"""Generated pages are current, and every page is reachable."""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mlflow_compress.metrics import all_keys
from tests.docs.blocks import DOCS, PAGES, ROOT

sys.path.append(str(ROOT / "tools"))

import write_methods_table
import write_metric_reference
import write_task_table


@pytest.mark.parametrize("tool", [write_methods_table, write_task_table])
def test_the_tables_are_current(tool) -> None:
    text = tool.PAGE.read_text()
    assert text == tool.with_table(text), f"run tools/{tool.__name__}.py"


def test_the_vllm_table_and_the_metric_reference_are_current_and_no_docstring_makes_a_heading() -> None:
    text = write_methods_table.VLLM_PAGE.read_text()
    assert text == write_methods_table.with_vllm_table(text), "run tools/write_methods_table.py"
    text = write_metric_reference.PAGE.read_text()
    assert text == write_metric_reference.reference(), "run tools/write_metric_reference.py"
    assert all(f"| `{name}` |" in text for name in all_keys())
    # "References" underlined with dashes would become a heading of the page.
    assert "\n## " in text and not re.search(r"^-{4,}$", text, re.MULTILINE)


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {page.relative_to(DOCS).as_posix() for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_links_lead_to_pages_and_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([\w./-]+\.md)(?:#([\w.-]+))?\)", page.read_text()):
        file = (page.parent / target).resolve()
        assert file in PAGES, f"{page.name}: {target} is no page of the documentation"
        headings = [heading.lower() for heading in re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)]
        assert not anchor or anchor in [re.sub(r"[^\w\s-]", "", h).strip().replace(" ", "-") for h in headings]


def test_the_report_s_sections_are_those_of_the_page() -> None:
    files = [file for file in (ROOT / "mlflow_compress").rglob("*") if file.suffix in (".py", ".html", ".jinja", ".j2")]
    code = "".join(file.read_text() for file in files)
    sections = set(re.findall(r"<h2>([^<{]+)</h2>", code)) - {"Not computed"}  # "and why" where something is missing
    page = (DOCS / "how-to" / "reading-a-report.md").read_text()
    assert sections and all(f"| {section} |" in page for section in sections), sections


PACKAGE = ROOT / "mlflow_compress"
ARCHITECTURE = DOCS / "architecture.md"
TEXTS = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_name_exists(page: Path) -> None:
    """Names with dots: everywhere those that begin with the package, in the architecture page without it too."""
    text = page.read_text(encoding="utf-8")
    whole = re.findall(r"\bmlflow_compress((?:\.\w+)+)(?![\w/-])", text)
    short = re.findall(r"`((?:\w+\.)+(?!py`)\w+)`", text) if page == ARCHITECTURE else []
    missing = []
    for name in sorted({name.strip(".") for name in [*whole, *short]}):
        parts = name.split(".")
        for cut in range(len(parts), -1, -1):
            try:
                found = importlib.import_module(".".join(["mlflow_compress", *parts[:cut]]))
            except ModuleNotFoundError:
                continue
            break
        for attribute in parts[cut:]:
            found = getattr(found, attribute, None)
        if found is None:
            missing.append(name)
    # Groups of entry points are named like modules.
    groups = re.findall(r'group="(mlflow_compress\.\w+)"', "".join(p.read_text() for p in PACKAGE.rglob("*.py")))
    assert [name for name in missing if f"mlflow_compress.{name}" not in groups] == []


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_file_and_folder_exists(page: Path) -> None:
    """Folders of code end with a slash; the others are Python files."""
    text, places = page.read_text(encoding="utf-8"), (ROOT, PACKAGE, page.parent)
    files = set(re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", text)) | set(re.findall(r"`((?:\w+/)+\w+\.py)\b", text))
    paths = sorted(path for path in files if path.count("/") > 1 or path.endswith(".py") or page == ARCHITECTURE)
    assert [path for path in paths if not any((place / path).exists() for place in places)] == []


def test_the_architecture_is_read_in_one_sitting() -> None:
    assert len(ARCHITECTURE.read_text(encoding="utf-8").splitlines()) < 60


STATIC = ["ruff check .", "ruff format --check .", "mypy", "lint-imports"]

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def commands(target: str) -> list[str]:
    """Return what make would run."""
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if not line.startswith("make")]


@needs_make
def test_check_is_the_static_checks_and_all_of_the_readme_s_tests() -> None:
    every, first = re.findall(r"python -m pytest[^\n`]*", (ROOT / "README.md").read_text())
    assert commands("check") == [*STATIC, every] and first == f"{every} @tests/first-look.txt"


def test_ci_and_the_local_hooks_run_the_static_checks() -> None:
    lines = [line.strip() for line in (ROOT / ".ci" / "run").read_text().splitlines()]
    assert "make static" in lines or [line for line in lines if line in STATIC] == STATIC
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    tools = [hook["entry"].replace(" --force-exclude", "") for hook in repository["hooks"]]
    assert tools == [command.removesuffix(" .") for command in STATIC]
    assert all(hook["language"] == "system" for hook in repository["hooks"])


@needs_make
def test_every_tool_that_writes_a_file_is_in_generated() -> None:
    text = "\n".join(commands("generated"))
    assert all(tool.name in text for tool in (ROOT / "tools").glob("write_*.py"))


def test_the_citation_names_the_present_version_and_templates_can_be_read() -> None:
    from mlflow_compress import __version__

    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert found["version"] == __version__ and found["license"] == "Apache-2.0"
    for form in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")):
        found = yaml.safe_load(form.read_text())
        if form.name == "config.yml":
            continue
        assert {"name", "description", "body"} <= set(found)
        assert all(part["attributes"]["label"] for part in found["body"])
