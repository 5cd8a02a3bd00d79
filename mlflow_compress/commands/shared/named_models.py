"""The models that parameters name, before they are opened: baseline and variant, in folders or at servers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlflow_compress import demo
from mlflow_compress.compression.checkpoint_manifest import CheckpointManifest
from mlflow_compress.compression.method import METHODS
from mlflow_compress.config import ServedConfig, SourceConfig, is_endpoint
from mlflow_compress.errors import CheckpointError, ConfigError, MlflowCompressError
from mlflow_compress.judges.encoders import EMBEDDED_ENCODER
from mlflow_compress.models import checkpoint_config, stored_weights
from mlflow_compress.models.placement import certainly_on_cpu
from mlflow_compress.models.source_model import local_model_folder
from mlflow_compress.paths import started_in


def model_path(model: str) -> str:
    """Return the baseline's path: the folder of an embedded model, otherwise the given folder or hub id."""
    return str(demo.MODELS.get(model, model))


_SMALL = 1 << 30  # bytes of weights; up to 88 M parameters were tried, and forks were faster than threads there


def is_small(source: SourceConfig) -> bool:
    """Return whether the baseline runs on a CPU, and is so small that threads spend much time on waiting there.

    Then each core does work of its own: forks of one thread share a pass, and stages run at the same time.
    """
    if is_endpoint(source.model) or not certainly_on_cpu(source.device):
        return False
    try:
        files = checkpoint_config.weight_files(local_model_folder(model_path(source.model)))
    except MlflowCompressError:  # whatever opens it says so
        return False
    return sum(file.stat().st_size for file in files) <= _SMALL


def model_label(model: str) -> str:
    """Return the baseline's short name for run names and the registry."""
    return Path(model).name if Path(model).is_dir() else model


def baseline_label(source: SourceConfig, served: ServedConfig) -> str:
    """Return the short name of a stage's baseline: a served one has that of its server."""
    if not is_endpoint(source.model):
        return model_label(source.model)
    return served_name("baseline_served_model", served.baseline_served_model)


SERVED_METHOD = "endpoint"
"""In place of a method, where a server has the variant: who made it, and how, is not known."""


def compresses(method: str) -> bool:
    """Return whether a method compresses; others are controls. A served model counts as compressed."""
    return method == SERVED_METHOD or METHODS.get(method).compresses


@dataclass(frozen=True)
class ServedVariant:
    """What is known of a served variant beforehand, as the manifest says it of a checkpoint: not its size."""

    label: str
    method: str = SERVED_METHOD
    size_ratio: float | None = None
    sparsity: float | None = None
    cache_ratio: float | None = None


VariantManifest = CheckpointManifest | ServedVariant
"""What is known of a variant beforehand."""


def described(checkpoint: str | None, source: SourceConfig, served: ServedConfig) -> VariantManifest:
    """Return what is known of a stage's variant: its checkpoint's manifest, or the name of a served one.

    A checkpoint that was made from other weights than the baseline's is refused, unless a reason is given.
    """
    if is_endpoint(checkpoint):
        return ServedVariant(f"endpoint-{served_name('served_model', served.served_model)}")
    manifest, model = read_manifest(checkpoint), source.model
    if source.other_baseline is not None or is_endpoint(model):
        return manifest
    with folder_or_hub("model", model_path(model)):
        folder = local_model_folder(model_path(model))
    if (weights := stored_weights.hash_weights(folder)[1]) != manifest.base_weights_hash:
        raise ConfigError(
            "The checkpoint was not made from this baseline: their distance would not be that of the compression",
            allowed=f"{manifest.base_model}, weights {manifest.base_weights_hash}",
            got=f"{model}, weights {weights}",
            fix="Leave out model, which is then the checkpoint's own, or say why they are compared all the "
            "same: model_args=other_baseline=REASON",
        )
    return manifest


def read_manifest(checkpoint: str | None, *, verify: bool = True) -> CheckpointManifest:
    """Return the manifest of a complete compressed checkpoint; `verify` reads every file of it."""
    if is_endpoint(checkpoint):
        raise not_served("checkpoint", str(checkpoint))
    if not checkpoint:
        raise ConfigError("Parameter 'checkpoint' must be given", allowed="the folder that quantize wrote")
    if not Path(checkpoint).is_dir():
        raise _no_folder("checkpoint", checkpoint, allowed="the folder that quantize wrote")
    return CheckpointManifest.read(Path(checkpoint), verify=verify)


@contextmanager
def folder_or_hub(parameter: str, value: str) -> Iterator[None]:
    """Add the parameter's name, and the folder that was searched, to a `CheckpointError` about a missing model.

    Stages of an MLflow project run in other working folders, so a relative path may mean an unexpected folder.
    """
    if is_endpoint(value):
        raise not_served(parameter, value)
    exists = value in ("", EMBEDDED_ENCODER) or Path(value).is_dir()
    if not exists and (Path(value).is_absolute() or value.startswith((".", "~")) or value.count("/") > 1):
        raise _no_folder(parameter, value, allowed="a folder, or a name on the hub such as org/name")
    try:
        yield
    except CheckpointError as error:
        if exists:
            raise
        raise ConfigError(
            f"Parameter '{parameter}': {str(error).rstrip('.')}",
            fix=f"A relative folder was looked for in {started_in()}",
        ) from error


def served_name(parameter: str, name: str | None) -> str:
    """Return the name that a model has at its server; one that is not given is a `ConfigError`."""
    if not name:
        raise ConfigError(f"Parameter {parameter!r} must be given", allowed="the model's name at that server")
    return name


def not_served(parameter: str, value: str) -> ConfigError:
    """Return the error of a command that cannot work with a served model in this place."""
    return ConfigError(
        f"Parameter {parameter!r} names a served model, and this command needs one in a folder",
        got=value,
        fix="Served models are evaluated, judged and timed; compressing one, and looking into its layers, needs its "
        "weights",
    )


def _no_folder(parameter: str, value: str, *, allowed: str) -> ConfigError:
    looked = "" if Path(value).is_absolute() else f" (looked for in {started_in()})"
    return ConfigError(
        f"Parameter '{parameter}' names no folder{looked}", allowed=allowed, got=value, fix="Give its absolute path"
    )
