"""Records: schemas, Parquet round trip, alignment by key, registry look-ups."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlflow_compress.errors import AlignmentError, ConfigError, DataError
from mlflow_compress.records import OptionScores, RunRecords, align
from mlflow_compress.registry import Registry


def scores(ids: list[str]) -> OptionScores:
    base: dict[str, Any] = {"task": "t", "permutation": 0, "option": 0, "content": 0, "loglik": -1.5}
    rest = {"n_tokens": 1, "n_chars": 1, "n_bytes": 1, "greedy": True}
    return OptionScores.from_rows([{**base, **rest, "item_id": i} for i in ids])


def test_parquet_round_trip(tmp_path: Path) -> None:
    records = RunRecords(option_scores=scores(["a", "b"]))
    written = records.write(tmp_path)
    assert [p.name for p in written] == ["option_scores.parquet"]
    assert RunRecords.read(tmp_path).option_scores == records.option_scores
    assert not list(tmp_path.glob("*.partial"))


def test_align_puts_the_variant_in_the_order_of_the_baseline() -> None:
    assert align(scores(["a", "b", "c"]), scores(["c", "a", "b"])).tolist() == [1, 2, 0]


def test_align_names_what_is_missing() -> None:
    with pytest.raises(AlignmentError, match=r"1 only in the baseline \[\('t', 'b', 0, 0\)\], 1 only in the variant"):
        align(scores(["a", "b"]), scores(["a", "x"]))


@pytest.mark.parametrize("twice", [0, 1])
def test_align_refuses_duplicates(twice: int) -> None:
    pair = [scores(["a", "b"]), scores(["a", "b"])]
    pair[twice] = scores(["a", "a"])
    with pytest.raises(AlignmentError, match="Duplicate"):
        align(*pair)


def test_missing_broken_and_foreign_files_are_data_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No option_scores records"):
        OptionScores.read(tmp_path)
    with pytest.raises(DataError, match="No records in the folder"):
        RunRecords.read(tmp_path)
    (tmp_path / "option_scores.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match="cannot be read"):
        OptionScores.read(tmp_path)


def test_columns_are_checked() -> None:
    with pytest.raises(DataError, match="lack columns"):
        OptionScores.from_columns({"task": ["t"]})


def test_where_takes_a_value_or_several() -> None:
    found = scores(["a", "b", "c"])
    assert found.where(item_id="b").column("item_id").tolist() == ["b"]
    assert found.where(item_id=["a", "c"]).column("item_id").tolist() == ["a", "c"]
    assert len(found.where(permutation=np.int16(3))) == 0


def test_registry_names_the_nearest_and_refuses_doubles() -> None:
    registry: Registry[int] = Registry("thing", "mlflow_compress.items")
    registry.register("alpha")(1)
    assert registry.get("alpha") == 1
    with pytest.raises(ConfigError, match=r"Unknown thing. Allowed: alpha. Got: 'alhpa'. Did you mean 'alpha'\?"):
        registry.get("alhpa")
    with pytest.raises(ValueError, match="twice"):
        registry.register("alpha")(2)


# 0.0213 +- 0.002: two digits of the half-width are 0.0020, so four decimals; without an interval six digits.
