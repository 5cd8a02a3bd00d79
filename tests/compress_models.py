"""Models that the compression tests compress: random ones made on the spot, and distances between checkpoints."""

from pathlib import Path
from typing import Any

import torch
import transformers

from mlflow_compress.compression.pipeline import quiet
from mlflow_compress.compression.probe import ReloadReport
from mlflow_compress.compression.reload_check import check_reload
from mlflow_compress.models import architectures
from mlflow_compress.models.architectures import packed_layers
from mlflow_compress.models.placement import Offload

TEXT = ["The miller of Oru keeps nine geese, and each goose has a name that only the miller knows. " * 400]


def make_tokenizer() -> Any:
    """Return a tokenizer of 64 word-like pieces, built from bytes alone."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = [*sorted({*"abcdefghijklmnopqrstuvwxyzTO .,"}), "<unk>"]
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def make_llama(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    """Write a random Llama (hidden 64, 2 layers, bfloat16) with a tokenizer and return its folder."""
    return _save(transformers.LlamaConfig(**{**SMALL, **changes}), folder, seed, dtype)


def make_qwen2(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    """Write a random Qwen2 (biases in attention, tied head, a type for each layer)."""
    settings = {**SMALL, "tie_word_embeddings": True, **changes}
    return _save(transformers.Qwen2Config(**settings), folder, seed, dtype)


def make_mistral(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    """Write a random Mistral that sees the whole context."""
    return _save(transformers.MistralConfig(**{**SMALL, "sliding_window": None, **changes}), folder, seed, dtype)


def make_qwen3(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    """Write a random Qwen3 (normed queries and keys, heads wider than their share of the stream)."""
    return _save(transformers.Qwen3Config(**{**SMALL, "head_dim": 32, **changes}), folder, seed, dtype)


def make_gemma2(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a random Gemma 2 (norms of 1 + weight, two of them around each block)."""
    return _save(transformers.Gemma2Config(**SMALL, head_dim=32, sliding_window=64), folder, seed, dtype)


def make_mixture(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    """Write a random Qwen3 mixture of four experts."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 32}
    return _save(transformers.Qwen3MoeConfig(**{**SMALL, **experts, **changes}), folder, seed, dtype)


def make_mixtral(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a random Mixtral of four experts, which stores its experts under other names than it loads them."""
    return _save(transformers.MixtralConfig(**SMALL, num_local_experts=4), folder, seed, dtype)


def make_gpt_oss(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a random gpt-oss, whose experts have biases and interleaved columns."""
    return _save(
        transformers.GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, head_dim=32), folder, seed, dtype
    )


def make_falcon(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a random Falcon, whose linear layers are of a class of their own."""
    config = transformers.FalconConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    return _save(config, folder, seed, dtype)


def make_neox(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a random GPT-NeoX (another architecture: fused query-key-value, biases, parallel residual)."""
    config = transformers.GPTNeoXConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    return _save(config, folder, seed, dtype)


def _save(config: Any, folder: Path, seed: int, dtype: torch.dtype) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():  # the usual start (0.02) would give nearly uniform predictions
            if parameter.ndim == 2:
                parameter.data.normal_(0.0, 0.12)
    model.to(dtype).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def write_adapter(base: Path, folder: Path, *, steps: int = 0, **settings: Any) -> Path:
    """Write a LoRA adapter of rank 4: random, or trained on a few lines of text."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    settings = {"target_modules": "all-linear", "init_lora_weights": steps > 0, **settings}
    config = LoraConfig(r=4, task_type="CAUSAL_LM", **settings)
    tuned = get_peft_model(model, config)
    if steps:
        tokens = transformers.AutoTokenizer.from_pretrained(base)(TEXT[0], return_tensors="pt").input_ids[:, :64]
        optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-2)
        for _ in range(steps):
            optimizer.zero_grad()
            tuned(tokens, labels=tokens).loss.backward()
            optimizer.step()
    tuned.save_pretrained(folder)
    return folder


def check_here(
    folder: Path, *, device: str = "cpu", offload: Offload | None = None, trust_remote_code: bool = False
) -> ReloadReport:
    """Reload in this process, to save the four seconds that a fresh one takes to start."""
    with quiet():
        report = check_reload(folder, device=device, offload=offload, trust_remote_code=trust_remote_code)
    report.require_agreement()
    return report


def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Return a checkpoint's float32 logits, loaded as a user would load it; shape (rows, length, vocabulary).

    bitsandbytes' 4-bit layers are expanded: what its own kernels compute depends on the processor.
    """
    options = architectures.loading_options(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    packed_layers.decompress(model)  # plain transformers runs packed floats in bfloat16 only
    packed_layers.expand(model)
    with torch.inference_mode():
        return model(input_ids=ids).logits


def mean_kl(baseline: torch.Tensor, variant: torch.Tensor) -> float:
    """Return the mean KL(baseline || variant) in nats over all positions."""
    p, q = (torch.log_softmax(x.double(), dim=-1) for x in (baseline, variant))
    return float((p.exp() * (p - q)).sum(-1).mean())


def token_rows(folder: Path, text: str, rows: int, length: int) -> torch.Tensor:
    """Return the first rows * length tokens of a text, shape (rows, length)."""
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"][: rows * length]
    return torch.tensor(ids).reshape(rows, length)
