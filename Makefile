# Everything a fresh clone needs: Python >= 3.11, pip, make and a C compiler. `make help` lists the targets.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo docs test test-all check lint format messages durations install clean

VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PROJECTS := pyproject.toml $(sort $(wildcard plugins/*/pyproject.toml))
PLUGINS := $(patsubst plugins/%/pyproject.toml,%,$(sort $(wildcard plugins/*/pyproject.toml)))
EDITABLES := -e . $(foreach plugin,$(PLUGINS),-e plugins/$(plugin))
EXTRAS := 'slapo-core[dev]' $(foreach plugin,$(PLUGINS),'$(plugin)[test]')
PYTEST_ARGS ?=
# D=slapo-tp: the tests of one distribution.
D ?=
TESTS = $(if $(D),$(shell $(PYTHON) tools/distributions.py $(D)))
# The commit that `make check` compares with, and seconds for unit tests of what requires the changed distributions.
BASE ?= HEAD~1
SAMPLE ?= 15
# On two cores: one process more than cores, because tests that start ranks wait for much of their time.
TEST_PROCESSES ?= 3
PYTEST = $(PYTHON) -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TOKENIZERS_PARALLELISM := false
export OMP_NUM_THREADS := 1
# Hundreds of processes import slapo and its tests: they are compiled once.
unexport PYTHONDONTWRITEBYTECODE

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1 #\2/p' $(MAKEFILE_LIST) | awk -F'#' '{ printf "%-15s %s\n", $$1, $$2 }'

demo: $(STAMP)  ## train a BERT on two processes and compare it with one
	$(PYTHON) examples/bert_tp.py

test: $(STAMP)  ## style, import contracts and the tests, of long tables a sample (D=slapo-tp: of one distribution)
	@set -e; tests="$(TESTS)"; [ -z "$(D)" ] || [ -n "$$tests" ]; \
	$(PYTEST) --durations=20 --durations-min=1 $(PYTEST_ARGS) $$tests

test-all: $(STAMP)  ## every test, the whole tables, and the tests of each distribution where nothing else is installed
	SLAPO_TEST_WHOLE=1 $(PYTEST) --durations=20 --durations-min=1 $(PYTEST_ARGS)
	$(PYTHON) tools/alone.py

check: lint  ## style, types, import contracts, budgets, versions, and unit tests of what changed since BASE (default HEAD~1), with a sample of what requires it
	@set -e; tests="$$($(PYTHON) tools/distributions.py --since $(BASE) --sample $(SAMPLE))"; \
	if [ -z "$$tests" ]; then echo "no distribution changed since $(BASE)"; else \
	    echo "unit tests: $$tests"; $(PYTEST) -q -m 'not ranks and not slow' $(PYTEST_ARGS) $$tests; fi

lint: $(STAMP)  ## style, types, import contracts, budgets of code lines and versions only
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(VENV)/bin/lint-imports
	$(PYTHON) tools/budget.py
	$(PYTHON) tools/release.py --check

docs: $(STAMP)  ## build the site in build/site, with its search, and check links and anchors
	@$(PYTHON) -c "import furo, myst_parser, sphinx_copybutton" 2>/dev/null || \
	    $(PYTHON) -m pip install -qq -c constraints.txt 'slapo-core[docs]'
	$(PYTHON) -m sphinx --quiet --fail-on-warning --keep-going --fresh-env --builder html docs build/site
	@echo "build/site/index.html"

messages: $(STAMP)  ## write the golden files of error messages again, as the tests find them (D=...)
	$(PYTEST) --update-messages $(PYTEST_ARGS) $(TESTS)

durations: $(STAMP)  ## record how long the tests of each file take, by which `make test` sorts them
	$(PYTEST) --record-durations $(PYTEST_ARGS)

format: $(STAMP)  ## rewrite the sources in the project's style
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

install: $(STAMP)  ## make .venv with everything in it

clean:  ## remove .venv, caches and build results
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist plugins/*/build plugins/*/dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone: its version decides what else is downloaded, and it is by far the largest part.
$(STAMP): $(PROJECTS) constraints.txt
	@python=; \
	for candidate in python3 python3.14 python3.13 python3.12 python3.11; do \
	    if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "slapo needs Python >= 3.11; found: $$(python3 --version 2>/dev/null || echo no python3). Install it, or put it first on PATH." >&2; exit 1; \
	fi; \
	if ! $(PYTHON) -m pip --version >/dev/null 2>&1; then \
	    echo "[1/3] making $(VENV) with $$($$python --version)"; \
	    rm -rf $(VENV); \
	    $$python -m venv $(VENV) || { echo "could not make $(VENV): on Debian and Ubuntu, install the package python3-venv." >&2; exit 1; }; \
	fi
	@quiet=; [ -t 1 ] || quiet=-qq; \
	echo "[2/3] installing $$(grep '^torch==' constraints.txt) (minutes the first time)"; \
	$(PYTHON) -m pip install $$quiet -c constraints.txt torch && \
	echo "[3/3] installing slapo, its plugins and the development tools" && \
	$(PYTHON) -m pip install $$quiet -c constraints.txt $(EDITABLES) && \
	$(PYTHON) -m pip install $$quiet -c constraints.txt $(EXTRAS)
	@touch $@
