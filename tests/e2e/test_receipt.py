"""Receipts: what `export` writes, `verify` believes; whatever was changed in one is caught."""

import base64
import json
import random
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1
from cryptography.hazmat.primitives.asymmetric.ec import generate_private_key as generate_ec_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from huggingface_hub import ModelCard

import mlflow_compress as mc
from mlflow_compress import cli
from mlflow_compress.commands.evaluate.run import log_evaluation
from mlflow_compress.commands.receipt import cards
from mlflow_compress.commands.receipt import run as receipts
from mlflow_compress.commands.shared.get_or_create import FINGERPRINT_FILE, digest
from mlflow_compress.compression.checkpoint_manifest import CheckpointManifest
from mlflow_compress.errors import AlignmentError, ConfigError, DataError, MlflowCompressError
from mlflow_compress.metrics import MetricInputs, compute_all
from mlflow_compress.metrics.core.account import take_account
from mlflow_compress.metrics.core.metric_inputs import MetricSettings
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.run_names import ACCOUNT, NOISE_RECORDS, RECORDS
from tests import metric_records
from tests.compress_models import make_llama
from tests.roundoff import of_sum
from tests.stores import artifacts, opened

Forge = Callable[[dict[str, Any], dict[str, bytes]], None]


def evaluated(folder: Path, variant: str = "rtn-4bit", *, seed: int = 0, torch: str = "2.13.0") -> tuple[Path, str]:
    """Return a store with one evaluation of synthetic records, and the id of its run."""
    store = opened(folder)
    made, other = metric_records.inputs(12), metric_records.inputs(12, seed=seed)
    inputs = MetricInputs(made.baseline, other.variant, noise=made.noise, settings=MetricSettings(seed=7, split_seed=7))
    asked = {"weights": "w" * 64, "seed": 7, "torch": torch}
    with store.run("baseline", "baseline", {"base_model": "demo"}) as baseline:
        baseline.log_json({**asked, "noise_items": 4, "rounding": {"threads": str(seed)}}, FINGERPRINT_FILE)
        inputs.baseline.write(artifacts(folder, baseline.run_id) / RECORDS)
        inputs.noise.write(artifacts(folder, baseline.run_id) / NOISE_RECORDS)
    tags = {"base_model": "demo", "baseline_run_id": baseline.run_id, "variant": variant, "verdict": "It moved."}
    with store.run("evaluate", "evaluate", {**tags, "evaluation": digest(asked)[:16]}) as run:
        log_evaluation(store, run, inputs, compute_all(inputs), {"tasks": {"mmlu": "t" * 64}})
        run.log_json(take_account(inputs, cut=set(), too_long=set(), asked_again={}, setting={}).to_dict(), ACCOUNT)
    return folder, run.run_id


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return evaluated(tmp_path_factory.mktemp("results"))


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
    figures = opened(store).fetch_json(run, "metrics.json")["results"]
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
    "does not match the environment": lambda stated, _: stated["environment"].update(torch="3.0.0"),
    "differ from those in the statement": lambda stated, _: stated["figures"].pop(),
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
    with pytest.raises(ConfigError, match="needs its signer's public key"):
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
    store, run = evaluated(tmp_path / "results")
    file = artifacts(store, run) / "metrics.json"
    file.write_text(file.read_text().replace('"value": 0.', '"value": 0.1', 1))
    with pytest.raises(DataError, match=r"records give another value"):
        mc.export(run, output=tmp_path / "a.zip", store=store)
    assert not desk.file.exists()


