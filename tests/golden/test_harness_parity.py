"""Our engine against lm-evaluation-harness's own Hugging Face backend: the same prompts, numbers and predictions.

Provenance: the reference is lm_eval 0.4.13 itself, run here on the same documents in float32.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.auto import AutoModelForCausalLM, AutoTokenizer

from mlflow_compress.commands.evaluate.outputs import run_model
from mlflow_compress.errors import DataError
from mlflow_compress.items.harness_build import build
from mlflow_compress.items.suite import Suite
from mlflow_compress.items.task import Task, TaskSettings
from mlflow_compress.models.loading import LoadConfig, load_model
from mlflow_compress.records import RunRecords
from mlflow_compress.scoring.engine import Scorer
from tests.harness_reference import CASES, HUB, MODEL, Case, stock_model, stock_results
from tests.shared_data import needs_shared
from tests.unit.scoring_models import U, rounding

pytestmark = needs_shared
LONG = {"mmlu 0-shot", "mmlu 5-shot", "arc_easy"}  # among the slow tests only
SAMPLED = {  # documents a leaf in the slow tests, which are to stay below four minutes each; the others whole
    "gsm8k 8-shot": 20,
    "triviaqa": 600,
    "mmlu 0-shot": 60,
    "mmlu 5-shot": 15,
}
RANDOM = {  # documents a leaf for the random model
    "piqa": 100,
    "arc_easy": 60,
    "arc_challenge": 60,
    "winogrande": 60,
    "lambada_openai": 60,
    "gsm8k 8-shot": 5,
    "mmlu 0-shot": 2,
    "mmlu 5-shot": 2,
}


@dataclass
class Ours:
    """Our side: the task and what one model left behind."""

    task: Task
    records: RunRecords
    n_truncated: int


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    return Scorer(load_model(LoadConfig(path=str(MODEL))))


@pytest.fixture(scope="module")
def stock() -> Any:
    return stock_model()


def run_ours(scorer: Scorer, case: Case, limit: int) -> Ours:
    settings = TaskSettings(limit=limit, data_dir=str(HUB))
    [task] = build(case.task, shots=case.shots, settings=settings, folders=(case.folder,)).tasks
    measured = run_model(scorer, Suite(tasks=(task,), corpora=()))
    return Ours(task, measured.records, measured.n_truncated)


def place(task: Task, leaf: str, number: int) -> str:
    return str(number) if task.name == leaf else f"{leaf}:{number}"


def documents(ours: Ours) -> dict[str, list[int]]:
    """The documents that we have answers to, by leaf: the stock backend dies on the others."""
    unscored = set()
    if ours.records.option_scores is not None and len(ours.records.option_scores):
        table = ours.records.option_scores.table.to_pylist()
        unscored = {row["item_id"] for row in table if row["loglik"] is None}
    found: dict[str, list[int]] = {}
    for item in ours.task.items.column("item_id"):
        leaf, _, number = item.rpartition(":")
        if item not in unscored:
            found.setdefault(leaf or ours.task.name, []).append(int(number))
    return found


def pairs(ours: Ours, reference: dict[str, Any], asked: dict[str, list[int]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every stock sample (of the first filter) with our item id."""
    for leaf, numbers in asked.items():
        samples = reference["samples"][leaf]
        first = samples[0]["filter"]
        for sample in samples:
            if sample["filter"] == first:
                assert sample["doc_id"] in numbers
                yield place(ours.task, leaf, sample["doc_id"]), sample


def check_scores(ours: Ours, reference: dict[str, Any], asked: dict[str, list[int]], nats: float) -> tuple[int, float]:
    """Compare log-likelihoods within `nats` a token, predictions but for ties; (ties, largest difference).

    The stock backend also adds the tokens in float32. Roundings of tokens are independent (Higham and Mary 2019).
    """
    rows = ours.records.option_scores.table.to_pylist()  # type: ignore[union-attr]
    by_item: dict[str, list[Any]] = {}
    for request, row in zip(ours.task.requests, rows, strict=True):
        by_item.setdefault(row["item_id"], []).append((request, row))
    ties, worst = 0, 0.0
    for item, sample in pairs(ours, reference, asked):
        mine = by_item.pop(item)
        theirs = np.asarray([response[0][0] for response in sample["resps"]], dtype=float)
        here = np.asarray([row["loglik"] for _, row in mine])
        difference = np.abs(theirs - here)
        worst = max(worst, float(difference.max()))
        allowed = (nats + np.abs(theirs) * U) * np.sqrt([row["n_tokens"] for _, row in mine])
        assert (difference <= allowed).all(), item
        lengths = np.asarray([r.n_chars for r, _ in mine], dtype=float)
        for divisor in (np.ones_like(lengths), lengths):
            if len(here) > 1 and (theirs / divisor).argmax() != (here / divisor).argmax():
                first, second = (theirs / divisor).argsort()[:-3:-1]
                distance = theirs[first] / divisor[first] - theirs[second] / divisor[second]
                assert distance <= allowed[first] / divisor[first] + allowed[second] / divisor[second], item
                ties += 1
        if len(here) == 1:
            assert bool(sample["resps"][0][0][1]) == mine[0][1]["greedy"], item
    assert all(any(row["loglik"] is None for _, row in rest) for rest in by_item.values())
    return ties, worst


