"""A served model against the same model in this process: every kind of server, and every fault.

The bound from two lists of most probable tokens: never above the exact divergence, and as it was defined.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflow_compress.engines.endpoint.endpoint_scorer import EndpointScorer, ShownLists, top_k_bound
from mlflow_compress.engines.endpoint.served_model import ServedModel
from mlflow_compress.engines.endpoint.server_probe import open_served_model
from mlflow_compress.errors import AlignmentError, DataError, EndpointError
from mlflow_compress.metrics import compute_all, headline, unmet
from mlflow_compress.models.loading import LoadedModel
from mlflow_compress.records import OptionBounds, Request
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from mlflow_compress.scoring.generation.generate import generate_until
from mlflow_compress.transport.endpoint import EndpointConfig
from tests import metric_records
from tests.judge_server import Raw
from tests.metric_records import QUICK
from tests.roundoff import of_sum
from tests.served_demo import NAME, ServedDemo, served_demo
from tests.unit.scoring_models import rounding


def endpoint(url: str, **settings: Any) -> EndpointConfig:
    return EndpointConfig(
        base_url=url,
        key="none",
        what="server of the variant",
        url_parameter="checkpoint",
        model_parameter="served_model",
        key_variable="ENDPOINT_API_KEY",
        error=EndpointError,
        **settings,
    )


def open_demo(server: ServedDemo, loaded: LoadedModel, **settings: Any) -> ServedModel:
    return open_served_model(endpoint(server.base_url, **settings), NAME, loaded)


def requests_() -> list[Request]:
    """Lettered options that share a prompt, long options, one without a context."""
    letters = [
        Request("letters", f"q{n}", 0, o, o, f"Question {n}: which is it?\nA. one\nB. two\nAnswer:", f" {letter}", 1, 1)
        for n in range(3)
        for o, letter in enumerate("ABCD")
    ]
    long = [
        Request("long", f"l{n}", 0, o, o, f"The number {n} is", f" {words}", len(words), len(words))
        for n in range(2)
        for o, words in enumerate(("a small even number", "the name of a river in the north", "odd"))
    ]
    return [*letters, *long, Request("bare", "b", 0, 0, 0, "", "The king went home.", 19, 19)]


@pytest.mark.parametrize("kind", ["vllm", "text", "shifted", "llama.cpp", "sharp"])
def test_every_kind_of_server_gives_the_log_likelihoods_of_the_model_in_this_process(
    kind: str, loaded: LoadedModel
) -> None:
    requests = requests_()
    exact, _ = Scorer(loaded, ScoringConfig(progress=False)).score(requests)
    with served_demo(loaded, kind=kind) as server:
        served = open_demo(server, loaded)
        n_probed = len(server.bodies)
        scorer = EndpointScorer(served)
        scores, bounds = scorer.score(requests)
    assert bounds is None
    difference = (scores.column("loglik") - exact.column("loglik")) / exact.column("n_tokens")
    assert np.abs(difference).max() <= 2 * rounding(loaded)  # the server batches otherwise: both passes are rounded
    assert scores.column("greedy").tolist() == exact.column("greedy").tolist()
    assert scores.key_rows() == exact.key_rows()
    assert served.can.echo == (kind in ("vllm", "text", "sharp"))
    assert served.can.shifted == (kind == "shifted")
    assert served.can.steps == (kind != "sharp")
    assert served.can.ids_in == (kind not in ("text", "shifted"))
    assert scorer.report is not None and scorer.report.n_unscored == 0
    assert len(server.bodies) - n_probed == scorer.report.n_asked
    if kind == "vllm":  # four letters of a prompt are one request, and at most one each for what no list shows
        assert scorer.report.n_asked < len(requests)


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp"])
def test_lists_are_asked_for_listed_items_alone_and_compared_where_both_sides_have_them(
    kind: str, loaded: LoadedModel, tmp_path: Any
) -> None:
    requests = requests_()
    cheap = {("letters", f"q{n}") for n in range(3)}  # one question shows the list and all options
    if kind == "llama.cpp":  # every question does
        cheap |= {("long", "l0"), ("long", "l1"), ("bare", "b")}
    with served_demo(loaded, kind=kind) as server:
        served = open_demo(server, loaded)
        whole, _ = EndpointScorer(served).score(requests, capture=tmp_path / "all")
        begin = len(server.bodies)
        listed = {("long", "l0"), ("letters", "q1")}
        scorer = EndpointScorer(served, listed=listed)
        scores, _ = scorer.score(requests, capture=tmp_path / "listed")
        echoes = [body for body in server.bodies[begin:] if body.get("echo") and len(body["prompt"]) > 1]
        of = {name: ShownLists(tmp_path / name) for name in ("all", "listed")}
        other = {("long", "l1"), ("long", "l0")}
        _, same = EndpointScorer(served, listed=listed).score(requests, baseline=of["all"])
        _, fewer = EndpointScorer(served, listed=other).score(requests, baseline=of["listed"])
    assert scores.column("loglik").tolist() == whole.column("loglik").tolist()
    assert scores.column("greedy").tolist() == whole.column("greedy").tolist()
    if kind == "vllm":  # 3 options with lists, and 3 + 1 without, in a request each
        assert sorted((body["prompt_logprobs"], len(body["prompt"])) for body in echoes) == [(1, 4), (20, 3)]

    def items(bounds: OptionBounds | None) -> set[tuple[str, str]]:
        assert bounds is not None and None not in bounds.column("kl").tolist()
        return {(task, item) for task, item, *_ in bounds.key_rows()}

    assert items(same) == listed | cheap
    assert items(fewer) == {("long", "l0")} | cheap  # the baseline has no lists of l1


def test_a_server_that_ignores_echo_without_a_word_is_refused(loaded: LoadedModel) -> None:
    with (
        served_demo(loaded, kind="no_echo") as server,
        pytest.raises(EndpointError, match="none of a prompt's: every option of a question would score 0"),
    ):
        open_demo(server, loaded)


class _OtherWords:
    """The demo's tokenizer, with two tokens exchanged."""

    def __init__(self, tokenizer: Any, one: int, other: int) -> None:
        self._tokenizer, self._swap = tokenizer, {one: other, other: one}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self._tokenizer(*args, **kwargs)
        return {"input_ids": [[self._swap.get(i, i) for i in ids] for ids in found["input_ids"]]}

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        return str(self._tokenizer.decode([self._swap.get(int(i), int(i)) for i in ids], **kwargs))


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp"])
def test_a_server_with_other_tokens_is_refused_and_the_first_is_named(kind: str, loaded: LoadedModel) -> None:
    from dataclasses import replace

    quick = loaded.tokenizer(" quick", add_special_tokens=False)["input_ids"][0]
    brown = loaded.tokenizer(" brown", add_special_tokens=False)["input_ids"][0]
    assert quick != brown
    ours = replace(loaded, tokenizer=_OtherWords(loaded.tokenizer, quick, brown))
    with served_demo(loaded, kind=kind) as server, pytest.raises(AlignmentError, match="ours, first at token"):
        open_demo(server, ours)


