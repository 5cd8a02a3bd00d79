"""A model in vLLM, step by step; it runs in vLLM's own environment, where this package is not installed."""

import os
import time
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's steps are taken, and timed, in this process
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; otherwise vLLM wants nearly all memory
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


class _InVllm:
    """A checkpoint in its own dtype with vLLM's kernels and cache, decoded greedily, every request at once.

    On a CPU the model runs eagerly: there vLLM would compile for minutes. On a GPU it compiles and captures graphs.
    """

    def __init__(self, command: dict[str, Any]) -> None:
        import vllm

        n_tokens = command["n_context"] * command["n_batch"]
        on_cpu = command["device"] == "cpu"
        self._llm = vllm.LLM(
            model=command["folder"],
            dtype=command["dtype"],
            skip_tokenizer_init=True,
            enforce_eager=on_cpu,
            max_model_len=command["n_context"],
            max_num_seqs=command["n_batch"],
            max_num_batched_tokens=n_tokens,
            enable_prefix_caching=False,
            async_scheduling=False,
            disable_log_stats=True,
        )
        self._count = 0
        self.described = {
            "runtime": f"vLLM {vllm.__version__}{' (eager)' if on_cpu else ''}",
            "device": command["device"],
            "dtype": str(self._llm.llm_engine.model_config.dtype).removeprefix("torch."),
        }

    def generate(self, prompts: list[list[int]], n_new: int) -> list[float]:
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        wanted = SamplingParams(temperature=0.0, max_tokens=n_new, ignore_eos=True, detokenize=False)
        written: dict[str, int] = {}
        for prompt in prompts:
            self._count += 1
            written[str(self._count)] = 0
            engine.add_request(str(self._count), {"prompt_token_ids": prompt}, wanted)
        ends: list[float] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                written[output.request_id] = len(output.outputs[0].token_ids)
            now, done = time.perf_counter(), min(written.values())
            ends += [now] * (done - len(ends))
        return ends

    def device_bytes(self) -> tuple[int, int]:
        import torch

        if not torch.cuda.is_available():
            return 0, 0
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()


open_model = _InVllm
LIBRARIES = ("vllm",)
