"""Commands that run: noted on disk until they end, so that a killed one can be done again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mlflow_compress.commands.diagnose.parameters import DiagnoseConfig
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.commands.main.parameters import MainConfig
from mlflow_compress.commands.promote.parameters import PromoteConfig
from mlflow_compress.commands.quantize.parameters import QuantizeConfig
from mlflow_compress.commands.search.parameters import SearchConfig
from mlflow_compress.commands.speed.parameters import SpeedConfig
from mlflow_compress.commands.sweep.parameters import SweepConfig
from mlflow_compress.config import Command, as_text
from mlflow_compress.tracking.store import Store
from mlflow_compress.tracking.tracker import Tracker, tracking_uri
from mlflow_compress.tracking.unfinished_commands import noted
from mlflow_compress.transport.addresses import VARIABLES
from mlflow_compress.transport.endpoint import shown_url

CONFIGS: dict[str, type[Command]] = {
    "quantize": QuantizeConfig,
    "evaluate": EvaluateConfig,
    "judge": JudgeConfig,
    "speed": SpeedConfig,
    "main": MainConfig,
    "sweep": SweepConfig,
    "search": SearchConfig,
    "diagnose": DiagnoseConfig,
    "promote": PromoteConfig,
}
"""The commands that `resume` can do again, by their verbs."""


@contextmanager
def store_of_command(config: Command, given: Store | None) -> Iterator[Store]:
    """Give a command its store: the given one; or MLflow's, with a note on disk until the command ends by itself.

    A stage asks for it after it has checked its parameters, so that a refused command leaves nothing.
    """
    if given is not None:
        yield given
        return
    with unfinished_until_ended(config):
        yield Tracker(config.experiment)


@contextmanager
def unfinished_until_ended(config: Command) -> Iterator[None]:
    """Keep a note of a command on disk, until it ends by itself, so that `resume` can do it again."""
    verb = next(verb for verb, cls in CONFIGS.items() if cls is type(config))
    values = as_text(config)
    for address in VARIABLES.keys() & values.keys():  # may hold a password
        values[address] = shown_url(values[address])
    with noted(tracking_uri(), verb, values):
        yield
