"""The GitHub workflow and action in `examples/`: they parse, and every command of theirs is executed on the demo."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from mlflow_compress.commands.command import COMMANDS
from mlflow_compress.commands.gate.parameters import GateConfig
from mlflow_compress.config import expanded, given_parameters, parse, read_policy
from mlflow_compress.decide.item_checks import item_policy

EXAMPLES = Path(__file__).parents[2] / "examples"
ACTION = yaml.safe_load((EXAMPLES / "gate-action" / "action.yml").read_text())
WORKFLOW = yaml.safe_load((EXAMPLES / "workflows" / "gate.yml").read_text())
STEPS = WORKFLOW["jobs"]["gate"]["steps"]
[GATE] = [step for step in ACTION["runs"]["steps"] if "run" in step]


def test_the_workflow_uses_the_action_with_options_that_exist_and_variables_alone() -> None:
    assert ACTION["runs"]["using"] == "composite" and GATE["shell"] == "bash"
    [use] = [step for step in STEPS if str(step.get("uses", "")).startswith("./")]
    required = {name for name, given in ACTION["inputs"].items() if given.get("required")}
    assert required <= set(use["with"]) <= set(ACTION["inputs"])
    outputs = re.findall(r'echo "(\w+)=', GATE["run"])
    assert {f"${{{{ steps.gate.outputs.{name} }}}}" for name in outputs} == {
        o["value"] for o in ACTION["outputs"].values()
    }
    named = re.findall(r"steps\.(\w+)\.outputs\.(\w+)", str(use))
    assert (
        named == [("compress", "folder")]
        and 'echo "folder=' in next(s for s in STEPS if s.get("id") == "compress")["run"]
    )
    # An expression inside of a script would run what an input holds.
    for step in (GATE, *STEPS):
        assert "${{" not in step.get("run", "")
    used = set(re.findall(r"\$(?:\{)?([A-Z_]+)", GATE["run"])) - {"PWD", "GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT"}
    assert used <= set(GATE["env"])
    [use] = [step["with"] for step in STEPS if str(step.get("uses", "")).startswith("./")]
    known = set(given_parameters(GateConfig))
    assert set(re.findall(r"--(\w+)", GATE["run"] + use["options"])) <= known
    item_policy(read_policy(str(EXAMPLES.parent / use["policy"])))


def run(script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a step's script as GitHub does, and return what it did."""
    for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT"):
        (folder / name).write_text("")
        variables[name] = str(folder / name)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {
        **kept,
        "PATH": path,
        "PYTHONPATH": str(EXAMPLES.parent),
        "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db",
        **variables,
    }
    (folder / "step.sh").write_text(script)
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "step.sh"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.ci
def test_every_command_runs_on_the_demo(tmp_path: Path) -> None:
    commands = {step["name"]: step["run"] for step in STEPS if "run" in step}
    assert set(commands) == {"Install", "Compress"}  # the first installs this package, as it is here
    done = run(commands["Compress"], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    folder = (tmp_path / "GITHUB_OUTPUT").read_text().strip().removeprefix("folder=")
    assert (tmp_path / folder).is_dir()
    few = "--limit 4 --num_shuffles 0 --num_fewshot 0 --task_args noise_items=4"
    given = {"MODEL": "demo", "CHECKPOINT": folder, "OPTIONS": few}
    for limit, status in ((50, 0), (0.5, 3)):
        (tmp_path / "policy.yaml").write_text(
            f"kl: none\nmargins: []\ngates: [{{metric: distance/flips_pct, at_most: {limit}}}]\n"
        )
        done = run(GATE["run"], tmp_path, **given, POLICY="policy.yaml")
        assert done.returncode == status, done.stdout + done.stderr[-3000:]
        outputs = dict(line.split("=", 1) for line in (tmp_path / "GITHUB_OUTPUT").read_text().splitlines())
        assert outputs["passed"] == ("true" if status == 0 else "false")
        assert json.loads(Path(outputs["verdict"]).read_text())["exit_code"] == status
        assert (tmp_path / "GITHUB_STEP_SUMMARY").read_text().startswith("## Passed" if status == 0 else "## Failed")
    broken = run(GATE["run"], tmp_path, **{**given, "CHECKPOINT": "nowhere"}, POLICY="policy.yaml")
    assert broken.returncode == 2 and not (tmp_path / "GITHUB_STEP_SUMMARY").read_text()


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


def test_it_is_a_rayjob_with_our_command_and_our_version_of_ray() -> None:
    jsonschema.Draft7Validator(RAYJOB).validate(yaml.safe_load(FILE.read_text()))
    spec = yaml.safe_load(FILE.read_text())["spec"]
    program, stage, *rest = shlex.split(spec["entrypoint"])
    values = {name.removeprefix("--"): value for name, value in zip(rest[::2], rest[1::2], strict=True)}
    cls = COMMANDS.get(stage).parameters
    assert cls is not None
    config = parse(cls, expanded(cls, values))
    assert program == "mlflow-compress"
    assert (config.running.engine, config.running.ray_address) == ("ray", "auto")  # type: ignore[attr-defined]
    lock = (FILE.parents[2] / "requirements-extras.txt").read_text()
    assert f"\nray=={spec['rayClusterSpec']['rayVersion']}\n" in lock
