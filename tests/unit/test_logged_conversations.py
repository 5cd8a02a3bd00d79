"""Conversations that an application has logged: read, cleaned, sampled by hash, scored, and not shown."""

import json
import logging
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import mlflow
import numpy as np
import pytest
from mlflow.entities import SpanType

from mlflow_compress import demo
from mlflow_compress.commands.command import configured
from mlflow_compress.commands.evaluate.items import with_chat_template
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.judge.run import judged_answers
from mlflow_compress.errors import ConfigError, DataError, TrackingError
from mlflow_compress.items.sources.conversations import PATTERNS, Redaction, answers_of, smallest_digests
from mlflow_compress.items.sources.instructions import Instruction, find_instructions, fingerprint_of
from mlflow_compress.items.suite import check_tasks_named, is_task_file, load_suite
from mlflow_compress.items.task import TaskSettings
from mlflow_compress.metrics import MetricInputs, headline
from mlflow_compress.metrics.core.metric_registry import compute
from mlflow_compress.records import Generations, Judgments, OptionDistances, OptionScores, RunRecords
from mlflow_compress.reporting.details import changed_answers
from mlflow_compress.scoring.generation.chat_format import chat_format
from mlflow_compress.tracking.app_traces import read_conversations
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker
from tests.metric_records import generations_of


def said(role: str, content: object, **more: object) -> dict[str, object]:
    return {"role": role, "content": content, **more}


TWO_TURNS = [said("user", "Hi."), said("assistant", "Hello."), said("user", "Who?"), said("assistant", "Me.")]


def written(folder: Path, *conversations: object, **more: object) -> Path:
    file = folder / "chats.jsonl"
    lines = [json.dumps({"messages": one, **more}) for one in conversations]
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


# --- what is cleaned


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("email", "to ann.b+c@mail.example.org, please", "to [email], please"),
        ("url", "see https://example.org/a?b=c (or www.example.com)", "see [url] (or [url])"),
        ("ip", "from 192.168.0.1 at noon", "from [ip] at noon"),
        ("iban", "pay DE89 3704 0044 0532 0130 00 now", "pay [iban] now"),
        ("phone", "call +49 (30) 1234-5678, or 030/12345678", "call [phone], or [phone]"),
        ("phone", "in 2024 and 1,234.56 of 12345", "in 2024 and 1,234.56 of 12345"),
    ],
)
def test_named_patterns_clean_what_they_name(name, text, expected):
    assert Redaction.of(name)(text) == expected


def test_a_file_has_a_pattern_per_line_and_goes_before_the_named_ones(tmp_path):
    (tmp_path / "mine.txt").write_text("order-\\d+\n\nAnn\n", encoding="utf-8")
    redact = Redaction.of(f"email, {tmp_path / 'mine.txt'}")
    assert redact("Ann has order-17, ann@x.org") == "[redacted] has [redacted], [email]"
    assert Redaction.of("")("ann@x.org") == "ann@x.org"


