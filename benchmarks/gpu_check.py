"""Everything once on a GPU, compared with the CPU: scoring, generation and every compression method in two precisions.

On one GPU it takes about ten minutes with the demo. Without a GPU it says so, and does the same on the CPU, so that
the script itself can be tested. What fails is named, and the rest goes on. The exit code is 1 if anything failed or
a number is wrong.

What is compared (float32, and bfloat16 with the CPU's own bfloat16 as the measure):

- scoring: log-probabilities of every option and corpus token, and the KL to the baseline whose states lie on disk;
- packed batches against padded ones, and stored states against a baseline that is in memory too, on the GPU;
- generation: of greedy tokens, how many are also the CPU's choice after the same text;
- every method, compressed on the GPU (the reload check included) and on the CPU: the GPU's checkpoint scored on both,
  and the KL of both checkpoints.

Example
-------
python benchmarks/gpu_check.py --output gpu_check.jsonl
python benchmarks/gpu_check.py --only rtn,gptq --limit 1
"""

import argparse
import importlib.util
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.one_process import JobError, OneProcess

FLOAT32, BFLOAT16 = "float32", "bfloat16"
CORPUS_TOKENS, NEW_TOKENS, TASK = 2048, 32, "answers"

OTHERS: list[tuple[str, dict[str, str]]] = [
    ("gptq", {"backend": "gptqmodel"}),
    ("awq", {"backend": "gptqmodel"}),
    ("torchao-int8", {"activations": "dynamic"}),
]
"""What is tried besides every method with its default settings."""

SHORT = {"calibration_samples": "16", "calibration_length": "128"}
"""Settings of calibrated methods: enough for a model whose numbers are compared, too few for one that is used."""

MAX_LOG_PROB, MAX_KL = 1e-3, 1e-4
"""Largest float32 differences between GPU and CPU, in nats a token: ten times what other sums of the same products do
to the logits of a model of this size (see `compression.probe`)."""

BFLOAT16_FACTOR = 2.0
"""The GPU's bfloat16 log-probabilities may be so many times as far (root mean square) from float32 as the CPU's are."""

SAME_GREEDY = {FLOAT32: 0.99, BFLOAT16: 0.9}
"""Least share of greedy tokens that are the CPU's float32 choice too; ties are rare, bfloat16 makes more of them."""

KL_FACTOR = 2.0
"""The checkpoint made on the GPU may be so many times as far from the baseline as the CPU's, and the other way."""


@dataclass(kw_only=True)
class Row:
    """One line of the table: a check, its measurements, and what is wrong with it."""

    check: str
    dtype: str = ""
    seconds: float | None = None
    tokens_per_second: float | None = None
    peak_memory_bytes: int | None = None
    peak_memory_kind: str | None = None
    found: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    not_run: str | None = None

    def require(self, name: str, value: float, *, most: float = math.inf, least: float = -math.inf) -> None:
        """Note a number; it is wrong if it is out of bounds or not a number."""
        self.found[name] = value
        if not least <= value <= most:
            bound = f"at most {most:.2g}" if math.isfinite(most) else f"at least {least:.2g}"
            self.wrong.append(f"{name} {value:.3g}, {bound}")

    def measured(self, told: dict[str, Any]) -> None:
        """Take over what a job has measured."""
        for name in ("seconds", "tokens_per_second", "peak_memory_bytes", "peak_memory_kind"):
            setattr(self, name, told[name])

    @property
    def verdict(self) -> str:
        """Say in words what came out."""
        if self.not_run is not None:
            return f"not run: {self.not_run}"
        return "WRONG: " + "; ".join(self.wrong) if self.wrong else "ok"

    def as_markdown(self) -> str:
        """Return one line of the table."""
        speed = "" if self.tokens_per_second is None else f"{self.tokens_per_second:,.0f}"
        memory = "" if self.peak_memory_bytes is None else f"{self.peak_memory_bytes / 2**20:,.0f}"
        seconds = "" if self.seconds is None else f"{self.seconds:.1f}"
        found = ", ".join(f"{name} {value:.2g}" for name, value in self.found.items())
        return f"| {self.check} | {self.dtype} | {seconds} | {speed} | {memory} | {found} | {self.verdict} |"


