# Every target prints `NAME: key=value …` as its last line and fails when it falls short.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.leyden-installed
SEED ?= 0
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

.PHONY: setup demo demo-resume test lint format audit conformance conformance-light conformance-all faults faults-controller fuzz bench bench-engine bench-gateway bench-controller clean

setup: $(STAMP)
	@echo "setup: python=$$($(BIN)/python -c 'import platform; print(platform.python_version())') torch=$$($(BIN)/python -c 'import torch; print(torch.__version__)') leyden=$$($(BIN)/python -c 'import importlib.metadata as m; print(m.version("leyden"))')"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/python examples/calculator/demo.py --seed $(SEED) $(ARGS)

demo-resume: $(STAMP)
	@$(BIN)/python examples/calculator/demo.py --seed $(SEED) --resume $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m tests.run $(ARGS)

# Real harnesses through the gateway; each is installed once into Leyden's cache. `light` are those that install quickly.
conformance: $(STAMP)
	@$(BIN)/python -m tests.conformance.run $(ARGS)

conformance-light: $(STAMP)
	@$(BIN)/python -m tests.conformance.run --light $(ARGS)

conformance-all: $(STAMP)
	@$(BIN)/python -m tests.conformance.run --all $(ARGS)

lint: $(STAMP)
	@$(BIN)/ruff format --check leyden tests examples benchmarks
	@$(BIN)/ruff check leyden tests examples benchmarks
	@$(BIN)/pyright --warnings leyden
	@echo "lint: ruff=ok pyright=ok"

format: $(STAMP)
	@$(BIN)/ruff check --fix-only --quiet leyden tests examples benchmarks
	@$(BIN)/ruff format leyden tests examples benchmarks
	@echo "format: done=1"

audit: $(STAMP)
	@$(BIN)/leyden audit --calls 50 $(ARGS)

faults: $(STAMP)
	@$(BIN)/python -m tests.faults.run $(ARGS)

faults-controller: $(STAMP)
	@$(BIN)/python -m tests.faults.controllers $(ARGS)

fuzz: $(STAMP)
	@$(BIN)/python -W ignore -m tests.fuzz.run --seed $(SEED) $(ARGS)

bench: bench-engine bench-gateway bench-controller

bench-engine: $(STAMP)
	@$(BIN)/python benchmarks/bench_engine.py $(ARGS)

bench-gateway: $(STAMP)
	@$(BIN)/python -m benchmarks.bench_gateway $(ARGS)

bench-controller: $(STAMP)
	@$(BIN)/python -m benchmarks.bench_controller $(ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	@echo "clean: done=1"
