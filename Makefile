# `make run` and `make test` do all the set-up: a virtual environment, the package, what tests need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A process a core; what starts Ray stays in one of them.
PARALLEL := -n auto --dist loadgroup

.PHONY: run test quick lint types check benchmarks
.DEFAULT_GOAL := run

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The stamps make a second `make` start at once; a change of the dependencies installs again.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/.installed

run: $(VENV)/.installed
	$(BIN)/raypfl run configs/quickstart.yaml

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL)

quick: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) -m 'not slow'

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

types: $(VENV)/.installed-dev
	$(BIN)/mypy

check: lint types test

# A new folder every day, since results are never overwritten. Also with Ray: BENCH= make benchmarks.
BENCH ?= --local
benchmarks: $(VENV)/.installed
	$(BIN)/raypfl bench $(BENCH) --out tests/benchmarks/$(shell date +%F)$(if $(BENCH),,-ray)
