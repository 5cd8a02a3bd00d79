"""What a command is, and the registry of all: command line, Python, projects, `resume` and docs read it there."""

import inspect
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from types import NoneType
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from mlflow_compress import demo
from mlflow_compress.commands.in_memory import (
    TAKES_MODELS,
    check_questions,
    checked_policy,
    is_loaded_model,
    is_rows,
    save_loaded_model,
    write_policy,
    write_task_files,
)
from mlflow_compress.config import EMBEDDED, Parameters, Policy, expanded, given_parameters, parameters, parse
from mlflow_compress.config.declarations import AUTO, NONE, as_typed, choices, read_file, settings_within
from mlflow_compress.errors import CheckpointError, ConfigError, require_extra
from mlflow_compress.files import read_json_object
from mlflow_compress.home import SQLITE, home
from mlflow_compress.paths import absolute_paths
from mlflow_compress.registry import Registry
from mlflow_compress.tracking.store import RunLink, is_run_id, require_runs

P = TypeVar("P", bound=Parameters)
F = TypeVar("F", bound=Callable[..., Any])
StoreLike = str | PathLike[str] | None
PathOrText = str | PathLike[str]
PolicyLike = str | PathLike[str] | Mapping[str, object] | Policy
Say = Callable[[str], None]


class ResultOfRun(Protocol):
    """What a command returned that a run holds."""

    @property
    def run(self) -> RunLink | None: ...


@dataclass(frozen=True)
class Argument:
    """An argument of the command line that is no parameter, as argparse's `add_argument` takes it."""

    flags: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Positional:
    """The parameter that the command line also takes without its name, several values separated by spaces."""

    parameter: str
    metavar: str
    help: str


@dataclass(frozen=True)
class Command:
    """One command: `function` is the same for the command line, Python, an MLflow project and `resume`."""

    name: str
    function: Callable[..., Any]  # Returns a result; `as_text` of it is what the command line shows
    parameters: type[Parameters] | None  # None for one that takes only `arguments`
    description: str  # One sentence for the help
    within: str = ""  # "promote" for one that the command line has as `promote NAME`
    heading: str = "plug-ins"  # The line of the help on which it stands: see `HEADINGS`
    place: int = 100  # Order on that line, and in MLproject
    project: bool = True  # It is an entry point of MLproject
    project_alone: bool = False  # It is also an MLflow project of its own, in projects/
    resumable: bool = False  # A killed one is noted on disk, and `resume` does it again
    decides: bool = False  # Exit code 3 says that nothing passes
    first: tuple[str, ...] = ()  # Parameters that most people set: on top of the help
    positional: Positional | None = None
    arguments: tuple[Argument, ...] = ()
    short: Mapping[str, str] = field(default_factory=dict)  # Parameter -> option of one letter

    @property
    def typed(self) -> str:
        """Its name on the command line: "promote approve", "receipt compare"."""
        return f"{self.within} {self.name.removesuffix(f'-{self.within}s')}".strip()

    @property
    def tells(self) -> bool:
        """Whether its function tells `progress`."""
        return "progress" in inspect.signature(self.function).parameters


HEADINGS = ("start", "look", "decide", "share", "list", "keep", "stages", "plug-ins")
"""What commands are for. The stages are what the main job runs one after the other."""

COMMANDS: Registry[Command] = Registry(
    "command", "mlflow_compress.commands", group="mlflow_compress.commands", of=Command, inside="command"
)


def all_commands() -> dict[str, Command]:
    """Return every command by name, in the order of the help: this package's own, then those of plug-ins."""
    return dict(sorted(COMMANDS.items(), key=lambda item: item[1].place))


def register_command(
    name: str, cls: type[Parameters] | None = None, *, description: str = "", **declared: Any
) -> Callable[[F], F]:
    """Register a function of the Python front door as a command, and show the command's parameters in its signature.

    - `name`: What the command line and MLproject call it. Python has the function's own name.
    - `cls`: Its parameters. The function takes them as keyword arguments (`**parameters`).
    - `description`: One sentence for the help; without it, the docstring of `cls`.
    - `**declared`: The other fields of `Command`.
    """

    def decorate(function: F) -> F:
        if cls is not None:
            _show_parameters(function, cls)
        sentence = description or ((cls.__doc__ if cls is not None else function.__doc__) or "").strip()
        COMMANDS.register(name)(Command(name, function, cls, sentence, **declared))
        return function

    return decorate


def described_option(cls: type[Parameters], name: str) -> list[str]:
    """Return the help of what people give: what it is, the words that it takes, its default; then its settings."""
    known = parameters(cls)
    lines = [] if name in known else [given_parameters(cls)[name].description or ""]
    for setting, held in settings_within(cls, name).items() if lines else [("", name)]:
        words = " | ".join(choices(known[held]))
        text = f"{known[held].description} {f'({words}) ' if words else ''}[{as_typed(known[held].default)}]"
        lines.append(f"- {setting}: {text}" if setting else text)
    return lines


