# `make demo` and `make test` need no separate set-up: each creates .venv once (see scripts/setup_env.py).
# PYTHON=/path/to/python uses that environment unchanged instead; what needs a missing package is skipped, with reasons.
# ARGS=... is passed to the program that is run: make test ARGS="tests/pack -x"

PYTHON ?=
ARGS ?=
# Runs the set-up script. Candidates are run to get their version: a shim may have the name without the version.
ANY_PYTHON = $(or $(shell for name in python3.11 python3; do \
	$$name -c 'import sys; assert sys.version_info >= (3, 8)' 2>/dev/null && echo $$name && break; done), \
	$(error no Python 3.8 or newer on PATH))

ifeq ($(PYTHON),)
# The caller's PYTHONPATH could shadow pinned packages.
RUN := env -u PYTHONPATH -u PYTHONHOME .venv/bin/python
setup = $(ANY_PYTHON) scripts/setup_env.py
else
RUN := env PYTHONPATH="$(CURDIR)/kernels:$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON)
setup = $(ANY_PYTHON) scripts/setup_env.py --check $(PYTHON)
endif

.PHONY: help setup demo test bench lint types ci clean

help:
	@echo 'make demo    stock runner against ours on the real engine, byte for byte; no GPU needed'
	@echo 'make test    all tests; no GPU needed'
	@echo 'make bench   what one step costs, against stock and others; needs a GPU'
	@echo 'make lint    ruff: rules and formatting'
	@echo 'make types   mypy'
	@echo 'make ci      what CI runs, in a fresh clone of HEAD'
	@echo 'make setup   only create .venv;  make clean   remove it and all caches'
	@echo 'With PYTHON=/path/to/python they use that environment; ARGS="..." goes to the program that is run.'

setup:
	@$(setup)

demo:
	@$(setup) $(if $(PYTHON),torch)
	@$(RUN) -m omni_runner.demo $(ARGS)

test:
	@$(setup) $(if $(PYTHON),torch pytest)
	@$(RUN) -m pytest $(ARGS)

bench:
	@$(setup) $(if $(PYTHON),torch triton safetensors)
	@$(RUN) bench/snapshot.py $(ARGS)

lint:
	@$(setup) $(if $(PYTHON),ruff)
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .

types:
	@$(setup) $(if $(PYTHON),mypy)
	@$(RUN) -m mypy

ci:
	@.ci/run

clean:
	rm -rf .venv .venv.lock .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
