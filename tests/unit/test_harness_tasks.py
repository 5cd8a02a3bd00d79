"""Harness tasks as ours: families, identities, groups, their own metrics, missing data. Definitions and data are made up."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
import zstandard
from transformers.models.auto import AutoTokenizer

from mlflow_compress import demo
from mlflow_compress.commands.evaluate.outputs import log_harness_metrics, run_model
from mlflow_compress.errors import CheckpointError, ConfigError, DataError, MlflowCompressError, UnsupportedError
from mlflow_compress.items import harness_tasks
from mlflow_compress.items.harness_build import build
from mlflow_compress.items.sources.data_dir import load_split
from mlflow_compress.items.suite import Suite, load_suite
from mlflow_compress.items.task import Corpus, HarnessMetric, Parts, Task, TaskSettings
from mlflow_compress.metrics import MetricInputs, compute_all
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model
from mlflow_compress.records import Generations, OptionScores, RunRecords
from mlflow_compress.reporting.details import answers_by_margin, flips_table, kl_values
from mlflow_compress.scoring.engine import Scorer
from tests.metric_records import score_of
from tests.unit.scoring_models import CONFIGS, build_model, build_tokenizer, load_random, rounding

pytestmark = pytest.mark.usefixtures("no_network")

ROWS = [
    {"q": f"Question {i}?", "options": ["one", "twenty two", "three"], "gold": i % 3, "many": [0, 1], "answer": str(i)}
    for i in range(6)
]
CHOICE: dict[str, Any] = {
    "dataset_path": "org/set",
    "output_type": "multiple_choice",
    "test_split": "test",
    "doc_to_text": "{{q}}\nAnswer:",
    "doc_to_choice": "{{options}}",
    "doc_to_target": "gold",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
BOTH = [*CHOICE["metric_list"], {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True}]
EXACT = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
MUTUAL = {"metric": "acc_mutual_info", "aggregation": "mean", "higher_is_better": True}
PERPLEXITY = {"metric": "byte_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False}
LETTERS = {"doc_to_choice": ["A", "B", "C"]}
TASKS: dict[str, dict[str, Any]] = {
    "t_plain": CHOICE,
    "t_norm": {**CHOICE, "metric_list": BOTH},
    "t_letters": {**CHOICE, **LETTERS, "fewshot_split": "test", "num_fewshot": 1},
    "t_many": {**CHOICE, "doc_to_target": "many"},
    "t_mutual": {**CHOICE, "metric_list": [*CHOICE["metric_list"], MUTUAL]},
    "t_train": {**CHOICE, "training_split": "train"},
    "t_fixed": {**CHOICE, "num_fewshot": 0},
    "t_elsewhere": {**CHOICE, "dataset_path": "org/elsewhere"},
    "t_elsewhere_too": {**CHOICE, "dataset_path": "org/second"},
    "t_validation": {**CHOICE, "test_split": None, "validation_split": "validation"},
    "t_broken": {**CHOICE, "doc_to_choice": "{{nothing['here']}}"},
    "t_word": {
        "dataset_path": "org/set",
        "output_type": "loglikelihood",
        "test_split": "test",
        "doc_to_text": "{{q}}",
        "doc_to_target": " {{answer}}",
        "metric_list": CHOICE["metric_list"],
    },
    "t_answer": {
        "dataset_path": "org/set",
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": "{{q}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n", "!"], "max_gen_toks": 7, "do_sample": False},
        "filter_list": [
            {"name": "number", "filter": [{"function": "regex", "regex_pattern": "(\\d)"}, {"function": "take_first"}]}
        ],
        "metric_list": [EXACT],
    },
    "t_rolling": {
        "dataset_path": "org/set",
        "output_type": "loglikelihood_rolling",
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": "{{q}}",
        "metric_list": [PERPLEXITY],
    },
}
TASKS["t_prefix"] = {**CHOICE, "gen_prefix": "The answer is"}
TASKS["t_contexts"] = {  # as Winogrande: the option stands in the context
    **CHOICE,
    "doc_to_text": "gold",
    "doc_to_choice": "{{[q + ' ' + options[0], q + ' ' + options[1], q + ' ' + options[2]]}}",
    "doc_to_target": "{{answer}}",
}
TASKS["t_answer_too"] = {**TASKS["t_answer"], "doc_to_text": "{{answer}} + 0 ="}
TASKS["t_samples"] = {**TASKS["t_answer"], "generation_kwargs": {"do_sample": True, "temperature": 0.7}}
GROUPS = {
    "g_averaged": {
        "task": ["t_plain", "t_fixed"],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
    },
    "g_loose": {"task": ["t_plain", "t_word"]},
    "g_members": {
        "task": ["t_plain", "t_fixed"],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": False}],
    },
    "g_mixed": {"task": ["t_plain", "t_word"], "aggregate_metric_list": [{"metric": "acc"}]},
    "g_nested": {
        "task": [
            "t_letters",
            {
                "group": "g_inner",
                "task": ["t_answer", "t_answer_too"],
                "aggregate_metric_list": [{"metric": "exact_match", "weight_by_size": True, "filter_list": ["number"]}],
            },
        ],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}, {"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("harness")
    (root / "hub" / "org" / "set").mkdir(parents=True)
    (root / "hub" / "org" / "set" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (root / "tasks").mkdir()
    for name, body in TASKS.items():
        (root / "tasks" / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **body}))
    for name, body in GROUPS.items():
        (root / "tasks" / f"{name}.yaml").write_text(yaml.safe_dump({"group": name, **body}))
    return root


def made(place: Path, name: str, *, shots: int | None = None, limit: int = 0) -> list[Task]:
    return list(parts(place, name, shots=shots, limit=limit).tasks)


def parts(place: Path, name: str, *, shots: int | None = None, limit: int = 0) -> Parts:
    settings = TaskSettings(data_dir=str(place / "hub"), limit=limit, seed=5)
    return build(name, shots=shots, settings=settings, folders=(str(place / "tasks"),))


@pytest.mark.parametrize(
    ("name", "family", "rule", "gold"),
    [
        ("t_plain", "cloze", "loglik", [0, 1, 2, 0, 1, 2]),
        ("t_norm", "cloze", "loglik_per_char", [0, 1, 2, 0, 1, 2]),
        ("t_letters", "lettered", "loglik", [0, 1, 2, 0, 1, 2]),
        ("t_many", "ungraded", "loglik", [None] * 6),
        ("t_word", "last_word", "greedy", [0] * 6),
        ("t_answer", "exact", "exact_match", [None] * 6),
    ],
)
def test_the_definition_decides_family_rule_and_gold(
    place: Path, name: str, family: str, rule: str, gold: list[int | None]
) -> None:
    [task] = made(place, name)
    assert task.family == family
    assert set(task.items.column("rule")) == {rule} and set(task.items.column("family")) == {family}
    assert task.items.table.column("gold").to_pylist() == gold


def test_requests_carry_document_and_option_and_own_metrics_are_the_harness_s(place: Path) -> None:
    [task] = made(place, "t_norm")
    first = [r for r in task.requests if r.item_id == "4"]
    assert [(r.option, r.content, r.continuation) for r in first] == [
        (0, 0, " one"),
        (1, 1, " twenty two"),
        (2, 2, " three"),
    ]
    assert [(r.n_chars, r.context) for r in first][1] == (10, "Question 4?\nAnswer:")
    # Golds are 0, 1, 2, 0, 1, 2. Summed, option 0 always wins: right for items 0 and 3. A character, -1 / 3, -2 / 10 and
    # -3 / 5: "twenty two" always wins: right for items 1 and 4. Item 5 could not be asked.
    table = {str(i): [-1.0, -2.0, -3.0] for i in range(5)} | {"5": [-1.0, -2.0, None]}  # type: ignore[dict-item]
    found = own(task, RunRecords(option_scores=scores(task, table)))
    assert found[("t_norm", "acc")] == (2 / 5, 5, 1)
    assert found[("t_norm", "acc_norm")] == (2 / 5, 5, 1)


def test_the_seed_decides_a_limit_and_shots_change_prompts_and_hash(place: Path) -> None:
    ids = made(place, "t_plain", limit=3)[0].items.column("item_id").tolist()
    assert ids == made(place, "t_plain", limit=3)[0].items.column("item_id").tolist()
    assert len(ids) == 3 and ids == sorted(ids)
    one, two = made(place, "t_letters")[0], made(place, "t_letters", shots=2)[0]
    assert one.requests[0].context.count("Answer:") == 2 and two.requests[0].context.count("Answer:") == 3
    assert one.content_hash() != two.content_hash()


def test_an_averaged_group_is_one_task_with_categories_averaged_over_its_items(place: Path) -> None:
    [task] = made(place, "g_averaged")
    assert task.name == "g_averaged" and len(task.items) == 12
    assert set(task.items.column("category")) == {"t_plain", "t_fixed"}
    assert {"t_plain:0", "t_fixed:5"} <= set(task.items.column("item_id"))
    right = [-1.0, -9.0, -9.0]  # option 0: golds 0 and 3 of each member
    table = {f"t_plain:{i}": right for i in range(6)} | {f"t_fixed:{i}": right for i in (0, 3)}
    found = own(task, RunRecords(option_scores=scores(task, table)))
    assert found[("t_fixed", "acc")] == (1.0, 2, 4)
    assert found[("g_averaged", "acc")] == (4 / 8, 8, 4)


@pytest.mark.parametrize(("name", "second"), [("g_loose", "t_word"), ("g_mixed", "t_word"), ("g_members", "t_fixed")])
def test_members_of_other_groups_are_tasks_of_their_own(place: Path, name: str, second: str) -> None:
    tasks = made(place, name)
    assert [task.name for task in tasks] == ["t_plain", second]
    assert tasks[0].items.column("item_id").tolist() == list("012345")


def scores(task: Task, loglik: dict[str, list[float]], *, name: str | None = None) -> OptionScores:
    rows = [
        score_of(item, option, value, task=name or task.name)
        for item, values in loglik.items()
        for option, value in enumerate(values)
    ]
    return OptionScores.from_rows(rows)


def own(task: Task, records: RunRecords) -> dict[tuple[str, str], tuple[float, int, int]]:
    return {(o.part, o.name): (o.value, o.n, o.n_unscored) for o in task.harness_metrics(records)}


def members(**sizes: tuple[float, int]) -> list[HarnessMetric]:
    return [HarnessMetric(part=p, metric="acc", value=v, n=n, n_unscored=10 - n) for p, (v, n) in sizes.items()]


@pytest.mark.parametrize(
    ("name", "second", "value"),
    [
        ("g_mixed", "t_word", (8 * 0.5 + 2 * 1.0) / 10),  # over items: the default
        ("g_members", "t_fixed", (0.5 + 1.0) / 2),  # over members: weight_by_size is off
    ],
)
def test_groups_of_separate_tasks_are_averaged_as_their_definition_says(
    place: Path, name: str, second: str, value: float
) -> None:
    [group] = parts(place, name).averages
    [own] = group.average(members(t_plain=(0.5, 8), **{second: (1.0, 2)}))
    assert (group.name, own.part, own.name) == (name, name, "acc")
    assert (own.value, own.n, own.n_unscored) == (pytest.approx(value), 10, 10)
    assert parts(place, "g_loose").averages == parts(place, "g_averaged").averages == ()


def test_averages_of_groups_equal_the_harness_s_own_results(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested, mixed kinds of requests, one metric with a filter; the model is the same on both sides, so is every number."""
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import TaskManager

    from mlflow_compress.lm_eval_model import EngineLM

    model = EngineLM(str(demo.MODEL_DIR), device="cpu")
    wanted = parts(place, "g_nested")
    suite = Suite(tasks=wanted.tasks, corpora=(), averages=wanted.averages)
    ours = {
        (o.part, f"{o.metric},{o.filter}"): o for o in suite.harness_metrics(run_model(model.scorer, suite).records)
    }
    monkeypatch.chdir(place / "hub")  # the definitions' data set, as the harness itself finds it
    found = TaskManager(include_path=[place / "tasks"], include_defaults=False).load(["g_nested"])
    for task in found["tasks"].values():
        task.set_fewshot_seed(seed=harness_tasks.FEWSHOT_SEED)  # as its `simple_evaluate` does
    results = evaluate(model, found, bootstrap_iters=0)["results"]
    theirs = {
        (part, key): (value, row["sample_len"])
        for part, row in results.items()
        for key, value in row.items()
        if "," in key and "_stderr" not in key
    }
    assert {key: (own.value, own.n) for key, own in ours.items()} == theirs
    assert {"g_nested", "g_nested::g_inner", "t_letters", "t_answer"} <= {part for part, _ in theirs}


