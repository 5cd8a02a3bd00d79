"""What happens when a model is scored: noise on its logits, rounding of its cache; the weights are the base's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mlflow_compress.compression import compress_model, method_config
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.models import architectures, stored_weights
from mlflow_compress.models.architectures.own_formats import add_noise, quantize_cache, rounded_cache
from mlflow_compress.models.loading import LoadConfig, load_model
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from tests.compress_models import TEXT, logits, mean_kl, token_rows
from tests.unit.scoring_models import mixed_requests, naive_logliks, rounding_of

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("no_fresh_process")]


def load(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, **architectures.loading_options(folder)
    ).eval()


def test_noise_has_the_size_asked_for_and_belongs_to_the_text(base: Path, tmp_path: Path) -> None:
    compress_model(
        str(base), "gaussian-noise", method_config("gaussian-noise", scale=0.3, seed=5), [], tmp_path / "out"
    )
    assert stored_weights.hash_weights(tmp_path / "out") == stored_weights.hash_weights(
        base
    )  # the weights are the base's
    ids = token_rows(base, TEXT[0] + "x", rows=8, length=64)[:, :40]
    ids[:, 0] = torch.arange(8)  # eight different texts
    noise = logits(tmp_path / "out", ids) - logits(base, ids)
    n = noise.numel()
    assert abs(float(noise.mean())) < 5 * 0.3 / n**0.5 and float(noise.std()) == pytest.approx(0.3, rel=5 / n**0.5)
    rows = noise.flatten(0, 1)
    correlation = torch.corrcoef(rows) - torch.eye(len(rows))
    assert float(correlation.abs().max()) < 0.75  # 64 logits a row: no two positions share their noise
    model = load(tmp_path / "out")
    with torch.inference_mode():
        alone = model(input_ids=ids[3:4, :20]).logits
    there = logits(tmp_path / "out", ids)[3, 19]  # in the longer batch
    assert (alone[0, -1] - there).abs().max() <= 2 * rounding_of(load(base), ids[3:4, :20])  # both are rounded


def test_the_divergence_of_a_scored_run_is_the_controls(base: Path) -> None:
    ids = token_rows(base, TEXT[0], rows=8, length=64)
    ids[:, 0] = torch.arange(8)
    model = load(base)
    with torch.inference_mode():
        plain = model(input_ids=ids).logits
        add_noise(model, 0.5, 0)
        noisy = model(input_ids=ids).logits
    # The control itself, with noise of another seed: KL(P || softmax(ln P + e)) = ln sum P e^e - sum P e.
    log_p = torch.log_softmax(plain.double(), -1).flatten(0, 1)
    noise = 0.5 * torch.randn(log_p.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    normaliser = torch.logsumexp(log_p + noise, -1)
    expected = float((normaliser - (log_p.exp() * noise).sum(-1)).mean())
    assert mean_kl(plain, noisy) == pytest.approx(expected, rel=0.05)
    # Table 19 (METRICS section 3). Targets drawn from the baseline: the nll rises by the KL, and without
    # renormalisation it stays, both within the spread of the noise at the targets.
    targets = torch.multinomial(log_p.exp(), 1, generator=torch.Generator().manual_seed(2))
    at_target = noise.gather(1, targets)[:, 0]
    spread = 4 * 0.5 / len(log_p) ** 0.5
    assert abs(float(at_target.mean())) < spread
    assert float((normaliser - at_target).mean()) == pytest.approx(expected, abs=spread)


@pytest.mark.parametrize("method", ["gaussian-noise", "kv-cache"])
def test_the_engine_scores_what_the_model_gives(method: str, base: Path, tmp_path: Path) -> None:
    compress_model(str(base), method, method_config(method), [], tmp_path / "out")
    requests = mixed_requests()[:12]
    scores = {}
    for folder in (base, tmp_path / "out"):
        loaded = load_model(LoadConfig(path=str(folder), device="cpu"))
        scores[folder] = Scorer(loaded, ScoringConfig(progress=False)).score(requests)[0].column("loglik")
    found, wanted = scores[tmp_path / "out"], naive_logliks(loaded, requests)
    # The naive pass is in float64: a number at the edge between two steps of the cache may fall on the other side.
    assert np.abs(found - wanted).max() < 0.05 and np.median(np.abs(found - wanted)) < 1e-3
    assert np.abs(scores[base] - found).max() > 0.1


def test_a_vector_is_rounded_to_the_grid_between_its_extremes() -> None:
    vector = torch.tensor([[[[0.0, 1.2, 2.2, 3.0, -1.0, -1.0, -1.0, -1.0]]]])
    # Group 1: steps of (3 - 0) / 3; group 2 is constant and comes back.
    assert rounded_cache(vector, 2, 4).flatten().tolist() == [0.0, 1.0, 2.0, 3.0, -1.0, -1.0, -1.0, -1.0]
    # One group: from -1 to 3 in steps of 4 / 3.
    assert rounded_cache(vector, 2, 8).flatten()[:4].tolist() == pytest.approx([1 / 3, 5 / 3, 5 / 3, 3.0])


def test_fewer_bits_in_the_cache_lie_farther(base: Path) -> None:
    ids = token_rows(base, TEXT[0], rows=4, length=64)
    plain, distances = logits(base, ids), []
    for bits in (8, 4, 3, 2):
        model = load(base)
        quantize_cache(model, bits, 16)
        with torch.inference_mode():
            distances.append(mean_kl(plain, model(input_ids=ids).logits))
    assert 0 < distances[0] < 1e-4 and distances == sorted(distances)


def test_a_whole_text_is_scored_as_if_decoded_token_by_token(base: Path) -> None:
    model = load(base)
    quantize_cache(model, 4, 16)
    ids = token_rows(base, TEXT[0], rows=1, length=24)
    with torch.inference_mode():
        whole, cache, steps = model(input_ids=ids).logits, None, []
        for position in range(24):
            out = model(input_ids=ids[:, position : position + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits[:, 0])
    assert (whole - torch.stack(steps, 1)).abs().max() <= 2 * rounding_of(load(base), ids)  # both are rounded


def test_what_cannot_be_done_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'scale' is too small.*more than 0"):
        method_config("gaussian-noise", scale=0.0)
    with pytest.raises(UnsupportedError, match=r"cache_bits.*8, 4, 3, 2.*Got: 5"):
        method_config("kv-cache", cache_bits=5)
    with pytest.raises(UnsupportedError, match=r"a divisor of 16, or 'head'"):
        compress_model(str(base), "kv-cache", method_config("kv-cache", cache_group=32), [], tmp_path / "out")
    eager = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    with pytest.raises(UnsupportedError, match=r"sdpa attention.*LlamaForCausalLM, eager"):
        quantize_cache(eager, 4, 16)
