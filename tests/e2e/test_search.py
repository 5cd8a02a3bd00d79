"""Searches on the embedded demo, in a real store: the chosen checkpoint, its row in the table, and what is found again."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

from mlflow_compress import cli, demo
from mlflow_compress.compression.methods.mixed import RECIPE_FILE
from mlflow_compress.compression.mixed_recipe import MixedRecipe
from mlflow_compress.models.source_model import resolve
from mlflow_compress.models.stored_weights import bytes_of_layers, read_headers
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.tracker import Tracker

MEASURED = ("--limit=4", "--num_shuffles=0", "--task_args=noise_items=2", "--judge=false", "--speed=false")


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, str]:
    """Return two texts of the demo's world, without a common paragraph."""
    paragraphs = (demo.DATA_DIR / "corpus.txt").read_text().split("\n\n")
    for name, part in (("search", paragraphs[:40]), ("tasks", paragraphs[100:150])):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(part))
    return {"text": str(tmp_path / "search.txt"), "tasks": str(tmp_path / "tasks.txt")}


def command(texts: dict[str, str], **more: str) -> list[str]:
    options = {
        "formats": "rtn:3,rtn:8",
        "calibration_args": "length=64",
        "task_args": "noise_items=2",
        "tasks": texts["tasks"],
        "search_args": f"text={texts['text']}",
    }
    how = {name: more.pop(name, default) for name, default in (("windows", "8"), ("cache_tokens", ""))}
    given = [f"--{name}={value}" for name, value in {**options, **more}.items()]
    return ["search", *given, *(f"--search_args={name}={value}" for name, value in how.items() if value)]


def searches(tracker: Tracker) -> list[Any]:
    return list(tracker.client.search_runs([tracker.experiment_id], filter_string="tags.stage = 'search'"))


