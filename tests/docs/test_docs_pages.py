"""Generated pages are current, and every page is reachable."""

import re
import sys
from pathlib import Path

import pytest

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


def test_the_table_of_what_vllm_takes_is_current() -> None:
    text = write_methods_table.VLLM_PAGE.read_text()
    assert text == write_methods_table.with_vllm_table(text), "run tools/write_methods_table.py"


def test_the_metric_reference_is_current_and_whole() -> None:
    text = write_metric_reference.PAGE.read_text()
    assert text == write_metric_reference.reference(), "run tools/write_metric_reference.py"
    assert all(f"| `{name}` |" in text for name in all_keys())


def test_a_docstring_s_sections_are_no_headings() -> None:
    # "References" underlined with dashes would become a heading of the page.
    assert "\n## " in write_metric_reference.reference()
    assert not re.search(r"^-{4,}$", write_metric_reference.reference(), re.MULTILINE)


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