def _show_parameters(function: Callable[..., Any], cls: type[Parameters]) -> None:
    """Put the parameters of a command in place of `**parameters`: in the signature, and in the docstring."""
    own = inspect.signature(function)
    named = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    there = {p.name for p in named}
    more = {name: declared for name, declared in given_parameters(cls).items() if name not in there}
    shown = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=declared.default, annotation=declared.annotation
        )
        for name, declared in more.items()
    ]
    function.__signature__ = own.replace(parameters=[*named, *shown])  # type: ignore[attr-defined]
    described = []
    for name in more:
        described.append(name)
        for line in described_option(cls, name):
            described += textwrap.wrap(
                line, 110, initial_indent=" " * 4, subsequent_indent=" " * (4 + 2 * line.startswith("- "))
            )
    doc = inspect.getdoc(function) or ""
    section = "" if "\nParameters\n----------\n" in doc else "Parameters\n----------\n"
    function.__doc__ = doc.replace("**parameters\n", section + "\n".join(described) + "\n", 1)


def configured(cls: type[P], given: Mapping[str, Any], store: StoreLike = None) -> P:
    """Return checked parameters with absolute paths.

    A path object is its text, and a result the path it stands for. A loaded model, rows of items and a policy become
    files in the folder that keeps the state of the store. Every command calls it before it imports what does its work.
    """
    _check_environment()
    if store is not None:
        path_text("store", store)
    values = {name: fspath(value) if isinstance(value, PathLike) else value for name, value in given.items()}
    for name, value in values.items():
        if isinstance(value, Iterator):
            what = f"Parameter '{name}' is an iterator, which can be read only once"
            raise ConfigError(what, allowed="a list", got=type(value).__name__, fix=f"Give {name}=list(...)")
    if "policy" in values:
        values["policy"] = policy_path(values["policy"], store)
    if is_rows(values.get("tasks")):
        check_questions(values["tasks"])
        values["tasks"] = write_task_files(values["tasks"], _inputs(store))
    for name in TAKES_MODELS:
        if is_loaded_model(values.get(name)):
            values[name] = str(save_loaded_model(name, values[name], _inputs(store)))
            if name == "checkpoint" and "method" not in parameters(cls):  # of one that is compressed and described
                shared = {name: values[name] for name in ("experiment", "trust_remote_code") if name in values}
                quantize = COMMANDS.get("quantize").function
                made = quantize(
                    values.get("model", EMBEDDED), "checkpoint", checkpoint=values[name], store=store, **shared
                )
                values[name] = fspath(made)
    config = _with_traces(absolute_paths(parse(cls, expanded(cls, values))), store)
    _refuse_early(config, store)
    named = {*values, *(read_file(Path(str(values["config"]))) if values.get("config", NONE) != NONE else ())}
    if "model" in parameters(cls) and "checkpoint" in parameters(cls) and "model" not in named:
        config = config.with_values(model=_own_baseline(config.values()["checkpoint"]))
    return config


_OF_TRACES = "mlflow-traces:"  # before the name of an experiment, in `tasks`


def _with_traces(config: P, store: StoreLike) -> P:
    """Return parameters that name files of conversations in place of traces, redacted before they are written.

    So what was read is frozen: traces that come later change nothing of a run that goes on.
    """
    named = {name: config.values().get(name) for name in ("tasks", "instructions", "trace_instructions")}
    given = {name: text for name, text in named.items() if isinstance(text, str) and _OF_TRACES in text}
    if not given:
        return config
    from mlflow_compress.items.sources.conversations import Redaction
    from mlflow_compress.tracking.app_traces import read_conversations
    from mlflow_compress.tracking.tracker import tracking_uri

    redact = Redaction.of(str(config.values().get("redact") or ""))

    def file_of(part: str) -> str:
        if not part.startswith(_OF_TRACES):
            return part
        where = part.removeprefix(_OF_TRACES)
        name = re.sub(r"[^\w.-]+", "-", where).strip("-._")[:60] or "traces"
        rows = read_conversations(tracking_uri(), where, redact)
        return f"openai:{write_task_files({name: rows}, _inputs(store))}"

    return config.with_values(
        **{name: ",".join(map(file_of, map(str.strip, text.split(",")))) for name, text in given.items()}
    )


# Variables that libraries read while they are imported, where a wrong value ends every command.
_NUMBERS = ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT")
_SWITCHES = ("MLFLOW_CONFIGURE_LOGGING",)


def _check_environment() -> None:
    for names, allowed, pattern in (
        (_NUMBERS, "a whole number of seconds", r"\s*[+-]?\d+\s*"),
        (_SWITCHES, "true, false, 1, 0", "(?i:true|false|1|0)"),
    ):
        for name in names:
            if (value := os.environ.get(name)) is not None and re.fullmatch(pattern, value) is None:
                what = f"The environment variable {name} cannot be read"
                raise ConfigError(what, allowed=allowed, got=value, fix="Correct it, or unset it")
    try:
        urlsplit(os.environ.get("HF_ENDPOINT", ""))
    except ValueError as error:
        what = f"The environment variable HF_ENDPOINT cannot be read: {error}"
        raise ConfigError(what, got=os.environ["HF_ENDPOINT"], fix="Correct it, or unset it") from error


