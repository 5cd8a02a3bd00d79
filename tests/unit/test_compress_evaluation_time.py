"""What happens when a model is scored: noise on its logits; the weights are the base's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mlflow_compress.compression import compress_model, method_config
from mlflow_compress.errors import ConfigError
from mlflow_compress.models import architectures, stored_weights
from mlflow_compress.models.architectures.own_formats import add_noise
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


@pytest.mark.parametrize(
    ("method", "settings", "moves"),
    [
        ("gaussian-noise", {}, 0.1),
        ("kv-cache", {}, 0.1),
        ("kv-cache", {"keys_per": "channel", "token_group": 4, "residual": 8}, 0.01),
        ("kv-cache-fp8", {"calibration_samples": 4, "calibration_length": 64}, 0.005),
    ],
)
def test_the_engine_scores_what_the_model_gives(
    method: str, settings: dict[str, Any], moves: float, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compress_model(str(base), method, method_config(method, **settings), TEXT, tmp_path / "out")
    requests = mixed_requests()[:12]
    scores = {}
    for folder in (base, tmp_path / "out"):
        loaded = load_model(LoadConfig(path=str(folder), device="cpu"))
        scores[folder] = Scorer(loaded, ScoringConfig(progress=False)).score(requests)[0].column("loglik")
    if method == "kv-cache-fp8":
        monkeypatch.setattr(type(loaded.model), "double", lambda model: model)  # compressed-tensors rounds to float32
    found, wanted = scores[tmp_path / "out"], naive_logliks(loaded, requests)
    # The naive pass is in float64 (float32 for fp8): a number at the edge between two steps of the cache may fall on the other side.
    assert np.abs(found - wanted).max() < 0.05 and np.median(np.abs(found - wanted)) < 1e-3
    assert np.abs(scores[base] - found).max() > moves


def test_no_noise_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'scale' is too small.*more than 0"):
        method_config("gaussian-noise", scale=0.0)
