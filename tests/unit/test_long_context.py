"""Long contexts: lengths, needles, chains and copies as they are built, the growth of the KL, and what is said of it."""

import copy
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from mlflow_compress import demo
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.config import read_policy
from mlflow_compress.decide.gates import gate_values, published_gate
from mlflow_compress.errors import ConfigError, DataError
from mlflow_compress.items.contamination import check_contamination
from mlflow_compress.items.named.long_texts import BEGUN, COPIED, NEEDLES, Length
from mlflow_compress.items.suite import check_tasks_named, is_task_file, load_suite, task_parts
from mlflow_compress.items.task import TaskSettings
from mlflow_compress.metrics import MetricInputs, headline
from mlflow_compress.metrics.core.metric_inputs import MetricSettings
from mlflow_compress.metrics.core.metric_registry import METRICS
from mlflow_compress.metrics.long_context import LONG_KL, SLOPE, slope_parts, tokens_before
from mlflow_compress.paths import absolute_paths
from mlflow_compress.records import Items, MetricResult, OptionDistances, RunRecords, Traces
from mlflow_compress.reporting.plots.distances import draw_depths
from mlflow_compress.reporting.verdict import verdict
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from mlflow_compress.scoring.plan.encoding import Encoder
from mlflow_compress.scoring.scoring_pass import ScoringPass
from tests.roundoff import of_sum
from tests.unit.scoring_models import load_random, request

DEMO = TaskSettings(model="demo", limit=3)
TOKENIZER = AutoTokenizer.from_pretrained(demo.MODEL_DIR)


@pytest.fixture(scope="module")
def suite():
    return load_suite("long:256,512,1k", model="demo", settings=DEMO)


def test_what_follows_the_name_may_have_commas(tmp_path):
    assert task_parts("long:256,1k,piqa,long") == ["long:256,1k", "piqa", "long"]
    assert task_parts("long:4k?documents=a.txt,b.txt") == ["long:4k?documents=a.txt", "b.txt"]
    assert not is_task_file("long:4k?documents=a.txt")
    assert Length.read("16k") == Length(16_384) and Length.read("512").name == "512" and Length(2048).name == "2k"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("long:4k", r"201 to 1,024 tokens \(1k\)\. Got: \[4096\]"),
        ("long:100", "too short for needles"),
        ("long:4q", "no length of a context.*'4q'"),
        ("long:256,0x", "no length of a context"),
        ("long:512,512", "named twice"),
        ("long:512?text=a.txt", "one option"),
        ("long:512?documents=", "one option"),
        ("long:512?documents=nowhere.txt", "Cannot read the file"),
        ("long@3", "no few-shot examples"),
    ],
)
def test_refused_before_a_model_is_loaded(spec, said):
    with pytest.raises((ConfigError, DataError), match=said):
        check_tasks_named(spec, model="demo")
        load_suite(spec, model="demo", settings=DEMO)


def test_defaults_fit_the_model_and_a_served_baseline_has_no_tokenizer_of_its_own():
    with pytest.raises(ConfigError, match="baseline's own tokens"):
        load_suite("long:512", model="x", settings=TaskSettings(model="endpoint:http://127.0.0.1:1/v1"))
    assert [t.name for t in load_suite("long", model="demo", settings=DEMO).tasks] == [
        "long_256",
        "long_512",
        "long_1k",
    ]


def test_lengths_are_filled_and_kept_to_and_needles_have_five_depths(suite):
    assert [task.name for task in suite.tasks] == ["long_256", "long_512", "long_1k"]
    for task, length in zip(suite.tasks, (256, 512, 1024), strict=True):
        counts = {r.item_id: len(TOKENIZER(r.context + r.continuation)["input_ids"]) for r in task.requests}
        assert max(counts.values()) <= length
        needles = [n for item, n in counts.items() if "needle" in item]
        assert min(needles) > length - 70  # a sentence, and room for a copy
    depths = sorted({c for c in suite.tasks[2].items.column("category") if c.startswith("needle")})
    assert depths == [f"needle at {d} %" for d in (10, 30, 50, 70, 90)] and NEEDLES == 5


