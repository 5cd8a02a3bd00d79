"""Items drawn by the baseline's lead against items drawn at random: how many give an interval of the same width.

Variants of three small models are read from `margin_sampling.npz`, by item, and those of two published ones from
`--oracle`. Each row is one variant, and `--draws` evaluations of it with `--share` of the items, by the code that
`items=NUMBER` runs: a pilot of a third of them, then a model of flips by lead. "of random" is that number over
that of items drawn at random whose interval is as wide, of flips and of accuracy change. "covered" is how often the
interval holds the truth. "benchmark": the truth is the mean of all items. "population": the items themselves are drawn
with replacement, so that the truth is that of what they are a sample of. "in groups": so are groups of five items,
which were put together because the variant moved them alike.

The settings (strata, pilot, floor, prior, guess) were chosen on the variants of the demo and of stories260K. The others
had no part in it, with three exceptions: "demo, sentences" is the demo on ARC, PIQA and Winogrande, of which one
variant chose the 3 nats in the root of a lead; that letters have one root was chosen with a look at all of them,
because the published models needed more items where it grew with the nats; and so was `LEAST_FLIPS`, by what it covers.

Then certificates (answers that changed although the KL is smaller than any change needs; there must be none), and
forecasts of each task's flips from the other tasks of the same model. Last, gates that stop early: do they need fewer
items where those with a high lead are partly passed over?

With --sweep only: sweeps of eight variants of the demo with items=auto against one with all items; how often sweeps
tell apart what is equal, and a policy passes or fails what meets it exactly; and what two real sweeps take.

Example
-------
python benchmarks/margin_sampling.py --oracle ../shared/data/flips_oracle
python benchmarks/margin_sampling.py --sweep --draws 100 --tasks arc_easy,piqa --data_dir ../shared/hub --limit 1400
python benchmarks/margin_sampling.py --measure --model stories260K lambada.txt --data_dir ../shared/hub --limit 500
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import logit

from mlflow_compress import demo
from mlflow_compress.config.groups import SampleSize
from mlflow_compress.config.policy import Policy
from mlflow_compress.decide.gates import DELTA, FLIPS, KL
from mlflow_compress.decide.item_checks import item_policy
from mlflow_compress.decide.item_sampling import ItemSampler, standings
from mlflow_compress.decide.scoreboard import MATTERS, Scoreboard, ScoredVariant, more_items, scoreboard
from mlflow_compress.decide.separation import ItemScores
from mlflow_compress.metrics.core.estimates import PairedDifference, Proportion
from mlflow_compress.metrics.core.metric_inputs import MetricSettings
from mlflow_compress.metrics.stats.flip_model import GUESS, expected_flips, forecast_flips, smallest_kl_to_change
from mlflow_compress.metrics.stats.intervals import DesignEffect, design_effect, paired_difference, wilson
from mlflow_compress.metrics.stats.sequential import p_values, verdicts
from mlflow_compress.metrics.stats.stratified import Design, EstimateOf, Units, lead_strata, weighted_mean
from mlflow_compress.records import MetricResult

Float, Bool = npt.NDArray[np.float64], npt.NDArray[np.bool_]
STORED = Path(__file__).with_suffix(".npz")
CHOSEN_ON = ("demo", "stories260K")
SENTENCES = "arc_easy,arc_challenge,piqa,winogrande"
VARIANTS: list[tuple[str, dict[str, str]]] = [
    *((method, {"bits": "8", "group_size": "channel"}) for method in ("rtn", "gptq", "awq", "hqq")),
    *((method, {}) for method in ("bnb-int8", "w8a8", "fp8", "bnb-nf4")),
    *(
        (method, {"bits": "4", "group_size": size})
        for method in ("rtn", "gptq", "awq", "hqq")
        for size in ("channel", "32")
    ),
    *(("rtn", {"bits": bits, "group_size": "32"}) for bits in ("3", "2")),
    ("wanda", {"sparsity": "0.5"}),
]


@dataclass(frozen=True, eq=False)
class Variant:
    """What one variant answered."""

    model: str
    name: str
    bits: str  # "8", "4" or "other"
    lead: Float  # The baseline's, by item
    before: Bool  # Whether baseline and variant are right
    after: Bool
    changed: Bool  # Whether the answer changed, between wrong ones too
    part: npt.NDArray[np.str_]  # Task and category
    kl: Float | None = None  # In nats
    certificate: Float | None = None  # Smallest KL of a change; NaN where there is none

    @property
    def held_out(self) -> bool:
        """Whether it took no part in the choice of the settings."""
        return self.model not in CHOSEN_ON


def _bits(name: str) -> str:
    eight, four = ("-8-", "int8", "w8a8", "fp8"), ("-4-", "nf4", "int4")
    return "8" if any(x in name for x in eight) else "4" if any(x in name for x in four) else "other"


def stored(path: Path) -> Iterator[Variant]:
    """Iterate over what was measured before."""
    with np.load(path) as arrays:
        for model in dict.fromkeys(key.rpartition("/")[0] for key in arrays.files):
            of = {key.rpartition("/")[2]: arrays[key] for key in arrays.files if key.startswith(f"{model}/")}
            n = len(of["lead"])
            correct, changed = (np.unpackbits(of[x], axis=1, count=n).astype(bool) for x in ("correct", "changed"))
            for row, name in enumerate(of["names"].tolist()):
                kl = of["root"][row].astype(np.float64) ** 2
                yield Variant(
                    model, name, _bits(name), of["lead"].astype(np.float64), of["right"], correct[row], changed[row],
                    of["part"], kl, of["certificate"].astype(np.float64),
                )  # fmt: skip


def oracle(folder: Path) -> Iterator[Variant]:
    """Iterate over published predictions; the lead is that of the chosen option over all others together, as the
    options' own log-likelihoods were not published: a wrong answer's distance from the right one is not known."""
    gold = {task: [item["answer"] for item in items] for task, items in _json(folder / "_bench_items.json").items()}
    for file in sorted(folder.glob("*__fp16__*.json")):
        model, _, task = file.stem.rsplit("__", 2)
        base = _json(file)
        first, right = np.array(base["preds"]), np.array(gold[task])
        lead = np.abs(logit(np.clip(base["confs"], 1e-9, 1 - 1e-9))) / np.sqrt(5.5)
        for precision in ("int8", "int4"):
            answers = np.array(_json(folder / f"{model}__{precision}__{task}.json")["preds"])
            yield Variant(
                model.rpartition("__")[2], f"{precision} {task}", _bits(precision), lead, first == right,
                answers == right, first != answers, np.full(len(first), task),
            )  # fmt: skip


def _json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def drawn(one: Variant, rows: npt.NDArray[np.int64], groups: npt.NDArray[np.int64], n: int, seed: Any) -> Any:
    """Return what estimates read of `n` of some items, drawn as the command does; rows may be repeated."""
    some, now = drawn_rows(one, rows, SampleSize(count=n), seed)
    before, after = (side.correct[:, 0] for side in (now.baseline_predictions, now.variant_predictions))
    return before, after, Units(groups[some], now.design)


def drawn_rows(one: Variant, rows: npt.NDArray[np.int64], size: SampleSize, seed: Any) -> tuple[Any, Any]:
    """Return which of some items are drawn as the command does, and what its sampler reads of them."""
    rng = np.random.default_rng(seed)
    lead, before, after = one.lead[rows], one.before[rows], one.after[rows]
    strata = lead_strata(lead)
    orders = [rng.permutation(np.flatnonzero(strata == code)).tolist() for code in range(strata.max() + 1)]
    sampler = ItemSampler(size=size, leads=lead, strata=strata, orders=orders)
    sizes = np.bincount(strata)
    while True:
        some = np.array(sampler.keys)
        every, code = np.arange(len(some)), strata[some]
        scored = np.ones(len(some), dtype=bool)
        expected = expected_flips(lead[some], before[some] != after[some], scored, code)
        design = Design(code, sizes[code], sampler.drawn[code], expected)
        now = SimpleNamespace(
            headline_rows=every,
            headline_families=["task"],
            view=SimpleNamespace(family=np.full(len(some), "task")),
            settings=MetricSettings(),
            scored_by_both=scored,
            baseline_predictions=SimpleNamespace(correct=before[some, None], lead=lead[some, None]),
            variant_predictions=SimpleNamespace(correct=after[some, None]),
            variant=SimpleNamespace(option_distances=()),
            distance=lambda _, kl=None if one.kl is None else one.kl[rows[some]]: kl,
            design=design,
            units=lambda some, design=design: Units(some, design[some]),
        )
        if not sampler.go_on(now):  # type: ignore[arg-type]
            return some, now


def at_random(one: Variant, wanted: Float, reading: EstimateOf, groups: npt.NDArray[np.int64] | None = None) -> Float:
    """Return how many items drawn at random have intervals of flips and accuracy change as wide as is wanted.

    Of items in groups, two drawn at random share a group the more often, the more are drawn.
    """
    n, share = len(one.lead), float((one.before != one.after).mean())
    gained, lost = float((one.after & ~one.before).mean()), float((one.before & ~one.after).mean())
    flips, change = (one.before != one.after).astype(np.float64), one.after.astype(np.float64) - one.before
    alike = [1.0 if groups is None else design_effect(x, groups).effect for x in (flips, change)]

    def effect(count: float, of_all: float) -> DesignEffect:
        grouped = 1 + (of_all - 1) * min(count / n, 1.0)
        return DesignEffect(grouped if reading == "population" else max(1 - count / n, 1e-9), 1e6, n)

    widths: list[Callable[[float], float]] = [
        lambda count: float(np.diff(wilson(share * count, count, effect=effect(count, alike[0])))[0]),  # type: ignore[arg-type]
        lambda count: float(
            np.diff(paired_difference(gained * count, lost * count, count, effect=effect(count, alike[1])))[0]
        ),
    ]
    most = n * (1 - 1e-6) if reading == "benchmark" else 1000.0 * n
    found = []
    for width, want in zip(widths, wanted, strict=True):
        found.append(brentq(lambda count, w=width, x=want: w(count) - x, 3, most) if width(most) < want else np.nan)
    return np.array(found)


def row(one: Variant, share: float, draws: int, reading: EstimateOf, in_groups: bool) -> tuple[Float, Float]:
    """Return items over those drawn at random, and shares covered in percent: of flips, and of the accuracy change."""
    n, settings = len(one.lead), MetricSettings(reading=reading)
    rng = np.random.default_rng(0)
    alike = np.argsort((one.before != one.after) + 3 * rng.random(n))
    group = np.arange(n) // 5 if in_groups else np.arange(n)
    truth = np.array([(one.before != one.after).mean(), one.after.mean() - one.before.mean()])
    covered, widths = np.zeros(2), np.zeros(2)
    for draw in range(draws):
        if reading == "benchmark":
            rows, groups = alike, group
        else:
            chosen = rng.integers(0, group.max() + 1, group.max() + 1)
            rows = (
                alike[np.concatenate([np.arange(g * 5, min(g * 5 + 5, n)) for g in chosen])]
                if in_groups
                else alike[chosen]
            )
            groups = np.arange(len(rows)) // 5 if in_groups else np.arange(len(rows))
        before, after, units = drawn(one, rows, groups, int(share * n), (draw, 1))
        for place, estimate in enumerate(
            (Proportion.of(before != after, units), PairedDifference.of(before, after, units))
        ):
            _, interval = estimate.at(settings, 1.0)
            covered[place] += interval[0] - 1e-12 <= truth[place] <= interval[1] + 1e-12
            widths[place] += interval[1] - interval[0]
    of_item = np.empty(n, dtype=np.int64)
    of_item[alike] = group
    simple = at_random(one, widths / draws, reading, of_item if in_groups else None)
    return int(share * n) / simple, 100 * covered / draws


def measure(
    model: str, folder: Path, tasks: str, calibration: str, data_dir: str = "", limit: int = 0
) -> dict[str, npt.NDArray[Any]]:
    """Return what the variants of a model answer; one that a method refuses is named and left out."""
    from mlflow_compress.commands.evaluate.outputs import run_model
    from mlflow_compress.compression import compress_model, method_config
    from mlflow_compress.errors import UnsupportedError
    from mlflow_compress.items.suite import load_suite
    from mlflow_compress.items.task import TaskSettings
    from mlflow_compress.metrics.core.metric_inputs import MetricInputs
    from mlflow_compress.models.loading import LoadConfig, load_model
    from mlflow_compress.scoring.baseline_store import StateStore, StateWriter
    from mlflow_compress.scoring.engine import Scorer, ScoringConfig

    settings = TaskSettings(num_fewshot=0, num_shuffles=0, data_dir=data_dir, limit=limit)
    suite = load_suite(tasks, model="demo", settings=settings)
    quiet = ScoringConfig(progress=False)
    names, correct, answers, kl = [], [], [], []
    with tempfile.TemporaryDirectory() as scratch:
        loaded, states = load_model(LoadConfig(path=str(folder), device="cpu")), Path(scratch) / "states"
        with StateWriter(states, loaded) as writer:
            records = run_model(Scorer(loaded, quiet), suite, capture=writer, generations=False).records
        store, base = StateStore.open(states, baseline=loaded), MetricInputs(records)
        rows, first = base.headline_rows, base.baseline_predictions
        for number, (method, settings) in enumerate(VARIANTS):
            name, out = "-".join([method, *settings.values()]), Path(scratch) / str(number)
            try:
                compress_model(str(folder), method, method_config(method, **settings), [calibration], out)
            except UnsupportedError as error:
                print(f"{model}: {name} is left out: {error}", flush=True)
                continue
            variant = load_model(LoadConfig(path=str(out), device="cpu"))
            found = MetricInputs(
                records, run_model(Scorer(variant, quiet), suite, baseline=store, generations=False).records
            )
            names.append(name)
            correct.append(found.variant_predictions.correct[rows, 0])
            answers.append(found.variant_predictions.content[rows, 0])
            kl.append(found.distance("kl")[rows])
            print(f"{model}: {name} flips {100 * (correct[-1] != first.correct[rows, 0]).mean():.2f} %", flush=True)
        grid = base.grid("baseline")
        part = [
            f"{task}/{category}" for task, category in zip(base.view.task[rows], base.view.category[rows], strict=True)
        ]
        return packed(
            names, first.lead[rows, 0], first.correct[rows, 0], first.content[rows, 0], np.array(correct),
            np.array(answers), np.array(kl), np.array(part), grid.loglik[rows, 0], grid.by_rule[rows, 0],
        )  # fmt: skip


def packed(
    names: list[str], lead: Float, right: Bool, answer: Any, correct: Bool, answers: Any, kl: Float,
    part: npt.NDArray[np.str_], loglik: Float, by_rule: Float,
) -> dict[str, npt.NDArray[Any]]:  # fmt: skip
    """Return the arrays that are stored; of KL its root, which half precision has to a thousandth."""
    lettered = (loglik == by_rule).all(axis=1)  # options of one token each, which share a context
    certificate = np.full(len(lead), np.nan)
    if lettered.any():
        certificate[lettered] = smallest_kl_to_change(np.exp(loglik[lettered].astype(np.float64)))
    return {
        "names": np.array(names),
        "lead": lead.astype(np.float32),
        "right": right,
        "correct": np.packbits(correct, axis=1),
        "changed": np.packbits(answers != answer, axis=1),
        "root": np.sqrt(np.maximum(kl, 0)).astype(np.float16),
        "part": part,
        "certificate": certificate.astype(np.float32),
    }


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stored", type=Path, default=STORED, help="what was measured (default: beside this script)")
    parser.add_argument("--oracle", type=Path, help="folder of published predictions (default: left out)")
    parser.add_argument("--measure", action="store_true", help="measure first, and write --stored anew")
    parser.add_argument("--model", nargs=2, action="append", default=[], metavar=("FOLDER", "TEXT"), help="one more")
    parser.add_argument("--draws", type=int, default=2000, help="evaluations a row (default: %(default)s)")
    parser.add_argument("--share", type=float, default=0.2, help="of the items (default: %(default)s)")
    parser.add_argument("--sweep", action="store_true", help="compare sweeps of drawn items with those of all, only")
    parser.add_argument("--methods", default="rtn,gptq,awq,hqq", help="of the sweeps (default: %(default)s)")
    parser.add_argument("--tasks", default="auto", help="of the sweeps (default: the demo's)")
    parser.add_argument("--data_dir", help="folder of data sets, of the sweeps or of the sentences to measure")
    parser.add_argument("--limit", type=int, default=0, help="their items per category and task (default: all)")
    given = parser.parse_args()
    if given.sweep:
        measured = list(stored(given.stored))
        same_as_all(measured, given.draws)
        errors_of_sweeps(measured, given.draws)
        errors_of_auto([one for one in measured if one.held_out and one.bits != "8"], given.draws)
        seconds_of_sweeps(given.methods, given.tasks, given.data_dir, given.limit)
        return
    if given.measure:
        from kl_against_harm import each_model

        models = each_model(measure, given.model)
        if given.data_dir:
            text = (demo.DATA_DIR / "calibration.txt").read_text(encoding="utf-8")
            models["demo, sentences"] = measure(
                "demo, sentences", demo.MODEL_DIR, SENTENCES, text, given.data_dir, given.limit
            )
        arrays = {f"{model}/{name}": array for model, one in models.items() for name, array in one.items()}
        np.savez_compressed(given.stored, **arrays)
    variants = [*stored(given.stored), *(oracle(given.oracle) if given.oracle else ())]
    readings = "benchmark | population | in groups"
    head = f"variant | held out | flips, % | of random: {readings} | covered: {readings}"
    print(f"| {head} |\n{'|---' * (head.count('|') + 1)}|")
    ratios: dict[tuple[str, bool, bool], list[Float]] = {}
    coverages: dict[str, list[Float]] = {}
    grouped: list[Float] = []
    for one in variants:
        if not (one.before != one.after).any():
            print(f"| {one.model} {one.name} | | 0 | nothing flips |", flush=True)
            continue
        kinds: list[tuple[EstimateOf, bool]] = [("benchmark", False), ("population", False), ("population", True)]
        found = [row(one, given.share, given.draws, reading, in_groups) for reading, in_groups in kinds]
        ratios.setdefault((one.bits, one.held_out, one.kl is None), []).extend(ratio for ratio, _ in found[:2])
        grouped.append(found[2][0])
        for kind, (_, covered) in zip(("benchmark", "population", "in groups"), found, strict=True):
            coverages.setdefault(kind, []).append(covered)
        cells = [f"{a:.2f}, {b:.2f}" for (a, b), _ in found] + [f"{a:.1f}, {b:.1f}" for _, (a, b) in found]
        flips = f"{100 * (one.before != one.after).mean():.2f}"
        print(
            f"| {one.model} {one.name} | {'yes' if one.held_out else 'no'} | {flips} | {' | '.join(cells)} |",
            flush=True,
        )
    print()
    for (bits, held_out, published), values in sorted(ratios.items()):
        flat = np.concatenate(values)
        known = flat[np.isfinite(flat)]
        print(
            f"{bits} bits, {'published confidences' if published else 'held out' if held_out else 'chosen on'}: "
            f"{len(values) // 2} variants, of random: median "
            f"{np.median(known):.2f}, largest {known.max():.2f}"
        )
    known = np.concatenate(grouped)[np.isfinite(np.concatenate(grouped))]
    print(f"in groups, of random in groups: median {np.median(known):.2f}, largest {known.max():.2f}")
    for kind, covered in coverages.items():
        every = np.concatenate(covered)
        enough, inside = 100 * (every >= 93).mean(), 100 * ((every >= 93) & (every <= 97)).mean()
        ends = f"{every.min():.1f} to {every.max():.1f} %, median {np.median(every):.1f}"
        print(f"covered, {kind}: {ends}; at least 93 in {enough:.0f} % of the cells, from 93 to 97 in {inside:.0f} %")
    certificates([one for one in variants if one.certificate is not None])
    forecasts(variants)
    # The gate's stakes were chosen on rtn, awq and gptq of the demo.
    measured = [one for one in variants if one.kl is not None]
    gates([one for one in measured if one.model != "demo" or not one.name.startswith(("rtn", "awq", "gptq"))])


EIGHT = [f"{method}-{rest}" for method in ("rtn", "gptq", "awq", "hqq") for rest in ("8-channel", "4-32")]


def board_of(eight: list[Variant], sizes: list[SampleSize], seed: int) -> tuple[Scoreboard, tuple[str, ...], int]:
    """Return the scoreboard of eight variants, which of them pass the default policy, and how many items they took."""
    scored, passed, taken = [], [], 0
    for one, size in zip(eight, sizes, strict=True):
        rows = np.arange(len(one.lead))
        some, now = drawn_rows(one, rows, size, seed)
        taken += len(some)
        kl, flips, right = one.kl[some], (one.before != one.after)[some], one.after[some].astype(np.float64)
        names = [np.full(len(some), "task", dtype=object), some.astype(str).astype(object)]
        design = None if now.design.is_whole else now.design
        items = ItemScores(*names, right, kl, flips.astype(np.float64), some, design)
        delta = one.after[some].astype(np.float64) - one.before[some]
        means = {name: weighted_mean(x, now.design) for name, x in ((KL, kl), (FLIPS, 100 * flips), (DELTA, delta))}
        results = {name: MetricResult(name, mean.value, n=mean.n) for name, mean in means.items()}
        scored.append(ScoredVariant(name=one.name, method=one.name[:3], results=results, items=items))
        if all(passes and needed <= 1 for passes, needed in standings(Policy(), now, level=0.95)):
            passed.append(one.name)
    return scoreboard(scored, baseline="demo", evaluation="one"), tuple(passed), taken


def in_rounds(eight: list[Variant], seed: int) -> tuple[Scoreboard, tuple[str, ...], int]:
    """Return what `board_of` does of a sweep with items=auto, which adds items where variants cannot be told apart."""
    n = len(eight[0].lead)
    sizes = [SampleSize(policy=Policy())] * len(eight)
    for more in range(4):
        outcome = board_of(eight, sizes, seed)
        wanted = more_items(outcome[0], Policy()) if more < 3 else {}
        if not wanted:
            break
        counts = {name: count if more < 2 else n for name, (count, _) in wanted.items()}
        sizes = [
            replace(size, more=(*size.more, counts[one.name])) if one.name in counts else size
            for one, size in zip(eight, sizes, strict=True)
        ]
    return outcome


def same_as_all(variants: list[Variant], draws: int) -> None:
    """Print in how many sweeps of drawn items the groups of ties, and who passes, are those of all items."""
    eight = [one for one in variants if one.model == "demo" and one.name in EIGHT]
    n = len(eight[0].lead)
    every, passes, _ = board_of(eight, [SampleSize(count=n)] * len(eight), 0)
    print(f"all items: tied by KL {every.groups[KL]}, by accuracy {every.groups[DELTA]}, pass {passes}")
    same, pairs, shares, least = np.zeros(3), np.zeros(2), [], MATTERS * Policy().kl.max_kl  # type: ignore[union-attr]
    known = [(frozenset((s.first, s.second)), s.kl) for s in every.separations if s.kl is not None]
    matter = {pair for pair, kl in known if max(-kl.low, kl.high) >= least}
    for seed in range(draws):
        board, passed, taken = in_rounds(eight, seed)
        shares.append(taken / n / len(eight))
        same += [*(board.groups[x] == every.groups[x] for x in (KL, DELTA)), passed == passes]
        pairs += [told_apart(board, kl, matter) == told_apart(every, kl, matter) for kl in (True, False)]
    ties, apart = 100 * same / draws, 100 * pairs / draws
    print(
        f"{draws} sweeps of drawn items: {100 * np.mean(shares):.0f} % of the items; as with all items: who passes in "
        f"{ties[2]:.1f} %; told apart by KL, of {len(matter)} pairs whose difference may matter, {apart[0]:.1f} %, by "
        f"accuracy {apart[1]:.1f} %; all groups of ties by KL {ties[0]:.1f} %, by accuracy {ties[1]:.1f} %"
    )


def errors_of_sweeps(variants: list[Variant], draws: int) -> None:
    """Print how often sweeps tell apart any two variants that are equal in truth; 5 % of the sweeps may.

    Eight variants are four pairs. The two of a pair swap half of their answers by chance, so that both are drawn from
    the same; the items are drawn with replacement from those of the demo, for each sweep anew.
    """
    eight = sorted((one for one in variants if one.model == "demo" and one.name in EIGHT), key=lambda one: one.bits)
    n, rng = len(eight[0].lead), np.random.default_rng(0)
    equal = {frozenset((a.name, b.name)) for a, b in zip(eight[::2], eight[1::2], strict=True)}
    wrong = np.zeros((2, 2))
    for seed in range(draws):
        rows, swapped = rng.integers(0, n, n), []
        for pair in zip(eight[::2], eight[1::2], strict=True):
            coin = rng.random(n) < 0.5
            for one, other in (pair, pair[::-1]):
                assert one.kl is not None and other.kl is not None
                after, kl = np.where(coin, one.after, other.after)[rows], np.where(coin, one.kl, other.kl)[rows]
                swapped.append(replace(one, lead=one.lead[rows], before=one.before[rows], after=after, kl=kl))
        boards = board_of(swapped, [SampleSize(count=n)] * len(eight), seed)[0], in_rounds(swapped, seed)[0]
        wrong += [[bool(told_apart(board, kl, equal)) for kl in (True, False)] for board in boards]
    every, drawn = 100 * wrong / draws
    print(
        f"{draws} sweeps of four pairs of equal variants: any of them told apart by KL in {drawn[0]:.1f} % with "
        f"items=auto, {every[0]:.1f} % with all items; by accuracy in {drawn[1]:.1f} and {every[1]:.1f} % (may: 5 %)"
    )


def errors_of_auto(variants: list[Variant], draws: int) -> None:
    """Print how often a policy that a variant meets exactly passes or fails it surely.

    One gate, on flips or on the accuracy change, has what the variant truly has as its limit. The items are drawn with
    replacement for each evaluation anew. With all items 2.5 % may pass and 2.5 % fail, with items=auto 4.5 %.
    """
    rates: dict[str, list[Float]] = {"flips": [], "accuracy change": []}
    rng = np.random.default_rng(0)
    for one in variants:
        n, flips, change = len(one.lead), float((one.before != one.after).mean()), one.after.mean() - one.before.mean()
        gates_of = {"flips": Policy(kl=None, margins=()).overridden(max_flips_pct=100 * flips)}
        if change < 0:
            gates_of["accuracy change"] = Policy(kl=None, gates=()).overridden(max_accuracy_drop_pct=-100 * change)
        for name, policy in gates_of.items():
            counts = np.zeros(5)
            for draw in range(draws):
                rows = rng.integers(0, n, n)
                for place, size in ((0, SampleSize(policy=policy)), (2, SampleSize(count=n))):
                    some, now = drawn_rows(one, rows, size, (draw, 2))
                    ((passes, needed),) = standings(policy, now, level=0.95)
                    counts[place + (not passes)] += needed <= 1
                    counts[4] += len(some) / n if place == 0 else 0
            rates[name].append(100 * counts / draws)
    for name, found in rates.items():
        mean, most = np.mean(found, axis=0), np.max(found, axis=0)
        print(
            f"limit on {name} exactly met, {len(found)} variants, {draws} draws each: items=auto passes "
            f"{mean[0]:.1f} % (at most {most[0]:.1f}) and fails {mean[1]:.1f} % ({most[1]:.1f}), with {mean[4]:.0f} % "
            f"of the items; all items pass {mean[2]:.1f} % ({most[2]:.1f}) and fail {mean[3]:.1f} % ({most[3]:.1f})"
        )


def told_apart(board: Scoreboard, by_kl: bool, pairs: set[frozenset[str]]) -> set[frozenset[str]]:
    """Return which of some pairs are told apart by KL, or by accuracy."""
    tests = ((frozenset((s.first, s.second)), s.kl if by_kl else s.correctness) for s in board.separations)
    return {pair for pair, test in tests if pair in pairs and test is not None and test.significant}


def seconds_of_sweeps(methods: str, tasks: str, data: str | None, limit: int) -> None:
    """Print what a sweep at 8 and 4 bits takes with all items and with drawn ones, and what each finds."""

    def processor_seconds() -> float:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return ended.ru_utime + ended.ru_stime

    options = [f"--methods={methods}", "--bits=8,4", f"--tasks={tasks}", f"--limit={limit}", "--num_shuffles=0"]
    options += [
        "--task_args",
        "noise_items=20",
        "--judge=false",
        "--speed=false",
        *([f"--data_dir={data}"] if data else []),
    ]
    for items in ("all", "auto"):
        with tempfile.TemporaryDirectory() as scratch:
            wall, processor = time.monotonic(), processor_seconds()
            command = [sys.executable, "-m", "mlflow_compress", "sweep", *options, f"--items={items}"]
            place = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{scratch}/runs.db"}
            subprocess.run([*command, f"--output_dir={scratch}/checkpoints"], env=place, check=True)
            spent = time.monotonic() - wall, processor_seconds() - processor
            print(f"items={items}: {spent[0]:.0f} s, of processors {spent[1]:.0f} s", flush=True)


def gates(variants: list[Variant], orders: int = 20, error: float = 0.05, block: int = 20) -> None:
    """Print which share of the items gates look at: all in random order, or some passed over by a chance that is known.

    An item of a random order is scored with probability a = max(floor, min(1, spread guessed from its lead over the
    mean)), and its value is then weighted by 1/a; else it counts as 0. The mean is the same, and the bets are valid,
    but the bound is 1/floor. No design can pass a limit on a share m with fewer items than ln(1/error)/-ln(1 - m): a
    share of m in every stratum shows nothing in n items, however they are drawn, with probability (1 - m)^n.
    """
    rng = np.random.default_rng(0)
    policies = {
        "default": Policy(),
        "middle": Policy().overridden(max_kl=0.03, max_kl_outliers_pct=2, max_flips_pct=4, max_accuracy_drop_pct=3),
        "wide": Policy().overridden(max_kl=0.2, max_kl_outliers_pct=5, max_flips_pct=15, max_accuracy_drop_pct=5),
    }
    every_item = {one.model: len(one.lead) for one in variants}
    for floor in (1.0, 0.8, 0.65, 0.5):
        medians: dict[tuple[str, str], list[float]] = {(m, policy): [] for m in every_item for policy in policies}
        for one in variants:
            n, change = len(one.lead), one.after.astype(np.float64) - one.before
            guess = GUESS.probability(one.lead)
            guess = np.sqrt(guess * (1 - guess))
            chance = np.maximum(floor, np.minimum(1, guess / guess.mean()))
            values = {
                "distance/kl_clipped_mean": np.minimum(one.kl, 1),
                "distance/kl_above_clip_pct": (one.kl > 1).astype(np.float64),
                "distance/flips_pct": np.abs(change),
                "quality/accuracy_delta": change,
            }
            for name, policy in policies.items():
                claims = [(check.claim, values[check.metric]) for check in item_policy(policy).checks]
                shares = []
                for _ in range(orders):
                    order = rng.permutation(n)
                    scored = (rng.random(n) < chance)[order]
                    paths = [
                        p_values(
                            replace(claim, low=claim.low / floor, high=claim.high / floor),
                            scored * x[order] / chance[order], error=error, n_checks=len(claims),
                        )
                        for claim, x in claims
                    ]  # fmt: skip
                    share = 1.0  # where it stays open, all items are scored
                    for end in [*range(block, n, block), n]:
                        found = verdicts([w[end - 1] for w, _ in paths], [r[end - 1] for _, r in paths], error=error)
                        if "fail" in found or set(found) == {"pass"}:
                            share = scored[:end].mean() * end / n
                            break
                    shares.append(share)
                medians[one.model, name].append(float(np.median(shares)))
        print(f"gates, floor {floor:g}: {_shares(medians.values())}")
        for model, n in every_item.items():
            of = {policy: found for (name, policy), found in medians.items() if name == model}
            each = ", ".join(f"{policy} {100 * np.median(found):.0f}" for policy, found in of.items())
            print(f"- {model}, {n:,} items: {_shares(of.values())}; by policy: {each}")


def _shares(rows: Iterable[list[float]]) -> str:
    every = np.concatenate(list(rows))
    return (
        f"{100 * np.median(every):.1f} % of the items in the median, {100 * every.mean():.0f} in the mean, of "
        f"{len(every)} held-out rows"
    )


def certificates(variants: list[Variant]) -> None:
    """Print how many answers changed although the KL is too small for it; KL is stored to a thousandth."""
    certain = wrong = asked = 0
    for one in variants:
        known = np.isfinite(one.certificate)
        below = known & (1.002 * one.kl + 1e-6 < one.certificate)
        asked, certain, wrong = (
            asked + int(known.sum()),
            certain + int(below.sum()),
            wrong + int((below & one.changed).sum()),
        )
    print(f"certificates: {certain:,} of {asked:,} answers of lettered items cannot have changed; {wrong} of them did")


def forecasts(variants: list[Variant]) -> None:
    """Print how far forecasts of each task's flips, from the other tasks of the model, are from what was seen."""
    errors: list[float] = []
    held: list[bool] = []
    for one, other in split_by_task(variants):
        found = forecast_flips(one.lead, one.before != one.after, one.part, other.lead, other.part, draws=100)
        share, interval = found.share(slice(None))
        seen = float((other.before != other.after).mean())
        errors.append(100 * abs(share - seen))
        if interval is not None:
            held.append(interval.low <= seen <= interval.high)
    if errors:
        print(
            f"forecasts of {len(errors)} tasks that were not run: median error {np.median(errors):.2f} points, "
            f"90 % within {np.quantile(errors, 0.9):.2f}; inside {100 * np.mean(held):.0f} % of {len(held)} intervals"
        )


def split_by_task(variants: list[Variant]) -> Iterator[tuple[Variant, Variant]]:
    """Iterate over pairs of a variant's items of all tasks but one, and those of that one."""
    joined: dict[tuple[str, str], list[Variant]] = {}
    for one in variants:
        joined.setdefault((one.model, one.name.split(" ")[0]), []).append(one)
    for several in joined.values():
        columns = {
            x: np.concatenate([getattr(v, x) for v in several]) for x in ("lead", "before", "after", "changed", "part")
        }
        first = several[0]
        whole = Variant(first.model, first.name, first.bits, **columns)
        for part in np.unique(whole.part):
            inside = whole.part == part
            if inside.all() or inside.sum() < 100:
                continue
            yield tuple(  # type: ignore[misc]
                Variant(first.model, first.name, first.bits, **{x: values[rows] for x, values in columns.items()})
                for rows in (~inside, inside)
            )


if __name__ == "__main__":
    main()
