"""Caches of keys and values: the grids by hand, what each query reads, and checkpoints that servers read."""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig

import mlflow_compress as mc
from mlflow_compress.commands.evaluate.run import require_cache_applied
from mlflow_compress.compression import METHODS, compress_model, method_config
from mlflow_compress.compression.methods.kv_cache import head_dim
from mlflow_compress.compression.mixed_recipe import MixedRecipe
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.models.architectures.quantized_cache import (
    QuantizedCache,
    Rounding,
    attention_modules,
    cache_bytes_per_token,
    quantize_cache,
)
from mlflow_compress.models.architectures.quantized_cache import with_cache as with_rounding
from mlflow_compress.models.identity import weights_hash
from mlflow_compress.models.loading import LoadConfig, load_model
from mlflow_compress.models.source_model import resolve
from mlflow_compress.models.stored_weights import hash_weights
from mlflow_compress.scoring.forward.head import replaced_modules
from mlflow_compress.scoring.generation.decoding import GenerationJob, decode
from mlflow_compress.scoring.generation.generation_rows import GenerationConfig, GenerationRow
from tests.compress_models import TEXT, logits, make_mixtral, make_mixture, mean_kl, token_rows
from tests.roundoff import U32
from tests.unit.scoring_models import rounding_of

pytestmark = pytest.mark.filterwarnings("ignore")

WIDTH = 16  # numbers of a head's vector in the random base
NOT_ROUNDED = Rounding(16, "token", WIDTH)


def by_token(bits: int | str, group: int = WIDTH) -> Rounding:
    return Rounding(bits, "token", group)


def with_cache(base: Path, keys: Rounding, values: Rounding, residual: int = 0) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    quantize_cache(model, dict.fromkeys(range(model.config.num_hidden_layers), QuantizedCache(keys, values, residual)))
    return model


def test_a_vector_is_rounded_to_the_grid_between_its_extremes() -> None:
    vector = torch.tensor([[[[0.0, 1.2, 2.2, 3.0, -1.0, -1.0, -1.0, -1.0]]]])
    # Group 1: steps of (3 - 0) / 3; group 2 is constant and comes back.
    assert by_token(2, 4).by_token(vector).flatten().tolist() == [0.0, 1.0, 2.0, 3.0, -1.0, -1.0, -1.0, -1.0]
    # One group: from -1 to 3 in steps of 4 / 3.
    assert by_token(2, 8).by_token(vector).flatten()[:4].tolist() == pytest.approx([1 / 3, 5 / 3, 5 / 3, 3.0])


def test_keys_are_rounded_by_channel_as_in_kivi() -> None:
    # Two channels, one text of 4 tokens in groups of 2, and padding before it that is far off. Channel 1 of tokens 0
    # and 1: 0 and 3, the ends of its grid. Channel 2: -3 and 3, too. Tokens 2 and 3: 1 and 1 (a constant), 0 and 1.5.
    keys = torch.tensor([[99.0, -99.0], [0.0, -3.0], [3.0, 3.0], [1.0, 0.0], [1.0, 1.5]])[None, None]
    number = torch.tensor([[-1, 0, 1, 2, 3]])
    assert Rounding(2, "channel", 2).by_channel(keys, number)[0, 0, 1:].tolist() == keys[0, 0, 1:].tolist()
    # One group of 4. Channel 1 from 0 to 3 in steps of 1; channel 2 from -3 to 3 in steps of 2: 0 -> 1 (1.5 is rounded
    # to the even level 2, which is -3 + 2 * 2), 1.5 -> level 2.25 -> 1.
    rounded = Rounding(2, "channel", 4).by_channel(keys, number)[0, 0, 1:]
    assert rounded.tolist() == [[0.0, -3.0], [3.0, 3.0], [1.0, 1.0], [1.0, 1.0]]


def test_fp8_is_e4m3_between_the_largest_magnitudes() -> None:
    # The largest magnitude is 448 steps. 1.0 / 4.48 * 448 = 100, between 96 and 104 (steps of 8): a tie to the even
    # mantissa, 96 = 1.5 * 64; 13 is between 13 and 14 and is exact.
    vector = torch.tensor([[[[-4.48, 1.0, 0.13, 0.0]]]])
    expected = [-4.48, 0.96, 0.13, 0.0]
    rounded = by_token("fp8", 4).by_token(vector).flatten().tolist()
    assert rounded == pytest.approx(expected, rel=4 * U32)  # a quotient and a product
    assert not by_token("fp8", 4).by_token(torch.zeros(1, 1, 1, 4)).any()


