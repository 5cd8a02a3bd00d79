"""Whether KL says who is right: its correlation with harm over variants, by how near they are to the baseline.

KL measures how much two models disagree, harm which of them is right: the share of the items that go from right to
wrong, minus the share from wrong to right. Variants of three small models are read from `kl_against_harm.npz`, by item.
A zone has the variants below a mean KL, and a row Spearman's correlations over them: with a 95 % interval (variants
drawn again within each model), of all models together by the rank within the model. "harm, halves" is the correlation
of harm on one half of the items with harm on the other half: where it is near 0, harm is the luck of the items, which
no metric follows. "closer, more harm": of the pairs of one model that the scoreboard tells apart by KL, and whose harm
differs, those of which the closer one has more harm.

Then scoreboards are simulated, and those are counted that tell any two variants apart in a wrong order. The items are
drawn with replacement, and `--variants` of the near ones. "exchanged": the variants' values are exchanged at random
within every item, so that all are equally close and equally harmful. "own shapes": they are too, but every variant
keeps the shape of its KL, scaled to one mean, and the number of its changes, of which half are to the worse;
"trusted" are those of which no item holds 2.5 % of the mean KL. "as measured":
the truth is the order over all measured items. "of true" is the share of the pairs that differ and are told apart in
the true order.

Example
-------
python benchmarks/kl_against_harm.py
python benchmarks/kl_against_harm.py --measure --model stories260K lambada.txt --stored mine.npz

`--measure` compresses and scores the demo, and every further model on its text: of which twelve characters does a
passage go on with, its own or those of three other passages? The last tenth of the text calibrates.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

from mlflow_compress import demo
from mlflow_compress.config.policy import KlBounds
from mlflow_compress.decide.separation import Difference, ItemScores, Separation, item_scores, separate

Float, Bool = npt.NDArray[np.float64], npt.NDArray[np.bool_]
Pair = tuple[Float, Float]
STORED = Path(__file__).with_suffix(".npz")
NEAR = KlBounds().max_kl
ZONES = {"all": np.inf, f"KL < {NEAR:g}": NEAR, "KL < 0.01": 0.01}
ITEMS, BEFORE, AFTER = 1000, 200, 12  # of a text: passages, and characters of each before and after the cut

VARIANTS: list[tuple[str, dict[str, str]]] = [
    ("fp8", {}),
    *(
        (method, {"bits": bits, "group_size": size})
        for method in ("rtn", "gptq", "awq", "hqq")
        for bits, size in (("8", "channel"), ("4", "channel"), ("4", "32"))
    ),
    *((method, {}) for method in ("bnb-int8", "bnb-nf4", "w8a8")),
    *(("gguf", {"bits": bits}) for bits in ("5", "4")),
    *((method, {"sparsity": "0.1"}) for method in ("magnitude", "sparsegpt")),
    *(("wanda", {"sparsity": share}) for share in ("0.05", "0.1", "0.2", "0.5", "0.8")),
    *(("layer-drop", {"layers": layers}) for layers in ("1", "2")),
]


@dataclass(frozen=True, eq=False)
class Measured:
    """What the variants of one model have scored."""

    names: tuple[str, ...]
    baseline: Bool  # Whether the baseline is right, by item
    correct: Bool  # Whether the variant is right, shape (variants, items)
    kl: Float  # In nats, of the same shape

    def part(self, rows: npt.ArrayLike, items: npt.ArrayLike | slice = slice(None)) -> "Measured":
        """Return some of the variants, on some of the items."""
        rows = np.asarray(rows)
        names = tuple(np.array(self.names)[rows].tolist())
        return Measured(names, self.baseline[items], self.correct[rows][:, items], self.kl[rows][:, items])

    def below(self, limit: float) -> "Measured":
        """Return the variants whose mean KL is below a limit."""
        return self.part(np.flatnonzero(self.kl.mean(axis=1) < limit))

    @property
    def trusted(self) -> "Measured":
        """Return the variants of which no item holds 2.5 % of the mean KL."""
        return self.part(np.flatnonzero(self.kl.max(axis=1) < 0.025 * self.kl.sum(axis=1)))

    @property
    def harm(self) -> Float:
        """Share from right to wrong, minus the share from wrong to right, by variant."""
        return np.asarray(self.baseline.mean() - self.correct.mean(axis=1))

    @property
    def flips(self) -> Float:
        """Share that goes either way, by variant."""
        return np.asarray((self.correct != self.baseline).mean(axis=1))

    def scored(self) -> list[tuple[str, ItemScores]]:
        """Return what each variant scored, by its name."""
        n = len(self.baseline)
        task, item = np.full(n, "task", dtype=object), np.arange(n).astype(str).astype(object)
        rows = zip(self.names, self.correct.astype(float), self.correct != self.baseline, self.kl, strict=True)
        return [
            (name, ItemScores(task, item, right, kl, flipped.astype(float), np.arange(n)))
            for name, right, flipped, kl in rows
        ]


def write_task(text: str, path: Path) -> None:
    """Write the questions: which of four ends of `AFTER` characters is that of a passage."""
    rng, step = random.Random(0), (len(text) - BEFORE - AFTER - 1) // ITEMS
    cuts = []
    for start in range(BEFORE, BEFORE + ITEMS * step, step):
        cut = next((i for i in range(start, start + step) if text[i] == " " and not text[i + 1].isspace()), None)
        if cut is not None:
            cuts.append((text[cut - BEFORE : cut], text[cut + 1 : cut + 1 + AFTER]))
    rows = []
    for number, (before, after) in enumerate(cuts):
        choices = [after, *rng.sample(sorted({other for _, other in cuts} - {after}), 3)]
        rng.shuffle(choices)
        row = {"id": str(number), "category": "text", "context": before, "choices": choices}
        rows.append(json.dumps({**row, "answer": choices.index(after)}))
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def measure(model: str, folder: Path, tasks: str, calibration: str) -> Measured:
    """Return what the variants of a model score; one that a method refuses is named and left out."""
    from mlflow_compress.commands.evaluate.outputs import run_model
    from mlflow_compress.compression import compress_model, method_config
    from mlflow_compress.errors import UnsupportedError
    from mlflow_compress.items.suite import load_suite
    from mlflow_compress.items.task import TaskSettings
    from mlflow_compress.metrics.core.metric_inputs import MetricInputs
    from mlflow_compress.models.loading import LoadConfig, load_model
    from mlflow_compress.scoring.baseline_store import StateStore, StateWriter
    from mlflow_compress.scoring.engine import Scorer, ScoringConfig

    suite = load_suite(tasks, model="demo", settings=TaskSettings(num_fewshot=0, num_shuffles=0))
    quiet = ScoringConfig(progress=False)
    found: dict[str, ItemScores] = {}
    with tempfile.TemporaryDirectory() as scratch:
        loaded, states = load_model(LoadConfig(path=str(folder), device="cpu")), Path(scratch) / "states"
        with StateWriter(states, loaded) as writer:
            baseline = run_model(Scorer(loaded, quiet), suite, capture=writer, generations=False).records
        store = StateStore.open(states, baseline=loaded)
        for number, (method, settings) in enumerate(VARIANTS):
            name, out = "-".join([method, *settings.values()]), Path(scratch) / str(number)
            try:
                compress_model(str(folder), method, method_config(method, **settings), [calibration], out)
            except UnsupportedError as error:
                print(f"{model}: {name} is left out: {error}", flush=True)
                continue
            variant = load_model(LoadConfig(path=str(out), device="cpu"))
            records = run_model(Scorer(variant, quiet), suite, baseline=store, generations=False).records
            scores = found[name] = item_scores(MetricInputs(baseline, records))
            harm = scores.flipped @ (1 - 2 * scores.correct) / len(scores.kl)
            print(f"{model}: {name} KL {scores.kl.mean():.2g}, harm {100 * harm:+.2f} points", flush=True)
    correct, flipped, kl = (
        np.array([getattr(scores, of) for scores in found.values()]) for of in ("correct", "flipped", "kl")
    )
    assert np.isfinite([correct, flipped, kl]).all()
    return Measured(tuple(found), correct[0] != flipped[0], correct == 1, kl)


def write(stored: Path, models: dict[str, Measured]) -> None:
    """Write what was measured; of KL its root, which half precision has to a thousandth."""
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    for name, one in models.items():
        arrays |= {f"{name}/names": np.array(one.names), f"{name}/baseline": one.baseline}
        root = np.sqrt(np.maximum(one.kl, 0)).astype(np.float16)
        arrays |= {f"{name}/correct": np.packbits(one.correct, axis=1), f"{name}/root": root}
    np.savez_compressed(stored, **arrays)  # type: ignore[arg-type]


def read(stored: Path) -> dict[str, Measured]:
    """Return what `write` has written."""
    models = {}
    with np.load(stored) as arrays:
        for name in dict.fromkeys(key.rpartition("/")[0] for key in arrays.files):
            names, baseline, correct, root = (arrays[f"{name}/{of}"] for of in ("names", "baseline", "correct", "root"))
            right = np.unpackbits(correct, axis=1, count=len(baseline)).astype(bool)
            models[name] = Measured(tuple(names.tolist()), baseline, right, root.astype(np.float64) ** 2)
    return models


def rank_correlation(pairs: Sequence[Pair]) -> float:
    """Return the correlation of ranks within each pair of arrays, all pairs together; of one pair it is Spearman's."""
    ranks = np.concatenate([np.stack([(rankdata(one) - 0.5) / len(one) for one in pair]) for pair in pairs], axis=1)
    with np.errstate(invalid="ignore"):  # NaN where all values are the same
        return float(np.corrcoef(ranks)[0, 1])


