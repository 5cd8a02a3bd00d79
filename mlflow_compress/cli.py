"""`mlflow-compress`: arguments -> the Python front door -> text. The only place that prints."""

import argparse
import gc
import json
import logging
import os
import re
import shutil
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from mlflow_compress import errors, lifetime
from mlflow_compress.commands.command import COMMANDS, HEADINGS, Command, all_commands, described_option
from mlflow_compress.config import given_parameters, parameters
from mlflow_compress.config.declarations import as_typed, groups, settings_within
from mlflow_compress.paths import is_stage

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

    from mlflow_compress.commands.sweep.result import SweepProgress, VariantProgress

_ABOUT = """Compress a causal language model, measure how far each variant moved, promote by that distance.

{}

`mlflow-compress COMMAND --help` explains a command. A first job: mlflow-compress main --method awq --bits 4"""
_EPILOG = "The same names work as `mlflow run . -P name=value` (add `-e STAGE` for one stage)."
_EXIT = "Exit code: 0 done, 1 failed, 2 a parameter is wrong, 3 nothing passes (gate: a gate fails)."

CONFIG_HELP = "YAML file with more parameters of this command, by name; values on the command line override it"


_NEW_OBJECTS = 10_000  # before garbage is looked for; by default 700, and then it takes a fifth of the imports' time


