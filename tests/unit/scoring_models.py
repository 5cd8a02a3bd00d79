"""Small random models and requests for the scoring tests, and the naive forward pass that they are compared with."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import Gemma2Config, GPT2Config, GPTNeoXConfig, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config
from transformers.models.auto import AutoModelForCausalLM

from mlflow_compress.judges.encoders import SentenceEncoder
from mlflow_compress.models.loading import LoadedModel
from mlflow_compress.records import Request
from mlflow_compress.scoring.plan.encoding import Encoder

VOCAB = 300
GREEDY: dict[str, Any] = {"temperature": 0.0, "samples": 1, "top_k": 0, "top_p": 1.0}
TEXT = (
    "The river runs past the old mill and the miller counts his sacks of flour in the evening. "
    "Question: What does the baker buy from the miller? Answer: flour. A. salt B. flour C. iron D. wool "
    "Nobody knows how many sheep there are on the hill, but the shepherd says there are nine hundred. "
)


def build_tokenizer(*, adds_bos: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `VOCAB` tokens; with `adds_bos` every encoding begins with <s>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


_COMMON: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
_SHAPE: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**_SHAPE, num_key_value_heads=2, head_dim=12),
    "qwen2": lambda: Qwen2Config(**_SHAPE, num_key_value_heads=2),
    "gpt_neox": lambda: GPTNeoXConfig(**_SHAPE),
    "gpt2": lambda: GPT2Config(**_COMMON, n_embd=48, n_layer=3, n_head=4, n_positions=160),
    "gemma2": lambda: Gemma2Config(
        **_SHAPE,
        num_key_value_heads=2,
        head_dim=12,
        query_pre_attn_scalar=12,
        sliding_window=160,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=8.0,
    ),
}


def build_model(config: Any, *, seed: int = 0) -> Any:
    """A model whose weights are large enough for attention, soft caps and context to matter."""
    torch.manual_seed(seed)
    capped = getattr(config, "attn_logit_softcapping", None)
    attention = "eager" if capped or config.model_type in ("bloom", "mamba") else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def load_random(name: str, *, seed: int = 0, path: Path | None = None, adds_bos: bool = True) -> LoadedModel:
    """A random model of one of the architectures in `CONFIGS`, saved to `path` when that is given."""
    model, tokenizer = build_model(CONFIGS[name](), seed=seed), build_tokenizer(adds_bos=adds_bos)
    if path is not None:
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    return LoadedModel(model, tokenizer, path or Path("nowhere"), torch.float32, torch.device("cpu"))


def request(item: int | str, context: str, continuation: str, *, option: int = 0, permutation: int = 0) -> Request:
    """A request of task "t"."""
    text = continuation.strip()
    return Request("t", str(item), permutation, option, option, context, continuation, len(text), len(text.encode()))


def mixed_requests() -> list[Request]:
    """Lettered items behind two headers with shuffles, cloze options of several tokens, and the odd cases."""
    out: list[Request] = []
    words = TEXT.split()
    for subject in range(2):
        header = "".join(f"Question: {' '.join(words[i : i + 4])}?\nAnswer: A\n\n" for i in range(subject, 3 + subject))
        for item in range(4):
            stem = f"Question: {' '.join(words[10 + item : 14 + item])}?\n"
            options = [words[20 + item + k] for k in range(4)]
            for permutation in range(2):
                shown = options if permutation == 0 else options[::-1]
                context = header + stem + "".join(f"{x}. {o}\n" for x, o in zip("ABCD", shown, strict=True)) + "Answer:"
                for o, letter in enumerate("ABCD"):
                    out.append(request(f"{subject}-{item}", context, f" {letter}", option=o, permutation=permutation))
    for item in range(4):
        context = "The miller counts " + " ".join(words[item : item + 6])
        for o, continuation in enumerate([" his sacks", " his sacks of flour", " nine hundred sheep", " wool"]):
            out.append(request(f"cloze-{item}", context, continuation, option=o))
    out.append(request("empty", "", "The river runs"))
    out.append(request("spaces", "The river runs  ", "past the mill"))
    out.append(request("short context", "The", " " + " ".join(words[:12])))
    out.append(request("overflow", " ".join(words * 12), " flour and iron"))
    out.append(request("again", "The river runs", " past the mill"))
    out.append(request("again 2", "The river runs", " past the mill"))
    return out


def naive_logprobs(loaded: LoadedModel, requests: Sequence[Request]) -> list[np.ndarray[Any, Any]]:
    """Log-probabilities at each target, one request at a time in float64, each of shape (n_targets, VOCAB)."""
    model = copy.deepcopy(loaded.model).double()
    out = []
    for encoded in Encoder(loaded.tokenizer, loaded.max_length).encode(requests):
        with torch.no_grad():
            logits = model(torch.from_numpy(encoded.inputs.astype(np.int64))[None]).logits[0]
        out.append(torch.log_softmax(logits, dim=-1)[-len(encoded.targets) :].numpy())
    return out


U = 2.0**-24  # unit roundoff of float32


def rounding(loaded: LoadedModel) -> float:
    """Return a bound of what float32 does to a log-probability, in nats a token: for any order of summation."""
    ids = torch.tensor([loaded.tokenizer.encode(TEXT)[:100]])
    return rounding_of(loaded.model, ids, read=lambda output: torch.log_softmax(output.logits, dim=-1))


def rounding_of(model: Any, ids: torch.Tensor, read: Callable[[Any], torch.Tensor] = lambda x: x.logits) -> float:
    """Return a bound of what float32 does to a model's logits, or to what `read` takes from its output.

    A computed product of n terms is the exact product with weights that are changed by a relative n U at most (Higham
    2002, section 3.1), and by sqrt(n) U where roundings are independent (Higham and Mary 2019, theorem 2.4). So all
    weights are changed by that much, up or down, and twice: norms and attention round too, in sums of fewer terms.
    """
    model, signs = copy.deepcopy(model).double(), torch.Generator().manual_seed(0)
    model.set_experts_implementation("eager")  # the others take no float64
    ends = [x.weight for x in (model.get_input_embeddings(), model.get_output_embeddings()) if x is not None]
    with torch.no_grad():
        exact = read(model(input_ids=ids))
        for weight in model.parameters():
            up = 2.0 * torch.randint(0, 2, weight.shape, generator=signs) - 1.0
            # Embeddings and head have a row for each token, and fewer terms.
            n = weight.shape[1] if any(weight is end for end in ends) else max(weight.shape)
            weight.mul_(1.0 + 2.0 * n**0.5 * U * up)
        return float((read(model(input_ids=ids)) - exact).abs().max())


def rounding_of_vectors(encoder: SentenceEncoder) -> float:
    """Return a bound of what float32 does to an entry of a text's vector: the mean of its states, at unit length."""
    ids = encoder.model.tokenizer(TEXT, return_tensors="pt")["input_ids"]
    read = lambda x: torch.nn.functional.normalize(x.last_hidden_state.mean(dim=1), dim=1)  # noqa: E731
    return rounding_of(encoder.model[0].auto_model, ids, read=read)


def kl_of_rounding(model: Any, ids: torch.Tensor) -> float:
    """Return a bound of the KL between two passes in float32 that compute the same.

    A KL is at most half of the square of the largest change of ln p. This is at most twice a logit's; both are rounded.
    """
    return (2 * 2 * rounding_of(model, ids)) ** 2 / 2


def naive_logliks(loaded: LoadedModel, requests: Sequence[Request]) -> np.ndarray[Any, Any]:
    """Summed log-likelihood of each request by the naive pass."""
    encoded = Encoder(loaded.tokenizer, loaded.max_length).encode(requests)
    parts = zip(naive_logprobs(loaded, requests), encoded, strict=True)
    return np.asarray([logp[np.arange(len(e.targets)), e.targets].sum() for logp, e in parts])