def test_needles_chains_and_copies_have_their_answers_in_the_text(suite):
    for task in suite.tasks:
        asked = {r.item_id: r for r in task.requests if r.option == 0}
        for item in task.items.table.to_pylist():
            context, question = asked[item["item_id"]].context, item["question"]
            text = context.removesuffix(f"\n\n{question}") if question else context
            if item["category"] == "chain":
                name = question.removesuffix(" =")
                hops = 0
                while name not in "ABCD":
                    [name] = re.findall(rf"(?m)^{name} = (\w+)$", text)
                    hops += 1
                assert hops == 4 and name == item["options"][item["gold"]]
            elif item["family"] == "long_needle":
                [line] = re.finditer(rf"(?m)^{question} (\w)$", text)
                assert line[1] == item["options"][item["gold"]]
                depth = len(TOKENIZER(text[: line.start()])["input_ids"]) / len(TOKENIZER(text)["input_ids"])
                assert 100 * depth == pytest.approx(
                    float(item["category"].split()[2]), abs=20 if task.name == "long_256" else 10
                )
            elif item["family"] == "long_copy":
                assert text.count(question) == 1 and question + asked[item["item_id"]].continuation in text
                assert (len(question.split()), len(item["options"][0].split())) == (BEGUN, COPIED)
            else:
                assert tokens_before(item["item_id"]) == len(TOKENIZER(context)["input_ids"])
        whole = {r.context.rpartition("\n\n")[0] for r in task.requests if "needle" in r.item_id}
        assert len(whole) == 3  # all questions of a text have one context
        texts = [r for r in task.requests if "text@" in r.item_id]
        for r in texts:
            assert any(one.startswith(r.context + r.continuation) for one in whole)


def test_items_are_drawn_by_the_seed_alone(suite):
    again, other = (load_suite("long:512", model="demo", settings=replace(DEMO, seed=s)) for s in (42, 7))
    assert again.hashes["long_512"] == suite.hashes["long_512"] != other.hashes["long_512"]


def test_own_documents_are_read_in_their_order_without_overlap(tmp_path):
    file = tmp_path / "own.txt"
    sentences = [f"Item number {n} is on the list." for n in range(200)]
    file.write_text(" ".join(sentences), encoding="utf-8")
    [task] = load_suite(f"long:512?documents={file}", model="demo", settings=replace(DEMO, limit=0)).tasks
    texts = {r.item_id.split()[0]: r.context for r in task.requests if "needle0" in r.item_id}
    found = [[int(n) for n in re.findall(r"number (\d+)", text)] for text in texts.values()]
    total = len(TOKENIZER(file.read_text(encoding="utf-8"))["input_ids"])
    assert 2 <= len(found) == total // 512 < 20
    for numbers in found:
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    every = [n for numbers in found for n in numbers]
    assert len(set(every)) == len(every)
    with pytest.raises(DataError, match=r"shorter than the context.*1,024 tokens or more"):
        file.write_text("Short. " * 20, encoding="utf-8")
        load_suite(f"long:1k?documents={file}", model="demo", settings=DEMO)


def test_a_file_of_documents_becomes_absolute_and_must_be_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.txt").write_text("A text.", encoding="utf-8")
    asked = EvaluateConfig().with_values(tasks="long:256,512?documents=own.txt,demo")
    file = (tmp_path / "own.txt").resolve()
    assert absolute_paths(asked).values()["tasks"] == f"long:256,512?documents={file},demo"
    with pytest.raises(ConfigError, match=r"names no file.*nowhere\.txt"):
        absolute_paths(EvaluateConfig().with_values(tasks="long:256?documents=nowhere.txt"))


def inputs_of(kl, *, noise=None, texts=24, lengths=("long_512", "long_1k")):
    """KL by text and place: `kl(task, text, tokens)` at 8 places of each text."""
    rows = []
    for task in lengths:
        length = 512 if task == "long_512" else 1024
        for text in range(texts):
            for place in range(8):
                before = int((place + 0.5) / 8 * length)
                rows.append((task, text, before, f"text {12.5 * place:.0f}-{12.5 * (place + 1):.0f} %"))
    items = Items.from_rows(
        [
            {
                "task": task, "item_id": f"{text} text@{before}", "family": "long_text", "rule": "loglik",
                "category": category, "group_id": str(text), "question": "", "prompt": "x", "options": ["y"],
                "gold": None, "answers": None,
            }
            for task, text, before, category in rows
        ]
    )  # fmt: skip

    def distances(function):
        names = [n for n in OptionDistances.SCHEMA.names if n not in ("task", "item_id", "permutation", "option", "kl")]
        return OptionDistances.from_rows(
            [
                {"task": task, "item_id": f"{text} text@{before}", "permutation": 0, "option": 0,
                 "kl": function(task, text, before), **dict.fromkeys(names, 0.0)}
                for task, text, before, _ in rows
            ]
        )  # fmt: skip

    return MetricInputs(
        RunRecords(items=items),
        RunRecords(items=items, option_distances=distances(kl)),
        noise=None if noise is None else RunRecords(items=items, option_distances=distances(noise)),
        settings=MetricSettings(resamples=400),
    )


def results_of(inputs):
    return METRICS.get("long_context").compute(inputs)


