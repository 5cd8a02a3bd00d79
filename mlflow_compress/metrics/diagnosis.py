"""Classes of tokens by their text: where words begin, digits, punctuation, rare tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import AlignmentError, DataError
from mlflow_compress.metrics.kl_by_position import position_names
from mlflow_compress.metrics.stats.arrays import Bool, Float, Int
from mlflow_compress.metrics.stats.bootstrap import bootstrap, cluster_sums, ratio, studentized_interval
from mlflow_compress.metrics.stats.intervals import FEWEST_GROUPS, effective_groups
from mlflow_compress.records import Items, MetricResult, OptionDistances, SwapDistances


@dataclass(frozen=True)
class SwapTable:
    """Distances of n swaps at the same m tokens."""

    swaps: tuple[str, ...]
    kl: Float  # shape (n, m)
    top: Int  # Most probable token after each swap; shape (n, m)
    same_top: Bool  # Whether it is the baseline's; shape (n, m)
    text: Int  # Index of the token's text in `texts`, and the token's index in it; shape (m,)
    position: Int
    texts: tuple[tuple[str, str], ...]  # Corpus and id of each text

    @classmethod
    def of(cls, records: SwapDistances) -> "SwapTable":
        """Return the table of records.

        Raises `DataError`: there are no records; `AlignmentError`: two swaps were measured on other tokens.
        """
        if not len(records):
            raise DataError("There are no distances of swaps")
        names = records.column("swap")
        swaps = tuple(dict.fromkeys(names.tolist()))
        keys = [f"{task}\n{item}" for task, item in zip(records.column("task"), records.column("item_id"), strict=True)]
        values, codes = np.unique(np.asarray(keys, dtype=object), return_inverse=True)
        place = records.column("position").astype(np.int64)
        rows = [np.flatnonzero(names == swap) for swap in swaps]
        if any(
            len(r) != len(rows[0]) or (codes[r] != codes[rows[0]]).any() or (place[r] != place[rows[0]]).any()
            for r in rows
        ):
            raise AlignmentError("Two swaps were measured on other tokens", fix="Measure them together")
        index = np.stack(rows)
        texts = tuple((task, item) for task, _, item in (str(key).partition("\n") for key in values))
        kl, top, same = (records.column(name)[index] for name in ("kl", "top", "same_top"))
        return cls(
            swaps, kl.astype(float), top.astype(np.int64), same.astype(bool), codes[rows[0]], place[rows[0]], texts
        )

    def of_swap(self, swap: str) -> Float:
        """Return the KL of one swap at every token, shape (m,)."""
        return np.asarray(self.kl[self.swaps.index(swap)])

    def sums(self, values: Float, rows: Bool | None = None) -> Float:
        """Return the sum of values, shape (m,) or (m, k), of each text, and its number of tokens as the last column."""
        chosen = np.ones(len(self.text), dtype=bool) if rows is None else rows
        return cluster_sums(values[chosen], self.text[chosen])

    def mean(self, swap: str, name: str, *, rows: Bool | None = None, category: str | None = None) -> MetricResult:
        """Return the mean KL of a swap over tokens, with the studentised bootstrap's interval over whole texts.

        There is no interval from fewer than `FEWEST_GROUPS` texts: of four it says nothing, such as [0, 155] nats.
        """
        kl = self.of_swap(swap)
        sums = self.sums(kl, rows)
        enough = effective_groups(sums[:, 1]) >= FEWEST_GROUPS
        interval = studentized_interval(sums[:, 0], sums[:, 1]) if enough else None
        low, high = interval if interval is not None else (None, None)
        value = float(sums[:, 0].sum() / sums[:, 1].sum())
        return MetricResult(name, value, low, high, n=int(sums[:, -1].sum()), category=category)


def paired_ratio(table: SwapTable, name: str, above: Sequence[str], below: Sequence[str]) -> MetricResult | None:
    """Return the summed KL of some swaps over that of others, with the bootstrap's interval over whole texts.

    Fewer than `FEWEST_GROUPS` texts give no interval, and a KL of 0 below no ratio.
    """
    columns = np.column_stack([sum(table.of_swap(swap) for swap in side) for side in (above, below)])
    sums = table.sums(columns)
    if sums[:, 1].sum() == 0:
        return None
    value = float(sums[:, 0].sum() / sums[:, 1].sum())
    interval = bootstrap(sums[:, :2], ratio) if effective_groups(sums[:, -1]) >= FEWEST_GROUPS else None
    low, high = interval if interval is not None else (None, None)
    return MetricResult(name, value, low, high, n=len(table.text))


SWAP_KL, _DIRECTION, _ADDITIVITY = "diagnose/kl", "diagnose/against_noise", "diagnose/additivity"


@dataclass(frozen=True, kw_only=True)
class GroupMove:
    """How far the baseline moves when one group of weights is the variant's."""

    name: str
    kind: str
    layer: int | None
    kl: MetricResult  # Mean KL per token, with its interval over texts
    share: float | None  # Of the sum of all groups' KL; None where that is 0
    top_changed: float  # Share of the tokens whose most probable token changes
    noise_kl: MetricResult | None = None  # The same of Gaussian noise of the same Frobenius norm on the same matrices
    # KL over that of the noise. Above 1 the change does more damage than noise of its size, below 1 less.
    against_noise: MetricResult | None = None
    no_noise: str | None = None  # Why there is no such control; None where there is one


