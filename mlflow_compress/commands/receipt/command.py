"""The commands that write a receipt of an evaluation, check one, show one, and compare two."""

from pathlib import Path
from typing import TYPE_CHECKING

from mlflow_compress.commands.command import (
    Argument,
    PathOrText,
    PolicyLike,
    ResultOfRun,
    StoreLike,
    path_text,
    policy_path,
    register_command,
    run_id_of,
    store_of,
)

if TYPE_CHECKING:
    from mlflow_compress.commands.receipt.result import Receipt, ReceiptComparison

_RECEIPT = Argument(("receipt",), {"metavar": "RECEIPT", "help": "file that export wrote"})
_SIGNER = Argument(("--key",), {"help": "PEM file of the signer's public key"})


def _path(name: str, value: PathOrText | None) -> Path | None:
    return None if value is None else Path(path_text(name, value))


@register_command(
    "export",
    description="Write a receipt of an evaluation: figures, policy, environment and records, signed if there is a key.",
    within="receipt",
    heading="share",
    place=22,
    project=False,
    arguments=(
        Argument(("run",), {"metavar": "RUN", "help": "a main run or an evaluate run"}),
        Argument(("-o", "--output"), {"default": "receipt.zip", "help": "file to write [receipt.zip]"}),
        Argument(("--policy",), {"help": "YAML file of the policy that the figures are held against [promote's]"}),
        Argument(("--key",), {"help": "PEM file of an Ed25519 private key [MLFLOW_COMPRESS_SIGNING_KEY, or unsigned]"}),
        Argument(
            ("--no-records",),
            {"dest": "records", "action": "store_false", "help": "leave out the records, which hold the questions"},
        ),
    ),
)
def export(
    run: ResultOfRun | str,
    *,
    output: PathOrText = "receipt.zip",
    policy: PolicyLike | None = None,
    key: PathOrText | None = None,
    records: bool = True,
    store: StoreLike = None,
) -> "Receipt":
    """Return the receipt of the evaluation of a main run or an evaluate run, after writing it to `output`.

    `policy` is a file, a dictionary, a `Policy`, or None for the default policy. `key` is the PEM file of an Ed25519
    private key; without it the environment variable MLFLOW_COMPRESS_SIGNING_KEY names the file, or the receipt is
    unsigned. `records=False` leaves out the records, which hold the questions: their digests stay. `store` is the
    folder in which the run is looked up in place of MLflow's tracking store.

    Examples
    --------
    >>> receipt = mc.export(found.run.run_id, output=folder / "receipt.zip", store=folder)
    >>> receipt.signed_by is None
    True
    """
    from mlflow_compress.commands.receipt.run import export_receipt

    return export_receipt(
        run_id_of("run", run),
        Path(path_text("output", output)),
        _path("policy", policy_path(policy, store)),
        _path("key", key),
        records=records,
        store=store_of(store),
    )


@register_command(
    "verify",
    description="Check a receipt: its signature, the digests of its records, and every number, without a model.",
    within="receipt",
    heading="share",
    place=23,
    project=False,
    arguments=(
        _RECEIPT,
        _SIGNER,
        Argument(("--recompute",), {"action": "store_true", "help": "compute every number again from the records"}),
    ),
)
def verify(receipt: PathOrText, *, key: PathOrText | None = None, recompute: bool = False) -> "Receipt":
    """Return a receipt whose signature and digests are right; anything else is a `DataError`.

    A signed receipt needs the PEM file of the signer's public key as `key`; an unsigned one fails with a key.
    `recompute` computes every number again from the records.

    Examples
    --------
    >>> mc.verify(receipt.path, recompute=True).recomputed == len(receipt.to_rows())
    True
    """
    from mlflow_compress.commands.receipt.run import verify_receipt

    return verify_receipt(Path(path_text("receipt", receipt)), _path("key", key), recompute=recompute)


