"""What the scoring benchmarks share: a random Llama with a tokenizer of its own, requests, and the machine's name."""

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "2")

import psutil
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 32_000


def texts(data: Path) -> Iterable[str]:
    """Yield every text value of the data sets, to train a tokenizer on."""
    for path in sorted(data.rglob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").split("\n"):
            yield from (value for value in json.loads(line or "{}").values() if isinstance(value, str))


def random_llama(**options: Any) -> LlamaForCausalLM:
    """Return a random Llama of hidden size 512 with 8 layers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=0, **options))


def make_model(folder: Path, data: Path, vocab_size: int = VOCAB_SIZE) -> Path:
    """Write a random float32 Llama (hidden 512, 8 layers, context 4096) and a byte-level BPE; return its folder.

    The tokenizer has at most `VOCAB_SIZE` tokens; a larger `vocab_size` widens the head only.
    """
    if (folder / "config.json").is_file():
        return folder
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts(data), vocab_size=VOCAB_SIZE, special_tokens=["<s>", "</s>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    random_llama(vocab_size=vocab_size, max_position_embeddings=4096, eos_token_id=1).save_pretrained(folder)
    return folder


def make_variant(folder: Path, baseline: Path, noise: float = 0.02) -> Path:
    """Write a copy of a model whose weight matrices are moved a little, as a compression would; return its folder."""
    if (folder / "config.json").is_file():
        return folder
    AutoTokenizer.from_pretrained(baseline).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(baseline)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.add_(noise * parameter.std() * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def harness_requests(data: Path, tasks: dict[str, str], limit: int) -> list[Any]:
    """Return lm-evaluation-harness's own requests: the first `limit` documents of each task.

    `data` is a folder of data sets in hub layout. `tasks`: a task of the harness, and lines of YAML that override its
    own (number of shots, splits that `data` lacks).
    """
    from lm_eval.tasks import TaskManager

    here = Path.cwd()
    os.chdir(data)  # the harness's dataset ids are found as folders there
    try:
        with tempfile.TemporaryDirectory() as folder:
            stock = TaskManager().task_index
            for name, overrides in tasks.items():
                text = f"include: {stock[name].yaml_path}\ntask: bench_{name}\n{overrides}\n"
                Path(folder, f"{name}.yaml").write_text(text)
            found = TaskManager(include_path=folder).load([f"bench_{name}" for name in tasks])["tasks"]
            requests = []
            for task in found.values():
                task.build_all_requests(limit=limit, rank=0, world_size=1)
                requests += task.instances
    finally:
        os.chdir(here)
    return requests


def machine() -> str:
    """Return processor, cores and memory in words."""
    info = Path("/proc/cpuinfo")
    names = (
        [x.split(":")[1].strip() for x in info.read_text().splitlines() if x.startswith("model name")]
        if info.is_file()
        else []
    )
    name = names[0] if names else platform.processor()
    memory = psutil.virtual_memory().total / 2**30
    return f"{name}, {torch.get_num_threads()} threads, {memory:.0f} GiB, torch {torch.__version__}"


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all scoring benchmarks take."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--data", type=Path, required=True, help="folder of data sets in hub layout")
    found.add_argument("--work", type=Path, required=True, help="folder for the model, made once")
    found.add_argument("--runs", type=int, default=3, help="paired runs; medians are printed (default: %(default)s)")
    return found
