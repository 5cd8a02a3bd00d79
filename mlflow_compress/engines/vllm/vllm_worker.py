"""Worker process in which vLLM computes: ``python vllm_worker.py``, in vLLM's own environment.

Nothing of this package is imported here. Only `scoring.generation.drawing` is read, as a file, which needs torch alone.

Protocol: requests are lines of JSON on standard input. An answer on standard output is a line of JSON, followed by
`n_bytes` bytes where it names them, or a line ``{"error": "..."}``. The first request holds the arguments of
`vllm.LLM`. Whatever vLLM prints goes to standard error.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

_DRAWING = Path(__file__).resolve().parents[2] / "scoring" / "generation" / "drawing.py"


class StatesExtension:
    """What every vLLM worker can do besides its own work: keep the head's inputs at the positions that are asked for.

    The model's forward returns the head's inputs, behind the final norm, of every token that it computes. A request
    says which positions it wants in its sampling parameters (`extra_args`).
    """

    model_runner: Any

    def keep_states(self) -> None:
        self.kept_states: dict[tuple[int, int], torch.Tensor] = {}
        self.model_runner.model.register_forward_hook(self.keep_wanted)

    def keep_wanted(self, model: Any, args: Any, output: Any) -> None:
        if not isinstance(output, torch.Tensor):  # an earlier stage of a pipeline
            return
        batch = self.model_runner.input_batch
        starts = self.model_runner.query_start_loc.np
        for index, request in enumerate(batch.req_ids):
            wanted = (self.model_runner.requests[request].sampling_params.extra_args or {}).get("rows")
            if not wanted:
                continue
            number, first = wanted[0], int(batch.num_computed_tokens_cpu[index])
            begin, end = int(starts[index]), int(starts[index + 1])
            here = [row for row in wanted[1:] if first <= row < first + end - begin]
            rows = output[[begin + row - first for row in here]].cpu()  # a copy: vLLM uses its buffers again
            self.kept_states.update({(number, row): state for row, state in zip(here, rows, strict=True)})

    def take_states(self) -> dict[tuple[int, int], torch.Tensor]:
        states, self.kept_states = self.kept_states, {}
        return states


class OurDraw(AdapterLogitsProcessor):  # type: ignore[misc]
    """Leaves the token only that our sampler draws with the request's own random numbers; vLLM then takes it."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Accept all requests."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        ours = (params.extra_args or {}).get("draw")
        if ours is None:
            return None

        def process(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            u = torch.tensor([ours["u"][len(output)]], dtype=torch.float64, device=logits.device)
            temperature = torch.tensor([ours["temperature"]], dtype=torch.float32, device=logits.device)
            token = drawing().draw(logits[None], u, temperature, top_k=ours["top_k"], top_p=ours["top_p"])
            return torch.full_like(logits, float("-inf")).index_fill_(0, token.to(logits.device), 0.0)

        return process


def drawing() -> Any:
    """Return the module that draws tokens."""
    if "mlflow_compress_drawing" not in sys.modules:
        spec = importlib.util.spec_from_file_location("mlflow_compress_drawing", _DRAWING)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules["mlflow_compress_drawing"] = module
    return sys.modules["mlflow_compress_drawing"]


class ModelInVllm:
    """One model in vLLM."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.llm = LLM(**arguments, worker_extension_cls="vllm_worker.StatesExtension", logits_processors=[OurDraw])
        self.llm.collective_rpc("keep_states")

    def states(self, sequences: list[list[int]], rows: list[list[int]]) -> tuple[dict[str, Any], bytes]:
        """Return the head's inputs at the rows of each sequence, one sequence after the other.

        A position in a cached prefix is not computed, so it has no state. Its sequence is then asked again, without the
        cache.
        """
        places = [(number, row) for number, wanted in enumerate(rows) for row in wanted]
        by_place = self._run_for_states(list(range(len(sequences))), sequences, rows, cached=True)
        again = sorted({number for number, row in places if (number, row) not in by_place})
        if again:
            by_place.update(self._run_for_states(again, sequences, rows, cached=False))
        states = torch.stack([by_place[place] for place in places]).contiguous()
        raw = states.view(torch.uint8).numpy().tobytes()
        said = {"dtype": str(states.dtype).removeprefix("torch."), "shape": list(states.shape), "again": len(again)}
        return said, raw

    def _run_for_states(
        self, numbers: list[int], sequences: list[list[int]], rows: list[list[int]], *, cached: bool
    ) -> dict[tuple[int, int], torch.Tensor]:
        settings = [
            SamplingParams(
                max_tokens=1,
                temperature=0,
                detokenize=False,
                skip_reading_prefix_cache=not cached,
                extra_args={"rows": [number, *rows[number]]},
            )
            for number in numbers
        ]
        prompts = [{"prompt_token_ids": sequences[number]} for number in numbers]
        self.llm.generate(prompts, settings, use_tqdm=False)
        # The last stage of a pipeline has them; with tensor parallelism every worker has the same.
        every: list[dict[tuple[int, int], torch.Tensor]] = self.llm.collective_rpc("take_states")
        return max(every, key=len)

    def logprobs(self, sequences: list[list[int]]) -> tuple[dict[str, Any], bytes]:
        settings = SamplingParams(max_tokens=1, temperature=0, detokenize=False, prompt_logprobs=0)
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in sequences], settings, use_tqdm=False)
        values = [
            [entry[token].logprob for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
            for ids, output in zip(sequences, outputs, strict=True)
        ]
        return {"logprobs": values}, b""

    def generate(
        self, prompts: list[list[int]], most: list[int], draws: list[dict[str, Any] | None], ends: list[int]
    ) -> tuple[dict[str, Any], bytes]:
        settings = [
            SamplingParams(
                max_tokens=n,
                temperature=0,
                detokenize=False,
                ignore_eos=True,
                stop_token_ids=ends,
                extra_args={"draw": ours} if ours is not None else None,
            )
            for n, ours in zip(most, draws, strict=True)
        ]
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], settings, use_tqdm=False)
        return {"tokens": [list(output.outputs[0].token_ids) for output in outputs]}, b""

    def forget(self) -> tuple[dict[str, Any], bytes]:
        return {"forgotten": self.llm.reset_prefix_cache()}, b""


def main() -> None:
    """Serve until standard input is closed."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what vLLM prints is not an answer
    engine = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if engine is None:
                engine = ModelInVllm(request)
                answer, raw = engine.forget()
            else:
                answer, raw = getattr(engine, request.pop("do"))(**request)
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises is said to the client, in vLLM's words
            answer, raw = {"error": f"{type(error).__name__}: {error}"}, b""
        answers.write(json.dumps({**answer, "n_bytes": len(raw)}).encode() + b"\n" + raw)
        answers.flush()


if __name__ == "__main__":
    main()
