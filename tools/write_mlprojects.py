"""Write the MLproject files from the registry of commands, so that names, defaults and help stand in one place.

Run it after a change of a command or its parameters; a test fails while the files differ.
"""

from pathlib import Path

from mlflow_compress.cli import CONFIG_HELP
from mlflow_compress.commands.command import all_commands
from mlflow_compress.config import Parameters, given_parameters
from mlflow_compress.config.declarations import as_typed

ROOT = Path(__file__).resolve().parents[1]

HEADER = "# Written by tools/write_mlprojects.py from the registry of commands. The command itself checks values.\n"


def entry_point(name: str, cls: type[Parameters], program: str) -> str:
    """Return one entry point: every configuration field as a parameter, passed on as an option."""
    lines = [f"  {name}:", "    parameters:"]
    for parameter, field in given_parameters(cls).items():
        default = as_typed(field.default)
        lines.append(f'      {parameter}: {{type: string, default: "{default}"}}  # {field.description}')
    lines.append(f'      config: {{type: string, default: "none"}}  # {CONFIG_HELP}')
    lines.append("    command: >-")
    lines.append(f"      {program}")
    lines += [f"      --{parameter} {{{parameter}}}" for parameter in (*given_parameters(cls), "config")]
    return "\n".join(lines) + "\n"


def project_files() -> dict[Path, str]:
    """Return the text of every MLproject file by path."""
    commands = [
        (name, known.parameters, known.project_alone) for name, known in all_commands().items() if known.project
    ]
    root = [entry_point(name, cls, f"python -m mlflow_compress {name}") for name, cls, _ in commands if cls]
    files = {
        ROOT / "MLproject": f"{HEADER}name: mlflow_compress\n\npython_env: python_env.yaml\n\nentry_points:\n"
        + "\n".join(root)
    }
    for name, cls in [(name, cls) for name, cls, alone in commands if cls and alone]:
        files[ROOT / "projects" / name / "MLproject"] = (
            f"{HEADER}name: {name}\n\npython_env: ../../python_env.yaml\n\nentry_points:\n"
            + entry_point("main", cls, "python run.py")
        )
    return files


if __name__ == "__main__":
    for path, text in project_files().items():
        path.write_text(text)
        print(path.relative_to(ROOT))