@given(st.integers(0, 2**31), st.sampled_from([2, 3, 4, 8]), st.sampled_from([1.0, 1e-3, 100.0]))
def test_no_number_moves_by_more_than_half_a_step(seed: int, bits: int, size: float) -> None:
    vectors = size * torch.randn((2, 3, 8, 8), generator=torch.Generator().manual_seed(seed))
    number = torch.arange(8).expand(2, 8)
    # Unit roundoff 2^-24 of float32: of the quotient, the level and the product, each at most 2^bits - 1 steps long.
    for rounded, axis in ((by_token(bits, 8).by_token(vectors), -1), (Rounding(bits, "channel", 8), -2)):
        got = rounded.by_channel(vectors, number) if isinstance(rounded, Rounding) else rounded
        span = vectors.amax(axis, keepdim=True) - vectors.amin(axis, keepdim=True)
        half_step = span / (2**bits - 1) / 2
        assert ((got - vectors).abs() <= half_step + 4 * 2.0**-24 * (span + vectors.abs())).all()
    moved = (by_token("fp8", 8).by_token(vectors) - vectors).abs()
    # 3 bits of mantissa: at most 2^-4 of a number, or half the smallest subnormal, 2^-10 steps of largest / 448.
    smallest = vectors.abs().amax(-1, keepdim=True) / 448 * 2.0**-10
    assert (moved <= torch.maximum(2.0**-4 * vectors.abs(), smallest) * (1 + 2.0**-20)).all()


@pytest.mark.parametrize("residual", [0, 5])
def test_16_bits_are_the_model_itself(residual: int, base: Path) -> None:
    ids = token_rows(base, TEXT[0], rows=2, length=48)
    model = with_cache(base, NOT_ROUNDED, NOT_ROUNDED, residual)
    with torch.inference_mode():
        difference = (model(input_ids=ids).logits - logits(base, ids)).abs().max()
    # Without a residual it is the same computation; with one, the same sums in another order.
    assert difference <= (2 * rounding_of(model, ids) if residual else 0)


def test_fewer_bits_lie_farther_keys_and_values_apart_and_residual_tokens_are_read_as_they_are(base: Path) -> None:
    ids = token_rows(base, TEXT[0], rows=4, length=64)
    plain = logits(base, ids)

    def distance(keys: Rounding, values: Rounding) -> float:
        with torch.inference_mode():
            return mean_kl(plain, with_cache(base, keys, values)(input_ids=ids).logits)

    both = [distance(by_token(bits), by_token(bits)) for bits in (8, 4, 3, 2)]
    keys = [distance(by_token(bits), NOT_ROUNDED) for bits in (8, 4, 3, 2)]
    values = [distance(NOT_ROUNDED, by_token(bits)) for bits in (8, 4, 3, 2)]
    for distances in (both, keys, values):
        assert 0 < distances[0] < 1e-4 and distances == sorted(distances)
    assert both[1] < distance(by_token("fp8"), by_token(2)) < both[3]
    ids = token_rows(base, TEXT[0], rows=1, length=24)
    plain = logits(base, ids)
    for keys in (by_token(2), Rounding(2, "channel", 4)):
        with torch.inference_mode():
            moved = (with_cache(base, keys, by_token(2), 10)(input_ids=ids).logits - plain).abs().amax(-1)[0]
        # The eleventh token is the first that reads another one rounded: the first one's values.
        assert moved[:10].max() <= 2 * rounding_of(with_cache(base, keys, by_token(2), 10), ids) < moved[10:].min()


CACHES = {
    "token": (by_token(4), by_token(4), 0),
    "kivi": (Rounding(2, "channel", 4), by_token(2), 8),
    "channel": (Rounding(4, "channel", 8), by_token("fp8"), 0),
    "residual": (by_token(3), by_token(3), 5),
}


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_a_whole_text_is_scored_as_if_decoded_token_by_token(cache: Any, base: Path) -> None:
    model = with_cache(base, *cache)
    ids = token_rows(base, TEXT[0], rows=1, length=24)
    with torch.inference_mode():
        whole, past, steps = model(input_ids=ids).logits, None, []
        for position in range(24):
            out = model(input_ids=ids[:, position : position + 1], past_key_values=past, use_cache=True)
            past = out.past_key_values
            steps.append(out.logits[:, 0])
    assert (whole - torch.stack(steps, 1)).abs().max() <= 2 * rounding_of(model, ids)  # both are rounded
    assert (whole - logits(base, ids)).abs().max() > 100 * rounding_of(model, ids)


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_rows_of_a_padded_batch_are_as_if_alone(cache: Any, base: Path) -> None:
    model = with_cache(base, *cache)
    ids = token_rows(base, TEXT[0], rows=2, length=24)
    for side in (slice(5, None), slice(None, 19)):  # padding on the left, as when texts are written, and on the right
        mask = torch.ones_like(ids)
        mask[0] = 0
        mask[0, side] = 1
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.inference_mode():
            batch = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
            alone = model(input_ids=ids[:1, side]).logits
        assert (batch[0, side] - alone[0]).abs().max() <= 2 * rounding_of(model, ids)