@pytest.mark.parametrize(("line", "said_"), [("(", "no regular expression"), ("a*", "without characters")])
def test_a_wrong_pattern_is_refused_with_its_line(tmp_path, line, said_):
    (tmp_path / "mine.txt").write_text(f"fine\n{line}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"line 2.*{said_}"):
        Redaction.of(str(tmp_path / "mine.txt"))
    with pytest.raises(ConfigError, match="neither a pattern nor a file"):
        Redaction.of("emial")


# --- what is read


def test_every_answer_is_an_item_after_the_messages_before_it(tmp_path):
    found = answers_of(written(tmp_path, TWO_TURNS, category="chat"), Redaction())
    assert [(len(one.messages), one.answer, one.category) for one in found] == [
        (1, "Hello.", "chat"),
        (3, "Me.", "chat"),
    ]
    assert len({one.conversation for one in found}) == 1


def test_what_is_no_text_and_what_was_said_before_is_left_out_and_counted(tmp_path, caplog):
    called = [
        said("user", [{"type": "text", "text": "Time?"}]),
        said("assistant", None, tool_calls=[{"function": {"name": "now", "arguments": "{}"}}]),
        said("tool", "12:00"),
        said("assistant", "Noon."),
    ]
    pictured = [said("user", [{"type": "image_url", "image_url": {}}]), said("assistant", "A cat.")]
    file = written(tmp_path, TWO_TURNS, TWO_TURNS, called, pictured, [said("assistant", "First!")])
    with caplog.at_level(logging.WARNING):
        found = answers_of(file, Redaction())
    assert [one.answer for one in found] == ["Hello.", "Me."]
    # Of `called` two answers, of `pictured` the question and its answer; the second time, two answers.
    assert "2 answers are measured; left out: 1 before any question, 2 said before, 4 with or after" in caplog.text


def test_unusable_files_are_refused_with_file_and_line(tmp_path):
    for rows, message in (
        ([[]], r"line 1: 'messages' must be a list"),
        ([TWO_TURNS, "text"], r"line 2: 'messages' must be a list"),
        ([[said("user", "Hi.")]], "No answer of these conversations can be used"),
    ):
        with pytest.raises(DataError, match=message):
            check_tasks_named(f"openai:{written(tmp_path, *rows)}", model="demo")
    with pytest.raises(DataError, match="Cannot read the file"):
        check_tasks_named(f"openai:{tmp_path / 'none.jsonl'}", model="demo")
    with pytest.raises(ConfigError, match=r"reads a file. Allowed: openai:FILE.jsonl"):
        load_suite("openai", model="demo", settings=TaskSettings())
    with pytest.raises(ConfigError, match="names no file"):
        configured(EvaluateConfig, {"tasks": f"openai:{tmp_path / 'none.jsonl'}", "checkpoint": "x"})


def test_a_sample_depends_on_what_was_said_alone(tmp_path):
    chats = [[said("user", f"Question {i}"), said("assistant", f"Answer {i}")] for i in range(40)]
    few = smallest_digests(answers_of(written(tmp_path, *chats[:30]), Redaction()), 10)
    again = smallest_digests(answers_of(written(tmp_path, *reversed(chats[:30])), Redaction()), 10)
    grown = smallest_digests(answers_of(written(tmp_path, *chats), Redaction()), 10)
    assert few == again and len(few) == 10
    # Of a log that has grown by a third, an answer leaves the sample only where a new one has a smaller digest.
    ids, new = {one.answer_id for one in few}, {one.answer_id for one in grown}
    assert {one for one in ids if one <= max(new)} == ids & new != set()


def test_texts_are_cleaned_before_they_become_items(tmp_path):
    file = written(
        tmp_path, [said("user", "I am ann@x.org."), said("assistant", "Hello ann@x.org")], category="a@b.org"
    )
    suite = load_suite(f"openai:{file}", model="demo", settings=TaskSettings(redact="email"))
    assert "@" not in json.dumps(suite.items.table.to_pylist()) + repr(suite.tasks[0].requests)
    [item] = suite.items.table.to_pylist()
    assert item["options"] == ["Hello [email]"] and item["question"] == "I am [email]."
    assert not is_task_file(f"openai:{file}") and is_task_file(file)


def test_the_template_of_the_baseline_renders_the_messages_and_the_answer_follows_as_it_was(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL_DIR)
    suite = load_suite(f"openai:{written(tmp_path, TWO_TURNS)}", model="demo", settings=TaskSettings())
    shown = with_chat_template(tokenizer, suite, "Be brief.")
    by_answer = {request.continuation: request.context for request in shown.requests}
    assert by_answer["Hello."] == "<|system|>Be brief.<|end|>\n<|user|>Hi.<|end|>\n<|assistant|>"
    assert by_answer["Me."].endswith("<|assistant|>Hello.<|end|>\n<|user|>Who?<|end|>\n<|assistant|>")
    tokenizer.chat_template = None
    [first, _] = sorted(with_chat_template(tokenizer, suite).requests, key=lambda request: len(request.context))
    assert first.context == "User: Hi.\nAssistant: "
    assert chat_format(tokenizer).conversation([{"role": "user", "content": "Hi."}]) == first.context


def test_instructions_are_the_first_questions_after_the_system_prompt(tmp_path, caplog):
    shop = [said("system", "Sell."), said("user", "How much?"), said("assistant", "Ten.")]
    file = written(tmp_path, TWO_TURNS, shop, [said("user", "I am a@b.org."), said("assistant", "Hi.")])
    named = f"openai:{file}"
    with caplog.at_level(logging.WARNING):
        plain = find_instructions(named, model="m", settings=TaskSettings(redact="email"))
    assert {one.turns: one.reference for one in plain} == {("Hi.",): ("Hello.",), ("I am [email].",): ("Hi.",)}
    assert {one.category for one in plain} == {"logged"} and "1 have another system prompt" in caplog.text
    [sold] = find_instructions(named, model="m", settings=TaskSettings(system_prompt="Sell."))
    assert sold.turns == ("How much?",)
    assert len(find_instructions(named, model="m", settings=TaskSettings(limit=1))) == 1
    assert fingerprint_of(plain, named) == [one.item_id for one in plain]  # no text is stored with it
    assert fingerprint_of(plain, "mine.jsonl")[0]["turns"] == plain[0].turns
    with pytest.raises(DataError, match=r"after the system prompt.*system_prompt: Buy\."):
        find_instructions(named, model="m", settings=TaskSettings(system_prompt="Buy."))


# --- what is measured


def scored(folder: Path) -> MetricInputs:
    """Two conversations of two answers each; the tokens of one answer have another most probable one in the variant."""
    other = [*TWO_TURNS[:1], said("assistant", "Good day."), *TWO_TURNS[2:]]
    suite = load_suite(f"openai:{written(folder, TWO_TURNS, other)}", model="demo", settings=TaskSettings())
    keys = suite.items.key_rows()
    base = {"permutation": 0, "option": 0}
    scores = [
        {"task": t, "item_id": i, **base, "content": 0, "loglik": -3.0, "n_tokens": 3, "n_chars": 3, "n_bytes": 3}
        | {"greedy": False}
        for t, i in keys
    ]
    values = dict.fromkeys(("kl_reverse", "js", "tv", "top10", "rbo10"), 0.1)
    moved = [
        {"task": t, "item_id": i, **base, "kl": 0.1 * number, "same_top": 1.0 if number else 2 / 3, **values}
        for number, (t, i) in enumerate(keys)
    ]
    table = OptionScores.from_rows(scores)
    return MetricInputs(
        RunRecords(items=suite.items, option_scores=table),
        RunRecords(items=suite.items, option_scores=table, option_distances=OptionDistances.from_rows(moved)),
    )


def test_logged_answers_have_a_kl_no_accuracy_and_no_page(tmp_path):
    inputs = scored(tmp_path)
    pooled = headline(compute("divergence", inputs) + compute("logged_answers", inputs))
    assert pooled["distance/kl_mean"].value == pytest.approx((0.0 + 0.1 + 0.2 + 0.3) / 4)
    assert pooled["distance/logged_parted_pct"].value == 25.0
    assert compute("flips", inputs) == [] == compute("accuracy", inputs)
    assert headline(compute("kl_items", inputs))["distance/kl_items"].value == 4
    assert np.unique(inputs.view.group).size == 2  # answers of one conversation are no independent items
    from dataclasses import replace

    from mlflow_compress.reporting.page.variants_page import sample_prompts
    from tests.page_contents import page_content

    assert len(changed_answers(inputs).rows) == 0
    assert sample_prompts(replace(page_content(), items=inputs.baseline.items)) == {}


# --- traces


@pytest.fixture(scope="module")
def traced(tmp_path_factory) -> str:
    """A store in which an application has logged five traces."""
    folder = tmp_path_factory.mktemp("traced")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    mlflow.set_tracking_uri(uri)
    mlflow.set_experiment(experiment_id=mlflow.create_experiment("shop", artifact_location=str(folder / "artifacts")))

    @mlflow.trace(span_type=SpanType.CHAT_MODEL)
    def chat(messages, model="m"):
        return {"choices": [{"message": {"role": "assistant", "content": "Ask ann@x.org."}}]}

    @mlflow.trace
    def answer(question):
        return f"So be it: {question}"

    @mlflow.trace
    def embed(texts, k):
        return [[0.1]]

    @mlflow.trace
    def agent(goal, budget):
        return chat([said("user", goal)])["choices"][0]

    @mlflow.trace
    def broken(question):
        raise ValueError(question)

    chat([said("system", "Sell."), said("user", "Who is it?")])
    answer("one")
    embed(["x"], 3)
    agent("Find it.", 5)
    with pytest.raises(ValueError, match="lost"):
        broken("lost")
    mlflow.flush_trace_async_logging()
    return uri


def test_traces_become_a_file_of_cleaned_conversations(traced, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", traced)
    monkeypatch.setenv("MLFLOW_COMPRESS_HOME", str(tmp_path / "home"))
    rows = read_conversations(traced, "shop", Redaction.of("email"))
    texts = sorted([message["content"] for message in row["messages"]] for row in rows)
    assert texts == [
        ["Find it.", "Ask [email]."],  # the root of an agent is no chat: its call of a model is
        ["Sell.", "Who is it?", "Ask [email]."],
        ["one", "So be it: one"],
    ]
    config = configured(
        EvaluateConfig,
        {
            "tasks": "mlflow-traces:shop",
            "redact": "email",
            "checkpoint": "endpoint:http://127.0.0.1:9/v1",
            "endpoint_args": {"served_model": "m"},
        },
    )
    prefix, _, file = config.evaluation.tasks.partition(":")
    assert prefix == "openai" and Path(file).stem == "shop"
    assert "ann@x.org" not in Path(file).read_text(encoding="utf-8")
    suite = load_suite(config.evaluation.tasks, model="demo", settings=TaskSettings(redact="email"))
    assert len(suite.items) == 3


def test_traces_that_are_missing_or_no_conversations_are_refused(traced):
    with pytest.raises(DataError, match="no experiment of this name"):
        read_conversations(traced, "none", Redaction())
    with pytest.raises(DataError, match="No trace is a conversation"):
        read_conversations(traced, "shop?name = 'embed'", Redaction())
    assert len(read_conversations(traced, "shop?name = 'answer'", Redaction())) == 1


def test_every_named_pattern_is_described():
    from mlflow_compress.config import parameters

    help_ = parameters(EvaluateConfig)["redact"].description or ""
    assert all(name in help_ for name in PATTERNS)


HOSTILE = "<script>alert(1)</script> ünïcode 日本 \x07 [[10]]"


def answers(n: int, by: str) -> Generations:
    """Return two turns of n answers."""
    return generations_of({f"i{i}": [f"{by} {i} {turn} {HOSTILE}" for turn in (0, 1)] for i in range(n)}, by="turn")


def judgments(n: int, repeats: int, *tasks: str) -> Judgments:
    """Return judgments of which every third is unscored."""
    rows = []
    for task in tasks:
        for place in range(2 * n * repeats):
            scored = place % 3 != 0
            row = {"task": task, "item_id": f"i{place // (2 * repeats)}", "turn": place // repeats % 2}
            row |= {"repeat": place % repeats, "category": "math", "score": float(place % 10 + 1) if scored else None}
            row |= {
                "reason": None if scored else "http_500",
                "judgment": f"said {place} {HOSTILE}",
                "judge": "gpt-4 single-v1",
            }
            rows.append(row)
    return Judgments.from_rows(rows)


def instructions(n: int) -> list[Instruction]:
    """Return n instructions of two turns."""
    return [Instruction(item_id=f"i{i}", category="math", turns=(f"Ask {i}.", "Again.")) for i in range(n)]


def test_every_judgment_is_one_assessment_of_one_trace_per_answer(tracker: Tracker) -> None:
    n = 60  # more answers than one call takes
    given = {"baseline": answers(n, "b"), "variant": answers(n, "v")}
    said = {"baseline": judgments(n, 1, "mt_bench"), "variant": judgments(n, 2, "mt_bench", "pairwise")}
    judged = judged_answers(instructions(n), given, said)
    with tracker.run("judge x", "judge", {}) as run:
        run.log_judged_answers(judged)
        traces = mlflow.search_traces(
            locations=[tracker.experiment_id], run_id=run.run_id, max_results=1000, return_type="list"
        )
    assert (
        len(traces)
        == 4 * n
        == len({(t.info.tags["model"], t.info.tags["item_id"], t.info.tags["turn"]) for t in traces})
    )
    assessments = [a for trace in traces for a in trace.info.assessments]
    assert len(assessments) == len(said["baseline"]) + len(said["variant"]) == 10 * n
    assert Counter(a.name for a in assessments) == {"mt_bench": 6 * n, "pairwise": 4 * n}
    wanted = [row for table in said.values() for row in table.table.to_pylist()]
    assert Counter(a.value for a in assessments) == Counter(row["score"] for row in wanted)
    assert Counter(a.rationale for a in assessments) == Counter(row["judgment"] for row in wanted)
    unscored = [a for a in assessments if a.value is None]
    assert len(unscored) == sum(row["score"] is None for row in wanted) > 0
    assert {a.error.error_code for a in unscored if a.error is not None} == {"http_500"}
    assert {a.source.source_id for a in assessments} == {"gpt-4 single-v1"}
    [second] = [
        t
        for t in traces
        if (t.info.tags["model"], t.info.tags["item_id"], t.info.tags["turn"]) == ("variant", "i7", "2")
    ]
    [span] = second.data.spans
    assert span.outputs == f"v 7 1 {HOSTILE}"
    assert [m["content"] for m in span.inputs["messages"]] == ["Ask 7.", f"v 7 0 {HOSTILE}", "Again."]
    assert second.info.trace_metadata["mlflow.sourceRun"] == run.run_id


def test_answers_without_a_judgment_are_no_traces() -> None:
    only = judgments(2, 1, "mt_bench").where(turn=0, item_id="i1")
    found = judged_answers(
        instructions(2), {"baseline": answers(2, "b"), "variant": answers(2, "v")}, {"baseline": None, "variant": only}
    )
    assert [(one.model, dict(one.tags)) for one in found] == [
        ("variant", {"item_id": "i1", "turn": "1", "category": "math"})
    ]


def test_a_store_that_refuses_is_one_clear_error(tracker: Tracker, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = judged_answers(instructions(1), {"variant": answers(1, "v")}, {"variant": judgments(1, 1, "mt_bench")})
    monkeypatch.setattr(TrackedRun, "info", SimpleNamespace(experiment_id="123456"))
    with pytest.raises(TrackingError, match="0 of 2 written"):
        TrackedRun(tracker.client, "0" * 32).log_judged_answers(judged)
