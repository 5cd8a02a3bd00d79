"""What a baseline store keeps of each scored position: the head's input, or log-probabilities where that cannot do."""

from __future__ import annotations

import logging
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors.torch import save

from mlflow_compress.errors import UnsupportedError
from mlflow_compress.scoring.baseline_store.store_manifest import LOG_PROBS, STATES
from mlflow_compress.scoring.forward.head import rebuild_head

logger = logging.getLogger(__name__)


@runtime_checkable
class ModelWithHead(Protocol):
    """Interface of a model whose head is in this process: a `LoadedModel`, or one whose body another engine runs."""

    @property
    def model(self) -> Any:
        """The transformers model; its body needs no weights."""

    @property
    def stored_config(self) -> dict[str, Any]:
        """Its configuration, from which the head's own code is rebuilt."""


class StoredRows:
    """Turns a model's states into the rows that are stored.

    At the first rows the head is rebuilt from its weights, as a reader does it. If the rebuilt head does not give the
    model's own logits, float16 log-probabilities are stored instead of states.

    Attributes
    ----------
    kind : str or None
        "states" or "log_probs"; None before the first rows.
    reason : str or None
        Why the rows are log-probabilities.
    """

    def __init__(self, loaded: ModelWithHead) -> None:
        self._loaded = loaded
        self.kind: str | None = None
        self.reason: str | None = None

    def rows(self, states: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return the rows to store, on the CPU: shape (n, hidden_size), or (n, vocab_size) for log-probabilities.

        Parameters
        ----------
        states : Tensor, shape (n, hidden_size)
            The head's inputs.
        logits : Tensor of float32, shape (n, vocab_size)
            The model's logits of these states.
        """
        if self.kind is None:
            self.reason = self._reason_for_log_probs(states, logits)
            self.kind = STATES if self.reason is None else LOG_PROBS
            if self.reason is not None:
                logger.warning("The baseline store holds float16 log-probabilities: %s", self.reason)
        rows = states if self.kind == STATES else torch.log_softmax(logits, dim=1).half()
        return rows.detach().cpu()

    def _reason_for_log_probs(self, states: torch.Tensor, logits: torch.Tensor) -> str | None:
        """Return why a reader could not rebuild the head from its weights; None where it can."""
        module = self._loaded.model.get_output_embeddings()
        if type(module) is not torch.nn.Linear:
            return f"the head is a {type(module).__name__}, not a plain linear layer"
        if states.shape[1] != module.weight.shape[1]:
            return "the model's body and head cannot be run separately"
        try:
            rebuilt = rebuild_head(self._loaded.stored_config, _head_weights(module))
            again = rebuilt.to(states.device).logits(states).to(logits.device)
        except (UnsupportedError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            return f"the head's code cannot be rebuilt from the configuration ({type(error).__name__}: {error})"
        if not torch.equal(again, logits):
            return (
                f"the rebuilt head's logits differ from the model's by up to {float((again - logits).abs().max()):.1e}"
            )
        return None


def head_file(loaded: ModelWithHead) -> bytes:
    """Return the content of the file with the weights of a model's head, in safetensors format."""
    return bytes(save(_head_weights(loaded.model.get_output_embeddings())))


def _head_weights(module: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().cpu().contiguous() for name, p in module.state_dict().items()}
