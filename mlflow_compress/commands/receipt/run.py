"""Receipts as zip files: an in-toto statement in a DSSE envelope (`envelope.json`), and the records that it names.

Sources: in-toto attestation framework, statement v1; DSSE v1.0.2 (secure-systems-lab), protocol.md.
"""

import base64
import hashlib
import io
import json
import math
import os
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from mlflow_compress import files as atomic
from mlflow_compress.commands.compare.run import from_run, store_with
from mlflow_compress.commands.receipt.result import Receipt, ReceiptComparison
from mlflow_compress.commands.shared.get_or_create import FINGERPRINT_FILE, digest
from mlflow_compress.commands.shared.stored import read_account, results_from_json, results_json
from mlflow_compress.config.policy import Policy, policy_yaml, read_policy
from mlflow_compress.decide.promotion import gate_numbers, gates_of, lacking_shares
from mlflow_compress.decide.separation import by_document, item_scores, separate
from mlflow_compress.errors import AlignmentError, ConfigError, DataError, TrackingError
from mlflow_compress.files import parse_json
from mlflow_compress.metrics.core.account import Account
from mlflow_compress.metrics.core.metric_inputs import MetricInputs, MetricSettings
from mlflow_compress.metrics.core.metric_registry import compute_all
from mlflow_compress.records import MetricResult, RunRecords
from mlflow_compress.tracking.run_names import ENGINE_RECORDS, NOISE_RECORDS, RECEIPT, RECORDS
from mlflow_compress.version import __version__

_KEY_VARIABLE = "MLFLOW_COMPRESS_SIGNING_KEY"
ENVELOPE = "envelope.json"
_PAYLOAD_TYPE = "application/vnd.in-toto+json"
_KINDS = {"_type": "https://in-toto.io/Statement/v1", "predicateType": "urn:mlflow-compress:receipt:1"}
_FILE = re.compile(r"(baseline|variant|noise|engine|asked_again)/[a-z_]+\.(parquet|json)")
_NOT_IN_THE_ID = ("noise_items", "rounding")  # entries of the environment
_ROUNDING = 1e-9  # relative: another processor adds in another order


def export_receipt(
    run_id: str, output: Path, policy: Path | None, key: Path | None, *, records: bool, store: str | None
) -> Receipt:
    """Write the receipt of a run's evaluation, after checking it with its records as `verify_receipt` does."""
    if key is None and (named := os.environ.get(_KEY_VARIABLE)):
        key = Path(named)
    private = None if key is None else _key(key, private=True)
    meant = read_policy(None if policy is None else str(policy))
    opened = store_with(run_id, store)
    source = from_run(run_id, opened)
    baseline = source.baseline_run_id
    if baseline is None or source.run is None:
        raise ConfigError("Only a variant has a receipt", allowed="the id of a main run or an evaluate run", got=run_id)
    run = source.run.run_id
    folders = {"baseline": (baseline, RECORDS), "variant": (run, RECORDS)}
    # Not every evaluation has these. One that cannot be read is missed when the figures are recomputed.
    folders |= {
        "noise": (baseline, NOISE_RECORDS),
        "engine": (baseline, ENGINE_RECORDS),
        "asked_again": (run, NOISE_RECORDS),
    }
    files: dict[str, bytes] = {}
    for part, (owner, folder) in folders.items():
        with suppress(TrackingError):
            files |= {f"{part}/{file.name}": file.read_bytes() for file in opened.fetch(owner, folder).glob("*")}

    account = read_account(opened, run)
    predicate = {
        "written_by": f"mlflow-compress {__version__}",
        "run_id": run,
        "baseline_run_id": baseline,
        "variant": source.name,
        "baseline": source.baseline,
        "evaluation_id": source.evaluation_id,
        "environment": opened.fetch_json(baseline, FINGERPRINT_FILE),
        "account": account.to_dict(),
        "policy": policy_yaml(meant, comments=False),
        "gates": _gates(meant, source.results, account),
        "verdict": source.verdict,
        "figures": results_json(source.results),
    }
    subject = [{"name": name, "digest": {"sha256": _sha256(files[name])}} for name in sorted(files)]
    payload = _json({**_KINDS, "subject": subject, "predicate": predicate})
    public = None if private is None else private.public_key()
    signatures = [] if private is None else [(_key_id(public), private.sign(_signed(payload)))]
    envelope = {ENVELOPE: _envelope(payload, signatures)}
    data = _zipped({**envelope, **files})
    receipt = _checked(data, output, public, recompute=True)
    if not records:
        data = _zipped(envelope)
    try:
        atomic.write(output, data)
    except OSError as error:
        raise ConfigError(f"The receipt cannot be written: {error}", got=str(output)) from error
    opened.add_to(run).set_tags({RECEIPT: _sha256(data)})  # a decision on the variant names it
    return replace(receipt, sha256=_sha256(data), with_records=records, recomputed=None)


