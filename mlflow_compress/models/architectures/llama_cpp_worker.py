"""Worker process in which llama.cpp computes logits: ``python llama_cpp_worker.py FILE THREADS [KEYS VALUES]``.

KEYS and VALUES are GGUF types of what is in the cache: ``q8_0``.

It is a separate process because llama.cpp and torch have two OpenMP runtimes, and because llama.cpp aborts its process
on unexpected errors. Nothing of this package is imported here.

Protocol: the first line of output is ``{"vocabulary": n}``. A request is one line of JSON on standard input, with
`sequences` (token ids), `wanted` (ascending positions in each) and `reuse`. The answer is a line ``{"rows": k,
"n_bytes": ...}``, followed by k * n float32 logits, or a line ``{"error": "..."}``.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np

_BATCH = 2048  # tokens per call
_CELLS = 512  # initial size of a cache, in tokens
_SLOTS = 256  # most sequences at a time
LOG_ERROR = 4  # of ggml_log_level


class _LlamaCppError(Exception):
    """llama.cpp reported an error."""


class _LlamaCppEngine:
    """A GGUF file on the CPU, with the attention that llama.cpp chooses; 16-bit caches unless types are given."""

    def __init__(self, file: str, threads: int, cache_types: Sequence[str] = ()) -> None:
        self.messages: list[str] = []
        self._log = llama_cpp.llama_log_callback(
            self._listen
        )  # a reference must remain: llama.cpp holds only a pointer
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        settings.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(file.encode(), settings)
        if not self.model:
            raise _LlamaCppError(f"cannot load the file: {self._last_message()}")
        self.vocabulary = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model)))
        self.threads, self.slots, self.cells = threads, 0, _CELLS
        self.cache_types = [getattr(llama_cpp, f"GGML_TYPE_{name.upper()}") for name in cache_types]
        self.context: Any = None
        self.held: list[list[int]] = []

    def logits(self, sequences: list[list[int]], wanted: list[list[int]], *, reuse: bool) -> Any:
        """Return logits at the wanted positions, sequence after sequence, float32 of shape (k, vocabulary).

        Each sequence is decoded on its own, from an empty cache. With `reuse` they are decoded together, and the prefix
        that sequence i shares with sequence i of the last request is taken from the cache, as in generation.
        """
        at_once = min(len(sequences), _SLOTS) if reuse else 1
        self._make_room(at_once, max(map(len, sequences)))
        out = []
        for start in range(0, len(sequences), at_once):
            entries = []
            for slot, (ids, places) in enumerate(
                zip(sequences[start : start + at_once], wanted[start : start + at_once], strict=True)
            ):
                pairs = enumerate(zip(self.held[slot], ids, strict=False))
                held = next((i for i, (a, b) in pairs if a != b), min(len(self.held[slot]), len(ids)))
                known = min(held, len(ids) - 1, *places) if reuse else 0
                self.held[slot] = ids
                llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.context), slot, known, -1)
                flags = set(places)
                entries += [(ids[i], i, slot, i in flags) for i in range(known, len(ids))]
            out += [self._decode(entries[i : i + _BATCH]) for i in range(0, len(entries), _BATCH)]
        return np.concatenate(out)

    def _make_room(self, slots: int, length: int) -> None:
        """Make a context with caches for this many sequences of this length; free the old one if it is too small."""
        if slots == self.slots and length <= self.cells:
            return
        while self.cells < length:
            self.cells *= 2
        if self.context:
            llama_cpp.llama_free(self.context)
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max, settings.kv_unified = slots * self.cells, slots, False
        settings.n_batch = _BATCH
        if self.cache_types:
            settings.type_k, settings.type_v = self.cache_types
        settings.n_threads = settings.n_threads_batch = self.threads
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        if not self.context:
            raise _LlamaCppError(f"cannot make a context for {slots} x {self.cells} tokens: {self._last_message()}")
        self.slots, self.held = slots, [[] for _ in range(slots)]

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> Any:
        """Decode (id, position, slot, whether wanted) and return the wanted logits."""
        batch = llama_cpp.llama_batch_init(len(entries), 0, 1)
        try:
            batch.n_tokens = len(entries)
            for i, (token, position, slot, flag) in enumerate(entries):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, flag
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, slot
            code = llama_cpp.llama_decode(self.context, batch)
        finally:
            llama_cpp.llama_batch_free(batch)
        if code != 0:
            raise _LlamaCppError(f"cannot decode {len(entries)} tokens (code {code}): {self._last_message()}")
        shape = (sum(flag for *_, flag in entries), self.vocabulary)
        if not shape[0]:
            return np.empty(shape, np.float32)
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self.context), shape=shape).copy()

    def _listen(self, level: int, text: bytes, _: Any) -> None:
        if level == LOG_ERROR:
            self.messages = [*self.messages[-3:], text.decode(errors="replace").strip()]

    def _last_message(self) -> str:
        return " ".join(self.messages) or "no reason given"


def main() -> int:
    """Answer requests until the standard input ends."""
    out = sys.stdout.buffer

    def say(**answer: Any) -> None:
        out.write(json.dumps(answer).encode() + b"\n")
        out.flush()

    try:
        engine = _LlamaCppEngine(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
        say(vocabulary=engine.vocabulary)
        for line in sys.stdin.buffer:
            logits = engine.logits(**json.loads(line))
            say(rows=len(logits), n_bytes=logits.nbytes)
            out.write(logits.tobytes())
            out.flush()
    except _LlamaCppError as error:
        say(error=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