# Jobs: each runs in the process of its device, and returns plain values.


def describe_job(device: str) -> dict[str, Any]:
    """Return the machine in words."""
    import torch

    from benchmarks.setting import machine

    if device == "cpu":
        return {"device": machine()}
    gpu = torch.cuda.get_device_properties(0)
    words = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}, torch {torch.__version__}"
    return {"device": words}


def score_job(
    options: dict[str, Any],
    folder: str,
    device: str,
    dtype: str,
    out: str,
    *,
    states: str | None = None,
    capture: str | None = None,
    resident: str | None = None,
    path: str = "auto",
    max_memory: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Score a model on the tasks and their corpus, and write its records.

    The baseline's states are written to `capture` or read from `states`; `resident` is a baseline that is loaded too.
    With `max_memory` the weights are spread over GPU, host and disk.
    """
    from contextlib import nullcontext

    from mlflow_compress.commands.evaluate.items import suite_of
    from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
    from mlflow_compress.compression.pipeline import peak_memory
    from mlflow_compress.items.task import Corpus
    from mlflow_compress.models.loading import LoadConfig, load_model
    from mlflow_compress.records import RunRecords
    from mlflow_compress.scoring.baseline_store import StateStore, StateWriter
    from mlflow_compress.scoring.engine import Scorer, ScoringConfig

    suite = suite_of(EvaluateConfig(model=options["model"], tasks=options["tasks"], limit=options["limit"]))
    corpus = next((corpus for corpus in suite.corpora if isinstance(corpus, Corpus)), None)
    with peak_memory(device) as peak:
        placed: dict[str, Any] = {"device": device}
        if max_memory is not None:
            placed = {"device": "balanced", "max_memory": max_memory}
        loaded = load_model(LoadConfig(path=folder, dtype=dtype, **placed))
        baseline: Any = None if states is None else StateStore.open(Path(states))
        if resident is not None:
            baseline = load_model(LoadConfig(path=resident, dtype=dtype, device=device))
        scorer = Scorer(loaded, ScoringConfig(path=path, progress=False))
        with nullcontext() if capture is None else StateWriter(Path(capture), loaded) as writer:
            scores, distances = scorer.score(suite.requests, capture=writer, baseline=baseline)
            reports = [scorer.report]
            tokens = moved = None
            if corpus is not None:
                tokens, moved = scorer.score_corpus(
                    corpus.name, corpus.text, max_tokens=CORPUS_TOKENS, capture=writer, baseline=baseline
                )
                reports.append(scorer.report)
    RunRecords(option_scores=scores, option_distances=distances, token_scores=tokens, token_distances=moved).write(
        Path(out)
    )
    done = [report for report in reports if report is not None]
    seconds = sum(report.seconds for report in done)
    return {
        "seconds": seconds,
        "tokens_per_second": sum(report.n_tokens for report in done) / seconds,
        "peak_memory_bytes": peak.n_bytes,
        "peak_memory_kind": peak.kind,
        "path": done[0].path,
        "whole_model_reason": done[0].whole_model_reason,
    }


def generate_job(options: dict[str, Any], device: str, dtype: str, out: str) -> dict[str, Any]:
    """Answer the instructions greedily, write the answers, and return the measurements."""
    from mlflow_compress.commands.judge.judge_instructions import instructions_of
    from mlflow_compress.commands.judge.parameters import JudgeConfig
    from mlflow_compress.compression.pipeline import peak_memory
    from mlflow_compress.models.loading import LoadConfig, load_model
    from mlflow_compress.scoring.generation.generate import generate_answers
    from mlflow_compress.scoring.generation.generation_rows import GenerationConfig

    asked = instructions_of(
        JudgeConfig(model=options["model"], instructions=options["instructions"], instruction_limit=options["limit"])
    )
    greedy = GenerationConfig(max_new_tokens=NEW_TOKENS, temperature=0.0, top_k=0, top_p=1.0, samples=1)
    with peak_memory(device) as peak:
        loaded = load_model(LoadConfig(path=options["folder"], dtype=dtype, device=device))
        began = time.monotonic()
        answers = generate_answers(loaded, asked, greedy, task=TASK)
        seconds = time.monotonic() - began
        drawn = generate_answers(loaded, asked, GenerationConfig(max_new_tokens=NEW_TOKENS, samples=2), task=TASK)
    if any(not len(tokens) for tokens in drawn.column("tokens")):
        raise ValueError("a sampled answer is empty")
    answers.write(Path(out))
    written = sum(map(len, answers.column("tokens")))
    return {
        "seconds": seconds,
        "tokens_per_second": written / seconds,
        "peak_memory_bytes": peak.n_bytes,
        "peak_memory_kind": peak.kind,
    }


def same_greedy_job(options: dict[str, Any], answers: str) -> dict[str, Any]:
    """Return the share of the answers' tokens that the CPU's model would have chosen after the same text."""
    from mlflow_compress.models.loading import LoadConfig, load_model
    from mlflow_compress.records import TokenAnswers
    from mlflow_compress.scoring.engine import Scorer

    scorer = Scorer(load_model(LoadConfig(path=options["folder"], device="cpu")))
    scores, _ = scorer.score_corpus(TASK, TokenAnswers.read(Path(answers)))
    return {"same": float((scores.column("argmax") == scores.column("target")).mean())}


def compress_job(
    options: dict[str, Any], method: str, settings: dict[str, str], device: str, out: str
) -> dict[str, Any]:
    """Compress the model, check the reloaded checkpoint, and return the measurements."""
    from mlflow_compress.commands.quantize.parameters import QuantizeConfig
    from mlflow_compress.commands.shared.named_method import calibration_set
    from mlflow_compress.compression import METHODS, compress_model, method_config
    from mlflow_compress.models.source_model import resolve

    known = METHODS.get(method).Config.model_fields
    config = method_config(method, **{k: v for k, v in SHORT.items() if k in known}, **settings)
    asked = QuantizeConfig(model=options["model"], method=method, calibration=options["calibration"])
    texts = calibration_set(asked.compression, asked.source)
    rendered = texts.rendered(resolve(options["folder"]).tokenizer()) if texts else []
    manifest = compress_model(options["folder"], method, config, rendered, Path(out), device=device)
    return {
        "seconds": manifest.seconds,
        "tokens_per_second": None,
        "peak_memory_bytes": manifest.peak_memory_bytes,
        "peak_memory_kind": manifest.peak_memory_kind,
        "reload_kl": manifest.reload["kl_max"],
    }


# Comparisons of records.


def log_probs(records: Any) -> np.ndarray[Any, Any]:
    """Return the log-probability a token of every option and every corpus token, in nats."""
    parts = [records.option_scores.column("loglik") / records.option_scores.column("n_tokens")]
    if records.token_scores is not None:
        parts.append(-records.token_scores.column("nll"))
    return np.concatenate(parts)


def kls(records: Any) -> np.ndarray[Any, Any]:
    """Return the KL to the baseline of every option and every corpus token, in nats."""
    tables = (records.option_distances, records.token_distances)
    return np.concatenate([table.column("kl") for table in tables if table is not None])


def difference(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a - b where both have a value; a value that only one of them has is a `ValueError`."""
    if a.shape != b.shape or (np.isnan(a) != np.isnan(b)).any():
        raise ValueError("the records are not of the same options, or have values for other ones")
    return np.asarray((a - b)[~np.isnan(a)])


def rms(values: np.ndarray[Any, Any]) -> float:
    """Return the root mean square."""
    return float(np.sqrt(np.mean(np.square(values))))


def compare_float32(row: Row, ours: Any, cpus: Any, *, rounded: bool = False) -> None:
    """Compare float32 records of two devices; `rounded`: the model rounds values while it runs."""
    from mlflow_compress.compression.probe import MAX_MEAN_KL_ROUNDED

    moved = difference(log_probs(ours), log_probs(cpus))
    if rounded:  # a KL of d nats is a difference of log-probabilities of about sqrt(2 d)
        row.require("log-prob. apart (rms)", rms(moved), most=math.sqrt(2 * MAX_MEAN_KL_ROUNDED))
    else:
        row.require("log-prob. apart", float(np.abs(moved).max()), most=MAX_LOG_PROB)
    if ours.option_distances is not None:
        apart = np.abs(difference(kls(ours), kls(cpus)))
        name, value = ("KL apart (mean)", apart.mean()) if rounded else ("KL apart", apart.max())
        row.require(name, float(value), most=MAX_MEAN_KL_ROUNDED if rounded else MAX_KL)


def compare_bfloat16(row: Row, ours: Any, cpus: Any, exact: Any) -> None:
    """Compare bfloat16 records with the CPU's: how far both are from its float32 ones."""
    far, cpu_far = (rms(difference(log_probs(records), log_probs(exact))) for records in (ours, cpus))
    row.require("log-prob. from float32 (rms)", far, most=BFLOAT16_FACTOR * cpu_far + MAX_LOG_PROB)


# The checks.


class Check:
    """All checks, with what they share: the options, the two processes, and the rows so far."""

    def __init__(self, options: dict[str, Any], gpu: OneProcess, cpu: OneProcess, device: str, work: Path) -> None:
        self.options, self.gpu, self.cpu, self.device, self.work = options, gpu, cpu, device, work
        self.rows: list[Row] = []
        self.output = Path(options["output"]) if options["output"] else None

    def row(self, check: str, dtype: str, work: Callable[[Row], None]) -> None:
        """Do one check; what it raises is its failure, and the next one goes on."""
        row = Row(check=check, dtype=dtype)
        try:
            work(row)
        except Exception as error:  # noqa: BLE001 - whatever it is: it is named, and the other checks go on
            row.wrong.append(f"failed: {error}")
        self.add(row)

    def add(self, row: Row) -> None:
        """Print and write a row as soon as it is known."""
        self.rows.append(row)
        print(row.as_markdown(), flush=True)
        if self.output is not None:
            with self.output.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({**asdict(row), "verdict": row.verdict}) + "\n")

    def folder(self, *parts: str) -> str:
        """Return a folder of this run, by what is in it."""
        return str(self.work / "-".join(parts))

    def score(self, side: str, name: str, dtype: str, folder: str, **given: Any) -> tuple[dict[str, Any], Any]:
        """Score a model on the GPU ("gpu") or the CPU, and return the measurements and the records."""
        from mlflow_compress.records import RunRecords

        process, device = (self.gpu, self.device) if side == "gpu" else (self.cpu, "cpu")
        out = self.folder(name, dtype, side, "records")
        told = process(score_job, self.options, folder, device, dtype, out, **given)
        return told, RunRecords.read(Path(out))

    def states(self, side: str, dtype: str) -> str:
        """Return the folder of the baseline's states."""
        return self.folder("states", dtype, side)

    def baseline(self, dtype: str) -> Callable[[Row], None]:
        """Score the baseline on both devices, and keep its states."""

        def work(row: Row) -> None:
            folder = self.options["folder"]
            _, cpus = self.score("cpu", "baseline", dtype, folder, capture=self.states("cpu", dtype))
            told, ours = self.score("gpu", "baseline", dtype, folder, capture=self.states("gpu", dtype))
            row.measured(told)
            if told["path"] != "packed" or told["whole_model_reason"] is not None:
                row.wrong.append(f"path {told['path']}, whole model: {told['whole_model_reason']}")
            self.compare(row, dtype, "baseline", ours, cpus)

        return work

    def compare(self, row: Row, dtype: str, name: str, ours: Any, cpus: Any, *, rounded: bool = False) -> None:
        """Compare records of both devices, by the rule of the dtype."""
        from mlflow_compress.records import RunRecords

        if dtype == FLOAT32:
            compare_float32(row, ours, cpus, rounded=rounded)
        else:
            compare_bfloat16(row, ours, cpus, RunRecords.read(Path(self.folder(name, FLOAT32, "cpu", "records"))))

    def padded(self, row: Row) -> None:
        """Score the baseline in padded batches on the GPU: the records of packed ones."""
        from mlflow_compress.records import RunRecords

        told, plain = self.score("gpu", "padded", FLOAT32, self.options["folder"], path="plain")
        row.measured(told)
        compare_float32(row, plain, RunRecords.read(Path(self.folder("baseline", FLOAT32, "gpu", "records"))))

    def spread(self, row: Row) -> None:
        """Score the baseline with a part of its weights on the GPU, on the host and on the disk: the same records."""
        from mlflow_compress.records import RunRecords

        n_bytes = sum(file.stat().st_size for file in Path(self.options["folder"]).glob("*.safetensors"))
        places = ("0", "cpu") if self.device == "cuda" else ("cpu",)
        most = dict.fromkeys(places, f"{max(1, n_bytes // 2000)}KB")
        told, found = self.score("gpu", "spread", FLOAT32, self.options["folder"], max_memory=most)
        row.measured(told)
        compare_float32(row, found, RunRecords.read(Path(self.folder("baseline", FLOAT32, "gpu", "records"))))

    def resident(self, checkpoint: str) -> Callable[[Row], None]:
        """Score a variant on the GPU with the baseline beside it: the records of stored states."""

        def work(row: Row) -> None:
            _, stored = self.score("gpu", "stored", FLOAT32, checkpoint, states=self.states("gpu", FLOAT32))
            told, beside = self.score("gpu", "resident", FLOAT32, checkpoint, resident=self.options["folder"])
            row.measured(told)
            compare_float32(row, beside, stored)

        return work

    def generation(self, dtype: str) -> Callable[[Row], None]:
        """Answer on the GPU, and ask the CPU's model what it would have chosen."""

        def work(row: Row) -> None:
            out = self.folder("answers", dtype)
            row.measured(self.gpu(generate_job, self.options, self.device, dtype, out))
            same = self.cpu(same_greedy_job, self.options, out)["same"]
            row.require("greedy tokens as the CPU's", same, least=SAME_GREEDY[dtype])

        return work

    def compression(self, name: str, method: str, settings: dict[str, str]) -> Callable[[Row], None]:
        """Compress on both devices; score the GPU's checkpoint on both, and the CPU's on the CPU."""

        def work(row: Row) -> None:
            made, cpu_made = self.folder(name, "gpu"), self.folder(name, "cpu")
            try:
                self.cpu(compress_job, self.options, method, settings, "cpu", cpu_made)
            except JobError as refusal:
                if not str(refusal).startswith("UnsupportedError"):
                    raise
                row.not_run = str(refusal)  # the method does not take this model, whatever the device
                return
            told = self.gpu(compress_job, self.options, method, settings, self.device, made)
            row.measured(told)
            row.found["reload KL"] = told["reload_kl"]  # the pipeline has raised an error where it is too large
            states = self.states("cpu", FLOAT32)
            _, ours = self.score("cpu", name, FLOAT32, made, states=states)
            _, cpus = self.score("cpu", f"{name}-by-cpu", FLOAT32, cpu_made, states=states)
            kl, cpu_kl = (float(np.nanmean(kls(records))) for records in (ours, cpus))
            row.require("KL", kl, most=KL_FACTOR * cpu_kl + MAX_KL, least=cpu_kl / KL_FACTOR - MAX_KL)

        return work

    def scoring(self, name: str, method: str, dtype: str) -> Callable[[Row], None]:
        """Score the checkpoint that the GPU has made on both devices, against the baseline's stored states."""
        from mlflow_compress.compression import METHODS

        def work(row: Row) -> None:
            made, states = self.folder(name, "gpu"), self.states("cpu", dtype)
            _, cpus = self.score("cpu", name, dtype, made, states=states)
            told, ours = self.score("gpu", name, dtype, made, states=self.states("gpu", dtype))
            row.measured(told)
            chosen = METHODS.get(method)
            # A sum's last bit can move a number of the inputs, or of the cache, to its neighbour.
            rounded = chosen.rounds_activations or chosen.rounds_cache or "activations" in name
            self.compare(row, dtype, name, ours, cpus, rounded=rounded)

        return work

    def all(self, variants: list[tuple[str, dict[str, str]]]) -> None:
        """Do every check."""
        for dtype in (FLOAT32, BFLOAT16):
            self.row("baseline, packed, states stored", dtype, self.baseline(dtype))
        self.row("baseline, padded against packed", FLOAT32, self.padded)
        self.row("baseline, spread over GPU, host, disk", FLOAT32, self.spread)
        for dtype in (FLOAT32, BFLOAT16):
            self.row("generation", dtype, self.generation(dtype))
        beside = False
        for method, settings in variants:
            name = "-".join([method, *(f"{key}-{value}" for key, value in settings.items())])
            reason = missing(method, settings)
            if reason is not None:
                self.add(Row(check=name, not_run=reason))
                continue
            self.row(f"{name}: compress, reload", "", self.compression(name, method, settings))
            if not Path(self.folder(name, "gpu"), "config.json").is_file():
                continue  # nothing to score: the row above says why
            for dtype in (FLOAT32, BFLOAT16):
                self.row(f"{name}: score", dtype, self.scoring(name, method, dtype))
            if not beside:
                beside = True
                self.row(f"{name}: baseline in memory against stored", FLOAT32, self.resident(self.folder(name, "gpu")))


