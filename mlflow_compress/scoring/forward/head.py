"""The language-model head: logits at the scored positions, computed by the model's own code.

The model's own `forward` is called with its body replaced by a module that returns given hidden states. So
soft-capping, logit scales, biases and special head modules (int8, compressed) need no code here.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from mlflow_compress.errors import UnsupportedError
from mlflow_compress.models.memory_alignment import aligned

Tensor = torch.Tensor


@contextmanager
def replaced_modules(model: torch.nn.Module, modules: Mapping[str, torch.nn.Module]) -> Iterator[None]:
    """Within this block, the submodules of these names are others."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for path, module in modules.items():
            parent, _, leaf = path.rpartition(".")
            siblings = model.get_submodule(parent)._modules
            before.append((siblings, leaf, siblings[leaf]))
            siblings[leaf] = module
        yield
    finally:
        for siblings, leaf, module in before:
            siblings[leaf] = module


class IdentityHead:
    """The head of a body that already returns log-probabilities (see `body.WholeModelBody`)."""

    def logits(self, states: Tensor) -> Tensor:
        return states.float()


class _BodyOutput:
    """A body's output that holds hidden states only; every other field that the model's code reads is None."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _ReadyStates(torch.nn.Module):
    """Replaces the body, and returns hidden states that are there already."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states

    def forward(self, *args: Any, **kwargs: Any) -> _BodyOutput:
        return _BodyOutput(self.states)


class Head:
    """Logits from hidden states.

    The product of a half-precision linear head is computed in float32. Otherwise its logits would be rounded to 3
    digits, which makes ties. Heads that are not a plain linear layer run as they are. The model's body is never run.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.body_name = model.base_model_prefix
        module = model.get_output_embeddings()
        names = [name for name, m in model.named_modules() if m is module] if module is not None else []
        if not names or self.body_name not in model._modules:
            raise UnsupportedError(
                f"The language-model head of {type(model).__name__} was not found", fix="Use a causal LM class"
            )
        self.name: str = names[0]
        self.module = module
        self.is_linear = type(module) is torch.nn.Linear
        self._buffer: Tensor | None = None
        if self.is_linear and module.weight.dtype in (torch.float16, torch.bfloat16):
            module = copy.deepcopy(module).float()
        self._module = module  # what is run

    def to(self, device: torch.device) -> "Head":
        self._module.to(device)
        return self

    @property
    def device(self) -> torch.device:
        return torch.device(next(self._module.parameters()).device)

    def logits(self, states: Tensor) -> Tensor:
        """Return float32 logits, shape (n, vocab_size), of hidden states, shape (n, hidden_size).

        On a CPU the next call may overwrite the result. Equal states give equal bits, whatever their memory address.
        """
        states = aligned(states.to(self.device))
        if self._module is not self.module:
            states = states.float()
        with torch.inference_mode(), self._without_body(_ReadyStates(states[None])):
            dummy = torch.zeros((1, len(states)), dtype=torch.long, device=states.device)
            out: Tensor = self.model(input_ids=dummy, use_cache=False, return_dict=True).logits
        return out[0].float()

    @contextmanager
    def _without_body(self, body: torch.nn.Module) -> Iterator[None]:
        module = self._module
        # A module with a `forward` of its own (accelerate's hooks) moves weights between devices: it runs as it is.
        reuses_buffer = self.is_linear and self.device.type == "cpu" and "forward" not in vars(module)
        if reuses_buffer:
            module.forward = partial(self._product, module)
        try:
            with replaced_modules(self.model, {self.name: module, self.body_name: body}):
                yield
        finally:
            if reuses_buffer:
                del module.forward

    def _product(self, linear: Any, states: Tensor) -> Tensor:
        """Return the layer's output, shape (1, n, vocab_size), in a buffer that is reused: it is about a tenth faster
        than new memory for every product."""
        n, weight = states.shape[1], linear.weight.T
        if self._buffer is None or len(self._buffer) < n or self._buffer.dtype != states.dtype:
            self._buffer = states.new_empty((n, weight.shape[1]))
        out = self._buffer[:n]
        if linear.bias is None:
            torch.mm(states[0], weight, out=out)
        else:
            torch.addmm(linear.bias, states[0], weight, out=out)
        return out[None]


LanguageModelHead = Head | IdentityHead


def rebuild_head(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Head:
    """Return the head of a model that is not loaded, from its configuration and the weights of its linear head."""
    model = empty_model(config)
    vocab_size, hidden_size = weights["weight"].shape
    linear = torch.nn.Linear(hidden_size, vocab_size, bias="bias" in weights, device="meta")
    linear.load_state_dict({name: aligned(weight) for name, weight in weights.items()}, assign=True)
    model.set_output_embeddings(linear)
    return Head(model.eval())


def empty_model(config: Mapping[str, Any]) -> Any:
    """Return the transformers model of a configuration with its `model_type`, without any weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {k: v for k, v in config.items() if k not in ("quantization_config", "model_type")}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields))
