"""The one step of the build that pyproject.toml cannot say: the MLflow projects of the stages go into the wheel.

In a checkout they lie beside the package, where `mlflow run` looks for them. In a wheel, `mlflow_compress/_projects/`
has the checkout's layout, so that the paths inside the MLproject files stay true.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

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


setup(cmdclass={"build_py": BuildWithProjects})