def _refuse_early(config: Parameters, store: StoreLike) -> None:
    """Refuse what names and files alone show to be wrong, before torch is imported: that is within two seconds."""
    from mlflow_compress.models.identity import require_own_tokens, require_tokenizer_files, require_tools_template
    from mlflow_compress.models.peft_adapter import ADAPTER

    values = config.values()
    folders = {name: Path(str(values[name])) for name in TAKES_MODELS if values.get(name) is not None}
    # An adapter's own files say little of the model that it will be.
    folders = {name: folder for name, folder in folders.items() if not (folder / ADAPTER).is_file()}
    for folder in folders.values():
        if (folder / "config.json").is_file() and values.get("tokenizer") is None:
            require_tokenizer_files(folder)
    if isinstance(method := values.get("method"), str):
        from mlflow_compress.compression.method import METHODS

        chosen = METHODS.get(method)
        if chosen.extra is not None:
            require_extra(chosen.extra, *chosen.requires, by=f"Method {method!r}")
        if "model" in folders and folders["model"].is_dir():
            chosen.check_folder(folders["model"])
    if isinstance(tasks := values.get("tasks"), str):
        from mlflow_compress.items.suite import asks_with_tools, check_tasks_named, has_questions

        model = str(values.get("model", EMBEDDED))
        check_tasks_named(tasks, model=model)
        folder = Path(demo.MODELS.get(model, model))
        if values.get("tokenizer") is None and folder.is_dir() and asks_with_tools(tasks, model=model):
            require_tools_template(folder)
        if values.get("tokenizer") is None and Path(model).is_dir() and has_questions(tasks, model=model):
            require_own_tokens(Path(model))
    from mlflow_compress.commands.shared.name_checks import check_named

    check_named(config)
    named = [str(values[name]) for name in ("run", "runs", "resume", "repair") if values.get(name) is not None]
    run_ids = [run_id.strip() for text in named for run_id in text.split(",") if run_id.strip()]
    for text in run_ids:
        if not is_run_id(text):
            raise ConfigError("This is not the id of a run", allowed="6 to 32 hexadecimal digits", got=text)
    require_runs(run_ids, store_of(store))


def _own_baseline(checkpoint: str | None) -> str:
    """Return the model that a checkpoint was made from: the demo, unless the checkpoint says another."""
    manifest = Path(checkpoint or "") / "compression.json"
    if checkpoint is None or not manifest.is_file():
        return EMBEDDED
    base = str(read_json_object(manifest, error=CheckpointError).get("base_model", EMBEDDED))
    # The demo lies in the package, which may be installed elsewhere than where the checkpoint was made.
    return next((name for name, folder in demo.MODELS.items() if Path(base).parts[-3:] == folder.parts[-3:]), base)


def policy_path(policy: Any, store: StoreLike) -> Any:
    """Return the file of a policy that Python users hold in memory; anything else is returned unchanged."""
    if not isinstance(policy, Mapping | Policy):
        return policy
    checked = checked_policy(policy)  # before the store is asked for, which takes a second
    return str(write_policy(checked, _inputs(store)))


def run_id_of(name: str, value: object) -> str:
    """Return the id of the run of a result, or the text that is one; anything else is a `ConfigError`."""
    run = getattr(value, "run", None)
    return path_text(name, value) if run is None else str(run.run_id)


def path_text(name: str, value: object) -> str:
    """Return a path, or a result that stands for one, as text; anything else is a `ConfigError`."""
    if isinstance(value, str | PathLike) and isinstance(path := fspath(value), str):
        return path
    raise ConfigError(f"'{name}' must be a path, an id or a result", got=_brief(value))


def _brief(value: object) -> str:
    """Return a wrong value with its type; of what may be large, the type alone."""
    kind = type(value).__name__
    return f"{kind}: {value!r}" if isinstance(value, int | float | bytes | list | tuple | dict | NoneType) else kind


def _inputs(store: StoreLike) -> Path:
    """Return the folder for what Python users hold in memory."""
    if store is None:
        from mlflow_compress.tracking.tracker import tracking_uri

        return home(tracking_uri()) / "inputs"
    return home(store_in(store)) / "inputs"


def store_in(folder: str | PathLike[str]) -> str:
    """Return the address of the tracking store in a folder: MLflow's SQLite file, and the artifacts beside it."""
    return f"{SQLITE}{Path(path_text('store', folder)).expanduser().resolve() / 'mlflow.db'}"


def store_of(store: StoreLike, config: Parameters | None = None) -> str | None:
    """Return the address of the store in a folder, or None for the one that MLflow is configured for.

    A command opens it after its checks, so that a refused one leaves nothing.
    """
    if store is None:
        return None
    if config is not None and config.experiment != AUTO:
        raise ConfigError(
            "A folder of runs has no experiments", got=config.experiment, fix="Give store or experiment, not both"
        )
    return store_in(store)


def silent(line: object) -> None:
    """Ignore what is told of the progress."""
