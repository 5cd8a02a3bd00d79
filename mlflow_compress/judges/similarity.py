"""Judges that ask no model: the similarity of sampled answers (ConSCompF), and where greedy answers part."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mlflow_compress.errors import AlignmentError, DataError, JudgeError
from mlflow_compress.judges import encoders
from mlflow_compress.judges.judge_registry import JUDGES, AnswerVectors, Judge, Judged, JudgeInputs
from mlflow_compress.kept import kept
from mlflow_compress.records import Generations


def answer_embeddings(answers: Mapping[str, Generations], encoder: encoders.AnswerEncoder) -> AnswerVectors:
    """Return embeddings of the sampled answers of several models, for example "baseline", "again" and "variant".

    All models have answered the same instructions of one task, with the same number k of samples. A text is encoded
    once, so that equal answers of two models have equal vectors; each model's texts are encoded together, those that
    no model before it has written. So every variant finds the baseline's vectors where another one has left them.
    """
    if not answers:
        raise DataError("No answers to embed")
    texts: dict[str, dict[str, list[str]]] = {}
    tasks: set[str] = set()
    for model, generations in answers.items():
        chosen = generations.where(turn=0)
        tasks |= set(chosen.column("task"))
        texts[model] = _by_item(chosen)
    if len(tasks) != 1:
        raise DataError("Answers of one task are needed, with a first turn", got=sorted(tasks))
    first, *others = texts
    item_ids = tuple(texts[first])
    samples = {len(t) for by_item in texts.values() for t in by_item.values()}
    if len(samples) != 1:
        raise DataError("Every instruction of every model needs the same number of samples", got=sorted(samples))
    for model in others:
        differing = sorted(set(texts[model]) ^ set(item_ids))
        if differing:
            raise AlignmentError(f"{first} and {model} answered different instructions", got=differing[:3])
    vector_of: dict[str, npt.NDArray[np.float32]] = {}
    vectors: dict[str, npt.NDArray[np.float32]] = {}
    for model, by_item in texts.items():
        flat = [text for item in item_ids for text in by_item[item]]
        if new := [text for text in dict.fromkeys(flat) if text not in vector_of]:
            vector_of |= dict(zip(new, encoder.encode(new), strict=True))
        vectors[model] = np.stack([vector_of[text] for text in flat]).reshape(len(item_ids), max(samples), -1)
    return AnswerVectors(tasks.pop(), item_ids, vectors, encoder.name, encoder.identity)


def _by_item(generations: Generations) -> dict[str, list[str]]:
    rows = sorted(range(len(generations)), key=generations.column("sample").__getitem__)
    item_ids, texts = generations.column("item_id"), generations.column("text")
    by_item: dict[str, list[str]] = {item: [] for item in item_ids}
    for row in rows:
        by_item[item_ids[row]].append(texts[row])
    return by_item


def _open(settings: encoders.EncoderSettings, folder: Path) -> Callable[[JudgeInputs], Judged]:
    if settings.encoder_base_url is not None:
        remote = encoders.open_endpoint_encoder(settings, folder)
        return lambda inputs: _by_endpoint(inputs, remote)
    name, device = settings.encoder, settings.device
    device = "auto" if device == "balanced" else device  # an encoder is small
    vectors = folder / "vectors"
    encoder = kept(
        ("encoder", name, device, vectors), lambda: encoders.load_encoder(name, device=device, vectors=vectors)
    )
    return lambda inputs: _judged(inputs, encoder)


def _judged(inputs: JudgeInputs, encoder: encoders.AnswerEncoder) -> Judged:
    vectors = answer_embeddings(inputs.samples, encoder)
    return Judged(vectors=vectors, parameters={"encoder": encoder.name, "encoder_id": encoder.identity})


def _by_endpoint(inputs: JudgeInputs, encoder: encoders.EndpointEncoder) -> Judged:
    """Return the vectors, and what they took. A call that fails must not cost the run what other judges have said."""
    try:
        judged = _judged(inputs, encoder)
    except JudgeError as error:
        judged = Judged(skipped=str(error).rstrip("."), failed=str(error).rstrip("."))
    tokens = encoder.spending.by_model.get(encoder.model)
    values = {} if tokens is None else {"judge/encoder_calls": float(tokens.calls)}
    if tokens is not None and tokens.calls > tokens.without_usage:
        values["judge/encoder_tokens"] = float(tokens.prompt)
    return replace(judged, values=values)


JUDGES.register("similarity")(
    Judge(
        open=_open,
        settings=encoders.EncoderSettings,
        requires="A sentence encoder: the embedded one, one in a folder or on the hub, or an endpoint's.",
        source=(
            "ConSCompF; the paper encodes with all-MiniLM-L12-v2, the embedded default is all-MiniLM-L6-v2, "
            "so values are comparable only under the same encoder, which is logged"
        ),
    )
)


JUDGES.register("divergent_tokens")(
    Judge(
        open=lambda settings, folder: lambda inputs: Judged(records=inputs.greedy),
        greedy=True,
        requires="Nothing but both models: each answers every instruction greedily, and scores the baseline's answers.",
        source="Divergent Token Metrics, arXiv 2311.01544",
    )
)
