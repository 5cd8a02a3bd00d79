"""Times a GGUF file in llama.cpp, by its low-level interface."""

import json
import time
from pathlib import Path
from typing import Any

from mlflow_compress.models.checkpoint_config import GGUF_NATIVE_CACHE


class _InLlamaCpp:
    """A GGUF file with llama.cpp's own kernels and cache, decoded greedily."""

    def __init__(self, command: dict[str, Any]) -> None:
        import llama_cpp

        file, n_batch, n_threads = command["folder"], command["n_batch"], command["n_threads"]
        on_gpu = command["device"] == "cuda"
        self._n_tokens = command["n_context"] * n_batch
        self._api = llama_cpp
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 999 if on_gpu else 0
        self._model = llama_cpp.llama_model_load_from_file(file.encode(), model_params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {file}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = self._n_tokens, self._n_tokens, 512
        params.n_seq_max, params.n_threads, params.n_threads_batch = n_batch, n_threads, n_threads
        config = Path(file).with_name("config.json")  # which a given file does not need
        settings = json.loads(config.read_text()) if config.is_file() else {}
        if types := settings.get(GGUF_NATIVE_CACHE):
            params.type_k, params.type_v = (getattr(llama_cpp, f"GGML_TYPE_{name.upper()}") for name in types)
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp has no memory for this context")
        self._n_vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self.described = {
            "runtime": f"llama.cpp (llama-cpp-python {llama_cpp.__version__})",
            "device": "gpu" if on_gpu else "cpu",
            "dtype": "as the file",
        }

    def generate(self, prompts: list[list[int]], n_new: int) -> list[float]:
        import numpy as np

        api = self._api
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        rows = [list(enumerate(prompt)) for prompt in prompts]
        ends = []
        for _ in range(n_new):
            batch = api.llama_batch_init(self._n_tokens, 0, len(prompts))
            try:
                place, last = 0, []
                for sequence, row in enumerate(rows):
                    for position, token in row:
                        batch.token[place], batch.pos[place] = token, position
                        batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
                        batch.logits[place] = int(position == row[-1][0])
                        place += 1
                    last.append(place - 1)
                batch.n_tokens = place
                if api.llama_decode(self._context, batch) != 0:
                    raise RuntimeError("llama.cpp failed to decode")
                shape = (self._n_vocabulary,)
                logits = (api.llama_get_logits_ith(self._context, at) for at in last)
                chosen = [int(np.ctypeslib.as_array(row, shape).argmax()) for row in logits]
            finally:
                api.llama_batch_free(batch)
            ends.append(time.perf_counter())
            rows = [[(row[-1][0] + 1, token)] for row, token in zip(rows, chosen, strict=True)]
        return ends

    def device_bytes(self) -> tuple[int, int]:
        """See `TimedModel`; what llama.cpp takes on a GPU is not known here."""
        return 0, 0


open_model = _InLlamaCpp
LIBRARIES = ("llama_cpp",)
