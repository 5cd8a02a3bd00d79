"""Files say their format: a newer one is refused by name, an older one is read through the steps between."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mlflow_compress import formats
from mlflow_compress.commands.shared.stored import METRICS_FILE, metrics_file, results_in
from mlflow_compress.compression.checkpoint_manifest import MANIFEST_FILE, MANIFEST_VERSION, CheckpointManifest
from mlflow_compress.config.policy import Policy, policy_of
from mlflow_compress.errors import CheckpointError, ConfigError, DataError, TrackingError
from mlflow_compress.records import Embeddings, MetricResult

RESULTS = [MetricResult("distance/kl_mean", 0.25, 0.125, 0.5, n=7)]


def table() -> Embeddings:
    return Embeddings.from_array("t", ["a", "b"], np.ones((2, 1, 3), dtype=np.float32), encoder="e", encoder_id="0")


@pytest.fixture
def next_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later version: the records have a column that was called otherwise, the results a field that has moved."""
    monkeypatch.setattr(Embeddings, "FORMAT", 2)
    monkeypatch.setattr("mlflow_compress.commands.shared.stored.METRICS_FORMAT", 2)
    before = pa.schema([pa.field("vec" if f.name == "vector" else f.name, f.type) for f in Embeddings.SCHEMA])

    def named_again(stored: pa.Table) -> pa.Table:
        assert stored.schema.names == before.names
        return stored.rename_columns(Embeddings.SCHEMA.names)

    steps = {("embeddings.parquet", 1): named_again, (METRICS_FILE, 1): lambda old: {**old, "results": old["rows"]}}
    monkeypatch.setattr(formats, "STEPS", steps)


def write_first_format(folder: Path) -> None:
    """Write records as a version before `next_format` would have written them."""
    stored = table().table
    stored = stored.rename_columns(["vec" if name == "vector" else name for name in stored.schema.names])
    kept = {"mlflow_compress.rows": "2", "mlflow_compress.format": "1"}
    pq.write_table(stored.replace_schema_metadata(kept), folder / "embeddings.parquet")


@pytest.mark.usefixtures("next_format")
def test_a_file_of_the_format_before_is_read_through_one_step_and_stays_as_it_was(tmp_path: Path) -> None:
    write_first_format(tmp_path)
    before = (tmp_path / "embeddings.parquet").read_bytes()
    assert Embeddings.read(tmp_path).table == table().table
    assert (tmp_path / "embeddings.parquet").read_bytes() == before
    new = metrics_file(RESULTS)
    assert results_in({"format": 1, "rows": new["results"]}, "r") == results_in(new, "r") == RESULTS


def test_an_interruption_within_a_step_loses_nothing(
    tmp_path: Path, next_format: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_first_format(tmp_path)
    steps = dict(formats.STEPS)

    def interrupted(stored: pa.Table) -> pa.Table:
        raise KeyboardInterrupt

    monkeypatch.setitem(formats.STEPS, ("embeddings.parquet", 1), interrupted)
    with pytest.raises(KeyboardInterrupt):
        Embeddings.read(tmp_path)
    monkeypatch.setattr(formats, "STEPS", steps)
    assert Embeddings.read(tmp_path).table == table().table


def test_a_newer_format_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(Embeddings, "FORMAT", 2)
        table().write(tmp_path)
    newer = r"written by a newer version of mlflow-compress.*Allowed: format 1\. Got: 'format 2: .*Install the newer"
    with pytest.raises(DataError, match=rf"embeddings\.parquet was {newer}"):
        Embeddings.read(tmp_path)
    with pytest.raises(TrackingError, match=rf"metrics\.json was {newer}"):
        results_in({**metrics_file(RESULTS), "format": 2}, "r")
    (tmp_path / MANIFEST_FILE).write_text(json.dumps({"version": MANIFEST_VERSION + 1}))
    with pytest.raises(
        CheckpointError, match=rf"{MANIFEST_FILE} was written by a newer version.*format {MANIFEST_VERSION}\."
    ):
        CheckpointManifest.read(tmp_path)


@pytest.mark.parametrize("found", [None, "1", 0, 1.0, True, []])
def test_what_is_no_known_format_is_refused(found: object) -> None:
    with pytest.raises(TrackingError, match=r"metrics\.json has a format that is not read.*Run the stage again"):
        results_in({**metrics_file(RESULTS), "format": found}, "r")


@pytest.mark.parametrize("content", [[], "text", None])
def test_results_of_a_state_before_formats_are_refused(content: object) -> None:
    with pytest.raises(TrackingError, match=r"metrics\.json has a format that is not read"):
        results_in(content, "r")


def test_records_of_another_program_have_no_format(tmp_path: Path) -> None:
    pq.write_table(table().table, tmp_path / "embeddings.parquet")
    assert Embeddings.read(tmp_path).table == table().table


def test_a_policy_says_its_format_and_one_without_has_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"kl": None, "format": 1}
    assert policy_of(first, "here") == policy_of({"kl": None}, "here") == Policy(kl=None)
    with pytest.raises(ConfigError, match=r"The policy was written by a newer version.*Got: 'format 2: here'"):
        policy_of({"kl": None, "format": 2}, "here")
    monkeypatch.setattr("mlflow_compress.config.policy.POLICY_FORMAT", 2)
    monkeypatch.setattr(formats, "STEPS", {("The policy", 1): lambda old: {**old, "margin": 2.0}})
    assert policy_of(first, "here") == Policy(kl=None, margin=2.0)
    assert policy_of({**first, "format": 2}, "here") == Policy(kl=None)
