"""Seconds of a command by part: hash, items, tokens, load, passes, states, statistics, MLflow, figures.

`measure` runs a command in a process whose interpreter first reads `sitecustomize.py` from a folder of its own. That
lets this module wrap the functions of `PARTS` when their modules are imported, in the command's own process and in all
that it starts or forks. A part's seconds are those inside its functions and outside of other parts that these call.

- Seconds are those that the job waits for: of its own process and of its stages, which run one after another (give
  `judge=false`). Forks that share a pass or draw figures add to the processor seconds alone.
- Processor seconds are of all threads of a process, while its main thread is in the part.
- What is in no part, imports among them, is "rest".
"""

import functools
import mmap
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

PARTS: dict[str, tuple[str, ...]] = {
    "hash": ("hashes:sha256_files", "items.task:Task.content_hash", "models.identity:tokenizer_hash"),
    "items": (
        "commands.evaluate.items:suite_of",
        "commands.evaluate.items:with_chat_template",
        "items.suite:load_suite",
        "items.contamination:check_contamination",
        "commands.evaluate.baseline:noise_sample",
    ),
    "tokens": (
        "scoring.plan.encoding:Encoder.*",
        "scoring.plan.packing:plan_packs",
        "scoring.plan.packing:plan_batches",
        "scoring.plan.corpus_windows:cut",
    ),
    "load": (
        "models.loading:load_model",
        "models.loading:open_light",
        "models.source_model:SourceModel.*",
        "compression.reload_check:load_checkpoint",
    ),
    "compression": ("compression.pipeline:compress_model",),
    "passes": (
        "scoring.engine:run_pass",
        "scoring.forward.body:split_body_and_head",
        "scoring.forward.body:reason_not_to_pack",
        "models.causality:require_causal",
        "compression.probe:Probe.logits",
    ),
    "states": (
        "scoring.baseline_store:StateWriter.*",
        "scoring.baseline_store:StateStore.open",
        "scoring.baseline_store:StateStore.states",
        "scoring.baseline_store:StateStore.rows_of",
        "scoring.journal:PassParts.*",
    ),
    "statistics": (
        "scoring.engine:option_scores",
        "scoring.engine:option_distances",
        "metrics.core.metric_registry:compute_all",
        "metrics.core.account:take_account",
        "reporting.details:details",
        "reporting.details:flips_table",
    ),
    "MLflow": (
        "tracking.tracker:Tracker.*",
        "tracking.tracked_run:TrackedRun.*",
        "tracking.waiting:PatientClient.wait_for",
        "commands.main.summary:log_model",
    ),
    "figures": ("reporting.figures:draw_all", "reporting.html:render_report"),
}
"""Functions of the package by part; `*` are all public methods of a class."""

WAITING = "warm_python:WarmPython.run"  # the process of a stage, whose own parts are counted
HELPER = "scoring.child_process:_work"  # a fork that shares the work of the process which waits for it
_NAMES = (*PARTS, "waiting")
_ROW = struct.Struct("<2d")  # seconds, processor seconds
_HELPER_AT = _ROW.size * len(_NAMES)  # the byte that says whether a process is a helper


