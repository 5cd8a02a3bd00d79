"""The engine against one request at a time in float64: every architecture, path, budget and order."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from mlflow_compress.errors import CheckpointError, ConfigError, DataError
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from mlflow_compress.scoring.forward.body import split_body_and_head
from tests.unit.scoring_models import (
    CONFIGS,
    TEXT,
    U,
    build_model,
    load_random,
    mixed_requests,
    naive_logliks,
    naive_logprobs,
    request,
    rounding,
)


def quiet(**settings: object) -> ScoringConfig:
    return ScoringConfig(progress=False, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_equals_the_naive_forward(name: str) -> None:
    loaded, requests = load_random(name), mixed_requests()
    wanted = naive_logliks(loaded, requests)
    for config in (quiet(batch_tokens=96), quiet(batch_tokens=2000), quiet(path="plain", batch_tokens=400)):
        scorer = Scorer(loaded, config)
        scores, distances = scorer.score(requests)
        assert distances is None
        assert scorer.report.path == ("plain" if config.path == "plain" else "packed"), scorer.report.plain_reason
        n_tokens = scores.column("n_tokens")
        assert np.abs((scores.column("loglik") - wanted) / n_tokens).max() < rounding(loaded)
        assert scores.key_rows() == [(r.task, r.item_id, r.permutation, r.option) for r in requests]
    # Were the context ignored, or a mask wrong, the figures would move by far more than the tolerance.
    assert np.abs(wanted).min() > 100 * rounding(loaded)


def test_greedy_is_every_token_the_argmax() -> None:
    loaded = load_random("llama")
    requests = mixed_requests()
    logprobs = naive_logprobs(loaded, requests)
    scorer = Scorer(loaded, quiet())
    encoded = scorer.encoder.encode(requests)
    wanted = [bool((p.argmax(axis=1) == e.targets).all()) for p, e in zip(logprobs, encoded, strict=True)]
    # A continuation that is greedy by construction, beside those that hardly are.
    context = "The river"
    best = int(naive_logprobs(loaded, [request("g", context, " x")])[0][0].argmax())
    text = loaded.tokenizer.decode([best])
    scores, _ = scorer.score(requests)
    assert scores.column("greedy").tolist() == wanted
    if loaded.tokenizer.encode(context + text)[-1] == best:
        assert scorer.score([request("g", context, text)])[0].column("greedy").tolist() == [True]


def test_order_of_requests_changes_nothing_at_all_and_shared_prefixes_are_computed_once() -> None:
    loaded, requests = load_random("llama"), mixed_requests()
    shuffled = requests.copy()
    random.Random(3).shuffle(shuffled)
    scorer = Scorer(loaded, quiet(batch_tokens=128))
    one = dict(zip(requests, scorer.score(requests)[0].column("loglik"), strict=True))
    assert one == dict(zip(shuffled, scorer.score(shuffled)[0].column("loglik"), strict=True))
    scorer = Scorer(loaded, quiet(batch_tokens=200))
    scorer.score(requests)
    assert scorer.report.n_tokens < 0.25 * scorer.report.n_tokens_naive
    assert scorer.report.n_truncated == 1
    lettered = [
        replace(r, continuation=r.continuation[1:]) for r in requests if r.continuation in (" A", " B", " C", " D")
    ]
    scorer.score(lettered)
    assert scorer.report.n_rows == len(lettered) // 4  # four one-token options of one context need one row


def test_option_longer_than_the_context_is_unscored_and_counted() -> None:
    loaded = load_random("gpt2")
    requests = [request(0, "The", " mill" * 400), request(1, "The river", " runs")]
    scorer = Scorer(loaded, quiet())
    scores, _ = scorer.score(requests)
    assert scores.table.column("loglik").to_pylist()[0] is None
    assert scores.table.column("greedy").to_pylist()[0] is None
    n_tokens = scores.column("n_tokens")[1]
    assert abs(scores.column("loglik")[1] - naive_logliks(loaded, requests[1:])[0]) < n_tokens * rounding(loaded)
    assert scorer.report.n_unscored == 1


def test_nothing_to_score_gives_empty_records() -> None:
    scores, distances = Scorer(load_random("gpt2"), quiet()).score([])
    assert len(scores) == 0
    assert distances is None


def test_half_precision_logits_are_not_rounded_to_half_precision() -> None:
    half = build_model(CONFIGS["llama"]()).to(torch.bfloat16)
    states = torch.randn(50, 48).to(torch.bfloat16)
    weight = half.lm_head.weight.double()
    exact, bound = states.double() @ weight.T, 48 * U * (states.double().abs() @ weight.abs().T)  # 48 terms in float32
    assert ((split_body_and_head(half)[1].logits(states).double() - exact).abs() <= bound).all()
    assert ((half.lm_head(states).double() - exact).abs() > bound).any()
    assert half.lm_head.weight.dtype == torch.bfloat16  # the model itself is left as it was


def test_a_path_the_model_cannot_take_is_refused_and_auto_falls_back_with_a_reason() -> None:
    config = CONFIGS["gemma2"]()
    config.sliding_window = 8  # shorter than the prompts: a block mask would see too far
    loaded = load_random("gemma2")
    narrow = type(loaded)(build_model(config), loaded.tokenizer, loaded.path, loaded.dtype, loaded.device)
    requests = mixed_requests()
    scorer = Scorer(narrow, quiet())
    scores, _ = scorer.score(requests)
    assert scorer.report.path == "plain"
    assert "sliding_window 8" in str(scorer.report.plain_reason)
    wanted = naive_logliks(narrow, requests)
    assert np.abs((scores.column("loglik") - wanted) / scores.column("n_tokens")).max() < rounding(narrow)
    with pytest.raises(ConfigError, match="sliding_window 8"):
        Scorer(narrow, quiet(path="packed")).score(requests)


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="batch_tokens"):
        ScoringConfig(batch_tokens=0)
    with pytest.raises(ConfigError, match="packed"):
        ScoringConfig(path="fast")


def test_corpus_windows_equal_the_naive_forward() -> None:
    loaded = load_random("qwen2")
    text, window = TEXT * 6, 64
    scorer = Scorer(loaded, quiet(batch_tokens=200))
    tokens, distances = scorer.score_corpus("corpus", text, window=window)
    assert distances is None
    ids = loaded.tokenizer.encode(text)
    n = len(ids) // window
    assert len(tokens) == n * (window // 2 - 1)
    nll, entropy, argmax = [], [], []
    for i in range(n):
        part = torch.tensor(ids[i * window : (i + 1) * window])
        part[0] = loaded.tokenizer.bos_token_id  # BOS replaces a window's first token
        with torch.no_grad():
            logp = torch.log_softmax(loaded.model.double()(part[None]).logits[0], dim=-1)
        for position in range(window // 2 + 1, window):
            row = logp[position - 1]
            nll.append(-float(row[part[position]]))
            entropy.append(-float((row.exp() * row).sum()))
            argmax.append(int(row.argmax()))
    nats = rounding(loaded)
    assert np.abs(tokens.column("nll") - nll).max() < nats
    # dH = sum (1 + ln p) dp, and dp is p times the change of ln p: at most (1 + H) of its largest.
    assert (np.abs(tokens.column("entropy") - entropy) < nats * (1 + np.asarray(entropy))).all()
    assert tokens.column("argmax").tolist() == argmax
    p_target = np.exp(-np.asarray(nll))  # its relative error is the absolute one of its logarithm
    assert (np.abs(tokens.column("p_target") - p_target) < nats * p_target).all()
    assert tokens.column("position")[:3].tolist() == [33, 34, 35]


def test_corpus_is_refused_when_it_is_too_short_or_the_window_does_not_fit() -> None:
    scorer = Scorer(load_random("llama"), quiet())
    with pytest.raises(DataError, match="at least 320 tokens"):
        scorer.score_corpus("corpus", TEXT[:300], window=160)
    with pytest.raises(ConfigError, match="from 4 to 160"):
        scorer.score_corpus("corpus", TEXT * 20, window=512)


def test_a_model_that_gives_nan_is_refused() -> None:
    loaded = load_random("llama")
    scorer = Scorer(loaded, quiet())
    with torch.no_grad():
        loaded.model.lm_head.weight[7, 3] = torch.nan
    with pytest.raises(CheckpointError, match="NaN"):
        scorer.score(mixed_requests())


def test_a_model_whose_head_reads_more_than_the_states_runs_whole() -> None:
    class Skipping(LlamaForCausalLM):
        """Adds something that depends on the token's place to the logits: the states alone do not tell it."""

        def forward(self, input_ids: torch.Tensor, **kwargs: object) -> object:
            out = super().forward(input_ids=input_ids, **kwargs)
            out.logits = out.logits + torch.arange(input_ids.shape[1])[None, :, None] * self.lm_head.weight[:, 0]
            return out

    loaded, requests = load_random("llama"), mixed_requests()
    model = Skipping(loaded.model.config).eval()
    model.load_state_dict(loaded.model.state_dict())
    skipping = type(loaded)(model, loaded.tokenizer, loaded.path, loaded.dtype, loaded.device)
    scorer = Scorer(skipping, quiet())
    scores, _ = scorer.score(requests)
    assert "differs from the model's" in str(scorer.report.whole_model_reason)
    wanted = naive_logliks(skipping, requests)
    assert np.abs((scores.column("loglik") - wanted) / scores.column("n_tokens")).max() < rounding(skipping)
    assert np.abs(wanted - naive_logliks(loaded, requests)).min() > 1e-3
