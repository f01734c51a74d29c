# `make` alone lists the targets.
SHELL := /bin/sh
.DEFAULT_GOAL := help

# The Python that makes the environment: PYTHON, or else the first that is 3.11 or newer, also of uv.
UV ?= uv
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
BOOTSTRAP := $(shell for p in $(or $(PYTHON),python3 python3.11 python3.12 python3.13 python3.14); do "$$p" -c '$(NEW_ENOUGH)' 2>/dev/null && command -v "$$p" && exit; done; [ -n "$(PYTHON)" ] || "$(UV)" python find --system '>=3.11' 2>/dev/null)
VENV_PYTHON := .venv/bin/python
# Tests that test-integration runs.
TESTS := tests/integration
# The commit that test-fast compares with.
BASE := HEAD

# Runs with the same seed are equal only if hashes of strings are equal too.
export PYTHONHASHSEED := 0

.PHONY: help setup setup-in-image vllm quantization kernels gguf lm-eval quickstart test test-fast test-integration lint format lock docs clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo '  Options of setup: PYTHON=python3.12 (another Python), UV=<path of uv>, TORCH=cpu|rocm|cuda (another build of torch).'
	@echo '  Option of test-integration: TESTS=tests/integration/test_split.py (a file or a folder).'
	@echo '  For everything else, use launch/run.py: .venv/bin/python launch/run.py --help'

setup: ## make .venv from the hashed locks, unless it is up to date
	@python="$(BOOTSTRAP)"; \
	if [ -z "$${python}$(PYTHON)" ] && command -v "$(UV)" >/dev/null; then \
		"$(UV)" python install 3.12 && python=$$("$(UV)" python find --system 3.12); fi; \
	if [ -z "$$python" ]; then \
		echo 'error: no Python 3.11 or newer found. Name one (make setup PYTHON=python3.11), install one (Debian 12, Ubuntu 24.04: apt-get install python3 python3-venv), or let uv fetch one: python3 -m pip install --user uv, then make setup UV=$$HOME/.local/bin/uv' >&2; exit 2; fi; \
	"$$python" containers/environment.py

setup-in-image: export TORCH = image
setup-in-image: setup ## inside a rented container: add our packages to the torch and vLLM of its image

quickstart: setup ## train a small model from random weights on the CPU: SFT, then GRPO
	@$(VENV_PYTHON) launch/run.py experiment=quickstart

vllm: setup ## add vLLM for the CPU, for smoke runs and tests of topology=split
	@$(VENV_PYTHON) containers/environment.py --add vllm

quantization: setup ## add torchao and bitsandbytes, for precision=fp8 and nf4 and their rows in benchmarks
	@$(VENV_PYTHON) containers/environment.py --add quantization

kernels: setup ## add Triton and Liger, with which recipes.tune.occupancy compiles for AMD GPUs without a GPU
	@$(VENV_PYTHON) containers/environment.py --add kernels

gguf: setup ## add the package gguf, for recipes.from_gguf and method=export to GGUF
	@$(VENV_PYTHON) containers/environment.py --add gguf

lm-eval: setup ## add lm-evaluation-harness, for method.args.lm_eval_tasks of method=evaluate
	@$(VENV_PYTHON) containers/environment.py --add lm-eval

# The longest files first, so that both processes end together. Without bytecode, each of the hundred
# programs that the tests start would compile launch/ again, for 0.2 s.
test: setup ## unit and end-to-end tests, which need only Python
	PYTHONDONTWRITEBYTECODE= $(VENV_PYTHON) -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder \
		tests/e2e tests/recipes tests --ignore=tests/integration

test-fast: setup ## unit tests of the folders that differ from the commit BASE (default: HEAD)
	@rooms=$$(git status --porcelain --untracked-files=all | cut -c4-; git diff --name-only $(BASE)); \
	rooms=$$(echo "$$rooms" | sed -nE 's#^(tests/)?((launch|recipes)/[^/]+|containers|conf)/.*#tests/\2#p' | sort -u); \
	tests=$$(for room in $$rooms; do [ ! -d "$$room" ] || echo "$$room"; done); \
	if [ -z "$$tests" ]; then echo "no folder with unit tests differs from $(BASE)"; \
	else $(VENV_PYTHON) -m pytest --numprocesses 2 --dist load $$tests; fi

# Three processes for two cores, because builds of images and jobs of Slurm wait. One thread per rank,
# because threads that share a core wait for each other.
test-integration: setup ## tests that need more than Python; skips tests whose requirements are missing
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(VENV_PYTHON) -m pytest --numprocesses 3 --dist loadfile \
		--no-loadscope-reorder --durations=20 $(TESTS)

lint: setup ## ruff, mypy, and the import rules of launch/
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m mypy
	.venv/bin/lint-imports

format: setup ## fix and format the code with ruff
	$(VENV_PYTHON) -m ruff check --fix .
	$(VENV_PYTHON) -m ruff format .

lock: setup ## resolve containers/cpu/*.in again, and update the argument lists of TRL and vLLM
	$(VENV_PYTHON) containers/lock.py
	@"$(BOOTSTRAP)" containers/environment.py
	-@$(VENV_PYTHON) containers/environment.py --add vllm
	$(VENV_PYTHON) containers/lock_trainer_args.py

docs: .venv-docs/docs.lock ## build the documentation into site/; a dead link or anchor is an error
	.venv-docs/bin/python -m mkdocs build --strict

# An environment of its own. The copy of the lock marks it as complete.
.venv-docs/docs.lock: containers/cpu/docs.lock
	@if [ -z "$(BOOTSTRAP)" ]; then echo 'error: make docs needs Python 3.11 or newer. Specify one: make docs PYTHON=python3.11' >&2; exit 2; fi
	"$(BOOTSTRAP)" -m venv --clear .venv-docs
	.venv-docs/bin/python -m pip install --disable-pip-version-check --no-input --quiet --require-hashes -r $<
	cp $< $@

clean: ## remove .venv, .venv-docs, site/ and caches, but keep runs/
	rm -rf .venv .venv-docs site .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