@pytest.mark.parametrize(("multiturn", "system"), [(True, "Answer with a letter."), (False, "")])
def test_prompts_and_scores_in_the_chat_template_are_the_harness_s(
    place: Path, monkeypatch: pytest.MonkeyPatch, multiturn: bool, system: str
) -> None:
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    names = ["t_letters", "t_prefix", "t_contexts", "t_word", "t_answer"]
    settings = TaskSettings(
        data_dir=str(place / "hub"),
        apply_chat_template=True,
        fewshot_as_multiturn=multiturn,
        system_prompt=system,
        model="demo",
    )
    tasks = [
        task for n in names for task in build(n, shots=None, settings=settings, folders=(str(place / "tasks"),)).tasks
    ]
    suite = Suite(tasks=tuple(tasks), corpora=())
    scorer = Scorer(load_model(LoadConfig(path=str(demo.MODEL_DIR), device="cpu")))
    records = run_model(scorer, suite).records
    monkeypatch.chdir(place / "hub")
    found = TaskManager(include_path=[place / "tasks"], include_defaults=False).load(names)
    for task in found["tasks"].values():
        task.set_fewshot_seed(seed=harness_tasks.FEWSHOT_SEED)
    theirs = evaluate(
        HFLM(pretrained=str(demo.MODEL_DIR), device="cpu", dtype="float32"),
        found,
        bootstrap_iters=0,
        apply_chat_template=True,
        fewshot_as_multiturn=multiturn,
        system_instruction=system or None,
    )
    prompts: dict[tuple[str, str], list[tuple[str, ...]]] = {}
    for request in suite.requests:
        prompts.setdefault((request.task, request.item_id), []).append((request.context, request.continuation))
    for row in tasks[-1].items.table.to_pylist():
        prompts["t_answer", row["item_id"]] = [(row["prompt"],)]
    assert {
        (name, str(sample["doc_id"])): [tuple(a[: len(a) - (name == "t_answer")]) for a in sample["arguments"]]
        for name, samples in theirs["samples"].items()
        for sample in samples
    } == prompts
    assert all(context.startswith("<|system|>" if system else "<|user|>") for (context, *_), *_ in prompts.values())
    assert prompts["t_letters", "0"][0][0].count("<|user|>") == (2 if multiturn else 1)  # one few-shot example
    results = {
        (part, key): pytest.approx(value)  # shares of six items
        for part, row in theirs["results"].items()
        for key, value in row.items()
        if "," in key and "_stderr" not in key
    }
    assert {(own.part, f"{own.metric},{own.filter}"): own.value for own in suite.harness_metrics(records)} == results


