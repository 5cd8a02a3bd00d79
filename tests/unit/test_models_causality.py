"""A model whose logits at a token depend on later tokens predicts no next token, and is refused before any work."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    ElectraConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MixtralConfig,
    RobertaConfig,
    RwkvConfig,
    XLMConfig,
    XLNetConfig,
)

import mlflow_compress as mc
from mlflow_compress.errors import UnsupportedError
from mlflow_compress.models.causality import require_causal
from mlflow_compress.models.loading import LoadConfig, load_model
from tests.unit.scoring_models import CONFIGS, VOCAB, build_model, build_tokenizer

_TOKENS: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
_SHAPE: dict[str, Any] = {
    **_TOKENS, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4
}  # fmt: skip
_XL: dict[str, Any] = {**_TOKENS, "n_layer": 2, "n_head": 4}

NOT_CAUSAL: dict[str, Callable[[], Any]] = {
    "bert": lambda: BertConfig(**_SHAPE),
    "roberta": lambda: RobertaConfig(**_SHAPE),
    "electra": lambda: ElectraConfig(**_SHAPE, embedding_size=48),
    "xlnet": lambda: XLNetConfig(**_XL, d_model=48, d_inner=64),
    "xlm": lambda: XLMConfig(
        vocab_size=VOCAB, emb_dim=48, n_layers=2, n_heads=4, n_langs=1, bos_index=0, eos_index=1, pad_index=1
    ),
    "gemma3 made an encoder": lambda: Gemma3TextConfig(
        **_SHAPE, num_key_value_heads=2, head_dim=12, use_bidirectional_attention=True
    ),
}
CAUSAL: dict[str, Callable[[], Any]] = {
    **CONFIGS,
    "bert as a decoder": lambda: BertConfig(**_SHAPE, is_decoder=True),
    "mixture of experts": lambda: MixtralConfig(
        **_SHAPE, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
    ),
    "mamba": lambda: MambaConfig(**_TOKENS, hidden_size=48, num_hidden_layers=2, state_size=4),
    "mamba2": lambda: Mamba2Config(
        **_TOKENS, hidden_size=48, num_hidden_layers=2, state_size=8, num_heads=6, head_dim=16, n_groups=2, chunk_size=4
    ),
    "rwkv": lambda: RwkvConfig(**_TOKENS, hidden_size=48, num_hidden_layers=2, context_length=64),
}


def saved(config: Any, folder: Path) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)  # with the attention that it supports
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.ndim > 1 else 1.0)  # so that the context matters
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_a_model_that_sees_later_tokens_is_refused(name: str, tmp_path: Path) -> None:
    folder = saved(NOT_CAUSAL[name](), tmp_path / "m")
    with pytest.raises(UnsupportedError, match="is not causal: another last token changes its logits"):
        load_model(LoadConfig(path=folder))


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_causal_model_of_any_kind_is_not(name: str, dtype: str, tmp_path: Path) -> None:
    config = CAUSAL[name]()
    loaded = load_model(LoadConfig(path=saved(config, tmp_path / "m"), dtype=dtype))
    assert loaded.model.config.model_type == config.model_type


class Counted(torch.nn.Module):
    """A model that counts its forward passes."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config, self.dtype, self.calls = model, model.config, model.dtype, 0

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    def forward(self, **inputs: Any) -> Any:
        self.calls += 1
        return self.model(**inputs)


def test_one_pass_of_a_few_tokens_is_enough() -> None:
    counted = Counted(build_model(CONFIGS["llama"]()))
    require_causal(counted, Path("nowhere"))
    assert counted.calls == 1


class Crowded(Counted):
    """A model in which the rows of a batch change one another, as experts with a capacity do."""

    def forward(self, **inputs: Any) -> Any:
        out = super().forward(**inputs)
        out.logits = out.logits + len(out.logits) * torch.randn(len(out.logits), 1, 1) * (len(out.logits) - 1)
        return out


def test_rows_of_a_batch_that_change_one_another_are_no_later_tokens() -> None:
    crowded = Crowded(build_model(CONFIGS["llama"]()))
    require_causal(crowded, Path("nowhere"))
    assert crowded.calls == 3  # both together, and each alone


def test_a_small_effect_of_later_tokens_is_found_in_float32() -> None:
    """A leak of 10⁻⁴ of the logits' size is far above rounding."""

    class Leaking(Counted):
        def forward(self, **inputs: Any) -> Any:
            out = super().forward(**inputs)
            out.logits = out.logits + 1e-4 * out.logits[:, -1:]
            return out

    with pytest.raises(UnsupportedError, match="not causal"):
        require_causal(Leaking(build_model(CONFIGS["llama"]())), Path("nowhere"))


_WIDE = _SHAPE | {"hidden_size": 128, "intermediate_size": 128}  # the methods' groups divide it


@pytest.mark.parametrize("method", ["rtn", "bnb-int8", "fp8", "kv-cache", "gaussian-noise", "hqq"])
def test_compressed_models_are_causal(method: str, tmp_path: Path) -> None:
    made = mc.compress(saved(LlamaConfig(**_WIDE), tmp_path / "m"), method, store=str(tmp_path / "store"))
    assert load_model(LoadConfig(path=str(made.folder))).model is not None


@pytest.mark.parametrize("method", ["rtn", "fp16", "hqq"])
def test_an_encoder_is_refused_before_it_is_compressed(method: str, tmp_path: Path) -> None:
    folder = saved(BertConfig(**_WIDE), tmp_path / "m")
    with pytest.raises(UnsupportedError, match="not causal"):
        mc.compress(folder, method, store=str(tmp_path / "store"))


def test_settings_that_look_like_an_encoders_are_not_what_decides(tmp_path: Path) -> None:
    config = GPT2Config(**_TOKENS, n_embd=48, n_layer=2, n_head=4, is_decoder=False)
    assert load_model(LoadConfig(path=saved(config, tmp_path / "m"))).model is not None
