"""Makes a fixed set of token sequences from calibration text, with a seed and a hash."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mlflow_compress.errors import ConfigError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader
    from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class Calibration:
    """Calibration sequences of equal length."""

    ids: np.ndarray[Any, np.dtype[np.int64]]  # int64, shape (samples, length)

    @property
    def sha256(self) -> str:
        """SHA-256 (hexadecimal) over the token ids as little-endian int64, row by row."""
        return hashlib.sha256(self.ids.astype("<i8").tobytes()).hexdigest()

    def describe(self) -> dict[str, int | str]:
        samples, length = self.ids.shape
        return {"samples": samples, "length": length, "tokens": samples * length, "sha256": self.sha256}

    def loader(self, batch_size: int = 8) -> "DataLoader[Any]":
        import torch
        from torch.utils.data import DataLoader

        rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in torch.from_numpy(self.ids)]
        return DataLoader(rows, batch_size=batch_size, shuffle=False)  # type: ignore[arg-type]

    def run_through(self, model: Any, hooks: "Sequence[RemovableHandle]") -> None:
        """Run the model on every sequence, so that its hooks collect their values; then remove the hooks."""
        import torch

        try:
            with torch.inference_mode():
                for batch in self.loader():
                    model(input_ids=batch["input_ids"].to(model.device), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()


def prepare_calibration(tokenizer: Any, texts: Sequence[str], *, samples: int, length: int, seed: int) -> Calibration:
    """Return `samples` sequences of `length` tokens from the texts.

    Each text is tokenized with the tokenizer's special tokens, unless it already begins with BOS. The tokens are joined
    to one stream and cut into windows without padding. A seeded permutation decides which windows are used, and in
    which order.
    """
    bos = getattr(tokenizer, "bos_token", None)
    stream = np.concatenate(
        [
            np.asarray(tokenizer(text, add_special_tokens=not (bos and text.startswith(bos)))["input_ids"], np.int64)
            for text in texts
        ]
        or [np.zeros(0, dtype=np.int64)]
    )
    windows = len(stream) // length
    if windows < samples:
        raise ConfigError(
            "The calibration text is too short",
            allowed=f"at least {samples * length} tokens ({samples} samples of {length})",
            got=f"{len(stream)} tokens, {windows} samples",
            fix="Give more text, or fewer samples or a lower length in calibration_args",
        )
    order = np.random.default_rng(seed).permutation(windows)[:samples]
    return Calibration(stream[: windows * length].reshape(windows, length)[order])
