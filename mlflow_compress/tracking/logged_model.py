"""The MLflow model of a variant: parameters, metrics linked to data sets, code, and the weights."""

import json
import logging
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mlflow
import pandas as pd
from mlflow import entities
from mlflow.models import Model, ModelSignature
from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema
from mlflow.types.llm import CHAT_MODEL_OUTPUT_SCHEMA
from mlflow.types.schema import AnyType
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT, MLFLOW_RUN_NOTE

from mlflow_compress.errors import CheckpointError
from mlflow_compress.files import read_json_object
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.live_processes import scratch_folder
from mlflow_compress.tracking.task_source import SOURCE_TYPE
from mlflow_compress.tracking.tracker import Tracker, models_of_run

PACKAGE_FOLDER = Path(__file__).resolve().parents[1]

# Distributions that loading and scoring import for every checkpoint format. A test compares them with a fresh process.
_ALWAYS = (
    "mlflow", "pandas", "torch", "transformers", "tokenizers", "accelerate", "safetensors", "huggingface_hub", "numpy",
    "pyarrow", "numba", "llvmlite", "tqdm", "jinja2", "pydantic", "pyyaml",
)  # fmt: skip
# Distributions that load a quantized checkpoint, by the `quant_method` of its configuration.
_BY_METHOD = {
    "compressed-tensors": ("compressed-tensors",),
    "bitsandbytes": ("bitsandbytes",),
    "torchao": ("torchao",),
    "gptq": ("gptqmodel", "optimum"),
    "awq": ("gptqmodel", "optimum"),
}
GGUF_REQUIREMENTS = ("gguf", "llama-cpp-python")


def requirements(checkpoint: Path | None) -> list[str]:
    """Return `name==version` of every installed package that loads and scores a checkpoint, if there is one.

    Versions have no local part ("2.13.0", not "2.13.0+cpu"), because package indexes do not have it.
    """
    optional: list[str] = []
    if checkpoint is not None:
        config = read_json_object(checkpoint / "config.json", error=CheckpointError)
        method = str((config.get("quantization_config") or {}).get("quant_method"))
        optional = [*_BY_METHOD.get(method, ()), *(GGUF_REQUIREMENTS if any(checkpoint.glob("*.gguf")) else ())]
    pinned = []
    for name in (*_ALWAYS, *optional):
        with suppress(PackageNotFoundError):
            pinned.append(f"{name}=={version(name).partition('+')[0]}")
    return pinned


def _copy_code(folder: Path) -> Path:
    """Copy this package's Python files into `folder` and return the copy. Demo data and caches are not copied."""

    def other(directory: str, entries: list[str]) -> list[str]:
        return [
            e for e in entries if not e.endswith(".py") and (e == "__pycache__" or not (Path(directory) / e).is_dir())
        ]

    return Path(shutil.copytree(PACKAGE_FOLDER, folder / PACKAGE_FOLDER.name, ignore=other))


_AUTO_LIMIT = 2 * 2**30
"""Largest checkpoint, in bytes, that log_weights="auto" stores with its model."""

_MODEL_FILE = Path(__file__).with_name("variant_model.py")
_CHECKPOINT = "checkpoint"  # folder next to variant.json with the stored weights
_RESERVED = "/:.%\"'"  # characters that MLflow refuses in the name of a logged model
EVALUATION_SET = "evaluation"
"""Name of the data set of pooled values. It stands for all tasks and settings; its digest is the evaluation id."""

_SIGNATURE = ModelSignature(
    # Texts. In a column that is declared as "string", MLflow's server turns null into the text "None".
    inputs=Schema([ColSpec(AnyType(), name, required=False) for name in ("prompt", "continuation", "messages")]),
    # A prompt's text, a continuation's score, or a chat completion.
    outputs=Schema(
        [
            ColSpec(kind, name, required=False)
            for name, kind in {
                "text": "string",
                "loglik": "double",
                "n_tokens": "long",
                "greedy": "boolean",
                **{c.name: c.type for c in CHAT_MODEL_OUTPUT_SCHEMA.inputs if c.name != "custom_outputs"},
            }.items()
        ]
    ),
    params=ParamSchema(
        [
            ParamSpec("max_new_tokens", "long", 128),
            ParamSpec("temperature", "double", 0.0),
            ParamSpec("seed", "long", 0),
        ]
    ),
)
"""Columns and parameters of `VariantModel.predict`."""


@dataclass(frozen=True, kw_only=True)
class VariantEntry:
    """A variant as it is logged to MLflow's models page."""

    name: str  # The variant's name
    checkpoint: Path | None  # The checkpoint's folder; None of a served model
    checkpoint_sha256: str  # Distinguishes it from other checkpoints of that name
    weight_files: Mapping[str, str]  # SHA-256 of every weight file
    dtype: str  # Dtype of its evaluation, in which it is also loaded
    params: Mapping[str, object]  # Settings, with "auto" resolved
    tags: Mapping[str, str]  # Tags for searches
    log_weights: str = "auto"  # "true", "false" or "auto" (up to `_AUTO_LIMIT`)
    # Who serves what where, and the run that has measured it; None of a checkpoint
    served: Mapping[str, str] | None = None

    @property
    def storage(self) -> str:
        """Where the weights are: "logged" with the model, in a folder that it refers to ("reference"), or "served"."""
        if self.checkpoint is None:
            return "served"
        logged = self.log_weights == "true"
        if self.log_weights == "auto":
            files = (path for path in self.checkpoint.rglob("*") if path.is_file())
            logged = sum(path.stat().st_size for path in files) <= _AUTO_LIMIT
        return "logged" if logged else "reference"


