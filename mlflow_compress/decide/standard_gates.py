"""The gates of a promotion where no policy is written: on KL, flips, and accuracy."""

from __future__ import annotations

from mlflow_compress.decide.promotion import GATE_DROP, GATE_FLIPS, LABELS, DivergenceGate, Gate


def standard_gates(
    *,
    max_kl: float = 0.05,
    max_kl_outliers_pct: float = 1.0,
    max_flips_pct: float = 5.0,
    max_accuracy_drop_pct: float = 2.0,
) -> list[Gate | DivergenceGate]:
    """Return the gates of a promotion, each on the upper end of a 95 % interval.

    Parameters
    ----------
    max_kl : float
        Largest accepted mean KL, in nats.
    max_kl_outliers_pct : float
        Largest accepted share of items above the clip limit, in percent; read where the mean KL has no valid interval.
    max_flips_pct : float
        Largest accepted share of flipped answers, in percent.
    max_accuracy_drop_pct : float
        Largest accepted drop of accuracy, in points.
    """
    return [
        DivergenceGate(max_kl=max_kl, max_outliers_pct=max_kl_outliers_pct),
        Gate(metric=GATE_FLIPS, bound=max_flips_pct, label=LABELS[GATE_FLIPS]),
        Gate(metric=GATE_DROP, bound=max_accuracy_drop_pct, label=LABELS[GATE_DROP]),
    ]
