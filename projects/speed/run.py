"""The speed stage as an MLflow project of its own: calls the library in this checkout, or the installed one."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mlflow_compress.cli import main

raise SystemExit(main(["speed", *sys.argv[1:]]))
