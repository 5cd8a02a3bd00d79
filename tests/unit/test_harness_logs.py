"""Sample logs that lm-evaluation-harness itself writes here, of tasks with every rule: right by their rule, or refused.

The tasks and their data are made up; the model draws its log-likelihoods from a hash of the texts.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlflow_compress.commands.compare.run import Comparison, compare
from mlflow_compress.errors import AlignmentError, DataError, MlflowCompressError

pytest.importorskip("lm_eval", reason="needs the extra 'harness'")
pytestmark = [
    pytest.mark.usefixtures("no_network"),
    pytest.mark.filterwarnings("ignore"),  # lm_eval's own
]

OPTIONS = ["one", "zweiundzwanzig", "три и ещё", "四", "a fifth of some length", "six"]
"""Characters and bytes order them differently."""
DOCS = [
    {
        "q": f"Question {i}?",
        "options": OPTIONS,
        "spaced": [f" {option}" for option in OPTIONS],
        "gold": i % 6,
        "many": [i % 6, (i + 2) % 6],
        "word": OPTIONS[i % 6],
        "answer": str(i % 3),
    }
    for i in range(60)
]


def metrics(*names: str) -> dict[str, Any]:
    return {"metric_list": [{"metric": name} for name in names]}


CHOICE = {
    "dataset_path": "json",
    "output_type": "multiple_choice",
    "test_split": "test",
    "doc_to_text": "{{q}}\nAnswer:",
    "doc_to_choice": "options",
    "doc_to_target": "gold",
    "metadata": {"version": 1.0},
}
TEXT = {**CHOICE, "output_type": "generate_until", "doc_to_target": "answer"}
del TEXT["doc_to_choice"]
FILTERS = [
    {"name": name, "filter": [{"function": "regex", "regex_pattern": pattern}, {"function": "take_first"}]}
    for name, pattern in (("strict-match", r"is (\d)"), ("flexible-extract", r"(\d)"))
]
TASKS: dict[str, dict[str, Any]] = {
    "plain": {**CHOICE, **metrics("acc")},
    "norm": {**CHOICE, **metrics("acc", "acc_norm")},
    "spaced": {**CHOICE, "doc_to_choice": "spaced", "target_delimiter": "", **metrics("acc", "acc_norm")},
    "lines": {**CHOICE, "target_delimiter": "\n\n", **metrics("acc", "acc_norm")},
    "bytes": {**CHOICE, **metrics("acc_bytes")},
    "mutual": {**CHOICE, **metrics("acc_mutual_info")},
    "all_rules": {**CHOICE, **metrics("acc", "acc_norm", "acc_mutual_info", "brier_score")},
    "many": {**CHOICE, "doc_to_target": "many", **metrics("acc", "acc_norm")},
    "word": {**CHOICE, "doc_to_target": "word", **metrics("acc", "acc_norm")},
    "repeated": {**CHOICE, "repeats": 3, **metrics("acc", "acc_norm")},
    "text": {**TEXT, **metrics("exact_match"), "filter_list": FILTERS},
    "sampled": {**TEXT, **metrics("exact_match"), "repeats": 4},
    "shares": {**CHOICE, **metrics("acc")},
    "brier": {**CHOICE, **metrics("brier_score")},
    "chrf": {**TEXT, **metrics("chrf")},
    "rolling": {
        **TEXT,
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "q",
        **metrics("word_perplexity"),
    },
}
OWN_RULE = """
def shares(doc, results):
    import numpy as np
    p = np.exp([ll for ll, _ in results])
    return {"acc": float(p[doc["many"]].sum() / p.sum())}
"""


def drawn(*texts: str) -> float:
    return int(hashlib.sha256("\0".join(texts).encode()).hexdigest()[:8], 16) / 2**32


def loglik(model: str, context: str, continuation: str) -> float:
    """Return a log-likelihood that grows with the length of the text, as a model's does."""
    return -0.1 * len(continuation.strip()) * (1 + 8 * drawn(model, context, continuation))


