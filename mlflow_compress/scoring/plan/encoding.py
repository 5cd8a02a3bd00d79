"""Encodes requests: token boundaries, prefix token and truncation as in lm-evaluation-harness 0.4.13."""

import hashlib
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlflow_compress import files as atomic
from mlflow_compress.errors import CheckpointError, DataError
from mlflow_compress.kept import keeps, kept
from mlflow_compress.models.identity import tokenizer_hash
from mlflow_compress.models.model_files import library_errors
from mlflow_compress.records import ItemKey, Request
from mlflow_compress.scoring.plan.text_cuts import ANCHOR, has_cuts, paragraphs

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
    """Encode strings as the harness does. What they share is tokenized once, see `text_cuts`.

    Two deviations from the harness. (1) A tokenizer that appends an EOS shifts the harness's boundary by one token;
    here the appended token is removed. (2) A continuation that is longer than the context stops the harness with a bare
    assertion; here `Encoded.fits` is False.
    """

    def __init__(self, tokenizer: Any, max_length: int, vocab_size: int | None = None) -> None:
        """Encode for a model with embeddings of `vocab_size` tokens; None where another program computes it."""
        self.tokenizer = tokenizer
        self.max_length = max_length
        self._vocab_size = vocab_size
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
        cut = [self._pieces(string) for string in strings]
        begins = self._begins({pieces[0] for pieces in cut}, special=special)
        later = self._later({piece for pieces in cut for piece in pieces[1:]})
        return [_joined([begins[pieces[0]], *(later[piece] for piece in pieces[1:])]) for pieces in cut]

    def _errors(self) -> AbstractContextManager[None]:
        return library_errors("The tokenizer cannot encode a text", str(self.tokenizer.name_or_path))

    def _pieces(self, string: str) -> list[str]:
        return paragraphs(string) if self._has_cuts else [string]

    @cached_property
    def _has_cuts(self) -> bool:
        with self._errors():
            return has_cuts(self.tokenizer)

    @cached_property
    def _tokenizer_hash(self) -> str:
        return tokenizer_hash(self.tokenizer)  # of a large vocabulary it takes a second

    def _begins(self, strings: Collection[str], *, special: bool = True) -> dict[str, npt.NDArray[np.int32]]:
        """Return the token ids of strings, or of the pieces with which strings begin."""
        prefix = self._prefix_text
        whole = {string for string in strings if not special or (prefix and string.startswith(prefix))}
        tokens = self._tokenized([string for string in strings if string not in whole], special=True)
        tokens = {string: ids[: len(ids) - self._appended] for string, ids in tokens.items()}
        return tokens | self._tokenized(list(whole), special=False)

    def _later(self, pieces: Collection[str]) -> dict[str, npt.NDArray[np.int32]]:
        """Return the token ids of pieces with which no string begins."""
        if not pieces:
            return {}
        tokens = self._tokenized([ANCHOR, *(ANCHOR + piece for piece in pieces)], special=False)
        return {piece: tokens[ANCHOR + piece][len(tokens[ANCHOR]) :] for piece in pieces}

    def _tokenized(self, strings: Sequence[str], *, special: bool) -> dict[str, npt.NDArray[np.int32]]:
        tokens: dict[str, npt.NDArray[np.int32]] = {}
        for start in range(0, len(strings), _CHUNK):
            chunk = strings[start : start + _CHUNK]
            with self._errors():
                batch = self.tokenizer(chunk, add_special_tokens=special, **_IDS)["input_ids"]
            tokens |= {string: np.asarray(ids, np.int32) for string, ids in zip(chunk, batch, strict=True)}
        most = max((int(ids.max()) for ids in tokens.values() if len(ids)), default=0)
        if self._vocab_size is not None and most >= self._vocab_size:
            raise CheckpointError(
                f"The tokenizer has a token that the model has no embedding for: "
                f"{self.tokenizer.convert_ids_to_tokens(most)!r}",
                allowed=f"ids below {self._vocab_size}",
                got=most,
                fix="Give the model its own tokenizer; added tokens are in tokenizer.json, tokenizer_config.json, "
                "special_tokens_map.json and added_tokens.json",
            )
        return tokens

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
        return kept(("encoded", self._tokenizer_hash, self.max_length), dict)

    def _key(self, requests: Sequence[Request]) -> str:
        """Return a digest of everything that the tokens of requests depend on."""
        digest = hashlib.sha256(f"{self._tokenizer_hash} {self.max_length}".encode())
        before = None
        for request in requests:
            if request.context != before:  # the options of an item follow each other
                digest.update(f"\0\0{request.context}".encode())
                before = request.context
            digest.update(f"\0{request.continuation}".encode())
        return digest.hexdigest()

    def write(self, requests: Sequence[Request], file: Path) -> None:
        """Write the tokens of requests into a file, for `remember`."""
        encoded = self.encode(requests)
        arrays: dict[str, Any] = {
            "key": np.array(self._key(requests)),
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
            if str(stored["key"]) != self._key(requests):
                return
            known, names = self._known(), ("inputs", "targets")
            tokens = (np.split(stored[name], np.cumsum(stored[f"n_{name}"])[:-1]) for name in names)
            flags = (stored[name].tolist() for name in ("truncated", "fits"))
            for request, *parts in zip(requests, *tokens, *flags, strict=True):
                known[request.context, request.continuation] = Encoded(*parts)

    def _encode(self, requests: Sequence[Request]) -> dict[tuple[str, str], Encoded]:
        pairs = {(r.context, r.continuation): r for r in requests}
        bare = self.ids_of((continuation for context, continuation in pairs if not context), special=False)
        contexts = {context: self._pieces(context.rstrip()) for context, _ in pairs if context}
        # The last piece of a context, with its continuation behind it. The pieces before it are the same.
        ends = {
            (context, continuation): contexts[context][-1] + context[len(context.rstrip()) :] + continuation
            for context, continuation in pairs
            if context
        }
        whole = {pair for pair in ends if len(contexts[pair[0]]) == 1}
        begins = self._begins({pieces[0] for pieces in contexts.values()} | {ends[pair] for pair in whole})
        later = {piece for pieces in contexts.values() for piece in pieces[1:]}
        tokens = self._later(later | {end for pair, end in ends.items() if pair not in whole})
        before = {c: _joined([begins[p[0]], *(tokens[piece] for piece in p[1:])]) for c, p in contexts.items()}
        encoded: dict[tuple[str, str], Encoded] = {}
        for pair, request in pairs.items():
            context, continuation = pair
            if not context:
                encoded[pair] = self._fit(request, *self._after_prefix(bare[continuation]))
                continue
            known = begins if pair in whole else tokens
            n_context = len(known[contexts[context][-1]])
            encoded[pair] = self._fit(request, before[context], known[ends[pair]][n_context:])
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
        # All options of one token share the context's array.
        read = context if len(targets) == 1 else np.concatenate([context, targets[:-1]])
        inputs = read[-self.max_length :]
        return Encoded(inputs, targets, len(read) > self.max_length, len(targets) <= self.max_length)


def _joined(parts: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