def drawn_again(pairs: Sequence[Pair], rng: np.random.Generator, draws: int = 2000) -> tuple[float, float]:
    """Return the 95 % percentile interval of the correlation; the points of each pair of arrays are drawn again.

    Draws without a correlation, as all values are the same, do not count.
    """
    values = []
    for _ in range(draws):
        rows = [rng.integers(0, len(x), len(x)) for x, _ in pairs]
        values.append(rank_correlation([(x[row], y[row]) for (x, y), row in zip(pairs, rows, strict=True)]))
    low, high = np.nanquantile(values, (0.025, 0.975))
    return float(low), float(high)


def of_halves(models: Sequence[Measured], rng: np.random.Generator, draws: int = 200) -> float:
    """Return the mean correlation of harm on a random half of the items with harm on the other half."""
    values = []
    for _ in range(draws):
        halves = []
        for one in models:
            order, every = rng.permutation(len(one.baseline)), np.arange(len(one.names))
            middle = len(order) // 2
            halves.append((one.part(every, order[:middle]).harm, one.part(every, order[middle:]).harm))
        values.append(rank_correlation(halves))
    return float(np.mean(values))


def closer_with_more_harm(one: Measured) -> tuple[int, int]:
    """Return how many pairs told apart by KL the closer one has more harm in, and in how many harm differs."""
    harm = dict(zip(one.names, one.harm.tolist(), strict=True))
    apart = [pair for pair in separate(one.scored()) if pair.kl is not None and pair.kl.significant]
    more = [(harm[pair.second] - harm[pair.first]) * pair.kl.value for pair in apart if pair.kl is not None]
    return sum(value < 0 for value in more), sum(value != 0 for value in more)


