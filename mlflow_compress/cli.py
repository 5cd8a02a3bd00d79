"""`mlflow-compress`: arguments -> configuration -> stage. The only place that prints."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from mlflow_compress import config, lifetime
from mlflow_compress.errors import ConfigError, MlflowCompressError, StageError, TrackingError
from mlflow_compress.paths import absolute_paths

_EPILOG = "The same names work as `mlflow run . -P name=value` (add `-e STAGE` for one stage)."


def _run_main(settings: config.MainConfig) -> str:
    from mlflow_compress.stages.main import run_main

    return run_main(settings, say=lambda line: print(line, file=sys.stderr, flush=True))


def _run_quantize(settings: config.QuantizeConfig) -> str:
    from mlflow_compress.stages.quantize import run_quantize

    return run_quantize(settings)


def _run_evaluate(settings: config.EvaluateConfig) -> str:
    from mlflow_compress.stages.evaluate import run_evaluate

    return run_evaluate(settings)


def _run_judge(settings: config.JudgeConfig) -> str:
    from mlflow_compress.stages.judge import run_judge

    return run_judge(settings)


def _run_promote(settings: config.PromoteConfig) -> str:
    from mlflow_compress.stages.promote import run_promote

    return run_promote(settings)


# Stages are imported when they run, so that --help and a wrong parameter answer at once.
STAGES: dict[str, tuple[type, Callable[[Any], str]]] = {
    "main": (config.MainConfig, _run_main),
    "quantize": (config.QuantizeConfig, _run_quantize),
    "evaluate": (config.EvaluateConfig, _run_evaluate),
    "judge": (config.JudgeConfig, _run_judge),
    "promote": (config.PromoteConfig, _run_promote),
}


def _default(value: object) -> str:
    """Return a default as the user would type it."""
    return str(value).lower() if isinstance(value, bool) else str(value) or "none, must be given"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser: one sub-command a stage, one option a configuration field, and the commands that only look."""
    parser = argparse.ArgumentParser(
        prog="mlflow-compress",
        description="Compress a causal language model, measure how far each variant moved, promote by that distance.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (cls, _) in STAGES.items():
        about = (cls.__doc__ or "").strip()
        stage = commands.add_parser(name, help=about, description=about, epilog=_EPILOG, allow_abbrev=False)
        for field in fields(cls):
            accepted = " | ".join(field.metadata["choices"])
            doc = f"{field.metadata['help']} {f'({accepted}) ' if accepted else ''}[{_default(field.default)}]"
            stage.add_argument(f"--{field.name}", metavar="VALUE", help=doc.replace("%", "%%"))
    comparison = commands.add_parser(
        "compare", help="Compare two evaluations from their records or prediction files, without any model."
    )
    for side in ("baseline", "variant"):
        comparison.add_argument(
            side, help="run id, folder of Parquet records, harness samples_*.jsonl, or id/pred/gold JSONL"
        )
    comparison.add_argument("--json", action="store_true", help="print one JSON object")
    commands.add_parser("methods", help="List the compression methods and what each supports.")
    commands.add_parser("tasks", help="List the named tasks: source, licence, items, shots, rule, hash.")
    return parser


def _parameters(known: argparse.Namespace, extra: Sequence[str]) -> dict[str, str]:
    """Return the given parameters as strings, unknown ones too: `config.parse` refuses those by name."""
    values = {name: value for name, value in vars(known).items() if name != "command" and value is not None}
    for token in extra:
        if token.startswith("--"):
            name, _, value = token.removeprefix("--").partition("=")
            values[name] = value
        elif not values or extra[extra.index(token) - 1][:2] != "--":
            raise ConfigError("Unexpected argument", allowed="--name VALUE", got=token)
    return values


def _compared(baseline: str, variant: str, machine: bool) -> str:
    """Return the comparison of two evaluations, for people or as JSON."""
    from mlflow_compress.stages.compare import as_json, as_text, compare

    found = compare(baseline, variant)
    return as_json(found) if machine else as_text(found)


def _reject(error: MlflowCompressError) -> None:
    """Let the run that `mlflow run` has made for this process fail, where the command ended before it took that run."""
    if "MLFLOW_RUN_ID" not in os.environ or isinstance(error, TrackingError):
        return
    from mlflow_compress.tracking.tracker import Tracker

    Tracker().reject(error)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 it failed, 2 the parameters are wrong, 130 interrupted.

    Where torchrun or accelerate has started several processes, the first runs the command, and the others score for it.
    """
    from mlflow_compress.scoring.processes import team

    if team.n_processes() == 1:
        return _command(argv)
    from mlflow_compress.scoring.processes.scoring_jobs import JobRunner

    try:
        if team.serves():
            return team.serve(JobRunner().run)
        with team.leading():
            return _command(argv)
    except MlflowCompressError as error:
        print(f"mlflow-compress: {error}", file=sys.stderr)
        return 1


def _command(argv: Sequence[str] | None) -> int:
    lifetime.raise_on_signals()
    if "MLFLOW_RUN_ID" in os.environ:
        lifetime.end_with_parent()
    known, extra = build_parser().parse_known_args(argv)
    try:
        print(_answer(known, extra), flush=True)
        return 0
    except MlflowCompressError as error:
        if isinstance(error, StageError) and error.published:
            print(f"{error.published}\n", flush=True)
        print(f"mlflow-compress: {error}", file=sys.stderr)
        _reject(error)
        return 2 if isinstance(error, ConfigError) else 1
    except BrokenPipeError:
        # The reader (`| head`) has seen enough. Python's own flush at exit would complain once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt as interrupt:
        print("mlflow-compress: interrupted", file=sys.stderr)
        return lifetime.exit_code(interrupt)


def _answer(known: argparse.Namespace, extra: Sequence[str]) -> str:
    """Run the command and return what to tell the user."""
    if known.command in STAGES:
        cls, stage = STAGES[known.command]
        return stage(absolute_paths(config.parse(cls, _parameters(known, extra)))).rstrip()
    if extra:
        raise ConfigError("Unexpected argument", got=extra[0])
    if known.command == "methods":
        from mlflow_compress.compress.method_table import as_text

        return as_text()
    if known.command == "tasks":
        from mlflow_compress.tasks.task_table import as_text

        return as_text()
    return _compared(known.baseline, known.variant, known.json)


if __name__ == "__main__":
    raise SystemExit(main())
