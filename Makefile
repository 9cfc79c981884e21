# `make demo` and `make test` are all a newcomer needs: both create .venv and install what they use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help demo test lint clean

help:
	@echo "make demo   run every kind of MLA prefill on this machine and check it"
	@echo "make test   lint, type-check and run the whole test suite"
	@echo "make clean  remove .venv and caches"

# A plain "torch" would pull gigabytes of CUDA packages onto a machine without a GPU, so the
# pinned build of constraints.txt goes in first.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/openmla demo

lint: $(STAMP)
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -n 2

clean:
	rm -rf $(VENV) .venv-* build *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
