"""BERTScore: identity, an independent greedy matching, and the metric over both models' answers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from mlflow_compress.errors import CheckpointError, DataError
from mlflow_compress.judges.encoders import embedded_folder
from mlflow_compress.metrics import METRICS, MetricSettings
from mlflow_compress.metrics.bertscore import authors_layer, bert_score
from mlflow_compress.metrics.core.requirements import BERTSCORE_MODEL
from tests import metric_records
from tests.unit.scoring_models import U, rounding_of

TEXTS = ["The river ends in the sea.", "Nine plus four is thirteen."]
COSINE = 2 * 384 * U  # of two equal vectors of 384 entries: their product, and their length, in float32
OTHER = ["The river flows into a lake.", "Bread."]


@pytest.fixture(scope="module")
def model() -> tuple[str, int]:
    """The embedded encoder and its last layer."""
    folder = embedded_folder()
    return str(folder), authors_layer("embedded", folder)


def test_equal_texts_have_one(model):
    assert bert_score(TEXTS, TEXTS, *model) == pytest.approx(1.0, abs=COSINE)


def test_equals_greedy_matching_by_hand(model):
    folder, layer = model
    tokenizer, encoder = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()

    def embed(text: str) -> torch.Tensor:
        with torch.inference_mode():
            out = encoder(**tokenizer(text, return_tensors="pt"), output_hidden_states=True).hidden_states[layer][0]
        return torch.nn.functional.normalize(out, dim=1)

    def read(output: Any) -> torch.Tensor:
        return torch.nn.functional.normalize(output.hidden_states[layer][0], dim=1)

    wanted, errors = [], []
    encoder.config.output_hidden_states = True
    for reference, text in zip(TEXTS, OTHER, strict=True):
        likeness = embed(text) @ embed(reference).T
        # The marks at both ends may be matched, but have no weight of their own, as in bert_score.
        precision, recall = likeness.amax(dim=1)[1:-1].mean().item(), likeness.amax(dim=0)[1:-1].mean().item()
        wanted.append(2 * precision * recall / (precision + recall))
        errors += [
            rounding_of(encoder, tokenizer(x, return_tensors="pt")["input_ids"], read) for x in (reference, text)
        ]
    ours = bert_score(TEXTS, OTHER, *model)
    # An entry moves by its error, here and there, and a cosine by the norms of both vectors' errors: sqrt(384) of them.
    assert ours == pytest.approx(wanted, abs=2 * 2 * 384**0.5 * max(errors))
    assert (ours < 0.95).all()


def test_metric_of_both_models_answers(model):
    full = metric_records.inputs(30)
    asked = replace(full, settings=MetricSettings(resamples=200, bertscore_model=model))
    assert asked.missing(BERTSCORE_MODEL) is None
    results = METRICS.get("bert_score").compute(asked)
    assert {r.name for r in results} == {"judge/bert_score"}
    assert 0 < results[0].value < 1
    assert results[0].low is not None and results[0].low <= results[0].value <= results[0].high
    same = metric_records.identical(full)
    alike = METRICS.get("bert_score").compute(replace(same, settings=asked.settings))
    assert alike[0].value == pytest.approx(1.0, abs=COSINE)


def test_no_texts_are_refused(model):
    with pytest.raises(DataError, match="at least one pair"):
        bert_score([], [], *model)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="Not a model that BERTScore can use"):
        authors_layer("mine", tmp_path)


def test_layers_are_those_of_the_authors():
    assert authors_layer("roberta-large", embedded_folder()) == 17
    assert authors_layer("embedded", embedded_folder()) == 6
