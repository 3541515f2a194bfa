# What a newcomer needs: make demo, make test. Everything runs in .venv, which `make install` brings up to date
# (a fraction of a second if nothing has changed).

PYTHON ?= python3
BIN := .venv/bin
# The whole test run; one test that waits has a shorter deadline of its own.
TEST_TIMEOUT_S ?= 3000
# What `make bench` measures: a name of src/kvpush/bench/presets, or a TOML file.
PRESET ?= cpu
# More options for pytest (ARGS="-m unit") or for the demo (ARGS=--keep).
ARGS ?=
# Fast ones first, so that a mistake shows early.
TESTS := $(wildcard tests/unit tests/sim tests/nixl tests/vllm tests/gpu)
OURS := src tests scripts $(wildcard bench)

.DEFAULT_GOAL := help
.PHONY: help install demo doctor bench test sim soak mutants lint fmt lock clean

help:
	@echo 'make demo     two vLLM engines and a router on this machine, five questions, every answer checked'
	@echo 'make test     all tests: unit, NIXL between processes, real vLLM engines (ARGS="-m unit" for the fast ones)'
	@echo 'make bench    vLLM push and kvpush on this machine, ten minutes (PRESET=h200x2-0.6b on two GPUs); figures'
	@echo 'make sim      1000 simulated deployments (WORLDS=20000), or the story of one (SEED=42)'
	@echo 'make soak     a real deployment under load and faults (MINUTES=15 SEED=...), every text compared'
	@echo 'make mutants  removes one guard after another and lets the simulator find out (takes an hour)'
	@echo 'make lint     ruff and mypy'
	@echo 'make fmt      formats the code'
	@echo 'make doctor   what is installed, and whether a push will work here'
	@echo 'make install  brings .venv up to date; the others do it first'
	@echo 'make lock     writes requirements/cpu.txt from .venv'
	@echo 'make clean    removes caches (make clean ALL=1: .venv as well)'

install:
	@command -v $(PYTHON) >/dev/null || { echo 'install: error: $(PYTHON) is not on the path; install Python 3.11 or 3.12' >&2; exit 1; }
	@$(PYTHON) scripts/install.py

demo: install
	@$(BIN)/kvpush demo $(ARGS)

doctor: install
	@$(BIN)/kvpush doctor $(ARGS)

# What was measured is kept if something goes wrong; ARGS=--resume goes on.
bench: install
	@$(BIN)/kvpush bench serve --preset $(PRESET) --out bench/results/raw $(ARGS)
	@$(BIN)/kvpush bench summary >/dev/null && $(BIN)/kvpush bench figures

# --foreground is not given: on a timeout every process of the run gets the signal.
test: install
	@timeout --signal=INT --kill-after=60 $(TEST_TIMEOUT_S) $(BIN)/python -m pytest $(TESTS) $(ARGS); code=$$?; \
	if [ $$code -eq 124 ]; then echo 'test: error: not done after $(TEST_TIMEOUT_S) s (TEST_TIMEOUT_S sets the limit)' >&2; fi; \
	if [ $$code -eq 5 ]; then echo 'test: error: no test was selected, so nothing was shown' >&2; fi; \
	exit $$code

sim: install
	@$(BIN)/python scripts/sim.py $(if $(SEED),--seed $(SEED),--worlds $(or $(WORLDS),1000)) $(ARGS)

# Engines and router on real CPU engines; the raw file is kept with OUT=bench/results/raw.
soak: install
	@$(BIN)/python -m kvpush.bench.soak --minutes $(or $(MINUTES),15) $(if $(SEED),--seed $(SEED)) \
	$(if $(OUT),--out $(OUT)) $(ARGS)

mutants: install
	@$(BIN)/python scripts/mutants.py $(ARGS)

lint: install
	@$(BIN)/ruff check $(OURS)
	@$(BIN)/ruff format --check $(OURS)
	@$(BIN)/mypy

fmt: install
	@$(BIN)/ruff check --fix --exit-zero $(OURS)
	@$(BIN)/ruff format $(OURS)

lock:
	@$(BIN)/python scripts/lock.py

clean:
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	@find src tests scripts bench -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
	@$(if $(ALL),rm -rf .venv,:)