class Clock:
    """Adds the seconds of this process to the part that its main thread is in, in a file of the process's own.

    `now` returns seconds and processor seconds.
    """

    def __init__(self, folder: Path, now: Callable[[], tuple[float, float]]) -> None:
        self._folder, self._now = folder, now
        self.begin()
        os.register_at_fork(after_in_child=self.begin)

    def begin(self) -> None:
        """Begin anew: a process, or a fork, which has its own processor seconds and is in no part."""
        self._inside: list[int] = []
        self._file: mmap.mmap | None = None
        self._before = (0.0, 0.0)

    def wrapped(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose seconds in the main thread are those of a part."""
        number = _NAMES.index(part)

        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return function(*args, **kwargs)
            self._charge()
            self._inside.append(number)
            try:
                return function(*args, **kwargs)
            finally:
                self._charge()
                if self._inside:  # a fork within the function has begun anew
                    self._inside.pop()

        return measured

    def as_helper(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that a helper runs: the process that waits for it counts its seconds."""

        @functools.wraps(function)
        def helping(*args: Any, **kwargs: Any) -> Any:
            self._table()[_HELPER_AT] = 1
            return function(*args, **kwargs)

        return helping

    def _charge(self) -> None:
        now = self._now()
        if self._inside:
            at = _ROW.size * self._inside[-1]
            table = self._table()
            so_far = _ROW.unpack_from(table, at)
            _ROW.pack_into(table, at, *(s + b - a for s, a, b in zip(so_far, self._before, now, strict=True)))
        self._before = now

    def _table(self) -> mmap.mmap:
        """The file, mapped: what is in it stays, however the process ends."""
        if self._file is None:
            handle, _ = tempfile.mkstemp(dir=self._folder, prefix="process-")
            os.truncate(handle, _HELPER_AT + 1)
            self._file = mmap.mmap(handle, 0)
            os.close(handle)
        return self._file


class _Finder:
    """Lets modules be changed as soon as they are executed: before anyone takes a function out of them."""

    def __init__(self, change: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._change = change

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self._change:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                execute = functools.partial(self._execute, spec.loader.exec_module)
                spec.loader.exec_module = execute  # type: ignore[method-assign]
                return spec
        return None

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        self._change[module.__spec__.name](module)  # type: ignore[union-attr]  # `python -m` names it __main__


def _replace(clock: Clock, folder: Path, part: str, place: str, module: ModuleType) -> None:
    """Wrap one function of a module, or all public methods of a class; note a name that is not there."""
    owner: Any = module
    *classes, name = place.split(".")
    for one in classes:
        owner = getattr(owner, one, None)
    wrap = clock.as_helper if part == "helper" else functools.partial(clock.wrapped, part)
    found = {} if owner is None else vars(owner)
    names = [n for n, f in found.items() if n[0] != "_" and isinstance(f, FunctionType)] if name == "*" else [name]
    if not names or any(one not in found for one in names):
        (folder / f"missing-{module.__name__}:{place}").touch()
        return
    for one in names:
        is_class_method = isinstance(found[one], classmethod)
        changed = wrap(found[one].__func__ if is_class_method else found[one])
        setattr(owner, one, classmethod(changed) if is_class_method else changed)


def now() -> tuple[float, float]:
    """Return seconds and the processor seconds of this process."""
    return time.perf_counter(), time.process_time()


def install(folder: Path, package: str = "mlflow_compress") -> None:
    """Measure this process, and its forks, from now on: before the package is imported."""
    clock = Clock(folder, now)
    places = [(part, place) for part, several in PARTS.items() for place in several]
    by_module: dict[str, list[tuple[str, str]]] = {}
    for part, place in [*places, ("waiting", WAITING), ("helper", HELPER)]:
        module, _, inside = place.partition(":")
        by_module.setdefault(f"{package}.{module}", []).append((part, inside))

    def change(several: list[tuple[str, str]], module: ModuleType) -> None:
        for part, inside in several:
            _replace(clock, folder, part, inside, module)

    changes = {name: functools.partial(change, several) for name, several in by_module.items()}
    sys.meta_path.insert(0, _Finder(changes))


@dataclass(frozen=True)
class Measured:
    """What a command took: seconds and processor seconds, by part and in all."""

    parts: dict[str, tuple[float, float]]  # those of `PARTS`, and "rest"
    seconds: float
    processors: float
    missing: list[str]  # functions that this version of the package does not have
    said: str  # what it printed

    def as_markdown(self) -> str:
        """Return a table, one line a part."""
        rows = [*self.parts.items(), ("all", (self.seconds, self.processors))]
        lines = [f"| {name} | {seconds:.1f} | {processors:.1f} |" for name, (seconds, processors) in rows]
        absent = [f"\nNot measured, because this version does not have it: {', '.join(self.missing)}"]
        return "\n".join(
            ["| part | seconds | processor seconds |", "|---|---|---|", *lines, *(absent if self.missing else [])]
        )


def read(folder: Path) -> dict[str, tuple[float, float]]:
    """Return seconds and processor seconds by part, of all processes that have written into a folder."""
    found = dict.fromkeys(PARTS, (0.0, 0.0))
    for file in folder.glob("process-*"):
        table = file.read_bytes()
        counts = not table[_HELPER_AT]
        for part, (seconds, processors) in zip(PARTS, _ROW.iter_unpack(table[: _ROW.size * len(PARTS)]), strict=True):
            before = found[part]
            found[part] = (before[0] + (seconds if counts else 0.0), before[1] + processors)
    return found


def measure(
    command: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
    checkout: Path = ROOT,
    timeout: float | None = None,
) -> Measured:
    """Run a command of this package's in a folder, and return what it took; one that fails is an error.

    - `environment`: Variables besides those of this process.
    - `checkout`: The package's; another one can be measured too.
    """
    with tempfile.TemporaryDirectory() as place:
        Path(place, "sitecustomize.py").write_text(
            "import importlib.util, sys\n"
            f"spec = importlib.util.spec_from_file_location('benchmark_parts', {str(Path(__file__).resolve())!r})\n"
            "sys.modules[spec.name] = parts = importlib.util.module_from_spec(spec)\n"
            "spec.loader.exec_module(parts)\n"
            f"parts.install(parts.Path({place!r}))\n"
        )
        path = os.pathsep.join([place, str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])
        before, began = os.times(), time.perf_counter()
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **environment, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=timeout,
        )
        seconds, after = time.perf_counter() - began, os.times()
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}")
        parts = read(Path(place))
        missing = sorted(file.name.removeprefix("missing-") for file in Path(place).glob("missing-*"))
    processors = after.children_user + after.children_system - before.children_user - before.children_system
    rest = (seconds - sum(s for s, _ in parts.values()), processors - sum(p for _, p in parts.values()))
    return Measured({**parts, "rest": rest}, seconds, processors, missing, done.stdout)