def verify_receipt(path: Path, key: Path | None, *, recompute: bool | None) -> Receipt:
    """Return a receipt that is what was exported. With None every figure is computed again if the records are there."""
    public = None if key is None else _key(key, private=False)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"The receipt cannot be read: {error.strerror}", got=str(path)) from error
    return _checked(data, path, public, recompute=recompute)


def _checked(data: bytes, path: Path, public: Ed25519PublicKey | None, *, recompute: bool | None) -> Receipt:
    files = _unzipped(data, path)
    try:
        envelope = parse_json(written := files.pop(ENVELOPE), source=path)
        payload = base64.b64decode(envelope["payload"], validate=True)
        statement = parse_json(payload, source=path)
        signatures = [(one["keyid"], base64.b64decode(one["sig"], validate=True)) for one in envelope["signatures"]]
        if written != _envelope(payload, signatures) or not _KINDS.items() <= statement.items():
            raise ValueError(f"not as {_KINDS['predicateType']} is written")  # several texts decode to one signature
        named = {one["name"]: one["digest"]["sha256"] for one in statement["subject"]}
        signed_by = _check_signature(public, payload, signatures)
        if not all(map(_FILE.fullmatch, named)) or (
            files and named != {name: _sha256(content) for name, content in files.items()}
        ):
            raise DataError("The records are not those that the statement names", got=str(path))
        _check_claims(statement["predicate"])
        again = bool(files) if recompute is None else recompute
        recomputed = _recomputed(statement["predicate"], files) if again else None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"This is no receipt: {error!r}", got=str(path)) from error
    vouched: dict[str, Any] = {"signed_by": signed_by, "recomputed": recomputed, "with_records": bool(files)}
    return Receipt(path=path, sha256=_sha256(data), statement=statement, **vouched)


def _check_signature(
    public: Ed25519PublicKey | None, payload: bytes, signatures: Sequence[tuple[str, bytes]]
) -> str | None:
    """Return the id of the key that has signed; None of an unsigned receipt of which no signature was asked."""
    if not signatures and public is None:
        return None
    if public is None:
        by = f"a signature of the key {signatures[0][0]}"
        raise ConfigError("This receipt needs its signer's public key", allowed="--key PUBLIC_KEY.pem", got=by)
    for key_id, signature in signatures:
        with suppress(InvalidSignature):
            public.verify(signature, _signed(payload))
            if key_id == _key_id(public):
                return key_id
    raise DataError("This receipt is not signed with that key", got=", ".join(k for k, _ in signatures) or "unsigned")


def _gates(policy: Policy, results: Sequence[MetricResult], account: Account) -> dict[str, Any]:
    """Return whether results keep a policy's gates, and what each gate has read."""
    meant = gates_of(policy)
    values = gate_numbers(results, meant.readings)
    checks = [check for gate in meant.gates for check in gate.checks(values)]
    wrong = lacking_shares(policy.require, account.values())
    passed = not wrong and all(check.passed for check in checks)
    return {"passed": passed, "reasons": [*(check.reason for check in checks), *wrong]}