def missing(method: str, settings: dict[str, str]) -> str | None:
    """Return what a variant needs and is not installed, or None."""
    from mlflow_compress.compression import METHODS, method_config

    if method not in METHODS.names():
        return None  # the check itself names the mistake
    packages, extra = METHODS.get(method).packages(method_config(method, **settings))
    absent = [package for package in packages if importlib.util.find_spec(package) is None]
    return None if not absent else f"{', '.join(absent)} not installed (extra {extra})"


def variants_of(only: str) -> list[tuple[str, dict[str, str]]]:
    """Return every method that makes its own checkpoint, with its default settings and those of `OTHERS`."""
    from mlflow_compress.compression import METHODS

    if only:
        return [(name, {}) for name in only.split(",")]
    return [(name, {}) for name in METHODS.names() if name != "checkpoint"] + OTHERS


def main() -> int:
    """Print the table, one line as soon as it is known, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="baseline: 'demo' or a folder (default: %(default)s)")
    parser.add_argument("--tasks", default="auto", help="tasks; needed unless the model is the demo")
    parser.add_argument("--instructions", default="auto", help="instructions; needed unless the model is the demo")
    parser.add_argument("--calibration", default="auto", help="calibration; needed unless the model is the demo")
    parser.add_argument("--limit", type=int, default=4, help="items per category and task (default: %(default)s)")
    parser.add_argument("--only", default="", help="methods, comma-separated (default: all)")
    parser.add_argument("--cpu", action="store_true", help="use the CPU although there is a GPU, to try the script")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a step may take (default: %(default)s)")
    parser.add_argument("--output", default="", help="file of JSON lines, one a row; rows are added to it")
    asked = parser.parse_args()

    import torch

    from mlflow_compress.commands.shared.named_models import model_path

    device = "cuda" if torch.cuda.is_available() and not asked.cpu else "cpu"
    if device == "cpu":
        print("There is no GPU here: everything runs on the CPU, which tests this script and nothing else.\n")
    options = {**vars(asked), "folder": model_path(asked.model)}
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as work,
        OneProcess(asked.timeout) as gpu,
        OneProcess(asked.timeout, environment={"CUDA_VISIBLE_DEVICES": ""}) as cpu,
    ):
        check = Check(options, gpu, cpu, device, Path(work))
        print(f"{gpu(describe_job, device)['device']}, against {cpu(describe_job, 'cpu')['device']}\n")
        print("| check | dtype | seconds | tokens a second | peak memory (MiB) | found (nats) | verdict |")
        print("|---|---|---|---|---|---|---|", flush=True)
        check.all(variants_of(asked.only))
    wrong = [row for row in check.rows if row.wrong]
    not_run = sum(row.not_run is not None for row in check.rows)
    kind = "GPU" if device == "cuda" else "CPU"
    print(
        f"\n{len(check.rows) - len(wrong) - not_run} checks on the {kind} are right, {len(wrong)} wrong or failed, "
        f"{not_run} not run, in {time.monotonic() - began:.0f} s"
    )
    for row in wrong:
        print(f"- {row.check} {row.dtype}: {row.verdict}")
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
