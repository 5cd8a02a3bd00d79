"""Real KL per item, which the study of intervals draws from: the demonstration model compressed, and scored.

Writes one array per variant and family of tasks (nats, float32): lettered, cloze, last words, the lettered and cloze
items together (which the headline is the mean of), and the means of the corpus's windows. About ten minutes for all on
one core; a file that is there already is only read.

Example
-------
python benchmarks/interval_samples.py --out kl_per_item.npz
"""

import argparse
import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mlflow_compress import demo
from mlflow_compress.commands.evaluate.outputs import run_model
from mlflow_compress.compression import compress_model, method_config
from mlflow_compress.items.suite import Suite, load_suite
from mlflow_compress.items.task import TaskSettings
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.token_groups import token_groups
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model
from mlflow_compress.scoring.baseline_store import StateStore, StateWriter
from mlflow_compress.scoring.engine import Scorer, ScoringConfig

Samples = dict[str, npt.NDArray[np.float64]]

VARIANTS: list[tuple[str, dict[str, str]]] = [
    *((method, {"bits": bits}) for method in ("rtn", "gptq", "awq") for bits in ("4", "3")),
    ("wanda", {"sparsity": "0.5"}),
    ("layer-drop", {"layers": "1"}),
]
FAMILIES = ("lettered", "cloze", "last_word")


def questions() -> Suite:
    """Return the demo's items that have a KL, in their original order, and its corpus."""
    suite = load_suite("demo", model="demo", settings=TaskSettings(num_fewshot=5, num_shuffles=0, seed=42, limit=0))
    return dataclasses.replace(suite, tasks=tuple(task for task in suite.tasks if task.family in FAMILIES))


def load(folder: Path) -> LoadedModel:
    """Load a model on the CPU."""
    return load_model(LoadConfig(path=str(folder), device="cpu"))


def kl_per_item(inputs: MetricInputs) -> Samples:
    """Return the KL of every item by family, of the pooled items, and the mean KL of every window of the corpus."""
    kl, family = inputs.distance("kl"), inputs.view.family
    found = {name: kl[family == name] for name in FAMILIES}
    found["pooled"] = kl[np.isin(family, inputs.view.choice)]
    variant = inputs.variant
    _, window = np.unique(token_groups(variant.token_scores).window, return_inverse=True)
    found["windows"] = np.bincount(window, variant.token_distances.column("kl")) / np.bincount(window)
    return found


def make(out: Path) -> None:
    """Compress and score every variant, and write `out`."""
    suite, found = questions(), {}
    calibration = [(demo.DATA_DIR / "calibration.txt").read_text()]
    quiet = ScoringConfig(progress=False)
    with tempfile.TemporaryDirectory() as scratch:
        baseline, states = load(demo.MODEL_DIR), Path(scratch) / "states"
        with StateWriter(states, baseline) as writer:
            records = run_model(Scorer(baseline, quiet), suite, capture=writer, generations=False).records
        store = StateStore.open(states, baseline=baseline)
        for method, settings in VARIANTS:
            checkpoint = Path(scratch) / f"{method}-{len(found)}"
            manifest = compress_model(
                str(demo.MODEL_DIR), method, method_config(method, **settings), calibration, checkpoint
            )
            measured = run_model(Scorer(load(checkpoint), quiet), suite, baseline=store, generations=False).records
            for family, kl in kl_per_item(MetricInputs(records, measured)).items():
                found[f"{manifest.label}/{family}"] = kl.astype(np.float32)
            print(f"{manifest.label} is scored", flush=True)
    np.savez_compressed(out, **found)


def samples(path: Path) -> Samples:
    """Return the stored samples by "variant/family" in float64, made first where `path` does not exist."""
    if not path.is_file():
        make(path)
    with np.load(path) as stored:
        return {name: stored[name].astype(np.float64) for name in stored.files}


def main() -> None:
    """Write the samples and say what they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the file, *.npz")
    for name, kl in samples(parser.parse_args().out).items():
        top, skew = kl.max() / kl.sum(), ((kl - kl.mean()) ** 3).mean() / kl.std() ** 3
        print(f"{name}: {len(kl)} values, mean {kl.mean():.4g}, skewness {skew:.1f}, largest {100 * top:.1f} %")


if __name__ == "__main__":
    main()
