# Two commands on a fresh machine: `make demo` and `make test`. Each does all of its own set-up in .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
JOBS   ?= 2

.PHONY: demo test check bench clean

$(VENV)/.base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[engine,train]"
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

demo: $(VENV)/.base
	$(BIN)/tokentrue demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow and not gpu and not vllm and not harness and not load"

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/pyright

bench: $(VENV)/.dev
	$(BIN)/tokentrue bench render
	$(BIN)/tokentrue bench gateway
	$(BIN)/tokentrue bench mismatch
	$(BIN)/tokentrue bench engine

clean:
	rm -rf $(VENV) .cache build dist