@pytest.mark.ci
def test_the_chosen_checkpoint_keeps_to_its_budget_and_stands_beside_the_uniform_ones(
    tracker: Tracker, texts: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command(texts, bits_per_weight="4,6", windows="24")) == 0
    shown = capsys.readouterr()
    assert "variants of mixed precision" in shown.out and "[search] 4bit: makes mixed-rtn-4bit" in shown.err

    [run] = searches(tracker)
    assert run.info.status == "FINISHED"
    files = {file.path for file in tracker.client.list_artifacts(run.info.run_id)}
    assert files == {"search.json", "search.csv", "search.md", "costs.csv", "figures", "figures.json"}
    found = tracker.fetch_json(run.info.run_id, "search.json")
    rows = {row["name"]: row for row in found["variants"]}
    assert list(rows) == ["rtn-3bit-g128", "mixed-rtn-4bit", "mixed-rtn-6bit", "rtn-8bit-g128"]  # by size
    kl = [row["kl"] for row in rows.values()]
    assert kl == sorted(kl, reverse=True)

    source = resolve(str(demo.MODEL_DIR))
    weights = sum(a * b for a, b in source.linear.values())
    for limit in (4, 6):
        row = rows[f"mixed-rtn-{limit}bit"]
        folder = Path(tracker.children(row["run_id"])["quantize"].data.tags[run_names.CHECKPOINT])
        stored = bytes_of_layers(read_headers(folder), source.linear)
        assert row["bits_per_weight"] == 8 * stored / weights <= limit
        assert row["gap"] == 0.0 and row["mix_kl"] > 0
        # What serving engines fuse has one format, and the recipe in the checkpoint is the one of the table.
        layers = json.loads((folder / RECIPE_FILE).read_text())["layers"]
        for layer, chosen in layers.items():
            number, kind = layer.split(".")[2], layer.rpartition(".")[2]
            group = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "o_proj": "o", "down_proj": "down"}
            assert chosen == found["recipes"][row["name"]][f"layers.{number}.{group.get(kind, 'gate_up')}"]
        assert set(layers) == set(source.linear)
        costs = {(cost["group"], cost["format"]): cost for cost in found["costs"]}
        recipe = [costs[pair] for pair in found["recipes"][row["name"]].items()]
        assert row["predicted_kl"] == pytest.approx(sum(cost["kl"] for cost in recipe))
        assert sum(cost["size_bytes"] for cost in recipe) == stored
        assert all(cost["kl_low"] <= cost["kl"] <= cost["kl_high"] for cost in recipe)
    mains = tracker.find_finished("main")
    assert {main.info.run_id for main in mains} == {row["run_id"] for row in rows.values()}
    assert {main.data.tags[run_names.SWEEP_RUN] for main in mains} == {run.info.run_id}
    assert run.data.metrics["search/variants"] == 2 and len(run.data.metrics) < 50

    # The same again: nothing is made twice, and the numbers are the same.
    assert cli.main(command(texts, bits_per_weight="4,6", windows="24")) == 0
    again = tracker.fetch_json(searches(tracker)[0].info.run_id, "search.json")
    assert len(searches(tracker)) == 2 and len(tracker.find_finished("main")) == len(mains)
    assert again["variants"] == found["variants"] and again["costs"] == found["costs"]

    # 3.05 bits are more than 3, and less than 3 bits and their scales: refused, and no run is left open.
    capsys.readouterr()
    assert cli.main(command(texts, bits_per_weight="3.05", windows="24")) == 2
    assert "Allowed: 3.1264 (every group in its smallest format) to 16 (the baseline)" in capsys.readouterr().err
    assert [run.info.status for run in searches(tracker)] == ["FAILED", "FINISHED", "FINISHED"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs the extra 'llama-cpp'")
def test_one_gguf_file_with_several_types(
    tracker: Tracker, texts: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"formats": "gguf-k:3,gguf:8", "bits_per_weight": "5"}
    assert cli.main(command(texts, **more)) == 0
    [run] = searches(tracker)
    found = tracker.fetch_json(run.info.run_id, "search.json")
    [row] = [row for row in found["variants"] if row["kind"] == "searched"]
    folder = Path(tracker.children(row["run_id"])["quantize"].data.tags[run_names.CHECKPOINT])
    assert {tensor.tensor_type.name for tensor in GGUFReader(folder / "model.gguf").tensors} == {
        "Q3_K",
        "Q8_0",
        "BF16",
        "F32",
    }
    source = resolve(str(demo.MODEL_DIR))
    weights = sum(rows * columns for rows, columns in source.linear.values())
    assert row["bits_per_weight"] == 8 * bytes_of_layers(read_headers(folder), source.linear) / weights <= 5
    costs = {(cost["group"], cost["format"]): cost for cost in found["costs"]}
    chosen = [costs[pair] for pair in found["recipes"][row["name"]].items()]
    assert row["predicted_kl"] == pytest.approx(sum(cost["kl"] for cost in chosen))


@pytest.mark.slow
def test_weights_and_caches_share_a_budget(tracker: Tracker, texts: dict[str, str]) -> None:
    caches = {"cache_formats": "16,4", "cache_tokens": "1000"}
    assert cli.main(command(texts, max_bytes="6e6", **caches)) == 0
    found = tracker.fetch_json(searches(tracker)[0].info.run_id, "search.json")
    [row] = [row for row in found["variants"] if row["kind"] == "searched"]
    tags = tracker.children(row["run_id"])["quantize"].data.tags
    folder, costs = Path(tags[run_names.CHECKPOINT]), {(c["group"], c["format"]): c for c in found["costs"]}
    chosen = found["recipes"][row["name"]]
    n_layers = resolve(str(demo.MODEL_DIR)).layers
    rounded = {layer for layer in range(n_layers) if chosen[f"layers.{layer}.cache"] == "kv-cache:4"}
    assert rounded  # the smallest weights with a whole cache take 8.5 MB
    recipe = json.loads((folder / RECIPE_FILE).read_text())
    assert recipe["cache"] == {str(layer): {"key_bits": 4, "value_bits": 4} for layer in sorted(rounded)}
    taken = {c["format"]: c["size_bytes"] for c in found["costs"] if c["group"] == "layers.0.cache"}
    assert row["cache_bytes"] == sum(taken[chosen[f"layers.{layer}.cache"]] for layer in range(n_layers))
    assert row["size_bytes"] + row["cache_bytes"] <= 6e6
    assert row["gap"] == 0.0 and {c["kl"] for c in found["costs"] if c["format"] == "kv-cache:16"} == {0.0}
    assert all(costs[pair]["kl"] > 0 for pair in chosen.items() if pair[1] == "kv-cache:4")
    assert "Cache: keys and values of 1,000 tokens. Limits count it with the weights" in found["notes"]


@pytest.mark.ci
def test_the_smallest_variant_within_a_kl(
    tracker: Tracker, texts: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command(texts, formats="gptq:3,gptq:8", max_kl="0.02")) == 0
    found = tracker.fetch_json(searches(tracker)[0].info.run_id, "search.json")
    [row] = [row for row in found["variants"] if row["kind"] == "searched"]
    assert row["limit"] == "kl0.02" and row["max_kl"] == 0.02
    uniform = {row["name"]: row for row in found["variants"] if row["kind"] == "uniform"}
    assert uniform["gptq-3bit-g128"]["search_kl"] > 0.02 > row["search_kl_high"]
    assert row["size_bytes"] < uniform["gptq-8bit-g128"]["size_bytes"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"bits_per_weight": "2.5"}, "bits_per_weight is out of range"),
        ({"bits_per_weight": "4", "formats": "rtn:3,gguf:8"}, "'gguf' cannot share a checkpoint"),
        ({"bits_per_weight": "4", "windows": "4000"}, "too short"),
    ],
)
def test_what_is_wrong_is_refused_before_a_run(
    tracker: Tracker, texts: dict[str, str], capsys: pytest.CaptureFixture[str], more: dict[str, str], message: str
) -> None:
    assert cli.main(command(texts, **more)) in (1, 2)
    assert message in capsys.readouterr().err
    assert tracker.client.search_runs([tracker.experiment_id]) == []