def stated_policy(stated: Mapping[str, Any]) -> Policy:
    """Return the policy that the figures are held against."""
    with tempfile.TemporaryDirectory() as scratch:
        (file := Path(scratch, "policy.yaml")).write_text(stated["policy"], encoding="utf-8")
        return read_policy(str(file))


def _check_claims(stated: Mapping[str, Any]) -> None:
    """Refuse a statement whose parts contradict each other: figures and gates, environment and evaluation id."""
    policy = stated_policy(stated)
    account = Account.from_dict(stated["account"])
    if _gates(policy, results_from_json(stated["figures"]), account) != stated["gates"]:
        raise DataError("The gates do not follow from the figures", got=str(stated["gates"]))
    asked = {name: value for name, value in stated["environment"].items() if name not in _NOT_IN_THE_ID}
    drawn = account.drawn_from is not None  # an evaluation of drawn items has another id
    if not drawn and digest(asked)[:16] != stated["evaluation_id"]:
        raise DataError("The evaluation id does not match the environment", got=stated["evaluation_id"])


def _records_of_receipt(receipt: Receipt) -> MetricInputs:
    """Return the records of a verified receipt that holds them."""
    files = _unzipped(receipt.path.read_bytes(), receipt.path)
    return _inputs(receipt.stated, {name: content for name, content in files.items() if name != ENVELOPE})


def _inputs(stated: Mapping[str, Any], files: Mapping[str, bytes]) -> MetricInputs:
    with tempfile.TemporaryDirectory() as scratch:
        for name, content in files.items():
            (file := Path(scratch, name)).parent.mkdir(exist_ok=True)
            file.write_bytes(content)
        parts: dict[str, Any] = {folder.name: RunRecords.read(folder) for folder in Path(scratch).iterdir()}
    seed = int(stated["environment"]["seed"])
    return MetricInputs(**parts, settings=MetricSettings(seed=seed, split_seed=seed))


def _recomputed(stated: Mapping[str, Any], files: Mapping[str, bytes]) -> int:
    """Return the number of figures, after computing each again from the records."""
    if not files:
        raise ConfigError("This receipt has no records to compute from", fix="Export it without --no-records")
    figures = results_json(compute_all(_inputs(stated, files)))
    place = ("name", "task", "category")
    if [[row[p] for p in place] for row in figures] != [[row[p] for p in place] for row in stated["figures"]]:
        raise DataError("The figures computed from the records differ from those in the statement")
    for row, told in zip(figures, stated["figures"], strict=True):
        if wrong := [name for name, value in row.items() if not _equal(value, told[name])]:
            name = f"{wrong[0]} of {row['name']}"
            raise DataError(f"The records give another {name}", allowed=str(row[wrong[0]]), got=str(told[wrong[0]]))
    return len(figures)


def _equal(ours: Any, theirs: Any) -> bool:
    if not isinstance(ours, float) or not isinstance(theirs, int | float):
        return bool(ours == theirs)
    return math.isclose(ours, theirs, rel_tol=_ROUNDING, abs_tol=_ROUNDING) or (ours != ours and theirs != theirs)


def _key(path: Path, *, private: bool) -> Any:
    try:
        content = path.read_bytes()
        key = pem.load_pem_private_key(content, password=None) if private else pem.load_pem_public_key(content)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        kind = "private key without a password" if private else "public key"
        raise ConfigError(f"This file holds no key: {error}", allowed=f"an Ed25519 {kind}", got=str(path)) from error
    if not isinstance(key, Ed25519PrivateKey if private else Ed25519PublicKey):
        raise ConfigError("This is another kind of key", allowed="Ed25519", got=type(key).__name__)
    return key


def _key_id(key: Any) -> str:
    return _sha256(key.public_bytes(pem.Encoding.DER, pem.PublicFormat.SubjectPublicKeyInfo))


