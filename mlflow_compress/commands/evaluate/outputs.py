"""Runs a model on everything in a suite, and logs the metrics that lm-evaluation-harness computes of its outputs."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mlflow_compress.config import SEED
from mlflow_compress.engines.interface import ModelScorer, Stored, Writer
from mlflow_compress.items.suite import Suite
from mlflow_compress.items.task import Corpus
from mlflow_compress.reasoning import whole_reply
from mlflow_compress.records import (
    ChainDistances,
    Chains,
    ChainScores,
    Generations,
    ItemKey,
    OptionBounds,
    OptionDistances,
    RunRecords,
    TokenDistances,
    TokenScores,
    Traces,
)
from mlflow_compress.scoring.generation.decoding import AnyCausalLM
from mlflow_compress.scoring.generation.generate import generate_rows
from mlflow_compress.scoring.generation.generation_rows import GenerationConfig
from mlflow_compress.scoring.plan.encoding import Encoder, Shortened
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.tracked_run import TrackedRun

GENERATED = "generated"  # sub-folder of `resume` with the generated answers
WINDOW = 512  # tokens per window of a corpus, as in llama.cpp
_SECOND = (SEED + 1,)  # Seeds of drawn answers
BOTH = (SEED, *_SECOND)


@dataclass(frozen=True)
class ModelOutputs:
    """Outputs of one model on a suite."""

    records: RunRecords
    n_truncated: int  # Requests and prompts that were too long for the model and lost their beginning
    shortened: Shortened = field(default_factory=Shortened)  # The items that they belong to
    asked_again: Mapping[str, int] = field(default_factory=dict)  # Requests to a server that were repeated, by fault


def _answers(
    loaded: AnyCausalLM, encoder: Encoder, suite: Suite, resume: Path | None, samplings: Sequence[int]
) -> tuple[Generations | None, set[ItemKey]]:
    """Return the generated answers, if any, and the items whose prompt was too long.

    Sample 0 is greedy. The others are those of each of the `samplings`, which are seeds, one after the other.
    """
    rows = []
    cut: set[ItemKey] = set()
    for task in suite.tasks:
        if task.answering is None:
            continue
        ids, prompts = task.items.column("item_id").tolist(), task.items.column("prompt").tolist()
        length = task.answering.max_new_tokens
        room = loaded.max_length - length
        cut |= {(task.name, i) for i, tokens in zip(ids, encoder.ids(prompts), strict=True) if len(tokens) > room}
        folder = resume / GENERATED / task.name if resume else None
        until, ends = task.answering.until, task.answering.end_tokens
        greedy = GenerationConfig(max_new_tokens=length, temperature=0.0, samples=1, top_k=0, top_p=1.0)
        answers = generate_rows(loaded, prompts, greedy, until=until, end_tokens=ends, resume=folder)
        judge, thinks = task.answering.judge, task.answering.thinking is not None
        replies = {
            # Where the prompt opens the thought, the reply alone does not show that it is one.
            item_id: whole_reply(prompt, row.text) if thinks else row.text
            for item_id, prompt, [row] in zip(ids, prompts, answers, strict=True)
        }
        correct = judge(replies) if judge is not None else {}
        for seed in samplings if task.answering.samples else ():
            drawn = GenerationConfig(
                max_new_tokens=length, samples=task.answering.samples, seed=seed, **asdict(task.answering.sampling)
            )
            sampled = resume / GENERATED / f"{task.name}~{seed}" if resume else None
            more = generate_rows(loaded, prompts, drawn, until=until, end_tokens=ends, resume=sampled)
            answers = [[*some, *others] for some, others in zip(answers, more, strict=True)]
        for item_id, prompt, several in zip(ids, prompts, answers, strict=True):
            for sample, written in enumerate(several):
                text = written.text
                # Of a thought it counts whether it was cut at the limit: text that is read again can have fewer tokens.
                tokens = written.tokens if thinks else loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
                n_tokens = len(tokens)
                row = {"task": task.name, "item_id": item_id, "turn": 0, "sample": sample, "prompt": prompt}
                grade = None if sample else correct.get(item_id)
                rows.append({**row, "text": text, "n_tokens": n_tokens, "correct": grade})
    return Generations.from_rows(rows) if rows else None, cut


def scored_texts(suite: Suite) -> Iterator[tuple[str, str | tuple[str, ...] | Traces, int | None, tuple[int, ...]]]:
    """Iterate over name, text, most tokens and beginnings of documents of everything whose every token is scored."""
    for corpus in suite.corpora:
        if isinstance(corpus, Corpus):
            yield corpus.name, corpus.text, corpus.max_tokens, corpus.starts
        elif corpus.answers is not None:
            yield corpus.name, corpus.answers, None, ()
        else:
            raise ValueError("traces must be written before a model reads them")
    for task in suite.tasks:
        if task.documents:
            yield task.name, task.documents, None, ()


def run_model(
    scorer: ModelScorer[Writer, Stored],
    suite: Suite,
    *,
    capture: Writer | None = None,
    baseline: Stored | None = None,
    generations: bool = True,
    samplings: Sequence[int] = _SECOND,
    resume: Path | None = None,
) -> ModelOutputs:
    """Score a model on everything in the suite.

    - `capture`: Receives the inputs of the language-model head at every scored position (baseline runs).
    - `baseline`: States of a baseline run, or its most probable tokens for a served model, to compute distances from.
    - `generations`: Whether the answers of tasks with generated answers are generated.
    - `samplings`: Seeds of drawn answers, where a task has them. A variant's are drawn as the baseline's second ones,
      so that an unchanged model has exactly the noise floor.
    - `resume`: Folder of unfinished results, from which an interrupted call resumes.
    """
    scores, distances = scorer.score(suite.requests, capture=capture, baseline=baseline, resume=resume)
    report = scorer.report  # of the options: every corpus has one of its own
    n_truncated, shortened = (report.n_truncated, report.shortened) if report is not None else (0, Shortened())
    again = Counter(report.asked_again if report is not None else {})
    tokens: list[TokenScores] = []
    token_distances: list[TokenDistances] = []
    for name, text, most, starts in scored_texts(suite):
        of_texts, moved = scorer.score_corpus(
            name,
            text,
            window=WINDOW,
            max_tokens=most,
            starts=starts,
            capture=capture,
            baseline=baseline,
            resume=resume,
        )
        again.update(scorer.report.asked_again if scorer.report is not report and scorer.report is not None else {})
        tokens.append(of_texts)
        if moved is not None:
            token_distances.append(moved)

    chains = [task for task in suite.tasks if task.chains is not None]
    on_chains = [
        scorer.score_corpus(task.name, task.chains, capture=capture, baseline=baseline, resume=resume)
        for task in chains
        if task.chains is not None
    ]
    moved_on = [moved.table for _, moved in on_chains if moved is not None]
    answers, cut = _answers(scorer.loaded, scorer.encoder, suite, resume, samplings) if generations else (None, set())
    records = RunRecords(
        items=suite.items if len(suite.items) else None,  # corpora have none
        option_scores=scores if len(scores) else None,
        option_distances=distances if isinstance(distances, OptionDistances) and len(distances) else None,
        option_bounds=distances if isinstance(distances, OptionBounds) and len(distances) else None,
        token_scores=TokenScores.concat(tokens) if tokens else None,
        token_distances=TokenDistances.concat(token_distances) if token_distances else None,
        generations=answers,
        traces=suite.traces,
        chains=Chains.concat([task.chains for task in chains if task.chains is not None]) if chains else None,
        chain_scores=ChainScores.concat([ChainScores(scores.table) for scores, _ in on_chains]) if chains else None,
        chain_distances=ChainDistances.concat([*map(ChainDistances, moved_on)]) if moved_on else None,
    )
    return ModelOutputs(
        records, n_truncated + len(cut), replace(shortened, cut=shortened.cut | cut), asked_again=dict(again)
    )


def log_harness_metrics(
    run: TrackedRun, suite: Suite, outputs: ModelOutputs, *, baseline: RunRecords | None = None
) -> None:
    """Log the harness's metrics of a model: of tasks and groups as MLflow metrics, of their parts too in a table."""
    run.log_values({run_names.TRUNCATED: outputs.n_truncated})
    metrics = suite.harness_metrics(outputs.records)
    if not metrics:
        return
    tasks_and_groups = {task.name for task in suite.tasks} | {group.name for group in suite.averages}
    run.log_values(
        {f"harness/{metric.name}/{metric.part}": metric.value for metric in metrics if metric.part in tasks_and_groups}
    )
    of_baseline = (
        {(metric.part, metric.name): metric.value for metric in suite.harness_metrics(baseline)} if baseline else {}
    )
    rows: list[dict[str, Any]] = [
        {
            "part": metric.part,
            "metric": metric.name,
            "value": metric.value,
            "baseline": of_baseline.get((metric.part, metric.name)),
            "n": metric.n,
            "n_unscored": metric.n_unscored,
        }
        for metric in metrics
    ]
    run.log_json(rows, "harness.json")
