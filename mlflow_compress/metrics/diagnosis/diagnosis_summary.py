"""What a diagnosis found: every group of weights against the whole variant, and on which text the variant moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mlflow_compress.metrics.diagnosis.swap_table import SwapTable, paired_ratio
from mlflow_compress.metrics.kl_by_position import position_names
from mlflow_compress.metrics.stats.arrays import Bool
from mlflow_compress.metrics.stats.studentized import studentized_interval
from mlflow_compress.records import Items, MetricResult, OptionDistances

KL, DIRECTION, ADDITIVITY = "diagnose/kl", "diagnose/against_noise", "diagnose/additivity"


class NamedGroup(Protocol):
    """Interface of a group of weights."""

    @property
    def name(self) -> str:
        """Of the group, and of its swap."""

    @property
    def kind(self) -> str:
        """Which matrices."""

    @property
    def layer(self) -> int | None:
        """Number of the decoder layer."""


@dataclass(frozen=True, kw_only=True)
class GroupMove:
    """How far the baseline moves when one group of weights is the variant's.

    Attributes
    ----------
    name, kind : str
    layer : int or None
    kl : MetricResult
        Mean KL per token, with its interval over texts.
    share : float or None
        Of the sum of all groups' KL; None where that is 0.
    top_changed : float
        Share of the tokens whose most probable token changes.
    noise_kl : MetricResult or None
        The same of Gaussian noise of the same Frobenius norm on the same matrices.
    against_noise : MetricResult or None
        KL over that of the noise. Above 1 the change points where it hurts; below 1 it is smaller than its size.
    no_noise : str or None
        Why there is no such control; None where there is one.
    """

    name: str
    kind: str
    layer: int | None
    kl: MetricResult
    share: float | None
    top_changed: float
    noise_kl: MetricResult | None = None
    against_noise: MetricResult | None = None
    no_noise: str | None = None


@dataclass(frozen=True, kw_only=True)
class GroupsFound:
    """All groups of a variant, and what they are together.

    Attributes
    ----------
    groups : tuple of GroupMove
        In the model's order.
    n_texts : int
        Texts on which they were measured.
    whole, together : MetricResult
        Mean KL of the variant itself, and of the baseline with all groups swapped: equal within rounding.
    no_swap : float
        Largest KL without any swap: 0.
    sum_of_parts : float
        Sum of the groups' mean KL.
    additivity : MetricResult or None
        `together` over `sum_of_parts`, with the paired bootstrap's interval over texts; None where the sum is 0.
    noise_ratio : MetricResult or None
        Sum of the groups' KL over the sum of their noise controls', of the groups that have one.
    """

    groups: tuple[GroupMove, ...]
    n_texts: int
    whole: MetricResult
    together: MetricResult
    no_swap: float
    sum_of_parts: float
    additivity: MetricResult | None
    noise_ratio: MetricResult | None

    @property
    def largest(self) -> GroupMove:
        """The group that moves most."""
        return max(self.groups, key=lambda group: group.kl.value)


def summarize_groups(
    table: SwapTable,
    groups: Sequence[NamedGroup],
    noise: Mapping[str, str],
    no_noise: Mapping[str, str],
    *,
    whole: str,
    together: str,
    no_swap: str,
) -> GroupsFound:
    """Return what the distances of all groups say.

    Parameters
    ----------
    table : SwapTable
    groups : sequence
        Their names are names of swaps.
    noise : mapping of str to str
        By group, the swap that is its noise control.
    no_noise : mapping of str to str
        By group, why it has none.
    whole, together, no_swap : str
        Swaps of the whole variant, of all groups at once, and of nothing.
    """
    means = {group.name: table.mean(group.name, KL) for group in groups}
    total = sum(mean.value for mean in means.values())
    moves = []
    for group in groups:
        control = noise.get(group.name)
        row = table.swaps.index(group.name)
        moves.append(
            GroupMove(
                name=group.name,
                kind=group.kind,
                layer=group.layer,
                kl=means[group.name],
                share=means[group.name].value / total if total else None,
                top_changed=float((~table.same_top[row]).mean()),
                noise_kl=table.mean(control, KL) if control else None,
                against_noise=paired_ratio(table, DIRECTION, [group.name], [control]) if control else None,
                no_noise=no_noise.get(group.name),
            )
        )
    names = [group.name for group in groups]
    with_noise = [name for name in names if name in noise]
    return GroupsFound(
        groups=tuple(moves),
        n_texts=len(table.texts),
        whole=table.mean(whole, KL),
        together=table.mean(together, KL),
        no_swap=float(table.of_swap(no_swap).max()),
        sum_of_parts=total,
        additivity=paired_ratio(table, ADDITIVITY, [together], names),
        noise_ratio=paired_ratio(table, DIRECTION, with_noise, [noise[n] for n in with_noise]) if with_noise else None,
    )


def by_position(table: SwapTable, swap: str) -> tuple[MetricResult, ...]:
    """Return the mean KL by the number of tokens before the predicted one: 1, 2-3, 4-7, ..."""
    names = position_names(int(table.position.max()))
    bucket = np.frexp(table.position.astype(float))[1] - 1  # floor(log2(position))
    return tuple(_parts(table, swap, {name: bucket == number for number, name in enumerate(names)}))


def by_class(table: SwapTable, swap: str, rows: Mapping[str, Bool]) -> tuple[MetricResult, ...]:
    """Return the mean KL of each class of predicted tokens, see `token_classes.class_rows`."""
    return tuple(_parts(table, swap, rows))


def _parts(table: SwapTable, swap: str, rows: Mapping[str, Bool]) -> Iterator[MetricResult]:
    for name, chosen in rows.items():
        if chosen.any():
            yield table.mean(swap, KL, rows=chosen, category=name)


def by_category(items: Items, distances: OptionDistances) -> tuple[MetricResult, ...]:
    """Return the mean KL of the items of each task and category, largest first.

    Of an item it is the mean over its options in the original order, as in equation 1 of the flips paper; items without
    a distance (an option alone is longer than the context) are counted as unscored.
    """
    first = distances.where(permutation=0)
    keys = list(zip(first.column("task"), first.column("item_id"), strict=True))
    of_item: dict[tuple[str, str], list[float]] = {}
    for key, kl in zip(keys, first.column("kl").tolist(), strict=True):
        of_item.setdefault(key, []).append(kl)
    groups: dict[tuple[str, str | None], list[float]] = {}
    columns = (items.table.column(name).to_pylist() for name in ("task", "item_id", "category"))
    for task, item_id, category in zip(*columns, strict=True):
        if (task, item_id) in of_item:
            groups.setdefault((task, category), []).append(float(np.mean(of_item[task, item_id])))
    found = []
    for (task, category), values in groups.items():
        scored = np.asarray([value for value in values if np.isfinite(value)])
        if not len(scored):
            continue
        interval = studentized_interval(scored)
        low, high = interval if interval is not None else (None, None)
        n, missing = len(scored), len(values) - len(scored)
        found.append(
            MetricResult(KL, float(scored.mean()), low, high, n=n, n_unscored=missing, task=task, category=category)
        )
    return tuple(sorted(found, key=lambda result: -result.value))