def test_a_chat_template_that_is_missing_or_fails_is_refused(place: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL_DIR)
    for template, error, words in (
        (None, ConfigError, "no chat template"),
        ("{{ raise_exception('no system role') }}", CheckpointError, "fails: no system role"),
    ):
        tokenizer.chat_template = template
        folder = tmp_path / words.split()[0]
        tokenizer.save_pretrained(folder)
        settings = TaskSettings(data_dir=str(place / "hub"), apply_chat_template=True, model=str(folder))
        with pytest.raises(error, match=words):
            build("t_plain", shots=None, settings=settings, folders=(str(place / "tasks"),))


def test_mutual_information_asks_the_options_alone_too(place: Path) -> None:
    task, alone = made(place, "t_mutual")
    assert alone.name == "t_mutual.unconditional" and alone.family == "ungraded"
    assert {r.context for r in alone.requests} == {""} and len(alone.requests) == len(task.requests) == 18
    # Alone, option 0 is as likely as in context; option 1 gains most: acc takes 0, mutual information 1.
    inside = scores(task, {str(i): [-1.0, -2.0, -9.0] for i in range(6)})
    bare = scores(task, {str(i): [-1.0, -5.0, -9.0] for i in range(6)}, name=alone.name)
    found = own(task, RunRecords(option_scores=OptionScores.concat([inside, bare])))
    assert found[("t_mutual", "acc")][0] == found[("t_mutual", "acc_mutual_info")][0] == 2 / 6
    keys = {"0", "3"}
    some = OptionScores.concat([inside.where(item_id=keys), bare.where(item_id=keys)])
    assert own(task, RunRecords(option_scores=some))[("t_mutual", "acc_mutual_info")] == (0.0, 2, 4)