Draw = Callable[[Measured, np.random.Generator], tuple[Measured, Float, Float]]
"""Returns a sample of some variants, and the truth about their mean KL and their share of right answers."""


def again(one: Measured, rng: np.random.Generator) -> Measured:
    """Return all variants on items that are drawn with replacement."""
    n = len(one.baseline)
    return one.part(np.arange(len(one.names)), rng.integers(0, n, n))


def exchanged(one: Measured, rng: np.random.Generator) -> tuple[Measured, Float, Float]:
    """Return items drawn again, whose values are exchanged between the variants at random."""
    found = again(one, rng)
    order = rng.permuted(np.tile(np.arange(len(one.names))[:, None], len(one.baseline)), axis=0)
    correct, kl = (np.take_along_axis(values, order, axis=0) for values in (found.correct, found.kl))
    same = np.zeros(len(one.names))
    return Measured(one.names, found.baseline, correct, kl), same, same


def own_shapes(one: Measured, rng: np.random.Generator) -> tuple[Measured, Float, Float]:
    """Return items drawn again, with KL scaled to one mean, and as many changes, of which half are to the worse."""
    found, share = again(one, rng), one.baseline.mean()
    chance = one.flips[:, None] / 2 / np.where(found.baseline, share, 1 - share)
    changed = rng.random(found.correct.shape) < chance
    kl = found.kl / one.kl.mean(axis=1, keepdims=True)
    same = np.zeros(len(one.names))
    return Measured(one.names, found.baseline, found.baseline ^ changed, kl), same, same


def as_measured(one: Measured, rng: np.random.Generator) -> tuple[Measured, Float, Float]:
    """Return items drawn again; the truth is that of all items."""
    return again(one, rng), one.kl.mean(axis=1), one.correct.mean(axis=1)


DRAWS: dict[str, Draw] = {
    "exchanged": exchanged,
    "own shapes": own_shapes,
    "own shapes, trusted": own_shapes,
    "as measured": as_measured,
}


def claims(tests: Sequence[Difference | None], truth: Float) -> tuple[bool, int, int]:
    """Return whether any pair is told apart in a wrong order, how many in the true one, and how many truly differ.

    The tests are of every pair of the variants, in the order of `combinations`. Any order of two equals is wrong.
    """
    products = []
    for test, (first, second) in zip(tests, combinations(truth, 2), strict=True):
        products.append(np.sign(test.value) * np.sign(second - first) if test.significant else np.nan)
    product = np.array(products)
    return bool((product <= 0).any()), int((product > 0).sum()), sum(a != b for a, b in combinations(truth, 2))