@pytest.mark.ci
def test_faults_lose_nothing_and_ask_nothing_twice(loaded: LoadedModel, tmp_path: Any) -> None:
    requests = requests_()
    retry = {"retry-after-ms": "1"}
    faults = [
        Raw(b"", 0),  # the connection breaks
        Raw(b'{"error": {"message": "slow down"}}', 429, retry),
        Raw(b'{"error": {"message": "sorry"}}', 500, retry),
        Raw(b'{"choices": [{"text": "a", "logpro', 200),  # cut off, as JSON
        Raw(b'{"choices": [{"text": "a", "logprobs": {"tokens": []', 200, cut=20),  # cut off, as HTTP
    ]
    with served_demo(loaded) as server:
        served = open_demo(server, loaded, max_retries=8)
        exact, _ = EndpointScorer(served).score(requests)
        n_before = len(server.bodies)
        server.fault = lambda number, body: faults[number % 7] if number % 7 < len(faults) else None
        scores, _ = EndpointScorer(served).score(requests, resume=tmp_path)
        assert len(server.bodies) > n_before
        assert scores.column("loglik").tolist() == exact.column("loglik").tolist()
        server.fault = lambda number, body: Raw(b"{}", 500, retry)  # would fail whatever is asked
        again, _ = EndpointScorer(served).score(requests, resume=tmp_path)
    assert again.column("loglik").tolist() == exact.column("loglik").tolist()