def test_answers_are_filtered_and_judged_by_the_task(place: Path) -> None:
    [task] = made(place, "t_answer")
    assert (task.answering.until, task.answering.max_new_tokens) == (("\n", "!"), 7)
    texts = {"0": "it is 0", "1": "it is 2", "2": "two", "3": "3", "4": "", "5": "5 or 6"}
    assert task.answering.judge(texts) == {"0": True, "1": False, "2": False, "3": True, "4": False, "5": True}
    rows = [{"task": "t_answer", "item_id": i, "turn": 0, "sample": 0, "text": t} for i, t in texts.items()]
    found = own(task, RunRecords(generations=Generations.from_rows(rows)))
    assert found[("t_answer", "exact_match.number")] == (3 / 6, 6, 0)


def test_rolling_tasks_are_documents_and_splits_that_nothing_needs_may_be_missing(place: Path) -> None:
    [task] = made(place, "t_rolling")
    assert task.documents == tuple(row["q"] for row in ROWS) and not task.requests and not len(task.items)
    assert len(made(place, "t_train")[0].items) == 6


@pytest.mark.parametrize(
    ("name", "shots", "error", "words"),
    [
        ("t_train", 2, DataError, "few-shot examples from the split 'train'.*t_train@0"),
        ("t_fixed", 2, ConfigError, "defined without few-shot examples"),
        ("t_elsewhere", None, DataError, "'org/elsewhere'.*hf download --repo-type dataset org/elsewhere --local-dir"),
        ("t_validation", None, DataError, "lacks the split that is evaluated. Allowed: test"),
        ("t_samples", None, UnsupportedError, "samples its answers"),
        ("t_broken", None, MlflowCompressError, "t_broken"),
        ("t_nothing", None, ConfigError, "Unknown task"),
    ],
)
def test_what_cannot_be_built_says_why(place: Path, name: str, shots: int | None, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        made(place, name, shots=shots)


def test_a_group_of_ours_names_every_missing_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        load_suite("paper", model="m", settings=TaskSettings(data_dir="."))
    for dataset in ("cais/mmlu", "Rowan/hellaswag", "openai/gsm8k", "mandarjoshi/trivia_qa"):
        assert f"hf download --repo-type dataset {dataset} --local-dir ./{dataset}" in str(caught.value)
    assert len(str(caught.value)) <= 3_000


def test_data_dir_must_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names no folder"):
        load_suite("piqa", model="m", settings=TaskSettings(data_dir=str(tmp_path / "nowhere")))


def test_the_index_of_a_few_folders_leaves_the_whole_collection_alone(place: Path) -> None:
    assert "t_plain" in harness_tasks.manager((str(place / "tasks"),)).all_subtasks
    assert "mmlu" not in harness_tasks.manager((str(place / "tasks"),)).all_tasks


def test_wikitext_gets_its_blank_lines_back(tmp_path: Path) -> None:
    folder = tmp_path / "Salesforce" / "wikitext" / "wikitext-2-raw-v1"
    folder.mkdir(parents=True)
    lines = ["", " = Title = \n", "", " A sentence . \n"]
    (folder / "test.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    (folder.parent / "README.md").write_text(
        "---\nconfigs:\n- config_name: wikitext-2-raw-v1\n  data_files:\n  - split: test\n    path: wikitext-2-raw-v1/test.jsonl\n---\n"
    )
    suite = load_suite("wikitext2", model="m", settings=TaskSettings(data_dir=str(tmp_path)))
    assert [c.text for c in suite.corpora] == [" \n = Title = \n \n A sentence . \n"]
    with pytest.raises(DataError, match="hf download --repo-type dataset Salesforce/wikitext"):
        load_suite("wikitext2", model="m", settings=TaskSettings())


def test_data_are_those_of_the_folder_as_it_is_now(place: Path, tmp_path: Path) -> None:
    """`datasets` (5.2.0) would answer a second folder of one name, and a changed file, with the first one's rows."""
    card = {"configs": [{"config_name": "cfg", "data_files": [{"split": "test", "path": "part/test.jsonl"}]}]}

    def write(root: Path, rows: list[dict[str, Any]]) -> None:
        folder = root / "hub" / "org" / "set" / "part"
        folder.mkdir(parents=True, exist_ok=True)
        (folder.parent / "README.md").write_text(f"---\n{json.dumps(card)}\n---\n")
        (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def read(root: Path) -> tuple[list[str], list[str]]:
        data = str(root / "hub")
        settings = TaskSettings(data_dir=data)
        [task] = build("t_cfg", shots=None, settings=settings, folders=(str(tmp_path / "tasks"),)).tasks
        own = load_split("org/set", "cfg", "test", data_dir=data, task="t")["q"]
        return task.items.column("question").tolist(), list(own)

    (tmp_path / "tasks").mkdir()
    plain = {**CHOICE, "dataset_name": "cfg", "doc_to_text": "{{q}}"}
    (tmp_path / "tasks" / "t_cfg.yaml").write_text(yaml.safe_dump({"task": "t_cfg", **plain}))
    for root, q in ((tmp_path / "a", "first"), (tmp_path / "b", "second"), (tmp_path / "b", "third one")):
        write(root, [{**ROWS[0], "q": q}])
        assert read(root) == ([q], [q])


def test_slices_of_c4_and_the_pile_are_their_first_documents_joined_with_blanks(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"document {i}"}) + "\n" for i in range(1_102)]
    c4, pile = tmp_path / "allenai" / "c4" / "en", tmp_path / "mit-han-lab" / "pile-val-backup"
    for folder in (c4, pile):
        folder.mkdir(parents=True)
    with gzip.open(c4 / "c4-validation.00000-of-00008.json.gz", "wt") as sink:
        sink.writelines(rows)
    (pile / "val.jsonl.zst").write_bytes(zstandard.compress("".join(rows).encode()))
    suite = load_suite("c4_slice,pile_slice", model="m", settings=TaskSettings(data_dir=str(tmp_path)))
    wanted = " ".join(f"document {i}" for i in range(1_100))
    assert [(c.name, c.text, c.max_tokens) for c in suite.corpora] == [
        ("c4_slice", wanted, 524_288),
        ("pile_slice", wanted, 524_288),
    ]
    with pytest.raises(DataError, match=r"allenai/c4 en/c4-validation\.00000-of-00008\.json\.gz --local-dir"):
        load_suite("c4_slice", model="m", settings=TaskSettings(data_dir=str(tmp_path / "mit-han-lab")))
    with pytest.raises(ConfigError, match="no few-shot examples"):
        load_suite("c4_slice@5", model="m", settings=TaskSettings(data_dir=str(tmp_path)))


