"""The benchmarks of "Accuracy is Not All You Need", with the paper's few-shot numbers and rules, from the harness."""

from functools import partial

from mlflow_compress.items.harness_build import build
from mlflow_compress.items.harness_tasks import definition
from mlflow_compress.items.named_tasks import TASKS, NamedTask

_ACC = "argmax of the log-likelihood"
_ACC_NORM = "argmax of the log-likelihood per character (acc_norm)"
_LAST_WORD = "every token of the last word is greedy"


def _register(name: str, folder: str, source: str, licence: str, items: str, shots: int, rule: str) -> None:
    """Register a task of the harness. `folder` is its folder in the collection, so that the others are not read."""
    TASKS.register(name)(
        NamedTask(
            source=source,
            licence=licence,
            items=items,
            shots=str(shots),
            rule=rule,
            definition=partial(definition, name, (folder,)),
            build=lambda settings, given: build(name, shots=given, settings=settings, folders=(folder,)),
            requires=("lm_eval",),
            extra="harness",
        )
    )


for _row in (
    ("mmlu", "mmlu/default", "cais/mmlu", "MIT", "14,042 test, 57 subjects", 0, _ACC),
    ("piqa", "piqa", "baber/piqa", "not stated", "1,838 validation", 0, _ACC_NORM),
    ("hellaswag", "hellaswag", "Rowan/hellaswag", "MIT", "10,042 validation", 0, _ACC_NORM),
    ("arc_easy", "arc", "allenai/ai2_arc", "CC BY-SA 4.0", "2,376 test", 0, _ACC_NORM),
    ("arc_challenge", "arc", "allenai/ai2_arc", "CC BY-SA 4.0", "1,172 test", 0, _ACC_NORM),
    ("lambada_openai", "lambada", "EleutherAI/lambada_openai", "modified MIT", "5,153 test", 0, _LAST_WORD),
    ("winogrande", "winogrande", "allenai/winogrande", "CC BY", "1,267 validation", 0, _ACC),
    ("gsm8k", "gsm8k", "openai/gsm8k", "MIT", "1,319 test", 5, "exact match of the number after '####'"),
    ("triviaqa", "triviaqa", "mandarjoshi/trivia_qa", "unknown", "17,944 validation", 0, "exact match of any alias"),
):
    _register(*_row)

TASKS.register("paper")(
    NamedTask(
        source="the nine tasks above",
        licence="see the tasks",
        items="all items of the tasks",
        shots="MMLU and TriviaQA 5, GSM8K 8, else 0",
        rule="as for each task",
        members=(
            "mmlu@5",
            "piqa",
            "hellaswag",
            "arc_easy",
            "arc_challenge",
            "lambada_openai",
            "winogrande",
            "gsm8k@8",
            "triviaqa@5",
        ),
    )
)


TASKS.register("behaviour")(
    NamedTask(
        source="embedded",
        licence="Apache-2.0",
        items="calls of tools, the baseline's own answers, long contexts; the judge stage adds health and refusals",
        shots="",
        rule="those of the members",
        members=("tools", "traces", "long"),
    )
)
