"""The Kubernetes example is a RayJob as KubeRay declares it, and runs a command that this package has.

`RAYJOB` is a reduced schema, written by hand: of KubeRay's CRD `ray.io_rayjobs` (version v1, as of August 2026) it has
the fields that an example of ours may use, with their types, and refuses all others. The example was also checked, once
and by hand, against the complete CRD.
"""

import copy
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from mlflow_compress.commands.command import COMMANDS
from mlflow_compress.config import parse

FILE = Path(__file__).parents[2] / "examples" / "kubernetes" / "rayjob.yaml"


def fields(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """An object with these fields and no others."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
QUANTITIES = {"type": "object", "additionalProperties": {"type": ["integer", "string"]}}


def several(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


CONTAINER = fields(
    ("name",),
    name=TEXT,
    image=TEXT,
    env=several(fields(("name",), name=TEXT, value=TEXT)),
    resources=fields(limits=QUANTITIES, requests=QUANTITIES),
    volumeMounts=several(fields(("name", "mountPath"), name=TEXT, mountPath=TEXT)),
)
POD = fields(
    spec=fields(
        ("containers",),
        containers=several(CONTAINER),
        volumes=several(fields(("name",), name=TEXT, persistentVolumeClaim=fields(("claimName",), claimName=TEXT))),
    )
)
GROUP = {"rayStartParams": TEXTS, "template": POD}
RAYJOB = fields(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=fields(("name",), name=TEXT),
    spec=fields(
        entrypoint=TEXT,
        backoffLimit=WHOLE,
        shutdownAfterJobFinishes={"type": "boolean"},
        ttlSecondsAfterFinished=WHOLE,
        rayClusterSpec=fields(
            ("headGroupSpec",),
            rayVersion=TEXT,
            headGroupSpec=fields(("template",), **GROUP),
            workerGroupSpecs=several(
                fields(
                    ("groupName", "maxReplicas", "minReplicas", "template"),
                    groupName=TEXT,
                    replicas=WHOLE,
                    minReplicas=WHOLE,
                    maxReplicas=WHOLE,
                    **GROUP,
                )
            ),
        ),
    ),
)


def test_it_is_a_rayjob() -> None:
    jsonschema.Draft7Validator(RAYJOB).validate(yaml.safe_load(FILE.read_text()))


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        (("spec",), "entryPoint", "x"),
        (
            ("spec", "rayClusterSpec", "headGroupSpec", "rayStartParams"),
            "num-cpus",
            0,
        ),  # a number is refused by KubeRay
        (("spec", "rayClusterSpec", "workerGroupSpecs", 0), "replicas", "4"),
    ],
)
def test_the_schema_refuses_what_is_none(place: tuple[str | int, ...], name: str, value: object) -> None:
    job = copy.deepcopy(yaml.safe_load(FILE.read_text()))
    part = job
    for step in place:
        part = part[step]
    part[name] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(RAYJOB).validate(job)


def test_its_command_and_its_version_of_ray_are_ours() -> None:
    spec = yaml.safe_load(FILE.read_text())["spec"]
    program, stage, *rest = shlex.split(spec["entrypoint"])
    values = {name.removeprefix("--"): value for name, value in zip(rest[::2], rest[1::2], strict=True)}
    cls = COMMANDS.get(stage).parameters
    assert cls is not None
    config = parse(cls, values)
    assert program == "mlflow-compress"
    assert (config.running.engine, config.running.ray_address) == ("ray", "auto")  # type: ignore[attr-defined]
    lock = (FILE.parents[2] / "requirements-extras.txt").read_text()
    assert f"\nray=={spec['rayClusterSpec']['rayVersion']}\n" in lock
