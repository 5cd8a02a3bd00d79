"""Write the MLproject files from the stage configurations, so that names, defaults and help stand in one place.

Run it after a change in `mlflow_compress/config.py`; a test fails while the files differ.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from mlflow_compress.cli import STAGES

ROOT = Path(__file__).resolve().parents[1]
ALONE = ("quantize", "evaluate", "judge")  # stages that are MLflow projects of their own

HEADER = (
    "# Written by tools/write_mlprojects.py from mlflow_compress/config.py. Values are checked by the command itself.\n"
)


def entry_point(name: str, cls: type, program: str) -> str:
    """Return one entry point: every configuration field as a parameter, passed on as an option."""
    lines = [f"  {name}:", "    parameters:"]
    for field in fields(cls):
        default = str(field.default).lower() if isinstance(field.default, bool) else field.default
        lines.append(f'      {field.name}: {{type: string, default: "{default}"}}  # {field.metadata["help"]}')
    lines.append("    command: >-")
    lines.append(f"      {program}")
    lines += [f"      --{field.name} {{{field.name}}}" for field in fields(cls)]
    return "\n".join(lines) + "\n"


def project_files() -> dict[Path, str]:
    """Return the text of every MLproject file by path."""
    root = [entry_point(verb, cls, f"python -m mlflow_compress {verb}") for verb, (cls, _) in STAGES.items()]
    files = {
        ROOT / "MLproject": f"{HEADER}name: mlflow_compress\n\npython_env: python_env.yaml\n\nentry_points:\n"
        + "\n".join(root)
    }
    for verb in ALONE:
        files[ROOT / "projects" / verb / "MLproject"] = (
            f"{HEADER}name: {verb}\n\npython_env: ../../python_env.yaml\n\nentry_points:\n"
            + entry_point("main", STAGES[verb][0], "python run.py")
        )
    return files


if __name__ == "__main__":
    for path, text in project_files().items():
        path.write_text(text)
        print(path.relative_to(ROOT))
