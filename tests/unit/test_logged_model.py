"""A variant's MLflow model: loads from the artifact store alone in a fresh process, ranks, and says what it needs."""

import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import mlflow
import numpy as np
import pandas as pd
import pytest
import requests
from fastapi.testclient import TestClient
from mlflow.pyfunc import scoring_server
from mlflow.types.llm import ChatCompletionResponse
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from transformers import AutoModelForCausalLM, AutoTokenizer

from mlflow_compress.compression import compress_model, method_config
from mlflow_compress.compression.checkpoint_manifest import CheckpointManifest
from mlflow_compress.models.loading import LoadConfig, load_model
from mlflow_compress.tracking import logged_model, run_names
from mlflow_compress.tracking.logged_model import PACKAGE_FOLDER, DataSet, VariantEntry, log_data_sets, log_model_values
from mlflow_compress.tracking.model_registry import move_alias, register_version
from mlflow_compress.tracking.tracker import Tracker
from tests.compress_models import make_llama
from tests.conftest import Fork, forked_checks
from tests.unit.scoring_models import rounding
from tests.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns while loading

# What a person does on another machine: load by alias, generate, score. Then which packages our code really imported.
ELSEWHERE = """
import ast, json, sys
from importlib.metadata import packages_distributions
from pathlib import Path

import mlflow, pandas as pd

model = mlflow.pyfunc.load_model("models:/compressed-llama@champion")
text = model.predict(pd.DataFrame({"prompt": ["the miller"]}), params={"max_new_tokens": 4})["text"][0]
score = model.predict(pd.DataFrame({"prompt": ["the"], "continuation": [" miller"]}))["loglik"][0]
import mlflow_compress

ours = [m for name, m in sorted(sys.modules.items()) if name.split(".")[0] == "mlflow_compress" and m.__file__]
asked = {"pandas", "mlflow"}
for module in ours:
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.Import):
            asked |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            asked.add(node.module.split(".")[0])
known = packages_distributions()
used = {name: known[name] for name in sorted(asked) if name in sys.modules and name in known}
print(json.dumps({"text": text, "score": score, "code": mlflow_compress.__file__, "used": used}))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, python: Fork) -> Path:
    """Return a compressed checkpoint that needs no calibration: rtn 4 bit of a small Llama."""
    folder = tmp_path_factory.mktemp("made")
    base = make_llama(folder / "llama")
    settings = method_config("rtn", bits="4", group_size="32")
    with forked_checks(python):
        compress_model(str(base), "rtn", settings, [], folder / "rtn")
    return folder / "rtn"


def entry(checkpoint: Path, *, name: str = "rtn-4bit-g32", log_weights: str = "auto") -> VariantEntry:
    manifest = CheckpointManifest.read(checkpoint)
    return VariantEntry(
        name=name,
        checkpoint=checkpoint,
        checkpoint_sha256="c" * 64,
        weight_files=manifest.weight_files,
        dtype="float32",
        params={"bits": 4},
        tags={run_names.VARIANT: name, run_names.METHOD: "rtn", run_names.EVALUATION: "a" * 16},
        log_weights=log_weights,
    )


def log(tracker: Tracker, what: VariantEntry) -> tuple[str, str]:
    """Log a variant under a run of its own; return run and model."""
    with tracker.run(what.name, "main", what.tags, own=False) as run:
        model = logged_model.log_variant_model(tracker, run.run_id, what)
    return run.run_id, model


def promoted(tracker: Tracker, run_id: str) -> str:
    """Register a run's model as champion and return the version's description."""
    tracker.client.create_registered_model("compressed-llama")
    version = register_version(tracker, "compressed-llama", tracker.client.get_run(run_id))
    move_alias(tracker, "compressed-llama", "champion", version)
    return str(tracker.client.get_model_version("compressed-llama", version).description)


def elsewhere(tracker: Tracker, folder: Path) -> subprocess.CompletedProcess[str]:
    """Load the champion in a fresh process that does not see this checkout."""
    folder.mkdir()
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MLFLOW_RUN_ID")}
    environment |= {"MLFLOW_TRACKING_URI": tracker.uri, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-c", ELSEWHERE]  # -P: the working folder is not on the path
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_another_machine_loads_the_champion_from_the_artifact_store_alone(
    tracker: Tracker, checkpoint: Path, tmp_path: Path
) -> None:
    here = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    run_id, model_id = log(tracker, entry(here))
    assert "stored with the model" in promoted(tracker, run_id)
    here_says = mlflow.pyfunc.load_model(f"models:/{model_id}").predict(
        pd.DataFrame({"prompt": ["the"], "continuation": [" miller"]})
    )
    shutil.rmtree(here)
    done = elsewhere(tracker, tmp_path / "other")
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    # Two passes in float32; roundings are those of the model that this one was made from.
    loaded = load_model(LoadConfig(path=str(checkpoint.parent / "llama"), device="cpu"))
    error = 2 * rounding(loaded) * here_says["n_tokens"][0]
    assert abs(said["score"] - here_says["loglik"][0]) <= error and isinstance(said["text"], str)
    assert not Path(said["code"]).is_relative_to(PACKAGE_FOLDER)  # the code came with the model
    pinned = {canonicalize_name(Requirement(line).name) for line in logged_model.requirements(checkpoint)}
    used = {name: from_ for name, from_ in said["used"].items() if name != "mlflow_compress"}
    assert {"torch", "transformers", "numpy"} <= used.keys()
    assert {
        name for name, distributions in used.items() if not pinned & set(map(canonicalize_name, distributions))
    } == set()


def test_requirements_are_what_is_installed_and_can_be_had_from_an_index(checkpoint: Path) -> None:
    lines = [Requirement(line) for line in logged_model.requirements(checkpoint)]
    for requirement in lines:
        assert "+" not in str(requirement), "indexes have no local versions"
        assert requirement.specifier.contains(importlib.metadata.version(requirement.name))
    found = {requirement.name for requirement in lines}
    assert "compressed-tensors" in found and not found & {"mlflow-compress", "bitsandbytes", "llmcompressor", "gguf"}


def test_a_model_by_reference_says_so_and_names_the_folder_when_it_is_gone(
    tracker: Tracker, checkpoint: Path, tmp_path: Path
) -> None:
    here = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    run_id, model_id = log(tracker, entry(here, log_weights="false"))
    assert f"by reference, loads only where the folder {here}" in promoted(tracker, run_id)
    tags = tracker.client.get_logged_model(model_id).tags
    assert tags[run_names.WEIGHTS_KEPT] == "reference" and str(here) in tags["mlflow.note.content"]
    mlflow.pyfunc.load_model(f"models:/{model_id}")
    shutil.rmtree(here)
    with pytest.raises(Exception, match=r"registered by reference.*not on this machine.*log_weights=true"):
        mlflow.pyfunc.load_model(f"models:/{model_id}")


def test_auto_stores_small_checkpoints_and_refers_to_large_ones(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert entry(checkpoint).storage == "logged"
    size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    monkeypatch.setattr(logged_model, "_AUTO_LIMIT", size - 1)
    assert entry(checkpoint).storage == "reference"
    assert entry(checkpoint, log_weights="true").storage == "logged"


def test_logging_loads_no_checkpoint_and_ships_no_demo_data(
    tracker: Tracker, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow_compress.models import loading

    monkeypatch.setattr(loading, "load_model", lambda config: pytest.fail("the checkpoint was loaded"))
    _, model_id = log(tracker, entry(checkpoint))
    folder = Path(mlflow.artifacts.download_artifacts(f"models:/{model_id}"))
    code = {path.relative_to(folder / "code") for path in (folder / "code").rglob("*") if path.is_file()}
    assert code == {path.relative_to(PACKAGE_FOLDER.parent) for path in PACKAGE_FOLDER.rglob("*.py")}
    assert (folder / "artifacts" / "checkpoint" / "compression.json").is_file()


def test_a_run_that_is_filled_again_keeps_its_model_and_data_sets(tracker: Tracker, checkpoint: Path) -> None:
    """A main run that is resumed after its judge failed is published a second time."""
    task = DataSet(name="mmlu", digest="f" * 64, source={"task": "mmlu"})
    with tracker.run("x", "main", {}) as run:
        for value in (0.1, 0.2):
            model_id = logged_model.log_variant_model(tracker, run.run_id, entry(checkpoint))
            log_data_sets(tracker, run.run_id, [task])
            log_model_values(tracker, run.run_id, model_id, {"distance/kl_mean": value}, task)
    stored = tracker.client.get_run(run.run_id)
    assert [o.model_id for o in stored.outputs.model_outputs] == [model_id]
    assert [i.dataset.name for i in stored.inputs.dataset_inputs] == ["mmlu"]
    assert stored.data.metrics["distance/kl_mean"] == 0.2


def test_a_run_that_was_killed_while_it_was_published_gets_another_model(tracker: Tracker, checkpoint: Path) -> None:
    """The first one is deleted; the run still refers to it."""
    with pytest.raises(KeyboardInterrupt), tracker.run("x", "main", {}) as run:
        first = logged_model.log_variant_model(tracker, run.run_id, entry(checkpoint))
        raise KeyboardInterrupt
    with tracker.reopen(run.run_id):
        second = logged_model.log_variant_model(tracker, run.run_id, entry(checkpoint))
        assert second != first
        assert second == logged_model.log_variant_model(tracker, run.run_id, entry(checkpoint))
    stored = tracker.client.get_run(run.run_id)
    assert {output.model_id for output in stored.outputs.model_outputs} == {first, second}
    tracker.client.create_registered_model("compressed-llama")
    version = register_version(tracker, "compressed-llama", stored)
    assert tracker.client.get_model_version("compressed-llama", version).source == f"models:/{second}"


def test_logged_models_are_named_after_variants_and_rank_by_distance(tracker: Tracker, checkpoint: Path) -> None:
    whole = DataSet(name=logged_model.EVALUATION_SET, digest="a" * 16, source={"tasks": ["mmlu"]})
    task = DataSet(name="mmlu", digest="f" * 64, source={"task": "mmlu", "source": "cais/mmlu"})
    for name, kl in (("near", 0.01), ("middle", 0.03), ("far", 0.2), ("wanda-2:4", 0.02)):
        run_id, model_id = log(tracker, entry(checkpoint, name=name, log_weights="false"))
        log_data_sets(tracker, run_id, [task, whole])
        log_model_values(tracker, run_id, model_id, {"distance/kl_mean": kl}, whole)
        log_model_values(tracker, run_id, model_id, {"distance/kl_mean/mmlu": kl / 2}, task)
    found = mlflow.search_logged_models(
        experiment_ids=[tracker.experiment_id],
        filter_string="metrics.`distance/kl_mean` < 0.05",
        order_by=[{"field_name": "metrics.distance/kl_mean", "ascending": True}],
        output_format="list",
    )
    assert [model.name for model in found] == ["near", "wanda-2-4", "middle"]
    assert found[0].params == {"bits": "4"} and found[0].tags[run_names.METHOD] == "rtn"
    other = [{"dataset_name": "evaluation", "dataset_digest": "b" * 16}]
    assert not mlflow.search_logged_models(
        experiment_ids=[tracker.experiment_id],
        filter_string="metrics.`distance/kl_mean` < 0.05",
        datasets=other,
        output_format="list",
    )
    run = tracker.client.get_run(found[0].source_run_id)
    assert run.data.metrics["distance/kl_mean"] == 0.01
    inputs = {i.dataset.name: i.dataset for i in run.inputs.dataset_inputs}
    assert set(inputs) == {"mmlu", "evaluation"} and inputs["mmlu"].digest == "f" * 16
    assert json.loads(inputs["mmlu"].source) == {"task": "mmlu", "source": "cais/mmlu"}


TWO = {"prompt": ["the miller", "the sea"], "continuation": [" sang", " rose"]}


def test_every_form_of_input_is_answered_rightly_or_refused(tracker: Tracker, checkpoint: Path) -> None:
    _, model_id = log(tracker, entry(checkpoint))
    model = mlflow.pyfunc.load_model(f"models:/{model_id}")
    few = {"max_new_tokens": 4}
    prompts = pd.DataFrame({"prompt": TWO["prompt"]})
    texts = model.predict(prompts, params=few)["text"].tolist()
    assert len(texts) == 2
    for same in ({"prompt": TWO["prompt"]}, prompts.to_dict("records")):
        assert model.predict(same, params=few)["text"].tolist() == texts
    assert model.predict({"prompt": TWO["prompt"][0]}, params=few)["text"].tolist() == texts[:1]
    assert (
        model.predict(model.input_example, params=few)["text"].tolist()
        == model.predict(pd.DataFrame({"prompt": ["Once upon a time"]}), params=few)["text"].tolist()
    )

    scores = model.predict(pd.DataFrame(TWO))
    for same in (TWO, pd.DataFrame(TWO).to_dict("records")):
        pd.testing.assert_frame_equal(model.predict(same), scores)
    warm = [
        model.predict(prompts, params={**few, "temperature": 5.0, "seed": seed})["text"].tolist() for seed in (1, 1, 2)
    ]
    assert warm[0] == warm[1] != warm[2]

    missing = pd.DataFrame({"prompt": TWO["prompt"], "continuation": [float("nan")] * 2})
    assert model.predict(missing, params=few)["text"].tolist() == texts

    unknown = (
        r"Allowed: columns prompt, continuation, messages; parameters max_new_tokens, temperature, seed. Got: \['{}'\]"
    )
    refused: list[tuple[object, dict[str, object], str]] = [
        (form, {}, unknown.format("0").replace("'", "")) for form in ("a", ["a", "b"], [["a"]], np.array(["a"]))
    ] + [
        ({"continuation": "a"}, {}, "nothing to go on from"),
        ({"prompt": "a", "max_tokens": 3}, {}, unknown.format("max_tokens")),
        ([{"prompt": "a", "temperature": 1.0}], {}, unknown.format("temperature")),
        (pd.DataFrame({"prompt": ["a"], "top_p": [0.5]}), {}, unknown.format("top_p")),
        ({"prompt": "a"}, {"max_tokens": 3}, unknown.format("max_tokens")),
        ({"prompt": "a"}, {"max_new_tokens": "many"}, "safely convert"),
        ({"prompt": "a"}, {"max_new_tokens": 0}, "at least 1"),
        ({"prompt": "a", "continuation": " b"}, few, "takes no parameters"),
        ([{"prompt": "a", "continuation": " b"}, {"prompt": "c"}], {}, r"row 1 holds no text.*every row or in none"),
        (pd.DataFrame({"prompt": TWO["prompt"], "continuation": [" a", float("nan")]}), {}, "row 1 holds no text"),
        ({"prompt": TWO["prompt"], "continuation": " a"}, {}, "do not belong together"),
        ({"prompt": TWO["prompt"], "continuation": [" a"]}, {}, "do not belong together"),
        ([{"prompt": ["a", "b"]}, {"prompt": "c"}], {}, "row 0 holds no text"),
        (pd.DataFrame({"prompt": [None]}), {}, "row 0 holds no text"),
        ({"prompt": 1}, {}, "row 0 holds no text"),
    ]
    for form, params, why in refused:
        with pytest.raises(Exception, match=why):
            model.predict(form, params=params)
    asked = {"role": "user", "content": "Who sang?"}
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    [plain] = model.predict({"prompt": "User: Who sang?\nAssistant:"}, params=few)["text"]
    for chats, n in (
        ({"messages": [asked]}, 1),
        ([{"messages": [asked]}, {"messages": [asked]}], 2),
        ({"messages": [[asked], [asked]]}, 2),
        (pd.DataFrame({"messages": [[asked]] * 3}), 3),
    ):
        replies = model.predict(chats, params=few)
        replies = [replies] if n == 1 else replies
        assert len(replies) == n
        for reply in replies:
            assert (
                ChatCompletionResponse.from_dict(reply).object == "chat.completion" and reply["model"] == "rtn-4bit-g32"
            )
            [choice] = reply["choices"]
            assert choice["message"] == {"role": "assistant", "content": plain.partition("\nUser:")[0].strip()}
            assert choice["finish_reason"] == "length" and choice["index"] == 0
            usage = reply["usage"]
            assert usage["completion_tokens"] == 4 and usage["prompt_tokens"] + 4 == usage["total_tokens"]
            assert usage["prompt_tokens"] == len(tokenizer("User: Who sang?\nAssistant:")["input_ids"])
    answer = {"role": "assistant", "content": "The miller."}
    longer = [{"role": "system", "content": "Be brief."}, asked, answer, {"role": "user", "content": "Why?"}]
    assert model.predict({"messages": longer}, params=few)["usage"]["prompt_tokens"] > usage["prompt_tokens"]
    for conversation in (
        [],
        [answer],
        [asked, answer],
        [asked, asked],
        3,
        "hi",
        ["hi"],
        [{**asked, "content": 1}],
        [{}],
        longer[:1],
    ):
        with pytest.raises(Exception, match="The messages of row 0 are no conversation"):
            model.predict([{"messages": conversation}], params=few)
    with pytest.raises(Exception, match="Conversations stand alone"):
        model.predict([{"messages": [asked], "prompt": "a"}])
    client = TestClient(scoring_server.init(model))
    told = client.post("/invocations", json={"messages": [asked], **few}).json()
    assert told["choices"] == reply["choices"] and told["usage"] == usage and told["id"] != reply["id"]
    two = client.post("/invocations", json={"inputs": [{"messages": [asked]}] * 2, "params": few}).json()
    assert [one["choices"] for one in two["predictions"]] == [reply["choices"]] * 2
    named = model.metadata.signature.outputs.input_names()
    assert {"text", "loglik", "n_tokens", "greedy"} <= set(named) and told.keys() <= set(named)
    for form in (
        {"inputs": TWO},
        {"instances": pd.DataFrame(TWO).to_dict("records")},
        {"dataframe_split": pd.DataFrame(TWO).to_dict("split")},
    ):
        answered = client.post("/invocations", json=form).json()["predictions"]
        assert [row["loglik"] for row in answered] == pytest.approx(scores["loglik"].tolist(), abs=1e-9)
    assert client.post("/invocations", json={"prompt": TWO["prompt"], **few}).json() == [{"text": t} for t in texts]
    for body, why in (
        ({"prompt": "a", "max_tokens": 3}, "Got: ['max_tokens']"),
        ({"inputs": {"prompt": "a"}, "params": {"max_tokens": 3}}, "Got: ['max_tokens']"),
        ({"inputs": [{"prompt": "a", "continuation": " b"}, {"prompt": "a", "continuation": None}]}, "row 1 holds no"),
        ({"inputs": {"prompt": None}}, "row 0 holds no text"),
        ({"dataframe_split": {"columns": ["prompt", "top_p"], "data": [["a", 1.0]]}}, "Got: ['top_p']"),
    ):
        refusal = client.post("/invocations", json=body)
        assert refusal.status_code == 400 and why in refusal.json()["message"]

    folder = Path(mlflow.artifacts.download_artifacts(f"models:/{model_id}"))
    whole = AutoModelForCausalLM.from_pretrained(folder / "artifacts" / "checkpoint")  # as the page says
    assert whole.config.model_type == "llama"
    description = (folder / "MLmodel").read_text()
    assert (
        str(PACKAGE_FOLDER) not in description
        and str(tracker.uri.removeprefix("sqlite:///").rpartition("/")[0]) not in description
    )


@pytest.mark.slow
def test_the_served_model_answers_its_own_example(tracker: Tracker, checkpoint: Path, tmp_path: Path) -> None:
    _, model_id = log(tracker, entry(checkpoint))
    folder = Path(mlflow.artifacts.download_artifacts(f"models:/{model_id}"))
    example = (folder / "serving_input_example.json").read_text()
    expected = mlflow.pyfunc.load_model(f"models:/{model_id}").predict(
        pd.DataFrame({"prompt": ["Once upon a time"]}), params={"max_new_tokens": 16}
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", f"models:/{model_id}", "--env-manager", "local"]

    def answers() -> bool:
        try:
            return requests.get(f"http://127.0.0.1:{port}/ping").ok
        except requests.ConnectionError:
            return False

    environment = {**os.environ, "MLFLOW_TRACKING_URI": tracker.uri}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    with subprocess.Popen([*command, "-h", "127.0.0.1", "-p", str(port)], cwd=tmp_path, env=environment) as server:
        try:
            until(answers, server)
            headers = {"Content-Type": "application/json"}
            answer = requests.post(f"http://127.0.0.1:{port}/invocations", data=example, headers=headers)
            assert answer.json()["predictions"] == expected.to_dict("records")
            chat = {"messages": [{"role": "user", "content": "Who sang?"}], "max_new_tokens": 4}
            answer = requests.post(f"http://127.0.0.1:{port}/invocations", json=chat, headers=headers)
            assert ChatCompletionResponse.from_dict(answer.json()).choices[0].message.role == "assistant"
        finally:
            server.terminate()