def _signed(payload: bytes) -> bytes:
    """Return what DSSE signs: its pre-authentication encoding of type and payload."""
    return b"DSSEv1 %d %s %d %s" % (len(_PAYLOAD_TYPE), _PAYLOAD_TYPE.encode(), len(payload), payload)


def _envelope(payload: bytes, signatures: Sequence[tuple[str, bytes]]) -> bytes:
    text, *signed = (base64.b64encode(data).decode() for data in (payload, *(sig for _, sig in signatures)))
    named = [{"keyid": key_id, "sig": sig} for (key_id, _), sig in zip(signatures, signed, strict=True)]
    return _json({"payloadType": _PAYLOAD_TYPE, "payload": text, "signatures": named})


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _zipped(files: Mapping[str, bytes]) -> bytes:
    """Return a zip file that depends on nothing but its content: no times, no compression."""
    with io.BytesIO() as sink:
        with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:
            for name in sorted(files):
                (info := zipfile.ZipInfo(name)).create_system = 3  # the same on every system
                archive.writestr(info, files[name])
        return sink.getvalue()


def _unzipped(data: bytes, path: Path) -> dict[str, bytes]:
    """Return the files of a receipt. One that is not written as `_zipped` writes it was changed."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > len(data):
                raise ValueError("its files are compressed")  # a small one could fill the memory
            files = {name: archive.read(name) for name in archive.namelist()}
    except Exception as error:  # a changed byte makes zipfile fail in many ways
        raise DataError(f"The receipt is damaged, or is none: {error}", got=str(path)) from error
    if _zipped(files) != data:
        raise DataError("The receipt was changed after it was written", got=str(path))
    return files


def compare_two(first: Path, second: Path, key: Path | None, other_key: Path | None) -> ReceiptComparison:
    """Check both receipts, and return their figures side by side, paired by item where both hold the records."""
    receipts = [verify_receipt(path, by, recompute=None) for path, by in ((first, key), (second, other_key))]
    a, b = (receipt.stated for receipt in receipts)
    if a["evaluation_id"] != b["evaluation_id"]:
        told = (
            "; ".join(_differences(a["environment"], b["environment"]))
            or "the same environment, but the items were drawn in another way"
        )
        raise AlignmentError(
            f"These receipts are not comparable: {told}",
            allowed="two receipts with one evaluation id",
            got=f"{a['evaluation_id']} and {b['evaluation_id']}",
            fix="Evaluate both variants with the same baseline, tasks, settings and versions",
        )
    pair = documents = None
    if all(receipt.with_records for receipt in receipts):
        records = [_records_of_receipt(receipt) for receipt in receipts]
        documents = by_document(*records)
        with suppress(DataError):  # evaluations of running text alone have no items
            [pair] = separate(list(zip("AB", map(item_scores, records), strict=True)))
    return ReceiptComparison(
        first=receipts[0], second=receipts[1], paired=pair, documents=documents, remarks=tuple(_remarks(a, b))
    )


def _differences(a: Mapping[str, Any], b: Mapping[str, Any], under: str = "") -> Iterator[str]:
    """Yield what differs between two environments, by its name."""
    for name in sorted(a.keys() | b.keys()):
        one, other = a.get(name), b.get(name)
        if one == other or (not under and name in _NOT_IN_THE_ID):
            continue
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _differences(one, other, f"{under}{name} ")
        else:
            yield f"{under}{name} is {_short(one)} in A and {_short(other)} in B"


def _short(value: Any) -> str:
    text = "missing" if value is None else str(value)
    return text if len(text) <= 20 else f"{text[:12]}…"


def _remarks(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """Yield what does not forbid a comparison, but should be known."""
    yield from (
        f"Numbers may differ in rounding: {told}"
        for told in _differences(*(one["environment"].get("rounding", {}) for one in (a, b)))
    )
    if a["policy"] != b["policy"]:
        yield "The gates are of two policies: whether they are kept is not comparable."