@pytest.mark.usefixtures("forked_checks")
def test_a_text_is_written_with_the_rounded_cache(base: Path, tmp_path: Path) -> None:
    settings = method_config("kv-cache", key_bits=2, keys_per="channel", token_group=4, value_bits=2)
    compress_model(str(base), "kv-cache", settings, [], tmp_path / "out")
    loaded = load_model(LoadConfig(path=str(tmp_path / "out"), device="cpu"))
    prompts = [list(map(int, row)) for row in token_rows(base, TEXT[0], rows=2, length=20)]
    rows = [GenerationRow(prompt[-n:], 0.0, np.empty(0)) for prompt, n in zip(prompts, (20, 13), strict=True)]
    config = GenerationConfig(max_new_tokens=8, temperature=0.0, samples=1)
    decode(loaded, GenerationJob(rows=rows, config=config))
    for row in rows:
        ids = list(row.prompt)
        for token in row.tokens:
            with torch.inference_mode():
                assert int(loaded.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids.append(token)


@pytest.mark.usefixtures("forked_checks")
def test_an_fp8_cache_is_what_vllm_reads(base: Path, tmp_path: Path) -> None:
    manifest = compress_model(
        str(base),
        "kv-cache-fp8",
        method_config("kv-cache-fp8", calibration_samples=4, calibration_length=64),
        TEXT,
        tmp_path / "out",
    )  # loaded in a new process, with the same logits
    scheme = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    assert (scheme["num_bits"], scheme["type"], scheme["strategy"], scheme["dynamic"]) == (8, "float", "tensor", False)
    assert manifest.served_by == ["vllm", "transformers"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    ids = token_rows(base, TEXT[0], rows=4, length=64)
    kept: dict[str, torch.Tensor] = {}
    attention = plain.model.layers[0].self_attn
    attention.v_proj.register_forward_hook(lambda module, inputs, output: kept.update(values=output))
    with torch.inference_mode():
        moved = mean_kl(plain(input_ids=ids).logits, model(input_ids=ids, use_cache=False).logits)
    assert 0 < moved < 0.01
    # The scale of the first layer's values is that of the calibration text, which these tokens are from.
    scale = float(model.model.layers[0].self_attn.v_scale)
    assert scale == pytest.approx(float(kept["values"].abs().max()) / 448, rel=0.25)


def test_what_cannot_be_done_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"key_bits.*16, 8, 4, 3, 2.*fp8"):
        method_config("kv-cache", key_bits=5)
    with pytest.raises(ConfigError, match="nothing to round"):
        method_config("kv-cache", key_bits=16, value_bits=16)
    with pytest.raises(UnsupportedError, match=r"a divisor of 16, or 'head'"):
        compress_model(str(base), "kv-cache", method_config("kv-cache", cache_group=32), [], tmp_path / "out")
    eager = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    with pytest.raises(UnsupportedError, match=r"sdpa attention.*LlamaForCausalLM, eager"):
        quantize_cache(eager, {0: QuantizedCache(by_token(4), by_token(4))})


def test_labels_tell_caches_apart() -> None:
    labels = [
        METHODS.get("kv-cache").label(method_config("kv-cache", **settings))
        for settings in (
            {},
            {"key_bits": "fp8", "value_bits": "fp8"},
            {"key_bits": 2, "keys_per": "channel", "value_bits": 2, "residual": 128, "cache_group": 8},
        )
    ]
    assert labels == ["kv-cache-k4-v4", "kv-cache-kfp8-vfp8", "kv-cache-k2-channel32-v2-g8-r128"]


def test_a_cache_that_moves_nothing_is_refused_as_not_applied() -> None:
    def records(kl: float) -> Any:
        return cast(Any, SimpleNamespace(option_distances=None, greedy_distances=None, token_distances=Rows(kl)))

    class Rows:
        def __init__(self, kl: float) -> None:
            self.kl = np.array([0.0, kl])

        def __len__(self) -> int:
            return 2

        def column(self, name: str) -> Any:
            return {"kl": self.kl}[name]

    made = cast(Any, SimpleNamespace(method="kv-cache-fp8", label="kv-cache-fp8"))
    require_cache_applied(made, records(1e-4))
    with pytest.raises(UnsupportedError, match=r"cache of kv-cache-fp8 is not applied.*Got: .at most 1e-09 nats"):
        require_cache_applied(made, records(1e-9))
    require_cache_applied(cast(Any, SimpleNamespace(method="rtn", label="rtn")), records(0.0))


def recipe(base: Path, folder: Path, method: str, cache: dict[str, dict[str, Any]]) -> Any:
    """Write a recipe with 4-bit weights in every layer (none: as they are), and return the settings of `mixed`."""
    described = {"method": method, "bits": 4, **({} if method == "gguf" else {"group_size": 32})}
    layers = dict.fromkeys(resolve(str(base)).linear, "a" if method != "none" else "none")
    MixedRecipe(formats={} if method == "none" else {"a": described}, layers=layers, cache=cache).write(
        folder / "r.json"
    )
    return method_config("mixed", recipe=str(folder / "r.json"), calibration_samples=4, calibration_length=64)


@pytest.mark.usefixtures("no_fresh_process")
@pytest.mark.parametrize("method", ["gptq", "gguf", "none"])
def test_a_layers_cache_is_rounded_beside_any_weights(method: str, base: Path, tmp_path: Path) -> None:
    """The checkpoint of both scores, bit for bit, as the one of the same weights with the cache applied by hand."""
    cache = {"1": {"key_bits": 4, "value_bits": 2}}
    manifest = compress_model(str(base), "mixed", recipe(base, tmp_path, method, cache), TEXT, tmp_path / "both")
    whole = 2 * 2 * 2 * 16 * 2  # bytes of a token: layers, keys and values, heads, their width, bfloat16
    assert (manifest.base_cache_bytes_per_token, manifest.cache_bytes_per_token) == (whole, whole / 2 + 2 * (12 + 8))
    assert manifest.served_by == [] and manifest.format.endswith("quantized_cache")
    weights = base
    if method != "none":
        weights = tmp_path / "weights"
        compress_model(str(base), "mixed", recipe(base, tmp_path, method, {}), TEXT, weights)
        assert hash_weights(weights) == hash_weights(tmp_path / "both")
    assert weights_hash(weights) != weights_hash(tmp_path / "both")
    both, alone = (load_model(LoadConfig(path=str(f), device="cpu")).model for f in (tmp_path / "both", weights))
    ids = token_rows(base, TEXT[0], rows=4, length=64)
    with torch.inference_mode():
        plain, scored = alone(input_ids=ids).logits, both(input_ids=ids).logits
        # As a search measures it: one layer's attention in the model that is not rounded.
        name, attention = attention_modules(alone)[1]
        layer = with_rounding(attention, QuantizedCache(by_token(4), by_token(2)))
        with replaced_modules(alone, {name: layer}):
            assert torch.equal(alone(input_ids=ids).logits, scored)
        assert torch.equal(alone(input_ids=ids).logits, plain)
        quantize_cache(alone, {1: QuantizedCache(by_token(4), by_token(2))})
        by_hand = alone(input_ids=ids).logits
    assert torch.equal(scored, by_hand) and not torch.equal(scored, plain)


@pytest.mark.usefixtures("no_fresh_process")
@pytest.mark.parametrize("make", [make_mixtral, make_mixture])
def test_mixtures_of_experts_have_rounded_caches_by_kv_cache_and_recipes_are_refused(make: Any, tmp_path: Path) -> None:
    """The distance to the base is 0 with neither 8 nor 2 bits, and is that of the cache applied by hand."""
    base, kl = make(tmp_path / "base"), {}
    ids, width = token_rows(base, TEXT[0], rows=4, length=64), head_dim(resolve(str(base)).configuration())
    model = load_model(LoadConfig(path=str(base), device="cpu")).model
    with torch.inference_mode():
        expected = model(input_ids=ids).logits
    for bits in (8, 2):
        out = tmp_path / str(bits)
        manifest = compress_model(
            str(base), "kv-cache", method_config("kv-cache", key_bits=bits, value_bits=bits), [], out
        )
        assert manifest.served_by == []
        # A number takes 2 bytes in bfloat16; of a vector of them, scale and offset take 4.
        assert manifest.cache_ratio == pytest.approx(2 / (bits / 8 + 4 / width))
        quantize_cache(model, dict.fromkeys(range(2), QuantizedCache(*[by_token(bits, width)] * 2)))
        with torch.inference_mode():
            rounded = load_model(LoadConfig(path=str(out), device="cpu")).model(input_ids=ids).logits
            assert torch.equal(rounded, model(input_ids=ids).logits)
        kl[bits] = mean_kl(expected, rounded)
    assert 0 < kl[8] < kl[2] / 10
    # A recipe names linear layers, and experts are none: nothing is made that leaves them as they are without a word.
    for method in ("rtn", "none"):
        with pytest.raises(
            UnsupportedError, match=r"'mixed' changes linear layers only, and .*% of the weights .*experts"
        ):
            compress_model(str(base), "mixed", recipe(base, tmp_path, method, {"0": {}}), TEXT, tmp_path / "mixed")


def test_a_token_takes_the_bytes_of_its_numbers_and_scales() -> None:
    # 3 layers x 2 key-value heads x 16 numbers each of keys and of values: 96 numbers of each, in bfloat16 2 bytes.
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}

    def taken(**entries: Any) -> float | None:
        return cache_bytes_per_token(LlamaConfig(**shape, num_hidden_layers=3, dtype="bfloat16", **entries))

    assert taken() == 2 * 96 * 2
    # 4 bits are 8 bytes of a head's vector of 16; its scale and its offset 4 more. "fp8" has no offset: 16 + 2.
    four, eight = QuantizedCache(by_token(4), by_token(4)), QuantizedCache(by_token("fp8"), NOT_ROUNDED)
    every = {str(layer): asdict(four) for layer in range(3)}
    assert taken(quantized_cache=every) == 3 * 2 * 2 * (8 + 4)
    assert taken(quantized_cache={"1": asdict(eight)}) == 2 * (2 * 2 * 32) + 2 * (18 + 32)
    # A channel of 32 tokens shares a scale and an offset: 4 / 32 of a byte per number.
    assert Rounding(2, "channel", 32).bytes_per_number(2.0) == 2 / 8 + 4 / 32
    assert taken(quantization_config={"kv_cache_scheme": {"num_bits": 8}}) == 2 * 96
    # llama.cpp's Q8_0 is 34 bytes per 32 numbers, its Q4_0 18.
    assert taken(native_gguf=True, native_gguf_cache=["q8_0", "q4_0"]) == 96 * (34 + 18) / 32
    assert taken(kv_lora_rank=8) is None  # keys and values of another shape


