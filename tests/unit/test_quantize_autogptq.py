"""The projects that run AutoGPTQ and AutoAWQ: what they refuse and guard against, and their parameters.

Both need environments of their own, AutoGPTQ a CUDA machine too (README, methods).
"""

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mlflow_compress.errors import ConfigError
from tests.project_script import load_script

PROJECT = Path(__file__).parents[2] / "projects" / "quantize-autogptq"
ENTRY = yaml.safe_load((PROJECT / "MLproject").read_text())["entry_points"]["main"]


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_script(PROJECT, monkeypatch)


@pytest.fixture
def call(project: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return what runs the project as MLflow does: every parameter given, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(project, "quantize", lambda options, run: pytest.fail("quantize was reached"))
    monkeypatch.setattr(project.toolchain, "Tracker", lambda: pytest.fail("a run was opened"))

    def main(**given: str) -> int:
        values = {name: entry["default"] for name, entry in ENTRY["parameters"].items()} | given
        monkeypatch.setattr(sys, "argv", ["run.py", *(text for k, v in values.items() for text in (f"--{k}", v))])
        return int(project.main())

    return main


def test_a_machine_without_cuda_is_refused_in_one_line_before_any_work(
    call: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert call(model="no/such/model/anywhere") == 1
    error = capsys.readouterr().err
    assert error.startswith("Error: AutoGPTQ quantizes on CUDA devices only") and error.count("\n") == 1
    assert "-P method=gptq" in error and "-P method_args=backend=gptqmodel" in error
    assert not list(tmp_path.iterdir())
    assert "auto_gptq" not in sys.modules


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bits": "5"}, "Allowed: 2, 3, 4, 8. Got: 5."),
        ({"group_size": "0"}, "-1 (one scale a row)"),
        ({"group_size": "-128"}, "Got: -128."),
        ({"desc_act": "yes"}, "Allowed: true, false. Got: 'yes'."),
        ({"damp_percent": "0"}, "above 0, below 1"),
        ({"damp_percent": "1"}, "Got: 1.0."),
    ],
)
def test_settings_that_autogptq_does_not_have_are_refused(
    call: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: dict[str, str], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert call(**given) == 1
    assert message in capsys.readouterr().err


def test_the_defaults_are_accepted_where_there_is_cuda(project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    checked: list[Any] = []
    monkeypatch.setattr(project.toolchain, "run_project", lambda method, options, *rest: checked.append(options) or 0)
    values = [text for name, entry in ENTRY["parameters"].items() for text in (f"--{name}", entry["default"])]
    monkeypatch.setattr(sys, "argv", ["run.py", *values])
    assert project.main() == 0
    project.check(checked[0])
    assert set(vars(checked[0])) == set(ENTRY["parameters"]) == set(re.findall(r"--(\w+) \{\1\}", ENTRY["command"]))


def test_a_model_with_code_of_its_own_is_refused(project: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "auto_map": {"AutoConfig": "evil.Config"}}')
    with pytest.raises(ConfigError, match="code of its own"):
        project.toolchain.read_base(str(tmp_path), 128)


def test_every_version_is_pinned() -> None:
    for project in (PROJECT, AWQ):
        lines = (project / "requirements.txt").read_text().splitlines()
        assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines if line and not line.startswith("#"))
    assert "auto-gptq==0.7.1" in (PROJECT / "requirements.txt").read_text().splitlines()
    assert (PROJECT / "python_env.yaml").read_text() == (AWQ / "python_env.yaml").read_text()


AWQ = Path(__file__).parents[2] / "projects" / "quantize-autoawq"


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
def awq(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the project's module, with the lines above in AutoAWQ's place."""
    package, quantize, quantizer = (
        types.ModuleType(name) for name in ("awq", "awq.quantize", "awq.quantize.quantizer")
    )
    package.AutoAWQForCausalLM = object  # type: ignore[attr-defined]
    quantizer.AwqQuantizer = Stock  # type: ignore[attr-defined]
    for module in (package, quantize, quantizer):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return load_script(AWQ, monkeypatch)


def after_the_search(quantizer: Any) -> torch.Tensor:
    layer = torch.nn.Linear(4, 2, bias=False)
    layer.weight.data = torch.arange(8.0).reshape(2, 4)
    quantizer._compute_best_scale(None, None, None, layer, [layer])
    return layer.weight.data


def test_the_guard_keeps_the_weights_that_the_search_would_spoil(awq: Any) -> None:
    weights = torch.arange(8.0).reshape(2, 4)
    assert torch.equal(after_the_search(Stock()), 2 * weights)  # the fault: the first trial's scale stays
    assert torch.equal(after_the_search(awq.ClonedBackUp()), weights)


def test_the_parameters_are_those_of_the_script(awq: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = yaml.safe_load((AWQ / "MLproject").read_text())["entry_points"]["main"]
    parsed: list[Any] = []
    monkeypatch.setattr(awq.toolchain, "run_project", lambda method, options, *rest: parsed.append(options) or 0)
    values = [text for name, given in entry["parameters"].items() for text in (f"--{name}", given["default"])]
    monkeypatch.setattr(sys, "argv", ["run.py", *values])
    assert awq.main() == 0
    assert set(vars(parsed[0])) == set(entry["parameters"]) == set(re.findall(r"--(\w+) \{\1\}", entry["command"]))