def build_parser() -> argparse.ArgumentParser:
    """Return the parser: one sub-command per command, one option per parameter."""
    known = _typed_commands()
    behind = _several(known)
    lines: dict[str, list[str]] = {heading: [] for heading in HEADINGS}
    for command in known.values():
        if not command.within:
            lines.setdefault(command.heading, []).append(command.name)  # a plug-in may have a heading of its own
    for name, several in behind.items():
        [heading] = {command.heading for command in several}
        alone = [*lines[heading], name] if name not in known else lines[heading]
        inner = f"{name} ({', '.join(command.typed.partition(' ')[2] for command in several)})"
        lines[heading] = [inner if one == name else one for one in alone]
    parser = argparse.ArgumentParser(
        prog="mlflow-compress",
        usage="mlflow-compress COMMAND [--NAME VALUE ...]",
        description=_ABOUT.format(
            "\n".join(f"  {line:9} {', '.join(names)}" for line, names in lines.items() if names)
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, help=argparse.SUPPRESS, prog="mlflow-compress"
    )

    for name, command in known.items():
        epilog = f"{_EPILOG} {_EXIT}" if command.decides else _EPILOG if command.parameters else None
        if name in behind:
            epilog = f"Also: {', '.join(other.typed for other in behind[name])}. {epilog}"
        one = commands.add_parser(
            name,
            description=command.description,
            epilog=epilog,
            allow_abbrev=command.parameters is None,
            usage=f"mlflow-compress {name} [--NAME VALUE ...]" if command.first else None,  # 40 names say nothing
            formatter_class=_LinesOfHelp,
        )
        for argument in command.arguments:
            one.add_argument(*argument.flags, **argument.options)
        if command.parameters is not None:
            one.add_argument("--config", metavar="FILE", help=CONFIG_HELP)
            declared = parameters(command.parameters)
            for heading, names in _headings(command).items():
                section = one.add_argument_group(heading) if heading else one
                for option in names:
                    short = (command.short[option],) if option in command.short else ()
                    text = "\n".join(described_option(command.parameters, option)).replace("%", "%%")
                    adding: dict[str, Any] = {} if option in declared else {"action": "append"}  # settings add up
                    section.add_argument(f"--{option}", *short, metavar="VALUE", help=text, **adding)
        if (given := command.positional) is not None:
            one.add_argument("given", nargs="*", metavar=given.metavar, help=given.help)
    return parser


class _LinesOfHelp(argparse.HelpFormatter):
    """Begins a new line where the help of an option does."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        lines = []
        for line in text.splitlines():
            lines += textwrap.wrap(line, width, subsequent_indent=" " * 2 * line.startswith("- "))
        return lines


def _typed_commands() -> dict[str, Command]:
    """Return every command by what is typed for it."""
    return {command.typed: command for command in all_commands().values()}


def _several(known: Mapping[str, Command]) -> dict[str, list[Command]]:
    """Return the commands that are typed behind another word, by that word."""
    words = dict.fromkeys(command.within for command in known.values() if command.within)
    return {word: [command for command in known.values() if command.within == word] for word in words}


def _joined(argv: Sequence[str], known: Mapping[str, Command]) -> list[str]:
    """Return the arguments with the name of a command in one piece: "promote approve"; half a name is an error."""
    first, second = (*argv[:2], "", "")[:2]
    if f"{first} {second}" in known:
        return [f"{first} {second}", *argv[2:]]
    if first not in known and (several := _several(known).get(first)):
        raise errors.ConfigError(
            f"`{first}` needs one of its commands",
            allowed=[command.typed.partition(" ")[2] for command in several],
            got=second or "nothing",
            fix=f"`mlflow-compress {several[0].typed} --help` explains the first",
        )
    return [*argv]


def _headings(command: Command) -> dict[str, list[str]]:
    """Return a command's parameters by heading: first those that most people set, then the others by group."""
    assert command.parameters is not None
    declared = list(given_parameters(command.parameters))
    if not command.first:
        return {"": declared}
    headings = {"set first": list(command.first)}
    together = [name for name in declared if name not in parameters(command.parameters)]
    for group in groups(command.parameters).values():
        heading = (group.__doc__ or group.__name__).partition("\n")[0].rstrip(".").lower()
        headings[heading] = [name for name in group.model_fields if name in declared and name not in command.first]
    grouped = {name for names in headings.values() for name in names} | {*together}
    own = {"of this command": [name for name in declared if name not in grouped]}
    return {heading: names for heading, names in {**headings, "further settings": together, **own}.items() if names}


def _parameters(known: argparse.Namespace, extra: Sequence[str]) -> dict[str, str]:
    """Return the given parameters as text, unknown names too: the configuration refuses those."""
    command = _typed_commands()[known.command]
    given = {name: value for name, value in vars(known).items() if name != "command" and value is not None}
    together = {name: ",".join(value) for name, value in given.items() if isinstance(value, list) and name != "given"}
    values = {**given, **together}
    if command.positional is not None and (alone := values.pop("given", None)):
        name = command.positional.parameter
        values[name] = ",".join([*alone, *([values[name]] if name in values else [])])
    if command.parameters is not None and "MLFLOW_RUN_ID" in os.environ:
        # `mlflow run` gives every parameter. One at its default must not go before a file.
        defaults = {name: as_typed(declared.default) for name, declared in given_parameters(command.parameters).items()}
        values = {name: value for name, value in values.items() if value != defaults.get(name)}
    rest = list(extra)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--") or command.parameters is None:
            raise errors.ConfigError(
                "Unexpected argument", allowed="--name VALUE" if command.parameters else None, got=flag
            )
        name, equals, value = flag.removeprefix("--").partition("=")
        values[name] = value if equals or not rest else rest.pop(0)
    return values


def _in_words_of_the_caller(error: errors.MlflowCompressError) -> str:
    """Return the message with parameters as they are typed here: `name=value` is `--name value`, or `-P name=value`."""
    typed = ("-P ", "=") if "MLFLOW_RUN_ID" in os.environ else ("--", " ")
    names = {}
    for one in (command.parameters for _, command in COMMANDS.items() if command.parameters is not None):
        for name in given_parameters(one):
            names[name] = name.join(typed)
            names |= {held: f"{name.join(typed)}{setting}=" for setting, held in settings_within(one, name).items()}
    pattern = rf"(?<![\w.\-=,])({'|'.join(sorted(names))})=(?=\S)"
    fix = re.sub(pattern, lambda found: names[found[1]], error.fix)
    return str(error).replace(error.fix, fix) if error.fix else str(error)


def _reject(error: errors.MlflowCompressError) -> None:
    """Let the run that `mlflow run` has made for this process fail, where the command ended before it took that run."""
    if "MLFLOW_RUN_ID" in os.environ and not isinstance(error, errors.TrackingError):
        from mlflow_compress.tracking.tracker import Tracker

        with suppress(errors.TrackingError):  # a run that the store does not have: the first error is the one to tell
            Tracker().reject(error)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: see `_EXIT`; 130 says that it was interrupted."""
    lifetime.raise_on_signals()
    lifetime.let_threads_sleep()
    gc.set_threshold(_NEW_OBJECTS)
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # MLflow shows a bar per small file
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # our results say where they are
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # we wait for a server ourselves, and say so
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # tracebacks of what is raised, too
    if "MLFLOW_RUN_ID" in os.environ:
        lifetime.end_with_parent()
    try:
        asked = _joined(sys.argv[1:] if argv is None else argv, _typed_commands())
    except errors.ConfigError as half:
        print(f"mlflow-compress: {half}", file=sys.stderr)
        return 2
    known, extra = build_parser().parse_known_args(asked)
    # Progress bars, those of libraries too, vanish when they are full. Files get none, and a sweep shows its table.
    bars = sys.stderr.isatty() and known.command != "sweep"
    os.environ.setdefault(*(("TQDM_LEAVE", "") if bars else ("TQDM_DISABLE", "1")))
    if not is_stage():  # its end is said by the command that has started it
        kept = ". Computed results are saved: continue with the same command or `mlflow-compress resume`"
        resumable = _typed_commands()[known.command].resumable
        lifetime.raise_on_signals(f"mlflow-compress: interrupted{kept if resumable else ''}; closing runs")

    try:
        answer, exit_code = _answer(known, extra)
        if answer:  # a stage may have nothing to say
            print(answer, flush=True)
        return exit_code
    except BrokenPipeError:
        # The reader (`| head`) has seen enough. Python's own flush at exit would complain once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as raised:
        if isinstance(raised, errors.StageError | errors.SweepError) and raised.published is not None:
            print(f"{raised.published.as_text()}\n", flush=True)
        error = errors.machine_fault(raised) or raised  # before a run was open, or after it was closed
        if isinstance(error, errors.MlflowCompressError):
            print(f"mlflow-compress: {_in_words_of_the_caller(error)}", file=sys.stderr)
            _reject(error)
            if isinstance(error, errors.MachineError):
                sys.unraisablehook = partial(_unless_said, sys.unraisablehook)
        elif is_stage():
            traceback.print_exc()
        else:
            raise
        if isinstance(error, errors.StoreAwayError):
            return lifetime.STORE_AWAY
        if is_stage() and errors.breaks_off(error):
            return lifetime.BROKE_OFF
        return 2 if isinstance(error, errors.ConfigError) else 1
    except KeyboardInterrupt as interrupt:
        return lifetime.exit_code(interrupt)


def _unless_said(show: "Callable[[sys.UnraisableHookArgs], object]", failed: "sys.UnraisableHookArgs") -> None:
    """Show what fails at the end of the process, but for lack of what the machine was just said to lack."""
    if failed.exc_value is None or errors.machine_fault(failed.exc_value) is None:
        show(failed)


_COLOURS = {"runs": "cyan", "finished": "green", "found": "green", "failed": "red"}


@contextmanager
def shown_progress(say: Callable[[str], None]) -> "Iterator[Callable[[str | SweepProgress], None]]":
    """Yield what shows the progress of a command on the standard error, where `say` prints one line."""
    live: Live | None = None
    with ExitStack() as opened:

        def show(progress: "str | SweepProgress") -> None:
            nonlocal live
            if live is None and not sys.stderr.isatty():
                say(str(progress))
                return
            if isinstance(progress, str):
                say(_section(progress) if progress.startswith("[") else progress)
                return
            if live is None:
                live, errors_shown = opened.enter_context(_live()), sys.stderr
                # It is no terminal for progress bars now: they would stand between the rows.
                errors_shown.isatty = lambda: False  # type: ignore[method-assign]
                opened.callback(delattr, errors_shown, "isatty")
            if progress.variants:
                live.update(progress_table(progress.variants), refresh=True)
            else:
                live.console.print(progress.line, markup=False, highlight=False)

        yield show


def _section(line: str) -> str:
    width = shutil.get_terminal_size().columns
    text = textwrap.fill(line, width, subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False)
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return f"\n{text}" if plain else f"\n\x1b[1m{text}\x1b[0m"


def _live() -> "Live":
    from rich.console import Console
    from rich.live import Live

    logging.getLogger("mlflow").setLevel(logging.WARNING)  # its lines would stand between the rows
    return Live(console=Console(stderr=True), auto_refresh=False, redirect_stdout=False)


def progress_table(variants: "tuple[VariantProgress, ...]") -> "RenderableType":
    """Return the table of all variants: state, and what happens or was found; what does not fit is cut."""
    from rich.console import Group as Lines
    from rich.text import Text

    from mlflow_compress.reporting.tables import Column, Table

    columns = [Column(name, left=True) for name in ("variant", "state", "")]
    table = Table(columns=columns, rows=[(variant.name, variant.state, variant.doing) for variant in variants])
    lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in table.lines(ruled=False)]
    place = lines[0].plain.index("state")
    for line, variant in zip(lines[1:], variants, strict=True):
        line.stylize(_COLOURS.get(variant.state, "dim"), place, place + len(variant.state))
    return Lines(*lines)


def _answer(known: argparse.Namespace, extra: Sequence[str]) -> tuple[str, int]:
    command = _typed_commands()[known.command]
    values: dict[str, Any] = _parameters(known, extra)
    as_json = values.pop("json", False)
    with shown_progress(partial(print, file=sys.stderr, flush=True)) as progress:
        result = command.function(**({"progress": progress} if command.tells else {}), **values)
    if as_json:
        return json.dumps(result.to_dict(), allow_nan=False), 0
    # The main job shows all values at its end, and the verdict once.
    text = result if isinstance(result, str) else result.remark if is_stage() else result.as_text()
    return text.rstrip(), getattr(result, "exit_code", 0)


def program() -> NoReturn:
    """Be the program `mlflow-compress`."""
    lifetime.end_process(main())
