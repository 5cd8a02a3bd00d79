# CI runs the static checks after the README's commands. Activate the environment first: . .venv/bin/activate

.PHONY: help check static test slow processors slow-machine docs generated format range-low range-high

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

check: static test  ## style, types, import contracts, tests (CI runs the documentation and some slow tests too)

static:  ## style, types and import contracts
	ruff check .
	ruff format --check .
	mypy
	lint-imports

test:  ## the fast tests
	python -m pytest -n 2

slow:  ## the slow tests: real compressions, and extras where they are installed
	python -m pytest -n 2 -m slow

processors:  ## the numerical tests with the vector instructions of this processor, of AVX2, and of SSE (x86-64)
	tools/test_processors.sh

slow-machine:  ## the fast tests on a busy machine, on one core, with slow imports and sleeps, and in another order (hours)
	tools/test_slow_machine.sh

docs:  ## build the documentation into site/, a warning is an error (pip install -c requirements-extras.txt -e '.[docs]')
	mkdocs build --strict

range-low:  ## test every direct dependency at its lower bound, in a fresh environment (several GB)
	tools/test_dependency_range.sh low

range-high:  ## test the newest dependencies that the ranges allow, in a fresh environment (several GB)
	tools/test_dependency_range.sh high

generated:  ## write every generated file again
	python tools/write_mlprojects.py
	python tools/write_stub.py
	python tools/write_methods_table.py
	python tools/write_task_table.py
	python tools/write_metric_reference.py
	python tools/write_papers_page.py
	python tools/write_demo_table.py

format:  ## format the code
	ruff format .
	ruff check --fix .
