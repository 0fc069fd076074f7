# make demo | test | test-all | check; each sets up .venv first (tools/set_up.py);
# make bench sets up .venv-bench, make test-cuda .venv-cuda; make wheels downloads into wheels/.

PYTHON ?= python3
# make test TORCH=2.11.0: another torch, in an environment of its own, .venv-2.11.0.
OWN := $(if $(TORCH),-$(TORCH))
BIN := .venv$(OWN)/bin
# Of this make alone: tests call tools/set_up.py too.
unexport TORCH
# With it set, each of the hundreds of processes would compile its modules anew.
unexport PYTHONDONTWRITEBYTECODE
# Scripts import each other by file name, or as parts of `benchmarks`: mypy looks at each kind alone.
FOR_SCRIPTS := --implicit-reexport --allow-untyped-calls --no-warn-unused-ignores
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --dist worksteal -q

.PHONY: demo test test-all test-compiled test-cuda check bench wheels set-up-train set-up-dev set-up-bench set-up-cuda clean

demo: set-up-train
	$(BIN)/trainyard demo

test: set-up-dev
	$(PYTEST) -n 2

# make test-all MARKS=exhaustive: only what make test leaves out. Three at once, as those of clusters wait.
# PART=2/4: of the cases of tables only a part, REST=1/2: of the rest; the commits of CI take turns.
PART ?= 1/1
REST ?= 1/1
test-all: set-up-dev
	$(PYTEST) -n 3 -m '$(MARKS)' --part $(PART) --rest $(REST)

# Compiled equals eager, all cases: with TORCH=2.11.0 on another torch.
test-compiled: set-up-dev
	$(PYTEST) -n 2 -m '' --part $(PART) tests/model/test_compiled.py

CASES ?= tests/fake_cuda
test-cuda: set-up-cuda
	TORCH=$(TORCH) .venv-cuda$(OWN)/bin/python tests/fake_cuda/start.py -m pytest -n 2 --dist worksteal -q $(CASES) --part $(PART)

check: set-up-dev
	$(BIN)/ruff format --check src tests benchmarks tools
	$(BIN)/ruff check src tests benchmarks tools
	$(BIN)/mypy
	$(BIN)/mypy --strict tools/set_up.py
	$(BIN)/mypy -p tests.fake_cuda
	MYPYPATH=src:. $(BIN)/mypy $(FOR_SCRIPTS) $$(grep -L 'from benchmarks' benchmarks/*.py)
	MYPYPATH=src $(BIN)/mypy $(FOR_SCRIPTS) --explicit-package-bases $$(grep -rl 'from benchmarks' benchmarks --include=*.py)
	$(BIN)/lint-imports
	$(BIN)/shellcheck --shell=bash --exclude=SC2034,SC2154 src/trainyard/jobs/lib/*.sh
	$(BIN)/codespell src tests docs recipes benchmarks tools README.md CHANGELOG.md CONTRIBUTING.md

# An hour on an idle machine. Without network: make bench BENCH="--peers FOLDER", with clones in it.
bench: set-up-bench
	.venv-bench/bin/python benchmarks/suite.py $(BENCH)

# For machines without network that have this Python and platform.
wheels:
	$(PYTHON) -m pip wheel -c constraints.txt --wheel-dir wheels $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) '.[train]'
	@echo "there: python3 -m pip install --no-index --find-links wheels 'trainyard-gpt[train]'"

set-up-train set-up-dev set-up-bench set-up-cuda:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Trainyard needs Python 3.11 or newer\nhint: make PYTHON=python3.12 ...")'
	@TORCH=$(TORCH) $(PYTHON) tools/set_up.py $(@:set-up-%=%)

clean:
	rm -rf .venv .venv-* .peers runs wheels