def test_a_request_that_fails_for_good_is_one_error_and_keeps_the_rest(loaded: LoadedModel, tmp_path: Any) -> None:
    requests = requests_()
    with served_demo(loaded) as server:
        served = open_demo(server, loaded, max_retries=0)
        n_probed = len(server.bodies)
        server.fault = lambda number, body: (
            Raw(b'{"error": {"message": "no"}}', 400) if number == n_probed + 3 else None
        )
        said = r"1 of .* requests to the served model failed.*The answers to \d+ of \d+ are saved"
        with pytest.raises(EndpointError, match=said):
            EndpointScorer(served).score(requests, resume=tmp_path)
        n_failed = len(server.bodies)
        scores, _ = EndpointScorer(served).score(requests, resume=tmp_path)
    assert np.isfinite(scores.column("loglik")).all()
    asked = [str(body) for body in server.bodies[n_probed:]]
    assert len(asked) == len(set(asked)) + 1  # the one that failed
    assert len(server.bodies) > n_failed


def test_asking_again_asks_the_server_again(loaded: LoadedModel, tmp_path: Any) -> None:
    with served_demo(loaded) as server:
        served = open_demo(server, loaded)
        EndpointScorer(served).score(requests_(), resume=tmp_path)
        n_first = len(server.bodies)
        EndpointScorer(served, repeat=1).score(requests_(), resume=tmp_path)
        assert len(server.bodies) > n_first


def test_a_corpus_has_the_log_probabilities_of_the_model_in_this_process(loaded: LoadedModel) -> None:
    text = " ".join(f"The {n} boats went down the river to the town." for n in range(60))
    exact, _ = Scorer(loaded, ScoringConfig(progress=False)).score_corpus("text", text, window=64)
    with served_demo(loaded) as server:
        scores, _ = EndpointScorer(open_demo(server, loaded)).score_corpus("text", text, window=64)
    assert np.abs(scores.column("nll") - exact.column("nll")).max() <= 2 * rounding(loaded)
    assert scores.column("argmax").tolist() == exact.column("argmax").tolist()
    assert scores.table.column("entropy").null_count == len(scores)


@pytest.mark.parametrize("kind", ["vllm", "text"])
def test_greedy_answers_are_those_of_the_model_in_this_process(kind: str, loaded: LoadedModel, tmp_path: Any) -> None:
    prompts = ["The king went", "Question: what is 2 + 2?\nAnswer:", "The river"]
    exact = generate_until(loaded, prompts, until=("\n",), max_new_tokens=8)
    with served_demo(loaded, kind=kind) as server:
        served = open_demo(server, loaded)
        n_probed = len(server.bodies)
        answers = generate_until(served, prompts, until=("\n",), max_new_tokens=8, resume=tmp_path)
        assert generate_until(served, prompts, until=("\n",), max_new_tokens=8, resume=tmp_path) == answers
        assert len(server.bodies) - n_probed == len(prompts)  # the second time nothing is asked
    assert answers == exact
    assert all(answers)


