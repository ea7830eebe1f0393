PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint types unit bench docs clean

demo: $(STAMP)
	$(BIN)/python examples/schools.py --out out

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	JAX_PLATFORMS=cpu MPLBACKEND=agg $(BIN)/python -m pytest -n 2 --dist loadfile

bench: $(STAMP)
	for name in gre step_cost unbiasedness retracing encoder amortized schemes update streaming "cohort --size 0.01"; do $(BIN)/python benchmarks/$${name%% *}.py $$(echo "$$name" | cut -s -d" " -f2-) || exit 1; done

docs: $(STAMP)
	$(BIN)/pip install -q -c constraints.txt -e ".[docs]"
	$(BIN)/mkdocs build --strict

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[tests]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) out .mypy_cache .ruff_cache