Runs = Callable[..., Path]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Evaluate a task with the harness, which writes logs and results; return its log. All tasks of a model are one run."""
    import lm_eval
    from lm_eval.api.model import LM
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    class Drawn(LM):
        tokenizer_name = "drawn"

        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            return [(loglik(self.name, *request.args), False) for request in requests]

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            return [loglik(self.name, "", request.args[0]) for request in requests]

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            number = [int(3 * drawn(self.name, request.args[0])) for request in requests]
            return [f"It {'is' if drawn(self.name, str(n), 'is') < 0.7 else 'may be'} {n}" for n in number]

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return "".join(f"<{turn['role']}>{turn['content']}" for turn in chat_history)

        def chat_template(self, chat_template: bool | str = False) -> str:
            return "a template"

    folder = tmp_path_factory.mktemp("harness")
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    done: dict[tuple[str, str], Path] = {}

    def evaluate(task: str, model: str, version: float = 1.0, shots: int = 0, **more: Any) -> Path:
        key = f"{model}-{version}-{shots}-{more}"
        if (key, task) not in done:
            own = folder / f"tasks-{len(done)}"
            own.mkdir()
            (own / "own.py").write_text(OWN_RULE)
            tasks = list(TASKS) if (version, shots, more) == (1.0, 0, {}) else [task]
            for name in tasks:
                files = {"data_files": {"test": str(folder / "docs.jsonl")}}
                config = {**TASKS[name], "task": name, "dataset_kwargs": files, "metadata": {"version": version}}
                text = yaml.safe_dump({**config, "num_fewshot": shots, "fewshot_split": "test"})
                text += "process_results: !function own.shares\n" if name == "shares" else ""
                (own / f"{name}.yaml").write_text(text)
            tracker = EvaluationTracker(output_path=str(own / "out"))
            manager = TaskManager(include_path=str(own), include_defaults=False)
            results = lm_eval.simple_evaluate(
                Drawn(model), tasks=tasks, task_manager=manager, bootstrap_iters=0, evaluation_tracker=tracker, **more
            )
            samples = results.pop("samples")
            tracker.save_results_aggregated(results=results, samples=samples)
            for name in tasks:
                tracker.save_results_samples(task_name=name, samples=samples[name])
                [done[key, name]] = own.rglob(f"samples_{name}_*.jsonl")
        return done[key, task]

    return evaluate


def results_of(log: Path, task: str) -> dict[str, Any]:
    [results] = log.parent.glob("results_*.json")
    found: dict[str, Any] = json.loads(results.read_text())["results"][task]
    return found


def alone(log: Path) -> Path:
    """Return a copy of a log without the results beside it, under another name."""
    copy = log.parent / "alone" / log.name
    copy.parent.mkdir(exist_ok=True)
    copy.write_bytes(log.read_bytes())
    return copy


def compared(*logs: Path) -> Comparison:
    left, right = map(str, logs)
    return compare(left, right)


def picked(model: str, doc: dict[str, Any], rule: str, options: str, delimiter: str) -> int:
    """Return the model's choice by the harness's definition of the rule, from the task's own choices."""
    sums = [loglik(model, f"{doc['q']}\nAnswer:", f"{delimiter}{choice}") for choice in doc[options]]
    if rule == "acc_mutual_info":
        sums = [a - loglik(model, "", f"{delimiter}{choice}") for a, choice in zip(sums, doc[options], strict=True)]
    over = {"acc_norm": len, "acc_bytes": lambda choice: len(choice.encode())}.get(rule, lambda _: 1)
    values = [value / over(choice) for value, choice in zip(sums, doc[options], strict=True)]
    return values.index(max(values))


