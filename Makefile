# make demo | test | test-all | check | bench; each sets up .venv first, pinned by constraints.txt.

PYTHON ?= python3
BIN := .venv/bin
SETUP := .venv/.set-up
# Hundreds of processes are started, which would compile Trainyard each time if nothing were kept.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -q

.PHONY: demo test test-all check bench clean

demo: $(SETUP)
	$(BIN)/trainyard demo

test: $(SETUP)
	$(PYTEST)

test-all: $(SETUP)
	$(PYTEST) -m ''

check: $(SETUP)
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell src tests docs recipes benchmarks README.md CHANGELOG.md CONTRIBUTING.md

bench: $(SETUP)
	$(BIN)/python benchmarks/sample_index.py
	$(BIN)/python benchmarks/merging.py
	$(BIN)/python benchmarks/bubble.py
	$(BIN)/python benchmarks/wrapping.py
	$(BIN)/python benchmarks/cpu_step.py

$(SETUP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Trainyard needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev]'
	touch $@

clean:
	rm -rf .venv runs
