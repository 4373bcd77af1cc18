# Two commands are all a newcomer needs: `make demo` and `make test`. Both set up a virtual environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check install bench clean

install: $(STAMP)

# torch first: without it, what depends on torch would choose a CUDA build of several gigabytes.
$(STAMP): pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "swe-lightning needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints-cpu.txt torch
	$(BIN)/python -m pip install --quiet -c constraints-cpu.txt -e '.[train,swe,docker,k8s,postgres,dev]'
	@touch $(STAMP)

demo: install
	$(BIN)/swel demo

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/python -m pytest -q

bench: install
	$(BIN)/python benchmarks/demo.py

clean:
	rm -rf $(VENV) build *.egg-info
