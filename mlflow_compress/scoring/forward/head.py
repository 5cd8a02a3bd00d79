"""The language-model head, applied where it is needed, exactly as the model itself applies it.

The model's own `forward` is called with its body replaced by given hidden states. So soft-capping, logit scales, biases
and special head modules (int8, compressed) are the model's own code, not a list of cases kept here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch

from mlflow_compress.errors import UnsupportedError
from mlflow_compress.models.memory_alignment import aligned

Tensor = torch.Tensor


class Logits(Protocol):
    """What turns the rows that a body yields into logits."""

    def logits(self, states: Tensor) -> Tensor:
        """Return float32 logits, shape (n, vocab_size)."""


class GivenLogits:
    """The head of a body that yields log-probabilities itself (see `body.WholeModel`)."""

    def logits(self, states: Tensor) -> Tensor:
        """Return the rows as float32."""
        return states.float()


class _BodyOutput:
    """A body's output with nothing but hidden states; what else a head's code passes on is None."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _GivenStates(torch.nn.Module):
    """Stands in for the body and returns the states it was given."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states

    def forward(self, *args: Any, **kwargs: Any) -> _BodyOutput:
        return _BodyOutput(self.states)


class Head:
    """Logits from hidden states.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal LM; its body is never run.
    upcast : bool
        Compute the product of a half-precision linear head in float32 (its logits would be rounded to 3 digits
        otherwise, which makes ties). Heads that are not a plain linear layer run as they are.

    Raises
    ------
    UnsupportedError
        When body or head cannot be told apart.
    """

    def __init__(self, model: Any, *, upcast: bool = True) -> None:
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
        self._wide: torch.nn.Module | None = None
        self._room: Tensor | None = None
        if upcast and self.is_linear and module.weight.dtype in (torch.float16, torch.bfloat16):
            self._wide = copy.deepcopy(module).float()

    def to(self, device: torch.device) -> Head:
        """Move the head's weights and return it."""
        for module in (self.module, self._wide):
            if module is not None:
                module.to(device)
        return self

    @property
    def device(self) -> torch.device:
        """Where hidden states have to lie."""
        return torch.device(next(self.module.parameters()).device)

    def logits(self, states: Tensor) -> Tensor:
        """Return float32 logits, shape (n, vocab_size), of hidden states, shape (n, hidden_size).

        On a CPU the next call may write over them. Equal states give equal bits wherever they lie in memory.
        """
        states = aligned(states.to(self.device))
        if self._wide is not None:
            states = states.float()
        with torch.inference_mode(), self._replaced(_GivenStates(states[None])):
            dummy = torch.zeros((1, len(states)), dtype=torch.long, device=states.device)
            out: Tensor = self.model(input_ids=dummy, use_cache=False, return_dict=True).logits
        return out[0].float()

    @contextmanager
    def _replaced(self, body: torch.nn.Module) -> Iterator[None]:
        kept = self.model._modules[self.body_name]
        parent = self.model.get_submodule(self.name.rpartition(".")[0])
        leaf = self.name.rpartition(".")[2]
        module = self._wide if self._wide is not None else self.module
        # A `forward` of the module's own moves weights between devices.
        keeps_room = self.is_linear and self.device.type == "cpu" and "forward" not in vars(module)
        self.model._modules[self.body_name] = body
        parent._modules[leaf] = module
        if keeps_room:
            module.forward = partial(self._product, module)
        try:
            yield
        finally:
            if keeps_room:
                del module.forward
            self.model._modules[self.body_name] = kept
            parent._modules[leaf] = self.module

    def _product(self, linear: Any, states: Tensor) -> Tensor:
        """Return what the layer gives, shape (1, n, vocab_size), in memory that is kept: large logits in fresh pages
        would take a tenth longer."""
        n, weight = states.shape[1], linear.weight.T
        if self._room is None or len(self._room) < n or self._room.dtype != states.dtype:
            self._room = states.new_empty((n, weight.shape[1]))
        out = self._room[:n]
        if linear.bias is None:
            torch.mm(states[0], weight, out=out)
        else:
            torch.addmm(linear.bias, states[0], weight, out=out)
        return out[None]


def rebuild_head(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Head:
    """Return the head of a model that is not loaded, from its configuration and the weights of its linear head.

    Parameters
    ----------
    config : mapping
        The model's configuration with its `model_type`.
    weights : mapping of str to Tensor
        "weight", shape (vocab_size, hidden_size), and perhaps "bias".
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {k: v for k, v in config.items() if k not in ("quantization_config", "model_type")}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields))
    vocab_size, hidden_size = weights["weight"].shape
    linear = torch.nn.Linear(hidden_size, vocab_size, bias="bias" in weights, device="meta")
    linear.load_state_dict({name: aligned(weight) for name, weight in weights.items()}, assign=True)
    model.set_output_embeddings(linear)
    return Head(model.eval())