def lists(p: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    best = np.argsort(-p, kind="stable")[:k]
    return best, np.log(p[best])


def exact(p: np.ndarray, q: np.ndarray) -> float:
    return float(np.sum(p * np.log(p / q)))


@given(seed=st.integers(0, 10**6), k=st.integers(1, 12), n=st.integers(2, 12), sharp=st.floats(0.01, 8.0))
@QUICK
def test_the_bound_never_exceeds_the_exact_divergence(seed: int, k: int, n: int, sharp: float) -> None:
    rng = np.random.default_rng(seed)
    p, q = (np.exp(x) / np.exp(x).sum() for x in sharp * rng.normal(size=(2, n)))
    found = top_k_bound(lists(p, k), lists(q, k))
    assert 0.0 <= found.kl <= exact(p, q) + 1e-12
    if k >= n:  # both lists hold everything: nothing is merged
        terms = float(np.abs(p * np.log(p / q)).sum()) + 1
        assert found.kl == pytest.approx(exact(p, q), abs=of_sum(32, terms))  # at most 12 terms, and what makes them
        assert found.kept_baseline == pytest.approx(1.0)


def test_bounds_of_lists_by_hand() -> None:
    # Baseline 0.5 0.3 0.1 0.1, variant 0.6 0.1 0.2 0.1. The two longest of each: {0, 1} and {0, 2}. Token 0 is in both.
    p, q = np.array([0.5, 0.3, 0.1, 0.1]), np.array([0.6, 0.1, 0.2, 0.1])
    found = top_k_bound(lists(p, 2), lists(q, 2))
    assert found.kl == pytest.approx(0.5 * np.log(0.5 / 0.6) + 0.5 * np.log(0.5 / 0.4))
    assert (found.kept_baseline, found.kept_variant, found.clipped) == (pytest.approx(0.5), pytest.approx(0.6), 0)
    ids = np.array([0, 1])
    rounded = np.log([0.7, 0.3000001])  # a server's float32: the sum is above 1
    found = top_k_bound((ids, np.log([0.5, 0.4])), (ids, rounded))
    assert found.clipped == 1
    # The baseline's rest of 0.1 meets no rest: it is merged into the variant's less probable token.
    assert found.kl == pytest.approx(0.5 * np.log(0.5 / 0.7) + 0.5 * np.log(0.5 / 0.3), rel=1e-5)
    found = top_k_bound((np.array([0]), np.log([0.9])), (np.array([1]), np.log([0.9])))
    assert (found.kl, found.kept_baseline) == (0.0, 0.0)


def bounds_of(k: int, kl: float, *, clipped: int = 0) -> OptionBounds:
    distances = metric_records.inputs(12).variant.option_distances
    n = len(distances)
    columns = {name: distances.column(name) for name in OptionBounds.KEY}
    return OptionBounds.from_columns(
        {
            **columns,
            "k": [k] * n,
            "kl": [kl] * n,
            "kept_baseline": [0.9] * n,
            "kept_variant": [0.8] * n,
            "clipped": [clipped] * n,
        }
    )


def test_the_metric_has_the_name_of_its_lists_and_leaves_the_exact_keys_out() -> None:
    inputs = metric_records.inputs(12)
    served = replace(inputs.variant, option_distances=None, option_bounds=bounds_of(20, 0.25, clipped=1))
    again = replace(inputs.noise, option_distances=None, option_bounds=bounds_of(20, 0.01))
    found = replace(inputs, variant=served, noise=again)
    results = headline(compute_all(found))
    assert results["distance/kl_top20"].value == pytest.approx(0.25)
    assert results["distance/top_kept_mass"].value == pytest.approx(0.9)
    assert results["distance/top_rests_clipped"].value == results["distance/kl_top20"].n
    assert "distance/kl_top5" not in results and "distance/kl_mean" not in results
    assert unmet(found)["divergence"] == "the variant run has no option_distances records"
    assert "distance/flips_pct" in results


def test_items_asked_without_lists_are_not_unscored_and_lists_of_two_lengths_are_refused() -> None:
    inputs = metric_records.inputs(12)
    whole = bounds_of(20, 0.25)
    task, first = whole.column("task")[0], whole.column("item_id")[0]
    sample = replace(inputs, variant=replace(inputs.variant, option_bounds=whole.where(task=[task], item_id=[first])))
    result = headline(compute_all(sample))["distance/kl_top20"]
    assert (result.value, result.n, result.n_unscored) == (0.25, 1, 0)
    assert headline(compute_all(sample))["distance/flips_pct"].n > 1
    mixed = bounds_of(20, 0.25)
    k = mixed.column("k").copy()
    k[0] = 5
    columns = {name: mixed.column(name) for name in OptionBounds.SCHEMA.names}
    mixed = OptionBounds.from_columns({**columns, "k": k})
    with pytest.raises(DataError, match="several lengths"):
        compute_all(replace(inputs, variant=replace(inputs.variant, option_bounds=mixed)))