def test_a_corpus_may_be_scored_in_part_and_corpora_alone_can_be_measured(tmp_path: Path) -> None:
    text = "The river runs past the old mill. " * 200
    corpora = [Corpus(name="whole", text=text), Corpus(name="part", text=text, max_tokens=1_100)]
    config = CONFIGS["llama"]()
    config.max_position_embeddings = 512
    loaded = LoadedModel(build_model(config), build_tokenizer(), tmp_path, torch.float32, torch.device("cpu"))
    scores = run_model(Scorer(loaded), Suite(tasks=(), corpora=tuple(corpora))).records.token_scores
    whole, part = (scores.where(task=name) for name in ("whole", "part"))
    assert len(part) == 2 * 255 < len(whole)  # two windows of 512; the other 76 tokens are a tail
    assert np.abs(part.column("nll") - whole.column("nll")[: 2 * 255]).max() <= 2 * rounding(loaded)  # both are rounded
    assert corpora[0].content_hash() != corpora[1].content_hash()
    (tmp_path / "c.txt").write_text("The river runs past the old mill. " * 200)
    suite = load_suite(str(tmp_path / "c.txt"), model="m", settings=TaskSettings())
    config.max_position_embeddings = 512
    loaded = LoadedModel(build_model(config), build_tokenizer(), tmp_path, torch.float32, torch.device("cpu"))
    records = run_model(Scorer(loaded), suite).records
    assert records.items is None and records.option_scores is None
    found = MetricInputs(baseline=records, variant=records)
    assert any(r.name == "quality/perplexity" for r in compute_all(found))
    assert flips_table(found) == [] and answers_by_margin(found) is None and not len(kl_values(found))


