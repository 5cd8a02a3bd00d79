"""The two steps of the build that pyproject.toml cannot say: the stub is written, and projects go into the wheel.

The stub is what type checkers and editors read. It is written where a package is built, and where one is installed in
place. In a checkout the MLflow projects of the stages lie beside the package, where `mlflow run` looks for them. In a
wheel, `mlflow_compress/_projects/` has the checkout's layout, so that the paths inside the MLproject files stay true.
"""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PROJECTS = [file.parent for file in Path("projects").glob("*/MLproject")]
OURS = [folder for folder in PROJECTS if not (folder / "python_env.yaml").exists()]  # in this package's environment
FILES = (
    "MLproject",
    "python_env.yaml",
    "requirements.txt",
    *(str(folder / name) for folder in OURS for name in ("MLproject", "requirements.txt", "run.py")),
)


class BuildWithProjects(build_py):
    """Copies the projects beside the modules; an editable installation uses the checkout's own."""

    def run(self) -> None:
        """Build the package, then copy the projects."""
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "mlflow_compress" / "_projects"
        for name in FILES:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(name, str(target / name))


if (ROOT / "tools").is_dir():  # an sdist has no tools, and brings the stub
    sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
    from write_stub import STUB, stub

    STUB.write_text(stub())
setup(cmdclass={"build_py": BuildWithProjects})
