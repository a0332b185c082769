# Two commands do everything from a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# A file's tests share what they set up and the kernels they compile: one process takes them all.
SPREAD := --dist loadfile --no-loadscope-reorder
# Tests start hundreds of processes: without bytecode each would compile all sources anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test pytest quick lint types format clean

help:
	@echo "make demo   collect a trace from the bundled model, simulate four policies, draw one figure"
	@echo "make test   lint, type-check and run every test"
	@echo "make quick  the tests that take under three minutes together"
	@echo "make format rewrite the sources in the project's style"

$(STAMP): pyproject.toml constraints.txt scripts/bootstrap.sh
	@sh scripts/bootstrap.sh "$(PYTHON)" "$(VENV)"
	@touch $@

demo: $(STAMP)
	@$(BIN)/python scripts/demo.py

# pyright keeps one core busy for a minute: the tests start meanwhile.
test: $(STAMP) lint
	@$(MAKE) --no-print-directory -j2 types pytest

pytest: $(STAMP)
	@$(BIN)/python -m pytest -n auto $(SPREAD)

quick: $(STAMP)
	@$(BIN)/python -m pytest -n auto $(SPREAD) -m "not slow"

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP)
	@$(BIN)/pyright --pythonpath $(BIN)/python

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist demo *.egg-info
