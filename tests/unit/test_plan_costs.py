"""The plan: what it counts is what the engine does, and its formulas are those that one can work out by hand."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig, LlamaConfig, MixtralConfig

import mlflow_compress as mc
from mlflow_compress import demo
from mlflow_compress.commands.evaluate.outputs import run_model
from mlflow_compress.commands.plan.run import scored_work
from mlflow_compress.errors import CheckpointError, ConfigError
from mlflow_compress.items.suite import load_suite
from mlflow_compress.items.task import TaskSettings
from mlflow_compress.models.loading import LoadConfig, load_model
from mlflow_compress.scoring import costs
from mlflow_compress.scoring.baseline_store import StateWriter
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from mlflow_compress.scoring.plan.packing import plan_batches, plan_packs

SCALE = Path(__file__).parents[2] / "examples" / "scale"


def tiny(**more: object) -> costs.ModelShape:
    """Hidden 8, feed-forward 16, 2 layers, 2 heads of 4, one of keys; 10 words."""
    config = LlamaConfig(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        **more,
    )
    return costs.model_shape(config)


def sequences(*texts: list[int]) -> list[np.ndarray]:
    return [np.asarray(text, dtype=np.int32) for text in texts]


def test_shape_of_a_tiny_llama_by_hand() -> None:
    shape = tiny()
    # q 8x8, k 8x4, v 8x4, o 8x8, and three of 8x16, in each of 2 layers
    assert shape.dense == 2 * (64 + 32 + 32 + 64 + 3 * 128) and shape.experts == 0 and shape.active == shape.dense
    assert shape.parameters == shape.dense + 2 * 80 + (2 * 2 + 1) * 8  # embedding, head, norms
    assert shape.head == 80 and shape.attention_width == 2 * (4 + 4) and shape.cache_width == 8
    assert shape.square_inputs == 2 * (6 * 64 + 16**2)  # six matrices read 8 numbers, one reads 16


def test_a_mixture_uses_some_of_its_experts() -> None:
    config = MixtralConfig(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    shape = costs.model_shape(config)
    assert shape.experts == 4 * 3 * 8 * 16
    assert shape.dense == 4 * 64 + 4 * 8  # attention, and the router
    assert shape.active == shape.dense + shape.experts / 2


@pytest.mark.parametrize(
    ("model", "parameters"),
    [("llama-3-70b", 70_553_706_496), ("deepseek-v3", 671_026_404_352), ("qwen3-8b", 8_190_735_360)],
)
def test_published_sizes(model: str, parameters: int) -> None:
    assert costs.model_shape(AutoConfig.from_pretrained(SCALE / model)).parameters == parameters


def test_deepseek_reads_37_billion_weights_a_token() -> None:
    shape = costs.model_shape(AutoConfig.from_pretrained(SCALE / "deepseek-v3"))
    assert round((shape.active + 2 * shape.head) / 1e9) in (37, 38)  # its report says 37, embedding and head included


def test_work_of_packs_and_batches_by_hand() -> None:
    texts = sequences([1, 2, 3, 4], [1, 2, 3, 5, 6])
    packed = costs.workload(plan_packs(texts, [1, 1], batch_tokens=64), 9, 64)
    assert (packed.tokens, packed.tokens_unshared, packed.rows) == (6, 9, 2)
    assert packed.pairs == (1 + 2 + 3) + 4 + (4 + 5)  # each token sees its own path
    assert packed.groups == (
        costs.PassGroupSize(longest_unit=6, most_cached=6, largest_mask=6 * 6, masks=6 * 6, rows=2),
    )
    assert costs.workload(plan_packs(texts, [1, 1], batch_tokens=64), 9, 1).groups[0].rows == 1  # a product has one row
    padded = costs.workload(plan_batches(texts, [1, 1], batch_tokens=64), 9, 64)
    assert (padded.tokens, padded.pairs) == (9, 10 + 15)
    assert padded.groups == (costs.PassGroupSize(longest_unit=10, rows=2),)


def test_cached_prefixes_are_counted_while_they_live() -> None:
    stem = list(range(1, 21))
    texts = sequences(*[[*stem, 30 + i, 40 + i] for i in range(8)])
    plan = plan_packs(texts, [1] * 8, batch_tokens=24, min_shared=16)
    found = costs.workload(plan, sum(map(len, texts)), 64)
    assert found.tokens == 20 + 8 * 2  # the stem once
    most_cached = max(group.most_cached for group in found.groups)
    assert most_cached == 20 + 20 + max(unit.n_tokens for unit in plan.units if unit.prefix)


def test_work_adds_up() -> None:
    small, large = costs.PassGroupSize(rows=1), costs.PassGroupSize(rows=2)
    a, b = costs.Workload(tokens=3, rows=1, groups=(small,)), costs.Workload(tokens=4, rows=2, groups=(large,))
    assert a + b == costs.Workload(tokens=7, rows=3, groups=(small, large))
    # One token behind a prompt of two; three answers of 5 tokens that share a prompt of 2, two of them in a batch
    assert costs.GeneratedWork(prompts=[2], longest=1, usual=1).workload(64) == costs.Workload(
        tokens=3,
        tokens_unshared=3,
        pairs=6,
        rows=1,
        groups=(costs.PassGroupSize(longest_unit=2, most_cached=3, rows=1),),
    )
    assert costs.GeneratedWork(prompts=[2], samples=3, longest=9, usual=5).workload(2) == costs.Workload(
        tokens=2 + 15,
        tokens_unshared=6 + 15,
        pairs=3 + 3 * (3 + 4 + 5 + 6 + 7),
        rows=15,
        groups=(costs.PassGroupSize(longest_unit=2, most_cached=2 * (2 + 9), rows=2),),
    )


def test_formulas_by_hand() -> None:
    shape, work = tiny(), costs.Workload(tokens=10, pairs=55, rows=4)
    body = 2 * 10 * shape.dense + 2 * 55 * 2 * 16
    assert costs.scoring_operations(shape, work) == body + 2 * 4 * 8 * 10
    assert costs.scoring_operations(shape, work, heads=2) == body + 2 * (2 * 4 * 8 * 10)
    assert costs.states_bytes(shape, work, 4) == 4 * (8 * 4 + 20) + 80 * 4
    assert costs.calibration_operations("slicegpt", shape, 64, 8) is None
    twice = 2 * costs.scoring_operations(shape, costs.Workload(tokens=64, pairs=64 * 9 // 2))
    assert costs.calibration_operations("wanda", shape, 64, 8) == twice
    hessians = 2 * 64 * shape.square_inputs + 4 / 3 * shape.cube_inputs + 2 * shape.solve
    assert costs.calibration_operations("gptq", shape, 64, 8) == pytest.approx(twice + hessians)


def test_memory_by_hand() -> None:
    group = costs.PassGroupSize(longest_unit=10, most_cached=12, largest_mask=30, rows=3)
    work = costs.Workload(groups=(group,), rows=5, tokens_unshared=11)
    shape, held = tiny(), 7 + 4 * 11  # weights and tokens
    layers = 2 * (12 * 2 * 8) + 2 * (15 * 10 * 8 + 2 * 30)  # keys and values of two layers, activations, masks
    product, head, sought = 4 * 3 * 10, 80 * 2, 3 * 10 * 128 * 21
    assert costs.scoring_memory(shape, work, 2, weights=7.0) == held + layers > held + product
    assert costs.scoring_memory(shape, work, 2, weights=7.0, heads=2) == held + head + 2 * product + sought
    assert costs.scoring_memory(shape, work, 2, weights=7.0, captures=True) == held + layers
    few = costs.Workload(rows=500, groups=(costs.PassGroupSize(rows=1),))
    assert costs.scoring_memory(shape, few, 2, weights=7.0, captures=True) == 7 + 4 * 10 + 2 * 500 * (8 * 2 + 20)
    many = costs.Workload(rows=10**9)  # no more than a shard is in memory
    assert costs.scoring_memory(shape, many, 2, weights=7.0, captures=True) == 7 + 2 * 2**26


def test_products_keep_their_memory_for_the_groups_after_them() -> None:
    shape, wide, long = tiny(), costs.PassGroupSize(rows=300), costs.PassGroupSize(longest_unit=100)
    product, layers = 4 * 300 * 10, 2 * 15 * 100 * 8
    first = costs.scoring_memory(shape, costs.Workload(groups=(wide, long)), 2, weights=0.0)
    assert first == product + layers
    assert costs.scoring_memory(shape, costs.Workload(groups=(long, wide)), 2, weights=0.0) == max(product, layers)


def test_writing_is_bound_by_reading_weights_or_by_operations() -> None:
    shape, answers = tiny(), costs.GeneratedWork(prompts=[4] * 3, samples=2, longest=9, usual=5)
    machine = costs.Machine(devices=1, memory=1e9, flops=1e30, bandwidth=100.0, fresh=1.0, disk=1.0, price=None)

    def seconds(on: costs.Machine) -> float:
        return costs.answer_seconds(shape, answers, number_bytes=2, batch=4, machine=on)

    weights, caches = 2 * 5 * (shape.dense + shape.head), 6 * (5 + 6 + 7 + 8 + 9) * 2 * 8  # two batches, five steps
    assert seconds(machine) == pytest.approx(2 * (weights + caches) / 100.0)
    slow = costs.Machine(devices=1, memory=1e9, flops=1.0, bandwidth=1e30, fresh=1.0, disk=1.0, price=None)
    assert seconds(slow) == costs.scoring_operations(shape, answers.workload(4))


def test_what_a_pass_layer_by_layer_takes_on_top_by_hand() -> None:
    """Weights are cast; for each stream and layer masks are written and cut, and states embedded, handed on and kept."""
    shape, group = tiny(), costs.PassGroupSize(masks=30)
    work = costs.Workload(tokens=10, groups=(group, group))
    machine = costs.Machine(devices=1, memory=1e9, flops=2.0, bandwidth=1.0, fresh=4.0, disk=1.0, price=None)
    waits = costs.Offloaded(waiting=100, largest=50, opening=70, room=1)
    probes = 2 * 244 * shape.active / 2.0
    for streams in (1, 3):
        written = 70 + 2 * 100 + streams * 2 * 4 * (2 * 60 + 3 * 10 * 8)  # of two layers, in float32
        found = waits.extra_seconds(shape, work, 2, number_bytes=4, machine=machine, streams=streams)
        assert found == pytest.approx(written / 4.0 + probes)


def test_the_plan_counts_what_the_engine_does(tmp_path: Path) -> None:
    suite = load_suite("auto", model="demo", settings=TaskSettings(limit=3))
    loaded = load_model(LoadConfig(path=str(demo.MODEL_DIR), device="cpu", dtype="float32"))
    scorer = Scorer(loaded, ScoringConfig(progress=False))
    with StateWriter(tmp_path / "states", loaded) as writer:
        run_model(scorer, suite, generations=False, capture=writer)
    stored = sum(file.stat().st_size for file in (tmp_path / "states").iterdir())
    found = mc.plan(limit=3, device="cpu", judge=False, task_args={"noise_items": 0})
    expected = scored_work(suite, scorer.encoder, batch_tokens=1024, head_rows=1024)
    assert expected.rows == sum(shard["rows"] for shard in writer.shards)
    assert found.states_bytes == pytest.approx(stored, rel=0.01)
    assert found.parameters == sum(p.numel() for p in loaded.model.parameters())


def test_thoughts_are_planned_with_all_that_the_baseline_draws_and_reads() -> None:
    """6 questions of 13 tokens, 2 answers drawn to each; a chain's last token is not read."""
    given = {"model": "demo-thinks", "tasks": "thinking", "limit": 3, "method": "rtn", "device": "cpu", "judge": False}
    given["task_args"] = {"thinking_samples": 2, "noise_items": 4}
    for tokens, args in ((256, {}), (80, {"answer_tokens": 80}), (256, {"answer_tokens": 9000})):
        found = mc.plan(**given, machine_args=args)
        baseline, noise, _, variant = found.stages
        one, read = 6 * (13 + tokens), 6 * (13 + tokens - 1)
        drawn = 6 * (13 + 2 * tokens)
        assert baseline.tokens == one + 2 * drawn + one + read  # greedy, drawn twice, and the chains: written and read
        assert noise.tokens == 4 * (13 + tokens - 1) and variant.tokens == one + drawn + read
        assert baseline.bytes_written == found.states_bytes > 6 * tokens * 128 * 4


