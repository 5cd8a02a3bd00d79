"""`mlflow-compress`: arguments -> the Python front door -> text. The only place that prints."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mlflow_compress import api, cli_live, config, lifetime
from mlflow_compress.commands.diagnose.parameters import DiagnoseConfig
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.gate.parameters import GateConfig
from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.commands.main.parameters import MainConfig
from mlflow_compress.commands.plan.parameters import PlanConfig
from mlflow_compress.commands.promote.parameters import HistoryConfig, PromoteConfig, RollbackConfig
from mlflow_compress.commands.quantize.parameters import QuantizeConfig
from mlflow_compress.commands.rate.parameters import BlindConfig, RatingsConfig
from mlflow_compress.commands.report.parameters import ReportConfig
from mlflow_compress.commands.resume.parameters import ResumeConfig
from mlflow_compress.commands.search.parameters import SearchConfig
from mlflow_compress.commands.speed.parameters import SpeedConfig
from mlflow_compress.commands.sweep.parameters import SweepConfig
from mlflow_compress.config.declarations import as_typed, choices
from mlflow_compress.errors import (
    ConfigError,
    MlflowCompressError,
    StageError,
    StoreAwayError,
    SweepError,
    TrackingError,
    machine_fault,
)

_EPILOG = "The same names work as `mlflow run . -P name=value` (add `-e STAGE` for one stage)."
_EXIT = "Exit code: 0 done, 1 it failed, 2 a parameter is wrong, 3 nothing passes (gate: a gate fails)."

STAGES: dict[str, type[config.Command]] = {
    "main": MainConfig,
    "quantize": QuantizeConfig,
    "evaluate": EvaluateConfig,
    "judge": JudgeConfig,
    "diagnose": DiagnoseConfig,
    "speed": SpeedConfig,
    "promote": PromoteConfig,
    "rollback": RollbackConfig,
    "gate": GateConfig,
    "report": ReportConfig,
    "sweep": SweepConfig,
    "search": SearchConfig,
    "blind": BlindConfig,
    "ratings": RatingsConfig,
    "resume": ResumeConfig,
}

POSITIONAL = {"report": "runs", "blind": "run", "ratings": "files"}
"""The parameter of a command that is also given without its name."""

QUESTIONS: dict[str, type[config.Command]] = {"history": HistoryConfig, "plan": PlanConfig}
"""Commands that only look, and therefore are no MLflow projects."""

CONFIG_HELP = "YAML file with more parameters, by the names of this command; what is given here goes before the file"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _run(command: str, given: dict[str, Any]) -> Any:
    """Run a stage by its function of the front door."""
    if command == "main":
        return api.run(progress=_say, **given)
    if command == "gate":
        return api.gate(progress=_say, **given)
    if command == "sweep":
        with cli_live.shown(_say) as progress:
            return api.sweep(progress=progress, **given)
    if command == "search":
        return api.search(progress=_say, **given)
    if command == "resume":
        return api.resume(progress=_say, **given)
    if command in ("evaluate", "judge"):
        return (api.evaluate if command == "evaluate" else api.judge)(progress=_say, **given)
    if command == "diagnose":
        return api.diagnose(progress=_say, **given)
    functions: dict[str, Callable[..., Any]] = {
        "quantize": api.compress,
        "speed": api.speed,
        "promote": api.promote,
        "rollback": api.rollback,
        "history": api.history,
        "plan": api.plan,
        "report": api.report,
        "blind": api.blind,
        "ratings": api.ratings,
    }
    return functions[command](**given)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser: one sub-command per stage, one option per parameter, and the commands that only look."""
    parser = argparse.ArgumentParser(
        prog="mlflow-compress",
        description="Compress a causal language model, measure how far each variant moved, promote by that distance.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, cls in (STAGES | QUESTIONS).items():
        about = (cls.__doc__ or "").strip()
        epilog = f"{_EPILOG} {_EXIT}" if name in ("promote", "gate") else _EPILOG
        stage = commands.add_parser(name, help=about, description=about, epilog=epilog, allow_abbrev=False)
        stage.add_argument("--config", metavar="FILE", help=CONFIG_HELP)
        for parameter, field in config.parameters(cls).items():
            accepted = " | ".join(choices(field))
            shown = f"{field.description} {f'({accepted}) ' if accepted else ''}[{as_typed(field.default)}]"
            short = ("-o",) if name in ("report", "blind") and parameter == "output" else ()
            stage.add_argument(f"--{parameter}", *short, metavar="VALUE", help=shown.replace("%", "%%"))
    commands.choices["report"].add_argument("given", nargs="*", metavar="RUN", help="main runs, or a sweep's run")
    commands.choices["blind"].add_argument("given", nargs="*", metavar="RUN", help="a main run or a judge run")
    commands.choices["ratings"].add_argument("given", nargs="*", metavar="FILE", help="CSV files, one per rater")
    comparison = commands.add_parser(
        "compare", help="Compare two evaluations from their records or prediction files, without any model."
    )
    for side in ("baseline", "variant"):
        comparison.add_argument(
            side, help="run id, folder of Parquet records, harness samples_*.jsonl, or id/pred/gold JSONL"
        )
    comparison.add_argument("--json", action="store_true", help="print one JSON object")
    policy = commands.add_parser("policy", help="Print the promotion policy that decides, every value explained.")
    policy.add_argument("policy", nargs="?", metavar="FILE", help="a policy to check; none: the default policy")
    commands.add_parser("methods", help="List the compression methods and what each supports.")
    commands.add_parser("tasks", help="List the named tasks: source, licence, items, shots, rule, hash.")
    return parser


def _parameters(known: argparse.Namespace, extra: Sequence[str]) -> dict[str, str]:
    """Return the given parameters as text, unknown names too: the configuration refuses those."""
    values = {name: value for name, value in vars(known).items() if name != "command" and value is not None}
    if given := values.pop("given", None):
        name = POSITIONAL[known.command]
        values[name] = ",".join([*given, *([values[name]] if name in values else [])])
    if "MLFLOW_RUN_ID" in os.environ:
        # `mlflow run` gives every parameter. One at its default must not go before a file.
        defaults = {name: as_typed(f.default) for name, f in config.parameters(STAGES[known.command]).items()}
        values = {name: value for name, value in values.items() if value != defaults.get(name)}
    rest = list(extra)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--"):
            raise ConfigError("Unexpected argument", allowed="--name VALUE", got=flag)
        name, equals, value = flag.removeprefix("--").partition("=")
        values[name] = value if equals or not rest else rest.pop(0)
    return values


def _reject(error: MlflowCompressError) -> None:
    """Let the run that `mlflow run` has made for this process fail, where the command ended before it took that run."""
    if "MLFLOW_RUN_ID" not in os.environ or isinstance(error, TrackingError):
        return
    from mlflow_compress.tracking.tracker import Tracker

    Tracker().reject(error)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 it failed, 2 the parameters are wrong, 130 interrupted.

    3 says that `promote` or `gate` did its work, and that nothing passes.
    """
    lifetime.raise_on_signals()
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # MLflow shows a bar per small file
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # our results say where they are
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # we wait for a server ourselves, and say so
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # tracebacks of what is raised, too
    if "MLFLOW_RUN_ID" in os.environ:
        lifetime.end_with_parent()
    known, extra = build_parser().parse_known_args(argv)
    try:
        answer, exit_code = _answer(known, extra)
        print(answer, flush=True)
        return exit_code
    except MlflowCompressError as error:
        if isinstance(error, StageError | SweepError) and error.published is not None:
            from mlflow_compress.cli_text import BY_COMMAND

            print(f"{BY_COMMAND[known.command](error.published)}\n", flush=True)
        error = machine_fault(error) or error  # before a run was open
        print(f"mlflow-compress: {error}", file=sys.stderr)
        _reject(error)
        if isinstance(error, StoreAwayError):
            return lifetime.STORE_AWAY
        return 2 if isinstance(error, ConfigError) else 1
    except BrokenPipeError:
        # The reader (`| head`) has seen enough. Python's own flush at exit would complain once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (OSError, MemoryError, RuntimeError, ImportError) as error:  # before a run was open, or after it was closed
        fault = machine_fault(error)
        if fault is None:
            raise
        print(f"mlflow-compress: {fault}", file=sys.stderr)
        _reject(fault)
        return 1
    except KeyboardInterrupt as interrupt:
        print("mlflow-compress: interrupted", file=sys.stderr)
        return lifetime.exit_code(interrupt)


def _answer(known: argparse.Namespace, extra: Sequence[str]) -> tuple[str, int]:
    """Run the command, and return what to tell the user and the exit code."""
    from mlflow_compress import cli_text

    if known.command in STAGES or known.command in QUESTIONS:
        found = _run(known.command, _parameters(known, extra))
        return cli_text.BY_COMMAND[known.command](found).rstrip(), getattr(found, "exit_code", 0)
    if extra:
        raise ConfigError("Unexpected argument", got=extra[0])
    if known.command in ("methods", "tasks"):
        return cli_text.BY_COMMAND[known.command](api.methods() if known.command == "methods" else api.tasks()), 0
    if known.command == "policy":
        return cli_text.policy_text(config.read_policy(known.policy)), 0
    found = api.compare(known.baseline, known.variant)
    return cli_text.comparison_json(found) if known.json else cli_text.comparison_text(found), 0


if __name__ == "__main__":
    raise SystemExit(main())
