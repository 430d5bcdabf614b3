# Each target sets itself up: a virtual environment in .venv, with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
# Every process imports a thousand modules: compiled once, where a shell asks for no bytecode, too.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test pytest test-all test-with parity conformance faults lint bench clean

demo: .venv/.installed-recipes
	$(BIN)/python -m recipes.demo

# Side by side: lint takes seconds with its caches, and a minute of one core without them.
test: .venv/.installed-dev
	$(MAKE) --no-print-directory --jobs=2 lint pytest

pytest: .venv/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not gpu" --durations=10

test-all: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu" --durations=20

# The tests with other versions, in an environment of their own: WITH="torch==2.11.0 transformers==5.17.0"
test-with:
	test -n "$(WITH)"
	test -x .venv-with/bin/python || $(PYTHON) -m venv .venv-with
	.venv-with/bin/python -m pip install --quiet --editable ".[dev]" $(WITH)
	.venv-with/bin/python -m pytest -m "not slow and not gpu" $(TESTS)

# Every architecture that is served, against the stock model: an hour and a half on 2 cores.
# RESULTS=FILE keeps results, so that a second run continues the first.
parity: .venv/.installed
	$(BIN)/python -m tools.parity --write docs/support.md $(if $(RESULTS),--results $(RESULTS))

# Lightning's own tests: LIGHTNING_TESTS=/path/to/pytorch-lightning/tests/tests_pytorch
conformance: .venv/.installed-dev
	$(BIN)/python -m tools.conformance $(LIGHTNING_TESTS)

# Each fault of a rank under each launcher: half an hour on 2 cores; as root, for a small disk. Where
# ray is installed also under Ray Train: half an hour more.
faults: .venv/.installed-dev
	$(BIN)/python -m tools.faults --write docs/faults.md $(if $(RESULTS),--results $(RESULTS))

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
	rm -rf .venv .venv-with build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