def simulated(one: Measured, draw: Draw, variants: int, draws: int) -> dict[str, float]:
    """Return the shares of scoreboards with a wrong order, and of the true orders that are found, in percent."""
    rng = np.random.default_rng(20261125)
    wrong, found = np.zeros(3), np.zeros((2, 2))
    for _ in range(draws):
        some = one.part(rng.choice(len(one.names), min(variants, len(one.names)), replace=False))
        sample, *truths = draw(some, rng)
        pairs: tuple[Separation, ...] = separate(sample.scored())
        by = [
            claims(tests, truth)
            for tests, truth in zip(([p.kl for p in pairs], [p.correctness for p in pairs]), truths, strict=True)
        ]
        wrong += 100 * np.array([any(is_wrong for is_wrong, _, _ in by), *(is_wrong for is_wrong, _, _ in by)]) / draws
        found += np.array([counts for _, *counts in by])
    with np.errstate(invalid="ignore"):
        kl, right = 100 * found[:, 0] / found[:, 1]
    return dict(zip(("any", "KL", "right", "KL, of true", "right, of true"), (*wrong, kl, right), strict=True))


def cell(pairs: Sequence[Pair], rng: np.random.Generator) -> str:
    """Return a correlation with its interval as text."""
    low, high = drawn_again(pairs, rng)
    return f"{rank_correlation(pairs):.2f} [{low:.2f}, {high:.2f}]"


def zone_rows(models: dict[str, Measured]) -> Iterator[tuple[str, ...]]:
    """Iterate over the rows of the first table."""
    rng = np.random.default_rng(20261125)
    for zone, limit in ZONES.items():
        inside = {name: one.below(limit) for name, one in models.items()}
        for name, some in (*((name, [one]) for name, one in inside.items()), ("together", list(inside.values()))):
            kl = [one.kl.mean(axis=1) for one in some]
            more, of = np.sum([closer_with_more_harm(one) for one in some], axis=0)
            yield (
                zone,
                name,
                str(sum(len(one.names) for one in some)),
                cell([(x, one.harm) for x, one in zip(kl, some, strict=True)], rng),
                cell([(x, one.flips) for x, one in zip(kl, some, strict=True)], rng),
                f"{of_halves(some, rng):.2f}",
                f"{more} of {of}",
            )


def table(head: str, rows: Iterator[tuple[str, ...]]) -> None:
    """Print a table in Markdown, each row as soon as it is known."""
    print(f"\n| {head} |\n{'|---' * (head.count('|') + 1)}|")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


T = TypeVar("T")


def each_model(
    measure: Callable[[str, Path, str, str], T],
    more: Sequence[tuple[str, str]],
    keep: Callable[[dict[str, T]], None] = lambda models: None,
) -> dict[str, T]:
    """Measure the demo, and further models (folder, file with text): nine tenths of the text ask, the rest calibrates.

    `keep` gets what is there before each further model.
    """
    calibration = (demo.DATA_DIR / "calibration.txt").read_text(encoding="utf-8")
    tasks = ",".join(str(demo.DATA_DIR / name) for name in ("choice.jsonl", "cloze.jsonl"))
    models = {"demo": measure("demo", demo.MODEL_DIR, tasks, calibration)}
    for folder, file in more:
        keep(models)
        text = Path(file).read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as scratch:
            task = Path(scratch) / "passages.jsonl"
            write_task(text[: len(text) * 9 // 10], task)
            name = Path(folder).name
            models[name] = measure(name, Path(folder), str(task), text[len(text) * 9 // 10 :])
    return models


def main() -> None:
    """Print both tables, of what was measured before, or is measured now."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stored", type=Path, default=STORED, help="what was measured (default: beside this script)")
    parser.add_argument("--measure", action="store_true", help="measure first, and write --stored anew")
    parser.add_argument("--model", nargs=2, action="append", default=[], metavar=("FOLDER", "TEXT"), help="one more")
    parser.add_argument("--draws", type=int, default=1000, help="simulated scoreboards a row (default: %(default)s)")
    parser.add_argument("--variants", type=int, default=10, help="of each scoreboard, or all (default: %(default)s)")
    given = parser.parse_args()
    if given.measure:
        write(given.stored, each_model(measure, given.model, partial(write, given.stored)))
    models = read(given.stored)
    for name, one in models.items():
        right = f"{100 * one.baseline.mean():.1f} % right"
        print(f"{name}: {len(one.baseline):,} items, {right}, {len(one.names)} variants")
    table("zone | model | variants | KL, harm | KL, flips | harm, halves | closer, more harm", zone_rows(models))
    table(
        "setting | model | any wrong, % | by KL, % | by right answers, % | KL: of true, % | right: of true, %",
        (
            (setting, name, *("" if np.isnan(value) else f"{value:.1f}" for value in row.values()))
            for setting, draw in DRAWS.items()
            for name, one in models.items()
            for near in [one.below(NEAR)]
            for row in [simulated(near.trusted if "trusted" in setting else near, draw, given.variants, given.draws)]
        ),
    )


if __name__ == "__main__":
    main()
