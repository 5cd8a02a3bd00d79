"""What users depend on, compared with a stored copy: an unannounced change of the public surface fails here.

After a change that was meant, write the copy again with ``python -m tests.contract.test_surface``, and say in
CHANGELOG.md what users have to do. `docs/stability.md` says what is promised for how long.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic.fields import FieldInfo

import mlflow_compress as mc
from mlflow_compress import cli, records
from mlflow_compress.commands.command import Command, all_commands
from mlflow_compress.compression import checkpoint_manifest
from mlflow_compress.compression.method import METHODS
from mlflow_compress.config import given_parameters, parameters
from mlflow_compress.config.declarations import Group, choices, settings_within
from mlflow_compress.config.policy import Policy
from mlflow_compress.metrics.core.metric_registry import all_keys
from mlflow_compress.scoring.engine_identity import SCORING_VERSION

STORED = Path(__file__).parents[1] / "golden" / "surface.json"


def _default(field: FieldInfo) -> str:
    return "required" if field.is_required() else str(field.get_default(call_default_factory=True))


def _settings(command: Command, name: str) -> dict[str, str]:
    """Return the settings that are given together as one parameter, with their defaults."""
    assert command.parameters is not None
    known = parameters(command.parameters)
    return {setting: _default(known[flat]) for setting, flat in settings_within(command.parameters, name).items()}


def _policy(group: type[Group], name: str = "") -> Iterator[tuple[str, str]]:
    for part, field in group.model_fields.items():
        inner = [found for found in re.findall(r"policy\.(\w+)", str(field.annotation)) if found != group.__name__]
        yield f"{name}{part}", f"{re.sub(r'mlflow_compress[.a-z_]*', '', str(field.annotation))} = {_default(field)}"
        for one in inner:
            cls = getattr(inspect.getmodule(group), one, None)
            if isinstance(cls, type) and issubclass(cls, Group):
                yield from _policy(cls, f"{name}{part}.")


def _record_schemas(cls: type = records.Records) -> Iterator[tuple[str, list[str]]]:
    for one in cls.__subclasses__():
        if hasattr(one, "SCHEMA"):
            yield one.NAME, [f"{column.name}: {column.type}" for column in one.SCHEMA]
        yield from _record_schemas(one)


def surface() -> dict[str, Any]:
    """Return the public surface as JSON holds it: part -> name -> what it is."""
    commands = {}
    for command in all_commands().values():
        options = {} if command.parameters is None else given_parameters(command.parameters)
        commands[command.typed] = {
            "python": command.function.__name__,
            "options": {name: [_default(field), *choices(field)] for name, field in options.items()},
            "settings": {name: within for name in options if (within := _settings(command, name))},
            "arguments": [flag for argument in command.arguments for flag in argument.flags],
            "positional": "" if command.positional is None else command.positional.metavar,
            "exit code 3": command.decides,
        }
    results = {}
    for name in mc.__all__:
        one = getattr(mc, name)
        if isinstance(one, type) and is_dataclass(one):
            members = {n for n, value in vars(one).items() if isinstance(value, property) or inspect.isfunction(value)}
            results[name] = sorted(n for n in {f.name for f in fields(one)} | members if not n.startswith("_"))
    found = {
        "commands": commands,
        "exit codes": cli._EXIT,
        "python": list(mc.__all__),
        "results": results,
        "methods": METHODS.names(),
        "metrics": {
            key.name: [key.unit, key.direction, str(key.low), str(key.high), key.gate.name if key.gate else ""]
            for key in all_keys().values()
        },
        "records": dict(_record_schemas()),
        "manifest": {
            "version": checkpoint_manifest.MANIFEST_VERSION,
            "fields": [field.name for field in fields(checkpoint_manifest.CheckpointManifest)],
        },
        "policy": dict(_policy(Policy)),
        "scoring version": SCORING_VERSION,
    }
    return json.loads(json.dumps(found))


def differences(before: Any, now: Any, place: str = "") -> list[str]:
    """Return every difference, named by its place: "commands/main/options/bits: ['4'] -> ['3']"."""
    if isinstance(before, dict) and isinstance(now, dict):
        found = []
        for name in [*before, *(name for name in now if name not in before)]:
            inner = f"{place}/{name}" if place else name
            if name not in now:
                found.append(f"{inner}: is gone")
            elif name not in before:
                found.append(f"{inner}: is new")
            else:
                found += differences(before[name], now[name], inner)
        return found
    return [] if before == now else [f"{place}: {before} -> {now}"]


def test_the_public_surface_is_the_announced_one() -> None:
    found = differences(json.loads(STORED.read_text()), surface())
    assert found == [], "announce it in CHANGELOG.md, and run python -m tests.contract.test_surface"


def _renamed(content: dict[str, Any], old: str, new: str) -> None:
    content[new] = content.pop(old)


PLANTED: dict[str, Callable[[dict[str, Any]], object]] = {
    "commands/main/options/bits": lambda s: _renamed(s["commands"]["main"]["options"], "bits", "n_bits"),
    "commands/sweep/options/limit": lambda s: s["commands"]["sweep"]["options"]["limit"].__setitem__(0, "7"),
    "commands/main/options/engine": lambda s: s["commands"]["main"]["options"]["engine"].append("new"),
    "commands/main/settings/judge_args/timeout": lambda s: s["commands"]["main"]["settings"]["judge_args"].pop(
        "timeout"
    ),
    "commands/promote rollback": lambda s: _renamed(s["commands"], "promote rollback", "rollback"),
    "commands/gate/exit code 3": lambda s: s["commands"]["gate"].__setitem__("exit code 3", False),
    "exit codes": lambda s: s.__setitem__("exit codes", s["exit codes"].replace("3 nothing", "4 nothing")),
    "python": lambda s: s["python"].remove("Policy"),
    "results/Evaluation": lambda s: s["results"]["Evaluation"].remove("results"),
    "methods": lambda s: s["methods"].remove("awq"),
    "metrics/distance/flips_pct": lambda s: _renamed(s["metrics"], "distance/flips_pct", "distance/flips"),
    "metrics/distance/kl_mean": lambda s: s["metrics"]["distance/kl_mean"].__setitem__(0, "bits"),
    "records/option_scores": lambda s: s["records"]["option_scores"].pop(),
    "manifest/fields": lambda s: s["manifest"]["fields"].append("more"),
    "policy/kl.max_kl": lambda s: s["policy"].__setitem__("kl.max_kl", "float = 0.1"),
}


@pytest.mark.parametrize("place", PLANTED)
def test_a_planted_change_is_named(place: str) -> None:
    now = surface()
    changed = deepcopy(now)
    PLANTED[place](changed)
    found = differences(now, changed)
    assert found and all(line.startswith(place.partition("/")[0]) for line in found)
    assert any(line.startswith(place) for line in found), found


if __name__ == "__main__":
    parts = []
    for part, content in surface().items():
        if isinstance(content, dict):
            lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in content.items())
            parts.append(f" {json.dumps(part)}: {{\n{lines}\n }}")
        else:
            parts.append(f" {json.dumps(part)}: {json.dumps(content)}")
    STORED.write_text("{\n" + ",\n".join(parts) + "\n}\n")
