"""A worker of the cluster that also makes variants of a sweep, each from compression to its main run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from mlflow_compress.compression.reload_helper import reload_helper
from mlflow_compress.errors import ConfigError
from mlflow_compress.home import VARIABLE as HOME
from mlflow_compress.home import home
from mlflow_compress.judges.session import KEY_VARIABLE
from mlflow_compress.kept import keeping
from mlflow_compress.scoring.cluster.cluster_worker import ClusterWorker
from mlflow_compress.scoring.engine_identity import package_hash
from mlflow_compress.stages.sweep.make_variant import MadeVariant, make_variant
from mlflow_compress.stages.sweep.prepare import PreparedVariant
from mlflow_compress.tracking.shared_store.live_processes import is_alive, own_name
from mlflow_compress.tracking.tracker import Tracker
from mlflow_compress.transport.addresses import VARIABLES
from mlflow_compress.transport.endpoint import shown_url

_FOR_THIS_PROCESS = ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME")  # of a command that `mlflow run` has started
_QUIET = {
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
}


@dataclass(frozen=True, kw_only=True)
class SweepPlace:
    """Where a sweep keeps its runs, and by what a worker knows that it is at the same place.

    Attributes
    ----------
    parent, experiment_id : str
        The sweep's run, and its experiment.
    uri, home : str
        The store, and the folder of state (see `home`).
    process : str
        The name of the sweep's process in that folder.
    judge : mapping
        How judge models are reached, without secrets: see `judge_access`. None where no answers are judged.
    """

    parent: str
    experiment_id: str
    uri: str
    home: str
    process: str
    judge: Mapping[str, str] | None

    @classmethod
    def of(cls, tracker: Tracker, parent: str, *, judge: bool) -> SweepPlace:
        """Return the place of a sweep that runs in this process."""
        return cls(
            parent=parent,
            experiment_id=tracker.experiment_id,
            uri=tracker.uri,
            home=str(home(tracker.uri)),
            process=own_name(tracker.uri),
            judge=judge_access() if judge else None,
        )


def judge_access() -> dict[str, str]:
    """Return how this process reaches judge models: whether it has a key, and addresses without passwords."""
    addresses = {variable: shown_url(os.environ.get(variable, "").strip()) for variable in VARIABLES.values()}
    return {KEY_VARIABLE: "set" if os.environ.get(KEY_VARIABLE, "").strip() else "not set", **addresses}


class VariantWorker(ClusterWorker):
    """Scores shards of the baseline, and afterwards makes whole variants.

    What variants share is read once, and stays in this process: the baseline's records, encoded tokens, encoders.
    """

    def __init__(self, device: str, n_threads: int) -> None:
        super().__init__(device, n_threads)
        self._while_alive = ExitStack()
        self._begun = False

    @staticmethod
    def code() -> dict[str, str]:
        """Return what must be as in the sweep's process: all our code, not that of scoring alone."""
        return {**ClusterWorker.code(), "package": package_hash()}

    def make_variant(
        self, variant: PreparedVariant, place: SweepPlace, number: int, keeper: Any, wait: bool
    ) -> MadeVariant | None:
        """Make a variant with the models in this process (see `make_variant.make_variant`).

        Parameters
        ----------
        number : int
            Under which `keeper` is told how far it is (see `SaidLines`).

        Raises
        ------
        ConfigError
            This process does not see what the sweep's process sees: the folder of state, or the judge models.
        """
        self.release()
        if not self._begun:
            os.environ.update({**_QUIET, "MLFLOW_TRACKING_URI": place.uri, HOME: place.home})
            for name in _FOR_THIS_PROCESS:
                os.environ.pop(name, None)
            _check(place)
            self._while_alive.enter_context(keeping())
            self._while_alive.enter_context(reload_helper())
            self._begun = True
        tracker = Tracker(variant.asked.config.experiment)
        tracker.experiment_id = place.experiment_id

        def say(line: str) -> None:
            keeper.say.remote(number, line)

        return make_variant(tracker, variant, place.parent, say, wait=wait)


def _check(place: SweepPlace) -> None:
    if not is_alive(place.uri, place.process):
        raise ConfigError(
            "The folder for unfinished work and locks is not the same on the machine of a worker",
            got=place.home,
            fix=f"Set {HOME} to a folder on a disk that all machines share",
        )
    here = judge_access()
    if place.judge is not None and (differ := [name for name, value in place.judge.items() if here[name] != value]):
        raise ConfigError(
            f"The environment variable {differ[0]} is not the same on the machine of a worker",
            allowed=place.judge[differ[0]] or "not set",
            got=here[differ[0]] or "not set",
            fix="Start Ray on every machine with the variables for the judge",
        )
