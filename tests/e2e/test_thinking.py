"""Problems that a model thinks about: the embedded task and model, own files, and what the template can be told."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import mlflow_compress as mc
from mlflow_compress import demo
from mlflow_compress.commands.evaluate.items import with_chat_template
from mlflow_compress.compression.checkpoint_manifest import MANIFEST_FILE
from mlflow_compress.errors import CheckpointError, DataError
from mlflow_compress.items.suite import load_suite
from mlflow_compress.items.task import Sampling, Task, TaskSettings
from mlflow_compress.models.loading import LoadConfig, load_model
from mlflow_compress.models.model_files import own_sampling
from mlflow_compress.records import RunRecords
from mlflow_compress.tracking.run_names import RECORDS
from mlflow_compress.tracking.tracker import opened
from tests.served_demo import NAME, served_demo
from tools.train_demo_thinks import TEMPERATURE
from tools.train_demo_thinks import test_rows as problems_of_seed


def asked(tmp_path: Path, **row: object) -> Path:
    file = tmp_path / "own.jsonl"
    file.write_text(
        json.dumps({"id": "1", "category": "c", "question": "1+2?", "answer": "3", "compare": "number"} | row)
    )
    return file


def shown(spec: str, model: Path, **settings: object) -> Task:
    suite = load_suite(spec, model="", settings=TaskSettings(**settings))  # type: ignore[arg-type]
    tokenizer = AutoTokenizer.from_pretrained(model)
    return with_chat_template(tokenizer, suite, folder=model).tasks[0]


def test_the_bundled_problems_are_what_the_script_writes() -> None:
    lines = (demo.DATA_DIR / "thinking.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == problems_of_seed()


def test_a_model_draws_with_its_own_settings_and_thinks_if_it_may() -> None:
    on, off = (shown("thinking", demo.THINKS_MODEL_DIR, enable_thinking=think) for think in (True, False))
    assert on.answering is not None and off.answering is not None
    assert on.answering.sampling == Sampling(temperature=TEMPERATURE)
    assert (on.answering.samples, on.answering.max_new_tokens, len(on.answering.end_tokens)) == (8, 256, 1)
    ends = [task.items.column("prompt")[0].partition("<|assistant|>")[2] for task in (on, off)]
    assert ends == ["", "<think></think>"]
    other = shown("thinking", demo.THINKS_MODEL_DIR, thinking_samples=4)
    assert len({task.content_hash() for task in (on, off, other)}) == 3


def test_a_template_that_knows_no_thinking_is_asked_for_none_in_vain() -> None:
    assert shown("thinking", demo.MODEL_DIR).answering.sampling == Sampling()  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match="its chat template does not read enable_thinking"):
        shown("thinking", demo.MODEL_DIR, enable_thinking=False)


@pytest.mark.parametrize(
    ("settings", "words"), [({"temperature": 0}, "cannot be drawn"), ({"top_k": 2.5}, "no number")]
)
def test_settings_with_which_nothing_can_be_drawn_are_refused(
    settings: dict[str, float], words: str, tmp_path: Path
) -> None:
    assert own_sampling(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=words):
        own_sampling(tmp_path)


def test_own_files_say_how_answers_are_compared(tmp_path: Path) -> None:
    task = shown(str(asked(tmp_path)), demo.THINKS_MODEL_DIR)
    assert task.answering is not None and task.answering.judge is not None and task.answering.max_new_tokens == 8192
    for reply, right in (("<think>4</think>3.0", True), ("4", False), ("<think>3", False), ("<think></think>?", None)):
        assert task.answering.judge({"1": reply}) == {"1": right}
    with pytest.raises(DataError, match="'compare' is no way to compare answers"):
        load_suite(str(asked(tmp_path, compare="maths")), model="", settings=TaskSettings())
    with pytest.raises(DataError, match="'answer' cannot be read as a number"):
        load_suite(str(asked(tmp_path, answer="three")), model="", settings=TaskSettings())


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("workdir")
def test_thinking_reaches_verdict_report_and_the_table_of_problems(tmp_path: Path) -> None:
    common = {
        "model": "demo-thinks",
        "tasks": "thinking",
        "limit": 10,
        "task_args": {"thinking_samples": 4},
        "judge": False,
        "speed": False,
    }
    found = mc.run(method="rtn", bits=2, **common)
    pooled = found.pooled
    assert pooled["reasoning/pass_at_1"].n == 2 * 10 * 4  # two categories
    # Two bits leave little of the sums.
    assert pooled["reasoning/pass_at_1_delta"].high < -0.2
    assert pooled["reasoning/pass_at_1_floor"].low <= 0 <= pooled["reasoning/pass_at_1_floor"].high
    assert "right answers to problems" in found.verdict
    [report] = [path.read_text(encoding="utf-8") for path in tmp_path.rglob("report.html")]
    assert "Right answers (pass@1)" in report and f"temperature {TEMPERATURE}" in report
    [problems] = [json.loads(path.read_text()) for path in tmp_path.rglob("problems.json")]
    right = [sum(row[f"right_{who}"] for row in problems) for who in ("baseline", "variant")]
    assert len(problems) == 20 and right[1] == round(80 * pooled["reasoning/pass_at_1"].value) < right[0]

    # The baseline's own thoughts are its first drawn answers. Both models have scored them; here once more in float64.
    assert "own thoughts" in report and "forking places" in report
    page = mc.report(found, output=str(tmp_path / "page.html")).path.read_text(encoding="utf-8")
    assert all("Where thoughts part" in text and 'class="concluded wrong"' in text for text in (report, page))
    runs = opened(f"sqlite:///{tmp_path / 'mlflow.db'}")
    [evaluated], [scored] = runs.find("evaluate"), runs.find("baseline")
    variant, baseline = (RunRecords.read(runs.fetch(run.run_id, RECORDS)) for run in (evaluated, scored))
    assert baseline.chains is not None and baseline.generations is not None and len(baseline.chains) == 20
    drawn = baseline.generations.where(sample=1).table.select(["item_id", "text"]).to_pylist()
    written = baseline.chains.table.to_pylist()
    assert {row["item_id"]: "".join(row["pieces"]) for row in written} == {row["item_id"]: row["text"] for row in drawn}
    [checkpoint] = [path.parent for path in (tmp_path / ".mlflow_compress").rglob(MANIFEST_FILE)]
    kl, gain = [], []
    models = [AutoModelForCausalLM.from_pretrained(at).double() for at in (demo.THINKS_MODEL_DIR, checkpoint)]
    for row in written:
        ids = torch.tensor([row["prompt_tokens"] + row["tokens"]])
        with torch.no_grad():
            p, q = (m(ids).logits[0, len(row["prompt_tokens"]) - 1 : -1].log_softmax(-1) for m in models)
        kl += (p.exp() * (p - q)).sum(-1).tolist()
        if row["answer_begin"] is not None:
            places = range(row["answer_begin"], row["answer_end"])
            gain.append(sum(float(q[at, row["tokens"][at]] - p[at, row["tokens"][at]]) for at in places))
    # The logits were computed in float32: a relative error of 1e-4 is 1000 of its roundings.
    assert pooled["reasoning/chain_kl"].value == pytest.approx(np.mean(kl), rel=1e-4) and len(kl) > 1000
    assert pooled["reasoning/chain_answer_logprob_delta"].value == pytest.approx(np.mean(gain), rel=1e-4)
    assert variant.chains == baseline.chains

    # The plan, with the lengths that this run has measured: a prompt is read for the greedy answer, each set of drawn
    # ones, and the chain that is written and then read. Lengths are rounded up, chains are some of the answers alone.
    chains = sum(len(row["tokens"]) for row in written)
    prompts = sum(len(row["prompt_tokens"]) for row in written)
    lengths = [records.generations.column("n_tokens") for records in (baseline, variant)]  # type: ignore[union-attr]
    taken = [lengths[0].sum() + 2 * chains + 5 * prompts, lengths[1].sum() + chains + 3 * prompts]
    asked_for = {name: common[name] for name in ("model", "tasks", "limit", "task_args", "judge")}
    for tokens in (math.ceil(lengths[0].mean()), "auto"):
        planned = mc.plan(**asked_for, method="rtn", device="cpu", machine_args={"answer_tokens": tokens})
        for model, stage in zip(taken, ("baseline", "evaluate"), strict=True):
            [found] = [one.tokens for one in planned.stages if one.stage == stage]
            assert found > 2 * model if tokens == "auto" else found == pytest.approx(model, rel=0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("workdir")
def test_a_served_variant_answers_problems_and_reads_no_thoughts_of_the_baseline(tmp_path: Path) -> None:
    served = load_model(LoadConfig(path=str(demo.THINKS_MODEL_DIR), dtype="float32", device="cpu"))
    with served_demo(served) as server:
        found = mc.evaluate(
            f"endpoint:{server.base_url}",
            endpoint_args={"served_model": NAME},
            model="demo-thinks",
            tasks=str(asked(tmp_path, question="12+34+56=?", answer="102")),
            task_args={"thinking_samples": 2, "thinking_max_new_tokens": 200},
        )
    [chain] = RunRecords.read(found.baseline_records_folder).chains.table.to_pylist()  # type: ignore[union-attr]
    n_read = len(chain["prompt_tokens"]) + 1
    begun = (chain["prompt_tokens"] + chain["tokens"])[:n_read]
    assert not any(body["prompt"][:n_read] == begun for body in server.bodies if "prompt" in body)
    assert found["reasoning/pass_at_1"].n == 2
    assert "has no chain" in found.not_computed["chain_kl"]
    texts = found.records().generations
    assert texts is not None and all(text.startswith("<think>") for text in texts.column("text"))


@pytest.mark.slow
@pytest.mark.usefixtures("workdir", "forked_checks")
def test_a_gate_draws_problems_in_blocks_and_stops_early(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(
        "kl: none\nmargins: [{metric: reasoning/pass_at_1_delta, margin: 0.15}]\n"
        "gates: [{metric: reasoning/length_ratio, at_most: 1.2}]\n"
    )
    given = {"tasks": "thinking", "policy": "policy.yaml", "task_args": {"thinking_samples": 4}}
    near, far = (
        mc.gate(mc.compress("demo-thinks", "rtn", bits=bits).folder, model="demo-thinks", **given) for bits in (8, 2)
    )
    assert near.passed and near.items_used < near.items_available == 100
    assert not far.passed and far.items_used < 100
    [delta] = [row for row in near.rows if "pass_at_1_delta" in row.name]
    [ratio] = [row for row in near.rows if "length_ratio" in row.name]
    assert abs(delta.value) < 0.1 and delta.limit == -0.15  # type: ignore[arg-type]
    assert ratio.value == pytest.approx(1.0, abs=0.05) and ratio.limit == pytest.approx(1.2)
    assert ratio.n == near.items_used and ratio.by == "items"