@register_command(
    "card",
    description="Write a model card's section with model-index, a table for a pull request, and a badge.",
    within="receipt",
    heading="share",
    place=25,
    project=False,
    arguments=(
        _RECEIPT,
        Argument(("-o", "--output"), {"default": "card", "metavar": "FOLDER", "help": "folder to write into [card]"}),
        _SIGNER,
    ),
)
def card(receipt: PathOrText, *, output: PathOrText = "card", key: PathOrText | None = None) -> "Receipt":
    """Return a receipt, checked as `verify` does, after writing card.md, pull-request.md and badge.svg into a folder.

    `card.md` is a section of a model card whose front matter has the figures as `model-index`, which the Hub shows.

    Examples
    --------
    >>> [path.name for path in mc.card(receipt.path, output=folder / "card").written]
    ['card.md', 'pull-request.md', 'badge.svg']
    """
    from mlflow_compress.commands.receipt.cards import write_cards

    return write_cards(Path(path_text("receipt", receipt)), Path(path_text("output", output)), _path("key", key))


@register_command(
    "hub-folder",
    description="Write a checkpoint with model card, licence and receipt into a folder, ready to upload.",
    within="receipt",
    heading="share",
    place=27,
    project=False,
    arguments=(
        Argument(("run",), {"metavar": "RUN", "help": "a main run or an evaluate run"}),
        Argument(("-o", "--output"), {"default": "hub", "metavar": "FOLDER", "help": "new folder to write [hub]"}),
        Argument(("--base-model",), {"metavar": "ORG/NAME", "help": "the base's name at the Hub [that of the run]"}),
        Argument(("--policy",), {"help": "YAML file of the policy that the figures are held against [promote's]"}),
        Argument(("--key",), {"help": "PEM file of an Ed25519 private key [MLFLOW_COMPRESS_SIGNING_KEY, or unsigned]"}),
    ),
)
def hub_folder(
    run: ResultOfRun | str,
    *,
    output: PathOrText = "hub",
    base_model: str | None = None,
    policy: PolicyLike | None = None,
    key: PathOrText | None = None,
    store: StoreLike = None,
) -> "Receipt":
    """Return the receipt of a run's evaluation, after writing its checkpoint into a folder that can be uploaded.

    The folder has the checkpoint's files, the base's licence as far as its folder says one, ``README.md``, a model
    card with the measured distances, and ``receipt.zip`` without records. The checkpoint itself is not changed.
    `base_model` is the base's name at the Hub; without it a base that was a folder is not named there.

    Examples
    --------
    >>> written = mc.hub_folder(found.run.run_id, output=folder / "hub", store=folder).written
    >>> {"README.md", "config.json", "receipt.zip"} <= {path.name for path in written}
    True
    """
    from mlflow_compress.commands.receipt.hub_folder import write_hub_folder

    return write_hub_folder(
        run_id_of("run", run),
        Path(path_text("output", output)),
        base_model,
        _path("policy", policy_path(policy, store)),
        _path("key", key),
        store_of(store),
    )


@register_command(
    "compare-receipts",
    description="Compare two receipts, even of different people: figures side by side, and paired by item.",
    within="receipt",
    heading="share",
    place=26,
    project=False,
    arguments=(
        Argument(("first",), {"metavar": "A", "help": "a receipt"}),
        Argument(("second",), {"metavar": "B", "help": "another one"}),
        Argument(("--key",), {"help": "PEM file of the public key of A's signer"}),
        Argument(("--other-key",), {"help": "PEM file of the public key of B's signer"}),
    ),
)
def compare_receipts(
    first: PathOrText, second: PathOrText, *, key: PathOrText | None = None, other_key: PathOrText | None = None
) -> "ReceiptComparison":
    """Return two receipts side by side, after checking both as `verify` does, and recomputing those with records.

    They must have one evaluation id; otherwise an `AlignmentError` says in what their evaluations differ.

    Examples
    --------
    >>> mc.compare_receipts(receipt.path, receipt.path).paired.kl.value
    0.0
    """
    from mlflow_compress.commands.receipt.run import compare_two

    a, b = Path(path_text("first", first)), Path(path_text("second", second))
    return compare_two(a, b, _path("key", key), _path("other_key", other_key))
