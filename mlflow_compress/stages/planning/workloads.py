"""What a suite and a list of instructions ask of a model, as amounts of work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlflow_compress.config import PlanConfig
from mlflow_compress.errors import ConfigError
from mlflow_compress.items.sources.instructions import Instruction
from mlflow_compress.items.suite import Suite
from mlflow_compress.items.trace_corpus import TraceCorpus
from mlflow_compress.scoring.costs.workload import Workload, generation_workload, workload
from mlflow_compress.scoring.generation.chat_format import chat_format
from mlflow_compress.scoring.plan.corpus_windows import cut
from mlflow_compress.scoring.plan.encoding import Encoder
from mlflow_compress.scoring.plan.packing import plan_packs
from mlflow_compress.stages.evaluation.run_model import WINDOW
from mlflow_compress.stages.judging.answers import MT_BENCH_TOKENS


@dataclass(frozen=True, kw_only=True)
class GeneratedWork:
    """Answers that are written token by token: the work, the longest answer in tokens, and their number."""

    work: Workload
    new_tokens: int
    answers: int


def scored_work(suite: Suite, encoder: Encoder, *, batch_tokens: int, head_rows: int) -> Workload:
    """Return the work of scoring a suite: packs with shared prefixes for options, windows for corpora.

    Raises
    ------
    ConfigError
        A corpus is written by the baseline itself, so that nobody knows its length before.
    """
    encoded = [e for e in encoder.encode(suite.requests) if e.fits]
    sequences = [e.inputs for e in encoded]
    plan = plan_packs(sequences, [len(e.targets) for e in encoded], batch_tokens=batch_tokens)
    found = workload(plan, sum(map(len, sequences)), head_rows)
    texts: list[tuple[Any, int | None]] = []
    for corpus in suite.corpora:
        if isinstance(corpus, TraceCorpus):
            raise ConfigError(
                "The baseline writes this corpus, so its work is not known before", got=corpus.name, fix="Leave it out"
            )
        texts.append((corpus.text, corpus.max_tokens))
    texts += [(task.documents, None) for task in suite.tasks if task.documents]
    for text, most in texts:
        windows, _ = cut(encoder, text, window=WINDOW, max_tokens=most).plan(batch_tokens)
        found += workload(windows, windows.n_tokens, head_rows)
    return found


def task_answers(suite: Suite, encoder: Encoder) -> list[GeneratedWork]:
    """Return the answers that tasks with generated answers ask for."""
    found = []
    for task in suite.tasks:
        if task.answering is not None:
            lengths = [len(ids) for ids in encoder.ids(task.items.column("prompt").tolist())]
            new = task.answering.max_new_tokens
            found.append(GeneratedWork(work=generation_workload(lengths, new), new_tokens=new, answers=len(lengths)))
    return found


def instruction_answers(
    instructions: list[Instruction], tokenizer: Any, config: PlanConfig, max_length: int
) -> tuple[GeneratedWork, GeneratedWork]:
    """Return the answers that are graded (every turn, after the longest earlier ones), and the samples of the first."""
    chat, system = chat_format(tokenizer), config.inference.system_prompt or ""
    longest = config.answers.judge_max_tokens
    graded_tokens = min(MT_BENCH_TOKENS, max_length // 4) if longest == "auto" else int(longest)
    firsts: list[int] = []
    later: list[int] = []
    for one in instructions:
        length = len(tokenizer(chat.prompt([one.turns[0]], system=system))["input_ids"])
        firsts.append(length)
        for turn in one.turns[1:]:
            length += graded_tokens + len(tokenizer(turn)["input_ids"])
            later.append(length)
    samples, new = firsts * config.answers.num_samples, config.answers.max_new_tokens
    return (
        GeneratedWork(
            work=generation_workload(firsts + later, graded_tokens),
            new_tokens=graded_tokens,
            answers=len(firsts + later),
        ),
        GeneratedWork(work=generation_workload(samples, new), new_tokens=new, answers=len(samples)),
    )
