"""Named corpora: WikiText-2, slices of C4 and of the Pile, and the baseline's own answers.

`c4_slice` is the text on which SparseGPT and Wanda report perplexity. Their `get_c4` joins the first 1,100 documents of
the first validation file with spaces, and takes the first 256 x 2048 tokens. They score windows of 2,048 tokens. Here
windows have 512 tokens, as in llama.cpp, so the perplexity differs. `pile_slice` is as large; no paper defines one.
(The harness's own tasks `c4` and `pile_*` score complete documents.)
"""

import re
from typing import Any

from mlflow_compress.errors import require_extra
from mlflow_compress.items.named_tasks import TASKS, NamedTask
from mlflow_compress.items.sources.data_dir import folder_of, load_split, read_data_file, register_corpus
from mlflow_compress.items.task import TRACE_TASK, Parts, TraceCorpus

_WIKITEXT, _CONFIG = "Salesforce/wikitext", "wikitext-2-raw-v1"
C4, _C4_FILE = "allenai/c4", "en/c4-validation.00000-of-00008.json.gz"
_PILE = "mit-han-lab/pile-val-backup"  # AutoAWQ's calibration set
_DOCUMENTS = 1_100
CORPUS_TOKENS = 256 * 2_048


def read_pile(data_dir: str, task: str) -> Any:
    """Return the documents of the validation split, whose file is compressed by zstd, unless a folder has another."""
    local = folder_of(_PILE, data_dir)
    if local is None or any(local.rglob("*.zst")):
        require_extra("pile", "zstandard", by=f"The Pile's file ({task})")
    return load_split(_PILE, None, "validation", data_dir=data_dir, task=task)


register_corpus(
    "c4_slice",
    lambda data_dir: list(read_data_file(C4, _C4_FILE, data_dir=data_dir, task="c4_slice")[:_DOCUMENTS]["text"]),
    source=f"{C4}, {_C4_FILE}",
    licence="ODC-BY",
    items=f"first {_DOCUMENTS:,} documents, {CORPUS_TOKENS:,} tokens",
    definition=f"{C4} {_C4_FILE} first {_DOCUMENTS} documents, blanks, {CORPUS_TOKENS} tokens",
    between=" ",
    max_tokens=CORPUS_TOKENS,
)
register_corpus(
    "pile_slice",
    lambda data_dir: list(read_pile(data_dir, "pile_slice")[:_DOCUMENTS]["text"]),
    source=_PILE,
    licence="not stated",
    items=f"first {_DOCUMENTS:,} documents of validation, {CORPUS_TOKENS:,} tokens",
    definition=f"{_PILE} validation first {_DOCUMENTS} documents, blanks, {CORPUS_TOKENS} tokens",
    between=" ",
    max_tokens=CORPUS_TOKENS,
)


def read_wikitext2(data_dir: str, split: str = "test", task: str = "wikitext2") -> str:
    """Return the text of the original file. Its blank lines hold a space, which the hub's copy has removed."""
    lines = load_split(_WIKITEXT, _CONFIG, split, data_dir=data_dir, task=task)["text"]
    return "".join(line or " \n" for line in lines)


ARTICLE = re.compile(r"(?m)^(?= = [^=\n].*[^=\n] = $)")
"""Matches before the title of an article of WikiText; the titles of its sections have more equals signs."""

register_corpus(
    "wikitext2",
    lambda data_dir: ARTICLE.split(read_wikitext2(data_dir)),
    source=f"{_WIKITEXT}, {_CONFIG}",
    licence="CC BY-SA 3.0",
    items="test text",
    definition=f"{_WIKITEXT} {_CONFIG} test",
)


TASKS.register(TRACE_TASK)(
    NamedTask(
        source="written by the baseline",
        licence="the baseline's",
        items="sampled answers to trace_instructions",
        shots="",
        rule="perplexity and KL, one window per answer",
        definition="sampled answers to the first turn of instructions, every token behind the prompt".encode,
        build=lambda settings, shots: Parts(corpora=(TraceCorpus(),)),
    )
)
