# Two commands: `make quickstart` runs the main job, `make test` passes the tests. Both set up everything themselves.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where your torch comes from, if not the default: make setup PIP_ARGS="--index-url ..."
PIP_ARGS ?=

.PHONY: setup quickstart test lint clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "deepswe needs Python 3.11 or newer; this is " + sys.version.split()[0] + ": make setup PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt "torch>=2.13,<3"
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e ".[train,dev]"
	@touch $@

quickstart: setup
	$(BIN)/deepswe train recipes/quickstart.toml --resume

test: setup
	$(BIN)/pytest -n 2 --dist loadfile

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
