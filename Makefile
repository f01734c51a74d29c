# `make` alone lists the targets.
SHELL := /bin/sh
.DEFAULT_GOAL := help

# Which Python makes the environment: PYTHON, else the first of these that is 3.11 or newer.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
BOOTSTRAP := $(shell for p in $(or $(PYTHON),python3 python3.11 python3.12 python3.13 python3.14); do "$$p" -c '$(NEW_ENOUGH)' 2>/dev/null && command -v "$$p" && break; done)
VENV_PYTHON := .venv/bin/python
# What test-integration runs.
TESTS := tests/integration
# What test-fast compares with.
BASE := HEAD

# The same seed gives the same run only if hashes of strings are the same too.
export PYTHONHASHSEED := 0

.PHONY: help setup vllm quantization kernels gguf lm-eval quickstart test test-fast test-integration lint format lock clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo '  setup takes PYTHON=python3.12 (another Python) and TORCH=cpu|rocm|cuda (another build of torch).'
	@echo '  test-integration takes TESTS=tests/integration/test_split.py (a file or a folder).'
	@echo '  Everything else is python launch/run.py, in .venv: .venv/bin/python launch/run.py --help'

setup: ## make .venv from the hashed locks; does nothing where it is up to date
	@if [ -z "$(BOOTSTRAP)" ]; then \
		echo 'error: no Python 3.11 or newer found. Name one (make setup PYTHON=python3.11) or install one (Debian 12, Ubuntu 24.04: apt-get install python3 python3-venv)' >&2; exit 2; fi
	@"$(BOOTSTRAP)" containers/environment.py

quickstart: setup ## train a small model from nothing: SFT, then GRPO, on this machine's CPU
	@$(VENV_PYTHON) launch/run.py experiment=quickstart

vllm: setup ## add vLLM for the CPU: smoke runs and tests of topology=split run whole
	@$(VENV_PYTHON) containers/add_ons.py vllm

quantization: setup ## add torchao and bitsandbytes: precision=fp8 and nf4, and the benchmarks' rows of both
	@$(VENV_PYTHON) containers/add_ons.py quantization

kernels: setup ## add Triton and Liger's kernels: recipes.tune.occupancy and its tests compile them for AMD GPUs, with none there
	@$(VENV_PYTHON) containers/add_ons.py kernels

gguf: setup ## add the package gguf: method=export with gguf, and recipes.from_gguf
	@$(VENV_PYTHON) containers/add_ons.py gguf

lm-eval: setup ## add lm-evaluation-harness: method.args.lm_eval_tasks of method=evaluate
	@$(VENV_PYTHON) containers/add_ons.py lm-eval

test: setup ## unit and end-to-end tests; need nothing but Python
	$(VENV_PYTHON) -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder tests/e2e tests --ignore=tests/integration

test-fast: setup ## unit tests of the rooms that differ from the commit BASE (HEAD)
	@rooms=$$(git status --porcelain --untracked-files=all | cut -c4-; git diff --name-only $(BASE)); \
	rooms=$$(echo "$$rooms" | sed -nE 's#^(tests/)?((launch|recipes)/[^/]+|containers|conf)/.*#tests/\2#p' | sort -u); \
	tests=$$(for room in $$rooms; do [ ! -d "$$room" ] || echo "$$room"; done); \
	if [ -z "$$tests" ]; then echo "no room with tests of its own differs from $(BASE)"; \
	else $(VENV_PYTHON) -m pytest --numprocesses 2 --dist load $$tests; fi

test-integration: setup ## tests that need more than Python: what is missing is skipped, and named
	$(VENV_PYTHON) -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations=20 $(TESTS)

lint: setup ## ruff, mypy, and which room of launch/ may import which
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m mypy
	.venv/bin/lint-imports

format: setup ## let ruff rewrite what it can
	$(VENV_PYTHON) -m ruff check --fix .
	$(VENV_PYTHON) -m ruff format .

lock: setup ## resolve containers/cpu/*.in anew, and the argument lists of the locked TRL and vLLM
	$(VENV_PYTHON) containers/lock.py
	@"$(BOOTSTRAP)" containers/environment.py
	-@$(VENV_PYTHON) containers/add_ons.py vllm
	$(VENV_PYTHON) containers/lock_trainer_args.py

clean: ## remove .venv and caches; runs/ stays
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
