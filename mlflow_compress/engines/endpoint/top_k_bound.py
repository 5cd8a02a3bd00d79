"""The least KL divergence that two lists of most probable tokens allow (data-processing inequality)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TopList = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]


@dataclass(frozen=True)
class TopBound:
    """What two lists say about the divergence of their distributions."""

    kl: float  # KL of the merged distributions in nats: at most the exact KL(baseline || variant)
    kept_baseline: float  # Mass of the tokens that both lists hold
    kept_variant: float
    clipped: int  # How many of the two rests were negative by rounding, and are set to 0


def top_k_bound(baseline: TopList, variant: TopList) -> TopBound:
    """Return the KL divergence after all tokens that are not in both lists were merged into one."""
    _, here, there = np.intersect1d(baseline[0], variant[0], assume_unique=True, return_indices=True)
    p, q = np.exp(baseline[1][here]), np.exp(variant[1][there])
    rest_p, rest_q = 1.0 - float(p.sum()), 1.0 - float(q.sum())
    clipped = int(rest_p < 0) + int(rest_q < 0)
    masses_p, masses_q = np.append(p, max(rest_p, 0.0)), np.append(q, max(rest_q, 0.0))
    if masses_q[-1] == 0.0 and masses_p[-1] > 0.0 and len(p):
        # Rounding has left the variant no rest. Merged into its least probable token, the bound stays finite, and one.
        least = int(np.argmin(q))
        masses_p[least] += masses_p[-1]
        masses_p, masses_q = masses_p[:-1], masses_q[:-1]
    some = masses_p > 0
    # Both sides are normalised again: what rounding has clipped would otherwise be a divergence below zero.
    masses_p, masses_q = masses_p / masses_p.sum(), masses_q / masses_q.sum()
    kl = float(np.sum(masses_p[some] * np.log(masses_p[some] / masses_q[some])))
    return TopBound(max(kl, 0.0), float(p.sum()), float(q.sum()), clipped)
