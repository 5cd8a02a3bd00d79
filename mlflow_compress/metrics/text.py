"""The variant's answers against the baseline's: ROUGE-L, BLEU, and BERTScore by a model of the user's choice."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from mlflow_compress.errors import AlignmentError, CheckpointError, DataError
from mlflow_compress.files import read_json
from mlflow_compress.metrics.core.item_table import WRITTEN_RULES, ItemSubset
from mlflow_compress.metrics.core.metric_inputs import MetricInputs
from mlflow_compress.metrics.core.metric_registry import MetricKey, metric
from mlflow_compress.metrics.core.requirements import BERTSCORE_MODEL, GENERATIONS, VARIANT, package
from mlflow_compress.metrics.stats.arrays import Float, Int, Objects, same_length
from mlflow_compress.metrics.stats.bootstrap import cluster_sums, ratio
from mlflow_compress.records import Generations, MetricResult, align

_WORD = re.compile("[a-z0-9]+")


def rouge_l(references: Sequence[str], texts: Sequence[str]) -> Float:
    """ROUGE-L F-measure of each text against its reference, shape (n,), in [0, 1].

    ``F = 2 P R/(P + R)`` with ``P = LCS/len(text)``, ``R = LCS/len(reference)`` over `rouge_score`'s tokens (lower
    case, Latin letters and digits, no stemming). Two texts without tokens are equal: 1.

    Source: Lin, "ROUGE: a package for automatic evaluation of summaries", 2004; tokens as in Google's `rouge_score`.
    The longest common subsequence (LCS) is rapidfuzz's: `rouge_score` fills its table cell by cell in Python, which
    takes minutes on long answers.
    """
    from rapidfuzz.distance import LCSseq

    if same_length(references=references, texts=texts) == 0:
        raise DataError("ROUGE-L needs at least one pair of texts")
    scores = []
    for reference, text in zip(references, texts, strict=True):
        a, b = _WORD.findall(reference.lower()), _WORD.findall(text.lower())
        scores.append(2.0 * LCSseq.similarity(a, b) / (len(a) + len(b)) if a or b else 1.0)
    return np.array(scores)


def bleu(references: Sequence[str], texts: Sequence[str]) -> float:
    """Corpus BLEU of the texts against one reference each, in percent, by sacrebleu with its defaults (13a, exp)."""
    import sacrebleu

    if same_length(references=references, texts=texts) == 0:
        raise DataError("BLEU needs at least one pair of texts")
    return float(sacrebleu.corpus_bleu(list(texts), [list(references)]).score)


def shared_samples(baseline: Generations, variant: Generations) -> tuple[Generations, Generations]:
    """Return the rows of both models that have a partner, in the baseline's order.

    One model may have more samples than the other (the baseline is often sampled twice, for the similarity floor);
    what is compared is the samples that both have.

    Raises `AlignmentError`: when the models answered different instructions or turns, or saw different prompts.
    """
    ours, theirs = set(baseline.key_rows()), set(variant.key_rows())
    lonely = {key[:3] for key in ours} ^ {key[:3] for key in theirs}
    if lonely:
        raise AlignmentError(
            "Baseline and variant answered different instructions",
            got=str(sorted(lonely)[:3]),
            fix="Generate both with the same tasks and limit",
        )
    both = ours & theirs
    b, q = (type(r)(r.table.filter(pa.array([key in both for key in r.key_rows()]))) for r in (baseline, variant))
    q = Generations(q.table.take(align(b, q)))
    # Later turns contain the model's own earlier answer, so only the first turn must agree.
    differing = np.flatnonzero((b.column("turn") == 0) & (b.column("prompt") != q.column("prompt")))
    if len(differing):
        raise AlignmentError(
            "Baseline and variant answered different prompts",
            got=str(b.key_rows()[differing[0]]),
            fix="Generate both with the same tasks and prompt format",
        )
    return b, q


@dataclass(frozen=True)
class _AnswerPairs:
    """Free answers of both models to the same instructions."""

    references: list[str]  # The baseline's and the variant's answers
    texts: list[str]
    task: Objects  # Whose answer it is; shape (n,)
    item_id: Objects
    turn: Int
    instruction: Int  # Number of the (task, item_id): what the bootstrap draws; shape (n,)

    def subsets(self) -> Iterator[ItemSubset]:
        """Iterate over all answers, then over those of each task."""
        yield ItemSubset(None, None, np.arange(len(self.texts)))
        for task in sorted(set(self.task)):
            yield ItemSubset(task, None, np.flatnonzero(self.task == task))

    def mean(self, name: str, scores: Float, inputs: MetricInputs) -> Iterator[MetricResult]:
        """Yield the mean of a score per answer, for each subset, with an interval over instructions."""
        for subset in self.subsets():
            rows = subset.rows
            sums = cluster_sums(scores[rows], self.instruction[rows])
            interval = inputs.settings.interval(sums, ratio)
            yield subset.result(name, float(scores[rows].mean()), interval, n=len(rows), level=inputs.settings.level)


def answer_pairs(inputs: MetricInputs) -> _AnswerPairs | None:
    """Return the paired free answers, or None where there are none.

    Tasks whose generated answers are right or wrong are left out.
    """
    ours, theirs = inputs.baseline.generations, inputs.variant.generations if inputs.variant else None
    if ours is None or theirs is None:
        return None
    items = inputs.baseline.items
    short = set(items.where(rule=WRITTEN_RULES).column("task")) if items is not None else set()
    tasks = sorted(set(ours.column("task")) - short)
    if not tasks:
        return None
    ours, theirs = shared_samples(ours.where(task=tasks), theirs.where(task=tasks))
    _, instruction = np.unique([f"{t}\x1f{i}" for t, i, *_ in ours.key_rows()], return_inverse=True)
    return _AnswerPairs(
        references=ours.table.column("text").to_pylist(),
        texts=theirs.table.column("text").to_pylist(),
        task=ours.column("task"),
        item_id=ours.column("item_id"),
        turn=ours.column("turn"),
        instruction=instruction,
    )


@metric(
    "text_overlap",
    keys=(
        MetricKey.share(
            "judge/rouge_l",
            "higher",
            "Mean ROUGE-L F-measure of the variant's answers against the baseline's.",
            label="ROUGE-L",
        ),
        MetricKey(
            name="judge/bleu",
            direction="higher",
            high=100.0,
            unit="points",
            label="BLEU",
            meaning="Corpus BLEU of the variant's answers against the baseline's.",
        ),
    ),
    requires=(VARIANT, GENERATIONS, package("rapidfuzz"), package("sacrebleu")),
    source="rouge_score tokens and definition; sacrebleu corpus BLEU",
)
def text_overlap(inputs: MetricInputs) -> list[MetricResult]:
    """By task and pooled over all free answers; the bootstrap draws instructions, not samples or turns."""
    pairs = answer_pairs(inputs)
    if pairs is None:
        return []
    results = list(pairs.mean("judge/rouge_l", rouge_l(pairs.references, pairs.texts), inputs))
    for subset in pairs.subsets():
        value = bleu([pairs.references[r] for r in subset.rows], [pairs.texts[r] for r in subset.rows])
        results.append(subset.result("judge/bleu", value, n=len(subset.rows), level=inputs.settings.level))
    return results


def bert_score(references: Sequence[str], texts: Sequence[str], folder: str, layer: int) -> Float:
    """BERTScore F of each text against its reference, shape (n,), in [-1, 1]; 1 for equal texts.

    ``F = 2 P R/(P + R)``: R is the mean over the reference's tokens of the highest cosine similarity to any token of
    the text, P the same the other way round, over contextual embeddings; no idf weights, no rescaling.

    - `folder`: Of the embedding model. Values are comparable under the same model and layer only.

    Source: Zhang et al., "BERTScore: evaluating text generation with BERT", 2020; computed by the authors'
    `bert_score`.
    """
    from bert_score import BERTScorer

    if same_length(references=references, texts=texts) == 0:
        raise DataError("BERTScore needs at least one pair of texts")
    scorer = BERTScorer(model_type=folder, num_layers=layer)
    return np.asarray(scorer.score(list(texts), list(references))[2].double().numpy())


def authors_layer(name: str, folder: Path) -> int:
    """Return the layer whose outputs BERTScore uses.

    - `name`: What the model is called. For names that `bert_score` knows ("roberta-large" is its default for English)
      the layer is the one its authors chose, for others the last.

    Raises `CheckpointError`: when the folder has no configuration that tells the number of layers.
    """
    from bert_score.utils import model2layers

    path = folder / "config.json"
    config = read_json(path, error=CheckpointError) if path.is_file() else None
    last = config.get("num_hidden_layers") if isinstance(config, dict) else None
    if not isinstance(last, int) or isinstance(last, bool):
        raise CheckpointError(
            "Not a model that BERTScore can use",
            allowed="a folder with a config.json that has num_hidden_layers",
            got=str(folder),
        )
    return int(model2layers.get(name, last))


@metric(
    "bert_score",
    keys=(
        MetricKey.share(
            "judge/bert_score", "higher", "Mean BERTScore F of the variant's answers against the baseline's.", low=-1.0
        ),
    ),
    requires=(VARIANT, GENERATIONS, BERTSCORE_MODEL, package("bert_score")),
    source="bert_score 0.3.13, F without idf and without rescaling",
)
def bert_score_mean(inputs: MetricInputs) -> list[MetricResult]:
    """By task and pooled over all free answers; the bootstrap draws instructions, not samples or turns."""
    pairs = answer_pairs(inputs)
    model = inputs.settings.bertscore_model
    if pairs is None or model is None:
        return []
    scores = bert_score(pairs.references, pairs.texts, *model)
    return list(pairs.mean("judge/bert_score", scores, inputs))