def log_variant_model(tracker: Tracker, run_id: str, entry: VariantEntry) -> str:
    """Log the variant of a main run as an MLflow model, and return its id. A resumed run keeps its model."""
    client = tracker.client
    storage = entry.storage
    identity = {run_names.CHECKPOINT_SHA256: entry.checkpoint_sha256, run_names.WEIGHTS_KEPT: storage}
    run = client.get_run(run_id)
    for logged in models_of_run(client, run):
        if identity.items() <= logged.tags.items():
            return str(logged.model_id)
    note, reference = "The weights are stored with this model.", {}
    if storage == "reference":
        note = f"The weights are not stored here: this model refers to the folder {entry.checkpoint}."
        reference = {run_names.CHECKPOINT: str(entry.checkpoint)}
    if entry.served is not None:
        note = f"No weights are stored here: {entry.served['served_model']} is served at {entry.served['endpoint']}."
        reference = dict(entry.served)
    model = client.create_logged_model(
        run.info.experiment_id,
        name="".join("-" if c in _RESERVED else c for c in entry.name),
        source_run_id=run_id,
        tags={**entry.tags, **identity, **reference, MLFLOW_RUN_NOTE: note},
        params={key: str(value) for key, value in entry.params.items()},
    )
    try:
        with scratch_folder(tracker.uri) as folder:
            local = _saved(folder, entry, storage, Model(run_id=run_id, model_id=model.model_id))
            client.log_model_artifacts(model.model_id, str(local))
        if storage == "logged":
            checkpoint = str(entry.checkpoint), f"artifacts/{_CHECKPOINT}"
            client.wait_for(lambda: client.impatient.log_model_artifacts(model.model_id, *checkpoint), long=True)
    except BaseException:
        client.finalize_logged_model(model.model_id, entities.LoggedModelStatus.FAILED)
        raise
    client.finalize_logged_model(model.model_id, entities.LoggedModelStatus.READY)
    client.log_outputs(run_id, [entities.LoggedModelOutput(model.model_id, step=0)])
    return str(model.model_id)


def _saved(folder: Path, entry: VariantEntry, storage: str, meta: Model) -> Path:
    """Save the MLflow model without its weights, and return its folder."""
    description = folder / "variant.json"
    checkpoint = _CHECKPOINT if storage == "logged" else None if entry.checkpoint is None else str(entry.checkpoint)
    description.write_text(
        json.dumps(
            {
                "name": entry.name,
                "weights": storage,
                "checkpoint": checkpoint,
                "weight_files": dict(entry.weight_files),
                "dtype": entry.dtype,
                **({} if entry.served is None else {"served": dict(entry.served)}),
            },
            indent=2,
        ),
        encoding="utf-8",
    )
    with ExitStack() as at_end:
        at_end.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.INFO)  # MLflow announces that it validates the example
        mlflow.pyfunc.save_model(
            str(folder / "model"),
            python_model=str(_MODEL_FILE),
            artifacts={"variant": str(description)},
            mlflow_model=meta,
            signature=_SIGNATURE,
            input_example=(pd.DataFrame({"prompt": ["Once upon a time"]}), {"max_new_tokens": 16}),
            code_paths=[str(_copy_code(folder))],
            # If they are not given, MLflow loads the model to find them.
            pip_requirements=requirements(entry.checkpoint),
        )
    saved = Model.load(str(folder / "model"))
    flavor = saved.flavors["python_function"]  # MLflow notes where the files were; they are loaded from beside it
    flavor["model_code_path"] = _MODEL_FILE.name
    flavor["artifacts"]["variant"]["uri"] = flavor["artifacts"]["variant"]["path"]
    saved.save(str(folder / "model" / "MLmodel"))
    return folder / "model"


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """The data set of a metric: a task of the suite, or the complete evaluation."""

    name: str  # The task's name; `EVALUATION_SET` for the complete evaluation
    # SHA-256 of the content, or the evaluation id. 16 characters are logged, because MLflow stores at most 36.
    digest: str
    source: Mapping[str, object]  # Where the data come from, as far as known


def log_data_sets(tracker: Tracker, run_id: str, data_sets: Sequence[DataSet]) -> None:
    """Log data sets as inputs of a run."""
    context = [entities.InputTag(MLFLOW_DATASET_CONTEXT, "eval")]
    inputs = [
        entities.DatasetInput(
            entities.Dataset(
                name=s.name, digest=s.digest[:16], source_type=SOURCE_TYPE, source=json.dumps(dict(s.source))
            ),
            context,
        )
        for s in data_sets
    ]
    tracker.client.log_inputs(run_id, inputs)


def log_model_input(tracker: Tracker, run_ids: Iterable[str], model_id: str) -> None:
    """Log a model as the input of the runs that have measured it, as MLflow's pages of model and runs show it."""
    for run_id in run_ids:
        tracker.client.log_inputs(run_id, models=[entities.LoggedModelInput(model_id)])


def log_model_values(
    tracker: Tracker, run_id: str, model_id: str, values: Mapping[str, float], data_set: DataSet | None = None
) -> None:
    """Log metrics to a run and a model, so that `mlflow.search_logged_models` can filter and rank by them."""
    now = int(time.time() * 1000)
    link = {"dataset_name": data_set.name, "dataset_digest": data_set.digest[:16]} if data_set else {}
    metrics = [entities.Metric(key, float(value), now, 0, model_id=model_id, **link) for key, value in values.items()]
    tracker.client.log_batch(run_id, metrics=metrics)
