# `make check` is what CI runs after the README's commands. Activate the environment first: . .venv/bin/activate

.PHONY: help check static test slow docs generated format

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

check: static test  ## everything that CI runs: style, types, import contracts, tests

static:  ## style, types and import contracts
	ruff check .
	ruff format --check .
	mypy
	lint-imports

test:  ## the fast tests
	python -m pytest -n 2

slow:  ## the slow tests: real compressions, and extras where they are installed
	python -m pytest -n 2 -m slow

docs:  ## build the documentation into site/, a warning is an error (pip install -c requirements-extras.txt -e '.[docs]')
	mkdocs build --strict

generated:  ## write every generated file again
	python tools/write_mlprojects.py
	python tools/write_methods_table.py
	python tools/write_task_table.py
	python tools/write_metric_reference.py
	@if [ -d ../shared/data/papers ]; then python tools/write_papers_page.py; fi

format:  ## format the code
	ruff format .
	ruff check --fix .