RULES = [
    ("plain", "acc", "options", " "),
    ("norm", "acc_norm", "options", " "),
    ("spaced", "acc_norm", "spaced", ""),
    ("lines", "acc_norm", "options", "\n\n"),
    ("bytes", "acc_bytes", "options", " "),
    ("mutual", "acc_mutual_info", "options", " "),
    ("all_rules", "acc_norm", "options", " "),
    ("many", "acc_norm", "options", " "),
    ("word", "acc_norm", "options", " "),
    ("repeated", "acc_norm", "options", " "),
]


@pytest.mark.parametrize(("task", "rule", "options", "delimiter"), RULES)
def test_a_choice_is_read_by_the_rule_of_its_task(
    run: Runs, task: str, rule: str, options: str, delimiter: str
) -> None:
    logs = run(task, "b"), run(task, "q")
    found = compared(*logs)
    choices = [[picked(model, doc, rule, options, delimiter) for doc in DOCS] for model in "bq"]
    right = [
        [c in (doc["many"] if task == "many" else [doc["gold"]]) for c, doc in zip(side, DOCS, strict=True)]
        for side in choices
    ]
    cases = list(zip(*choices, *right, strict=True))
    w2w = sum(not before and not after and a != b for a, b, before, after in cases)
    assert 5 < w2w < 50
    assert (found["n"], found["w2w"], found["rule"]) == (60, w2w, rule) and f"scored by  {rule}" in found.as_text()
    assert found["c2w"] == sum(before and not after for *_, before, after in cases)
    for log, name in zip(logs, ("accuracy_baseline", "accuracy_variant"), strict=True):
        assert found[name] == results_of(log, task)[f"{rule},none"]
    # Without the results file, the log's own scores decide what stands before a choice.
    again = compared(*map(alone, logs))
    assert again["w2w"] in (w2w, None)
    assert all(again[name] == found[name] for name in found.results if name != "w2w" and "all_flips" not in name)


def test_the_order_of_the_rows_does_not_matter(run: Runs) -> None:
    logs = run("norm", "b"), run("norm", "q")
    turned = alone(logs[1])
    turned.write_text("".join(reversed(turned.read_text().splitlines(keepends=True))))
    assert compared(alone(logs[0]), turned).results == compared(*map(alone, logs)).results


def test_a_chat_template_leaves_the_delimiter_out(run: Runs) -> None:
    logs = [run("norm", model, apply_chat_template=True) for model in "bq"]
    found = compared(*logs)
    assert found["w2w"] is not None and found["accuracy_variant"] == results_of(logs[1], "norm")["acc_norm,none"]
    with pytest.raises(AlignmentError, match="differ in the prompt"):
        compared(logs[0], run("norm", "q"))


def test_where_a_log_leaves_the_choice_open_no_wrong_answer_is_compared_with_another(tmp_path: Path) -> None:
    # " a" and " bbb": a character with the space -1.0/2 and -1.9/4, without it -1.0/1 and -1.9/3: always choice 1.
    # " c" of -0.9: with the space -0.45, the best; without it -0.9, behind choice 1. Both are wrong, and so open.
    arguments = {f"gen_args_{i}": {"arg_0": "Q", "arg_1": text} for i, text in enumerate((" a", " bbb", " c"))}
    row = {"doc_id": 0, "target": "0", "arguments": arguments, "filter": "none", "acc": 0.0, "acc_norm": 0.0}
    row["filtered_resps"] = [[str(value), "False"] for value in (-1.0, -1.9, -0.9)]
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps(row))
    found = compared(log, log)
    assert (found["n"], found["w2w"], found["all_flips_pct"], found["rule"]) == (1, None, None, "acc_norm")


def test_generated_answers_are_right_by_the_first_filter_which_is_named(run: Runs) -> None:
    for task, kind in (("text", "strict-match"), ("sampled", "none")):
        logs = run(task, "b"), run(task, "q")
        found = compared(*logs)
        assert found["rule"] == ("exact_match,strict-match" if kind != "none" else "exact_match")
        assert (found["n"], found["w2w"]) == (60, None)
        assert found["accuracy_variant"] == results_of(logs[1], task)[f"exact_match,{kind}"]


