"""Your own model, task, metric and judge, from one script. Each part between `# %%` marks is a notebook cell.

Run it with `python examples/your_own.py`. It needs no network and writes everything into the folder `results`.
"""

# %% Your own model: any causal language model that transformers loads. Here a small one with random weights.
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import mlflow_compress as mc
from mlflow_compress import demo

STORE = Path("results")
model_folder = STORE / "my-llama"

torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(demo.MODEL_DIR)
shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(model_folder)
tokenizer.save_pretrained(model_folder)

variant = mc.compress(model_folder, "rtn", bits=4, group_size=32, store=STORE)
print(variant.summary)

# %% Your own task: a JSONL file. Its fields decide what kind of task it is.
questions = STORE / "capitals.jsonl"
CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Norway": "Oslo", "Japan": "Tokyo", "Peru": "Lima"}
with questions.open("w") as file:
    for number, country in enumerate(CAPITALS):
        choices = [CAPITALS[country], *(city for city in CAPITALS.values() if city != CAPITALS[country])][:4]
        row = {
            "id": f"q{number}",
            "category": "capitals",
            "context": f"The capital of {country} is",
            "choices": choices,
            "answer": 0,
        }
        file.write(f"{row}\n".replace("'", '"'))

# %% Your own metric: a formula under a decorator. It is computed for every evaluation after this cell.
from mlflow_compress.metrics import Mean, MetricInputs, MetricKey, by_subset, metric  # noqa: E402
from mlflow_compress.metrics.core.requirements import ITEMS, PREDICTIONS, VARIANT, rated_by  # noqa: E402

CONFIDENCE = MetricKey(
    name="quality/confidence_change",
    direction="neither",
    low=-1.0,
    high=1.0,
    unit="share",
    meaning="Mean change of the margin between the first and the second answer.",
    label="Change of confidence",
)


@metric("confidence_change", keys=(CONFIDENCE,), requires=(ITEMS, VARIANT, PREDICTIONS), source="examples/your_own.py")
def confidence_change(inputs: MetricInputs):
    """``mean(margin of the variant - margin of the baseline)``; bootstrap over items."""
    change = inputs.variant_predictions.margin[:, 0] - inputs.baseline_predictions.margin[:, 0]
    return by_subset(inputs, lambda rows: {CONFIDENCE: Mean(change[rows])}, scored=inputs.scored_by_both)


found = mc.evaluate(variant, model=model_folder, tasks=questions, store=STORE)
print(found.verdict)
print(found.to_pandas()[["name", "value", "low", "high", "n"]])
print("change of confidence:", found["quality/confidence_change"].value)

# %% Your own judge: it rates answers, and a metric turns ratings into numbers.
from mlflow_compress.judges import JUDGES, Judge, Judged  # noqa: E402
from mlflow_compress.records import Judgments  # noqa: E402


def rates(text: str) -> float:
    """Return 10 points for an answer that repeats no word, and fewer for one that does."""
    words = text.split()
    return 1 + 9 * len(set(words)) / max(len(words), 1)


def open_judge(settings, folder):
    """Return the function that judges; this judge needs neither a key nor a model."""

    def judge(inputs):
        judgments = {}
        for model, answers in inputs.graded.items():
            same = {"task": "variety", "repeat": 0, "category": None, "judgment": "", "judge": "variety"}
            rows = [
                {**same, "item_id": row["item_id"], "turn": row["turn"], "score": rates(row["text"])}
                for row in answers.where(sample=0).table.to_pylist()
            ]
            judgments[model] = Judgments.from_rows(rows)
        return Judged(judgments=judgments)

    return judge


JUDGES.register("variety")(Judge(open=open_judge, requires="Nothing.", source="examples/your_own.py"))
VARIETY = MetricKey(
    name="judge/variety",
    direction="higher",
    low=1.0,
    high=10.0,
    unit="points",
    meaning="Mean points for answers that do not repeat themselves.",
    label="Variety",
    counted="answers",
)


@metric("variety", keys=(VARIETY,), requires=(VARIANT, rated_by("variety")), source="examples/your_own.py")
def variety(inputs: MetricInputs):
    """Mean points of the variant's answers; bootstrap over answers."""
    from mlflow_compress.metrics import pooled

    points = np.asarray(inputs.variant.judgments.where(task="variety").column("score"), dtype=np.float64)
    return pooled(inputs, {VARIETY: Mean(points)})


answers = mc.judge(
    variant,
    model=model_folder,
    judges="similarity,variety",
    instructions="demo",
    answer_args={"instruction_limit": 1, "num_samples": 2, "max_new_tokens": 8, "judge_max_tokens": 8},
    store=STORE,
)
print(answers.as_text())
