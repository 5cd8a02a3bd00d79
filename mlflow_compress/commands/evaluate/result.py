"""What was measured on a variant: every metric with its interval, and the records that it was computed from."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow_compress.commands.shared.tabular import Tabular, lines_of_run, with_labels
from mlflow_compress.decide.gates import standard_gates
from mlflow_compress.errors import ConfigError
from mlflow_compress.metrics.core.metric_registry import METRICS, headline_keys, key
from mlflow_compress.records import MetricResult, RunRecords
from mlflow_compress.reporting.tables import Table
from mlflow_compress.tracking.store import RunLink

if TYPE_CHECKING:
    import pandas as pd

    from mlflow_compress.compression.checkpoint_manifest import CheckpointManifest
    from mlflow_compress.metrics.core.account import Account


class PrintedResult(MetricResult):
    """A metric value that prints in its unit, with its interval and the digits that this supports."""

    def __str__(self) -> str:
        from mlflow_compress.reporting.numbers import number_text, scale_of

        declared = key(self.name)
        text = number_text(self, declared.unit, difference=declared.is_difference)
        return text if scale_of(declared.unit).suffix or declared.unit == "bytes" else f"{text} {declared.unit}"

    def __repr__(self) -> str:
        return f"{self.name}: {self}, n = {self.n}"


@dataclass(frozen=True, kw_only=True)
class Measurement(Tabular):
    """Metric results of one model, and where its records lie."""

    name: str  # The model's short name
    results: tuple[MetricResult, ...]  # Every number: pooled, by task and by category
    not_computed: Mapping[str, str] = field(default_factory=dict)  # Metrics that could not be computed, and why
    records_folder: Path  # The records that the numbers were computed from, as Parquet files
    run: RunLink | None = None  # The run that holds them; None for records that lie in a folder alone

    @property
    def pooled(self) -> dict[str, MetricResult]:
        """The headline results, by metric."""
        from mlflow_compress.metrics.core.metric_inputs import headline

        return headline(self.results)

    @property
    def metrics(self) -> dict[str, float]:
        """The headline values, by metric."""
        return {name: result.value for name, result in self.pooled.items()}

    def __getitem__(self, metric: str) -> PrintedResult:
        """Return a headline result; one that was not computed is a `ConfigError` that says why, where it is known."""
        if metric not in self.pooled:
            declared = key(metric)  # refuses a name that no metric has
            names = [name for name, one in METRICS.items() if declared in one.keys]
            reason = next((self.not_computed[name] for name in names if name in self.not_computed), None)
            raise ConfigError("This metric was not computed", got=metric, fix=reason)
        return PrintedResult(**vars(self.pooled[metric]))

    def records(self) -> RunRecords:
        """Return what the model answered: items, scores, distances and texts, as Arrow tables."""
        return RunRecords.read(self.records_folder)

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        return [asdict(result) for result in self.results]

    def frame_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return one row per metric; those by task and category are in `results`."""
        return with_labels([asdict(result) for result in self.pooled.values()])

    def table(self) -> Table:
        """Return the headline table: the other values are too many for a reader."""
        from mlflow_compress.reporting.headline import headline_rows_table

        table = headline_rows_table(self.pooled, getattr(self, "manifest", None))
        return (table if table.rows else super().table()).filled()

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "results": self.to_rows(),
            "not_computed": dict(self.not_computed),
            "records": str(self.records_folder),
            "run": asdict(self.run) if self.run else None,
        }


