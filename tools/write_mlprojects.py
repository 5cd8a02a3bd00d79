"""Write the MLproject files from the stage configurations, so that names, defaults and help stand in one place.

Run it after a change in `mlflow_compress/config.py`; a test fails while the files differ.
"""

from __future__ import annotations

from pathlib import Path

from mlflow_compress.cli import CONFIG_HELP, STAGES
from mlflow_compress.config import Command, parameters
from mlflow_compress.config.declarations import as_typed

ROOT = Path(__file__).resolve().parents[1]
ALONE = ("quantize", "evaluate", "judge", "speed")  # stages that are MLflow projects of their own

HEADER = (
    "# Written by tools/write_mlprojects.py from mlflow_compress/config.py. Values are checked by the command itself.\n"
)


def entry_point(name: str, cls: type[Command], program: str) -> str:
    """Return one entry point: every configuration field as a parameter, passed on as an option."""
    lines = [f"  {name}:", "    parameters:"]
    for parameter, field in parameters(cls).items():
        default = as_typed(field.default)
        lines.append(f'      {parameter}: {{type: string, default: "{default}"}}  # {field.description}')
    lines.append(f'      config: {{type: string, default: "none"}}  # {CONFIG_HELP}')
    lines.append("    command: >-")
    lines.append(f"      {program}")
    lines += [f"      --{parameter} {{{parameter}}}" for parameter in (*parameters(cls), "config")]
    return "\n".join(lines) + "\n"


def project_files() -> dict[Path, str]:
    """Return the text of every MLproject file by path."""
    root = [entry_point(verb, cls, f"python -m mlflow_compress {verb}") for verb, cls in STAGES.items()]
    files = {
        ROOT / "MLproject": f"{HEADER}name: mlflow_compress\n\npython_env: python_env.yaml\n\nentry_points:\n"
        + "\n".join(root)
    }
    for verb in ALONE:
        files[ROOT / "projects" / verb / "MLproject"] = (
            f"{HEADER}name: {verb}\n\npython_env: ../../python_env.yaml\n\nentry_points:\n"
            + entry_point("main", STAGES[verb], "python run.py")
        )
    return files


if __name__ == "__main__":
    for path, text in project_files().items():
        path.write_text(text)
        print(path.relative_to(ROOT))
