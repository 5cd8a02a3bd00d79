"""Token boundaries, prefix token and truncation against the rules that lm-evaluation-harness states."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlflow_compress.errors import DataError
from mlflow_compress.kept import keeping
from mlflow_compress.scoring.plan.encoding import Encoder
from tests.unit.scoring_models import build_tokenizer, mixed_requests, request


def harness_pair(tokenizer: object, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """What `TemplateLM.loglikelihood` of lm-eval 0.4.13 does before the model runs."""
    encode = tokenizer.encode  # type: ignore[attr-defined]
    if context == "":
        ids = encode(continuation, add_special_tokens=False)
        bos = tokenizer.bos_token_id  # type: ignore[attr-defined]
        return ([bos], ids) if ids[0] != bos else (ids[:1], ids[1:])
    n_spaces = len(context) - len(context.rstrip())
    if n_spaces > 0:
        continuation = context[-n_spaces:] + continuation
        context = context[:-n_spaces]
    special = not context.startswith("<s>")
    whole = encode(context + continuation, add_special_tokens=special)
    before = encode(context, add_special_tokens=special)
    return before, whole[len(before) :]


@pytest.mark.parametrize("adds_bos", [True, False])
def test_tokens_are_the_harness_s(adds_bos: bool) -> None:
    tokenizer = build_tokenizer(adds_bos=adds_bos)
    limit = 60
    requests = [*mixed_requests(), request("bos", "<s>The river", " runs"), request("lines", "Answer:\n\n", "B flour")]
    requests.append(request("bos option", "", "<s>The"))
    for r, encoded in zip(requests, Encoder(tokenizer, limit).encode(requests), strict=True):
        context, targets = harness_pair(tokenizer, r.context, r.continuation)
        assert encoded.targets.tolist() == targets
        assert encoded.inputs.tolist() == (context + targets)[-(limit + 1) :][:-1]
        assert encoded.truncated == (len(context) + len(targets) > limit + 1)
        assert encoded.fits == (len(targets) <= limit)


def test_bos_is_found_where_the_tokenizer_adds_it() -> None:
    assert Encoder(build_tokenizer(adds_bos=True), 10).adds_bos
    assert not Encoder(build_tokenizer(adds_bos=False), 10).adds_bos


def test_a_tokenizer_that_appends_eos_does_not_shift_the_boundary() -> None:
    from tokenizers import processors

    plain, tokenizer = build_tokenizer(), build_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    assert tokenizer.encode("The")[-1] == 1
    r = [request(0, "The river", " runs past")]
    ours, theirs = Encoder(tokenizer, 100).encode(r)[0], Encoder(plain, 100).encode(r)[0]
    assert ours.inputs.tolist() == theirs.inputs.tolist()
    assert ours.targets.tolist() == theirs.targets.tolist()


def test_a_continuation_without_a_token_is_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"Option 2 of item 'x' of task 't'"):
        Encoder(build_tokenizer(), 100).encode([request("x", "The river", "", option=2)])
    with pytest.raises(DataError, match="no token of its own"):
        Encoder(build_tokenizer(), 100).encode([request("x", "", "<s>")])


def test_no_prefix_token_is_an_error_only_where_one_is_needed() -> None:
    tokenizer = build_tokenizer(adds_bos=False)
    tokenizer.bos_token = tokenizer.eos_token = None
    encoder = Encoder(tokenizer, 100)
    assert len(encoder.encode([request(0, "The", " river")])) == 1
    with pytest.raises(DataError, match="neither a BOS nor an EOS"):
        encoder.encode([request(0, "", "river")])


def test_stored_tokens_are_those_of_their_requests_and_of_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, tokenizer = mixed_requests(), build_tokenizer()
    encoder = Encoder(tokenizer, 60)
    encoder.write(requests, tmp_path / "tokens.npz")
    made = encoder.encode(requests)
    with keeping():
        encoder.remember(requests[1:], tmp_path / "tokens.npz")
        Encoder(tokenizer, 61).remember(requests, tmp_path / "tokens.npz")
        encoder.write([], tmp_path / "none.npz")
        encoder.remember([], tmp_path / "none.npz")  # texts alone
        monkeypatch.setattr(Encoder, "_encode", lambda *_: [])
        assert encoder.encode(requests[1:]) == Encoder(tokenizer, 61).encode(requests) == []
        encoder.remember(requests, tmp_path / "tokens.npz")
        stored = encoder.encode(requests)
    for one, two in zip(made, stored, strict=True):
        assert (one.inputs.tolist(), one.targets.tolist()) == (two.inputs.tolist(), two.targets.tolist())
        assert (one.truncated, one.fits) == (two.truncated, two.fits)
