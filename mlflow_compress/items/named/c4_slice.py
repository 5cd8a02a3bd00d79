"""The slice of C4 on which SparseGPT and Wanda report perplexity: the same text, in other windows.

Their `get_c4` joins the first 1,100 documents of the first validation file with spaces, and takes the first 256 x 2048
tokens. They score windows of 2,048 tokens. Here windows have 512 tokens, as in llama.cpp, so the perplexity differs.
(The harness's own task `c4` scores complete documents.)
"""

from __future__ import annotations

from mlflow_compress.items.sources.data_dir import load_file, register_corpus

DATASET = "allenai/c4"
FILE = "en/c4-validation.00000-of-00008.json.gz"
DOCUMENTS = 1_100
TOKENS = 256 * 2_048


def read(data_dir: str) -> str:
    """Return the documents, joined with spaces."""
    found = load_file(DATASET, FILE, data_dir=data_dir, task="c4_slice")
    return " ".join(found[:DOCUMENTS]["text"])


register_corpus(
    "c4_slice",
    read,
    source=f"{DATASET}, {FILE}",
    licence="ODC-BY",
    items=f"first {DOCUMENTS:,} documents, {TOKENS:,} tokens",
    definition=f"{DATASET} {FILE} first {DOCUMENTS} documents, blanks, {TOKENS} tokens",
    max_tokens=TOKENS,
)
