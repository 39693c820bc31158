# `make run` and `make test` need nothing but Python 3.11 to 3.13, make, and a package index.
#
#   make test PYTHON=python3.12            another interpreter makes the environment
#   make test TORCH=torch==2.11.0          another torch
#   make run TORCH_INDEX=URL               torch, and torch alone, from another index
#   make test-gpu VENV= PYTHON=python3     no environment: use what this interpreter already has, install nothing

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.NOTPARALLEL:
MAKEFLAGS += --no-builtin-rules
# Byte code is written at first import, not by pip; without it every start would compile anew.
unexport PYTHONDONTWRITEBYTECODE

VENV ?= .venv
MODEL ?= smollm2-135m-instruct
PROMPT ?= Explain in two sentences why the sky is blue.
RESULTS ?= benchmarks/results
PYTEST_ARGS ?=
# Test processes side by side, each on its share of the CPUs.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 1); echo $$((n < 4 ? n : 4)))
BENCH_ARGS ?=
# Modules of benchmarks/kernels that declare a sweep.
KERNEL_BENCHES ?= $(basename $(notdir $(shell grep -l '^@benchmark' benchmarks/kernels/*.py)))

# The first interpreter on PATH that this package supports.
USABLE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	"$$p" -c '$(USABLE)' >/dev/null 2>&1 && { echo "$$p"; break; }; done)

# Without an NVIDIA driver, a version whose plain package is the small CPU build where the index offers one.
TORCH ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo 'torch>=2.11' || echo 'torch==2.13.0')
TORCH_INDEX ?=

ifeq ($(strip $(VENV)),)
PY := PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON)
BASE :=
TEST :=
BENCH :=
else
PY := $(VENV)/bin/python
BASE := $(VENV)/.installed-base
TEST := $(VENV)/.installed-dev
BENCH := $(VENV)/.installed-dev,bench
endif

.PHONY: help run test records test-floor test-interpreter test-compiles test-gpu test-gpu-here soak lint bench docs ext clean python FORCE

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | expand -t 14

run: $(BASE) ## make the environment, fetch the default model, and let it speak
	$(PY) -m rapid_llm.cli generate --chat --model "$(MODEL)" "$(PROMPT)"

test: test-floor test-compiles test-interpreter ## every test that this machine can run

# The files that say a mark: importing all others, too, would take each worker as long as many tests.
marked = $(shell grep -rlE --include='test_*.py' 'mark\.($(1))\b' tests)

# Rows that were edited since their records were made, or have none for this CPU, are proven first.
test-floor: $(TEST)
	$(PY) -m rapid_llm.cli kernels verify --device cpu --stale --write user
	RAPID_LLM_TEST_REQUIRE_MODEL=1 $(PY) -m pytest -n $(WORKERS) -m "not compiles and not emulated" $(PYTEST_ARGS)

test-compiles: $(TEST)
	$(PY) -m pytest -n $(WORKERS) -m compiles $(call marked,compiles) $(PYTEST_ARGS)

# What stands in for a GPU on a CPU: Triton's interpreter, and the emulation of CUDA kernels.
test-interpreter: $(TEST)
	TRITON_INTERPRET=1 $(PY) -m pytest -n $(WORKERS) -m "interpreter or emulated" \
		$(call marked,interpreter|emulated) $(PYTEST_ARGS)

# Where no environment exists yet and the interpreter at hand already has all that the tests need, that one is used.
GPU_READY := import torch, pytest, pytest_timeout, hypothesis, numpy, tokenizers, jinja2, typer, rich; \
	import sys; sys.exit(not torch.cuda.is_available())
test-gpu: ## the tests that need an NVIDIA GPU; their figures go to $(RESULTS)
	@if [ -n "$(strip $(VENV))" ] && [ ! -e "$(TEST)" ] && $(PYTHON) -c '$(GPU_READY)' 2>/dev/null; then \
		echo "$$($(PYTHON) -c 'import sys; print(sys.executable)') has torch with CUDA and all that the tests need: used as it is"; \
		$(MAKE) --no-print-directory test-gpu-here VENV=; \
	else \
		$(MAKE) --no-print-directory test-gpu-here; \
	fi

test-gpu-here: $(TEST)
	@$(PY) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else \
		f"test-gpu: torch {torch.__version__} sees no NVIDIA GPU here")'
	RAPID_LLM_TEST_REQUIRE_MODEL=1 $(PY) -m pytest -m gpu --result-file "$(RESULTS)/test-gpu-{machine}.json" $(PYTEST_ARGS)

SOAK ?= 10000
SOAK_SECONDS ?= 300
SOAK_CLIENTS ?= 64
soak: $(TEST) ## the engine's property test on SOAK=10000 requests, then SOAK_SECONDS=300 of load on a server
	$(PY) -m tests.engine.soak $(SOAK)
	$(PY) -m tests.server.soak $(SOAK_SECONDS) $(SOAK_CLIENTS)

lint: $(TEST) ## style, formatting and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(BENCH) ## every benchmark, each to its file in $(RESULTS); BENCH_ARGS=--force-busy to insist
	$(PY) -m benchmarks.dispatch --results "$(RESULTS)" $(BENCH_ARGS)
	$(PY) -m benchmarks.smollm2_cpu --results "$(RESULTS)" $(BENCH_ARGS)
	@for op in $(KERNEL_BENCHES); do $(PY) -m "benchmarks.kernels.$$op" --out "$(RESULTS)/kernels" $(BENCH_ARGS); done

# A richer CPU stands for the poorer ones too: torch's own variables limit its kernels, and ours follow them.
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
AVX512 := ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI
records: $(TEST) ## prove every row for every class of CPU that this one can stand for; the proofs ship
	for limits in "$(AVX2)" "$(AVX512)" ""; do \
		env $$limits $(PY) -m rapid_llm.cli kernels verify --device cpu --stale --write shipped; done

docs: $(BASE) ## write the pages that are generated from the declarations
	$(PY) docs/generate.py

ext: $(BASE) ## build the CUDA extension into this checkout; TORCH_CUDA_ARCH_LIST and MAX_JOBS are honoured
	$(PY) csrc/build.py

clean: ## remove the environment and everything that tools left behind (fetched models stay)
	rm -rf "$(or $(strip $(VENV)),.venv)" .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f rapid_llm/_C.abi3.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- the environment -------------------------------------------------------------------------------------------------

# Only errors are shown. pip compiles no byte code: that of all of torch would double the time.
PIP_INSTALL = $(VENV)/bin/python -m pip --disable-pip-version-check --no-input install -qq --no-compile
# A plain path entry: the default hook adds 15 ms to every start of this Python.
EDITABLE = --config-settings editable_mode=compat

python:
	@if [ -z "$(PYTHON)" ]; then \
		echo "No Python 3.11, 3.12 or 3.13 on PATH. Install one (Debian, Ubuntu: apt-get install python3 python3-venv)," >&2; \
		echo "or name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 1; fi
	@$(PYTHON) -c '$(USABLE)' 2>/dev/null || { \
		echo "PYTHON=$(PYTHON) is no Python 3.11, 3.12 or 3.13: $$($(PYTHON) --version 2>&1 | head -n 1)" >&2; exit 1; }

# Changes only when the request does, so that another TORCH reinstalls and the same one does not.
REQUEST := $(TORCH) $(TORCH_INDEX)
$(VENV)/.request: FORCE
	@mkdir -p $(@D); echo '$(REQUEST)' | cmp -s - $@ || echo '$(REQUEST)' >$@

# An environment of another Python version is made anew; any other is added to.
$(VENV)/.torch: $(VENV)/.request | python
	@clear=; [ ! -x $(VENV)/bin/python ] || [ "$$($(VENV)/bin/python -V)" = "$$($(PYTHON) -V)" ] || clear=--clear; \
		$(PYTHON) -m venv $$clear $(VENV) || { \
		echo "$(PYTHON) cannot make virtual environments (Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@echo "Installing $(TORCH) into $(VENV)"
	@$(PIP_INSTALL) $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") "$(TORCH)"
	@echo '$(REQUEST)' >$<; touch $@

$(VENV)/.installed-%: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "Installing rapid-llm$(if $(filter-out base,$*), with the extras $*) into $(VENV)"
	@$(PIP_INSTALL) -c constraints.txt $(EDITABLE) -e ".$(if $(filter-out base,$*),[$*])"
	@touch $@
