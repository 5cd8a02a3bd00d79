"""A package with one plug-in of each kind, the one that docs/how-to/plugins.md builds: installed, found and used."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlflow_compress import demo
from mlflow_compress.models.loading import LoadConfig, load_model
from tests.conftest import Fork
from tests.docs.blocks import DOCS, ROOT, blocks_of
from tests.unit.scoring_models import rounding

LISTED = """
import json
from mlflow_compress.compression import METHODS
from mlflow_compress.engines.interface import ENGINES
from mlflow_compress.item_families import ITEM_FAMILIES
from mlflow_compress.judges import JUDGES
from mlflow_compress.metrics import METRICS
from mlflow_compress.items.named_tasks import TASKS
from mlflow_compress.items.task import FAMILIES
registries = {"methods": METHODS, "metrics": METRICS, "tasks": TASKS, "families": FAMILIES, "items": ITEM_FAMILIES,
              "judges": JUDGES, "engines": ENGINES}
print(json.dumps({name: registry.names() for name, registry in registries.items()}))
"""

# The baseline is right on all 20 statements; the variant answers "no" to each, so that the 10 true ones flip. On those the
# baseline's margin is tanh(1) = 0.76, on the others tanh(0.1) = 0.1: the 10 sure answers are the ones that flip.
USED = """
import json
from mlflow_compress.metrics import MetricInputs, compute_all, headline
from mlflow_compress.records import OptionScores, RunRecords
from mlflow_compress.reporting.headline import headline_rows
from mlflow_compress.items.suite import load_suite
from mlflow_compress.items.task import TaskSettings
from mlflow_compress.tracking.run_names import leaderboard

suite = load_suite("sums", model="any", settings=TaskSettings())

def run(answer):
    rows = []
    for request in suite.requests:
        item = int(request.item_id)
        chosen, margin = answer(item)
        value = margin if request.option == chosen else -margin
        key = {name: getattr(request, name) for name in ("task", "item_id", "permutation", "option", "content")}
        rows.append({**key, "loglik": value - 5, "n_tokens": 1, "n_chars": 3, "n_bytes": 3, "greedy": True})
    return RunRecords(items=suite.items, option_scores=OptionScores.from_rows(rows))

baseline = run(lambda item: (1 - item % 2, 1.0 if item % 2 == 0 else 0.1))
variant = run(lambda item: (0, 1.0))
pooled = headline(compute_all(MetricInputs(baseline, variant)))
rows = {row.label: (row.n, row.baseline, row.variant, row.difference) for row in headline_rows(pooled)}
print(json.dumps({"rows": rows, "leaderboard": leaderboard()}))
"""

JUDGED = """
import json
from pathlib import Path
from types import SimpleNamespace
from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.judges import JudgeInputs, open_judge
from mlflow_compress.metrics import MetricInputs, compute_all, headline
from mlflow_compress.records import Generations, RunRecords

def answers(words):
    rows = [{"task": "t", "item_id": f"i{i}", "turn": 0, "sample": 0, "prompt": "p", "text": "word " * n, "n_tokens": n}
            for i, n in enumerate(words)]
    return Generations.from_rows(rows)

graded = {"baseline": answers([5, 5]), "variant": answers([25, 5])}
judge = open_judge("brevity", JudgeConfig(), Path())
found = judge(JudgeInputs(instructions=[], graded=graded, samples={})).judgments
runs = [RunRecords(generations=graded[who], judgments=found[who]) for who in ("baseline", "variant")]
pooled = headline(compute_all(MetricInputs(*runs)))
print(json.dumps({name: result.value for name, result in pooled.items() if name.startswith("judge/")}))
"""

COMPRESSED = """
import json
import sys
from pathlib import Path
from mlflow_compress import demo
from mlflow_compress.compression import compress_model
manifest = compress_model(str(demo.MODEL_DIR), "grid", None, [], Path(sys.argv[1]))
print(json.dumps({"label": manifest.label, "method": manifest.method}))
"""


RUN = """
import json
from mlflow_compress.commands.evaluate.models import engine_started, open_baseline
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.records import Request

requests = [Request("t", "q", 0, o, o, "The king went", text, 1, 1) for o, text in enumerate((" home.", " away."))]
found = {}
for name in ("local", "small_batches"):
    config = EvaluateConfig().with_values(engine=name)
    with engine_started(config.running, config.source):
        model = open_baseline(config)
        scorer = model.scorer(model.load())
        found[name] = scorer.score(requests)[0].column("loglik").tolist()
        found[f"{name} identity"] = model.identity.get("engine")
        found[f"{name} batches"] = scorer.config.batch_tokens
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the page's package."""
    source = tmp_path_factory.mktemp("package")
    for block in blocks_of(DOCS / "how-to" / "plugins.md"):
        if "file" in block.marks:
            (source / block.attributes["title"]).write_text(block.text)
    return source


@pytest.fixture(scope="module")
def installed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that the page's package is installed into."""
    target = tmp_path_factory.mktemp("installed")
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True)
    return target


@pytest.fixture(scope="module")
def ask(installed: Path, python: Fork) -> Callable[..., Any]:
    """Return what a fresh process prints as JSON in its last line, with the package importable."""

    def ask(code: str, *arguments: str) -> Any:
        done = python("-c", f"import sys\nsys.path.insert(0, {str(installed)!r})\n{code}", *arguments)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    return ask


