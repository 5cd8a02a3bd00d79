"""The baseline store: exact zero against itself, right distances against others, and clear refusals."""

import json
from pathlib import Path

import pytest
import torch

from mlflow_compress.errors import AlignmentError, StoreError
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model
from mlflow_compress.scoring.baseline_store import StateStore, StateWriter
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from tests.unit.scoring_models import (
    CONFIGS,
    TEXT,
    build_model,
    load_random,
    mixed_requests,
    naive_logprobs,
    request,
    rounding,
)
from tests.unit.test_scoring_kernel_bounds import distances_with_bounds

QUIET = ScoringConfig(progress=False, batch_tokens=128)
KINDS = ("kl", "kl_reverse", "js", "tv")
CORPUS = TEXT * 6


def capture(loaded: LoadedModel, folder: Path, config: ScoringConfig = QUIET) -> Scorer:
    scorer = Scorer(loaded, config)
    with StateWriter(folder, loaded, shard_bytes=20000) as writer:
        scorer.score(mixed_requests(), capture=writer)
        scorer.score_corpus("corpus", CORPUS, window=32, capture=writer)
    return scorer


def perturbed(loaded: LoadedModel, scale: float) -> LoadedModel:
    """The same model with noise on its body's weights, head included."""
    model = build_model(CONFIGS[loaded.model.config.model_type]())
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * parameter.std() * torch.randn_like(parameter))
    return LoadedModel(model, loaded.tokenizer, loaded.path, loaded.dtype, loaded.device)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Path]:
    folder = tmp_path_factory.mktemp("baseline")
    loaded = load_random("llama", path=folder / "model")
    capture(loaded, folder / "store")
    return loaded, folder / "store"


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_a_model_against_its_own_store_is_exactly_zero(name: str, tmp_path: Path) -> None:
    loaded = load_random(name, path=tmp_path / "model")
    first = Scorer(loaded, QUIET)
    with StateWriter(tmp_path / "store", loaded, shard_bytes=20000) as writer:
        scores, _ = first.score(mixed_requests(), capture=writer)
        tokens, _ = first.score_corpus("corpus", CORPUS, window=32, capture=writer)
    # From the disk, as a variant comes: another process would do the same.
    again = load_model(LoadConfig(path=str(tmp_path / "model")))
    store = StateStore.open(tmp_path / "store", baseline=again)
    assert len(store.manifest.shards) == 2
    scorer = Scorer(again, ScoringConfig(progress=False))  # the limits are the baseline's
    scores_again, distances = scorer.score(mixed_requests(), baseline=store)
    assert scorer.report.same_plan_as_baseline
    assert scorer.report.path == "packed"
    tokens_again, token_distances = scorer.score_corpus("corpus", CORPUS, window=32, baseline=store)
    assert scores_again.table.equals(scores.table)
    assert tokens_again.table.equals(tokens.table)
    for records in (distances, token_distances):
        for kind in KINDS:
            assert (records.column(kind) == 0.0).all()
        assert records.column("same_top").astype(bool).all()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_distances_equal_the_naive_ones(name: str, tmp_path: Path) -> None:
    loaded = load_random(name, path=tmp_path / "model")
    capture(loaded, tmp_path / "store")
    variant = perturbed(loaded, 0.05)
    store = StateStore.open(tmp_path / "store", baseline=loaded)
    requests = mixed_requests()
    _, distances = Scorer(variant, QUIET).score(requests, baseline=store)
    nats = max(rounding(loaded), rounding(variant))
    for i, (p, q) in enumerate(zip(naive_logprobs(loaded, requests), naive_logprobs(variant, requests), strict=True)):
        bounds = distances_with_bounds(torch.from_numpy(p), torch.from_numpy(q), nats=nats)
        for kind in KINDS:
            value, bound = (x.mean() for x in bounds[kind])
            assert abs(distances.column(kind)[i] - value) <= bound, kind
        assert distances.column("same_top")[i] == pytest.approx((p.argmax(1) == q.argmax(1)).mean())
    assert distances.column("kl").mean() > 1e-3