@dataclass(frozen=True, kw_only=True)
class GroupsFound:
    """All groups of a variant, and what they are together."""

    groups: tuple[GroupMove, ...]  # In the model's order
    n_texts: int  # Texts on which they were measured
    # Mean KL of the variant itself, and of the baseline with all groups swapped: equal within rounding
    whole: MetricResult
    together: MetricResult
    no_swap: float  # Largest KL without any swap: 0
    sum_of_parts: float  # Sum of the groups' mean KL
    # `together` over `sum_of_parts`, with the paired bootstrap's interval over texts; None where the sum is 0
    additivity: MetricResult | None
    # Sum of the groups' KL over the sum of their noise controls', of the groups that have one
    noise_ratio: MetricResult | None

    @property
    def largest(self) -> GroupMove:
        return max(self.groups, key=lambda group: group.kl.value)


def summarize_groups(
    table: SwapTable,
    groups: Mapping[str, tuple[str, int | None]],
    noise: Mapping[str, str],
    no_noise: Mapping[str, str],
    *,
    whole: str,
    together: str,
    no_swap: str,
) -> GroupsFound:
    """Return what the distances of all groups say.

    - `groups`: Kind and layer of each, by its name.
    - `whole`, `together`, `no_swap`: Swaps of the whole variant, of all groups at once, and of nothing.
    """
    means = {name: table.mean(name, SWAP_KL) for name in groups}
    total = sum(mean.value for mean in means.values())
    moves = []
    for name, (kind, layer) in groups.items():
        control = noise.get(name)
        moves.append(
            GroupMove(
                name=name,
                kind=kind,
                layer=layer,
                kl=means[name],
                share=means[name].value / total if total else None,
                top_changed=float((~table.same_top[table.swaps.index(name)]).mean()),
                noise_kl=table.mean(control, SWAP_KL) if control else None,
                against_noise=paired_ratio(table, _DIRECTION, [name], [control]) if control else None,
                no_noise=no_noise.get(name),
            )
        )
    with_noise = [name for name in groups if name in noise]
    return GroupsFound(
        groups=tuple(moves),
        n_texts=len(table.texts),
        whole=table.mean(whole, SWAP_KL),
        together=table.mean(together, SWAP_KL),
        no_swap=float(table.of_swap(no_swap).max()),
        sum_of_parts=total,
        additivity=paired_ratio(table, _ADDITIVITY, [together], list(groups)),
        noise_ratio=paired_ratio(table, _DIRECTION, with_noise, [noise[n] for n in with_noise]) if with_noise else None,
    )


_KEPT_SHARE = 0.5
"""Share of the sum of all groups' KL that the groups to keep carry at least."""