class FakeRun:
    """What `log_harness_metrics` writes to."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.json: dict[str, Any] = {}

    def log_values(self, values: dict[str, float]) -> None:
        self.values |= values

    def log_json(self, value: Any, name: str) -> None:
        self.json[name] = value


def test_a_model_is_measured_on_harness_tasks_and_both_sides_numbers_agree(place: Path) -> None:
    found = Parts.join([parts(place, name) for name in ("g_averaged", "t_norm", "g_nested", "t_rolling", "t_many")])
    suite = Suite(tasks=found.tasks, corpora=(), averages=found.averages)
    measured = run_model(Scorer(load_random("llama")), suite)
    run = FakeRun()
    log_harness_metrics(run, suite, measured, baseline=measured.records)  # type: ignore[arg-type]

    ours = {
        r.task: r.value
        for r in compute_all(MetricInputs(baseline=measured.records))
        if r.name == "quality/accuracy" and r.category is None
    }
    assert run.values["harness/acc/g_averaged"] == ours["g_averaged"]
    assert run.values["harness/acc_norm/t_norm"] == ours["t_norm"]
    assert run.values["harness/exact_match.number/t_answer"] == ours["t_answer"]
    assert "t_many" not in ours and 0 <= run.values["harness/acc/t_many"] <= 1
    scores = measured.records.token_scores
    assert scores is not None and set(scores.column("task")) == {"t_rolling"}
    n_bytes = sum(len(row["q"]) for row in ROWS)
    assert run.values["harness/byte_perplexity/t_rolling"] == pytest.approx(
        np.exp(scores.column("nll").sum() / n_bytes)
    )
    table = {(row["part"], row["metric"]): row for row in run.json["harness.json"]}
    assert table["t_plain", "acc"]["n"] == 6 and "harness/acc/t_plain" not in run.values
    assert run.values["harness/exact_match.number/g_nested"] == table["g_nested", "exact_match.number"]["value"]
    assert (
        table["g_nested::g_inner", "exact_match.number"]["n"] == 12
        and "harness/exact_match.number/g_inner" not in run.values
    )
    assert all(row["value"] == row["baseline"] for row in table.values())


def test_prompts_that_are_too_long_are_counted(place: Path) -> None:
    loaded = load_random("llama")
    long, short = "The miller counts his sacks. " * 40, "The miller"
    rows = [{"id": i, "category": "c", "prompt": text, "answers": ["x"]} for i, text in (("a", long), ("b", short))]
    path = place / "exact.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    suite = load_suite(str(path), model="m", settings=TaskSettings())
    assert run_model(Scorer(loaded), suite).n_truncated == 1
    path.write_text(json.dumps({"id": "a", "category": "c", "context": long, "choices": ["one", "two"], "answer": 0}))
    suite = load_suite(str(path), model="m", settings=TaskSettings())
    assert run_model(Scorer(loaded), suite).n_truncated == 2
