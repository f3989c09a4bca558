# Every target does its own set-up in .venv; nothing but Python 3.11 to 3.13, git and make is needed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
USABLE := $(VENV)/.usable
STAMP  := $(VENV)/.installed
# The tests that the version of Python can affect: sockets, asyncio, regular expressions, processes, threads.
VERSION := $(addprefix tests/,capture/privacy channel cli/test_entry.py cli/test_tap.py load/workers meter/admin \
           meter/pipeline/test_receiver.py meter/test_handover.py meter/test_process.py net protocol/test_http1.py \
           supervisor top vantage/middleware vantage/relay/test_process.py)
# Extras for users; the other extras are for developers.
RUNTIME := tokenizers,bench,gpu,grpc,ray,top
# The tests that compiled code can affect: frames, streams, heads, relay, and the observer with its repeated events.
TWICE  := $(addprefix tests/,channel exchange native net proxy/test_fixtures_live.py vantage/relay) \
          $(wildcard tests/protocol/test_*.py)
# Tests that also rewrite tables of documents.
TABLES := tests/capture/test_format_doc.py tests/docs/test_compliance.py tests/exchange/test_bounds.py
PIP    := $(BIN)/python tests/support/install.py -c constraints.txt
# Markers of ordinary tests; the other tests run in `make e2e`.
ORDINARY := not browser and not ray and not realtime
PYTEST := $(BIN)/pytest -rs -n auto --dist loadfile --no-loadscope-reorder
# Tests start hundreds of processes. Without cached bytecode each of them would compile the package again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup demo test pytest test-python test-thread test-version golden fuzz sanitize lint fmt size docs audit sbom bench e2e wheel image-check clean

help:  ## list the targets
	@$(PYTHON) -c 'import re; [print(f"{t:13}{h}") for t, h in re.findall(r"^([a-z0-9-]+):.*## (.+)", open("Makefile").read(), re.M)]'

# Only the packages that the README's commands need, so that the first installation is short.
$(USABLE): pyproject.toml constraints.txt setup.py $(wildcard llmtap/native/*.p* llmtap/native/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) and "llmtap needs Python 3.11, 3.12 or 3.13; set PYTHON=")'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) -e '.[bench,top]'
	@touch $@

$(STAMP): $(USABLE)
	@$(PIP) --extra dev
	@touch $@

setup: $(STAMP)  ## install into .venv

demo: $(USABLE)  ## run a simulated engine, a proxy and 30 s of load; then print the cost of a guardrail
	$(BIN)/llmtap demo

# Both at once: mypy uses one core, and many tests wait.
test: $(STAMP)  ## lint, types, layers, and all tests except those of `make e2e`
	@$(MAKE) --no-print-directory --jobs=2 lint pytest

pytest: $(STAMP)
	$(PYTEST) -m '$(ORDINARY)'

golden: $(STAMP)  ## rewrite the expected outputs and generated tables (FORMAT.md, SECURITY.md, compliance.md); then read `git diff`
	$(BIN)/pytest -n 0 tests/golden tests/report $(TABLES) --rewrite-golden

test-python: $(STAMP)  ## run the tests that compiled code can affect, with the Python implementation
	LLMTAP_NATIVE=0 $(PYTEST) -m 'not once' $(TWICE)

test-thread: $(STAMP)  ## run the tests of the relay with the forwarding thread
	TEST_FORWARDING_THREAD=1 $(PYTEST) -m 'not once' tests/vantage/relay

test-version: $(VENV)/.test  ## run the tests that the version of Python can affect: VENV=.venv-3.13 PYTHON=python3.13
	$(PYTEST) -m '$(ORDINARY) and not machine and not once' $(VERSION)

$(VENV)/.test: $(USABLE)
	@$(PIP) --extra test
	@touch $@

FUZZ   ?=
INPUTS ?= 10000000
SEED   ?= 1

fuzz: $(STAMP)  ## fuzz parsers and framing against oracles: FUZZ=TARGET (default: all) INPUTS=N SEED=N
	$(BIN)/python -m tests.native.fuzz $(FUZZ) --inputs $(INPUTS) --seed $(SEED)

sanitize: $(STAMP)  ## test the compiled code under the sanitizers for addresses, undefined behaviour and threads (gcc)
	$(BIN)/python tests/native/sanitize.py

lint: $(STAMP)  ## run ruff, mypy and import-linter, and check the prose of the pages
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo >$(VENV)/.imports || (cat $(VENV)/.imports; false)
	@$(BIN)/python tests/support/prose.py
	@echo "lint: ok (ruff, mypy, import-linter, prose)"

fmt: $(STAMP)  ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python tests/support/prose.py --fix

size:  ## count lines, modules, repeated names and import cycles, with their limits
	@$(PYTHON) tests/support/size.py

docs: $(VENV)/.docs  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/.docs: $(STAMP)
	@$(PIP) --extra docs
	@touch $@

audit: $(VENV)/.audit  ## check the pinned versions for known vulnerabilities (needs internet access)
	$(BIN)/pip-audit --requirement constraints.txt --strict --no-deps --disable-pip --progress-spinner off

# Installed and taken out again: what is left is what it needs. Nothing of this machine comes into the file.
sbom: $(VENV)/.audit  ## write the bill of materials, deploy/sbom.cdx.json (CycloneDX)
	rm -rf $(VENV)-runtime
	$(PYTHON) -m venv --without-pip $(VENV)-runtime
	$(BIN)/pip --python $(VENV)-runtime install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(RUNTIME)]'
	$(BIN)/pip --python $(VENV)-runtime uninstall --quiet --yes llmtap
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file deploy/sbom.cdx.json $(VENV)-runtime
	$(BIN)/python deploy/sbom.py $(VENV)-runtime

$(VENV)/.audit: $(STAMP)
	@$(PIP) --extra audit
	@touch $@

bench: $(STAMP)  ## compare the relay with nginx, HAProxy and LLM gateways (see benchmarks/relay/README.md)
	$(BIN)/python benchmarks/relay/run.py

e2e: $(STAMP)  ## test with a real engine, gateway, clients, Prometheus, browser and Ray
	$(BIN)/python tests/e2e/together.py prometheus,fleet,middleware,sdks environments,marked,clients
	$(BIN)/python tests/e2e/run.py
	$(BIN)/python tests/e2e/packets.py
	$(BIN)/python tests/e2e/pairs.py
	$(BIN)/python tests/e2e/replay.py
	$(BIN)/python tests/e2e/gates.py

wheel:  ## build a wheel into dist/, and test its installation without a compiler (see tests/e2e/README.md)
	$(PYTHON) tests/e2e/wheel.py

image-check: $(STAMP)  ## build deploy/Containerfile with podman and test the image; needs root (see tests/e2e/README.md)
	$(BIN)/python tests/e2e/image.py

clean:  ## remove the files that the targets made
	rm -rf $(VENV) $(VENV)-runtime build dist site .e2e .mypy_cache .ruff_cache .pytest_cache .hypothesis benchmarks/relay/build benchmarks/load/build
