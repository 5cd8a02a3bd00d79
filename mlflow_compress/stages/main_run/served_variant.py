"""What a served variant is: what its evaluation has found out about it."""

from __future__ import annotations

from dataclasses import dataclass

from mlflow_compress.config import ENDPOINT
from mlflow_compress.errors import TrackingError
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.tracker import Tracker


@dataclass(frozen=True, kw_only=True)
class ServedFacts:
    """A model that a server has, as it was when it was evaluated.

    Attributes
    ----------
    name, address : str
        Its name at the server, and the server's address without user and password.
    server, route : str
        Name and version of the server as far as it tells them, and how it was asked.
    root : str or None
        What the server said it had loaded under the name.
    weights : str
        Digest of name, root and server: what stands for the hash of weights that we do not have.
    evaluate_run : str
        The run that has measured it.
    """

    name: str
    address: str
    server: str
    route: str
    root: str | None
    weights: str
    evaluate_run: str

    @classmethod
    def of(cls, tracker: Tracker, evaluate_run: str) -> ServedFacts:
        """Return what an evaluate run holds about the served model that it has measured."""
        found = tracker.fetch_json(evaluate_run, run_names.FACTS)
        if not isinstance(found, dict):
            raise TrackingError("An evaluation does not say what was served", got=evaluate_run)
        checkpoint = str(tracker.client.get_run(evaluate_run).data.tags[run_names.CHECKPOINT])
        return cls(
            name=str(found["served_model"]),
            address=checkpoint.removeprefix(ENDPOINT),
            server=str(found["server"]),
            route=str(found["route"]),
            root=None if found["root"] is None else str(found["root"]),
            weights=str(found["weights"]),
            evaluate_run=evaluate_run,
        )

    @property
    def text(self) -> str:
        """Who served what where, in a few words."""
        loaded = f" (loaded from {self.root})" if self.root else ""
        return f"{self.name}{loaded} at {self.address}, by {self.server}, over {self.route}"

    def settings(self) -> dict[str, str]:
        """Return what a run and a model show of it as parameters."""
        return {
            "served_model": self.name,
            "endpoint": self.address,
            "server": self.server,
            "route": self.route,
            "served_root": self.root or "not told",
        }
