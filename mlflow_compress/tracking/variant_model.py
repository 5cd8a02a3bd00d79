"""The pyfunc model of a variant, which generates and scores (MLflow: "models from code").

MLflow runs this file also when a model is logged. So torch and the scoring engine are imported only to load a model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
from mlflow.pyfunc import PythonModel, PythonModelContext


class VariantModel(PythonModel):  # type: ignore[misc]
    """A compressed checkpoint with MLflow's interface `predict`.

    `predict` takes a table. With a column "prompt" alone, it generates and returns "text". With a second column
    "continuation", it scores each row and returns "loglik", "n_tokens" and "greedy". Parameters: `max_new_tokens`
    (default 128), `temperature` (default 0: greedy) and `seed`.
    """

    def load_context(self, context: PythonModelContext) -> None:
        """Check the checkpoint against its recorded hashes and load it."""
        from mlflow_compress.compression.checkpoint_manifest import MANIFEST_FILE, CheckpointManifest
        from mlflow_compress.errors import CheckpointError
        from mlflow_compress.files import read_json_object
        from mlflow_compress.models.loading import LoadConfig, load_model

        description = Path(context.artifacts["variant"])
        variant = read_json_object(description, error=CheckpointError)
        if variant["weights"] == "served":
            served = variant["served"]
            raise CheckpointError(
                "This model was evaluated where it is served, and has no weights here",
                got=served["served_model"],
                fix=f"Ask the server at {served['endpoint']} for it",
            )
        folder = description.parent / variant["checkpoint"]  # an absolute path stays what it is
        if variant["weights"] == "reference" and not (folder / MANIFEST_FILE).is_file():
            raise CheckpointError(
                "This model was registered by reference, and its checkpoint is not on this machine",
                allowed="the folder that the quantize stage wrote",
                got=str(folder),
                fix="Copy the folder here, or run the main job again with log_weights=true",
            )
        manifest = CheckpointManifest.read(folder)
        if manifest.weight_files != variant["weight_files"]:
            raise CheckpointError("The checkpoint has changed since it was registered", got=str(folder))
        self._loaded = load_model(LoadConfig(path=str(folder), dtype=variant["dtype"]))

    # MLflow reads the type hint of `model_input` as a schema, except for a DataFrame.
    def predict(
        self, context: PythonModelContext, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        """Generate after each prompt, or score each continuation."""
        from mlflow_compress.records import Request
        from mlflow_compress.scoring.engine import Scorer, ScoringConfig
        from mlflow_compress.scoring.generation.generate import generate
        from mlflow_compress.scoring.generation.generation_rows import GenerationConfig

        frame = _rows(pd.DataFrame(model_input))
        if "continuation" not in frame:
            known = params or {}
            config = GenerationConfig(
                max_new_tokens=int(known.get("max_new_tokens", 128)),
                temperature=float(known.get("temperature", 0.0)),
                seed=int(known.get("seed", 0)),
                samples=1,
            )
            texts = generate(self._loaded, list(frame["prompt"]), config)
            return pd.DataFrame({"text": [samples[0] for samples in texts]})
        requests = [
            Request("predict", str(row), 0, 0, 0, prompt, text, len(text), len(text.encode()))
            for row, (prompt, text) in enumerate(zip(frame["prompt"], frame["continuation"], strict=True))
        ]
        scores, _ = Scorer(self._loaded, ScoringConfig()).score(requests)
        table = scores.table.to_pandas().set_index("item_id").loc[[str(row) for row in range(len(frame))]]
        return table[["loglik", "n_tokens", "greedy"]].reset_index(drop=True)


def _rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per prompt: a dictionary of lists comes as one row of lists. What is no text is refused."""
    columns = [name for name in ("prompt", "continuation") if name in frame]
    if "prompt" not in columns:
        raise ValueError(f"The input needs a column 'prompt' (and 'continuation' to score). Got: {list(frame)}")
    frame = frame[columns].explode(columns, ignore_index=True)
    if "continuation" in columns and frame["continuation"].isna().all():
        frame = frame[["prompt"]]
    for name in frame:
        wrong = [row for row, value in enumerate(frame[name]) if not isinstance(value, str)]
        if wrong:
            raise ValueError(
                f"Column '{name}' of row {wrong[0]} holds no text. Allowed: a prompt in every row, and a continuation "
                f"in every row or in none. Got: {frame[name][wrong[0]]!r}"
            )
    return frame


mlflow.models.set_model(VariantModel())