def test_equal_models_have_no_growth_and_the_growth_by_hand():
    pooled = headline(results_of(inputs_of(lambda *_: 0.0)))
    assert pooled[LONG_KL.name].value == 0.0 and pooled[SLOPE.name].value == 0.0
    # One text has KL 1 and 3 at 0 and 1,000 tokens: 2 a thousand. Another, harder one 10, 10 and 11 at 0, 1,000, 2,000:
    # x - x̄ = -1, 0, 1; y - ȳ = -1/3, -1/3, 2/3: sum of products 1, of squares 2. Together (1 + 1)/(0.5 + 2) = 0.8.
    above, below = slope_parts(
        np.array([1.0, 3.0, 10.0, 10.0, 11.0, 5.0]),
        np.array([0.0, 1000.0, 0.0, 1000.0, 2000.0, 700.0]),
        np.array([4, 4, 9, 9, 9, 11]),
    )
    assert above.tolist() == pytest.approx([1.0, 1.0]) and below.tolist() == pytest.approx([0.5, 2.0])


def test_the_growth_is_that_of_least_squares_with_a_mean_per_text():
    random = np.random.default_rng(0)
    noisy = {key: float(value) for key, value in zip(
        ((task, text, before) for task, n in (("long_512", 512), ("long_1k", 1024)) for text in range(24)
         for before in [int((place + 0.5) / 8 * n) for place in range(8)]),
        random.gamma(2.0, 0.01, size=2 * 24 * 8), strict=True,
    )}  # fmt: skip
    inputs = inputs_of(lambda *key: noisy[key] + 0.3 * (key[1] % 5) + 0.004 * key[2] / 1000)
    found = {(r.name, r.task, r.category): r for r in results_of(inputs)}
    kl, group = inputs.distance("kl"), inputs.view.group
    x = np.array([tokens_before(item) / 1000 for item in inputs.view.item_id])
    design = np.column_stack([x, np.eye(group.max() + 1)[group]])
    assert found[SLOPE.name, None, None].value == pytest.approx(
        np.linalg.lstsq(design, kl, rcond=None)[0][0], abs=of_sum(2 * len(kl))
    )
    pooled = found[LONG_KL.name, None, None]
    assert pooled.value == pytest.approx(kl.mean()) and pooled.n == 384
    assert found[SLOPE.name, None, None].n == 48
    [depth] = {r for key, r in found.items() if key == (LONG_KL.name, "long_1k", "text 0-12 %")}
    assert depth.n == 24 and depth.low is not None
    assert (SLOPE.name, "long_1k", None) in found and (SLOPE.name, "long_1k", "text 0-12 %") not in found


def test_few_texts_have_no_interval_and_missing_values_are_counted():
    few = headline(results_of(inputs_of(lambda *_: 0.1, texts=5, lengths=("long_512",))))
    assert few[SLOPE.name].low is None and few[LONG_KL.name].low is None
    some = headline(results_of(inputs_of(lambda task, text, before: None if text == 3 else 0.1)))
    assert some[LONG_KL.name].n_unscored == 16 and some[SLOPE.name].n == 46


def test_false_alarms_of_a_growth_are_rare():
    """Skewed KL without growth: the lower end is above 0 in about 2.5 % of the draws."""
    random = np.random.default_rng(5)
    alarms = 0
    x = np.tile((np.arange(8) + 0.5) / 8 * 1.024, 40)
    text = np.repeat(np.arange(40), 8)
    settings = MetricSettings(resamples=400)
    for _ in range(300):
        kl = random.lognormal(-4.0, 1.2, size=320) + np.repeat(random.lognormal(-4.0, 1.0, size=40), 8)
        interval = settings.skewed_interval(*slope_parts(kl, 1000 * x, text))
        alarms += interval[0] > 0
    assert alarms <= 15  # of 300: 5 %


def results(slope, floor=None):
    found = {SLOPE.name: slope}
    return found if floor is None else {**found, str(SLOPE.floor): floor}


def growth(value, low, high, name=SLOPE.name):
    return MetricResult(name=name, value=value, low=low, high=high, n=40)


def test_the_verdict_speaks_of_a_sure_growth_alone():
    said = "grows by 0.030 [0.010, 0.050] per 1,000 tokens of a long context"
    text = verdict("x", results(growth(0.03, 0.01, 0.05)), size_ratio=0.5)
    assert said in text.replace("0.03 [0.01, 0.05]", "0.030 [0.010, 0.050]")
    floor = growth(0.001, -0.001, 0.002, str(SLOPE.floor))
    assert "grows" in verdict("x", results(growth(0.03, 0.01, 0.05), floor), size_ratio=0.5)
    loud = growth(0.02, 0.0, 0.04, str(SLOPE.floor))
    assert "grows" not in verdict("x", results(growth(0.03, 0.01, 0.05), loud), size_ratio=0.5)
    assert "grows" not in verdict("x", results(growth(0.03, -0.01, 0.05)), size_ratio=0.5)
    assert "grows" not in verdict("x", results(growth(0.03, None, None)), size_ratio=0.5)