def test_the_noise_floor_with_another_plan_is_small_and_found_by_content(stored: tuple[LoadedModel, Path]) -> None:
    loaded, folder = stored
    scorer = Scorer(loaded, ScoringConfig(progress=False, path="plain", batch_tokens=700))
    store = StateStore.open(folder, baseline=loaded)
    part = mixed_requests()[::-3]  # a part of the items, in another order
    _, distances = scorer.score(part, baseline=store)
    assert not scorer.report.same_plan_as_baseline
    # Rounded twice, ln p moves by 2 nats at most; a KL is at most half of the square of the largest change of ln p.
    assert 0 < distances.column("kl").max() <= (2 * rounding(loaded)) ** 2 / 2
    assert distances.key_rows() == [(r.task, r.item_id, r.permutation, r.option) for r in part]


def test_a_store_holds_little_more_than_the_states(tmp_path: Path) -> None:
    capture(load_random("llama", path=tmp_path / "model"), tmp_path / "store")
    store = StateStore.open(tmp_path / "store")
    manifest = store.manifest
    assert manifest.dtype == "float32"
    assert store.n_rows == sum(s["rows"] for s in manifest.shards)
    size = sum(f.stat().st_size for f in (tmp_path / "store").glob("states-*"))
    assert size < store.n_rows * (48 * 4 + 16 + 4) + 400 * len(manifest.shards)


def test_tokens_models_dtypes_and_tokenizers_that_are_not_the_baselines_are_refused(
    stored: tuple[LoadedModel, Path], tmp_path: Path
) -> None:
    loaded, folder = stored
    requests = [request(0, "Wool and iron", "a"), request(1, "The river runs", "past"), mixed_requests()[-1]]
    with pytest.raises(AlignmentError, match=r"lacks \d of the \d+ scored positions"):
        Scorer(loaded, QUIET).score(requests, baseline=StateStore.open(folder))
    config = CONFIGS["llama"]()
    config.vocab_size = 310
    wider = LoadedModel(build_model(config), loaded.tokenizer, loaded.path, loaded.dtype, loaded.device)
    with pytest.raises(AlignmentError, match="logits of another width"):
        Scorer(wider, QUIET).score(mixed_requests(), baseline=StateStore.open(folder))
    other = load_random("llama", adds_bos=False)
    with pytest.raises(AlignmentError, match="another tokenizer"):
        Scorer(other, QUIET).score(mixed_requests(), baseline=StateStore.open(folder))
    other = load_random("llama", seed=1, path=tmp_path / "other")
    with pytest.raises(StoreError, match="other weights"):
        StateStore.open(folder, baseline=other)
    half = LoadedModel(loaded.model, loaded.tokenizer, loaded.path, torch.bfloat16, loaded.device)
    with pytest.raises(StoreError, match="other dtype"):
        StateStore.open(folder, baseline=half)
    bare = load_random("llama", adds_bos=False)
    with pytest.raises(StoreError, match="other tokenizer"):
        StateStore.open(
            folder, baseline=LoadedModel(loaded.model, bare.tokenizer, loaded.path, loaded.dtype, loaded.device)
        )