def test_answers_that_may_not_fit_are_said() -> None:
    given = {"model": str(SCALE / "qwen3-8b"), "tokenizer": "demo-thinks", "tasks": "thinking", "limit": 4}
    few, many = (mc.plan(**given, task_args={"thinking_max_new_tokens": n}, judge=False) for n in (1024, 16_384))
    assert "Answers at their maximum length need" not in few.as_text()
    # 64 answers of 16,384 tokens behind 13, with keys and values of 36 layers, 8 heads and 128 numbers, and the weights
    least = 2 * (64 * (13 + 16_384) * 36 * 2 * 8 * 128 + many.parameters)
    assert least < many.stages[0].memory < 1.01 * least
    assert f"Answers at their maximum length need {many.stages[0].memory / 1e9:.0f} GB" in many.as_text()


def test_a_model_that_does_not_fit_has_no_seconds() -> None:
    found = mc.plan(
        model=str(SCALE / "deepseek-v3"),
        tokenizer=str(demo.MODEL_DIR),
        tasks="demo",
        limit=2,
        devices=8,
        judge=False,
    )
    assert found.copies == 0 and found.seconds is None and "does not fit" in found.summary
    assert all(stage.seconds is None and stage.dollars is None for stage in found.stages)


def test_copies_share_the_work_and_dollars_count_every_device() -> None:
    given = {
        "model": str(SCALE / "llama-3-70b"),
        "tokenizer": str(demo.MODEL_DIR),
        "tasks": "demo",
        "limit": 2,
    }
    few = mc.plan(**given, dtype="bfloat16", devices=8, machine_args={"price": 2.0, "disk_bandwidth": 1e9}, judge=False)
    many = mc.plan(
        **given, dtype="bfloat16", devices=64, machine_args={"price": 2.0, "disk_bandwidth": 1e9}, judge=False
    )
    assert few.devices_per_copy == 2 and (few.copies, many.copies) == (4, 32)
    assert mc.plan(**given, devices=8, judge=False).devices_per_copy == 2  # its own dtype on GPUs, which is bfloat16
    assert mc.plan(**given, dtype="float32", devices=8, judge=False).devices_per_copy == 4
    for one, other in zip(few.stages, many.stages, strict=True):
        shared = 1 if "quantize" in one.stage else 8  # one copy compresses
        assert one.seconds == pytest.approx(shared * other.seconds, rel=1e-3)
        assert one.dollars == pytest.approx(one.seconds / 3600 * 8 * 2.0)


