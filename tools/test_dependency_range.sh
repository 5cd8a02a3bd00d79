#!/usr/bin/env bash
# Tests one end of the version ranges of pyproject.toml in a fresh virtual environment:
#   tools/test_dependency_range.sh low    every direct dependency at its lower bound
#   tools/test_dependency_range.sh high   the newest versions that the ranges allow
# The environment (several GB, since torch may bring CUDA packages) is removed at the end; a second argument names a
# folder that is kept. PYTHON names another interpreter, further arguments are tests.
set -euo pipefail
cd "$(dirname "$0")/.."
end=${1:-}
[ "$end" = low ] || [ "$end" = high ] || { echo "usage: $0 low|high [FOLDER [TEST ...]]" >&2; exit 2; }
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
environment=${2:-$temporary/environment}
tests=("${@:3}")
# Metrics, configuration, records, report, tracking, tasks, judges, compression, and the commands from end to end.
[ ${#tests[@]} -gt 0 ] || tests=(
  tests/contract tests/unit/test_metrics_*.py tests/unit/test_config.py tests/unit/test_records.py
  tests/unit/test_report_*.py tests/unit/test_tracking*.py tests/unit/test_logged_model.py tests/unit/test_candidates.py
  tests/unit/test_promotion.py tests/unit/test_harness_tasks.py tests/unit/test_judges_*.py
  tests/unit/test_compress_run.py tests/unit/test_compress_gguf.py tests/unit/test_bnb_4bit.py
  tests/unit/test_scoring_engine.py tests/unit/test_generate.py tests/golden/test_harness_parity.py
  tests/e2e/test_whole_path.py
)

"${PYTHON:-python3}" -m venv "$environment"
. "$environment/bin/activate"
touch "$temporary/constraints.txt"
if [ "$end" = low ]; then
  python - > "$temporary/constraints.txt" <<'PYTHON'
import re
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
tested = re.search(r"\[(.*)\]", extras["test"][0]).group(1).split(",")  # the extras that the tests need
for line in [*project["dependencies"], *(line for extra in tested for line in extras[extra]), *extras["test"][1:]]:
    name, lowest = re.match(r"([\w.-]+)>=([\w.]+)", line).groups()
    print(f"{name}=={lowest}")
PYTHON
fi
pip install -q -U -c "$temporary/constraints.txt" -e '.[test]'
pip check
pip list --format=freeze
python -m pytest -q -n 2 --dist loadfile "${tests[@]}"  # a file in one process: its fixtures run once
