"""`evaluate` on items that are drawn by the baseline's lead: known probabilities, resumed rounds, all items at last."""

from pathlib import Path

import pytest

import mlflow_compress as mc
from mlflow_compress import demo
from mlflow_compress.commands.evaluate import models
from mlflow_compress.errors import DataError

TASKS = ",".join(str(demo.DATA_DIR / name) for name in ("choice.jsonl", "corpus.txt"))
FEW = {"limit": 8, "num_shuffles": 1, "num_fewshot": 0, "task_args": {"noise_items": 4}, "tasks": TASKS}


@pytest.mark.ci
def test_drawn_items_are_weighted_resumed_and_in_the_end_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "results"
    checkpoint = mc.compress("demo", "rtn", bits=3, store=store).folder
    every = mc.evaluate(checkpoint, store=store, **FEW)  # type: ignore[arg-type]
    n = every["distance/flips_pct"].n
    rounds: list[int] = []
    score = models.BlockScorer._score

    def counted(self: models.BlockScorer, keys: models.ItemKeys, resume: Path) -> object:
        if len(rounds) == 1:
            rounds.append(-1)
            raise KeyboardInterrupt
        rounds.append(len(keys))
        return score(self, keys, resume)

    monkeypatch.setattr(models.BlockScorer, "_score", counted)
    with pytest.raises(KeyboardInterrupt):
        mc.evaluate(checkpoint, store=store, items="40+60", **FEW)  # type: ignore[arg-type]
    found = mc.evaluate(checkpoint, store=store, items="40+60", **FEW)  # type: ignore[arg-type]
    # The first round was kept: in all, every item was scored once.
    assert rounds[1] == -1 and rounds[0] + sum(rounds[2:]) == 60
    assert found["distance/flips_pct"].n == 60 and found.evaluation_id != every.evaluation_id
    draws = found.records().draws
    assert draws is not None and len(draws) == 60 and found.account is not None
    assert f"60 of {n} items drawn by the baseline's lead" in found.account.sentence
    assert found["quality/perplexity"].value == every["quality/perplexity"].value
    assert "every item" in found.not_computed["answer_order"] and len(found.items()) == 60
    # Found again, with what it was computed from.
    again = mc.evaluate(checkpoint, store=store, items="40+60", **FEW)  # type: ignore[arg-type]
    assert again.variant_found_in is not None and again.results == found.results and again.account == found.account
    with pytest.raises(DataError, match="unequal probabilities"):
        mc.compare(str(every.records_folder), str(found.records_folder))
    # All items: the same numbers, as far as rounding lets them be: other batches have other last bits.
    whole = mc.evaluate(checkpoint, store=store, items=10 * n, **FEW)  # type: ignore[arg-type]
    plain = {(r.name, r.task, r.category): (r.value, r.low, r.high, r.n) for r in every.results}
    drawn = {(r.name, r.task, r.category): (r.value, r.low, r.high, r.n) for r in whole.results}
    assert len(drawn) > 50 and drawn.keys() <= plain.keys()
    for place, numbers in drawn.items():
        for number, other in zip(numbers, plain[place], strict=True):
            assert (number is None) == (other is None) and (number or 0) == pytest.approx(other or 0, 1e-4, 1e-6), place
