"""The judge stage on a checkpoint as other tools save them: without the chat template."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlflow_compress import demo
from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.commands.judge.run import _vectors, run_judge
from mlflow_compress.compression import compress_model
from mlflow_compress.compression.checkpoint_manifest import CheckpointManifest, hash_others
from mlflow_compress.errors import ConfigError
from mlflow_compress.judges import Judged
from mlflow_compress.judges.judge_registry import AnswerVectors
from mlflow_compress.tracking.tracker import Tracker

pytestmark = pytest.mark.filterwarnings("ignore")


def test_both_models_are_asked_in_the_baselines_chat_template(
    workdir: Path, tracker: Tracker, no_fresh_process: None
) -> None:
    compress_model(str(demo.MODEL_DIR), "none", None, [], workdir / "out")
    (workdir / "out" / "chat_template.jinja").unlink()
    saved = CheckpointManifest.read(workdir / "out", verify=False)
    replace(saved, other_files=hash_others(workdir / "out")).write(workdir / "out")
    run_judge(
        JudgeConfig(
            checkpoint=str(workdir / "out"), instruction_limit=1, num_samples=2, max_new_tokens=8, judge_max_tokens="8"
        )
    )
    [judged] = tracker.find_finished("judge")
    # The same model under the same prompts: its sampled answers are exactly the baseline's second sample.
    assert judged.data.metrics["judge/similarity"] == judged.data.metrics["judge/similarity_floor"]
    assert judged.data.metrics["judge/identical_answers_pct"] == 100.0 and judged.data.metrics["judge/kl_greedy"] == 0.0
    # The runs of the baseline's answers are no variant's: they stand in the experiment beside this one.
    runs = tracker.client.search_runs([tracker.experiment_id])
    assert {run.data.tags["stage"] for run in runs} == {"judge", "answers", "greedy"}


def test_two_judges_that_embed_are_refused_and_named() -> None:
    same = {who: np.ones((1, 2, 3), dtype=np.float32) for who in ("baseline", "variant", "again")}
    vectors = AnswerVectors("instructions", ("i",), same, "encoder", "id")
    assert _vectors({"a": Judged(vectors=vectors), "rates": Judged()}) is vectors
    assert _vectors({"rates": Judged()}) is None
    with pytest.raises(ConfigError, match="a, b"):
        _vectors({"a": Judged(vectors=vectors), "b": Judged(vectors=vectors)})
