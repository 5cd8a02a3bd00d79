"""A fixed input, the logits of a model on it, and how two sets of such logits are compared."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlflow_compress.errors import CheckpointError, ReloadMismatchError

if TYPE_CHECKING:
    import torch

    from mlflow_compress.models.source_model import SourceModel

SEQUENCES, LENGTH, STRIDE = 4, 48, 6
PROBE_FILE = Path("probe") / "logits.safetensors"
"""In a subfolder: loaders that read every ``*.safetensors`` of a checkpoint must not meet it."""

MAX_RELATIVE_DIFF = 1e-3
MAX_KL = 1e-6
"""Tolerances of the reload check, on float32 logits computed on the same machine and device.

Both processes run the same kernels on the same numbers, so the expected difference is exactly 0, and it was in every
method when this was written. The room left (a thousandth of the logits' root mean square, a millionth of a nat) is for
sums taken in another order, which for float32 models lies around 1e-5. Saved checkpoints known to be wrong lay at
0.01 nats and more.
"""

MAX_MEAN_KL_ROUNDED = 0.01
"""Tolerance, in nats, for models that round every token's activations by a scale of its own (`w8a8`, `fp8`).

Mostly they agree to the bit too. But where a sum comes out one unit in the last place apart, a value at the edge of a
step goes to the neighbour, and all that follows with it: `w8a8` was refused once for that. A test moves the demo's
embeddings by 1e-7 of themselves to show it. Checkpoints known to be wrong lie at this value and above.
"""


@dataclass(frozen=True)
class Probe:
    """Token ids drawn from the vocabulary.

    Parameters
    ----------
    ids : numpy.ndarray
        int64, shape (sequences, length).
    """

    ids: np.ndarray[Any, np.dtype[np.int64]]

    @classmethod
    def for_model(cls, source: SourceModel) -> Probe:
        """Draw the probe of a model: uniform over its vocabulary, the same each time."""
        length = min(LENGTH, source.max_length)
        return cls(np.random.default_rng(0).integers(0, source.vocabulary, size=(SEQUENCES, length), dtype=np.int64))

    def logits(self, model: Any) -> torch.Tensor:
        """Return the model's logits at every sixth position, float32 on the CPU.

        Returns
        -------
        torch.Tensor
            Shape (n_positions, vocabulary).

        Raises
        ------
        CheckpointError
            A logit is not finite.
        """
        import torch

        ids = torch.from_numpy(self.ids).to(model.device)
        with torch.inference_mode():
            rows = [model(input_ids=row[None], use_cache=False).logits[0, STRIDE - 1 :: STRIDE] for row in ids]
        logits = torch.cat(rows).float().cpu().clone()
        if not torch.isfinite(logits).all():
            raise CheckpointError("The compressed model gives logits that are not finite", got="inf or nan")
        return logits


def write(folder: Path, probe: Probe, logits: torch.Tensor, *, rounded: bool = False) -> Path:
    """Store the probe and the logits of the in-memory model beside the checkpoint; return the file.

    `rounded` says that the model rounds activations as it computes.
    """
    import torch
    from safetensors.torch import save_file

    path = folder / PROBE_FILE
    path.parent.mkdir(exist_ok=True)
    tensors = {"input_ids": torch.from_numpy(probe.ids), "logits": logits.contiguous()}
    save_file({**tensors, "rounded": torch.tensor(rounded)}, path)
    return path


def read(folder: Path) -> tuple[Probe, torch.Tensor, bool]:
    """Read what `write` stored."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / PROBE_FILE
    try:
        stored = load_file(path)
        return Probe(stored["input_ids"].numpy()), stored["logits"], bool(stored["rounded"])
    except (OSError, SafetensorError, KeyError) as error:
        raise CheckpointError(f"The reload probe cannot be read: {error}", got=str(path)) from error


@dataclass(frozen=True, kw_only=True)
class ReloadReport:
    """How far a reloaded checkpoint is from the in-memory model that was saved.

    Parameters
    ----------
    positions : int
        Rows of logits compared.
    max_abs_diff : float
        Largest absolute difference of two logits.
    logit_rms : float
        Root mean square of the in-memory logits, after taking the mean off each row.
    kl_mean, kl_max : float
        KL(in-memory || reloaded) in nats, over the positions.
    rounded : bool
        Whether the model rounds activations, and `MAX_MEAN_KL_ROUNDED` is the tolerance.
    """

    positions: int
    max_abs_diff: float
    logit_rms: float
    kl_mean: float
    kl_max: float
    rounded: bool = False

    @property
    def agrees(self) -> bool:
        """Whether the differences lie within the tolerances."""
        if self.rounded:
            return self.kl_mean <= MAX_MEAN_KL_ROUNDED
        return self.max_abs_diff <= MAX_RELATIVE_DIFF * self.logit_rms and self.kl_max <= MAX_KL

    def require_agreement(self) -> None:
        """Raise `ReloadMismatchError` where a difference is beyond the tolerances."""
        if not self.agrees:
            raise ReloadMismatchError(
                "The saved checkpoint does not compute what the compressed model in memory computed",
                allowed=f"a mean KL up to {MAX_MEAN_KL_ROUNDED:g} nats"
                if self.rounded
                else f"logits within {MAX_RELATIVE_DIFF * self.logit_rms:.2g}, KL up to {MAX_KL:.0e} nats",
                got=f"largest difference {self.max_abs_diff:.3g}, "
                f"KL {self.kl_mean:.3g} nats on average, {self.kl_max:.3g} at most",
            )

    def as_dict(self) -> dict[str, float]:
        """Return the numbers by name."""
        return asdict(self)


def compare(saved: torch.Tensor, reloaded: torch.Tensor, *, rounded: bool = False) -> ReloadReport:
    """Compare logits of shape (n_positions, vocabulary); other shapes or values that are not finite are a mismatch."""
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
