"""Served models through the stages: a variant against the demo, both sides served, answers, and a kill."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlflow_compress as mc
from mlflow_compress import demo
from mlflow_compress.engines.endpoint.served_model import PROBE_TEXT
from mlflow_compress.errors import AlignmentError, ConfigError
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model
from mlflow_compress.records import RunRecords
from tests.docs.blocks import DOCS
from tests.judge_server import Raw
from tests.served_demo import NAME, ServedDemo, served_demo
from tests.stores import runs_in
from tests.task_files import sums, write_rows
from tests.unit.scoring_models import rounding
from tests.waiting import until


def task(folder: Path, n: int = 6) -> str:
    lettered = [
        {
            "id": f"l{i}",
            "category": "c",
            "question": f"Which is {i}?",
            "choices": ["one", "two", "three", "four"],
            "answer": i % 4,
        }
        for i in range(n)
    ]
    cloze = write_rows(folder / "cloze.jsonl", sums(n, choices=["two", "four or more"], answer=0))
    return f"{cloze},{write_rows(folder / 'lettered.jsonl', lettered)}"


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {"tasks": task(folder), "num_shuffles": 1, "num_fewshot": 0, "dtype": "float32", **more}


def test_the_served_demo_does_not_differ_from_the_demo(loaded: LoadedModel, tmp_path: Path) -> None:
    said: list[str] = []
    store = tmp_path / "runs"
    asked = settings(tmp_path, store=store, endpoint_args={"served_model": NAME}, progress=said.append)
    with served_demo(loaded) as server:
        found = mc.evaluate(f"endpoint:{server.base_url}", task_args={"noise_items": 2}, **asked)
        fixed, n_asked = loaded.tokenizer(PROBE_TEXT)["input_ids"][:5], len(server.bodies)
        times = {n for body, n in server.answered.items() if json.loads(body)["prompt"][:5] != fixed}
        again = mc.evaluate(f"endpoint:{server.base_url}", task_args={"noise_items": 2}, **asked)
        n_probed = len(server.bodies) - n_asked
    assert found["distance/flips_pct"].value == 0.0
    # A KL is at most half of the square of the largest change of ln p; both sides are rounded.
    assert 0.0 <= found["distance/kl_top20"].value <= (2 * 2 * rounding(loaded)) ** 2 / 2
    assert found["distance/top_kept_mass"].value > 0.5
    # A sample was asked twice, and the rest once; this server answers alike. What is found again says the same.
    assert times == {1, 2}
    assert found["served/flips_pct"].value == 0.0 and found["served/kl_top20"].value == 0.0
    assert found["served/flips_pct"].n == 4 < found["distance/flips_pct"].n  # two items a task
    # Cloze items have lists in that sample only; the letters of all six lettered items are read from lists.
    bound = found["distance/kl_top20"]
    assert (bound.n, bound.n_unscored, found["served/kl_top20"].n) == (2 + 6, 0, 4)
    assert "asked twice 6 items (noise floor)" in found.account.sentence
    assert "lists of most probable tokens of 14 items" in found.account.sentence  # with E and F another six
    assert again["served/kl_top20"] == found["served/kl_top20"]
    assert "distance/kl_mean" not in found.metrics and "KL at least" in found.verdict
    assert "no option_distances records" in found.not_computed["divergence"]
    assert found.name == f"endpoint-{NAME}" and found.manifest is None
    assert "echo          yes" in said[0] and "top list      20" in said[0]
    own, theirs = found.records().option_scores, RunRecords.read(found.baseline_records_folder).option_scores
    per_token = (own.column("loglik") - theirs.column("loglik")) / own.column("n_tokens")
    assert np.abs(per_token).max() <= 2 * rounding(loaded)  # both are float32; the batches differ
    assert again.variant_found_in is not None and n_probed < n_asked / 2  # the second time it is only recognised
    shown = [path.read_text(errors="ignore") for path in store.rglob("*") if path.suffix in (".json", ".yaml", ".txt")]
    assert shown and server.base_url.split("//")[1].split("/")[0] not in "".join(shown).replace(
        f"endpoint:{server.base_url}", ""
    )


QUESTION = {
    "lettered": "a lettered question: its own",
    "listed": "16 options of cloze questions",
    "alone": "a cloze question with",
}


@pytest.mark.parametrize(("kind", "num_shuffles"), [("lettered", 0), ("lettered", 1), ("listed", 0), ("alone", 0)])
def test_the_page_counts_the_requests_that_a_server_sees(
    kind: str, num_shuffles: int, loaded: LoadedModel, tmp_path: Path
) -> None:
    page = (DOCS / "how-to" / "endpoint.md").read_text()

    def on_page(what: str) -> int:
        (n,) = re.findall(rf"^\| {re.escape(what)}.* \| (\d+) \|$", page, re.MULTILINE)
        return int(n)

    cloze, lettered = task(tmp_path).split(",")
    asked = {"tasks": lettered if kind == "lettered" else cloze, "num_shuffles": num_shuffles, "num_fewshot": 0}
    with served_demo(loaded, lists=kind != "alone") as server:
        mc.evaluate(
            f"endpoint:{server.base_url}",
            endpoint_args={"served_model": NAME},
            task_args={"noise_items": 2},
            store=tmp_path / "runs",
            **asked,
        )
        seen = len(server.bodies)
    each = on_page(QUESTION[kind]) + num_shuffles * on_page("each shuffle")
    # A server that takes no lists is asked for one in both forms. Six questions, and two of them again. Echoes share requests: of four questions (8 options), of two with lists (4),
    # and of these again.
    assert seen == on_page("the server's abilities") + (kind == "alone") + (3 if kind == "listed" else 6 + 2) * each


def impossible(reply: dict[str, Any]) -> None:
    """Say that the last token has probability 0, as vLLM writes it."""
    for choice in reply["choices"]:
        told = choice["logprobs"]
        told["token_logprobs"][-1] = told["top_logprobs"][-1][told["tokens"][-1]] = -9999.0


# How a server answers -> questions without a score, of six cloze questions; what only some of them meet
ANSWERING: dict[str, tuple[Callable[[dict[str, Any]], object], int]] = {
    "without a count of tokens": (lambda reply: reply.pop("usage"), 0),
    "without its model's name": (lambda reply: reply.update(model=None), 0),
    "without an end": (lambda reply: [choice.pop("finish_reason", None) for choice in reply["choices"]], 0),
    "with a probability of 0": (impossible, 2),
    "with a shorter context": (lambda reply: None, 3),
}


@pytest.mark.parametrize("how", ANSWERING)
def test_a_figure_is_of_all_items_or_the_first_line_says_how_many_have_no_score(
    how: str, loaded: LoadedModel, tmp_path: Path
) -> None:
    change, n_missing = ANSWERING[how]
    rows = sums(6, choices=["two", "four or more"], answer=0)
    rows = [{**row, "context": "Long ago, " * (9 if i < 3 else 1) + row["context"]} for i, row in enumerate(rows)]
    write_rows(tmp_path / "cloze.jsonl", rows)
    with served_demo(loaded, lists=False) as server:
        if how == "with a shorter context":
            server.max_length = 40

        def answered(number: int, body: dict[str, Any]) -> Raw | None:
            reply = server.answer("/v1/completions", body)
            if isinstance(reply, tuple) or (change is impossible and not (body.get("echo") and met(body["prompt"]))):
                return None
            change(reply)
            return Raw(json.dumps(reply).encode())

        def met(prompt: list[int] | str) -> bool:
            asked = prompt if isinstance(prompt, str) else loaded.tokenizer.decode(prompt)
            return asked.endswith(("4 plus 4 is two", "5 plus 5 is four or more"))

        server.fault = answered
        found = mc.evaluate(
            f"endpoint:{server.base_url}",
            endpoint_args={"served_model": NAME},
            tasks=str(tmp_path / "cloze.jsonl"),
            task_args={"noise_items": 2},
            dtype="float32",
            store=tmp_path / "runs",
        )
    first, flips = found.as_text().splitlines()[0], found["distance/flips_pct"]
    assert (found.account.asked, found.account.scored, flips.n) == (6, 6 - n_missing, 6 - n_missing)
    assert (f"{n_missing} of 6 items have no score" in first) == bool(n_missing)
    assert (": open under the default policy: " in first and "have no score > 1 %" in first) == bool(n_missing)
    assert flips.value == 0 and found["quality/accuracy_delta"].value == 0
    assert found["quality/accuracy"].n == found["quality/accuracy_baseline"].n == 6 - n_missing


def test_a_served_variant_against_a_served_baseline(loaded: LoadedModel, tmp_path: Path) -> None:
    with served_demo(loaded) as baseline, served_demo(loaded, kind="text") as variant:
        found = mc.evaluate(
            f"endpoint:{variant.base_url}",
            model=f"endpoint:{baseline.base_url}",
            endpoint_args={"baseline_served_model": NAME, "served_model": NAME, "tokenizer": str(demo.MODEL_DIR)},
            **settings(tmp_path, store=tmp_path / "runs"),
        )
    assert found.baseline == NAME
    assert found["distance/flips_pct"].value == 0.0
    # A KL is at most half of the square of the largest change of ln p, and both passes are rounded.
    assert found["distance/kl_top20"].value <= (2 * rounding(loaded)) ** 2 / 2
    assert found["noise/kl_top20"].value == 0.0  # this server answers the same prompt in the same way
    assert found["noise/flips_pct"].value == 0.0


def test_a_base_and_its_adapter_are_two_names_of_one_server(loaded: LoadedModel, tmp_path: Path) -> None:
    adapted = load_model(LoadConfig(path=str(demo.MODEL_DIR), dtype="float32", device="cpu"))
    adapted.model.model.layers[2].mlp.down_proj.weight.data.mul_(0.5)
    names = {"baseline_served_model": NAME, "served_model": "my-lora", "tokenizer": str(demo.MODEL_DIR)}
    asked = settings(tmp_path, endpoint_args=names)
    with served_demo(loaded, adapters={"my-lora": adapted}, max_length=512) as server:
        address = f"endpoint:{server.base_url}"
        said: list[str] = []
        together = mc.evaluate(address, model=address, store=tmp_path / "one", progress=said.append, **asked)
    assert together.baseline == NAME and together.verdict.startswith("endpoint-my-lora")
    assert {body["model"] for body in server.bodies} == {NAME, "my-lora"}
    assert "\n".join(said).count("512 tokens") == 2  # the server tells an adapter's context by its base
    # Each name has its own answers: they are those of two servers.
    with served_demo(loaded) as base, served_demo(loaded, adapters={"my-lora": adapted}) as other:
        apart = mc.evaluate(
            f"endpoint:{other.base_url}", model=f"endpoint:{base.base_url}", store=tmp_path / "two", **asked
        )
    assert together["distance/kl_top20"].value > 0
    assert together.metrics == apart.metrics


def test_another_model_under_the_same_name_is_refused_later_and_midway(loaded: LoadedModel, tmp_path: Path) -> None:
    other = load_model(LoadConfig(path=str(demo.MODEL_DIR), dtype="float32", device="cpu"))
    other.model.model.layers[2].mlp.down_proj.weight.data.zero_()
    with served_demo(loaded) as server:

        def exchanged(number: int, body: dict[str, Any]) -> Raw | None:
            if number == 25:  # behind the first questions about what the server can
                server.loaded = other
            return None

        server.fault = exchanged
        asked = settings(
            tmp_path, store=tmp_path / "runs", endpoint_args={"served_model": NAME}, task_args={"noise_items": 1}
        )
        with pytest.raises(AlignmentError, match="gives other answers than before under this name"):
            mc.evaluate(f"endpoint:{server.base_url}", **asked)
    assert {run.info.status for run in runs_in(tmp_path / "runs")} == {
        "FINISHED",  # the baseline
        "FAILED",
    }
    with served_demo(loaded) as server:
        mc.evaluate(f"endpoint:{server.base_url}", **asked)
    with (
        served_demo(other) as server,
        pytest.raises(AlignmentError, match="gives other answers than before under this name"),
    ):
        mc.evaluate(f"endpoint:{server.base_url}", **asked)


@pytest.mark.slow
def test_a_served_variant_answers_the_judge_stage(loaded: LoadedModel, tmp_path: Path) -> None:
    with served_demo(loaded) as server:
        answers = mc.judge(
            f"endpoint:{server.base_url}",
            endpoint_args={"served_model": NAME},
            judges="similarity,divergent_tokens",
            answer_args={"instruction_limit": 1, "num_samples": 2, "max_new_tokens": 4, "judge_max_tokens": 4},
            dtype="float32",
            store=tmp_path / "runs",
        )
    assert -1 <= answers["judge/similarity"].value <= 1
    written = answers.records().generations
    assert len(written) and any(written.column("text").tolist())
    assert "divergent_tokens: a server shows no complete distributions" in answers.skipped


@pytest.mark.parametrize(
    ("address", "more", "said"),
    [
        (
            "endpoint:http://user:s3cr3t@127.0.0.1:1/v1",
            {"endpoint_args": {"served_model": "x"}},
            "holds a user, a password or a query",
        ),
        (
            "endpoint:http://127.0.0.1:1/v1?key=s3cr3t",
            {"endpoint_args": {"served_model": "x"}},
            "holds a user, a password or a query",
        ),
        ("endpoint:127.0.0.1", {"endpoint_args": {"served_model": "x"}}, "is not an address"),
        ("endpoint:http://127.0.0.1:1/v1", {}, "'served_model' must be given"),
        (
            "endpoint:http://127.0.0.1:1/v1",
            {"endpoint_args": {"served_model": "x"}, "model": "endpoint:http://127.0.0.1:1/v1"},
            "'baseline_served_model' must be given",
        ),
        (
            "endpoint:http://127.0.0.1:1/v1",
            {
                "endpoint_args": {"served_model": "x", "baseline_served_model": "y"},
                "model": "endpoint:http://127.0.0.1:1/v1",
            },
            "'tokenizer' must be given",
        ),
    ],
)
def test_a_wrong_address_is_one_clear_error(address: str, more: dict[str, str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        mc.evaluate(address, **settings(tmp_path, store=tmp_path / "runs"), **more)
    assert "s3cr3t" not in str(error.value)
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".jsonl"]
    assert not any(b"s3cr3t" in path.read_bytes() for path in kept)  # MLflow's tables have the plain word


@pytest.mark.slow
def test_a_killed_evaluation_asks_nothing_twice(loaded: LoadedModel, tmp_path: Path) -> None:
    tasks = task(tmp_path, 16)
    beginning = loaded.tokenizer(PROBE_TEXT)["input_ids"][:4]

    def questions(server: ServedDemo) -> dict[str, int]:
        """Return how often each question was answered, without those about what the server can."""

        def about_the_server(prompt: Any) -> bool:
            if isinstance(prompt, str):
                return prompt.startswith(PROBE_TEXT[:9])
            return about_the_server(prompt[0]) if isinstance(prompt[0], list) else prompt[:4] == beginning

        asked = {key: json.loads(key)["prompt"] for key in list(server.answered)}
        return {key: server.answered[key] for key, prompt in asked.items() if not about_the_server(prompt)}

    with served_demo(loaded) as server:
        command = [
            *(sys.executable, "-m", "mlflow_compress", "evaluate"),
            *(
                "--checkpoint",
                f"endpoint:{server.base_url}",
                "--endpoint_args",
                f"served_model={NAME}",
                "--tasks",
                tasks,
            ),
            *("--num_shuffles", "1", "--num_fewshot", "0", "--dtype", "float32", "--endpoint_args", "concurrency=2"),
        ]

        def environment(name: str) -> dict[str, str]:
            own = {
                "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / name}.db",
                "MLFLOW_COMPRESS_HOME": str(tmp_path / name),
            }
            return {**os.environ, **own}

        whole = subprocess.run(command, env=environment("whole"), cwd=tmp_path, capture_output=True, text=True)
        assert whole.returncode == 0, whole.stderr
        wanted = questions(server)  # twice: the sample of the noise floor holds all of them
        assert len(wanted) > 40 and set(wanted.values()) == {2}
        server.answered.clear()
        killed = threading.Event()

        def fault(number: int, body: dict[str, Any]) -> Raw | None:
            if len(questions(server)) >= len(wanted) // 2:
                killed.wait()  # the rest is not answered before
            return Raw(b"{}", 429, {"retry-after-ms": "1"}) if number % 5 == 0 else None

        server.fault = fault
        with (tmp_path / "log").open("w") as log:
            first = subprocess.Popen(command, env=environment("killed"), cwd=tmp_path, stdout=log, stderr=log)
        try:
            until(
                lambda: len(questions(server)) >= len(wanted) // 2,
                ended=lambda: first.poll() is not None,
                said=lambda: (tmp_path / "log").read_text(),
            )
        finally:
            first.kill()
            first.wait()
            n_answered = len(questions(server))
            killed.set()
        assert len(wanted) // 2 <= n_answered < len(wanted)
        done = subprocess.run(command, env=environment("killed"), cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        answered = questions(server)
    assert set(answered) == set(wanted)
    # At most the two requests that were under way when the process was killed.
    assert sum(answered.values()) - sum(wanted.values()) <= 2
