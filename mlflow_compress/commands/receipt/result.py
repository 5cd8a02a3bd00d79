"""A receipt: what was measured under which conditions, and what vouches for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow_compress.commands.shared.stored import results_from_json
from mlflow_compress.commands.shared.tabular import Tabular
from mlflow_compress.decide.separation import Difference, DocumentsTest, Separation
from mlflow_compress.metrics.core.metric_inputs import headline
from mlflow_compress.metrics.core.metric_registry import all_keys
from mlflow_compress.records import MetricResult
from mlflow_compress.reporting.numbers import NATS, SHARE, Scale, interval_text
from mlflow_compress.reporting.tables import Column, Table


@dataclass(frozen=True, kw_only=True)
class Receipt(Tabular):
    """What a receipt states, and how it was signed and checked."""

    path: Path
    sha256: str  # Of the file
    statement: Mapping[str, Any]  # The in-toto statement
    signed_by: str | None  # SHA-256 of the public key; None of an unsigned receipt
    with_records: bool
    recomputed: int | None = None  # Number of figures that were computed again; None where that was not asked for
    written: tuple[Path, ...] = ()  # By `card` and `hub-folder`
    remarks: tuple[str, ...] = ()  # What `hub-folder` could not say in the card

    @property
    def stated(self) -> Any:
        return self.statement["predicate"]

    @property
    def summary(self) -> str:
        verdict, kept = self.stated["verdict"].rstrip("."), "kept" if self.stated["gates"]["passed"] else "not kept"
        return f"{verdict}. The policy's gates are {kept}."

    @property
    def vouched(self) -> str:
        if self.signed_by is None:
            return "Unsigned: it reveals damage, but anybody could have written it."
        return f"Signed with the key {self.signed_by}."

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        return self.stated["figures"]  # type: ignore[no-any-return]

    def as_text(self) -> str:
        digests = "" if self.with_records else " (their digests alone)"
        lines = [
            self.summary,
            *(f"  {reason}" for reason in self.stated["gates"]["reasons"]),
            f"Evaluation {self.stated['evaluation_id']}, {len(self.to_rows())} figures.",
            f"Receipt {self.path}, SHA-256 {self.sha256}.",
            f"{len(self.statement['subject'])} files of records{digests}.",
            self.vouched,
        ]
        again = [] if self.recomputed is None else [f"{self.recomputed} figures were recomputed and are equal."]
        return "\n".join(
            [*lines, *again, *(f"Wrote {path}." for path in self.written), *(f"{one}." for one in self.remarks)]
        )


@dataclass(frozen=True, kw_only=True)
class ReceiptComparison(Tabular):
    """Two receipts of one evaluation, side by side."""

    first: Receipt
    second: Receipt
    # B minus A, paired by item; None where a receipt holds no records. `p_holm` is corrected over the two tests.
    paired: Separation | None
    documents: DocumentsTest | None  # Of running text; None where a receipt holds no records of any
    remarks: Sequence[str]  # What does not forbid the comparison, but should be known

    @property
    def summary(self) -> str:
        if self.paired is None:
            return "Not paired: a receipt holds no records of items. Compare the intervals."
        tests = {"KL": self.paired.kl, "accuracy": self.paired.correctness}
        apart = [name for name, test in tests.items() if test is not None and test.significant]
        told = f"told apart by their {' and '.join(apart)}" if apart else "not told apart"
        return f"A and B are {told}."

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return one row per pooled figure that both have."""
        a, b = self._figures()
        names = ("value", "low", "high", "n")
        return [
            {"name": name}
            | {f"{side}_{one}": getattr(part[name], one) for side, part in (("a", a), ("b", b)) for one in names}
            for name in a
            if name in b
        ]

    def table(self) -> Table:
        """Return the figures of both that have a label."""
        a, b = self._figures()
        labels = {name: key.label for name, key in all_keys().items() if key.label and name in a and name in b}
        sides = [f"{side}: {one.stated['variant']}" for side, one in (("A", self.first), ("B", self.second))]
        return Table(
            columns=[Column("metric", left=True), *(Column(side, left=True) for side in sides)],
            rows=[(label, a[name], b[name]) for name, label in labels.items()],
        )

    def as_text(self) -> str:
        receipts = (("A", self.first), ("B", self.second))
        verdicts = [f"{side}: {one.summary}" for side, one in receipts]
        signed = [f"{side}: {one.path}. {one.vouched}" for side, one in receipts]
        pair = self.paired
        tests = [] if pair is None else [_test("KL", pair.kl, NATS), _test("Accuracy", pair.correctness, SHARE)]
        if (texts := self.documents) is not None:
            tests.append(
                f"Running text, by document: A is nearer to the baseline on {texts.first:,}, B on {texts.second:,}"
                f"{f', neither on {texts.equal:,}' if texts.equal else ''}, p = {texts.p:.2g} (exact sign test)."
            )
        return "\n".join([*verdicts, "", *self.table().lines(), "", *tests, self.summary, *self.remarks, *signed])

    def _figures(self) -> list[dict[str, MetricResult]]:
        return [dict(headline(results_from_json(one.stated["figures"]))) for one in (self.first, self.second)]


def _test(what: str, difference: Difference | None, scale: Scale) -> str:
    if difference is None:
        return f"{what}, B minus A: not tested (too few items or groups)."
    result = MetricResult(what, difference.value, difference.low, difference.high)
    shown = interval_text(result, scale, difference=True)
    return f"{what}, B minus A: {shown} over {difference.n:,} items in common, p = {difference.p_holm:.2g}."
