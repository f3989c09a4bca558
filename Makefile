# Every target does its own set-up in .venv; nothing but Python 3.11+, git and make is needed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help setup demo test lint fmt bench e2e clean

help:  ## this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "llmtap needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(STAMP)  ## install into .venv

demo: $(STAMP)  ## bursts of requests through the tap to a simulated engine with a guardrail; then the table and a verdict
	$(BIN)/llmtap demo

test: lint  ## lint, types, layers, then every test
	$(BIN)/pytest -n auto --dist loadfile

lint: $(STAMP)  ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: $(STAMP)  ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)  ## the relay beside nginx, HAProxy and LLM gateways (see benchmarks/relay/README.md)
	$(BIN)/python benchmarks/relay/run.py

e2e: $(STAMP)  ## a real engine, gateway, client and Prometheus, with the tap between them; clients of the simulated one
	$(BIN)/python e2e/prometheus.py
	$(BIN)/python e2e/run.py
	$(BIN)/python e2e/replay.py
	$(BIN)/python e2e/clients.py
	$(BIN)/python e2e/middleware.py

clean:  ## remove what the targets made
	rm -rf $(VENV) .e2e .mypy_cache .ruff_cache .pytest_cache .hypothesis benchmarks/relay/build benchmarks/load/build
