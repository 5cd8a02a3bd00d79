"""Commands that run: noted on disk until they end, so that a killed one can be done again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mlflow_compress.commands.command import all_commands
from mlflow_compress.config import Parameters, as_text
from mlflow_compress.tracking.store import Store
from mlflow_compress.tracking.tracker import Tracker, tracking_uri
from mlflow_compress.tracking.unfinished_commands import noted
from mlflow_compress.transport.addresses import VARIABLES
from mlflow_compress.transport.endpoint import shown_url


@contextmanager
def store_of_command(config: Parameters, given: Store | None) -> Iterator[Store]:
    """Give a command its store: the given one; or MLflow's, with a note on disk until the command ends by itself.

    A stage asks for it after it has checked its parameters, so that a refused command leaves nothing.
    """
    if given is not None:
        yield given
        return
    with unfinished_until_ended(config):
        yield Tracker(config.experiment)


@contextmanager
def unfinished_until_ended(config: Parameters) -> Iterator[None]:
    """Keep a note of a command on disk, until it ends by itself, so that `resume` can do it again."""
    [command] = [known for known in all_commands().values() if known.parameters is type(config)]
    if not command.resumable:
        yield
        return
    values = as_text(config)
    for address in VARIABLES.keys() & values.keys():  # may hold a password
        values[address] = shown_url(values[address])
    with noted(tracking_uri(), command.name, values) as killed:
        yield
    if killed:
        Tracker(config.experiment).drop_killed(killed)
