"""A checkpoint with its model card, licence and receipt, in a folder that can be uploaded as it is."""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from yaml import YAMLError  # type: ignore[import-untyped]

from mlflow_compress import files as atomic
from mlflow_compress.commands.compare.run import store_with
from mlflow_compress.commands.receipt.cards import card_body, card_metadata
from mlflow_compress.commands.receipt.result import Receipt
from mlflow_compress.commands.receipt.run import export_receipt
from mlflow_compress.commands.shared.named_models import not_served, read_manifest
from mlflow_compress.compression.checkpoint_manifest import CheckpointManifest, hash_others
from mlflow_compress.compression.method import METHODS
from mlflow_compress.compression.mixed_recipe import MIXED
from mlflow_compress.config import is_endpoint
from mlflow_compress.errors import ConfigError, MlflowCompressError, TrackingError
from mlflow_compress.models.checkpoint_config import CACHE_IGNORED, QUANTIZED_CACHE
from mlflow_compress.models.source_model import local_model_folder
from mlflow_compress.reporting.numbers import bytes_text
from mlflow_compress.reporting.tables import Table, escape_markdown
from mlflow_compress.tracking import run_names
from mlflow_compress.version import __version__

_LICENCES = ("LICENSE*", "LICENCE*", "COPYING*", "NOTICE*", "USE_POLICY*")
_OF_LICENCE = ("license", "license_name", "license_link")  # entries of a card
_TEXTS = (".json", ".txt", ".md", ".jinja", ".model", ".yaml")


def write_hub_folder(
    run_id: str, output: Path, base_model: str | None, policy: Path | None, key: Path | None, store: str | None
) -> Receipt:
    """Write the folder, and return its receipt."""
    checkpoint = store_with(run_id, store).look_up(run_id).tags.get(run_names.CHECKPOINT)
    if checkpoint is None:
        raise ConfigError("This run has no checkpoint", allowed="a main run or an evaluate run", got=run_id)
    if is_endpoint(checkpoint):
        raise not_served("run", checkpoint)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError("The output folder exists and is not empty", got=str(output), fix="Give a new folder")
    read_manifest(checkpoint, verify=False)  # refuses what is no checkpoint
    manifest = CheckpointManifest.read(Path(checkpoint), again=True)  # others will rely on its hashes
    named = base_model or (None if Path(manifest.base_model).is_absolute() else manifest.base_model)
    base, remarks = None, []
    try:
        base = local_model_folder(manifest.base_model)
    except MlflowCompressError as error:
        remarks.append(f"The licence of the base is not known: {str(error).rstrip('.')}")
    if named is None:
        remarks += ["The card names no base model, which was a folder: give --base-model ORG/NAME"]

    with atomic.staging_folder(output) as folder:
        for path in sorted(Path(checkpoint).rglob("*")):
            if path.is_file() and not path.name.startswith("."):
                _take(path, folder / path.relative_to(checkpoint))
        licence = _licence(base, folder) if base is not None else {}
        # The folder stays a checkpoint of this package, but does not tell where its base was on this machine.
        told = named or Path(manifest.base_model).name
        replace(manifest, base_model=told, other_files=hash_others(folder)).write(folder)
        if base is not None and not licence:
            remarks += ["The base's folder states no licence: add 'license' to the card"]
        try:
            receipt = export_receipt(run_id, folder / "receipt.zip", policy, key, records=False, store=store)
        except TrackingError as error:
            raise ConfigError(f"The run's evaluation cannot be read: {error}", got=run_id) from error
        card = _card(receipt, manifest, named, licence)
        atomic.write(folder / "README.md", card.encode())
        names = sorted(path.name for path in folder.iterdir())
    return replace(
        receipt,
        path=output / "receipt.zip",
        written=tuple(output / name for name in names),
        remarks=tuple(remarks),
    )


def _take(path: Path, target: Path) -> None:
    """Copy a file; weights become another name of the same file where the disk allows it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix not in _TEXTS:
        with suppress(OSError):  # another disk
            os.link(path, target)
            return
    shutil.copyfile(path, target)


def _licence(base: Path, folder: Path) -> dict[str, str]:
    """Copy the base's licence files, and return what a card says of its licence; nothing where nothing says it."""
    copied = [path for pattern in _LICENCES for path in sorted(base.glob(pattern)) if path.is_file()]
    for path in copied:
        shutil.copyfile(path, folder / path.name)
    said: dict[str, str] = {}
    page = base / "README.md"
    if page.is_file() and page.read_text(errors="replace").startswith("---"):
        try:
            data = ModelCard.load(page, ignore_metadata_errors=True).data.to_dict()
        except (ValueError, YAMLError):  # its front matter is broken
            data = {}
        said = {name: str(data[name]) for name in _OF_LICENCE if data.get(name)}
    if not said and copied:
        said = {"license": "other", "license_name": f"as in {copied[0].name}", "license_link": copied[0].name}
    return said


