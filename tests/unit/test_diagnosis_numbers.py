"""The numbers of a diagnosis: derived by hand from a few tokens, and bounded by what must hold."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflow_compress.errors import AlignmentError, DataError
from mlflow_compress.metrics import diagnosis
from mlflow_compress.records import Items, MetricResult, OptionDistances, SwapDistances


def records(**kl: list[list[float]]) -> SwapDistances:
    """Distances by swap: one list of KL per text; the most probable token is 1 where KL is above 0.5, else 0."""
    rows = [
        {
            "task": "t",
            "swap": swap,
            "item_id": str(text),
            "position": place + 1,
            "kl": value,
            "top": int(value > 0.5),
            "same_top": value <= 0.5,
        }
        for swap, texts in kl.items()
        for text, values in enumerate(texts)
        for place, value in enumerate(values)
    ]
    return SwapDistances.from_rows(rows)


def test_groups_are_summed_and_compared_with_noise_and_the_whole() -> None:
    table = diagnosis.SwapTable.of(
        records(
            none=[[0.0, 0.0], [0.0, 0.0]] * 10,
            a=[[0.1, 0.3], [0.2, 0.6]] * 10,  # mean 0.3
            b=[[0.1, 0.1], [0.1, 0.1]] * 10,  # mean 0.1
            noise_a=[[0.2, 0.2], [0.1, 0.1]] * 10,  # mean 0.15
            all=[[0.2, 0.5], [0.4, 0.9]] * 10,  # mean 0.5
        )
    )
    groups = {"a": ("qkv", 0), "b": ("o", 0)}
    found = diagnosis.summarize_groups(
        table, groups, {"a": "noise_a"}, {"b": "why"}, whole="all", together="all", no_swap="none"
    )
    a, b = found.groups
    assert a.kl.value == pytest.approx(0.3) and b.kl.value == pytest.approx(0.1) and a.kl.n == 40
    assert a.share == pytest.approx(0.75) and b.share == pytest.approx(0.25)
    assert a.top_changed == 0.25 and b.top_changed == 0.0
    assert a.against_noise is not None and a.against_noise.value == pytest.approx(2.0)
    assert b.against_noise is None and b.no_noise == "why"
    assert found.sum_of_parts == pytest.approx(0.4) and found.largest is a and found.no_swap == 0.0
    assert found.additivity is not None and found.additivity.value == pytest.approx(0.5 / 0.4)
    # Texts like the first alone: 0.7 / 0.6; like the second alone: 1.3 / 1.0.
    assert 0.7 / 0.6 - 1e-9 <= found.additivity.low <= found.additivity.high <= 1.3 + 1e-9
    assert found.noise_ratio is not None and found.noise_ratio.value == pytest.approx(2.0)


def test_a_ratio_of_equal_swaps_is_one_and_says_nothing_of_other_texts() -> None:
    kl = [[0.1, 0.2], [0.3, 0.1], [0.5, 0.2]] * 7
    found = diagnosis.paired_ratio(diagnosis.SwapTable.of(records(a=kl, b=kl)), "r", ["a"], ["b"])
    assert found is not None and found.value == pytest.approx(1.0)
    assert (found.low, found.high) == (None, None)  # it is 1 in every resample
    twice = [[2 * a, b] for a, b in kl]
    for n, has_interval in ((19, False), (20, True)):
        table = diagnosis.SwapTable.of(records(a=twice[:n], b=kl[:n]))
        result = diagnosis.paired_ratio(table, "r", ["a"], ["b"])
        assert result is not None and (result.low is not None) == has_interval, n


def test_the_groups_to_keep_carry_half_with_the_fewest_weights() -> None:
    """Of 1.0: o has the most per weight (0.02), then qkv (0.01), then down (0.008)."""

    def moves(**kl: float) -> list[diagnosis.GroupMove]:
        return [
            diagnosis.GroupMove(
                name=n, kind=n, layer=0, kl=MetricResult(diagnosis.SWAP_KL, v, None, None), share=v, top_changed=0.0
            )
            for n, v in kl.items()
        ]

    sizes = {"qkv": 20, "o": 10, "down": 50}
    groups = moves(qkv=0.2, o=0.2, down=0.4, head=0.2)
    assert diagnosis.groups_to_keep(groups, sizes) == ("o", "down")  # all three are taken, and qkv is not needed then
    assert diagnosis.groups_to_keep(moves(qkv=0.3, o=0.2, down=0.5), sizes) == ("qkv", "o")
    assert diagnosis.groups_to_keep(moves(qkv=0.2, head=0.8), sizes) == ()  # the head has no size: no recipe names it
    assert diagnosis.groups_to_keep(moves(qkv=0.0, o=0.0, down=0.0), sizes) == ()


def test_where_nothing_moves_there_is_no_ratio_and_positions_are_counted_in_powers_of_two() -> None:
    table = diagnosis.SwapTable.of(records(none=[[0.0], [0.0]], a=[[0.0], [0.0]]))
    assert diagnosis.paired_ratio(table, "r", ["a"], ["none"]) is None
    found = diagnosis.summarize_groups(table, {"a": ("o", 1)}, {}, {}, whole="a", together="a", no_swap="none")
    assert found.additivity is None and found.groups[0].share is None and found.noise_ratio is None
    table = diagnosis.SwapTable.of(records(a=[[float(i) for i in range(1, 10)], [float(i) for i in range(1, 10)]]))
    found = diagnosis.by_position(table, "a")
    assert [r.category for r in found] == ["token 1", "tokens 2-3", "tokens 4-7", "tokens 8-15"]
    assert [r.value for r in found] == [1.0, 2.5, 5.5, 8.5]
    assert [r.n for r in found] == [2, 4, 8, 4]


def test_swaps_on_other_tokens_are_refused() -> None:
    with pytest.raises(DataError, match="no distances"):
        diagnosis.SwapTable.of(records())
    with pytest.raises(AlignmentError, match="other tokens"):
        diagnosis.SwapTable.of(records(a=[[0.1, 0.2]], b=[[0.1]]))
    with pytest.raises(AlignmentError, match="other tokens"):
        diagnosis.SwapTable.of(records(a=[[0.1, 0.2]], b=[[0.1], [0.2]]))


@pytest.mark.parametrize(
    ("text", "before", "wanted"),
    [
        (" mill", "the", diagnosis.WORD_START),
        ("Mill", " (", diagnosis.WORD_START),
        ("mill", "", diagnosis.WORD_START),
        ('"The', " ", diagnosis.WORD_START),
        ("er", " mill", diagnosis.WORD_INSIDE),
        ("-old", "year", diagnosis.WORD_START),
        (" 12", "in", diagnosis.DIGITS),
        ("B2", " ", diagnosis.DIGITS),
        (", ", "er", diagnosis.PUNCTUATION),
        ("\n\n", ".", diagnosis.SPACE),
        (" ", ".", diagnosis.SPACE),
        ("", "x", diagnosis.OTHER_PIECE),
        ("\N{REPLACEMENT CHARACTER}", "x", diagnosis.OTHER_PIECE),
        ("\N{LATIN SMALL LETTER E WITH ACUTE}t", "caf", diagnosis.WORD_INSIDE),
    ],
)
def test_the_class_of_a_token(text: str, before: str, wanted: str) -> None:
    assert diagnosis.token_class(text, before) == wanted


@given(st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4), st.integers(0, 5)), min_size=1, max_size=40))
def test_every_token_has_one_class(tokens: list[tuple[str, str, int]]) -> None:
    own, before, ids = zip(*tokens, strict=True)
    rows = diagnosis.class_rows(own, before, np.asarray(ids))
    classes = np.stack([rows[name] for name in rows if name != diagnosis.RARE])
    assert (classes.sum(axis=0) == 1).all() and all(chosen.any() for chosen in rows.values())


@given(st.lists(st.integers(0, 30), min_size=1, max_size=200))
def test_rare_tokens_occur_less_often_than_others(ids: list[int]) -> None:
    tokens = np.asarray(ids)
    rare = diagnosis.rare_tokens(tokens)
    counts = np.asarray([(tokens == token).sum() for token in tokens])
    assert rare[counts == 1].all()
    if rare.any() and (~rare).any():
        assert counts[rare].max() < counts[~rare].min()
    if (counts[rare] > 1).any():
        assert rare.mean() <= 0.1


def test_classes_split_the_tokens() -> None:
    table = diagnosis.SwapTable.of(records(a=[[1.0, 2.0], [3.0, 4.0]]))
    rows = diagnosis.class_rows([" a", "b", ",", " c"], ["x", "a", "b", ","], np.asarray([1, 2, 3, 1]))
    found = {r.category: (r.value, r.n) for r in diagnosis.by_class(table, "a", rows)}
    assert found == {
        diagnosis.WORD_START: (2.5, 2),
        diagnosis.WORD_INSIDE: (2.0, 1),
        diagnosis.PUNCTUATION: (3.0, 1),
        diagnosis.RARE: (2.5, 2),
    }


def test_the_texts_that_moved_most_and_their_first_change() -> None:
    table = diagnosis.SwapTable.of(records(none=[[0.0] * 3] * 3, a=[[0.1, 0.1, 0.1], [0.0, 0.9, 0.8], [0.2, 0.2, 0.2]]))
    first, second, third = diagnosis.moved_texts(table, "a", "none")
    assert (first.item_id, first.changed, first.first_change, first.baseline_top, first.variant_top) == (
        "1",
        2,
        2,
        0,
        1,
    )
    assert (second.item_id, second.changed, second.first_change) == ("2", 0, None)
    assert third.kl == pytest.approx(0.1)
    assert [text.item_id for text in diagnosis.moved_texts(table, "a", "none", most=1)] == ["1"]


def test_categories_are_means_over_items_and_count_what_has_no_distance() -> None:
    columns = {name: [] for name in Items.SCHEMA.names}
    rows = [
        {**dict.fromkeys(columns), "task": "t", "item_id": item, "category": category}
        for item, category in (("1", "x"), ("2", "x"), ("3", "y"), ("4", "x"), ("generated", "z"))
    ]
    distances = [
        {
            **dict.fromkeys(OptionDistances.SCHEMA.names),
            "task": "t",
            "item_id": item,
            "permutation": p,
            "option": o,
            "kl": kl,
        }
        for item, p, o, kl in (
            ("1", 0, 0, 0.1),
            ("1", 0, 1, 0.3),
            ("1", 1, 0, 9.0),  # a shuffle is another question
            ("2", 0, 0, 0.4),
            ("3", 0, 0, 0.5),
            ("4", 0, 0, None),
        )
    ]
    found = diagnosis.by_category(Items.from_rows(rows), OptionDistances.from_rows(distances))
    assert [(r.category, r.value, r.n, r.n_unscored) for r in found] == [
        ("y", 0.5, 1, 0),
        ("x", pytest.approx(0.3), 2, 1),
    ]
