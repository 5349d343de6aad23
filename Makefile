# The whole set-up is two commands: make demo, make test.
VENV ?= .venv
PYTHON ?= python3
# A torch requirement other than the pinned one, e.g. make env TORCH=torch==2.11.0
TORCH ?=
# Test processes at a time; each may start three ranks of its own.
JOBS ?= 2
# More arguments for pytest, e.g. make test ARGS=tests/data
ARGS ?=

BIN := $(VENV)/bin
DEMO_ENV := $(VENV)/.made-demo
DEV_ENV := $(VENV)/.made-dev
SOURCES := pyproject.toml constraints.txt .ci/environment .ci/system-packages .ci/engines

export PYTHON TORCH

.DEFAULT_GOAL := help
.PHONY: help env engines demo test matrix bench lint style types floors clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: $(DEV_ENV) ## the environment in .venv with all that tests and checks need; at once when nothing changed

$(DEMO_ENV): $(SOURCES)
	@.ci/system-packages
	@.ci/environment $(VENV) demo
	@touch $@

$(DEV_ENV): $(SOURCES)
	@.ci/system-packages tests
	@.ci/environment $(VENV) dev
	@.ci/engines $(VENV)
	@touch $(DEMO_ENV) $@

engines: $(DEMO_ENV) ## DeepSpeed, and Horovod built for the environment's torch (minutes, once: the wheel is kept)
	@.ci/system-packages engines
	@.ci/engines $(VENV)

demo: $(DEMO_ENV) ## trains real digits, is killed, goes on on other world sizes, ends on the same curve
	$(BIN)/python examples/digits/demo.py

test: $(DEV_ENV) ## the tests (about half an hour on 2 cores)
	@.ci/system-packages tests
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

matrix: $(DEV_ENV) ## the full products: every layout times every layout
	@.ci/system-packages tests
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m matrix $(ARGS)

bench: $(DEV_ENV) ## our numbers beside those of the peers
	$(BIN)/python benchmarks/run_all.py

lint: style types floors ## ruff (all rules, format), mypy (strict), import floors

style: $(DEV_ENV)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(DEV_ENV)
	$(BIN)/mypy

floors: $(DEV_ENV)
	$(BIN)/lint-imports

clean: ## removes the environment and every cache; runs stay
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
