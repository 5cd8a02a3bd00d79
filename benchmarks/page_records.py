"""Random records of a lettered evaluation with prompts of MMLU's length, for `page.py`."""

import numpy as np
import pyarrow as pa

from mlflow_compress.records import Items, OptionDistances, OptionScores, RunRecords

CATEGORIES = 57
SHOTS = 5
LETTERS = "ABCD"


class Words:
    """Draws sentences of invented words, whose frequencies follow Zipf's law as those of English do."""

    def __init__(self, seed: int, vocabulary: int = 30_000) -> None:
        self.rng = np.random.default_rng(seed)
        letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
        weights = 1 / np.arange(1, 27)
        lengths = self.rng.integers(2, 11, vocabulary)
        drawn = self.rng.choice(letters, lengths.sum(), p=weights / weights.sum())
        self.words = np.array(["".join(word) for word in np.split(drawn, np.cumsum(lengths)[:-1])])
        frequency = 1 / np.arange(1, vocabulary + 1)
        self.cumulative = np.cumsum(frequency / frequency.sum())

    def text(self, n_words: int) -> str:
        """Return so many words."""
        return " ".join(self.words[np.searchsorted(self.cumulative, self.rng.random(max(1, n_words)))])


def drawn_question(words: Words) -> tuple[str, list[str]]:
    """Return a question and its options."""
    # MMLU's questions have a median of 30 words and a long tail; its options have about 8 words.
    n = int(words.rng.lognormal(3.4, 0.8))
    return words.text(n) + "?", [words.text(int(words.rng.lognormal(1.6, 0.8))) for _ in LETTERS]


def _shown(question: str, options: list[str], answer: str = "") -> str:
    lettered = "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, options, strict=True))
    return f"{question}\n{lettered}\nAnswer:{answer}"


def items(n: int, seed: int = 0) -> Items:
    """Return items of one task with categories, five examples in every prompt."""
    words = Words(seed)
    beginnings = []
    for number in range(CATEGORIES):
        shots = [_shown(*drawn_question(words), answer=f" {words.rng.choice(list(LETTERS))}") for _ in range(SHOTS)]
        beginnings.append("\n\n".join([f"The following are questions about category {number}.", *shots, ""]))
    rows = []
    for number in range(n):
        question, options = drawn_question(words)
        category = number * CATEGORIES // n
        rows.append(
            {
                "task": "mmlu",
                "item_id": f"{number:05d}",
                "family": "lettered",
                "rule": "loglik",
                "category": f"category {category}",
                "question": question,
                "prompt": beginnings[category] + _shown(question, options),
                "options": options,
                "gold": int(words.rng.integers(4)),
                "answers": None,
            }
        )
    return Items.from_rows(rows)


def _scores(table: Items, values: np.ndarray) -> OptionScores:
    n = len(table)
    columns = {name: pa.array(np.repeat(table.column(name), 4)) for name in ("task", "item_id")}
    lengths = np.ones(4 * n, dtype=np.int32)
    option = np.tile(np.arange(4, dtype=np.int16), n)
    return OptionScores.from_columns(
        {
            **columns,
            "permutation": np.zeros(4 * n, dtype=np.int16),
            "option": option,
            "content": option,
            "loglik": values.ravel(),
            "n_tokens": lengths,
            "n_chars": lengths,
            "n_bytes": lengths,
            "greedy": np.zeros(4 * n, dtype=bool),
        }
    )


def run_records(n_items: int, n_variants: int, seed: int = 0) -> tuple[RunRecords, list[RunRecords]]:
    """Return the records of a baseline, and those of variants that move further and further from it."""
    table, rng = items(n_items, seed), np.random.default_rng(seed + 1)
    base = rng.normal(-4.0, 1.2, (n_items, 4))
    base[np.arange(n_items), table.column("gold").astype(int)] += 1.5
    variants = []
    for number in range(n_variants):
        noise = 0.1 + 0.5 * number / max(n_variants - 1, 1)
        scores = _scores(table, base + rng.normal(0.0, noise, base.shape))
        kl = rng.exponential(noise**2 / 2, 4 * n_items)
        key = {name: scores.table.column(name) for name in OptionDistances.KEY}
        others = dict.fromkeys(("kl_reverse", "js", "tv", "same_top", "top10", "rbo10"), kl)
        distances = OptionDistances.from_columns({**key, "kl": kl, **others})
        variants.append(RunRecords(items=table, option_scores=scores, option_distances=distances))
    return RunRecords(items=table, option_scores=_scores(table, base)), variants
