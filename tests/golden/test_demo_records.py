"""The demo's records belong to one `SCORING_VERSION`: where they move, the version is raised.

`demo_records.json` holds, at full precision, the records of the first items of every demo task: of the demo, and of the
demo with its weights rounded to 4 bits, compared with the demo's states. Its first entry is the version that wrote it.
On another machine the last bits differ, by no more than float32 explains (`allowed`). After a change that moves numbers on purpose,
raise `engine_identity.SCORING_VERSION` and write the file again: ``python -m tests.golden.test_demo_records``.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mlflow_compress import demo
from mlflow_compress.commands.evaluate.items import suite_of
from mlflow_compress.commands.evaluate.outputs import run_model
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model
from mlflow_compress.records import RunRecords
from mlflow_compress.scoring.baseline_store import StateStore, StateWriter
from mlflow_compress.scoring.engine import Scorer
from mlflow_compress.scoring.engine_identity import SCORING_VERSION
from tests.unit.scoring_models import rounding
from tests.unit.test_scoring_kernel_bounds import POLYNOMIAL, RUN, U

STORED = Path(__file__).parent / "demo_records.json"
TABLES = ("items", "option_scores", "option_distances", "token_scores", "token_distances", "generations")
TOKENS = 40  # of each corpus that are compared, from every tenth position


def records_of(model: LoadedModel, folder: Path, baseline: StateStore | None = None) -> RunRecords:
    suite = suite_of(EvaluateConfig.model_validate({"checkpoint": "none", "limit": 2}))
    suite = replace(suite, corpora=tuple(replace(corpus, max_tokens=1024) for corpus in suite.corpora))  # two windows
    if baseline is not None:
        return run_model(Scorer(model), suite, baseline=baseline).records
    with StateWriter(folder, model) as writer:
        return run_model(Scorer(model), suite, capture=writer).records


def rounded(model: LoadedModel) -> LoadedModel:
    """Round every matrix to 15 levels per row, in place, so that no quantizer of ours is part of the numbers."""
    with torch.no_grad():
        for weight in model.model.model.layers.parameters():
            if weight.ndim == 2:
                step = weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-9) / 7
                weight.copy_((weight / step).round() * step)
    return model


def columns(records: RunRecords) -> dict[str, dict[str, list[Any]]]:
    tables = {name: getattr(records, name) for name in TABLES}
    found = {name: table.table.to_pydict() for name, table in tables.items() if table is not None}
    for name in ("token_scores", "token_distances"):
        if name in found:
            found[name] = {column: values[: 10 * TOKENS : 10] for column, values in found[name].items()}
    return found


def now(folder: Path) -> dict[str, Any]:
    model = load_model(LoadConfig(path=str(demo.MODEL_DIR), dtype="float32", device="cpu"))
    first = columns(records_of(model, folder))
    states = StateStore.open(folder, baseline=model)
    return {"baseline": first, "variant": columns(records_of(rounded(model), folder, states))}


def allowed(column: str, row: Mapping[str, Any]) -> float:
    """Return what a value moves by where every ln p and ln q moves by at most one nat, to the first order.

    Then dp <= p and d(ln p - ln q) <= 2. KL is sum p (e^d - 1 - d) with d = ln q - ln p, whose derivative by d is q - p.
    JS moves by half of sum p |ln p/m| and of sum q |ln q/m|, where sum p |ln p/m| <= KL(p, m) + 2 TV(p, m). Entropy
    moves by sum dp ln p. Shares of equal ranks do not move: a step would be a tenth of a token.
    """
    if column in ("loglik", "nll", "tv"):
        return float(row.get("n_tokens", 1))
    if column in ("p_target", "entropy"):
        return float(row[column])
    if column in ("kl", "kl_reverse"):
        return float(4 * row["tv"] + row[column])
    return float(row["js"] + row["tv"]) if column == "js" else 0.0


def differences(before: Mapping[str, Any], after: Mapping[str, Any], nats: float) -> list[str]:
    """Return every place where two tables of columns differ beyond what log-probabilities do that moved by `nats`."""
    if before.keys() != after.keys():
        return [f"{sorted(before.keys() ^ after.keys())}"]
    wrong = []
    for column, values in before.items():
        if len(values) != len(after[column]):
            wrong.append(f"{column}: {len(values)} rows, now {len(after[column])}")
            continue
        for row, (value, now) in enumerate(zip(values, after[column], strict=True)):
            if isinstance(value, float):
                most = nats * allowed(column, {name: x[row] for name, x in before.items()})
                if column == "entropy":  # ln total - sum e^z z / total: however small, with the errors of two sums
                    most += 2 * (RUN**0.5 * U + POLYNOMIAL) * (1 + 2 * value)  # each, on either side; see `rounding_of`
                same = now == pytest.approx(value, abs=most or None)
            else:
                same = now == value
            if not same:
                wrong.append(f"{column}[{row}]: {value}, now {now}")
    return wrong


def moved_since(stored: Any, found: Any) -> list[str]:
    """Return every place where the records of two versions differ beyond the rounding of both."""
    model = load_model(LoadConfig(path=str(demo.MODEL_DIR), dtype="float32", device="cpu"))
    nats = 2 * max(rounding(model), rounding(rounded(model)))
    assert {side: tables.keys() for side, tables in found.items()} == {side: x.keys() for side, x in stored.items()}
    return [
        f"{side}/{table}/{line}"
        for side, tables in stored.items()
        for table, columns in tables.items()
        for line in differences(columns, found[side][table], nats)
    ]


def test_records_move_with_the_scoring_version_alone(tmp_path: Path) -> None:
    stored = json.loads(STORED.read_text())
    moved = moved_since(stored["records"], json.loads(json.dumps(now(tmp_path))))
    assert not moved, "\n".join(
        ["The demo's records moved. If that is wanted, raise SCORING_VERSION and write them again:", *moved[:20]]
    )
    assert stored["scoring_version"] == SCORING_VERSION, "Write demo_records.json again with the raised version"


def test_a_number_and_a_column_that_moved_are_named() -> None:
    before = {"loglik": [-1.0, -2.0]}
    assert differences(before, {"loglik": [-1.0, -2.0001]}, nats=1e-3) == []
    assert differences(before, {"loglik": [-1.0, -2.1]}, nats=1e-3) == ["loglik[1]: -2.0, now -2.1"]
    assert differences(before, {"loglik": [-1.0, -2.0], "k": [1, 1]}, nats=1e-3) == ["['k']"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        found = now(Path(scratch))
    if STORED.is_file():
        earlier = json.loads(STORED.read_text())
        if earlier["scoring_version"] == SCORING_VERSION and moved_since(earlier["records"], found):
            raise SystemExit(f"The records moved: raise SCORING_VERSION above {SCORING_VERSION} first")
    STORED.write_text(json.dumps({"scoring_version": SCORING_VERSION, "records": found}) + "\n")
