# make demo and make test set up all they need in .venv; nothing else is touched.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint bench bench-curvature clean

demo: $(READY)
	$(BIN)/gaussnewton demo

test: $(READY)
	$(BIN)/pytest -n auto --jaxtyping-packages=gaussnewton,beartype.beartype

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The peers live in environments of their own, benchmarks/.venv and benchmarks/.venv-jax.
# DATA names a folder with MNIST's and Olivetti's files; without it they are downloaded.
# OPTIONS are those of benchmarks/race.py, e.g. OPTIONS="--problems mnist --seeds 1".
bench:
	sh benchmarks/setup-race.sh
	benchmarks/.venv/bin/python benchmarks/race.py $(if $(DATA),--data $(DATA)) $(OPTIONS)

bench-curvature:
	sh benchmarks/setup.sh
	benchmarks/.venv/bin/python benchmarks/curvature.py --repeats 40 --budget 15

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) benchmarks/.venv benchmarks/.venv-jax
