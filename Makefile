# Each target sets itself up: a virtual environment in .venv, with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-all parity conformance lint bench clean

demo: .venv/.installed-recipes
	$(BIN)/python -m recipes.demo

test: lint
	$(BIN)/python -m pytest -m "not slow and not gpu" --durations=10

test-all: lint
	$(BIN)/python -m pytest -m "not gpu" --durations=20

# Every architecture that is served, against the stock model: about 20 minutes on 2 cores
parity: .venv/.installed
	$(BIN)/python -m tests.parity --write docs/support.md

# Lightning's own tests: LIGHTNING_TESTS=/path/to/pytorch-lightning/tests/tests_pytorch
conformance: .venv/.installed-dev
	$(BIN)/python -m tests.conformance $(LIGHTNING_TESTS)

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/.installed
	$(BIN)/python -m benchmarks.attention_cpu
	$(BIN)/python -m benchmarks.dispatch_overhead
	$(BIN)/python -m benchmarks.balance

.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/.installed-recipes: .venv/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[recipes]"
	touch $@

.venv/.installed-dev: .venv/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
