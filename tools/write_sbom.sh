#!/usr/bin/env bash
# Writes what an environment has, with versions, licences and what needs what, as a CycloneDX bill of materials:
#   tools/write_sbom.sh ENVIRONMENT FILE.json
# The same environment gives the same bytes. The tool lives in an environment of its own, so that it does not list itself.
set -euo pipefail
[ $# -eq 2 ] || { echo "usage: $0 ENVIRONMENT FILE.json" >&2; exit 2; }
tool=$(mktemp -d)
trap 'rm -rf "$tool"' EXIT
python3 -m venv "$tool"
"$tool/bin/pip" install -q 'cyclonedx-bom>=7,<8'
mkdir -p "$(dirname "$2")"
"$tool/bin/cyclonedx-py" environment --output-reproducible --validate --pyproject "$(dirname "$0")/../pyproject.toml" \
  --output-format JSON --output-file "$2" "$1/bin/python"
