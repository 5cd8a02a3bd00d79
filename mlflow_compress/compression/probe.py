"""The reload probe: a fixed input, a model's logits on it, and the comparison of two such sets of logits."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlflow_compress.errors import CheckpointError, ReloadMismatchError
from mlflow_compress.models.source_model import SourceModel

if TYPE_CHECKING:
    import torch

_SEQUENCES, _LENGTH, _STRIDE = 4, 48, 6
_PROBE_FILE = Path("probe") / "logits.safetensors"
"""In a subfolder, because some loaders read every ``*.safetensors`` file of a checkpoint."""

_MAX_RELATIVE_DIFF = 1e-3
MAX_KL = 1e-6
"""Tolerances of the reload check, on float32 logits computed on the same machine and device.

Both processes run the same kernels on the same numbers, so the expected difference is exactly 0. It was 0 for every
method when this was written. The tolerance (a thousandth of the logits' root mean square, a millionth of a nat) allows
sums in another order, which change the logits of float32 models by about 1e-5. Checkpoints known to be wrong differ by
0.01 nats or more.
"""

MAX_MEAN_KL_ROUNDED = 0.01
"""Tolerance, in nats, for models that round the activations of every token with a scale of its own (`w8a8`, `fp8`).

Usually their logits are equal too. But where a sum differs in its last bit, a value between two steps is rounded to the
other one, which changes everything after it: `w8a8` was rejected once for this. A test shows it by changing the demo's
embeddings by a factor of 1e-7. Checkpoints known to be wrong differ by this value or more.
"""


@dataclass(frozen=True)
class Probe:
    """Token ids drawn from the vocabulary."""

    ids: np.ndarray[Any, np.dtype[np.int64]]  # int64, shape (sequences, length)

    @classmethod
    def for_model(cls, source: SourceModel) -> "Probe":
        """Return the probe of a model: token ids drawn uniformly from its vocabulary, with a fixed seed."""
        length = min(_LENGTH, source.max_length)
        return cls(np.random.default_rng(0).integers(0, source.vocabulary, size=(_SEQUENCES, length), dtype=np.int64))

    @property
    def n_positions(self) -> int:
        return int(self.ids[:, _STRIDE - 1 :: _STRIDE].size)

    def logits(self, model: Any) -> "torch.Tensor":
        """Return the model's logits at every sixth position, float32 on the CPU.

        Shape (n_positions, vocabulary).
        """
        import torch

        ids = torch.from_numpy(self.ids).to(model.device)
        with torch.inference_mode():
            rows = [model(input_ids=row[None], use_cache=False).logits[0, _STRIDE - 1 :: _STRIDE] for row in ids]
        logits = torch.cat(rows).float().cpu().clone()
        if not torch.isfinite(logits).all():
            raise CheckpointError("The compressed model gives logits that are not finite", got="inf or nan")
        return logits


def write_probe(folder: Path, probe: Probe, logits: "torch.Tensor", *, rounded: bool = False) -> Path:
    """Write the probe and the logits of the model in memory into the checkpoint's folder; return the file.

    `rounded`: the model rounds activations.
    """
    import torch
    from safetensors.torch import save_file

    path = folder / _PROBE_FILE
    path.parent.mkdir(exist_ok=True)
    tensors = {"input_ids": torch.from_numpy(probe.ids), "logits": logits.contiguous()}
    save_file({**tensors, "rounded": torch.tensor(rounded)}, path)
    return path


def read_probe(folder: Path) -> "tuple[Probe, torch.Tensor, bool]":
    """Return the probe, the logits and `rounded` that `write_probe` stored."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / _PROBE_FILE
    try:
        stored = load_file(path)
        return Probe(stored["input_ids"].numpy()), stored["logits"], bool(stored["rounded"])
    except (OSError, SafetensorError, KeyError) as error:
        raise CheckpointError(f"The reload probe cannot be read: {error}", got=str(path)) from error


@dataclass(frozen=True, kw_only=True)
class ReloadReport:
    """Differences between the logits of a reloaded checkpoint and of the model in memory that was saved."""

    positions: int  # Rows of logits compared
    max_abs_diff: float  # Largest absolute difference of two logits
    logit_rms: float  # Root mean square of the logits in memory, after subtracting the mean of each row
    kl_mean: float  # KL(in-memory || reloaded) in nats, over the positions
    kl_max: float
    rounded: bool = False  # Whether the model rounds activations, so that `MAX_MEAN_KL_ROUNDED` is the tolerance

    @property
    def agrees(self) -> bool:
        if self.rounded:
            return self.kl_mean <= MAX_MEAN_KL_ROUNDED
        return self.max_abs_diff <= _MAX_RELATIVE_DIFF * self.logit_rms and self.kl_max <= MAX_KL

    def require_agreement(self) -> None:
        if not self.agrees:
            raise ReloadMismatchError(
                "The saved checkpoint does not reproduce the compressed model in memory",
                allowed=f"a mean KL up to {MAX_MEAN_KL_ROUNDED:g} nats"
                if self.rounded
                else f"logits within {_MAX_RELATIVE_DIFF * self.logit_rms:.2g}, KL up to {MAX_KL:.0e} nats",
                got=f"largest difference {self.max_abs_diff:.3g}, "
                f"KL {self.kl_mean:.3g} nats on average, {self.kl_max:.3g} at most",
            )


def compare_logits(saved: "torch.Tensor", reloaded: "torch.Tensor", *, rounded: bool = False) -> ReloadReport:
    """Return the differences between two sets of logits of shape (n_positions, vocabulary).

    Different shapes raise `ReloadMismatchError`. Values that are not finite do not agree.
    """
    import torch

    if saved.shape != reloaded.shape:
        raise ReloadMismatchError(
            "The reloaded checkpoint has other logits", allowed=str(tuple(saved.shape)), got=str(tuple(reloaded.shape))
        )
    centred = saved - saved.mean(dim=-1, keepdim=True)
    p, q = torch.log_softmax(saved.double(), dim=-1), torch.log_softmax(reloaded.double(), dim=-1)
    kl = (p.exp() * (p - q)).sum(dim=-1)
    return ReloadReport(
        positions=int(saved.shape[0]),
        max_abs_diff=float((saved - reloaded).abs().max()),
        logit_rms=float(centred.square().mean().sqrt()),
        kl_mean=float(kl.mean()),
        kl_max=float(kl.max()),
        rounded=rounded,
    )
