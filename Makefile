# Two commands matter: `make demo` and `make test`. Each does its own set-up.
PYTHON ?= python3
PY := .venv/bin/python

.PHONY: demo test test-slow test-faults check format bench clean

demo: .venv/installed
	$(PY) examples/demo.py

test: check
	$(PY) -m pytest

test-slow: .venv/installed
	$(PY) -m pytest -m "slow and not gpu"

test-faults: .venv/installed
	$(PY) -m pytest -m faults tests/flower/test_faults.py

check: .venv/installed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: .venv/installed
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: .venv/bench
	mkdir -p build/bench
	$(PY) benchmarks/solver.py --out build/bench/solver.json
	$(PY) benchmarks/rules.py --out build/bench/rules.json
	$(PY) benchmarks/engines.py --out build/bench/engines.json
	$(PY) benchmarks/engines.py --growth --out build/bench/growth.json
	$(PY) benchmarks/cpu_convolutions.py --out build/bench/cpu_convolutions.json

# The stamps make the second run quick: pip is asked only when what it reads has changed.
.venv/installed: pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

.venv/bench: .venv/installed
	$(PY) -m pip install --quiet --constraint constraints.txt --editable ".[dev,bench]"
	touch $@

clean:
	rm -rf .venv dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
