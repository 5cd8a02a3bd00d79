"""Every reader of files that others wrote, an input that each of them takes, and inputs that nobody should take."""

import hashlib
import io
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_type_hints

import numpy as np
import pyarrow.parquet as pq
from safetensors.numpy import save

from mlflow_compress import demo
from mlflow_compress.commands.compare.run import compare
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.sweep.parameters import SweepConfig
from mlflow_compress.commands.sweep.plan import combinations
from mlflow_compress.compression.checkpoint_manifest import MANIFEST_VERSION, CheckpointManifest
from mlflow_compress.config import parse
from mlflow_compress.config.policy import Policy, policy_yaml, read_policy
from mlflow_compress.errors import DataError, MlflowCompressError
from mlflow_compress.files import parse_json
from mlflow_compress.items.sources.calibration_sets import load_calibration
from mlflow_compress.items.sources.data_dir import load_split
from mlflow_compress.items.sources.instructions import load_instructions
from mlflow_compress.items.sources.question_files import load_file
from mlflow_compress.items.task import TaskSettings
from mlflow_compress.judges.asking import read_rating, read_verdict
from mlflow_compress.judges.encoders import embedded_folder, load_encoder
from mlflow_compress.judges.prompts import OURS, read_pair_prompts
from mlflow_compress.models import gguf_file, stored_weights
from mlflow_compress.scoring.baseline_store import FORMAT, MANIFEST, StateStore, StoreManifest
from mlflow_compress.scoring.journal import Journal
from mlflow_compress.transport.replies import NoReply, Reply, ReplyCache, read_completion, read_embeddings
from mlflow_compress.transport.spending import read_prices
from tests.judge_server import completion
from tests.page_contents import records

_TENSORS = save({"x": np.zeros(2, np.float32)})
Outcome = Literal["accepted", "clear error", "raw"]


@dataclass(frozen=True)
class Reader:
    file: str  # name of its input in an empty folder
    valid: bytes  # an input that it takes
    read: Callable[[Path], object]
    structured: bool = True  # JSON, or lines of JSON: then single values are replaced, too
    slow: bool = False  # a case takes a tenth of a second or more


def outcome(reader: Reader, data: bytes) -> tuple[Outcome, BaseException | None]:
    """Return what a reader makes of an input, in a folder of its own, and what it raised."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / reader.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        try:
            reader.read(path)
        except MlflowCompressError as error:
            # One sentence or a few, not somebody else's report, and never without words.
            return ("clear error", error) if 10 < len(str(error)) < 3000 else ("raw", error)
        except Exception as error:  # noqa: BLE001  (whatever a reader lets through is what is looked for)
            return "raw", error
    return "accepted", None


def lines(*rows: object) -> bytes:
    """Return rows as JSONL."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _dummy(kind: Any) -> Any:
    """Return a value of a field's type."""
    text = str(kind)
    if text.startswith("dict"):
        return {}
    return {"<class 'int'>": 3, "<class 'float'>": 2.0, "<class 'str'>": "a"}.get(text, None if "None" in text else [])


def _manifest(path: Path) -> None:
    (path.parent / "model.safetensors").write_bytes(_TENSORS)
    CheckpointManifest.read(path.parent)


def _journal(path: Path) -> None:
    (path.parent / "part-00000.safetensors").write_bytes(_TENSORS)
    Journal(path.parent, {}).load()