def test_the_growth_is_gated(tmp_path):
    values = gate_values({SLOPE.name: growth(0.03, 0.01, 0.05)})
    assert values == {"gate/long_kl_slope_upper": 0.05}
    metrics = {**values, SLOPE.name: 0.03}
    [passed], [failed] = (published_gate(SLOPE.name, bound).checks(metrics) for bound in (0.06, 0.04))
    assert passed.passed and not failed.passed and "growth of the KL per 1,000 tokens" in failed.reason
    [missing] = published_gate(SLOPE.name, 0.1).checks({})
    assert not missing.passed
    file = tmp_path / "policy.yaml"
    file.write_text("gates:\n  - {metric: distance/long_kl_slope, at_most: 0.05}\n", encoding="utf-8")
    assert read_policy(str(file)).gates[0].metric == SLOPE.name


def test_the_figure_has_a_line_per_length_in_the_order_of_lengths():
    found = results_of(inputs_of(lambda task, text, before: 0.11 + (0.1 + 0.002 * (text % 3 - 1)) * before / 1000))
    parts = [r for r in found if r.name == LONG_KL.name and r.category is not None]
    pooled = headline(found)
    drawing = draw_depths(pooled[LONG_KL.name], pooled[SLOPE.name], parts)
    [axes] = drawing.canvas.axes
    lines = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    assert [line.get_label() for line in lines] == ["512", "1k"]
    assert lines[0].get_xdata().tolist() == sorted(lines[0].get_xdata()) and len(lines[0].get_xdata()) == 8
    assert drawing.title == "KL in long contexts: 0.15 nats, +0.1 per 1,000 tokens of context"


def test_logits_are_never_of_the_whole_context_and_the_kl_is_the_plain_one(monkeypatch):
    """One product with the head has at most `head_rows` rows, whatever the length; KL as of float64's complete logits."""
    base = load_random("llama")
    other = replace(base, model=copy.deepcopy(base.model))
    with torch.no_grad():
        for weight in other.model.parameters():
            weight.mul_(1.0 + 1e-2 * torch.randn_like(weight))
    most = []
    reduce = ScoringPass._reduce

    def watched(self, plan, group, states, *rest):
        logits = self.runner.head.logits
        monkeypatch.setattr(
            self.runner.head, "logits", lambda rows: most.append(len(rows)) or logits(rows), raising=False
        )
        return reduce(self, plan, group, states, *rest)

    monkeypatch.setattr(ScoringPass, "_reduce", watched)
    text = "The river runs past the old mill and nobody knows how many sheep there are on the hill. " * 2
    for n in (40, 160):
        asked = [request(n, text[:2], text[2:n])]
        scorer = Scorer(other, ScoringConfig(progress=False, head_rows=16))
        _, distances = scorer.score(asked, baseline=base)
        [encoded] = Encoder(base.tokenizer, base.max_length).encode(asked)
        inputs = torch.from_numpy(encoded.inputs.astype(np.int64))[None]
        with torch.no_grad():
            p, q = (torch.log_softmax(copy.deepcopy(m.model).double()(inputs).logits[0], -1) for m in (base, other))
        plain = (p.exp() * (p - q)).sum(-1)[-len(encoded.targets) :].mean()
        assert distances.column("kl")[0] == pytest.approx(float(plain), abs=1e-7)
        # The same tokens as a chain of thought: every one has its KL.
        tokens = encoded.targets.tolist()
        prompt = inputs[0, : inputs.shape[1] - len(tokens) + 1].tolist()
        chain = {"task": "t", "item_id": "0", "sample": 0, "prompt_tokens": prompt, "tokens": tokens, "text": ""}
        _, moved = scorer.score_corpus("t", Traces.from_rows([chain]), baseline=base)
        assert moved.column("kl").mean() == pytest.approx(float(plain), abs=1e-7) and len(moved) == len(tokens)
        assert float(plain) > 1e-4
    assert max(most) == 16 and len(most) > 4


@pytest.mark.parametrize("model", ["demo", "demo-tools"])
def test_the_embedded_calibration_text_holds_no_item(model: str) -> None:
    suite = load_suite("long", model=model, settings=TaskSettings(model=model))
    check_contamination((demo.DATA_DIR / "calibration.txt").read_text().split("\n\n"), suite.tasks, suite.corpora)
