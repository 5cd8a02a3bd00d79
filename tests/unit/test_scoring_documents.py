"""Rolling windows over documents: lm-evaluation-harness's own cut is the reference."""

from __future__ import annotations

import numpy as np
import pytest

from mlflow_compress.errors import DataError
from mlflow_compress.scoring.engine import Scorer
from mlflow_compress.scoring.plan.corpus_windows import cut_documents
from tests.unit.scoring_models import TEXT, load_random, naive_logprobs, request, rounding


def test_windows_equal_the_harness() -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    scorer = Scorer(load_random("llama"))
    encoder, room = scorer.encoder, scorer.loaded.max_length
    texts = [TEXT * 3, "The river", TEXT, TEXT * 2]
    windows = cut_documents(encoder, texts)
    wanted = []
    for number, ids in enumerate(encoder.ids(texts)):
        rolling = get_rolling_token_windows(ids.tolist(), encoder.prefix_token, room, 1)
        for part, (context, targets) in enumerate(map(make_disjoint_window, rolling)):
            wanted.append((f"{number}.{part}", (context + targets)[-(room + 1) :], targets))
    assert [(n, i.tolist()) for n, i in zip(windows.names, windows.ids, strict=True)] == [w[:2] for w in wanted]
    assert [i[p].tolist() for i, p in zip(windows.ids, windows.scored, strict=True)] == [w[2] for w in wanted]
    assert max(len(i) for i in windows.ids) == room + 1


def test_scores_equal_a_naive_pass() -> None:
    loaded = load_random("gpt2", adds_bos=False)  # learned positions: one token too many would fail
    texts = ["The river runs past the old mill", TEXT * 2]
    scores, _ = Scorer(loaded).score_corpus("t", texts)
    nll = scores.column("nll")[scores.column("item_id") == "0.0"]
    [naive] = naive_logprobs(loaded, [request(0, "", texts[0])])
    ids = loaded.tokenizer(texts[0], add_special_tokens=False)["input_ids"]
    assert np.abs(nll[-len(ids) :] + naive[np.arange(len(ids)), ids]).max() < rounding(loaded)
    assert len(scores) == sum(len(loaded.tokenizer(text)["input_ids"]) for text in texts)


def test_an_empty_document_is_refused() -> None:
    with pytest.raises(DataError, match="document 1"):
        cut_documents(Scorer(load_random("llama", adds_bos=False)).encoder, ["a", ""])