def _card(receipt: Receipt, manifest: CheckpointManifest, base: str | None, licence: Mapping[str, str]) -> str:
    method = METHODS.get(manifest.method)
    quantized = bool(method.supported_bits) or manifest.method == MIXED
    bits = manifest.settings.get("bits")
    library = "gguf" if manifest.format.lower().startswith("gguf") else "transformers"
    tags = [
        "quantized" if quantized else "compressed",
        manifest.method,
        *([f"{bits}-bit"] if bits else []),
        *([manifest.format.split()[0]] if manifest.format.split()[0].lower() not in (library, "safetensors") else []),
        "mlflow-compress",
    ]
    front = card_metadata(
        receipt,
        base_model=base,
        **({"base_model_relation": "quantized"} if base and quantized else {}),
        **licence,
        library_name=library if manifest.served_by != [] else "mlflow-compress",
        pipeline_tag="text-generation",
        tags=list(dict.fromkeys(tags)),
    )

    facts = {
        "base": base or Path(manifest.base_model).name,
        "method": manifest.method,
        **manifest.settings,
        "format": manifest.format,
        "size": f"{bytes_text(manifest.size_bytes)}, {manifest.size_ratio:.2f} times smaller than the base",
        "bits per weight": f"{manifest.bits_per_weight:.2f} of the linear layers, "
        f"{manifest.bits_per_weight_model:.2f} of the whole model",
        "made with": ", ".join(f"{name} {version}" for name, version in sorted(manifest.library_versions.items())),
    }
    rows = [{"": name, "this checkpoint": escape_markdown(str(value))} for name, value in facts.items()]
    return "\n".join(
        [
            f"---\n{front}\n---\n",
            f"# {escape_markdown(manifest.label)}\n",
            f"{escape_markdown(facts['base'])}, compressed by mlflow-compress {__version__}. How far it has moved from "
            "its base was measured, and is told below.\n",
            Table.of(rows).markdown(),
            f"\n## Use it\n\n{_use(manifest)}\n",
            f"## Distance to the baseline\n\n{card_body(receipt)}",
            f"## How it was measured\n\n{_measured(receipt)}\n",
        ]
    )


def _use(manifest: CheckpointManifest) -> str:
    """Return who loads the folder, each with its call."""
    if manifest.served_by is None:
        return "Which servers load this format is not known."
    if not manifest.served_by:
        ignored = f" {CACHE_IGNORED}." if QUANTIZED_CACHE in manifest.format else ""
        return f"Only mlflow-compress reads this format: `mlflow-compress evaluate --checkpoint FOLDER`.{ignored}"
    file = ', gguf_file="model.gguf"' if manifest.format.lower().startswith("gguf") else ""
    calls = {
        "vllm": "`vllm serve FOLDER`",
        "vllm-cpu": "`vllm serve FOLDER` (its build for CPUs)",
        "llama.cpp": "`llama-server -m FOLDER/model.gguf`",
        "transformers": f'`AutoModelForCausalLM.from_pretrained("FOLDER"{file})`',
    }
    return "\n".join(f"- {name}: {calls.get(name, 'reads it')}" for name in manifest.served_by)


def _measured(receipt: Receipt) -> str:
    """Return what the evaluation id is a hash of, as far as a reader wants to know it."""
    stated = receipt.stated
    environment: Mapping[str, Any] = stated["environment"]
    shown = ("dtype", "num_fewshot", "limit", "seed", "num_shuffles", "torch", "transformers")
    settings = ", ".join(f"{name} {environment[name]}" for name in shown if environment.get(name))
    hashes = sorted(environment.get("tasks", {}).items())
    tasks = ", ".join(f"{escape_markdown(name)} (`{str(digest)[:12]}`)" for name, digest in hashes)
    lines = [
        f"- Evaluation `{stated['evaluation_id']}`: only figures of the same id may be compared.",
        *([f"- Tasks, with the beginning of their hashes: {tasks}."] if tasks else []),
        f"- Settings: {escape_markdown(settings)}.",
        "- Base and variant scored the same items; intervals are of 95 %, and `n` is the number of items.",
        "- `receipt.zip` has every figure, and all that the id is a hash of: "
        "`mlflow-compress receipt verify receipt.zip`.",
    ]
    return "\n".join(lines)
