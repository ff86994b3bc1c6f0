# Everything a newcomer needs: python3 (3.11 or newer) and make. The environment lives in .venv.

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
WORKERS ?= --numprocesses auto --maxprocesses 8
PYTEST_ARGS ?=
VECTOR_TESTS := tests/backends/cpu/test_ops.py tests/backends/cpu/test_cpu_conv.py tests/backends/cpu/test_gemm.py
BENCH_ARGS ?=

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)

.DEFAULT_GOAL := help
.PHONY: help demo test test-full lint pages docs wheel bench models clean

help:  ## list these targets
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/make \1\t\2/p' Makefile | expand -t 18

demo: $(VENV)/.installed  ## classify handwritten digits with a compiled network
	@$(VENV)/bin/rlx demo

test: $(VENV)/.installed-dev models  ## quick suite: part of the big parametrised tests, chosen by the day (PYTEST_ARGS=...)
	@$(PY) -m pytest $(WORKERS) $(PYTEST_ARGS)
	@$(PY) -m pytest $(WORKERS) --vector-bytes other $(VECTOR_TESTS)

test-full: $(VENV)/.installed-dev models  ## every test
	@$(PY) -m pytest --full $(WORKERS) $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev  ## ruff and mypy
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

# each of them reads the code, and takes a second or two
PAGES := strategy_table dispatch_report onnx_support gradient_table option_table array_api_table public_stub json_fields
pages: $(VENV)/.installed-dev  ## write what is generated of the code anew: tables in docs/, rlx/__init__.pyi
	@for name in $(PAGES); do $(PY) tools/$$name.py || exit 1; done

docs: $(VENV)/.installed-docs  ## the documentation as pages, in build/docs; with chromium also pictures, in build/docs/screenshots
	@$(VENV)/bin/sphinx-build --builder html --fail-on-warning --keep-going --quiet docs build/docs
	@$(PY) tools/screenshots.py build/docs build/docs/screenshots

wheel: $(VENV)/.installed $(VENV)/.installed-wheel  ## the wheels rlx and rlx-runtime and the source archive, built and checked, in dist
	@rm -rf dist
	@$(PY) tools/prebuild.py
	@for part in "--sdist ." "--wheel ." "--wheel packaging/runtime"; do $(PY) -m build --outdir dist $$part >build.log 2>&1 || { cat build.log; exit 1; }; done
	@rm build.log
	@for wheel in dist/*.whl; do $(PY) -m zipfile -l $$wheel | grep 'prebuilt/.*\.bin' >/dev/null || { echo "$$wheel lacks machine code" >&2; exit 1; }; done
	@$(PY) -m twine check --strict dist/*

bench: $(VENV)/.installed-bench models  ## side by side with the other runtimes (BENCH_ARGS=...; installs them: 2 GB)
	@$(PY) benchmarks/compare.py $(BENCH_ARGS)

models: $(VENV)/.installed  ## download the real models for tests and benchmarks into models/
	@$(VENV)/bin/rlx fetch --all --to models

clean:  ## remove the environment and all caches (models/ stays)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find rlx tests tools examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@[ -n "$(PYTHON)" ] || { echo "rlx needs Python 3.11 or newer and found none: install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "rlx needs Python 3.11 or newer, but $(PYTHON) is older or does not run" >&2; exit 1; }
	@echo "Creating $(VENV) with $$("$(PYTHON)" --version)"
	@"$(PYTHON)" -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	@echo "Installing rlx into $(VENV) (once, about a minute)"
	@$(PIP) install --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	@echo "Installing rlx and its development tools into $(VENV) (once, a minute or two)"
	@$(PIP) install --editable '.[dev]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-wheel: | $(VENV)/bin/python
	@$(PIP) install 'build>=1.2,<2' 'twine>=6,<8'
	@touch $@

$(VENV)/.installed-docs: pyproject.toml | $(VENV)/bin/python
	@echo "Installing rlx and what its documentation is built with into $(VENV) (once, about a minute)"
	@$(PIP) install --editable '.[docs]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-bench: pyproject.toml | $(VENV)/bin/python
	@echo "Installing rlx and the runtimes that it is compared with into $(VENV) (once, some minutes)"
	@$(PIP) install --editable '.[bench]'
	@touch $@ $(VENV)/.installed
