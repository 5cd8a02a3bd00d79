"""Asks a server every question once: many at a time, with retries, and every answer is on disk before it counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlflow_compress.errors import EndpointError
from mlflow_compress.scoring.endpoint.questions import Position, TokenQuestion
from mlflow_compress.scoring.endpoint.routes import Route
from mlflow_compress.transport.client import Transport
from mlflow_compress.transport.endpoint import EndpointConfig
from mlflow_compress.transport.replies import NoReply
from mlflow_compress.transport.reply_cache import ReplyCache, content_key

ANSWERS = "served_answers.jsonl"
_BYTES_PER_ID = 4  # what paces requests by tokens counts bytes


@dataclass(frozen=True)
class ServedAnswers:
    """Answers of one served model.

    Parameters
    ----------
    endpoint : EndpointConfig
    model : str
        Name of the model there.
    route : Route
        How it is asked.
    identity : str
        Digest of what is known of the model; the cache's keys begin with it.
    folder : Path or None
        Where the answers are kept until the records are written; None: in memory alone.
    """

    endpoint: EndpointConfig
    model: str
    route: Route
    identity: str
    folder: Path | None = None

    def ask(
        self, questions: Sequence[TokenQuestion], *, label: str, repeat: int = 0, progress: bool = True
    ) -> list[list[Position] | None]:
        """Return the answer to each question, in order; None where no text of the server's terms asks it.

        Equal questions are asked once. Questions with a common beginning follow each other.

        Parameters
        ----------
        questions : sequence of TokenQuestion
        label : str
            Names the progress bar.
        repeat : int
            0 for the first time, 1 to ask the same again.
        progress : bool
            Show a progress bar on a terminal.

        Raises
        ------
        EndpointError
            A request failed for good. What others have returned is kept.
        AlignmentError
            The server reads other tokens than ours.
        """
        from tqdm import tqdm

        cache = ReplyCache(self.folder / ANSWERS if self.folder is not None else None)
        keys = [content_key(model=self.identity, repeat=repeat, **question.content) for question in questions]
        by_key = dict(zip(keys, questions, strict=True))
        requests = {key: self.route.request(question) for key, question in by_key.items() if cache.get(key) is None}
        to_ask = sorted((key for key, request in requests.items() if request), key=lambda key: by_key[key].order)
        if to_ask:
            n_known = len(by_key) - len(requests)
            with (
                Transport(self.endpoint) as transport,
                tqdm(
                    initial=n_known,
                    total=n_known + len(to_ask),
                    desc=label,
                    unit="request",
                    disable=None if progress else True,
                    leave=False,
                ) as bar,
            ):

                async def one(key: str) -> NoReply | None:
                    path, body = requests[key] or ("", {})
                    found = await transport.post(
                        path,
                        body,
                        lambda text: self.route.read(text, by_key[key]),
                        model=self.model,
                        n_bytes=_BYTES_PER_ID * len(by_key[key].tokens),
                    )
                    if isinstance(found, NoReply):
                        return found
                    cache.put(key, {"positions": [position.to_json() for position in found.found]})
                    bar.update(1)
                    return None

                failed = [found for found in transport.for_all(one, to_ask) if found is not None]
            if failed:
                raise EndpointError(
                    f"{len(failed)} of {len(to_ask)} requests to the served model failed: {failed[0].detail}",
                    fix="What was answered is kept: the same command again asks only for the rest",
                )
        rows = {key: cache.get(key) for key in by_key}
        return [_positions(rows[key]) for key in keys]


def _positions(row: dict[str, list[dict[str, object]]] | None) -> list[Position] | None:
    return None if row is None else [Position.from_json(position) for position in row["positions"]]