def test_a_text_that_is_evaluated_too_is_refused(
    tracker: Tracker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paragraph = " ".join(f"word{number}" for number in range(60))
    (tmp_path / "both.txt").write_text("\n\n".join(f"{paragraph} {number}" for number in range(60)))
    both = {"text": str(tmp_path / "both.txt"), "tasks": str(tmp_path / "both.txt")}
    assert cli.main(command(both, bits_per_weight="4")) == 1
    assert "text contains 60 paragraphs" in capsys.readouterr().err
    assert tracker.client.search_runs([tracker.experiment_id]) == []


@pytest.mark.slow  # the search above, which CI runs, with a policy as its constraint; test_repair.py has the constraint
def test_a_refused_variant_is_repaired_for_the_fewest_bytes_that_the_policy_takes(
    tracker: Tracker, texts: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = f"--tasks={demo.DATA_DIR / 'choice.jsonl'},{texts['tasks']}"
    measured = [tasks, *MEASURED]
    assert cli.main(["sweep", "--methods=rtn,magnitude", "--bits=3", *measured]) == 0
    mains = {run.data.tags[run_names.METHOD]: run for run in tracker.find_finished("main")}
    refused = mains["rtn"]
    limit = refused.data.metrics["distance/corpus_kl_mean"] / 3
    policy = tmp_path / "policy.yaml"
    gate = f"{{metric: distance/corpus_kl_mean, at_most: {limit}, bound: value}}"
    policy.write_text(f"kl: none\ngates: [{gate}]\nmargins: []\n")
    repair = ["search", f"--policy={policy}", "--search_args", "windows=8,rounds=1"]
    assert cli.main([*repair, f"--repair={refused.info.run_id[:8]}"]) == 0
    shown = capsys.readouterr()
    [run] = searches(tracker)
    found = tracker.fetch_json(run.info.run_id, "repair.json")
    assert found["verdict"] in shown.out and "[repair] all layers at 8 bits" in shown.err
    trials = {one["role"]: one for one in found["trials"]}
    before, after = trials["refused"], trials["repaired"]
    assert [one["size_bytes"] for one in found["trials"]] == sorted(one["size_bytes"] for one in found["trials"])
    assert found["extra_bytes"] == after["size_bytes"] - before["size_bytes"] > 0
    assert run.data.metrics["search/extra_bytes"] == found["extra_bytes"]
    assert after["passed"] and not before["passed"] and 0 < after["raised"] == len(found["changed"]) < 20
    # The repaired variant keeps to the policy, in the same evaluation, with the layers that are told.
    main = tracker.client.get_run(after["run_id"])
    assert main.data.metrics["distance/corpus_kl_mean"] <= limit
    assert main.data.tags[run_names.EVALUATION] == refused.data.tags[run_names.EVALUATION]
    layers = json.loads((Path(main.data.tags[run_names.CHECKPOINT]) / RECIPE_FILE).read_text())["layers"]
    kinds = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "o_proj": "o", "down_proj": "down"}
    raised = {
        f"layers.{layer.split('.')[2]}.{kinds.get(layer.rpartition('.')[2], 'gate_up')}"
        for layer, name in layers.items()
        if name != "rtn:3"
    }
    assert raised == set(found["changed"])
    # All that is smaller and was tried does not pass.
    assert all(not one["passed"] for one in found["trials"] if one["size_bytes"] < after["size_bytes"])

    # It passes by itself now, and what cannot be repaired is refused before anything is made.
    made = len(tracker.find_finished("main"))
    assert cli.main([*repair, f"--repair={after['run_id']}"]) == 0
    assert "already passes the policy: nothing was made" in capsys.readouterr().out
    assert cli.main([*repair, f"--repair={mains['magnitude'].info.run_id}"]) == 2
    assert "cannot be repaired: Method 'magnitude'" in capsys.readouterr().err
    assert cli.main([*repair, f"--repair={run.info.run_id}"]) == 2
    assert "Only the variant of a finished main run can be repaired" in capsys.readouterr().err
    assert len(tracker.find_finished("main")) == made and len(searches(tracker)) == 1

    # What no layer changes is told, with exit code 3.
    policy.write_text("kl: none\ngates: [{metric: speed/decode_ratio_batch_1, at_least: 1}]\nmargins: []\n")
    assert cli.main([*repair, f"--repair={refused.info.run_id}"]) == 3
    assert "cannot be repaired: not even rtn-8bit-g128 passes" in capsys.readouterr().out


@pytest.mark.slow
def test_a_variant_with_a_rounded_cache_is_repaired_in_its_weights_and_its_cache(
    tracker: Tracker, texts: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = resolve(str(demo.MODEL_DIR))
    recipe = tmp_path / "both.json"
    MixedRecipe(
        formats={"rtn:4": {"method": "rtn", "bits": 4}},
        layers=dict.fromkeys(source.linear, "rtn:4"),
        cache={str(layer): {"key_bits": 2, "value_bits": 2} for layer in range(source.layers)},
    ).write(recipe)
    tasks = f"--tasks={demo.DATA_DIR / 'choice.jsonl'},{texts['tasks']}"
    measured = [tasks, *MEASURED]
    windows = ["--calibration_args", "samples=1,length=64"]
    assert cli.main(["main", "--method=mixed", f"--method_args=recipe={recipe}", *windows, *measured]) == 0
    [refused] = tracker.find_finished("main")
    limit = refused.data.metrics["distance/corpus_kl_mean"] / 3
    policy = tmp_path / "policy.yaml"
    gate = f"{{metric: distance/corpus_kl_mean, at_most: {limit}, bound: value}}"
    policy.write_text(f"kl: none\ngates: [{gate}]\nmargins: []\n")
    repair = ["search", f"--policy={policy}", "--search_args", "windows=4,rounds=0,cache_tokens=1000"]
    assert cli.main([*repair, f"--repair={refused.info.run_id}"]) == 0
    assert "Cache: keys and values of 1,000 tokens" in capsys.readouterr().out
    found = tracker.fetch_json(searches(tracker)[0].info.run_id, "repair.json")
    trials = {one["role"]: one for one in found["trials"]}
    before, after = trials["refused"], trials["repaired"]
    sizes = [one["size_bytes"] + one["cache_bytes"] for one in found["trials"]]
    assert sizes == sorted(sizes) and found["trials"][-1]["name"] == "rtn-8bit-g128"
    # The largest has a plain cache, whose numbers take 2 bytes; a vector of 2 bits takes 4 more for scale and offset.
    config = source.configuration()
    vectors = 1000 * source.layers * 2 * config.num_key_value_heads
    assert found["trials"][-1]["cache_bytes"] == vectors * 2 * config.head_dim
    assert before["cache_bytes"] == vectors * (config.head_dim // 4 + 4)
    assert found["extra_bytes"] == sum(after[n] - before[n] for n in ("size_bytes", "cache_bytes")) > 0
    # The checkpoint is what is told of it, and keeps to the policy.
    main = tracker.client.get_run(after["run_id"])
    assert main.data.metrics["distance/corpus_kl_mean"] <= limit < refused.data.metrics["distance/corpus_kl_mean"]
    folder = Path(main.data.tags[run_names.CHECKPOINT])
    made = json.loads((folder / RECIPE_FILE).read_text())
    raised = {name: what for name, what in found["changed"].items() if name.endswith(".cache")}
    assert 0 < len(raised) == after["raised_caches"] and len(found["changed"]) == len(raised) + after["raised"]
    for layer in range(source.layers):
        bits = {"at 8 bits": 8, "as in the baseline": None}.get(raised.get(f"layers.{layer}.cache", ""), 2)
        cache = None if bits is None else {"key_bits": bits, "value_bits": bits}
        assert made["cache"].get(str(layer)) == cache
    entry = json.loads((folder / "config.json").read_text())["quantized_cache"]
    assert {layer: one["keys"]["bits"] for layer, one in entry.items()} == {
        layer: one["key_bits"] for layer, one in made["cache"].items()
    }
    # What the costs promised for this mixture is near what its checkpoint has become.
    assert after["predicted_kl"] == pytest.approx(after["search_kl"], rel=0.5)
