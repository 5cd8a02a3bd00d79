"""A served variant's second answers to some of the prompts: a server may answer otherwise each time."""

from __future__ import annotations

from pathlib import Path

from mlflow_compress.config import EvaluateConfig
from mlflow_compress.items.suite import Suite
from mlflow_compress.records import RunRecords
from mlflow_compress.scoring.endpoint.endpoint_scorer import EndpointScorer
from mlflow_compress.scoring.endpoint.top_lists import ShownLists
from mlflow_compress.stages.evaluation.noise_sample import noise_sample
from mlflow_compress.stages.evaluation.run_model import run_model
from mlflow_compress.tracking.run_names import NOISE

_SHOWN = "shown"  # sub-folder of unfinished work: the lists of the first answers


def asked_twice(first: EndpointScorer, suite: Suite, config: EvaluateConfig, resume: Path) -> RunRecords | None:
    """Return the records of the second answers, with their distances from the first; None where nothing is scored.

    Parameters
    ----------
    first : EndpointScorer
        What has scored the variant on the whole suite.
    suite : Suite
    config : EvaluateConfig
        `noise_items` bounds what is asked twice, as for the baseline.
    resume : Path
        Folder of unfinished results.
    """
    if not suite.is_scored:
        return None
    sample = noise_sample(suite, config.evaluation.noise_items, seed=config.source.seed)
    lists = ShownLists.write(resume / _SHOWN, first.shown)
    again = EndpointScorer(first.loaded, repeat=1)
    return run_model(again, sample, baseline=lists, generations=False, resume=resume / NOISE).records
