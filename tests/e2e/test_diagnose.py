"""diagnose on the demo: a method and a checkpoint, its files, its refusals, and going on after an interruption."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

import mlflow_compress as mc
from mlflow_compress import cli
from mlflow_compress.records import SwapDistances
from mlflow_compress.scoring.swap_meter import ALL, NO_SWAP, WHOLE, SwapMeter
from tests.stores import artifacts, opened, runs_in
from tests.task_files import sums, write_rows

LITTLE: dict[str, Any] = {
    "diagnosis_args": "corpus_tokens=256,corpus_window=64",
    "num_fewshot": 0,
    "num_shuffles": 0,
}
WITHOUT_NOISE = {**LITTLE, "diagnosis_args": f"{LITTLE['diagnosis_args']},noise_control=false"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("diagnose") / "results"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{**row, "category": f"c{i % 2}"} for i, row in enumerate(sums(6, answer=0))]
    cloze = write_rows(folder / "cloze.jsonl", rows)
    (folder / "text.txt").write_text("The river is old and the bridge of <b>stone</b> is new, since 1812. " * 60)
    return f"{cloze},{folder / 'text.txt'}"


@pytest.fixture(scope="module")
def found(store: Path, tasks: str) -> mc.Diagnosis:
    return mc.diagnose(method="rtn", bits=3, tasks=tasks, store=store, **LITTLE)


@pytest.mark.ci
def test_every_group_is_measured_and_the_controls_hold(found: mc.Diagnosis, store: Path) -> None:
    assert [g.name for g in found.results.groups] == [
        f"layers.{i}.{kind}" for i in range(5) for kind in ("qkv", "o", "gate_up", "down")
    ]
    assert found.unchanged == ("embeddings", "head") and found.whole_model_reason is None
    assert found.results.no_swap == 0.0
    # All swaps at once are the variant: the same weights in the same passes, whose means are of few terms in float64.
    assert found.results.together.value == pytest.approx(found.results.whole.value)
    assert found.results.additivity.value == pytest.approx(found.results.whole.value / found.results.sum_of_parts)
    assert all(g.kl.value > 0 and g.noise_kl is not None and g.no_noise is None for g in found.results.groups)
    records = SwapDistances.read(found.records_folder)
    assert set(records.column("swap")) >= {NO_SWAP, ALL, WHOLE, "layers.0.qkv", "noise on layers.0.qkv"}
    assert records.where(swap=WHOLE).column("kl").mean() == pytest.approx(found.results.whole.value)
    assert {(r.task, r.category, r.n) for r in found.categories} == {("cloze", "c0", 3), ("cloze", "c1", 3)}
    assert sum(r.n for r in found.positions) == found.results.whole.n == 4 * 63
    assert len(found.texts) == 4 and found.texts[0].moved.kl >= found.texts[-1].moved.kl

    run = artifacts(store, found.run.run_id)
    rows = list(csv.DictReader((run / "groups.csv").read_text().splitlines()))
    assert [row["group"] for row in rows] == [g.name for g in found.results.groups]
    assert float(rows[0]["kl"]) == found["layers.0.qkv"].kl.value
    page = (run / "diagnosis.html").read_text()
    assert "layers.0.qkv" in page and "<b>stone</b>" not in page and page.count("data:image/png") == 2
    assert json.loads((run / "diagnosis.json").read_text())["no_swap"] == 0.0
    values = opened(store).look_up(found.run.run_id).metrics
    own = {name: value for name, value in values.items() if name.startswith("diagnose/")}
    assert 20 < len(own) < 50 and own["diagnose/kl"] == pytest.approx(found.results.whole.value)
    assert len(found.to_pandas()) == 20 and "moves most" in found.summary
    # Four texts: no interval; the column of the KL is sorted as it is printed.
    assert all(g.kl.low is None for g in found.results.groups) and found.results.additivity.low is None
    printed = [float(row[1]) for row in found.table().rows]
    assert printed == sorted(printed, reverse=True)
    assert not [path for path in store.rglob("unfinished/*") if path.is_dir()]


@pytest.mark.ci
def test_its_advice_is_a_recipe_that_moves_less(found: mc.Diagnosis, store: Path, tasks: str) -> None:
    """The groups to keep are at 8 bits in the checkpoint, all others at 3; and the model moves less."""
    advice = found.advice
    assert advice.keep == ("layers.0.qkv",) and advice.share > 0.5 and advice.weights < 0.1
    assert advice.text.startswith("Keep layers.0.qkv at 8 bits: 6 % of the weights carry ")
    command = advice.command(found.model)
    assert (
        command is not None and command in found.as_text() and command.startswith("mlflow-compress main --method mixed")
    )
    assert advice.text in (artifacts(store, found.run.run_id) / "diagnosis.html").read_text()
    content = json.loads(Path(str(advice.recipe)).read_text())
    kept = [name for name, chosen in content["layers"].items() if chosen == "rtn:8"]
    assert kept == [f"model.layers.0.self_attn.{name}_proj" for name in "kqv"] and len(content["layers"]) == 35
    again = mc.diagnose(
        method="mixed",
        method_args={"recipe": str(advice.recipe)},
        tasks=tasks,
        store=store,
        **WITHOUT_NOISE,
    )
    # What was kept hardly moves any more, and the others move as before: to first order the KL loses their share.
    assert again["layers.0.qkv"].kl.value < 0.01 * found["layers.0.qkv"].kl.value
    assert again["layers.0.o"].kl.value == found["layers.0.o"].kl.value
    assert again.results.whole.value < 0.7 * found.results.whole.value


@pytest.mark.ci
def test_where_no_recipe_helps_the_advice_says_why(store: Path, tasks: str) -> None:
    settings = {"tasks": tasks, "store": store, **WITHOUT_NOISE}
    found = mc.diagnose(method="magnitude", **settings)
    assert found.advice.recipe is None and found.advice.command(found.model) is None
    assert "No recipe is written: Method 'magnitude' cannot be applied to some layers only" in found.as_text()
    of_head = mc.diagnose(method="gaussian-noise", **settings)
    assert [group.name for group in of_head.results.groups] == ["head"] and of_head.advice.keep == ()
    assert "Its linear layers carry less than half of the movement" in of_head.as_text()


@pytest.mark.ci
def test_an_interrupted_diagnosis_goes_on(
    found: mc.Diagnosis, store: Path, tasks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, batches = SwapMeter._batch, []
    settings = {
        **LITTLE,
        "diagnosis_args": f"corpus_tokens={2048 + 64},corpus_window=64,noise_control=false",
        "tasks": tasks.split(",")[1],
    }

    def counted(self: SwapMeter, *given: Any) -> Any:
        batches.append(1)
        if len(batches) == 2:
            raise KeyboardInterrupt
        return whole(self, *given)

    (Path(tasks.split(",")[1])).write_text("The river is old and the bridge of stone is new, since 1812. " * 300)
    monkeypatch.setattr(SwapMeter, "_batch", counted)
    with pytest.raises(KeyboardInterrupt):
        mc.diagnose(found.checkpoint, store=store, **settings)
    again = mc.diagnose(found.checkpoint, store=store, **settings)
    assert len(batches) == 4  # three batches, of which the second was begun twice
    assert again.results.no_swap == 0.0 and again.categories == ()
    assert all(group.noise_kl is None for group in again.results.groups)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": "cloze"}, "needs an existing text corpus"),
        ({"tasks": "text", "device": "balanced"}, "both models in memory"),
        (
            {"tasks": "text", "diagnosis_args": {"state_memory": 0}},
            "Setting 'state_memory' of 'diagnosis_args' is too small",
        ),
        ({"tasks": "text", "checkpoint": "/nowhere/at/all"}, "names no file or folder"),
        ({"tasks": "text", "method": "nothing"}, "nothing"),
    ],
)
def test_what_cannot_be_diagnosed_is_refused_without_a_run(
    settings: dict[str, Any], message: str, tasks: str, tmp_path: Path
) -> None:
    paths = dict(zip(("cloze", "text"), tasks.split(","), strict=True))
    with pytest.raises(mc.MlflowCompressError, match=message):
        mc.diagnose(store=tmp_path / "none", **{**settings, "tasks": paths[settings["tasks"]]})
    assert not runs_in(tmp_path / "none")


@pytest.mark.slow
def test_the_command_line_shows_the_groups(workdir: Path, tasks: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = [f"--{name}={value}" for name, value in {**WITHOUT_NOISE, "tasks": tasks}.items()]
    assert cli.main(["diagnose", "--method=magnitude", *given]) == 0
    shown = capsys.readouterr()
    assert "layers.0.qkv" in shown.out and "without any swap: exactly 0" in shown.out
    assert "differs from demo in 20 groups of weights" in shown.err
    assert cli.main(["diagnose", "--method=layer-drop", *given]) == 2
    assert "another architecture" in capsys.readouterr().err
