"""Behaviour: what users notice before an accuracy shows it."""

from mlflow_compress.items.named_tasks import TASKS, NamedTask

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