def count_too_long(stock: Any, ours: Ours) -> int:
    """Requests that the stock backend's own tokens and rules say are cut; counted over those that it dies on, too."""
    if ours.task.answering is not None:
        room = stock.max_length - ours.task.answering.max_new_tokens
        return sum(len(stock.tok_encode(prompt)) > room for prompt in ours.task.items.column("prompt"))
    encoded = (stock._encode_pair(r.context, r.continuation) for r in ours.task.requests)
    return sum(len(context) + len(continuation) > stock.max_length + 1 for context, continuation in encoded)


def check_metrics(ours: Ours, reference: dict[str, Any], ties: int, worst: float) -> None:
    """Every number of the harness's results table, groups included.

    A share moves by its ties, a perplexity by the factor e^`worst` at most where log-likelihoods do by `worst`.
    """
    own = {(o.part, o.name): o for o in ours.task.harness_metrics(ours.records)}
    compared = 0
    for part, values in reference["results"].items():
        for key, value in values.items():
            name, comma, kind = key.partition(",")
            if not comma or name.endswith("_stderr"):
                continue
            mine = own[part, name if kind == "none" else f"{name}.{kind}"]
            assert mine.value == pytest.approx(value, rel=max(math.expm1(worst), 1e-6), abs=ties / mine.n), (part, key)
            compared += 1
    assert compared > 0


def compare(scorer: Scorer, stock: Any, name: str, limit: int) -> str:
    """Hold our side against the stock backend's."""
    case = CASES[name]
    ours = run_ours(scorer, case, limit)
    asked = documents(ours)
    reference = stock_results(stock, case, asked)
    ties, worst = 0, 0.0
    if ours.task.answering is None:
        by_item: dict[str, list[Any]] = {}  # prompts, byte for byte
        for request in ours.task.requests:
            by_item.setdefault(request.item_id, []).append((request.context, request.continuation))
        for item, sample in pairs(ours, reference, asked):
            assert by_item[item] == [tuple(a) for a in sample["arguments"]]
        ties, worst = check_scores(ours, reference, asked, 2 * rounding(scorer.loaded))
    else:
        texts = {row["item_id"]: row for row in ours.records.generations.table.to_pylist()}  # type: ignore[union-attr]
        for item, sample in pairs(ours, reference, asked):
            assert texts[item]["prompt"] == sample["arguments"][0][0]
            assert texts[item]["text"] == sample["resps"][0][0]
            assert texts[item]["correct"] == bool(sample["exact_match"])
    check_metrics(ours, reference, ties, worst)
    assert ours.n_truncated == count_too_long(stock, ours)
    values = {f"{o.part} {o.name}": round(o.value, 4) for o in ours.task.harness_metrics(ours.records)[:6]}  # type: ignore[misc]
    n = sum(map(len, asked.values()))
    left = len(ours.task.items) - n
    return f"{name}: n {n}, left out {left}, cut {ours.n_truncated}, ties {ties}, worst {worst:.1e}, {values}"


@pytest.mark.parametrize("name", sorted(set(CASES) - LONG))
def test_a_few_documents_of_each_task_equal_the_stock_backend(scorer: Scorer, stock: Any, name: str) -> None:
    compare(scorer, stock, name, limit=1 if CASES[name].task in ("gsm8k", "triviaqa") else 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_whole_data_sets_equal_the_stock_backend(scorer: Scorer, name: str, record_property: Any) -> None:
    model = stock_model(batch_size=1 if CASES[name].task in ("gsm8k", "triviaqa") else 16)
    record_property("figures", compare(scorer, model, name, limit=SAMPLED.get(name, 0)))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RANDOM))
