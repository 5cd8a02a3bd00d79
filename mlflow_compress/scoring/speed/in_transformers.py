"""Times a model in transformers."""

import time
from typing import Any

import torch


class _InTransformers:
    """A checkpoint in its own dtype, decoded greedily with transformers' cache."""

    def __init__(self, command: dict[str, Any]) -> None:
        import transformers

        from mlflow_compress.models.loading import LoadConfig, load_model

        torch.set_num_threads(command["n_threads"])
        self._loaded = load_model(LoadConfig(path=command["folder"], dtype=command["dtype"], device=command["device"]))
        self._device = self._loaded.device
        self.described = {
            "runtime": f"transformers {transformers.__version__}",
            "device": torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu",
            "dtype": str(self._loaded.dtype).removeprefix("torch."),
        }

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], n_new: int) -> list[float]:
        model, cache = self._loaded.model, None
        tokens = torch.tensor(prompts, device=self._device)
        ends = []
        for _ in range(n_new):
            output = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            tokens = output.logits[:, -1:].argmax(dim=-1)
            tokens[0, 0].item()  # waits for the device
            ends.append(time.perf_counter())
        return ends

    def device_bytes(self) -> tuple[int, int]:
        if self._device.type != "cuda":
            return 0, 0
        return torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)


open_model = _InTransformers
LIBRARIES = ("transformers.models.auto.modeling_auto", "mlflow_compress.models.loading")
