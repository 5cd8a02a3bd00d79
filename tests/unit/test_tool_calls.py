"""Calls of tools: reading, validity, equality as BFCL's, trigger scores as K2-Vendor-Verifier's, power, refusals."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from mlflow_compress import demo
from mlflow_compress.commands.evaluate.items import with_chat_template
from mlflow_compress.errors import AlignmentError, CheckpointError, DataError
from mlflow_compress.items.sources.conversations import Redaction, answers_of, tool_prompts_of
from mlflow_compress.items.suite import asks_with_tools, load_suite
from mlflow_compress.items.task import TaskSettings
from mlflow_compress.metrics import MetricInputs, headline
from mlflow_compress.metrics.core.metric_inputs import MetricSettings
from mlflow_compress.metrics.core.metric_registry import METRICS
from mlflow_compress.models.identity import require_tools_template
from mlflow_compress.records import Generations, Items, OptionDistances, OptionScores, RunRecords
from mlflow_compress.scoring.generation.chat_format import chat_format
from mlflow_compress.tool_calls import Call, is_valid, read_calls, same_calls
from tests.metric_records import generations_of
from tools.train_demo_tools import test_rows as prompts_of_seed

MARK = "<tool_call>"
TYPES = {"s": "string", "i": "integer", "f": "number", "b": "boolean", "l": "array", "d": "object"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": kind} for name, kind in TYPES.items()},
            "required": ["i"],
        },
    },
}


def written(call: Call) -> str:
    return f"{MARK}{json.dumps({'name': call.name, 'arguments': call.arguments})}</tool_call>"


@pytest.mark.parametrize(
    ("text", "mark", "calls"),
    [
        ("Hello {you}", MARK, ()),
        ("Hello {you}", "", ()),
        ('Well. <tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>', MARK, (Call("a", {}),)),
        (written(Call("a", {"i": 1})) + "\n" + written(Call("b", {})), MARK, (Call("a", {"i": 1}), Call("b", {}))),
        (' {"name": "a", "parameters": {"i": 1}}', "", (Call("a", {"i": 1}),)),  # Llama 3.1
        ('[TOOL_CALLS] [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]', "[TOOL_CALLS]",
         (Call("a", {}), Call("b", {}))),  # Mistral
        ('<tool_call>{"name": "a", "arguments": "{\\"i\\": 1}"}', MARK, (Call("a", {"i": 1}),)),
        ('<tool_call>{"name": "a", "arguments": {"i": 1', MARK, (None,)),
        ('<tool_call>{"name": "a"}', MARK, (None,)),
        ("<tool_call>[]", MARK, (None,)),
    ],
)  # fmt: skip
def test_calls_are_read_from_text(text: str, mark: str, calls: tuple[Call | None, ...]) -> None:
    assert read_calls(text, mark) == calls


@pytest.mark.parametrize(
    ("arguments", "valid"),
    [({"i": 1}, True), ({"i": 1.0}, True), ({"i": 1.5}, False), ({"i": "1"}, False), ({"i": True}, False), ({}, False),
     ({"i": 1, "s": 2}, False), ([1], False)],
)  # fmt: skip
def test_a_call_is_valid_by_json_schema(arguments: object, valid: bool) -> None:
    assert is_valid(Call("add", arguments), [ADD]) is valid
    assert not is_valid(Call("subtract", arguments), [ADD]) and not is_valid(None, [ADD])


# Accepted value, value of the call, and whether BFCL's `ast_checker` (Python, one accepted value per argument) takes it:
# its own code gave these verdicts (gorilla 6ea57973), and also those of 28,031 changes of 800 of its published items,
# of which 23 differ here, where the accepted value is not of its declared type.
BFCL = [
    ({"i": 10}, {"i": 10}, True),
    ({"i": 10}, {"i": 10.0}, False),
    ({"i": 10}, {"i": "10"}, False),
    ({"i": 10}, {"i": 11}, False),
    ({"i": 1}, {"i": True}, False),
    ({"f": 10.0}, {"f": 10}, True),
    ({"f": 10.5}, {"f": 10}, False),
    ({"f": 10.0}, {"f": "10.0"}, False),
    ({"b": True}, {"b": True}, True),
    ({"b": True}, {"b": 1}, False),
    ({"b": True}, {"b": "true"}, False),
    ({"s": "New York, NY"}, {"s": "new york ny"}, True),
    ({"s": "April 1, 2024"}, {"s": "April 1,2024"}, True),
    ({"s": "it's"}, {"s": 'it"s'}, True),
    ({"s": "x^2"}, {"s": "x*2"}, True),
    ({"s": "New York"}, {"s": "New York City"}, False),
    ({"s": "1"}, {"s": 1}, False),
    ({"l": ["Red", "blue"]}, {"l": ["red", "Blue"]}, True),
    ({"l": [1, 2]}, {"l": [2, 1]}, False),
    ({"l": [1, 2]}, {"l": [1]}, False),
    ({"d": {"a": "X y"}}, {"d": {"a": "xy"}}, True),
    ({"d": {"a": 1}}, {"d": {"a": 2}}, False),
    ({"d": {"a": 1}}, {"d": {"a": 1, "b": 2}}, False),
    ({"i": 1, "s": "a"}, {"i": 1}, False),
    ({"i": 1}, {"i": 1, "s": "a"}, False),
]  # fmt: skip


@pytest.mark.parametrize(("accepted", "made", "same"), BFCL)
def test_calls_are_equal_as_bfcl_has_them(accepted: dict[str, object], made: dict[str, object], same: bool) -> None:
    wanted, call = Call("add", accepted), Call("add", made)
    assert same_calls([call], [wanted], [ADD]) is same
    assert not same_calls([replace(call, name="other")], [wanted], [ADD])
    # Several calls match in any order, and in number.
    other = Call("other", {})
    assert same_calls([other, call], [wanted, other], [ADD]) is same
    assert not same_calls([call, call], [wanted], [ADD]) and not same_calls([None], [wanted], [ADD])


# --- the metric


def inputs(
    answers: Sequence[Sequence[Sequence[str]]],
    gold: Sequence[Sequence[Call] | None],
    *,
    p: tuple[Sequence[float], Sequence[float]] | None = None,
    resamples: int = 200,
) -> MetricInputs:
    """Return the inputs of answers to n items: of the baseline, its second sampling, and the variant, k per item."""
    rows = [
        {
            "task": "t", "item_id": str(i), "family": "tools", "rule": "calls", "category": "", "group_id": None,
            "question": "q", "prompt": "q", "options": [MARK], "gold": None,
            "answers": [json.dumps([ADD]), *([] if calls is None else [json.dumps([vars(c) for c in calls])])],
        }
        for i, calls in enumerate(gold)
    ]  # fmt: skip

    def generations(*samplings: Sequence[Sequence[str]]) -> Generations:
        texts = {str(i): ["", *(one for sampling in samplings for one in sampling[i])] for i in range(len(gold))}
        return generations_of(texts, prompt="q")

    def scores(of: Sequence[float]) -> OptionScores:
        key = {"task": "t", "permutation": 0, "option": 0, "content": 0, "n_tokens": 1, "n_chars": 1, "n_bytes": 1}
        return OptionScores.from_rows(
            [{**key, "item_id": str(i), "loglik": float(np.log(x)), "greedy": x > 0.5} for i, x in enumerate(of)]
        )

    items = Items.from_rows(rows)
    ours = RunRecords(items=items, generations=generations(answers[0], answers[1]))
    theirs = RunRecords(items=items, generations=generations(answers[2]))
    if p is not None:
        zero = dict.fromkeys(set(OptionDistances.SCHEMA.names) - {"task", "item_id", "permutation", "option"}, 0.0)
        kl = [
            {"task": "t", "item_id": str(i), "permutation": 0, "option": 0, **zero, "kl": 0.25}
            for i in range(len(gold))
        ]
        ours = replace(ours, option_scores=scores(p[0]))
        theirs = replace(theirs, option_scores=scores(p[1]), option_distances=OptionDistances.from_rows(kl))
    return MetricInputs(ours, theirs, settings=MetricSettings(resamples=resamples))


def values(given: MetricInputs) -> dict[str, float]:
    return {name.removeprefix("tools/"): r.value for name, r in headline(METRICS.get("tools").compute(given)).items()}


ONE, TWO = Call("add", {"i": 1}), Call("add", {"i": 2})
INVALID = f"{MARK}{{"


def test_every_value_by_hand() -> None:
    """Four items with two drawn answers each; a call is right for the first two."""
    baseline = [[written(ONE), written(ONE)], [written(ONE), "no"], ["no", "no"], ["no", written(TWO)]]
    again = [[written(ONE), written(ONE)], [written(ONE), written(ONE)], ["no", "no"], ["no", "no"]]
    variant = [
        [written(ONE), INVALID],
        [written(TWO), written(Call("subtract", {}))],
        ["no", written(ONE)],
        ["no", "no"],
    ]
    found = values(
        inputs([baseline, again, variant], [[ONE], [ONE], [], []], p=([0.9, 0.75, 0.1, 0.2], [0.8, 0.75, 0.3, 0.1]))
    )
    # Calls: first sampling 4, second 4, variant 5. First and variant both call in 3 answers, so TP 3, FP 2, FN 1; first
    # and second: TP 3, FP 1, FN 1.
    wanted = {
        "called_pct": 62.5, "called_pct_baseline": 50.0, "called_delta_pct": 12.5, "called_floor_pct": 0.0,
        "trigger_precision_pct": 60.0, "trigger_recall_pct": 75.0, "trigger_f1_pct": 600 / 9, "trigger_f1_floor_pct": 75.0,
        # Of the three answers with calls of both, one is no JSON, and one has another argument.
        "same_functions_pct": 200 / 3, "same_calls_pct": 100 / 3, "same_calls_floor_pct": 100.0,
        "json_pct": 80.0, "json_pct_baseline": 100.0, "schema_pct": 60.0, "schema_pct_baseline": 100.0,
        "schema_delta_pct": -40.0, "schema_floor_pct": 0.0,
        # Right: variant 1 + 0 + 1 + 2, first sampling 2 + 1 + 2 + 1, second 2 + 2 + 2 + 2.
        "right_pct": 50.0, "right_pct_baseline": 100.0, "right_delta_pct": -50.0, "right_floor_pct": 25.0,
        "gold_precision_pct": 80.0, "gold_recall_pct": 100.0, "gold_f1_pct": 800 / 9, "gold_f1_pct_baseline": 100.0,
        # Margins of the baseline's decision: 0.8, 0.5, 0.8, 0.6 become 0.6, 0.5, 0.4, 0.8.
        "decision_kl": 0.25, "decision_margin_delta": -0.1,
    }  # fmt: skip
    assert found == pytest.approx(wanted)


def test_without_right_calls_or_distances_values_are_left_out_and_a_missing_answer_is_refused() -> None:
    answers = [[written(ONE)], ["no"]]
    found = values(inputs([answers] * 3, [None, None]))
    assert found["trigger_f1_pct"] == found["same_calls_pct"] == found["schema_pct"] == 100
    assert not {name for name in found if name.startswith(("right", "gold", "decision"))}
    none = values(inputs([[["no"], ["no"]]] * 3, [None, None]))
    assert none["called_pct"] == 0 and not {"trigger_f1_pct", "schema_pct", "json_pct"} & none.keys()
    given = inputs([[["no"], ["no"]]] * 3, [None, None])
    broken = replace(given.variant, generations=Generations(given.variant.generations.table.slice(0, 3)))
    with pytest.raises(AlignmentError, match="Answers with tools are missing"):
        values(replace(given, variant=broken))


# Printed in K2-Vendor-Verifier's README (2025-11-15): answers that end with tool calls, those that are valid, and the share
K2VV = [
    (1958, 1958, "100.00"), (1984, 1984, "100.00"), (1703, 1703, "100.00"), (1827, 1825, "99.89"),
    (2119, 2097, "98.96"), (1850, 1775, "95.95"), (1878, 1798, "95.74"), (1874, 1790, "95.52"), (2128, 1856, "87.22"),
    (2108, 1837, "87.14"), (2071, 1800, "86.91"), (1945, 1668, "85.76"), (1893, 1602, "84.63"), (1778, 1715, "96.46"),
    (3657, 3037, "83.05"), (1494, 1494, "100.00"), (1305, 1302, "99.77"), (1271, 1229, "96.70"), (1325, 1007, "76.00"),
    (1269, 928, "73.13"), (1330, 969, "72.86"), (1243, 901, "72.49"), (1277, 925, "72.44"), (1266, 911, "71.96"),
    (644, 544, "84.47"),
]  # fmt: skip


@pytest.mark.parametrize(("called", "valid", "printed"), K2VV)
def test_schema_validity_is_what_k2_vendor_verifier_prints(called: int, valid: int, printed: str) -> None:
    bad = [written(Call("add", {"i": "one"})), written(Call("unknown", {"i": 1})), written(Call("add", {}))]
    answers = [[written(ONE)]] * valid + [[bad[n % 3]] for n in range(called - valid)]
    given = inputs([[[""]] * (called + 50), [[""]] * (called + 50), [*answers, *[["no"]] * 50]], [None] * (called + 50))
    assert f"{values(given)['schema_pct']:.2f}" == printed


# --- power and false alarms

PROMPTS, DRAWN = 300, 4  # what `tasks=tools` has


def simulated(rng: np.random.Generator, loss: float) -> bool:
    """Return whether the interval of the calls' change excludes 0, in a model that loses `loss` of the calls.

    A quarter of the prompts are unsure, and the variant is more or less so on each of them; the others call nearly
    always, or nearly never. As when they are generated, the variant has the random numbers of the second sampling.
    """
    p = np.concatenate([rng.uniform(0.2, 0.8, PROMPTS // 4), np.full(PROMPTS // 2, 0.99), np.full(PROMPTS // 4, 0.01)])
    moved = p + np.where((p > 0.1) & (p < 0.9), rng.normal(0, 0.08, PROMPTS), 0)
    u = [rng.random((PROMPTS, DRAWN)) for _ in range(2)]
    drawn = [u[0] < p[:, None], u[1] < p[:, None], u[1] < moved[:, None] * (1 - loss / p.mean())]
    answers = [[[written(ONE) if call else "no" for call in row] for row in one] for one in drawn]
    given = inputs(answers, [None] * PROMPTS, resamples=100)
    result = headline(METRICS.get("tools").compute(given))["tools/called_delta_pct"]
    return not result.low <= 0 <= result.high


@pytest.mark.slow
def test_a_loss_of_three_points_is_found_and_none_is_not() -> None:
    """At the planned 300 prompts with 4 drawn answers: power 0.8, at most 5 % false alarms (and 2 standard errors)."""
    rng = np.random.default_rng(36)
    n = 200
    power = np.mean([simulated(rng, 0.03) for _ in range(n)])
    alarms = np.mean([simulated(rng, 0.0) for _ in range(n)])
    assert power >= 0.8
    assert alarms <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / n)


# --- the bundled prompts, own files, chat templates, refusals


def test_the_bundled_prompts_are_what_the_script_writes() -> None:
    lines = (demo.DATA_DIR / "tools.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == prompts_of_seed()
    prompts = tool_prompts_of(demo.DATA_DIR / "tools.jsonl", Redaction())
    assert len(prompts) == PROMPTS and sum(bool(one.calls) for one in prompts) == 173
    for one in prompts:
        assert all(is_valid(Call(call["name"], call["arguments"]), one.tools) for call in one.calls or [])


HERMES = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LLAMA = HERMES.replace("<tool_call>\n", "").replace('"arguments"', '"parameters"').replace("\n</tool_call>", "")


@pytest.mark.parametrize(
    ("template", "mark", "begins"), [(HERMES, "<tool_call>", "<"), (LLAMA, "", "{")], ids=["hermes", "llama"]
)
def test_the_form_of_calls_is_read_off_the_chat_template(template: str, mark: str, begins: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL_DIR)
    tokenizer.chat_template = template
    form = chat_format(tokenizer).call_form()
    assert form.mark == mark and form.first.startswith(begins)
    assert form.end_tokens == {tokenizer.convert_tokens_to_ids("<|end|>")}


@pytest.mark.parametrize(
    ("template", "words"),
    [(None, "shows none"), (HERMES.replace("tool | tojson", "''"), "shows none"),
     (HERMES.replace('{"name": "', "<function=").replace('", "arguments": ', ">"), "in a form that is not read")],
    ids=["demo", "no tools", "xml"],
)  # fmt: skip
def test_a_template_without_tools_is_refused(template: str | None, words: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL_DIR)
    tokenizer.chat_template = template or tokenizer.chat_template
    with pytest.raises(CheckpointError, match=words):
        chat_format(tokenizer).call_form()


def test_a_model_without_tools_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    file = logged(tmp_path / "chats.jsonl")
    assert [asks_with_tools(spec, model="demo") for spec in ("tools", f"openai:{file}", "demo")] == [True, True, False]
    require_tools_template(demo.TOOLS_MODEL_DIR)
    with pytest.raises(CheckpointError, match="its chat template shows none"):
        require_tools_template(demo.MODEL_DIR)


USER = {"role": "user", "content": "Add 1, I am ann@example.org."}
CALLS = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"i": 1, "s": "ann@example.org"}'}}],
}  # fmt: skip


def logged(path: Path, **row: object) -> Path:
    path.write_text(json.dumps({"messages": [USER, CALLS], "tools": [ADD], **row}) + "\n")
    return path


def test_own_lines_with_tools_are_a_task_of_their_own(tmp_path: Path) -> None:
    file = logged(tmp_path / "chats.jsonl")
    result = {"role": "tool", "tool_call_id": "1", "content": "2"}
    more = [
        {"messages": [USER, CALLS, result, {"role": "assistant", "content": "It is 2."}, USER], "tools": [ADD]},
        {"messages": [USER, {"role": "assistant", "content": "Plain."}]},
    ]
    file.write_text(file.read_text() + "".join(json.dumps(row) + "\n" for row in more))
    prompts = tool_prompts_of(file, Redaction.of("email"))
    assert len(answers_of(file, Redaction())) == 1
    # The first answer stands in both lines; then come the answer to the result, and the question without an answer.
    assert [one.calls and [c["name"] for c in one.calls] for one in prompts] == [["add"], [], None]
    assert "ann@" not in json.dumps([vars(one) for one in prompts])
    suite = load_suite(f"openai:{file}", model="", settings=TaskSettings(redact="email"))
    assert [task.name for task in suite.tasks] == ["chats", "chats_tools"]
    shown = with_chat_template(AutoTokenizer.from_pretrained(demo.TOOLS_MODEL_DIR), suite).tasks[1]
    assert (
        shown.items.column("prompt")[0].endswith("<|assistant|>") and '"name": "add"' in shown.items.column("prompt")[0]
    )
    assert {request.continuation for request in shown.requests} == {MARK}
    assert shown.answering is not None and shown.answering.judge is None  # neither right nor wrong


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": [{"role": "system", "content": "x"}]}, "line 1: no message is a user's"),
        ({"tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "nothing"}}}]},
         "the tool 'add' are no valid JSON Schema"),
        ({"tools": [{"type": "function", "function": {"name": "add", "parameters": {"$ref": "http://127.0.0.1:9/"}}}]},
         "the tool 'add' refer to another schema, which is not fetched"),
        ({"tools": [{"name": "add"}]}, "A tool is not of OpenAI's format"),
        ({"tools": {"add": 1}}, "'tools' must be a list"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{"}}]}]},
         "'tool_calls' are not of OpenAI's format"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "neither text nor calls"),
    ],
)  # fmt: skip
def test_wrong_lines_are_refused(tmp_path: Path, row: dict[str, object], words: str) -> None:
    with pytest.raises(DataError, match=words):
        tool_prompts_of(logged(tmp_path / "chats.jsonl", **row), Redaction())
