# make demo and make test set up all they need in .venv; nothing else is touched.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint bench clean

demo: $(READY)
	$(BIN)/gaussnewton demo

test: $(READY)
	$(BIN)/pytest -n auto --jaxtyping-packages=gaussnewton,beartype.beartype

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The peers live in an environment of their own, benchmarks/.venv.
bench:
	sh benchmarks/setup.sh
	benchmarks/.venv/bin/python benchmarks/curvature.py --repeats 40 --budget 15

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) benchmarks/.venv
