"""A small model's folder, damaged in one of its files, and what the commands make of it: see `outcome_of`."""

import contextlib
import hashlib
import json
import logging
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from mlflow_compress.commands.command import configured
from mlflow_compress.commands.evaluate.baseline import evaluation_id
from mlflow_compress.commands.evaluate.items import suite_of, with_chat_template
from mlflow_compress.commands.evaluate.models import open_baseline
from mlflow_compress.commands.evaluate.outputs import run_model
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.quantize.parameters import QuantizeConfig
from mlflow_compress.commands.shared.named_models import read_manifest
from mlflow_compress.compression import pipeline
from mlflow_compress.compression.method import method_config
from mlflow_compress.compression.reload_check import check_reload
from mlflow_compress.config import parse
from mlflow_compress.demo import DATA_DIR
from mlflow_compress.errors import CheckpointError, MlflowCompressError, machine_fault
from mlflow_compress.models.identity import (
    check_same_tokenizer,
    require_own_tokens,
    require_tokenizer_files,
    require_tools_template,
)
from mlflow_compress.models.loading import LoadConfig, open_light
from tests.task_files import write_rows

Result = Literal["equal", "another identity", "refused", "raw", "silent"]
"""What became of a damaged folder: accepted with the same numbers, accepted as another model, refused with one clear
error of ours, ended by somebody else's exception, accepted as the same model with other numbers."""

TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
_SPECIAL = ["<s>", "</s>", "<unk>"]


def _tokenizer() -> Any:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=_SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([(DATA_DIR / "corpus.txt").read_text()[:20_000]], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE
    )
    wrapped.model_max_length = 256
    return wrapped


def make_model(folder: Path) -> Path:
    """Write a random Llama of 30,000 weights in several files, with every file that a folder from a hub can have."""
    tokenizer = _tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.data.normal_(0.0, 0.2)
    model.save_pretrained(folder, max_shard_size="60KB")
    tokenizer.save_pretrained(folder)
    settings = {"bos_token_id": 0, "eos_token_id": [1], "do_sample": True, "temperature": 0.7, "max_length": 256}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    names = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    (folder / "added_tokens.json").write_text(json.dumps({"</s>": 1}))
    return folder


@dataclass(frozen=True)
class Damage:
    """A file of the folder with new content; None: it is not there."""

    file: str
    what: str  # What was done to it, in a few words
    data: bytes | None

    def apply(self, source: Path, folder: Path) -> Path:
        """Return `folder`, which now is `source` with this damage."""
        shutil.copytree(source, folder, copy_function=partial(shutil.copy, follow_symlinks=True))
        if self.data is None:
            (folder / self.file).unlink()
        else:
            (folder / self.file).write_bytes(self.data)
        return folder


@cache
def _tasks(folder: Path) -> str:
    """Write a few items of every kind that reads the tokenizer, the template or the generation settings."""
    letters = [
        {
            "id": str(i),
            "category": "c",
            "question": f"What is {i} and {i}?",
            "choices": [str(2 * i), "none"],
            "answer": 0,
            "split": "test",
        }
        for i in range(3)
    ]
    answers = [{"id": str(i), "category": "c", "prompt": f"Q: Say {i}.\nA:", "answers": [str(i)]} for i in range(2)]
    chats = [
        {"messages": [{"role": "user", "content": f"Is {i} odd?"}, {"role": "assistant", "content": "It is."}]}
        for i in range(2)
    ]
    names = [write_rows(folder / f"{name}.jsonl", rows) for name, rows in (("letters", letters), ("exact", answers))]
    chat = write_rows(folder / "chats.jsonl", chats)
    return ",".join([*map(str, names), f"openai:{chat}"])


@dataclass(frozen=True)
class Evaluated:
    """What evaluation makes of a folder."""

    identity: str  # Evaluations that share it are compared with each other
    numbers: str  # Hash of every number and text that was computed


def evaluate(folder: Path, work: Path) -> Evaluated:
    """Evaluate a folder as a baseline, and return its identity and its numbers."""
    values = {"model": str(folder), "tasks": _tasks(work), "num_fewshot": "0", "device": "cpu", "system_prompt": "Hi."}
    configured(QuantizeConfig, {"model": str(folder), "method": "none"}, work / "store")
    for check in (require_tokenizer_files, require_own_tokens, require_tools_template):  # as that of `evaluate` does
        with contextlib.suppress(CheckpointError):
            check(folder)
    config = parse(EvaluateConfig, values)
    base = open_baseline(config)
    suite = with_chat_template(base.tokenizer, suite_of(config), config.inference.system_prompt or "")
    identity = evaluation_id(base, suite, config)
    outputs = run_model(base.scorer(base.load()), suite)
    scores = outputs.records.option_scores
    total = hashlib.sha256()
    if scores is not None:
        values_of_options = np.asarray(scores.column("loglik"), dtype=np.float64)
        total.update(np.round(values_of_options, 4).tobytes())
    if outputs.records.generations is not None:
        total.update(json.dumps(outputs.records.generations.column("text").tolist()).encode())
    return Evaluated(identity, total.hexdigest())


def compress(folder: Path, work: Path, method: str = "none", **settings: object) -> Path:
    """Compress a folder, and return the new one."""
    out = work / "compressed"
    shutil.rmtree(out, ignore_errors=True)
    config = method_config(method, **settings)
    pipeline.compress_model(str(folder), method, config, [], out, device="cpu")
    return out


def outcome_of(folder: Path, work: Path, untouched: Evaluated) -> tuple[Result, str]:
    """Return what the commands make of a folder, and in what words.

    It is evaluated, and compressed; what was compressed is evaluated too, and must give the same numbers.
    """
    try:
        with quiet():
            if (folder / "compression.json").exists():
                read_manifest(str(folder))
            after = evaluate(folder, work)
            if "quantization_config" not in (folder / "config.json").read_text():
                made = compress(folder, work)
                check_same_tokenizer(*(open_light(LoadConfig(path=str(one))) for one in (folder, made)))
                if evaluate(made, work).numbers != after.numbers:
                    return "silent", "the compressed one, by no method, has other numbers"
    except Exception as raised:  # noqa: BLE001  (whatever is let through is what is looked for)
        error = machine_fault(raised) or raised
        if isinstance(error, MlflowCompressError) and 10 < len(str(error)) < 3000:
            return "refused", str(error)
        return "raw", f"{type(error).__name__}: {error}"
    finally:
        left = list(work.glob(".*.partial"))
        shutil.rmtree(work / "compressed", ignore_errors=True)
    if left:
        return "raw", f"half-written: {left[0]}"
    if after.identity != untouched.identity:
        return "another identity", "same numbers" if after.numbers == untouched.numbers else "other numbers"
    return ("equal" if after.numbers == untouched.numbers else "silent"), "other numbers, same identity"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within this block, libraries say nothing."""
    logging.disable(logging.CRITICAL)
    try:
        with pipeline.quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def reload_here(folder: Path, **options: Any) -> Any:
    """Load a compressed folder again in this process, in place of the pipeline's new one, which takes seconds."""
    with pipeline.quiet():
        report = check_reload(folder, device="cpu", trust_remote_code=False)
    report.require_agreement()
    return report
