"""Slices of C4 and of the Pile's validation text. (The harness's own tasks `c4` and `pile_*` score complete documents.)

`c4_slice` is the text on which SparseGPT and Wanda report perplexity. Their `get_c4` joins the first 1,100 documents of
the first validation file with spaces, and takes the first 256 x 2048 tokens. They score windows of 2,048 tokens. Here
windows have 512 tokens, as in llama.cpp, so the perplexity differs. `pile_slice` is as large; no paper defines one.
"""

from __future__ import annotations

from mlflow_compress.items.sources.data_dir import load_split, read_data_file, register_corpus

C4, C4_FILE = "allenai/c4", "en/c4-validation.00000-of-00008.json.gz"
PILE = "mit-han-lab/pile-val-backup"  # AutoAWQ's calibration set
DOCUMENTS = 1_100
TOKENS = 256 * 2_048


def c4_slice(data_dir: str) -> str:
    """Return the documents, joined with spaces."""
    return " ".join(read_data_file(C4, C4_FILE, data_dir=data_dir, task="c4_slice")[:DOCUMENTS]["text"])


def pile_slice(data_dir: str) -> str:
    """Return the documents, joined with spaces."""
    return " ".join(load_split(PILE, None, "validation", data_dir=data_dir, task="pile_slice")[:DOCUMENTS]["text"])


register_corpus(
    "c4_slice",
    c4_slice,
    source=f"{C4}, {C4_FILE}",
    licence="ODC-BY",
    items=f"first {DOCUMENTS:,} documents, {TOKENS:,} tokens",
    definition=f"{C4} {C4_FILE} first {DOCUMENTS} documents, blanks, {TOKENS} tokens",
    max_tokens=TOKENS,
)
register_corpus(
    "pile_slice",
    pile_slice,
    source=PILE,
    licence="not stated",
    items=f"first {DOCUMENTS:,} documents of validation, {TOKENS:,} tokens",
    definition=f"{PILE} validation first {DOCUMENTS} documents, blanks, {TOKENS} tokens",
    max_tokens=TOKENS,
)
