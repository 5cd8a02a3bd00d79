"""Run as a module by `test_scoring_rounding`, at one level of MKL's and PyTorch's instructions each.

Prints one line of JSON: for each promise that bits are equal wherever numbers lie in memory, how often it was broken;
and under "bare", how often the same products are broken without our alignment, which says what this processor can show.
"""

import copy
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mlflow_compress.models.loading import LoadedModel
from mlflow_compress.records import RunRecords
from mlflow_compress.scoring.baseline_store import StateStore, StateWriter
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from mlflow_compress.scoring.forward.head import rebuild_head
from tests.unit.scoring_models import CONFIGS, TEXT, load_random, mixed_requests

PLACES = range(16)  # where a float32 may begin in the 64 bytes of a cache line
CONFIG = ScoringConfig(progress=False, batch_tokens=64, head_rows=3)  # products of one, two and three rows occur


def moved(tensor: torch.Tensor, place: int) -> torch.Tensor:
    """Return a copy that begins `place` numbers behind a multiple of 64 bytes."""
    room = torch.empty(tensor.numel() + 32, dtype=tensor.dtype)
    begin = (-room.data_ptr() % 64) // 4 + place
    copied = room[begin : begin + tensor.numel()].view(tensor.shape)
    assert copied.copy_(tensor).data_ptr() % 64 == 4 * place
    return copied


def moved_model(loaded: LoadedModel, place: int) -> LoadedModel:
    """Return the same model with every weight at another place, as one that is mapped from a file may lie."""
    model = copy.deepcopy(loaded.model)
    for parameter in model.parameters():
        parameter.data = moved(parameter.data, place)
    return LoadedModel(model, loaded.tokenizer, loaded.path, loaded.dtype, loaded.device)


def products() -> dict[str, int]:
    """Multiply few rows by a head, from all places of states and weights."""
    broken = {"head": 0, "bare": 0}
    for hidden in (48, 64, 172):
        config = CONFIGS["llama"]()
        config.hidden_size, config.vocab_size = hidden, 300
        settings = {"model_type": "llama", **config.to_diff_dict()}
        weight = torch.randn(300, hidden, generator=torch.Generator().manual_seed(hidden))
        heads = [rebuild_head(settings, {"weight": moved(weight, place)}) for place in PLACES]
        for n in (*range(1, 9), 16):
            states = torch.randn(n, hidden, generator=torch.Generator().manual_seed(n))
            wanted, bare = heads[0].logits(states).clone(), states @ weight.T
            for place in PLACES:
                there = moved(states, place)
                broken["head"] += not torch.equal(heads[place].logits(states), wanted)
                broken["head"] += not torch.equal(heads[0].logits(there), wanted)
                broken["bare"] += not torch.equal(states @ moved(weight, place).T, bare)
                broken["bare"] += not torch.equal(there @ weight.T, bare)
    return broken


def score(loaded: LoadedModel, **how: Any) -> RunRecords:
    scorer = Scorer(loaded, CONFIG)
    scores, distances = scorer.score(mixed_requests(), **how)
    tokens, apart = scorer.score_corpus("documents", [TEXT, TEXT[7:], TEXT[:90]], **how)
    return RunRecords(option_scores=scores, option_distances=distances, token_scores=tokens, token_distances=apart)


def same(one: RunRecords, other: RunRecords) -> bool:
    return all(
        getattr(one, kind).table.equals(getattr(other, kind).table)
        for kind in ("option_scores", "option_distances", "token_scores", "token_distances")
        if getattr(one, kind) is not None
    )


def shifted(read: Callable[..., dict[str, torch.Tensor]], place: int) -> Callable[..., dict[str, torch.Tensor]]:
    """Return a reader of store files that leaves float32 tensors at another place."""

    def here(*args: Any) -> dict[str, torch.Tensor]:
        return {k: moved(v, place) if v.dtype == torch.float32 else v for k, v in read(*args).items()}

    return here


def distances_from_store(folder: Path) -> dict[str, int]:
    """Compare a model with its own store, and a variant with it, wherever weights, states and head lie."""
    base, variant = load_random("llama"), load_random("llama", seed=1)
    object.__setattr__(base, "weights", "not read")  # a random model has no file to hash
    with StateWriter(folder, base, shard_bytes=3000) as writer:
        now = score(base, capture=writer)
    wanted = score(variant, baseline=StateStore.open(folder))
    broken = {"own store": 0, "records": 0, "variant": 0}
    for place in (0, 1, 2, 3, 5, 9, 14):
        store = StateStore.open(folder)
        store._read = shifted(store._read, place)  # type: ignore[method-assign]
        again = score(moved_model(base, place), baseline=store)
        for found in (again.option_distances, again.token_distances):
            broken["own store"] += int((found.column("kl") != 0.0).sum())
        broken["records"] += not same(now, again)
        broken["variant"] += not same(wanted, score(moved_model(variant, place), baseline=store))
    return broken


def main() -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = {**products(), **distances_from_store(Path(folder))}
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
