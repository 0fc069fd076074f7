# make demo | test | test-all | check | bench; each sets up .venv first (tools/set_up.py);
# make test-cuda sets up .venv-cuda; make wheels downloads into wheels/.

PYTHON ?= python3
BIN := .venv/bin
# With it set, each of the hundreds of processes would compile its modules anew.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -q

.PHONY: demo test test-all test-cuda check bench wheels set-up-train set-up-dev set-up-cuda clean

demo: set-up-train
	$(BIN)/trainyard demo

test: set-up-dev
	$(PYTEST)

# make test-all MARKS=exhaustive: only what make test leaves out.
test-all: set-up-dev
	$(PYTEST) -m '$(MARKS)'

test-cuda: set-up-cuda
	.venv-cuda/bin/python tests/fake_cuda/start.py -m pytest -n 2 --dist worksteal -q tests/fake_cuda

check: set-up-dev
	$(BIN)/ruff format --check src tests benchmarks tools
	$(BIN)/ruff check src tests benchmarks tools
	$(BIN)/mypy
	$(BIN)/mypy --strict tools/set_up.py
	$(BIN)/mypy -p tests.fake_cuda
	$(BIN)/lint-imports
	$(BIN)/shellcheck --shell=bash --exclude=SC2034,SC2154 src/trainyard/jobs/lib/*.sh
	$(BIN)/codespell src tests docs recipes benchmarks tools README.md CHANGELOG.md CONTRIBUTING.md

bench: set-up-dev
	$(BIN)/python benchmarks/sample_index.py
	$(BIN)/python benchmarks/merging.py
	$(BIN)/python benchmarks/bubble.py
	$(BIN)/python benchmarks/wrapping.py
	$(BIN)/python benchmarks/cpu_step.py

# For machines without network that have this Python and platform.
wheels:
	$(PYTHON) -m pip wheel -c constraints.txt --wheel-dir wheels $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) '.[train]'
	@echo "there: python3 -m pip install --no-index --find-links wheels 'trainyard-gpt[train]'"

set-up-train set-up-dev set-up-cuda:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Trainyard needs Python 3.11 or newer\nhint: make PYTHON=python3.12 ...")'
	@$(PYTHON) tools/set_up.py $(@:set-up-%=%)

clean:
	rm -rf .venv .venv-cuda runs wheels
