"""Equal numbers give equal bits wherever they lie in memory, at every level of instructions that this machine has."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from mlflow_compress.commands.evaluate import baseline
from mlflow_compress.commands.evaluate.items import suite_of
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.shared.get_or_create import digest
from mlflow_compress.engines.local import LocalModel
from mlflow_compress.models.loading import LoadConfig, load_model, open_light
from mlflow_compress.models.memory_alignment import ALIGNMENT, align_weights, aligned, rounding_identity
from mlflow_compress.scoring.baseline_store import StateStore, StateWriter, _find_sequence
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from tests.unit.scoring_levels import PLACES, moved
from tests.unit.scoring_models import TEXT, load_random, mixed_requests

ROOT = Path(__file__).parents[2]
# Of MKL and of PyTorch; a higher one than the processor's would be an illegal instruction.
LEVELS = {"DEFAULT": ("SSE4_2", "default"), "AVX2": ("AVX2", "avx2"), "AVX512": ("AVX512", "avx512")}
CAPABILITY = torch.backends.cpu.get_cpu_capability()
HERE = list(LEVELS)[: list(LEVELS).index(CAPABILITY) + 1] if CAPABILITY in LEVELS else ["DEFAULT"]


@pytest.mark.ci
@pytest.mark.parametrize("level", HERE)
def test_bits_do_not_depend_on_where_numbers_lie(level: str) -> None:
    mkl, aten = LEVELS[level]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.unit.scoring_levels"],
        cwd=ROOT,
        env={**os.environ, "MKL_ENABLE_INSTRUCTIONS": mkl, "ATEN_CPU_CAPABILITY": aten, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    broken = json.loads(done.stdout.splitlines()[-1])
    # "bare" counts the products that differ without alignment: which levels show it depends on the processor's maker
    # (36 at SSE4_2 and none above on an Intel Xeon; AVX-512 showed it on an AMD EPYC).
    assert broken.pop("bare") >= 0
    assert broken == {"head": 0, "own store": 0, "records": 0, "variant": 0}


def test_every_place_is_aligned_by_a_copy() -> None:
    numbers = torch.randn(3, 64)
    for place in PLACES:
        there = moved(numbers, place)
        found = aligned(there)
        assert found.data_ptr() % ALIGNMENT == 0 and torch.equal(found, numbers)
        assert (found is there) == (place == 0)  # nothing is copied that lies right
    across = numbers.T
    assert aligned(across).is_contiguous() and torch.equal(aligned(across), across)


def test_the_weights_of_a_model_are_aligned_and_stay_tied() -> None:
    model = load_random("gpt2").model
    tied = model.lm_head.weight
    assert tied is model.transformer.wte.weight
    for parameter in model.parameters():
        parameter.data = moved(parameter.data, 3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    align_weights(model)
    assert all(p.data_ptr() % ALIGNMENT == 0 for p in model.parameters())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert model.lm_head.weight is tied is model.transformer.wte.weight


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
def test_a_model_from_a_file_is_aligned(dtype: str, tmp_path: Path) -> None:
    load_random("qwen2", path=tmp_path)
    loaded = load_model(LoadConfig(path=str(tmp_path), dtype=dtype, device="cpu"))
    assert {p.data_ptr() % ALIGNMENT for p in loaded.model.parameters()} == {0}


def test_a_run_of_keys_is_found_where_it_stands_whole() -> None:
    every = np.zeros((60, 16), np.uint8)
    every[:, 0] = [*range(20), *range(20), *range(5, 25)]
    assert _find_sequence(every, every[3:9]) == 3
    assert _find_sequence(every, every[41:60]) == 41  # its beginning stands at 6 and 26 too
    assert _find_sequence(every, every[[4, 3]]) is None
    assert _find_sequence(every[:3], every) is None
    assert _find_sequence(every, every[:0]) is None


def test_documents_that_begin_alike_meet_their_own_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Their first tokens are scored in several batches, of other lengths, where the states may differ in the last bits.
    loaded = load_random("llama", path=tmp_path / "model")
    config = ScoringConfig(progress=False, batch_tokens=256)
    texts = [TEXT[:40], TEXT[:120], TEXT, TEXT[:60] * 4]
    passes = {"short first": texts, "long first": texts[::-1]}
    with StateWriter(tmp_path / "store", loaded) as writer:
        for name, documents in passes.items():
            Scorer(loaded, config).score_corpus(name, documents, capture=writer)
    found = []
    find = StateStore.rows_of
    monkeypatch.setattr(StateStore, "rows_of", lambda self, keys: found.append(find(self, keys)) or found[-1])
    store = StateStore.open(tmp_path / "store")
    for name, documents in passes.items():
        _, apart = Scorer(loaded, config).score_corpus(name, documents, baseline=store)
        assert apart is not None and (apart.column("kl") == 0.0).all()
    assert np.array_equal(np.concatenate(found), np.arange(store.n_rows))  # each row is compared with itself


def test_a_baseline_of_other_threads_is_said_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load_random("llama", path=tmp_path / "model")
    config, requests = ScoringConfig(progress=False), mixed_requests()[:8]
    with StateWriter(tmp_path / "store", loaded) as writer:
        Scorer(loaded, config).score(requests, capture=writer)
    store = StateStore.open(tmp_path / "store")
    assert store.manifest.rounding == rounding_identity(loaded.device)
    assert store.manifest.rounding["threads"] == str(torch.get_num_threads())
    scorer = Scorer(loaded, config)
    scorer.score(requests, baseline=store)
    assert scorer.report is not None and scorer.report.same_rounding_as_baseline
    assert "computed otherwise" not in caplog.text
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    scorer.score(requests, baseline=store)
    assert not scorer.report.same_rounding_as_baseline
    assert f"computed otherwise (threads {threads} -> 99): results differ by rounding" in caplog.text


def test_a_baseline_of_other_threads_is_not_reused_but_stays_comparable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_random("llama", path=tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT * 20)
    config = EvaluateConfig(model=str(tmp_path / "model"), tasks=str(tmp_path / "text.txt"))
    light, suite = LocalModel.of(open_light(LoadConfig(path=config.source.model, device="cpu"))), suite_of(config)
    asked = []

    def find(*given: Any, **_: Any) -> None:
        asked.append(given[3])
        raise InterruptedError

    monkeypatch.setattr(baseline, "get_or_create_run", find)
    for threads in (1, 2, 1):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        with pytest.raises(InterruptedError):
            baseline.find_or_evaluate(cast(Any, None), light, suite, config)
    assert digest(asked[0]) == digest(asked[2]) != digest(asked[1])
    assert {k: v for k, v in asked[0].items() if k != "rounding"} == {
        k: v for k, v in asked[1].items() if k != "rounding"
    }
