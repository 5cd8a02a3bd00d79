"""The baseline's share of a main run, done while its variant is compressed: `python -m ... PARAMETERS`, as JSON."""

from __future__ import annotations

import json
import sys
from contextlib import suppress

from mlflow_compress import lifetime
from mlflow_compress.commands.evaluate.run import evaluate_baseline
from mlflow_compress.commands.judge.answers import answer_baseline
from mlflow_compress.commands.main.parameters import MainConfig
from mlflow_compress.config import parse
from mlflow_compress.errors import MlflowCompressError
from mlflow_compress.kept import keeping
from mlflow_compress.tracking.tracker import Tracker

if __name__ == "__main__":
    lifetime.raise_on_signals()
    lifetime.end_with_parent()
    config = parse(MainConfig, json.loads(sys.argv[1]))
    # Evaluate and judge look for this, do it themselves where it failed, and say why it fails.
    with suppress(MlflowCompressError, KeyboardInterrupt), keeping():
        tracker = Tracker(config.experiment)
        evaluate_baseline(config.evaluate_config(), tracker)
        if config.judge:
            answer_baseline(config.judge_config(), tracker)
