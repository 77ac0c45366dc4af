# Everything a checkout needs besides Python (3.11 or newer) and make is installed into .venv.
#   make demo ARGS="--methods all"     arguments go to the demo
#   make demo EXTRAS=eval,cuda13       on an NVIDIA GPU
#   make test PYTHON=python3.12        another interpreter (a fresh VENV=... beside it)

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= eval
WORKERS ?= auto
ARGS ?=
# Alone: it asks for an older safetensors than the library, and for a tree that its models leave be.
TUNIX := google-tunix==0.1.7
COSMIC_RAY := cosmic-ray==8.7.0

BIN := $(VENV)/bin
DEMO_READY := $(VENV)/.demo-installed
TEST_READY := $(VENV)/.test-installed
DOCS_READY := $(VENV)/.docs-installed
# Tests of one method, or of one file, share compiled programs: one worker runs them. In order: of
# the files with few tests several are long, and would come last.
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Python and pytest keep what they compiled, even where the environment says otherwise.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-rest lint types wheel docs mutants

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(DEMO_READY)  ## a chat answer and a needle question under every cache, on a real model
	@$(BIN)/python -m kvjax.programs.demo $(ARGS)

test: lint types  ## lint, types and a core of the CPU tests, in minutes
	$(PYTEST) -m "not slow" $(ARGS)

test-all: lint types  ## lint, types and all CPU tests, sweeps too: before a release
	$(PYTEST) $(ARGS)

test-rest: $(TEST_READY)  ## the tests that `make test` leaves out, but for whole sweeps
	$(PYTEST) -m "slow and not sweep" $(ARGS)

lint: $(TEST_READY)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TEST_READY)  ## mypy over the three packages
	$(BIN)/mypy

wheel: $(TEST_READY)  ## dist/kvjax-<version>-py3-none-any.whl
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .

docs: $(DOCS_READY)  ## build/docs/index.html: the API reference; a warning is an error
	$(BIN)/python -m scripts.tools.reference --out build/docs

# In a copy of the last commit, and in an environment of its own.
mutants: $(TEST_READY)  ## put faults into FILE, one at a time: which do TESTS not notice?
	$(if $(and $(FILE),$(TESTS)),,$(error expected FILE=kvjax/methods/quest.py TESTS=tests/methods/test_quest.py))
	rm -rf build/mutants && git clone -q . build/mutants
	$(PYTHON) -m venv build/cosmic-ray && build/cosmic-ray/bin/pip install -qq $(COSMIC_RAY)
	cd build/mutants && printf '%s\n' '[cosmic-ray]' 'module-path = "$(FILE)"' 'timeout = 120' \
	  'excluded-modules = []' 'test-command = "$(abspath $(BIN))/pytest -xq -m \"not slow\" $(TESTS)"' \
	  '[cosmic-ray.distributor]' 'name = "local"' > mutants.toml
	cd build/mutants && export PYTHONPATH=$$PWD PATH=$(abspath build/cosmic-ray/bin):$$PATH && \
	  cosmic-ray init mutants.toml mutants.sqlite && cosmic-ray baseline mutants.toml && \
	  cosmic-ray exec mutants.toml mutants.sqlite && cr-report --surviving-only --show-diff mutants.sqlite

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
	  f"kvjax: $(PYTHON) is Python {v[0]}.{v[1]}, expected 3.11 or newer (make PYTHON=...)")'
	@echo "kvjax: making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(DOCS_READY): pyproject.toml | $(BIN)/python
	@$(BIN)/python -m pip install -qq --editable '.[docs,$(EXTRAS)]'
	@touch $@

# pip leaves what is already there, so that each stamp adds only its own.
$(DEMO_READY): pyproject.toml | $(BIN)/python
	@echo "kvjax: installing the library with [$(EXTRAS)], a minute or two the first time"
	@$(BIN)/python -m pip install -qq --editable '.[$(EXTRAS)]'
	@touch $@

$(TEST_READY): pyproject.toml | $(BIN)/python
	@echo "kvjax: installing the library with [test,$(EXTRAS)], a minute or two the first time"
	@$(BIN)/python -m pip install -qq --editable '.[test,integrations,$(EXTRAS)]'
	@$(BIN)/python -m pip install -qq --no-deps $(TUNIX)
	@touch $@ $(DEMO_READY)