def _parquet(table: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def _records(name: str) -> Callable[[Path], object]:
    """Return a reader of one table beside two good ones, as `compare` reads a folder."""

    def read(path: Path) -> object:
        good = path.parent / "good"
        records("baseline", "4").write(good)
        for other in good.glob("*.parquet"):
            if other.stem != name:
                shutil.copy(other, path.parent)
        return compare(str(good), str(path.parent))

    return read


def _about(path: Path) -> object:
    good = path.parent / "good"
    for folder in (good, path.parent):
        records("baseline", "4").write(folder)
    (good / "about.json").write_text(json.dumps({"tokenizer": "a", "num_fewshot": 5}))
    return compare(str(good), str(path.parent))


def _in_data_dir(path: Path) -> object:
    return list(load_split("own/set", None, "test", data_dir=str(path.parents[2]), task="x"))


def _counted(found: object) -> object:
    """Return a reply; one with a reason why nothing can be read in it counts as refused with a clear error."""
    reason = found.reason if isinstance(found, NoReply) else found.problem if isinstance(found, Reply) else None
    if reason is not None:
        raise DataError(f"The reply counts as unscored: {reason}")
    return found


def _gguf() -> bytes:
    import gguf

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(1)
        writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def _encoder(path: Path) -> object:
    for source in embedded_folder().iterdir():
        if source.name != path.name:
            (path.parent / source.name).symlink_to(source)
    return load_encoder(str(path.parent), device="cpu")


_HARNESS = [
    {
        "doc_id": i,
        "target": "0",
        "task_name": "t",
        "filter": "none",
        "doc_hash": f"d{i}",
        "prompt_hash": "p",
        "arguments": {f"gen_args_{k}": {"arg_0": "Q", "arg_1": f" {k}"} for k in range(2)},
        "filtered_resps": [["-1.0", "False"], ["-2.0", "False"]],
        "acc": 1.0,
        "acc_norm": 1.0,
    }
    for i in range(3)
]
_GENERATED = [
    {"doc_id": i, "target": "4", "filter": "strict", "filtered_resps": ["4"], "exact_match": 1.0} for i in range(3)
]
_PAIR = {"system_prompt": "s", "prompt_template": "{question}"}
_STORE = {**{name: _dummy(kind) for name, kind in get_type_hints(StoreManifest).items()}, "format": FORMAT}
_HINTS = get_type_hints(CheckpointManifest)


@cache
def readers() -> dict[str, Reader]:
    """Return every reader, by name."""
    data, none = demo.DATA_DIR, TaskSettings()
    first = {name: b"".join((data / f"{name}.jsonl").read_bytes().splitlines(keepends=True)[:40]) for name in ("choice", "cloze", "exact", "lastword")}  # fmt: skip
    questions = {
        f"questions, {name}": Reader(f"{name}.jsonl", text, lambda path: load_file(path, TaskSettings(num_fewshot=0)))
        for name, text in first.items()
    }
    manifest = {name: _dummy(kind) for name, kind in _HINTS.items()}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.safetensors").write_bytes(_TENSORS)
        manifest |= {"version": MANIFEST_VERSION, "weight_files": stored_weights.hash_weights(Path(folder))[0]}
    assert set(manifest) - {"version"} == {field.name for field in fields(CheckpointManifest)}
    table = {name: _parquet(getattr(records("baseline", "4"), name).table) for name in ("option_scores", "generations")}
    prices = b"gpt-4: {prompt: 30, completion: 60}\nlocal: {prompt: 0, completion: 0.5}\n"
    note = {"groups": 1, "sha256": hashlib.sha256(_TENSORS).hexdigest(), "note": {}}
    return {
        "JSON": Reader("a.json", b'{"a": [1, 2.5, "x", null, {"b": true}]}', lambda p: parse_json(p.read_bytes(), source=p)),
        **questions,
        "corpus": Reader("corpus.txt", b"A text.\n" * 50, lambda path: load_file(path, none), structured=False),
        "instructions": Reader(
            "i.jsonl",
            lines(
                {"question_id": 1, "category": "math", "turns": ["a", "b"], "reference": ["c", "d"]},
                {"instruction": "e", "input": "f", "output": "g"},
            ),
            lambda path: load_instructions(path, none),
        ),
        "calibration": Reader(
            "c.jsonl",
            lines({"messages": [{"role": "user", "content": "a"}]}, {"messages": [{"role": "user", "content": "b"}]}),
            lambda path: load_calibration(str(path), model="demo", data_dir=""),
        ),
        "parameters": Reader(
            "p.yaml", b"limit: 3\ntasks: demo\nseed: 7\n", lambda path: parse(EvaluateConfig, {"config": str(path)}), structured=False
        ),
        "policy": Reader("policy.yaml", policy_yaml(Policy()).encode(), lambda p: read_policy(str(p)), structured=False),
        "prices": Reader("prices.yaml", prices, read_prices, structured=False),
        "grid": Reader(
            "grid.yaml",
            b"- {method: rtn, bits: [4, 3]}\n- {methods: [hqq], group_size: [64]}\n",
            lambda path: combinations(SweepConfig(grid=str(path))),
            structured=False,
        ),
        "judge prompts": Reader("judge_prompts.jsonl", lines(*({"name": name, **_PAIR} for name in OURS)), read_pair_prompts),
        "answers": Reader(
            "a.jsonl",
            lines(*({"id": str(i), "pred": "A", "gold": "AB"[i % 2], "prompt": "p"} for i in range(4))),
            lambda path: compare(str(path), str(path)),
        ),
        "harness log": Reader("samples_t.jsonl", lines(*_HARNESS), lambda path: compare(str(path), str(path))),
        "harness log, text": Reader("samples_g.jsonl", lines(*_GENERATED), lambda path: compare(str(path), str(path))),
        "judge reply": Reader(
            "r.json",
            json.dumps(completion("[[7]]", usage={"prompt_tokens": 1, "completion_tokens": 2})).encode(),
            lambda path: _counted(read_completion(path.read_text(errors="replace"), "m")),
        ),
        "embeddings reply": Reader(
            "e.json",
            json.dumps({"data": [{"index": 0, "embedding": [1.0, 2.0]}], "model": "m", "usage": {"prompt_tokens": 1}}).encode(),
            lambda path: _counted(read_embeddings(path.read_text(errors="replace"), "m", 1)),
        ),
        "rating": Reader(
            "t.txt",
            b"Good. Rating: [[7]] and [[A]]",
            lambda path: (read_rating(path.read_text(errors="replace")), read_verdict(path.read_text(errors="replace"))),
            structured=False,
        ),
        "stored judgments": Reader("judgments.jsonl", lines({"key": "a", "value": {"judgment": "x"}}), ReplyCache),
        "records, scores": Reader("option_scores.parquet", table["option_scores"], _records("option_scores"), structured=False),
        "records, answers": Reader("generations.parquet", table["generations"], _records("generations"), structured=False),
        "about.json": Reader("about.json", b'{"tokenizer": "a", "num_fewshot": 5}', _about),
        "checkpoint manifest": Reader("compression.json", json.dumps(manifest).encode(), _manifest),
        "state manifest": Reader(MANIFEST, json.dumps(_STORE).encode(), lambda path: StateStore.open(path.parent)),
        "unfinished work": Reader("part-00000.json", json.dumps(note).encode(), _journal),
        "safetensors": Reader(
            "model.safetensors",
            save({"a": np.zeros((2, 3), np.float32), "b": np.ones(4, np.float16)}),
            lambda path: stored_weights.read_headers(path.parent),
            structured=False,
        ),
        "GGUF": Reader("model.gguf", _gguf(), gguf_file.read_gguf_headers, structured=False),
        "encoder's modules": Reader(
            "modules.json", (embedded_folder() / "modules.json").read_bytes(), _encoder, slow=True
        ),
        "data set, JSONL": Reader("own/set/test.jsonl", lines({"a": 1}, {"a": 2}), _in_data_dir, slow=True),
        "data set, CSV": Reader("own/set/test.csv", b"a,b\n1,x\n2,y\n", _in_data_dir, structured=False, slow=True),
        "data set, Parquet": Reader("own/set/test.parquet", table["generations"], _in_data_dir, structured=False, slow=True),
    }  # fmt: skip


NASTY: tuple[str, ...] = (
    *("null", "true", "[]", "{}", '""', '" "', "-1", "0", "1e999", "NaN", "-Infinity", "9" * 5000, "9" * 400, "1" * 30),
    *('"\\ud800"', '"\\u0000"', '"' + "x" * 6000 + '"', "[[[[]]]]", '[""]', '["a", "a"]', '{"a": 1, "a": 2}', "99999"),
)
"""JSON values that are no values of most fields."""

CORPUS: tuple[bytes, ...] = (
    *(
        b"",
        b" \n",
        b"\xff\xfe\x00",
        b"\x00" * 64,
        b"null",
        b"[]",
        b"{}",
        b"3",
        b'"text"',
        b"[" * 20_000,
        b'{"a":' * 5_000,
    ),
    *(
        b'{"a": ' + b"9" * 5_000 + b"}",
        b'{"a": 1, "a": 2}',
        b'"\\ud800"',
        b"- - - : :",
        b"a: &a [*a, *a]",
        b"a: 2020-99-99",
    ),
    *(
        b"x" * 70_000,
        "é\u2028".encode("utf-16"),
        b"PAR1" * 4,
        b"GGUF" + b"\xff" * 40,
        (2**63 - 1).to_bytes(8, "little"),
    ),
    *(b"\xef\xbb\xbf{}", b"{" * 3_000 + b": " * 3_000, b"? " * 4_000, b"!!python/object:os.system x", b"a: !!int 0x"),
)
"""Inputs that are none of any reader's."""
