"""Encodes requests: token boundaries, prefix token and truncation as in lm-evaluation-harness 0.4.13."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlflow_compress import files as atomic
from mlflow_compress.errors import DataError
from mlflow_compress.kept import keeps, kept
from mlflow_compress.models.identity import tokenizer_hash
from mlflow_compress.records import ItemKey, Request

_IDS = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}  # nothing else is read
_CHUNK = 4096  # strings per tokenizer call, so that not all encodings of a long task list are in memory at once


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of one request."""

    # The tokens that the model reads: context and continuation without its last token, truncated on the left; shape
    # (n_inputs,)
    inputs: npt.NDArray[np.int32]
    # The continuation's tokens; `inputs[-n_targets + i]` is the position that predicts `targets[i]`; shape (n_targets,)
    targets: npt.NDArray[np.int32]
    truncated: bool  # Whether tokens of the context were cut off
    fits: bool  # False where the continuation alone is longer than the model's context: nothing can be scored then


@dataclass(frozen=True)
class Shortened:
    """Items that the model cannot read whole."""

    cut: frozenset[ItemKey] = frozenset()  # A prompt is longer than the context, and loses its beginning
    too_long: frozenset[ItemKey] = frozenset()  # An option alone is longer than the context: it has no score

    @classmethod
    def of(cls, requests: Sequence[Request], encoded: Sequence[Encoded]) -> "Shortened":
        pairs = [((r.task, r.item_id), e) for r, e in zip(requests, encoded, strict=True)]
        return cls(
            cut=frozenset(key for key, e in pairs if e.truncated),
            too_long=frozenset(key for key, e in pairs if not e.fits),
        )


