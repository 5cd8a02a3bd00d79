"""The judge stage as an MLflow project of its own: calls the library in this checkout, or the installed one."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if (ROOT / "mlflow_compress").is_dir():  # in an installed package this folder is inside it
    sys.path.insert(0, str(ROOT))

from mlflow_compress.cli import main

raise SystemExit(main(["judge", *sys.argv[1:]]))
