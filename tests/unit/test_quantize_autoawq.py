"""The project that runs AutoAWQ: its guard against a back-up that is none, on AutoAWQ's own few lines; its parameters.

AutoAWQ itself needs an environment of its own, in which the project was run by hand (README, methods).
"""

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.project_script import load_script

PROJECT = Path(__file__).parents[2] / "projects" / "quantize-autoawq"


class Stock:
    """How AutoAWQ 0.2.9 keeps the weights, tries scales and puts the weights back."""

    @torch.no_grad()
    def _compute_best_scale(self, x: Any, w_mean: Any, x_mean: Any, module2inspect: Any, linears2scale: Any) -> None:
        org_sd = {k: v.cpu() for k, v in module2inspect.state_dict().items()}
        for scale in (2.0, 3.0):
            for fc in linears2scale:
                fc.weight.mul_(scale)
                fc.weight.data = torch.round(fc.weight.data)
            module2inspect.load_state_dict(org_sd)


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the project's module, with the lines above in AutoAWQ's place."""
    awq, quantize, quantizer = (types.ModuleType(name) for name in ("awq", "awq.quantize", "awq.quantize.quantizer"))
    awq.AutoAWQForCausalLM = object  # type: ignore[attr-defined]
    quantizer.AwqQuantizer = Stock  # type: ignore[attr-defined]
    for module in (awq, quantize, quantizer):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return load_script(PROJECT, monkeypatch)


def after_the_search(quantizer: Any) -> torch.Tensor:
    layer = torch.nn.Linear(4, 2, bias=False)
    layer.weight.data = torch.arange(8.0).reshape(2, 4)
    quantizer._compute_best_scale(None, None, None, layer, [layer])
    return layer.weight.data


def test_the_guard_keeps_the_weights_that_the_search_would_spoil(project: Any) -> None:
    weights = torch.arange(8.0).reshape(2, 4)
    assert torch.equal(after_the_search(Stock()), 2 * weights)  # the fault: the first trial's scale stays
    assert torch.equal(after_the_search(project.ClonedBackUp()), weights)


def test_the_parameters_are_those_of_the_script(project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = yaml.safe_load((PROJECT / "MLproject").read_text())["entry_points"]["main"]
    parsed: list[Any] = []
    monkeypatch.setattr(project.toolchain, "run_project", lambda method, options, *rest: parsed.append(options) or 0)
    values = [text for name, given in entry["parameters"].items() for text in (f"--{name}", given["default"])]
    monkeypatch.setattr(sys, "argv", ["run.py", *values])
    assert project.main() == 0
    assert set(vars(parsed[0])) == set(entry["parameters"]) == set(re.findall(r"--(\w+) \{\1\}", entry["command"]))


def test_every_version_is_pinned() -> None:
    lines = (PROJECT / "requirements.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines if line and not line.startswith("#"))
