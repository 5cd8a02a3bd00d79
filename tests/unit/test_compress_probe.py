"""Comparison of logits: exact for equal ones, and a wrong number cannot pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mlflow_compress.compression import probe
from mlflow_compress.errors import CheckpointError, ReloadMismatchError
from tests.unit.scoring_models import U


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(6, 50, generator=torch.Generator().manual_seed(0))


def test_equal_logits_have_distance_zero(logits: torch.Tensor) -> None:
    report = probe.compare_logits(logits, logits.clone())
    assert (report.max_abs_diff, report.kl_mean, report.kl_max, report.positions) == (0.0, 0.0, 0.0, 6)
    assert report.agrees


def test_the_report_is_what_it_says() -> None:
    # Two tokens: p = (1/2, 1/2), q = (2/3, 1/3): KL = 1/2 ln(3/4) + 1/2 ln(3/2) = 1/2 ln(9/8) = 0.0588915.
    # ln 2 is rounded to float32, by U of it, and printed with seven digits.
    report = probe.compare_logits(torch.zeros(1, 2), torch.tensor([[np.log(2.0), 0.0]], dtype=torch.float32))
    assert report.kl_max == pytest.approx(0.0588915, abs=0.5e-7 + U)
    assert report.max_abs_diff == pytest.approx(np.log(2.0), rel=U)


def test_rounding_noise_passes_and_one_wrong_logit_does_not(logits: torch.Tensor) -> None:
    assert probe.compare_logits(logits, logits + 1e-5 * torch.randn_like(logits)).agrees
    wrong = logits.clone()
    wrong[3, 7] += 0.01
    assert not probe.compare_logits(logits, wrong).agrees


def test_models_that_round_activations_may_differ_by_a_step_and_no_further(logits: torch.Tensor) -> None:
    near, far = logits + 0.1 * torch.randn_like(logits), logits + torch.randn_like(logits)
    report = probe.compare_logits(logits, near, rounded=True)
    assert 1e-4 < report.kl_mean < 0.01 and report.agrees and not probe.compare_logits(logits, near).agrees
    with pytest.raises(ReloadMismatchError, match=r"a mean KL up to 0\.01 nats"):
        probe.compare_logits(logits, far, rounded=True).require_agreement()
    nan = torch.full_like(logits, torch.nan)
    assert not probe.compare_logits(logits, nan, rounded=True).agrees


def test_logits_that_are_not_numbers_do_not_agree(logits: torch.Tensor) -> None:
    wrong = logits.clone()
    wrong[0, 0] = torch.nan
    assert not probe.compare_logits(logits, wrong).agrees


def test_another_vocabulary_is_a_mismatch(logits: torch.Tensor) -> None:
    with pytest.raises(ReloadMismatchError, match="other logits"):
        probe.compare_logits(logits, logits[:, :-1])


def test_what_is_written_comes_back(tmp_path: Path, logits: torch.Tensor) -> None:
    ids = np.arange(12, dtype=np.int64).reshape(3, 4)
    for rounded in (False, True):
        probe.write_probe(tmp_path, probe.Probe(ids), logits, rounded=rounded)
        stored, same, told = probe.read_probe(tmp_path)
        assert np.array_equal(stored.ids, ids) and torch.equal(same, logits) and told is rounded
    assert not list(tmp_path.glob("*.safetensors"))  # not among the weights


def test_a_missing_probe_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="probe"):
        probe.read_probe(tmp_path)
