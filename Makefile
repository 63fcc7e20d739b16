# Every target works on a fresh machine with make and Python 3.11 or newer: it builds .venv and installs what it
# needs, once per change of pyproject.toml.
#
#   make demo       train a tiny StateLM from nothing, let it act by itself, write runs/demo/ (DEMO_ARGS="--flag value")
#   make test       every test, slow ones included (PYTEST_ARGS="-k claim" narrows it)
#   make test-fast  without the slow ones
#   make lint       ruff: rules and layout          make format    let ruff repair both
#   make types      pyright                         make clean     remove .venv and build products
#
# PYTHON=/path/to/python3 chooses the interpreter of a new .venv; VENV=/path chooses where it lies.

VENV ?= .venv
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$p"; break; }; done)
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check
DEMO_ARGS ?=
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast lint format types dev clean

help:
	@sed -n '/^#   make/s/^#   //p' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.installed-base
	$(BIN)/statelm demo $(DEMO_ARGS)

test: dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-fast: dev
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

lint: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: dev
	$(BIN)/pyright --pythonpath $(BIN)/python

dev: $(VENV)/.installed-dev

$(VENV)/.installed-base: pyproject.toml | $(BIN)/python
	@echo "installing statelm-jax into $(VENV) (about 1 GB, about a minute)"
	@$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "installing statelm-jax[dev] into $(VENV) (about 1 GB, about a minute)"
	@$(PIP_INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.installed-base

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "statelm needs Python 3.11 or newer, and none was found on PATH;" \
		"install one, or name it: make PYTHON=/path/to/python3" >&2; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "statelm needs Python 3.11 or newer;" \
		"PYTHON=$(PYTHON) is not" >&2; exit 2; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments;" \
		"on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }
	@"$(PYTHON)" -m venv "$(VENV)"

clean:
	rm -rf $(VENV) build dist *.egg-info