def test_the_command_line_exits_with_1_where_a_receipt_is_wrong(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    file, other = desk.export().path, desk.file.with_name("other.zip")
    assert cli.main(["receipt", "verify", str(file), "--recompute"]) == 0
    assert "figures were recomputed and are equal" in capsys.readouterr().out
    file.write_bytes(file.read_bytes()[:-1])
    assert cli.main(["receipt", "verify", str(file)]) == 1 and "damaged" in capsys.readouterr().err
    assert cli.main(["receipt", "verify", str(other)]) == 2
    assert cli.main(["receipt", "export", "0" * 32, "-o", str(other)]) == 1 and not other.exists()


HOSTILE = 'a<b>&"c"|\x07' + "W" * 60


@pytest.mark.parametrize("variant", ["rtn-4bit", HOSTILE])
def test_cards_are_what_the_hub_and_browsers_read(tmp_path: Path, variant: str) -> None:
    store, run = evaluated(tmp_path / "results", variant)
    desk = Desk((store, run), tmp_path)
    receipt = desk.export(key=desk.private)
    card, request, badge = mc.card(desk.file, output=tmp_path / "cards", key=desk.public).written
    shown = ModelCard.load(card)
    assert shown.data.model_name == variant
    entries = {(one.dataset_type, one.metric_type): one for one in shown.data.eval_results}
    for row in receipt.to_rows():  # by task, and pooled
        if (row["name"], row["category"]) == ("quality/accuracy", None):
            entry = entries[row["task"] or "mlflow-compress", "accuracy"]
            assert entry.metric_value == row["value"] and entry.metric_args["n"] == row["n"]
            assert entry.metric_args.get("low") == row["low"]
    assert ("mlflow-compress", "distance/kl_mean") in entries and ("piqa", "distance/flips_pct") in entries
    for text in (shown.text, request.read_text()):
        assert receipt.sha256 in text and receipt.signed_by in text and "gates are **not kept**" in text
        table = [line for line in text.splitlines() if line.startswith("|")]
        assert len(table) > 8 and {line.count("|") - line.count("\\|") for line in table} == {6}
    drawn = ET.parse(badge).getroot()
    places = [(float(t.get("x", "")), float(t.get("textLength", ""))) for t in drawn.iter() if t.get("textLength")]
    ends = [x + length for x, length in places]
    assert ends[0] < places[1][0] and ends[1] < float(drawn.get("width", "")) < 700


@pytest.mark.parametrize(
    ("delta", "passed", "unscored", "colour", "word"),
    [
        ((0.0, -0.005, 0.005), True, 0, "_GREEN", "no worse"),
        ((0.0, -0.005, 0.005), False, 0, "_AMBER", "no worse"),
        ((0.0, -0.05, 0.05), True, 0, "_AMBER", "open"),
        ((-0.1, -0.15, -0.05), True, 0, "_RED", "worse"),
        ((0.0, -0.005, 0.005), True, 50, "_AMBER", "no verdict"),
    ],
)
def test_a_badge_has_the_verdict_in_words_and_in_its_colour(
    tmp_path: Path, delta: tuple[float, float, float], passed: bool, unscored: int, colour: str, word: str
) -> None:
    row = {"level": 0.95, "n": 1000, "n_unscored": 0, "task": None, "category": None, "p": None}
    figures = [
        {**row, "name": "quality/accuracy_delta", **dict(zip(("value", "low", "high"), delta, strict=True))},
        {**row, "name": "distance/flips_pct", "value": 1.0, "low": 0.5, "high": 2.0},
        {**row, "name": "distance/kl_mean", "value": 0.0123, "low": 0.01, "high": 0.02},
    ]
    stated = {"variant": "awq", "figures": figures, "gates": {"passed": passed}, "policy": "margin: 1.0"}
    stated["account"] = {"asked": 100, "unscored": {"why": unscored} if unscored else {}}
    receipt = mc.Receipt(path=tmp_path, sha256="", statement={"predicate": stated}, signed_by=None, with_records=False)
    text = cards.badge(receipt)
    assert f"awq: {word}, KL 0.0123, gates {'kept' if passed else 'not kept'}" in text
    assert getattr(cards, colour) in text


def test_receipts_of_two_people_are_compared_by_item(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    desks = []
    for seed, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        desks.append(Desk(evaluated(tmp_path / name / "results", name, seed=seed), tmp_path / name))
        desks[-1].export(key=desks[-1].private)
    a, b = desks
    found = mc.compare_receipts(a.file, b.file, key=a.public, other_key=b.public)
    assert found.first.recomputed and found.second.recomputed and found.paired is not None
    figures = {row["name"]: row for row in found.to_rows()}
    kl = figures["distance/kl_mean"]
    assert found.paired.kl.value == pytest.approx(
        kl["b_value"] - kl["a_value"], abs=of_sum(32, kl["a_value"] + kl["b_value"])
    )
    assert any("threads is 0 in A and 1 in B" in remark for remark in found.remarks)
    assert "KL, B minus A" in found.as_text() and "B: b" in found.as_text()
    assert found.documents is not None and "Running text, by document: A is nearer" in found.as_text()
    same = mc.compare_receipts(a.file, a.file, key=a.public, other_key=a.public)
    assert same.paired is not None and not same.paired.told_apart and same.remarks == ()
    b.export(key=b.private, records=False)
    alone = mc.compare_receipts(a.file, b.file, key=a.public, other_key=b.public)
    assert alone.paired is None and alone.to_rows() == found.to_rows() and "Not paired" in alone.as_text()
    with pytest.raises(DataError, match="not signed with that key"):
        mc.compare_receipts(a.file, b.file, key=b.public, other_key=b.public)
    other = Desk(evaluated(tmp_path / "other", torch="2.14.0"), tmp_path)
    other.export()
    with pytest.raises(AlignmentError, match=r"not comparable: torch is 2\.13\.0 in A and 2\.14\.0 in B"):
        mc.compare_receipts(a.file, other.file, key=a.public)
    assert cli.main(["receipt", "compare", str(a.file), str(other.file), "--key", str(a.public)]) == 1
    other.file.write_bytes(other.file.read_bytes()[:-1])
    assert cli.main(["receipt", "compare", str(a.file), str(other.file), "--key", str(a.public)]) == 1
    assert capsys.readouterr().err.count("Error") <= 2


@pytest.mark.ci
@pytest.mark.usefixtures("forked_checks")
def test_what_decides_comparability_elsewhere_decides_here(tmp_path: Path) -> None:
    """The key of malaiwah/quant-fidelity-suite has seven fields. What of them can differ here forbids a comparison.

    Panel: other items. Reference: other weights. Stack: other arithmetic. Metric and direction are in a figure's name,
    the accumulation is float64, and each model has its own head.
    """
    rows = [
        {"id": str(i), "category": "c", "context": f"{i} and one", "choices": ["two", "four"], "answer": i % 2}
        for i in range(12)
    ]
    bases = [str(make_llama(tmp_path / str(seed), seed=seed)) for seed in (0, 1)]
    variants = [mc.compress(base, "rtn", bits=4, group_size=32, store=tmp_path / "store") for base in bases]

    def receipt(name: str, number: int = 0, **more: Any) -> Path:
        asked = {
            "model": bases[number],
            "tasks": rows,
            "task_args": {"noise_items": 4},
            "store": tmp_path / "store",
            **more,
        }
        run = mc.evaluate(variants[number], **asked).run
        return mc.export(run.run_id, output=tmp_path / f"{name}.zip", store=tmp_path / "store").path

    own = receipt("own")
    others = {
        "tasks items": receipt("panel", tasks=rows[:8]),
        "weights": receipt("reference", 1),
        "dtype": receipt("stack", dtype="bfloat16"),
    }
    for named, other in others.items():
        with pytest.raises(AlignmentError, match=rf"not comparable: .*\b{named} is "):
            mc.compare_receipts(own, other)
    names = {row["name"] for row in mc.verify(own).to_rows()}
    assert {"distance/kl_mean", "distance/kl_reverse_mean"} <= names


def test_a_card_that_cannot_be_written_is_one_error(desk: Desk, tmp_path: Path) -> None:
    desk.export()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cards cannot be written"):
        mc.card(desk.file, output=tmp_path / "file")
    with pytest.raises(ConfigError, match="needs its signer's public key"):
        desk.export(key=desk.private)
        mc.card(desk.file, output=tmp_path / "cards")
    assert not (tmp_path / "cards").exists()


CARD = "---\nlicense: apache-2.0\ntags: [a-tag]\n---\n# A base\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Path]:
    """Return a store, a run of it that says how far a checkpoint has moved, and the checkpoint."""
    folder = tmp_path_factory.mktemp("hub")
    base = make_llama(folder / "base")
    (base / "README.md").write_text(CARD)
    (base / "LICENSE.txt").write_text("Do what you like.")
    store, run = evaluated(folder / "results", "rtn-4bit-g32")
    compressed = mc.compress(str(base), "rtn", bits=4, group_size="32", output_dir=str(folder / "made"), store=store)
    opened(store).add_to(run).set_tags({run_names.CHECKPOINT: str(compressed.folder)})
    return store, run, Path(compressed.folder)


def upload(made: tuple[Path, str, Path], output: Path, **more: Any) -> Any:
    store, run, _ = made
    return mc.hub_folder(run, output=output, store=store, **more)


def test_the_card_is_what_the_hub_reads(made: tuple[Path, str, Path], tmp_path: Path) -> None:
    receipt = upload(made, tmp_path / "hub", base_model="org/base")
    card = ModelCard.load(tmp_path / "hub" / "README.md")
    data = card.data.to_dict()
    assert (data["base_model"], data["base_model_relation"]) == ("org/base", "quantized")
    assert data["license"] == "apache-2.0" and data["library_name"] == "transformers"
    assert data["tags"] == ["quantized", "rtn", "4-bit", "compressed-tensors", "mlflow-compress"]
    accuracy = {row["name"]: row["value"] for row in receipt.to_rows() if row["task"] is None}["quality/accuracy"]
    entries = {one.metric_type: one for one in card.data.eval_results if one.dataset_type == "mlflow-compress"}
    assert entries["accuracy"].metric_value == accuracy and entries["accuracy"].metric_args["n"] > 0
    assert f"Evaluation `{receipt.stated['evaluation_id']}`" in card.text and receipt.sha256 in card.text
    assert "| bits | 4 |" in card.text and "`vllm serve FOLDER`" in card.text
    assert receipt.remarks == ()


def test_the_folder_loads_and_tells_nothing_of_this_machine(made: tuple[Path, str, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    hub, checkpoint = tmp_path / "hub", made[2]
    before = {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}
    upload(made, hub, base_model="org/base")
    assert {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()} == before
    manifest = CheckpointManifest.read(hub)  # every file is as it was, and none is strange
    assert manifest.base_model == "org/base" and "LICENSE.txt" in manifest.other_files
    assert json.loads((hub / "config.json").read_text())["quantization_config"]["quant_method"] == "compressed-tensors"
    assert {"generation_config.json", "tokenizer.json", "LICENSE.txt"} <= {path.name for path in hub.iterdir()}
    model, tokenizer = AutoModelForCausalLM.from_pretrained(hub), AutoTokenizer.from_pretrained(hub)
    assert model.config.quantization_config is not None and tokenizer("a").input_ids
    told = [
        path for path in hub.rglob("*") if path.is_file() and str(checkpoint.parents[1]).encode() in path.read_bytes()
    ]
    assert told == []


def test_what_is_not_known_is_not_in_the_card_but_told(made: tuple[Path, str, Path], tmp_path: Path) -> None:
    base = made[2].parents[1] / "base"
    (base / "README.md").write_text("---\nlicense: [\n---\n")  # broken: the file of the licence is there still
    with_file = upload(made, tmp_path / "with-file")
    data = ModelCard.load(tmp_path / "with-file" / "README.md").data.to_dict()
    assert data["license"] == "other" and data["license_link"] == "LICENSE.txt"
    assert "base_model" not in data and "base_model_relation" not in data
    assert [remark.partition(",")[0] for remark in with_file.remarks] == ["The card names no base model"]
    (base / "LICENSE.txt").rename(base / "away")
    try:
        without = upload(made, tmp_path / "without", base_model="org/base")
    finally:
        (base / "away").rename(base / "LICENSE.txt")
        (base / "README.md").write_text(CARD)
    assert "license" not in ModelCard.load(tmp_path / "without" / "README.md").data.to_dict()
    assert without.remarks == ("The base's folder states no licence: add 'license' to the card",)
    assert "add 'license' to the card." in without.as_text()


def test_what_cannot_be_uploaded_is_refused_and_leaves_nothing(made: tuple[Path, str, Path], tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        upload(made, tmp_path / "full")
    store, run = evaluated(tmp_path / "results")
    for checkpoint, message in ((None, "has no checkpoint"), ("endpoint:http://127.0.0.1:1/v1", "served")):
        if checkpoint is not None:
            opened(store).add_to(run).set_tags({run_names.CHECKPOINT: checkpoint})
        with pytest.raises(ConfigError, match=message):
            mc.hub_folder(run, output=tmp_path / "hub", store=store)
    assert not (tmp_path / "hub").exists()
