"""Receipts: what `export` writes, `verify` believes; whatever was changed in one is caught."""

from __future__ import annotations

import base64
import json
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1
from cryptography.hazmat.primitives.asymmetric.ec import generate_private_key as generate_ec_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

import mlflow_compress as mc
from mlflow_compress import cli
from mlflow_compress.commands.evaluate.run import log_evaluation
from mlflow_compress.commands.receipt import run as receipts
from mlflow_compress.commands.shared.get_or_create import FINGERPRINT, digest
from mlflow_compress.errors import ConfigError, DataError, MlflowCompressError
from mlflow_compress.metrics import MetricInputs, compute_all
from mlflow_compress.metrics.core.account import take_account
from mlflow_compress.metrics.core.metric_inputs import MetricSettings
from mlflow_compress.tracking.folder_store import FolderStore
from mlflow_compress.tracking.run_names import ACCOUNT, NOISE, RECORDS
from tests import metric_records

Forge = Callable[[dict[str, Any], dict[str, bytes]], None]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return a store with one evaluation of synthetic records, and the id of its run."""
    store = FolderStore(tmp_path_factory.mktemp("results"))
    made = metric_records.inputs(12)
    inputs = MetricInputs(made.baseline, made.variant, noise=made.noise, settings=MetricSettings(seed=7, split_seed=7))
    asked = {"weights": "w" * 64, "seed": 7, "torch": "2.13.0"}
    with store.run("baseline", "baseline", {"base_model": "demo"}) as baseline:
        baseline.log_json({**asked, "noise_items": 4, "rounding": {"threads": "1"}}, FINGERPRINT)
        inputs.baseline.write(baseline.folder / RECORDS)
        assert inputs.noise is not None
        inputs.noise.write(baseline.folder / NOISE)
    tags = {"base_model": "demo", "baseline_run_id": baseline.run_id, "variant": "rtn-4bit", "verdict": "It moved."}
    with store.run("evaluate", "evaluate", {**tags, "evaluation": digest(asked)[:16]}) as run:
        log_evaluation(store, run, inputs, compute_all(inputs), {"tasks": {"mmlu": "t" * 64}})
        run.log_json(take_account(inputs, cut=set(), too_long=set(), asked_again={}, setting={}).to_dict(), ACCOUNT)
    return store.root, run.run_id


def key_pair(folder: Path) -> tuple[Path, Path]:
    """Return the files of a private key and its public key."""
    key = Ed25519PrivateKey.generate()
    (folder / "private.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (folder / "public.pem").write_bytes(public)
    return folder / "private.pem", folder / "public.pem"


class Desk:
    """A file for a receipt, and a pair of keys."""

    def __init__(self, results: tuple[Path, str], folder: Path) -> None:
        self.results, self.file = results, folder / "receipt.zip"
        self.private, self.public = key_pair(folder)

    def export(self, **more: Any) -> Any:
        return mc.export(self.results[1], **{"store": self.results[0], "output": self.file, **more})

    def verify(self, **more: Any) -> Any:
        return mc.verify(self.file, **more)


desk = pytest.fixture(lambda results, tmp_path: Desk(results, tmp_path), name="desk")


def test_a_receipt_states_what_the_run_holds_and_is_the_same_file_every_time(desk: Desk) -> None:
    store, run = desk.results
    first = desk.export(key=desk.private)
    same = desk.export(key=desk.private, output=desk.file.with_name("b.zip"))
    assert desk.file.read_bytes() == same.path.read_bytes()
    verified = desk.verify(key=desk.public, recompute=True)
    assert (verified.statement, verified.sha256, verified.signed_by) == (first.statement, first.sha256, first.signed_by)
    figures = json.loads((store / run / "metrics.json").read_text())
    assert list(verified.to_rows()) == figures and verified.recomputed == len(figures) > 100
    assert verified.stated["verdict"] == "It moved." and verified.stated["environment"]["torch"] == "2.13.0"
    named = {one["name"] for one in verified.statement["subject"]}
    assert {"variant/option_distances.parquet", "variant/about.json", "baseline/items.parquet"} <= named
    assert f"Signed with the key {verified.signed_by}" in verified.as_text()
    assert b"PRIVATE" not in desk.file.read_bytes()


def test_without_records_the_numbers_are_signed_and_not_recomputed(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_COMPRESS_SIGNING_KEY", str(desk.private))
    desk.export(records=False)
    verified = desk.verify(key=desk.public)
    assert verified.signed_by and "their digests alone" in verified.as_text()
    with pytest.raises(ConfigError, match="no records to compute from"):
        desk.verify(key=desk.public, recompute=True)


@pytest.mark.parametrize("signed", [True, False])
def test_every_changed_byte_is_caught(desk: Desk, signed: bool) -> None:
    file, public = desk.file, desk.public if signed else None
    desk.export(key=desk.private if signed else None)
    whole = file.read_bytes()
    draw = random.Random(35)
    parts = receipts._unzipped(whole, file)
    for number in range(2000 if signed else 1000):
        # The checksums of the zip file show every one. A signature must show them even where the checksums are right.
        name = draw.choice(sorted(parts))
        changed = bytearray(parts[name] if signed and number % 2 else whole)
        changed[draw.randrange(len(changed))] ^= draw.randrange(1, 256)
        file.write_bytes(receipts._zipped({**parts, name: bytes(changed)}) if signed and number % 2 else changed)
        with pytest.raises(MlflowCompressError):
            mc.verify(file, key=public)
    for damaged in (whole[:-1], whole + b"\0", whole[: len(whole) // 2], b""):
        file.write_bytes(damaged)
        with pytest.raises(DataError):
            mc.verify(file, key=public)


def forged(file: Path, forge: Forge) -> None:
    """Write a receipt again, with right digests, after changing its statement and its records."""
    files = receipts._unzipped(file.read_bytes(), file)
    envelope = json.loads(files.pop(receipts.ENVELOPE))
    statement = json.loads(base64.b64decode(envelope["payload"]))
    forge(statement["predicate"], files)
    statement["subject"] = [{"name": n, "digest": {"sha256": receipts._sha256(files[n])}} for n in sorted(files)]
    signatures = [(one["keyid"], base64.b64decode(one["sig"])) for one in envelope["signatures"]]
    written = receipts._envelope(receipts._json(statement), signatures)
    file.write_bytes(receipts._zipped({receipts.ENVELOPE: written, **files}))


def better_figure(stated: dict[str, Any], files: dict[str, bytes]) -> None:
    [row] = [r for r in stated["figures"] if (r["name"], r["task"]) == ("distance/all_flips_pct", None)]
    row["value"] -= 1.0


SCORES = "variant/option_scores.parquet"
FORGED: dict[str, Forge] = {
    "another value of distance/all_flips_pct": better_figure,
    "gates do not follow from the figures": lambda stated, _: stated["gates"].update(passed=None),
    "The gates do not follow": lambda stated, _: stated.update(policy=stated["policy"].replace("5.0", "50.0")),
    "not that of the environment": lambda stated, _: stated["environment"].update(torch="3.0.0"),
    "other figures": lambda stated, _: stated["figures"].pop(),
    "no receipt: KeyError": lambda stated, _: stated.pop("account"),
    "records give another": lambda _, files: files.update({SCORES: files[SCORES.replace("variant", "baseline")]}),
}


@pytest.mark.parametrize("message", FORGED)
def test_a_forged_receipt_is_refused(desk: Desk, message: str) -> None:
    for private, public, refusal in ((None, None, message), (desk.private, desk.public, "not signed with that key")):
        desk.export(key=private)
        forged(desk.file, FORGED[message])
        with pytest.raises(DataError, match=refusal):
            desk.verify(key=public, recompute=True)


def test_a_small_file_that_would_unpack_to_a_large_one_is_not_unpacked(desk: Desk) -> None:
    with zipfile.ZipFile(desk.file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(receipts.ENVELOPE, b" " * 10_000_000)
    with pytest.raises(DataError, match="its files are compressed"):
        desk.verify()


def test_who_must_have_signed_is_asked(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    desk.export(key=desk.private)
    with pytest.raises(ConfigError, match="Nothing says by whom"):
        desk.verify()
    with pytest.raises(DataError, match="not signed with that key"):
        desk.verify(key=key_pair(tmp_path / "other")[1])
    desk.export()
    with pytest.raises(DataError, match=r"not signed with that key. Got: 'unsigned'"):
        desk.verify(key=desk.public)


def test_a_file_that_is_no_key_leaves_no_receipt(desk: Desk, tmp_path: Path) -> None:
    other = generate_ec_key(SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for content in (b"no key", other):
        (tmp_path / "key.pem").write_bytes(content)
        for file in (tmp_path / "key.pem", tmp_path / "none.pem"):
            with pytest.raises(ConfigError, match=r"holds no key|another kind of key"):
                desk.export(key=file)
    assert not desk.file.exists()


def test_a_run_whose_figures_do_not_follow_from_its_records_gets_no_receipt(desk: Desk, tmp_path: Path) -> None:
    store = Path(shutil.copytree(desk.results[0], tmp_path / "results"))
    file = store / desk.results[1] / "metrics.json"
    file.write_text(file.read_text().replace('"value": 0.', '"value": 0.1', 1))
    with pytest.raises(DataError, match=r"records give another value"):
        desk.export(store=store)
    assert not desk.file.exists()


def test_the_command_line_exits_with_1_where_a_receipt_is_wrong(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    file, other = desk.export().path, desk.file.with_name("other.zip")
    assert cli.main(["verify", str(file), "--recompute"]) == 0
    assert "figures were recomputed and are equal" in capsys.readouterr().out
    file.write_bytes(file.read_bytes()[:-1])
    assert cli.main(["verify", str(file)]) == 1 and "damaged" in capsys.readouterr().err
    assert cli.main(["verify", str(other)]) == 2
    assert cli.main(["export", "0" * 32, "-o", str(other)]) == 1 and not other.exists()