def test_every_registry_lists_the_plugins(ask: Callable[..., Any]) -> None:
    names = ask(LISTED)
    assert "grid" in names["methods"] and "sums" in names["tasks"]
    assert names["engines"] == ["endpoint", "local", "ray", "small_batches", "vllm"]
    assert "yes_no" in names["families"] and "yes_no" in names["items"]
    assert {"sure_flips", "brevity"} <= set(names["metrics"]) and "brevity" in names["judges"]
    assert "flips" in names["metrics"] and "rtn" in names["methods"]  # the package's own are still there


def test_task_and_metric_work_and_have_their_row_and_column(ask: Callable[..., Any]) -> None:
    found = ask(USED)
    # Items of a plug-in's family have an accuracy, flip and count in the headline.
    assert found["rows"]["Accuracy"][:3] == ["20", "100.0 %", "50.0 %"]
    assert found["rows"]["Answers flipped"][3].startswith("50.0 %")
    assert found["rows"]["Sure answers flipped"][0] == "10"
    assert found["rows"]["Sure answers flipped"][3].startswith("100.0 %")
    assert list(found["rows"])[:2] == ["Answers flipped", "Sure answers flipped"]
    assert found["leaderboard"][:2] == ["distance/flips_pct", "distance/sure_flips_pct"]


def test_the_engine_runs_a_model_by_its_name(ask: Callable[..., Any]) -> None:
    found = ask(RUN)
    loaded = load_model(LoadConfig(path=str(demo.MODEL_DIR), device="cpu"))
    n_tokens = max(len(loaded.tokenizer.encode(text)) for text in (" home.", " away."))
    assert found["small_batches"] == pytest.approx(
        found["local"], abs=2 * n_tokens * rounding(loaded)
    )  # both are rounded
    assert (found["local identity"], found["small_batches identity"]) == (None, "small_batches")
    assert (found["local batches"], found["small_batches batches"]) == (None, 128)


def test_the_judge_s_ratings_become_a_metric(ask: Callable[..., Any]) -> None:
    # 25 words: 10 - 2 points; 5 words: 10 points. MT-Bench has no number: its judge did not run.
    found = ask(JUDGED)
    assert found["judge/brevity"] == 9.0 and found["judge/brevity_baseline"] == 10.0
    assert "judge/mt_bench" not in found


@pytest.mark.slow
def test_the_method_makes_a_checkpoint_that_loads_again(ask: Callable[..., Any], tmp_path: Path) -> None:
    assert ask(COMPRESSED, str(tmp_path / "out")) == {"label": "grid", "method": "grid"}


BY_PYTHON = """
import json
import mlflow_compress as mc
found = mc.run(method="grid", tasks="sums", engine="small_batches", limit=3,
               answer_args={"num_samples": 2, "max_new_tokens": 4, "judge_max_tokens": 4}, speed=False)
worst = mc.worst(run=found.run.run_id, most=2)
print(json.dumps({"run": found.run.run_id, "metrics": found.metrics, "worst": worst.to_pandas().kl.tolist()}))
"""


def test_each_plugin_is_one_file_of_at_most_forty_lines() -> None:
    files = {
        b.attributes["title"]: b.text.count("\n")
        for b in blocks_of(DOCS / "how-to" / "plugins.md")
        if "file" in b.marks
    }
    modules = {name: lines for name, lines in files.items() if name.endswith(".py")}
    assert len(modules) == 6 and max(modules.values()) <= 40


@pytest.mark.ci
def test_all_six_are_used_by_command_line_python_and_mlflow_run(source: Path, installed: Path, tmp_path: Path) -> None:
    left_out = ("MLFLOW_", "OPENAI_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    environment |= {"PYTHONPATH": os.pathsep.join([str(installed), str(ROOT)])}
    environment |= {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"

    def said(*arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr[-4000:]
        return done.stdout + done.stderr

    few = {"limit": 3, "answer_args": "num_samples=2,max_new_tokens=4,judge_max_tokens=4", "speed": "false"}
    ours = {"method": "grid", "tasks": "sums", "engine": "small_batches", **few}
    main = said("-m", "mlflow_compress", "main", *(f"--{name}={value}" for name, value in ours.items()))
    assert "\ngrid: " in main
    assert {"Sure answers flipped", "Brevity"} <= {line.partition("  ")[0] for line in main.splitlines()}

    found = json.loads(next(line for line in said("-c", BY_PYTHON).splitlines() if line.startswith("{")))
    assert {"distance/sure_flips_pct", "judge/brevity"} <= found["metrics"].keys()
    assert len(found["worst"]) == 2 and found["worst"][0] >= found["worst"][1] > 0

    run = ["-m", "mlflow", "run", "--env-manager", "local"]
    assert "grid: " in said(
        *run, str(ROOT), *(part for name, value in ours.items() for part in ("-P", f"{name}={value}"))
    )
    assert "sums/" in said(*run, str(source), "-e", "worst", "-P", f"run={found['run']}")

    assert "  plug-ins  worst\n" in said("-m", "mlflow_compress", "--help")
    explained = said("-m", "mlflow_compress", "worst", "--help")
    assert "Show the items of an evaluation that moved most." in explained and "items to show" in explained
    assert "'most' is too small" in said("-m", "mlflow_compress", "worst", "--most", "0", code=2)
