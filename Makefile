# `make serve` sets everything up and serves the default model; `make test` sets everything up and runs the tests.
PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ARGS   ?=
SPEED_ARGS ?=
# Test processes: each keeps to one core, a file of tests stays with one of them.
JOBS   ?= 2
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile
GPU_PYTEST := $(if $(wildcard $(BIN)/python),$(BIN)/python,python3) -m pytest

.PHONY: serve test test-full test-gpu lint format clean help

help:
	@echo "make serve      set up, then serve the default model on http://127.0.0.1:8000 (ARGS='--port 9000' passes flags)"
	@echo "make test       set up, then lint, type-check and run the tests"
	@echo "make test-full  everything, with the long products and fuzzing"
	@echo "make test-gpu   tests/gpu, on a machine with a GPU: first what is right, then how fast, alone (SPEED_ARGS for that)"

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; set PYTHON= to a Python 3.11 or 3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $(STAMP)

serve: $(STAMP)
	$(BIN)/hotswap serve $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: $(STAMP) lint
	$(PYTEST) -m "not full and not gpu" $(ARGS)

test-full: $(STAMP) lint
	$(PYTEST) -m "not gpu" $(ARGS)

test-gpu:
	@test -d tests/gpu || { echo "make: this version has no GPU platform and so no tests/gpu"; exit 1; }
	$(GPU_PYTEST) tests/gpu -m "gpu and not gpu_speed" $(ARGS)
	$(GPU_PYTEST) tests/gpu -m gpu_speed -rxX $(SPEED_ARGS)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