@dataclass(frozen=True, kw_only=True)
class GateCheck:
    """Whether a variant passes every gate, and what each of them read."""

    passed: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Evaluation(Measurement):
    """A variant held against its baseline on the same items, or the baseline alone."""

    baseline: str | None = None  # The baseline's short name; None where there is none to compare with
    verdict: str = ""  # What was found, in one sentence
    account: "Account | None" = None  # What was asked, and what became of it; None of records in a folder alone
    manifest: "CheckpointManifest | None" = None  # The variant's manifest; None for a baseline
    baseline_records_folder: Path | None = None  # The baseline's records
    # The run that holds them, and the id that comparable evaluations share
    baseline_run_id: str | None = None
    evaluation_id: str | None = None
    baseline_found: bool = False  # Whether the baseline's records were found in the store, not scored now
    # The run in which the variant's records were found; None where it was scored now
    variant_found_in: str | None = None

    def items(self) -> "pd.DataFrame":
        """Return one row per item, in the order of the records: what was asked, and what both models answered.

        Columns: `task`, `item_id`, `category`, `question`, `prompt` (as both models read it), `options`, `gold` (the
        right option; of a generated answer, those that are accepted), `baseline` and `variant` (the chosen option, or
        the generated text), `baseline_correct` and `variant_correct`, `change` ("c2w" is right to wrong, "w2c" wrong to
        right, "w2w" another wrong answer), `kl` (nats, averaged over the options), `margin_baseline` and
        `margin_variant` (p(best) - p(second best) over the options). What an item does not have is missing: an answer
        without a score is neither right nor wrong.
        """
        import pandas as pd

        from mlflow_compress.metrics.core.metric_inputs import MetricInputs
        from mlflow_compress.reporting.details import items_table

        if self.baseline_records_folder is None:
            raise ConfigError("There is no baseline to compare the items with", got=self.name)
        baseline = RunRecords.read(self.baseline_records_folder)
        return pd.DataFrame(items_table(MetricInputs(baseline=baseline, variant=self.records())))

    def check(self, **bounds: float) -> GateCheck:
        """Return whether the variant is near enough to its baseline, by the gates of a promotion.

        Parameters
        ----------
        **bounds
            `max_kl`, `max_kl_outliers_pct`, `max_flips_pct`, `max_accuracy_drop_pct`: see `decide.standard_gates`.
        """
        from mlflow_compress.config.policy import Requirements
        from mlflow_compress.decide.gates import gate_values
        from mlflow_compress.decide.promotion import lacking_shares

        values = self.metrics | gate_values(self.pooled)
        checks = [check for gate in standard_gates(**bounds) for check in gate.checks(values)]
        shares = {} if self.account is None else self.account.values()
        wrong = lacking_shares(Requirements(), shares) if shares else []
        return GateCheck(
            passed=not wrong and all(check.passed for check in checks), reasons=(*(c.reason for c in checks), *wrong)
        )

    @property
    def summary(self) -> str:
        return self.verdict or f"{self.name}: no baseline to compare with"

    def to_dict(self) -> dict[str, Any]:
        own = ("baseline", "verdict", "evaluation_id", "baseline_run_id")
        account = {} if self.account is None else {"account": self.account.to_dict()}
        return {**super().to_dict(), **{name: getattr(self, name) for name in own}, **account}

    def as_text(self) -> str:
        source = "found in the store" if self.baseline_found else "evaluated now"
        account = [] if self.account is None else [self.account.sentence]
        lines = [self.summary, *account, f"Baseline run {self.baseline_run_id} ({source})."]
        if self.variant_found_in is not None:
            lines.append(f"Records of the variant: found in run {self.variant_found_in}.")
        return "\n".join([*lines, *lines_of_run(self.run)])


@dataclass(frozen=True, kw_only=True)
class AnswerEvaluation(Measurement):
    """What both models answered to the same instructions: how similar, and how good."""

    baseline: str  # The baseline's short name
    skipped: str = ""  # What was left out or found in the store, and why; empty where nothing was
    # Judgments, those without a rating by reason, calls, tokens and cost; empty where no judge model was asked
    account: Mapping[str, float] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        from mlflow_compress.reporting.tables import result_text

        rows = [(key.label, self.pooled[key.name]) for key in headline_keys() if key.name in self.pooled]
        values = "; ".join([*self._judgments, *(f"{label} {result_text(result)}" for label, result in rows)])
        return f"{self.name}: {values or 'nothing was computed'}{f'. {self.skipped}' if self.skipped else ''}"

    @property
    def remark(self) -> str:
        return "; ".join([*self._judgments, *([self.skipped] if self.skipped else [])])

    def to_dict(self) -> dict[str, Any]:
        own = {"baseline": self.baseline, "skipped": self.skipped, "account": dict(self.account)}
        return {**super().to_dict(), **own}

    def as_text(self) -> str:
        from mlflow_compress.reporting.answers_page import account_rows
        from mlflow_compress.reporting.headline import footnotes
        from mlflow_compress.reporting.html import value_table

        lines = [*self._judgments, *(value_table(self.pooled).lines() if self.pooled else [])]
        if any(name.endswith("_delta") for name in self.pooled):
            lines.append("Differences are paired: over the answers that both models have a grade for.")
        lines += footnotes(self.pooled)
        lines += [f"{name}: {text}" for name, text in account_rows(self.account)[len(self._judgments) :]]
        return "\n".join([*lines, *([self.skipped] if self.skipped else []), *lines_of_run(self.run)])

    @property
    def _judgments(self) -> list[str]:
        """How many judgments there are, and how many have no rating, by reason; empty without a judge model."""
        from mlflow_compress.reporting.answers_page import account_rows

        return [f"{name}: {text}" for name, text in account_rows(self.account) if name == "Judgments"]