def test_a_random_model_of_ten_million_parameters_too(name: str, tmp_path: Path, record_property: Any) -> None:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    assert 10e6 < model.num_parameters() < 50e6
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(tmp_path)
    scorer = Scorer(load_model(LoadConfig(path=str(tmp_path))))
    record_property("figures", compare(scorer, stock_model(path=tmp_path), name, RANDOM[name]))


@pytest.mark.slow
def test_where_sums_are_long_the_stock_backend_is_what_rounds(scorer: Scorer, record_property: Any) -> None:
    """The stock backend adds the tokens of an option in float32, we in float64: against all of it in float64 ours is nearer."""
    case = CASES["piqa"]
    ours = run_ours(scorer, case, 0)
    asked = documents(ours)
    found = stock_results(stock_model(batch_size=16), case, asked)
    exact = stock_results(stock_model(batch_size=16, dtype="float64"), case, asked)
    rows = ours.records.option_scores.table.to_pylist()  # type: ignore[union-attr]
    mine = {(row["item_id"], row["option"]): row["loglik"] for row in rows}
    theirs, truth = (
        {(item, i): r[0][0] for item, sample in pairs(ours, side, asked) for i, r in enumerate(sample["resps"])}
        for side in (found, exact)
    )
    errors = {
        name: np.abs([side[key] - truth[key] for key in truth]) for name, side in (("ours", mine), ("stock", theirs))
    }
    assert np.sqrt(np.mean(errors["ours"] ** 2)) < np.sqrt(np.mean(errors["stock"] ** 2))
    figures = {name: f"max {e.max():.2e}, root mean square {np.sqrt(np.mean(e**2)):.2e}" for name, e in errors.items()}
    record_property("figures", f"{len(truth)} options of PIQA against float64: {figures}")


def test_rolling_log_likelihoods_of_whole_documents_equal_the_stock_backend(scorer: Scorer, stock: Any) -> None:
    from lm_eval.api.instance import Instance

    lines = (HUB / "EleutherAI" / "lambada_openai" / "test.jsonl").read_text().splitlines()[:20]
    rows = [json.loads(line)["text"] for line in lines]
    texts = ["\n".join(rows), rows[0], "\n".join(rows[3:9])]  # several windows, less than one, and a few
    scores, _ = scorer.score_corpus("rolling", texts)
    document = np.asarray([int(name.split(".")[0]) for name in scores.column("item_id")])
    ours = -np.bincount(document, weights=scores.column("nll"))
    asked = [Instance("loglikelihood_rolling", {}, (text,), 0, ("t", i, 1)) for i, text in enumerate(texts)]
    assert len(set(scores.column("item_id"))) > len(texts)
    apart = np.abs(ours - stock.loglikelihood_rolling(asked))
    assert (apart <= (2 * rounding(scorer.loaded) + np.abs(ours) * U) * np.sqrt(np.bincount(document))).all()


@pytest.mark.parametrize("name", ["winogrande", "gsm8k 8-shot"])
def test_our_engine_as_a_harness_model_gives_the_same_results(stock: Any, name: str) -> None:
    from mlflow_compress.lm_eval_model import EngineLM  # its import takes seconds

    ours = EngineLM.create_from_arg_string(f"pretrained={MODEL},dtype=float32", {"batch_size": "4", "device": "cpu"})
    case = CASES[name]
    documents = {case.task: [0, 3] if case.task == "gsm8k" else list(range(6))}
    first, second = (stock_results(model, case, documents)["results"][case.task] for model in (ours, stock))
    assert first == second
    if case.task == "winogrande":
        assert ours.option_scores.key_rows()[:3] == [(name, "0", 0, 0), (name, "0", 0, 1), (name, "1", 0, 0)]


def test_as_a_harness_model_it_names_an_option_that_is_too_long() -> None:
    from lm_eval.api.instance import Instance

    from mlflow_compress.lm_eval_model import EngineLM

    ours = EngineLM(str(MODEL))
    asked = [Instance("loglikelihood", {}, ("Once", " upon a time" * 300), 1, ("piqa", 7, 1))]
    with pytest.raises(
        DataError, match="Option 1 of document 7 of task 'piqa' is longer than the model's context of 512"
    ):
        ours.loglikelihood(asked)
