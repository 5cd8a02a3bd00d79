"""Two receipts side by side, of different people too: where the evaluation id of both is the same."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlflow_compress.commands.receipt.result import ReceiptComparison
from mlflow_compress.commands.receipt.run import NOT_IN_THE_ID, records_of_receipt, verify_receipt
from mlflow_compress.decide.separation import by_document, item_scores, separate
from mlflow_compress.errors import AlignmentError, DataError


def compare_two(first: Path, second: Path, key: Path | None, other_key: Path | None) -> ReceiptComparison:
    """Check both receipts, and return their figures side by side, paired by item where both hold the records."""
    receipts = [verify_receipt(path, by, recompute=None) for path, by in ((first, key), (second, other_key))]
    a, b = (receipt.stated for receipt in receipts)
    if a["evaluation_id"] != b["evaluation_id"]:
        told = (
            "; ".join(_differences(a["environment"], b["environment"]))
            or "the same environment, but the items were drawn in another way"
        )
        raise AlignmentError(
            f"These receipts are not comparable: {told}",
            allowed="two receipts with one evaluation id",
            got=f"{a['evaluation_id']} and {b['evaluation_id']}",
            fix="Evaluate both variants with the same baseline, tasks, settings and versions",
        )
    pair = documents = None
    if all(receipt.with_records for receipt in receipts):
        records = [records_of_receipt(receipt) for receipt in receipts]
        documents = by_document(*records)
        with suppress(DataError):  # evaluations of running text alone have no items
            [pair] = separate(list(zip("AB", map(item_scores, records), strict=True)))
    return ReceiptComparison(
        first=receipts[0], second=receipts[1], paired=pair, documents=documents, remarks=tuple(_remarks(a, b))
    )


def _differences(a: Mapping[str, Any], b: Mapping[str, Any], under: str = "") -> Iterator[str]:
    """Yield what differs between two environments, by its name."""
    for name in sorted(a.keys() | b.keys()):
        one, other = a.get(name), b.get(name)
        if one == other or (not under and name in NOT_IN_THE_ID):
            continue
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _differences(one, other, f"{under}{name} ")
        else:
            yield f"{under}{name} is {_short(one)} in A and {_short(other)} in B"


def _short(value: Any) -> str:
    text = "missing" if value is None else str(value)
    return text if len(text) <= 20 else f"{text[:12]}…"


def _remarks(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """Yield what does not forbid a comparison, but should be known."""
    yield from (
        f"Numbers may differ in rounding: {told}"
        for told in _differences(*(one["environment"].get("rounding", {}) for one in (a, b)))
    )
    if a["policy"] != b["policy"]:
        yield "The gates are of two policies: whether they are kept is not comparable."
