"""Write the tables of methods, and of what vLLM does with them, into the documentation.

Run it after a method is new or changed; a test compares.
"""

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from mlflow_compress.compression.servers import METHOD_COLUMNS, measured_in_vllm, method_rows

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "methods.md"
BEGIN, END = "<!-- methods: written by tools/write_methods_table.py -->\n", "\n<!-- end of methods -->"


VLLM_PAGE = ROOT / "docs" / "how-to" / "vllm.md"
_MORE = 3.0  # times the KL that the dtype alone explains: more is a finding
VLLM_BEGIN, VLLM_END = "<!-- vllm: written by tools/write_methods_table.py -->\n", "\n<!-- end of vllm -->"


def with_table(text: str) -> str:
    """Return the text of docs/methods.md with the present table between its two marks."""
    table = _table(METHOD_COLUMNS, ((f"`{name}`", *rest) for name, *rest in method_rows()))
    return _between(text, BEGIN, table, END)


def with_vllm_table(text: str) -> str:
    """Return the text of docs/how-to/vllm.md with the present table between its two marks."""
    measured = measured_in_vllm()
    lines = []
    for line in measured:
        bits = "" if line["bits"] is None else str(line["bits"])
        alone = "" if "not_run" in line else f"{line['transformers_kl']:.2g}"
        if "vllm_kl" in line:
            more = line["vllm_kl"] > _MORE * line["transformers_kl"]
            remark = "loads; more than bfloat16 explains" if more else "loads"
            said = (f"{line['vllm_kl']:.2g}", alone, f"{line['vllm_difference']:.2g}", remark)
        elif "not_run" in line:
            said = ("", alone, "", "not run: a package is not installed")
        else:
            said = ("", alone, "", html.escape(line["refused"], quote=False).replace("|", "\\|"))
        lines.append((f"`{line['method']}`", bits, *said))
    where = ", ".join(f"{name} {version}" for name, version in measured[0]["versions"].items())
    n_tokens = next(line["tokens"] for line in measured if "tokens" in line)
    unit = "KL and the mean difference of a token's log-probability in nats"
    processor = ", ".join(sorted({line.get("processor", "processor not recorded") for line in measured}))
    head = ("method", "bits", "KL(transformers, vLLM)", "KL by bfloat16 alone", "mean difference", "vLLM says")
    table = f"{_table(head, lines)}\n\n{unit}, {n_tokens:,} tokens. {where}, {processor}."
    return _between(text, VLLM_BEGIN, table, VLLM_END)


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    table = (head, ("---",) * len(head), *lines)
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |").replace("|  |", "| |") for line in table)


def _between(text: str, begin: str, table: str, end: str) -> str:
    before, rest = text.split(begin)
    return before + begin + table + end + rest.split(end)[1]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
    VLLM_PAGE.write_text(with_vllm_table(VLLM_PAGE.read_text()))