def test_tasks_of_one_file_have_filters_of_their_own(run: Runs) -> None:
    logs = []
    for model in "bq":
        rows = [
            {**json.loads(line), "task_name": task}
            for task in ("text", "norm")
            for line in run(task, model).read_text().splitlines()
        ]
        logs.append(run("text", model).parent / "both.jsonl")
        logs[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (found := compared(*logs))["n"] == 120 and found["rule"] == "acc_norm, exact_match,strict-match"


def test_shares_are_refused_with_their_means(run: Runs) -> None:
    logs = run("shares", "b"), run("shares", "q")
    means = [f"{100 * results_of(log, 'shares')['acc,none']:.2f} %" for log in logs]
    for pair in (logs, list(map(alone, logs))):
        with pytest.raises(DataError, match=r"acc of these logs is a share.*means of " + " and ".join(means)):
            compared(*pair)


@pytest.mark.parametrize(
    ("task", "named"), [("brier", "brier_score"), ("chrf", "chrf"), ("rolling", "word_perplexity")]
)
def test_a_rule_that_is_not_known_is_named_and_refused(run: Runs, task: str, named: str) -> None:
    with pytest.raises(DataError, match=f"has no .*acc.*scored by {named}"):
        compared(run(task, "b"), run(task, "q"))


def test_a_rule_of_its_own_is_not_taken_for_the_highest_log_likelihood(run: Runs, tmp_path: Path) -> None:
    # All shares 0 or 1, as of a model that is sure; only the settings tell that they are no choices.
    logs = []
    for model in "bq":
        source = run("shares", model)
        folder = tmp_path / model
        folder.mkdir()
        rows = [json.loads(line) for line in source.read_text().splitlines()]
        (folder / source.name).write_text("".join(json.dumps({**row, "acc": round(row["acc"])}) + "\n" for row in rows))
        [results] = source.parent.glob("results_*.json")
        (folder / results.name).write_bytes(results.read_bytes())
        logs.append(folder / source.name)
    assert compared(*logs)["w2w"] is None
    with pytest.raises(DataError, match=r"logged acc of a harness sample does not follow.*results_"):
        compared(*map(alone, logs))


def test_other_tasks_versions_shots_and_documents_are_refused(run: Runs) -> None:
    cases: list[tuple[Path, str]] = [
        (run("word", "q"), "differ in their task"),
        (run("norm", "q", version=2.0), "differ in their version"),
        (run("norm", "q", shots=1), "differ in their shots"),
        (run("norm", "q", limit=20), "different items: 40 only in the baseline"),
        (alone(run("norm", "q", shots=1)), "differ in the prompt"),
        (alone(run("spaced", "q")), "differ in the scoring rule|differ in the choices|differ in the prompt"),
    ]
    for log, message in cases[:5]:
        with pytest.raises(AlignmentError, match=message):
            compared(run("norm", "b"), log)
    # One text in all: " one" is a choice behind no delimiter, and a choice behind a space.
    assert compared(run("norm", "b"), cases[5][0])["n"] == 60
    with pytest.raises(AlignmentError, match="differ in the choices"):
        compared(run("norm", "b"), alone(run("lines", "q")))


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"configs": {"norm": 3}, "versions": {"norm": 1}, "n-shot": {"norm": 0}}']
)
def test_a_broken_results_file_is_named(run: Runs, tmp_path: Path, content: str) -> None:
    log = run("norm", "b")
    [results] = log.parent.glob("results_*.json")
    (tmp_path / log.name).write_bytes(log.read_bytes())
    (tmp_path / results.name).write_text(content)
    with pytest.raises(MlflowCompressError, match="results_"):
        compared(tmp_path / log.name, tmp_path / log.name)
