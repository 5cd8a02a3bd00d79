"""Traces: the baseline's own sampled answers, scored as a corpus."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from mlflow_compress.records import Traces

TRACES = "traces"


@dataclass(frozen=True, kw_only=True)
class TraceCorpus:
    """Text that the baseline itself has written."""

    name: str = TRACES
    # The answers; None as long as the baseline has not written them
    answers: Traces | None = field(default=None, repr=False)

    def content_hash(self) -> str:
        """Return a SHA-256 over the tokens of prompts and answers. Before they are written no evaluation has it."""
        digest = hashlib.sha256(b"traces")
        for row in [] if self.answers is None else self.answers.table.to_pylist():
            digest.update(repr((row["item_id"], row["sample"], row["prompt_tokens"], row["tokens"])).encode())
        return digest.hexdigest()
