"""Text that the baseline writes before it is evaluated, and that both models are scored on: traces and chains."""

import gc
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from mlflow_compress.commands.evaluate.items import trace_prompts
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.shared.get_or_create import digest, get_or_create_run
from mlflow_compress.commands.shared.named_models import baseline_label
from mlflow_compress.config import SEED
from mlflow_compress.engines.interface import AnyEngineModel
from mlflow_compress.items.sources.instructions import fingerprint_of
from mlflow_compress.items.suite import Suite
from mlflow_compress.items.task import Task, TaskSettings, TraceCorpus, seeded
from mlflow_compress.kept import kept
from mlflow_compress.reasoning import agree, answer_span, parted, read_answer, read_gold
from mlflow_compress.records import Chains, Traces
from mlflow_compress.scoring.generation.generate import generate_answers, generate_rows
from mlflow_compress.scoring.generation.generation_rows import GenerationConfig
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.run_names import RECORDS
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker

TRACES_STAGE = "baseline-traces"
_MOST_TOKENS = 512  # of an answer, unless the user says otherwise


def with_traces(
    store: Tracker, base: AnyEngineModel, suite: Suite, config: EvaluateConfig, *, write: bool = True
) -> Suite:
    """Return the suite with the baseline's own answers, where the tasks name them, written now if need be (`write`)."""
    if not any(isinstance(corpus, TraceCorpus) for corpus in suite.corpora):
        return suite
    prompts, system, asked = trace_prompts(config), config.inference.system_prompt or "", config.traces
    most = asked.trace_max_new_tokens
    drawn = GenerationConfig(  # from the whole distribution, because KL is an average over it
        max_new_tokens=min(_MOST_TOKENS, base.max_length // 4) if most == "auto" else int(most),
        temperature=asked.trace_temperature,
        top_k=0,
        top_p=1.0,
        samples=asked.trace_samples,
        seed=config.source.seed,
    )
    fingerprint = {
        **base.identity,
        "system_prompt": config.inference.system_prompt,
        "sampling": asdict(drawn),
        "prompts": fingerprint_of(prompts, config.traces.trace_instructions),
    }
    if not write and not store.find(TRACES_STAGE, **{run_names.FINGERPRINT: digest(fingerprint)}):
        return suite

    def work(run: TrackedRun, folder: Path, resume: Path) -> None:
        generations = generate_answers(
            base.load(), prompts, drawn, task=TraceCorpus().name, system=system, resume=resume
        )
        Traces(generations.table).write(folder / RECORDS)

    run_id, fresh = get_or_create_run(
        store, TRACES_STAGE, baseline_label(config.source, config.served), fingerprint, work
    )
    if fresh:
        gc.collect()  # otherwise the model is still in memory when it is loaded again to be scored
    answers = kept(("traces", run_id), lambda: Traces.read(store.fetch(run_id, RECORDS)))
    corpora = (replace(c, answers=answers) if isinstance(c, TraceCorpus) else c for c in suite.corpora)
    return replace(suite, corpora=tuple(corpora))


_CHAINS_STAGE = "baseline-chains"
MOST_CHAINS = 100  # per task, drawn with the seed: the states of all would fill a disk, and the intervals are narrow
_BROKEN = "\ufffd"  # What a tokenizer decodes to where a character is cut between two tokens


def with_chains(
    store: Tracker, base: AnyEngineModel, suite: Suite, config: EvaluateConfig, *, write: bool = True
) -> Suite:
    """Return the suite with the baseline's own thoughts about its problems, written now if need be (`write`).

    They are the first of its drawn answers. There are none for a served model, whose distributions are not seen.
    """
    if not base.abilities.whole_distributions:
        return suite
    return replace(suite, tasks=tuple(_with_chains(store, base, task, config, write) for task in suite.tasks))


def _with_chains(store: Tracker, base: AnyEngineModel, task: Task, config: EvaluateConfig, write: bool) -> Task:
    answering = task.answering
    if answering is None or answering.thinking is None:
        return task
    rows = task.items.table.select(["item_id", "prompt", "rule", "answers"]).to_pylist()
    if len(rows) > MOST_CHAINS:
        drawn = seeded(TaskSettings(seed=config.source.seed), "chains", task.name).sample(range(len(rows)), MOST_CHAINS)
        rows = [rows[number] for number in sorted(drawn)]
    sampling = GenerationConfig(
        max_new_tokens=answering.max_new_tokens, samples=1, seed=SEED, **asdict(answering.sampling)
    )
    fingerprint = {
        **base.identity,
        "task": task.name,
        "problems": digest({row["item_id"]: row for row in rows}),
        "sampling": asdict(sampling),
        "ends": [list(answering.until), sorted(answering.end_tokens)],
    }
    if not write and not store.find(_CHAINS_STAGE, **{run_names.FINGERPRINT: digest(fingerprint)}):
        return task

    def work(run: TrackedRun, folder: Path, resume: Path) -> None:
        loaded = base.load()
        written = generate_rows(
            loaded,
            [row["prompt"] for row in rows],
            sampling,
            until=answering.until,
            end_tokens=answering.end_tokens,
            resume=resume,
        )
        chains = []
        for row, [answer] in zip(rows, written, strict=True):
            pieces = [*token_pieces(loaded.tokenizer, answer.tokens), *("" for _ in answer.end)]
            chains.append(
                {
                    "task": task.name,
                    "item_id": row["item_id"],
                    "sample": 0,
                    "prompt_tokens": answer.prompt,
                    "tokens": answer.tokens + answer.end,
                    "pieces": pieces,
                    **places_in_chain(row["prompt"], pieces, row["rule"], row["answers"][0]),
                }
            )
        Chains.from_rows(chains).write(folder / RECORDS)

    run_id, fresh = get_or_create_run(
        store, _CHAINS_STAGE, baseline_label(config.source, config.served), fingerprint, work
    )
    if fresh:
        gc.collect()
    return replace(task, chains=kept(("chains", run_id), lambda: Chains.read(store.fetch(run_id, RECORDS))))


def token_pieces(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Return the text that each token adds to those before it, special tokens too.

    A character that several tokens make belongs to the last of them. Each token is decoded behind the few before it,
    because some tokenizers drop a space at the beginning: the cost grows with the number of tokens, not its square.
    """

    def text(begin: int, end: int) -> str:
        return str(tokenizer.decode(tokens[begin:end], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    pieces = []
    begin = read = 0
    for end in range(1, len(tokens) + 1):
        before, now = text(begin, read), text(begin, end)
        whole = len(now) > len(before) and not now.endswith(_BROKEN)
        pieces.append(now[len(before) :] if whole else "")
        if whole:
            begin, read = read, end
    return pieces


def places_in_chain(prompt: str, pieces: Sequence[str], rule: str, gold: str) -> dict[str, int | None]:
    """Return the columns of `Chains` that say where the thought ends and where the right answer stands."""
    reply, ends = "".join(pieces), [*accumulate(map(len, pieces))]
    begins = [end - len(piece) for end, piece in zip(ends, pieces, strict=True)]
    _, answer = parted(prompt, reply)
    start = reply.rindex(answer) if answer else len(reply)
    inside: list[int] = []
    span = answer_span(answer, rule) if answer else None
    if span is not None and agree(read_gold(gold, rule), read_answer(answer, rule), rule):
        first, last = start + span[0], start + span[1]
        inside = [n for n, (a, b) in enumerate(zip(begins, ends, strict=True)) if a < b and a < last and b > first]
    return {
        "n_thought": sum(begin < start for begin in begins),
        "answer_begin": inside[0] if inside else None,
        "answer_end": inside[-1] + 1 if inside else None,
    }
