"""Memory of scoring by length of the context: of the head's part, and of the body's, which grows with the tokens.

A random Llama with a vocabulary of 32,768 and a noisy copy of it read a text of random tokens, all of which are scored:
one long option, or with --chain a chain of thought of the baseline, which also has entropies. One process per length.
"head" is the peak of one call of the reduction from states to log-probabilities and distances, "body" that of the
states, above what the process held when the call began. "kl_error" is the largest difference of a token's KL from the
plain computation: both models' logits at once, in float64.

    python -m benchmarks.long_context_memory 1024 4096 16384 32768
    python -m benchmarks.long_context_memory --chain 4000 16000
"""

import copy
import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig
from transformers.models.auto import AutoModelForCausalLM

from benchmarks.anonymous_memory import anonymous_peak
from mlflow_compress.models.loading import LoadedModel
from mlflow_compress.records import Traces
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from mlflow_compress.scoring.plan.encoding import Encoder
from mlflow_compress.scoring.scoring_pass import ScoringPass
from tests.unit.scoring_models import build_tokenizer, request

VOCABULARY, LONGEST = 32_768, 32_768
PLAIN_UP_TO = 4_096  # tokens: the plain computation holds context x vocabulary, in float64


def models() -> tuple[LoadedModel, LoadedModel]:
    """Return a random model and a noisy copy of it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
        initializer_range=0.2,
    )
    base = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    other = copy.deepcopy(base)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(0.02 * weight.std() * torch.randn_like(weight)) if weight.ndim > 1 else None
    loaded = (
        LoadedModel(m, build_tokenizer(), Path("nowhere"), torch.float32, torch.device("cpu")) for m in (base, other)
    )
    first, second = loaded
    return first, second


def measure(tokens: int, *, chain: bool) -> dict[str, float]:
    """Score a text of as many tokens, and return the peaks in MB."""
    base, other = models()
    letters = "".join(chr(97 + (i * i + i // 7) % 26) + " " * (i % 3 == 0) for i in range(4 * tokens))
    ids = base.tokenizer.encode(letters)
    while len(ids) > tokens + 1:
        letters = letters[: max(1, int(len(letters) * tokens / len(ids)) - (len(ids) < tokens + 40))]
        ids = base.tokenizer.encode(letters)
    asked = [request("0", letters[:2], letters[2:])]
    peaks = {"head": 0, "body": 0}

    def watched(name: str, method: str) -> None:
        plain = getattr(ScoringPass, method)

        def call(self: ScoringPass, *args: object) -> object:
            gc.collect()
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is freed would hide what is taken next
            with anonymous_peak() as peak:
                found = plain(self, *args)
            peaks[name] = max(peaks[name], peak.added)
            return found

        setattr(ScoringPass, method, call)

    watched("head", "_reduce")
    watched("body", "_states_of")
    Scorer(base, ScoringConfig(progress=False)).score([request("0", "a", " b c d e")], baseline=other)
    peaks.update(head=0, body=0)  # libraries and compiled loops are there
    scorer = Scorer(other, ScoringConfig(progress=False))
    if chain:
        written = {"task": "t", "item_id": "0", "sample": 0, "prompt_tokens": ids[:1], "tokens": ids[1:], "text": ""}
        _, distances = scorer.score_corpus("t", Traces.from_rows([written]), baseline=base)
        found = float(distances.column("kl").mean())
    else:
        _, distances = scorer.score(asked, baseline=base)
        [found] = distances.column("kl").tolist()
    result = {"tokens": len(ids), "rows": scorer.report.n_rows, **{n: round(b / 1e6, 1) for n, b in peaks.items()}}
    if tokens <= PLAIN_UP_TO:
        [encoded] = Encoder(base.tokenizer, LONGEST).encode(asked)
        inputs = torch.tensor(ids[:-1])[None] if chain else torch.from_numpy(encoded.inputs.astype("int64"))[None]
        with torch.no_grad():
            p, q = (torch.log_softmax(m.model(inputs).logits[0].double(), -1) for m in (base, other))
        kl = (p.exp() * (p - q)).sum(-1)[0 if chain else -len(encoded.targets) :]
        result |= {"kl": found, "kl_error": abs(found - float(kl.mean()))}
    return result


if __name__ == "__main__":
    chain = ["--chain"] if "--chain" in sys.argv else []
    lengths = [one for one in sys.argv[1:] if not one.startswith("--")]
    if "--one" in sys.argv:
        torch.set_num_threads(1)
        print(json.dumps(measure(int(lengths[0]), chain=bool(chain))))
    else:
        for length in lengths:
            command = [sys.executable, "-m", "benchmarks.long_context_memory", "--one", length, *chain]
            subprocess.run(command, check=True)
