"""The benchmarks of "Accuracy is Not All You Need", with the paper's few-shot numbers and rules, from the harness."""

from functools import partial
from typing import Any

from mlflow_compress.items.harness_build import build
from mlflow_compress.items.harness_tasks import definition
from mlflow_compress.items.named_tasks import TASKS, NamedTask
from mlflow_compress.items.task import Parts, TaskSettings

ACC = "argmax of the log-likelihood"
ACC_NORM = "argmax of the log-likelihood per character (acc_norm)"


def _harness(name: str, *folders: str, shots: int = 0, **described: Any) -> None:
    """Register a task of the harness. `folders` are its folders in the collection, so that the others are not read."""

    def make(settings: TaskSettings, n_shots: int | None) -> Parts:
        return build(name, shots=n_shots, settings=settings, folders=folders)

    TASKS.register(name)(
        NamedTask(
            **described,
            shots=str(shots),
            definition=partial(definition, name, folders),
            build=make,
            requires=("lm_eval",),
            extra="harness",
        )
    )


_harness(
    "mmlu",
    "mmlu/default",
    source="cais/mmlu",
    licence="MIT",
    items="14,042 test, 57 subjects",
    rule=ACC,
)
_harness("piqa", "piqa", source="baber/piqa", licence="not stated", items="1,838 validation", rule=ACC_NORM)
_harness("hellaswag", "hellaswag", source="Rowan/hellaswag", licence="MIT", items="10,042 validation", rule=ACC_NORM)
_harness("arc_easy", "arc", source="allenai/ai2_arc", licence="CC BY-SA 4.0", items="2,376 test", rule=ACC_NORM)
_harness("arc_challenge", "arc", source="allenai/ai2_arc", licence="CC BY-SA 4.0", items="1,172 test", rule=ACC_NORM)
_harness(
    "lambada_openai",
    "lambada",
    source="EleutherAI/lambada_openai",
    licence="modified MIT",
    items="5,153 test",
    rule="every token of the last word is greedy",
)
_harness("winogrande", "winogrande", source="allenai/winogrande", licence="CC BY", items="1,267 validation", rule=ACC)
_harness(
    "gsm8k",
    "gsm8k",
    source="openai/gsm8k",
    licence="MIT",
    items="1,319 test",
    shots=5,
    rule="exact match of the number after '####'",
)
_harness(
    "triviaqa",
    "triviaqa",
    source="mandarjoshi/trivia_qa",
    licence="unknown",
    items="17,944 validation",
    rule="exact match of any alias",
)

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