def damaged(folder: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def test_a_truncated_shard_is_refused_on_opening(stored: tuple[LoadedModel, Path], tmp_path: Path) -> None:
    copy = damaged(stored[1], tmp_path)
    shard = sorted(copy.glob("states-*"))[1]
    shard.write_bytes(shard.read_bytes()[:-7])
    with pytest.raises(StoreError, match=rf"{shard.name} .* cut short"):
        StateStore.open(copy)


@pytest.mark.parametrize("file", ["states-1-000000000.safetensors", "head.safetensors"])
def test_a_tampered_file_is_refused_when_it_is_read(
    stored: tuple[LoadedModel, Path], tmp_path: Path, file: str
) -> None:
    copy = damaged(stored[1], tmp_path)
    data = bytearray((copy / file).read_bytes())
    data[-5] ^= 1
    (copy / file).write_bytes(bytes(data))
    with pytest.raises(StoreError, match="was changed after it was written"):
        Scorer(stored[0], QUIET).score(mixed_requests()[:4], baseline=StateStore.open(copy))


def test_an_unfinished_or_foreign_store_is_refused(stored: tuple[LoadedModel, Path], tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No finished baseline store"):
        StateStore.open(tmp_path / "nothing")
    writer = StateWriter(tmp_path / "half", stored[0])
    with pytest.raises(ZeroDivisionError), writer:
        Scorer(stored[0], QUIET).score(mixed_requests(), capture=writer)
        raise ZeroDivisionError
    with pytest.raises(StoreError, match="No finished baseline store"):
        StateStore.open(tmp_path / "half")
    copy = damaged(stored[1], tmp_path)
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(StoreError, match="another format"):
        StateStore.open(copy)
    (copy / "manifest.json").write_text("{")
    with pytest.raises(StoreError, match="not JSON"):
        StateStore.open(copy)


def test_a_finished_store_is_not_written_over(stored: tuple[LoadedModel, Path]) -> None:
    with pytest.raises(StoreError, match="holds a finished store"):
        StateWriter(stored[1], stored[0])


def test_a_full_disk_is_one_clear_error(stored: tuple[LoadedModel, Path], tmp_path: Path) -> None:
    with (
        pytest.raises(StoreError, match="No space left on device"),
        StateWriter(tmp_path / "store", stored[0]) as writer,
    ):
        # /dev/full refuses every write as a full disk does; the rename target stays absent.
        (tmp_path / "store" / "states-1-000000000.safetensors.partial").symlink_to("/dev/full")
        Scorer(stored[0], QUIET).score(mixed_requests()[:4], capture=writer)
    assert not list((tmp_path / "store").glob("*.partial"))


class Special(torch.nn.Linear):
    """A head module that is not a plain linear layer, as an int8 one."""


def with_special_head(loaded: LoadedModel) -> LoadedModel:
    model = build_model(CONFIGS["llama"]())
    special = Special(48, 300, bias=False)
    special.load_state_dict(model.lm_head.state_dict())
    model.lm_head = special
    return LoadedModel(model, loaded.tokenizer, loaded.path, loaded.dtype, loaded.device)


def test_a_special_head_is_scored_with_its_own_module(stored: tuple[LoadedModel, Path]) -> None:
    store = StateStore.open(stored[1])
    _, distances = Scorer(with_special_head(stored[0]), QUIET).score(mixed_requests(), baseline=store)
    assert distances.column("kl").max() == 0.0


def test_a_baseline_whose_head_cannot_be_rebuilt_stores_log_probabilities(
    stored: tuple[LoadedModel, Path], tmp_path: Path
) -> None:
    special = with_special_head(stored[0])
    capture(special, tmp_path / "store")
    manifest = StateStore.open(tmp_path / "store").manifest
    assert manifest.kind == "log_probs"
    assert "Special" in str(manifest.reason)
    assert (manifest.dtype, manifest.width, manifest.head) == ("float16", 300, None)
    store = StateStore.open(tmp_path / "store", baseline=special)
    _, distances = Scorer(special, QUIET).score(mixed_requests(), baseline=store)
    # Float16 keeps log-probabilities above -16 to d = 2**-8. The KL of what is moved by at most d, and made a distribution
    # again, is at most d**2 / 2 (Hoeffding's lemma).
    assert distances.column("kl").max() < 2.0**-16 / 2
    variant = perturbed(stored[0], 0.05)
    exact = Scorer(variant, QUIET).score(mixed_requests(), baseline=StateStore.open(stored[1]))[1]
    close = Scorer(variant, QUIET).score(mixed_requests(), baseline=store)[1]
    # KL moves by the covariance of d with ln p/q, whose mean absolute value is at most KL + 2 TV, and by that of d**2.
    kl, tv = exact.column("kl"), exact.column("tv")
    assert (abs(close.column("kl") - kl) <= 2.0**-8 * 2 * (kl + 2 * tv) + 2.0**-16).all()


def test_a_resident_baseline_gives_what_the_store_gives(stored: tuple[LoadedModel, Path]) -> None:
    variant = perturbed(stored[0], 0.05)
    store = StateStore.open(stored[1])
    for call in ("score", "score_corpus"):
        arguments = (mixed_requests(),) if call == "score" else ("corpus", CORPUS)
        options = {} if call == "score" else {"window": 32}
        streamed = getattr(Scorer(variant, QUIET), call)(*arguments, baseline=stored[0], **options)
        from_store = getattr(Scorer(variant, QUIET), call)(*arguments, baseline=store, **options)
        assert streamed[0].table.equals(from_store[0].table)
        assert streamed[1].table.equals(from_store[1].table)
    _, zero = Scorer(stored[0], QUIET).score(mixed_requests(), baseline=stored[0])
    assert zero.column("kl").max() == 0.0