def groups_to_keep(groups: Sequence[GroupMove], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the groups that carry half of what moves with the fewest weights: what to keep at more bits.

    The groups with the most KL per weight, until they carry `_KEPT_SHARE` of the sum of all groups' KL; those that are
    not needed for it then are left out again, the largest first. Empty where nothing moves, or where the groups with a
    size do not carry that much.

    - `sizes`: Number of weights of each group that can be kept, by its name.
    """
    wanted = _KEPT_SHARE * sum(group.kl.value for group in groups)
    kl = {group.name: group.kl.value for group in groups if group.name in sizes and group.kl.value > 0}
    chosen: list[str] = []
    for name in sorted(kl, key=lambda name: -kl[name] / sizes[name]):
        if sum(kl[one] for one in chosen) < wanted:
            chosen.append(name)
    if not chosen or sum(kl[name] for name in chosen) < wanted:
        return ()
    for name in sorted(chosen, key=lambda name: -sizes[name]):
        if sum(kl[one] for one in chosen if one != name) >= wanted:
            chosen.remove(name)
    return tuple(group.name for group in groups if group.name in chosen)


def by_position(table: SwapTable, swap: str) -> tuple[MetricResult, ...]:
    """Return the mean KL by the number of tokens before the predicted one: 1, 2-3, 4-7, ..."""
    names = position_names(int(table.position.max()))
    bucket = np.frexp(table.position.astype(float))[1] - 1  # floor(log2(position))
    return by_class(table, swap, {name: bucket == number for number, name in enumerate(names)})


def by_class(table: SwapTable, swap: str, rows: Mapping[str, Bool]) -> tuple[MetricResult, ...]:
    """Return the mean KL of each class of predicted tokens, see `token_classes.class_rows`."""
    return tuple(table.mean(swap, SWAP_KL, rows=some, category=name) for name, some in rows.items() if some.any())


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
    rows = []
    for (task, category), values in groups.items():
        scored = np.asarray([value for value in values if np.isfinite(value)])
        if not len(scored):
            continue
        interval = studentized_interval(scored) if len(scored) >= FEWEST_GROUPS else None
        low, high = interval if interval is not None else (None, None)
        n, missing = len(scored), len(values) - len(scored)
        rows.append(
            MetricResult(
                SWAP_KL, float(scored.mean()), low, high, n=n, n_unscored=missing, task=task, category=category
            )
        )
    return tuple(sorted(rows, key=lambda result: -result.value))


_MOST_TEXTS = 20


@dataclass(frozen=True, kw_only=True)
class MovedText:
    """One text of a corpus."""

    task: str  # Corpus, and the text's id in it
    item_id: str
    kl: float  # Mean KL per token in nats
    n: int  # Scored tokens
    changed: int  # Tokens at which the most probable token is another
    first_change: int | None = None  # Index in the text of the first of them; None where there is none
    baseline_top: int | None = None  # The most probable tokens there
    variant_top: int | None = None


def moved_texts(table: SwapTable, swap: str, no_swap: str, most: int = _MOST_TEXTS) -> list[MovedText]:
    """Return the texts with the highest mean KL of a swap, highest first; at a tie in the order of the records."""
    kl, same = table.of_swap(swap), table.same_top[table.swaps.index(swap)]
    top, base = (table.top[table.swaps.index(name)] for name in (swap, no_swap))
    moved = []
    for code, (task, item_id) in enumerate(table.texts):
        rows = np.flatnonzero(table.text == code)
        rows = rows[np.argsort(table.position[rows], kind="stable")]
        other = rows[~same[rows]]
        about = {"task": task, "item_id": item_id, "kl": float(kl[rows].mean()), "n": len(rows), "changed": len(other)}
        if len(other):
            row = other[0]
            about |= {
                "first_change": int(table.position[row]),
                "baseline_top": int(base[row]),
                "variant_top": int(top[row]),
            }
        moved.append(MovedText(**about))  # type: ignore[arg-type]
    return sorted(moved, key=lambda text: -text.kl)[:most]


@dataclass(frozen=True, kw_only=True)
class ShownText:
    """A text that moved, with the words around the token at which the most probable token first changes."""

    moved: MovedText
    begins: str  # How the text begins
    context: str | None = None  # What comes right before that token; None where nothing changes
    actual: str | None = None  # The token that the text has there, and the most probable ones of both models
    baseline: str | None = None
    variant: str | None = None


WORD_START, WORD_INSIDE, DIGITS, PUNCTUATION, SPACE, OTHER_PIECE = (
    "first token of a word",
    "inside a word",
    "digits",
    "punctuation",
    "white space",
    "other",
)
RARE = "rare tokens"
_RARE_SHARE = 0.1


def token_class(text: str, before: str) -> str:
    """Return the class of a token. Every token has exactly one.

    - `before`: What comes before it: a token with letters begins a word unless it goes on with one.
    """
    if not text or "\N{REPLACEMENT CHARACTER}" in text:
        return OTHER_PIECE
    if any(character.isdigit() for character in text):
        return DIGITS
    first = next((place for place, character in enumerate(text) if character.isalpha()), None)
    if first is not None:
        previous = text[first - 1] if first else before[-1:]
        return WORD_INSIDE if previous.isalpha() else WORD_START
    return PUNCTUATION if text.strip() else SPACE


def rare_tokens(tokens: npt.NDArray[np.int64]) -> Bool:
    """Return which tokens are rare in this text itself, shape (n,).

    The distinct tokens are ordered by how often they occur. Rare are those that occur at most k times, with the largest
    k for which they are together at most `_RARE_SHARE` of the text; at least those that occur once.
    """
    _, place, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    most = 1
    for k in np.unique(counts):
        if counts[counts <= k].sum() <= _RARE_SHARE * len(tokens):
            most = max(most, int(k))
    return np.asarray((counts <= most)[place])


def class_rows(texts: Sequence[str], before: Sequence[str], tokens: npt.NDArray[np.int64]) -> dict[str, Bool]:
    """Return which tokens are in each class that occurs. "rare tokens" overlaps with the others."""
    classes = np.asarray([token_class(text, previous) for text, previous in zip(texts, before, strict=True)])
    names = [
        name for name in (WORD_START, WORD_INSIDE, DIGITS, PUNCTUATION, SPACE, OTHER_PIECE) if (classes == name).any()
    ]
    rows = {name: classes == name for name in names}
    rare = rare_tokens(tokens)
    return {**rows, RARE: rare} if rare.any() else rows