def test_a_cache_of_a_recipe_that_cannot_be_is_refused(base: Path, tmp_path: Path) -> None:
    def refused(error: type[Exception], match: str, method: str, cache: dict[str, dict[str, Any]]) -> None:
        settings = recipe(base, tmp_path, method, cache)
        with pytest.raises(error, match=match):
            compress_model(str(base), "mixed", settings, TEXT, tmp_path / "out")

    refused(ConfigError, r"cache of an unknown layer. Allowed: 0 to 1. Got: 2", "rtn", {"2": {}})
    refused(ConfigError, r"cache of an unknown layer. Allowed: numbers from 0. Got: 'first'", "rtn", {"first": {}})
    refused(ConfigError, r"key_bits.*16, 8, 4, 3, 2", "rtn", {"0": {"key_bits": 5}})
    refused(ConfigError, "changes no layer", "none", {})
    # What the weights move would hide it later: at once it is refused that no number is rounded.
    whole = {"0": {"keys_per": "channel", "token_group": 4096, "value_bits": 16}}
    refused(UnsupportedError, r"The cache is not applied.*caches in 1 of 2 layers", "rtn", whole)


@pytest.mark.slow  # the refusal itself is above
def test_an_evaluation_of_a_cache_that_rounds_nothing_fails(tmp_path: Path) -> None:
    made = mc.compress(
        "demo",
        "kv-cache",
        method_args="keys_per=channel,token_group=4096,value_bits=16",
        store=tmp_path / "store",
        output_dir=str(tmp_path / "out"),
    )
    with pytest.raises(UnsupportedError, match="not applied"):
        mc.evaluate(made, tasks="demo", limit=8, task_args={"noise_items": 8}, store=tmp_path / "store")