def test_what_is_wrong_is_said_and_what_is_not_known_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tokenizer"):
        mc.plan(model=str(SCALE / "llama-3-70b"), tasks="demo")
    with pytest.raises(ConfigError, match="traces"):
        mc.plan(tasks="traces", judge=False)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError):
        mc.plan(model=str(tmp_path), tokenizer=str(demo.MODEL_DIR), tasks="demo")
    text = mc.plan(limit=2, method="slicegpt", device="cpu", judge=False).as_text()
    assert "quantize (slicegpt)" in text and "unknown" in text


PUBLISHED = {  # seconds of GPTQ by weights in billions: one A100, 128 samples of 2,048 tokens (arXiv 2210.17323)
    "OPT-13B": (12.85, 20.9 * 60),
    "OPT-30B": (29.97, 44.9 * 60),
    "OPT-66B": (65.72, 1.6 * 3600),
    "OPT-175B": (174.6, 4.2 * 3600),
    "BLOOM-1.7B": (1.72, 2.9 * 60),
    "BLOOM-3B": (3.0, 5.2 * 60),
    "BLOOM-7.1B": (7.07, 10.0 * 60),
    "BLOOM-176B": (176.2, 3.8 * 3600),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_gptq_takes_what_was_published(name: str) -> None:
    billions, seconds = PUBLISHED[name]
    shape = replace(tiny(), dense=int(billions * 1e9), experts=0)
    forward = 2 * 2.0 * shape.dense * 128 * 2048 / 125e12
    predicted = costs.solving_seconds("gptq", shape) + forward
    assert 0.85 < predicted / seconds < 1.17, f"{predicted:.0f} s predicted, {seconds:.0f} s published"
    assert costs.solving_seconds("awq", shape) == 0


def test_a_plan_names_its_machine_and_a_cpu_is_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = mc.plan(limit=2, method="gptq", bits=4, judge=False)
    assert "Times are of 1 GPU with 80 GiB, 400 Tflop/s and 2.5 TB/s: device, devices, device_memory" in plan.as_text()
    assert "All stages: less than 1 s." in plan.as_text()
    monkeypatch.setattr(
        "timeit.repeat", lambda work, timer, number, repeat: [0.02, 0.01, 0.03]
    )  # seconds of either work
    here = mc.plan(limit=2, method="gptq", bits=4, judge=False, device="cpu")
    [note] = [note for note in here.notes if note.startswith("Times are of 1 machine like this one")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    # In the best 0.01 s 2 * 1024^3 operations, and 4 * 2^26 bytes.
    assert f"with {memory:.3g} GiB, 0.215 Tflop/s and 0.027 TB/s" in note
    assert here.seconds > 10 * plan.seconds  # type: ignore[operator]
    assert mc.plan(limit=2, judge=False, device="cpu", machine_args={"device_memory": 0.01}).devices_per_copy > 1


def test_a_plan_for_a_gpu_is_made_on_any_machine() -> None:
    assert mc.plan(limit=2, device="cuda", judge=False, task_args={"noise_items": 0}).copies == 1
