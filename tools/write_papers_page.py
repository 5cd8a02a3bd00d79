"""Write the tables of docs/papers.md: what of the papers' printed tables follows from the others, by our functions.

Run it after a change in `tools/paper_tables/`; a test compares.
"""

from pathlib import Path
from types import ModuleType

from paper_tables import answer_order, conscompf_paper, flips_paper, llama_cpp, uncertainty_bench
from paper_tables.source import Check, Claim

PAGE = Path(__file__).resolve().parents[1] / "docs" / "papers.md"
SOURCES: dict[str, ModuleType] = {
    "flips": flips_paper,
    "order": answer_order,
    "llama.cpp": llama_cpp,
    "uncertainty": uncertainty_bench,
    "conscompf": conscompf_paper,
}
_MANY = 12


def _rows(lines: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _breaks(check: Check) -> str:
    if not check.breaks:
        return "none"
    return "; ".join(check.breaks) if len(check.breaks) <= _MANY else f"{len(check.breaks)} cells, see below"


def checks_table(checks: list[Check]) -> str:
    """Return the identities as Markdown."""
    head = [("tables", "what must hold", "computed with", "holds", "cells that break it"), ("---",) * 5]
    body = [(c.table, c.identity, c.computed_with, f"{c.holds} of {c.n}", _breaks(c)) for c in checks]
    return _rows([*head, *body])


def claims_table(claims: list[Claim]) -> str:
    """Return the text's numbers beside ours as Markdown."""
    head = [("tables", "quantity", "the text says", "the tables give"), ("---",) * 4]
    return _rows([*head, *((c.table, c.quantity, c.published, c.ours) for c in claims)])


def uacc_table() -> str:
    """Return printed UAcc over the UAcc of the printed means, by model and task; bold where it does not follow."""
    cells = uncertainty_bench.cells()
    found = {
        (r["model"], r["task"]): f"{uncertainty_bench.ratio(r):.3f}"
        if uncertainty_bench.follows(r)
        else f"**{uncertainty_bench.ratio(r):.3f}**"
        for r in cells
    }
    tasks = uncertainty_bench.TASKS
    body = [(model, *(found[model, task] for task in tasks)) for model in dict.fromkeys(r["model"] for r in cells)]
    return _rows([("model", *tasks), ("---",) * (1 + len(tasks)), *body])


def tables() -> dict[str, str]:
    """Return every generated table by the name in its marks."""
    found = {"uacc ratios": uacc_table()}
    for name, module in SOURCES.items():
        found[f"{name} identities"] = checks_table(module.checks())
        found[f"{name} claims"] = claims_table(module.claims())
    return found


def filled(page: str, parts: dict[str, str]) -> str:
    """Return the page's text with every table between its two marks."""
    for name, table in parts.items():
        begin, end = f"<!-- table: {name} -->", f"<!-- end: {name} -->"
        before, rest = page.split(begin)
        page = f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), tables()))