class Encoder:
    """Encode strings as the harness does, each distinct string once.

    Two deviations from the harness. (1) A tokenizer that appends an EOS shifts the harness's boundary by one token;
    here the appended token is removed. (2) A continuation that is longer than the context stops the harness with a bare
    assertion; here `Encoded.fits` is False.
    """

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        self.prefix_token: int | None = prefix
        self._prefix_text = tokenizer.decode([prefix]) if prefix is not None else None
        bare, special = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
        tail = next((k for k in range(len(special) - len(bare) + 1) if special[k : k + len(bare)] == bare), 0)
        self._appended = len(special) - len(bare) - tail
        self.adds_bos = tail > 0 and special[0] == tokenizer.bos_token_id

    def ids(self, strings: Sequence[str], *, special: bool = True) -> list[npt.NDArray[np.int32]]:
        """Return the token ids of strings.

        `special` adds the special tokens that the tokenizer prepends, unless the string already begins with them.
        """
        prefix = self._prefix_text
        adds = [special and not (prefix and s.startswith(prefix)) for s in strings]
        out: dict[int, npt.NDArray[np.int32]] = {}
        for wanted in (True, False):
            rows = [i for i, add in enumerate(adds) if add is wanted]
            cut = self._appended if wanted else 0
            for start in range(0, len(rows), _CHUNK):
                chunk = rows[start : start + _CHUNK]
                batch = self.tokenizer([strings[i] for i in chunk], add_special_tokens=wanted, **_IDS)["input_ids"]
                out |= {i: np.asarray(ids[: len(ids) - cut], np.int32) for i, ids in zip(chunk, batch, strict=True)}
        return [out[i] for i in range(len(strings))]

    def documents(self, text: str, starts: Sequence[int]) -> npt.NDArray[np.int64] | None:
        """Return the number of the document in which each token of `ids([text])` begins.

        `starts` has the characters at which the documents begin. None where the tokenizer does not tell which
        characters a token stands for.
        """
        if not self.tokenizer.is_fast:
            return None
        prefix = self._prefix_text
        special = not (prefix and text.startswith(prefix))
        encoded = self.tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, **_IDS)
        begins = np.array([begin for begin, _ in encoded["offset_mapping"]], dtype=np.int64)
        return np.maximum(np.searchsorted(np.asarray(starts), begins, side="right") - 1, 0)

    def ids_of(self, strings: Iterable[str], *, special: bool = True) -> dict[str, npt.NDArray[np.int32]]:
        """Return the token ids of each distinct string, as `ids` does."""
        distinct = list(dict.fromkeys(strings))
        return dict(zip(distinct, self.ids(distinct, special=special), strict=True))

    def encode(self, requests: Sequence[Request]) -> list[Encoded]:
        """Tokenize requests, in order.

        ``enc(context + continuation)[len(enc(context)):]`` are the targets; trailing white space of a context moves to
        its continuation; inputs are ``(context + targets)[-(max_length + 1):][:-1]``.
        """
        # Baseline and variants have one tokenizer, and so has a second pass over some of the requests: those after the
        # first find the tokens here.
        encoded = self._known()
        encoded |= self._encode([r for r in requests if (r.context, r.continuation) not in encoded])
        return [encoded[r.context, r.continuation] for r in requests]

    def _known(self) -> dict[tuple[str, str], Encoded]:
        """Return the tokens of the contexts and continuations that were encoded before, to be added to."""
        if not keeps():
            return {}
        return kept(("encoded", tokenizer_hash(self.tokenizer), self.max_length), dict)

    def key(self, requests: Sequence[Request]) -> str:
        """Return a digest of everything that the tokens of requests depend on."""
        texts = "\0".join(f"{r.context}\0{r.continuation}" for r in requests)
        deciding = f"{tokenizer_hash(self.tokenizer)} {self.max_length} {hashlib.sha256(texts.encode()).hexdigest()}"
        return hashlib.sha256(deciding.encode()).hexdigest()

    def write(self, requests: Sequence[Request], file: Path) -> None:
        """Write the tokens of requests into a file, for `remember`."""
        encoded = self.encode(requests)
        arrays: dict[str, Any] = {
            "key": np.array(self.key(requests)),
            "n_inputs": np.array([len(e.inputs) for e in encoded]),
            "n_targets": np.array([len(e.targets) for e in encoded]),
            "inputs": np.concatenate([np.zeros(0, np.int32), *(e.inputs for e in encoded)]),
            "targets": np.concatenate([np.zeros(0, np.int32), *(e.targets for e in encoded)]),
            "truncated": np.array([e.truncated for e in encoded], dtype=bool),
            "fits": np.array([e.fits for e in encoded], dtype=bool),
        }
        with atomic.writing(file) as sink:
            np.savez_compressed(sink, **arrays)

    def remember(self, requests: Sequence[Request], file: Path) -> None:
        """Keep the tokens of requests that a file has; nothing where it has those of other requests."""
        if not (requests and file.is_file() and keeps()):
            return
        with np.load(file, allow_pickle=False) as stored:  # each array is read when it is asked for
            if str(stored["key"]) != self.key(requests):
                return
            known, names = self._known(), ("inputs", "targets")
            tokens = (np.split(stored[name], np.cumsum(stored[f"n_{name}"])[:-1]) for name in names)
            flags = (stored[name].tolist() for name in ("truncated", "fits"))
            for request, *parts in zip(requests, *tokens, *flags, strict=True):
                known[request.context, request.continuation] = Encoded(*parts)

    def _encode(self, requests: Sequence[Request]) -> dict[tuple[str, str], Encoded]:
        pairs = {(r.context, r.continuation): r for r in requests}
        contexts = self.ids_of(context.rstrip() for context, _ in pairs if context)
        wholes = self.ids_of(context + continuation for context, continuation in pairs if context)
        bare = self.ids_of((continuation for context, continuation in pairs if not context), special=False)
        encoded: dict[tuple[str, str], Encoded] = {}
        for (context, continuation), request in pairs.items():
            if context:
                before = contexts[context.rstrip()]
                targets = wholes[context + continuation][len(before) :]
            else:
                before, targets = self._after_prefix(bare[continuation])
            encoded[context, continuation] = self._fit(request, before, targets)
        return encoded

    def _after_prefix(self, ids: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        if self.prefix_token is None:
            raise DataError(
                "A request has no context and the tokenizer has neither a BOS nor an EOS token to score it after",
                fix="Give the request a context",
            )
        if len(ids) and int(ids[0]) == self.prefix_token:
            return ids[:1], ids[1:]
        return np.asarray([self.prefix_token], dtype=np.int32), ids

    def _fit(self, request: Request, context: npt.NDArray[np.int32], targets: npt.NDArray[np.int32]) -> Encoded:
        if not len(targets):
            raise DataError(
                f"Option {request.option} of item {request.item_id!r} of task {request.task!r} has no token of its own",
                got=request.continuation,
                fix="Begin the continuation with a delimiter such as a space, or leave the item out",
            )
        if len(context) == 0:  # white space only: the harness fails here; we use the prefix token
            context = self._after_prefix(targets)[0]
        full = np.concatenate([context, targets])
        inputs = full[-(self.max_length + 1) :][:-1]
        return Encoded(inputs, targets, len(full) > self.max_length + 1, len(targets) <= self.max_length)
