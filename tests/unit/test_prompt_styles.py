"""Prompt styles of lettered questions: what each shows, how they are named, chats, and refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import lm_eval.tasks
import numpy as np
import pytest
import torch
import yaml

from mlflow_compress import demo
from mlflow_compress.commands.evaluate.items import with_chat_template
from mlflow_compress.commands.evaluate.outputs import run_model
from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.items.harness_build import build
from mlflow_compress.items.named import hub_choice
from mlflow_compress.items.prompt_style import PROMPTS
from mlflow_compress.items.suite import Suite, load_suite
from mlflow_compress.items.task import TaskSettings
from mlflow_compress.metrics.core.metric_inputs import MetricInputs, MetricSettings
from mlflow_compress.metrics.core.metric_registry import METRICS
from mlflow_compress.models.loading import LoadConfig, load_model
from mlflow_compress.reporting.details import conformal_table
from mlflow_compress.scoring.engine import Scorer
from tests.harness_reference import HUB
from tests.roundoff import of_sum
from tests.shared_data import needs_shared
from tests.task_files import write_rows
from tests.unit.scoring_models import build_tokenizer, rounding

SETTINGS = TaskSettings(num_fewshot=2, num_shuffles=2, seed=1)
CHATML = "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}{{ '<|assistant|>\n' }}"
LLAMA2 = "{{ bos_token }}{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"


def rows(n: int = 5) -> list[dict[str, Any]]:
    category, choices = "big_rivers", ["a", "b", "c", "d"]
    made = [
        {
            "id": f"d{i}",
            "category": category,
            "split": "dev",
            "question": f" Which {i}?",
            "choices": ["w", "x", "y", "z"],
            "answer": i,
        }
        for i in range(2)
    ]
    return made + [
        {"id": f"q{i}", "category": category, "question": f"Q{i}? ", "choices": choices, "answer": i % 4} for i in range(n)
    ]  # fmt: skip


def suite(folder: Path, content: list[dict[str, Any]], settings: TaskSettings = SETTINGS) -> Suite:
    return load_suite(write_rows(folder / "mine.jsonl", content), model="m", settings=settings)


def test_the_default_s_fingerprints_are_those_of_before_there_were_styles(tmp_path: Path) -> None:
    # Of what the package made of these rows before styles existed (commit 70ba122), hashed as today.
    found = suite(tmp_path, rows(), replace(SETTINGS, all_orders=2)).hashes
    assert {name: value[:16] for name, value in found.items()} == {
        "mine": "084ab6bba4afe9c4",
        "mine_six": "252e56d8c68b58ff",
        "mine_orders": "55ade0a23009c6f6",
    }


def test_original_has_the_script_s_two_blanks_and_strips_nothing(tmp_path: Path) -> None:
    plain = suite(tmp_path, rows(1), replace(SETTINGS, num_fewshot=1, prompt_style="original")).tasks[0]
    assert plain.name == "mine_original"
    assert plain.requests[0].context == (
        "The following are multiple choice questions (with answers) about  big rivers.\n\n"
        " Which 0?\nA. w\nB. x\nC. y\nD. z\nAnswer: A\n\n"
        "Q0? \nA. a\nB. b\nC. c\nD. d\nAnswer:"
    )


def test_the_harness_describes_every_subject_as_we_do() -> None:
    folder = Path(lm_eval.tasks.__file__).parent / "mmlu" / "default"
    for subject in hub_choice.SUBJECTS:
        described = yaml.safe_load((folder / f"mmlu_{subject}.yaml").read_text())["description"]
        assert PROMPTS.get("harness").header(subject, "QA", []) == described


@needs_shared
@pytest.mark.parametrize(
    ("shots", "subject", "n"),
    [(5, "formal_logic", 126), (0, "high_school_us_history", 204)],  # symbols; long questions with line breaks
)
def test_the_harness_style_is_lm_eval_s_mmlu_byte_for_byte(
    shots: int, subject: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_choice, "SUBJECTS", [subject])
    settings = TaskSettings(num_fewshot=shots, num_shuffles=0, prompt_style="harness", data_dir=str(HUB))
    ours = load_suite("mmlu_lettered", model="m", settings=settings).tasks[0]
    # The contexts are lm_eval's own: `build` takes them from the requests that its tasks construct.
    [stock] = build(f"mmlu_{subject}", shots=shots, settings=settings, folders=("mmlu/default",)).tasks
    theirs = stock.requests
    assert len(ours.requests) == len(theirs) == 4 * n
    assert [(r.context, r.continuation) for r in ours.requests] == [(r.context, r.continuation) for r in theirs]


def test_the_first_style_asks_and_every_style_asks_with_e_and_f(tmp_path: Path) -> None:
    found = suite(tmp_path, rows(), replace(SETTINGS, prompt_style="shared,base,task", all_orders=2)).tasks
    assert [(task.name, task.family, len(task.items)) for task in found] == [
        ("mine_base", "lettered", 5),  # "shared" mentions six options, which the plain questions have not
        ("mine_shared_six", "lettered_six", 5),
        ("mine_base_six", "lettered_six", 5),
        ("mine_task_six", "lettered_six", 5),
        ("mine_base_orders", "lettered_orders", 2),
    ]
    assert found[0].requests[0].context == (
        "Question:  Which 0?\nChoices:\nA. w\nB. x\nC. y\nD. z\nAnswer: A\n"
        "Question:  Which 1?\nChoices:\nA. w\nB. x\nC. y\nD. z\nAnswer: B\n"
        "Question: Q0? \nChoices:\nA. a\nB. b\nC. c\nD. d\nAnswer:"
    )
    assert "with six potential answers" in found[1].requests[0].context
    six = [{**row, "choices": list("uvwxyz")} for row in rows()]
    assert [task.name for task in suite(tmp_path, six, replace(SETTINGS, prompt_style="shared")).tasks] == [
        "mine_shared"
    ]


def test_questions_that_have_not_four_options_have_no_six(tmp_path: Path) -> None:
    content = rows(4)
    content[2]["choices"], content[3]["choices"] = list("abc"), list("abcde")
    plain, six = suite(tmp_path, content).tasks
    assert (len(plain.items), six.items.column("item_id").tolist()) == (4, ["q2", "q3"])
    [alone] = suite(tmp_path, [{**row, "choices": list("abc")} for row in rows(2)]).tasks
    assert alone.name == "mine"


def test_a_passage_stands_before_the_question(tmp_path: Path) -> None:
    content = [{**row, "context": "Once.", "kind": "DRS"} for row in rows(1)]
    for style, begin in [
        ("hendrycks", "Once.\nQ0?\nA. a"),
        ("base", "Dialogue: Once.\nQuestion: Q0? \nChoices:\nA. a"),
    ]:
        plain = suite(tmp_path, content, replace(SETTINGS, num_fewshot=0, prompt_style=style)).tasks[0]
        assert begin in plain.requests[0].context
        assert plain.items.column("question").tolist() == ["Once.\nQ0? "]
    without_kind = [{name: value for name, value in row.items() if name != "kind"} for row in content]
    plain = suite(tmp_path, without_kind, replace(SETTINGS, num_fewshot=0, prompt_style="base")).tasks[0]
    assert plain.requests[0].context.startswith("Context: Once.\n")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"kind": "quiz"}, "'kind' is unknown. Allowed: QA, RC, CI, DRS, DS. Got: 'quiz'"),
        ({"kind": "RC"}, "every kind except QA must have a 'context'"),
        ({"kind": "QA", "context": "x"}, "every kind except QA must have a 'context'"),
        ({"context": 3}, "'context' has the wrong type. Allowed: a text"),
        ({"kind": ["QA"]}, "'kind' has the wrong type"),
        ({"uncertain": ["E"]}, "'uncertain' must be the texts of the options E and F"),
        ({"answer": "E"}, "'answer' is a letter outside the options. Allowed: A to D"),
        ({"choices": ["only"]}, "'choices' has a wrong number of options. Allowed: 2 to 24. Got: 1"),
        ({"choices": [str(i) for i in range(27)]}, "Allowed: 2 to 24. Got: 27"),
    ],
)
def test_broken_rows_are_named(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    content = rows(2)
    content[3] |= changed
    with pytest.raises(DataError) as caught:
        suite(tmp_path, content)
    assert words in str(caught.value) and "mine.jsonl, line 4" in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("hendriks", "Unknown prompt style.*Did you mean 'hendrycks'"),
        ("base,base", "names a style twice"),
        ("shared", "mentions six options.*prompt_style=base,shared"),
    ],
)
def test_styles_that_cannot_be_are_refused(tmp_path: Path, prompt: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        suite(tmp_path, rows(), replace(SETTINGS, prompt_style=prompt))


@pytest.mark.parametrize(
    ("template", "begin", "end", "answer"),
    [
        (CHATML, "<|user|>\nQuestion: Q0?", "Answer:<|end|>\n<|assistant|>\n", "B"),
        (LLAMA2, "<s>[INST] Question: Q0?", "Answer: [/INST]", " B"),
        (None, "User: Question: Q0?", "Answer:\nAssistant:", " B"),  # as the benchmark shows falcon
    ],
)
def test_a_chat_s_answer_begins_where_the_template_ends(
    tmp_path: Path, template: str | None, begin: str, end: str, answer: str
) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    asked = suite(
        tmp_path,
        rows(1),
        replace(SETTINGS, num_fewshot=0, num_shuffles=0, prompt_style="base", apply_chat_template=True),
    )
    with pytest.raises(ValueError, match="must be rendered"):
        _ = asked.requests
    plain = with_chat_template(tokenizer, asked).tasks[0]
    second = plain.requests[1]
    assert second.context.startswith(begin) and second.context.endswith(end)
    assert (second.continuation, second.n_chars) == (answer, 1)
    assert plain.items.column("prompt").tolist() == [second.context]
    assert plain.content_hash() != asked.tasks[0].content_hash() and not plain.chat


def test_tasks_without_a_chat_stay_as_they_are(tmp_path: Path) -> None:
    asked = suite(tmp_path, rows(1))
    assert with_chat_template(None, asked) is asked


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    return Scorer(load_model(LoadConfig(path=str(demo.MODEL_DIR))))


def test_uacc_is_the_mean_over_prompts_and_scores(scorer: Scorer) -> None:
    settings = TaskSettings(num_fewshot=1, num_shuffles=0, limit=3, prompt_style="base,shared,task")
    asked = load_suite(str(demo.DATA_DIR / "choice.jsonl"), model="m", settings=settings)
    inputs = MetricInputs(run_model(scorer, asked).records, settings=MetricSettings(resamples=100))
    table = conformal_table(inputs, n_splits=2)
    assert [(row["task"], row["score"]) for row in table] == [
        (f"choice_{style}_six", score) for style in ("base", "shared", "task") for score in ("lac", "aps")
    ]
    assert len({row["accuracy"] for row in table}) > 1 and len({row["n"] for row in table}) == 1
    found = METRICS.get("uncertainty").compute(inputs)
    values = {result.name: result.value for result in found if result.task is None}
    for name in ("uacc", "set_size", "coverage"):
        assert values[f"uncertainty/{name}"] == pytest.approx(
            np.mean([row[name] for row in table]), rel=of_sum(len(table) + 1)
        )


def test_a_chat_is_scored_as_the_model_reads_it(scorer: Scorer) -> None:
    settings = TaskSettings(num_fewshot=1, num_shuffles=0, limit=1, apply_chat_template=True)
    asked = load_suite(str(demo.DATA_DIR / "choice.jsonl"), model="m", settings=settings)
    found = run_model(scorer, with_chat_template(scorer.loaded.tokenizer, asked)).records
    item = found.items.where(task="choice").table.to_pylist()[0]
    tokenizer, model = scorer.loaded.tokenizer, scorer.loaded.model
    message = [{"role": "user", "content": asked.tasks[0].requests[0].context}]
    prompt = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert item["prompt"] == prompt
    scores = found.option_scores.where(task="choice", item_id=item["item_id"]).column("loglik")
    blank = "" if prompt[-1].isspace() else " "
    for letter, loglik in zip("ABCD", scores, strict=True):
        begin, whole = (
            tokenizer(text, return_tensors="pt")["input_ids"] for text in (prompt.rstrip(), prompt + blank + letter)
        )
        with torch.no_grad():
            steps = model(whole).logits[0, len(begin[0]) - 1 : -1].log_softmax(-1)
        there = float(steps.gather(1, whole[0, len(begin[0]) :, None]).sum())
        assert abs(loglik - there) <= 2 * len(steps) * rounding(scorer.loaded)  # both are rounded, each token
