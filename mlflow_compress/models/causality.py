"""Whether a model reads from left to right: only then do its logits at a token predict the next one."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlflow_compress.errors import UnsupportedError
from mlflow_compress.models.offloading import probed

_N_TOKENS = 8
_ROUNDINGS = 10  # of a hidden state in one layer, about
_QUANTIZED = 2.0**-5  # of 4 bits; with rounded activations, sequences may share a scale


def require_causal(model: Any, folder: Path) -> None:
    """Raise `UnsupportedError` where another last token changes the logits at the tokens before it.

    Both sequences are in one batch, which costs one forward pass of 16 tokens. In a batch, a mixture of experts may
    treat two equal tokens unlike, so where the logits differ each sequence is computed alone before it is refused.
    """
    config = model.config.get_text_config(decoder=True)
    ids = np.random.default_rng(3).integers(0, config.vocab_size, size=_N_TOKENS)
    pair = np.stack([ids, ids])
    pair[1, -1] = (ids[-1] + 1) % config.vocab_size
    both = torch.from_numpy(pair).to(model.get_input_embeddings().weight.device)
    most = _tolerance(model, config)

    def moved() -> float:
        found = _difference(model, [both])
        return _difference(model, [both[:1], both[1:]]) if found > most else found

    found = probed(model, moved, lambda found: found > most)
    if not found > most:  # logits that are no numbers are another subject, and larger than nothing
        return
    raise UnsupportedError(
        "The model is not causal: another last token changes its logits at the tokens before it "
        f"by {found:.1g} of their size",
        allowed=f"at most {most:.1g}, which is rounding",
        got=f"{type(model).__name__} in {folder}",
        fix="Give a model that reads from left to right; an encoder such as BERT predicts no next token",
    )


def _difference(model: Any, batches: list[torch.Tensor]) -> float:
    """Return the root mean square difference of two sequences' logits before the last token, in parts of their own."""
    with torch.no_grad():
        logits = [model(input_ids=ids, use_cache=False, return_dict=True).logits[:, :-1].float() for ids in batches]
    one, other = torch.cat(logits)
    return float((one - other).square().mean().sqrt() / one.square().mean().sqrt())


def _tolerance(model: Any, config: Any) -> float:
    """Return how far rounding alone may move the logits, in parts of their size.

    Roundings add up as a random walk: of every hidden state in the model's dtype, and of every sum in float32.
    """
    rounded = getattr(model, "is_quantized", False) or hasattr(model, "logits_at")  # llama.cpp rounds activations
    unit = _QUANTIZED if rounded else torch.finfo(model.dtype).eps / 2
    n_roundings, width = _ROUNDINGS * config.num_hidden_layers, model.get_input_embeddings().weight.shape[-1]
    return float(math.sqrt(n_roundings) * (unit + torch.finfo(torch.float32).eps / 2 * math.sqrt(width)))
