# Every target sets up what it needs; a fresh clone needs nothing but Python 3.11 to 3.13 and make.
# On another Python than the newest: make clean, then for example make test-fast PYTHON=python3.12.
SHELL := /bin/bash
BIN := .venv/bin
export PYTHONUNBUFFERED := 1
# Some images set it; the tests start hundreds of processes, each of which would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

# In the foreground, so that Ctrl-C reaches what runs and not only make.
WITHIN := timeout --foreground --kill-after=30

# Four processes, each with whole files: with three, a fifth of the time went into waiting for clusters and sessions.
# Not files with many tests first, as by default, but slow ones (tests/support/sidebyside.py). The run ends when one
# of the processes dies: pytest-xdist would wait for ever for what that one had left to do.
SIDE_BY_SIDE := $(BIN)/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# The files that have tests to be run alone: to collect all others takes longer than some of these.
ALONE = $(shell grep -rl --include='test_*.py' 'mark\.alone' tests)

SIMULATED := tests/e2e/test_simulated_clusters.py

.DEFAULT_GOAL := help
.PHONY: help setup try demo test test-fast dist docs fmt lint types bench soak clean
.PHONY: setup-try soak-setup soak-failures soak-hosts soak-hung soak-killers soak-kept soak-stops soak-spinning soak-seeds soak-examples soak-drain soak-pause soak-reach soak-tls soak-blocking soak-tcp soak-join soak-savepoint soak-ledger

help: ## Print this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Make .venv with every pinned dependency, Spark's too
	@scripts/bootstrap

setup-try:
	@scripts/bootstrap --try

try: setup-try ## Run word count, a keyBy job, and a join whose worker is killed: a minute's look, without Spark
	@$(WITHIN) 300 $(BIN)/minishuffle demo --only wordcount --only keyby --only recovery

demo: ## Run the main job and the data pipeline on a local cluster; with KEEP=1 keep it until Ctrl-C
	@scripts/bootstrap --demo
	@$(if $(KEEP),,$(WITHIN) 600) $(BIN)/minishuffle demo $(if $(KEEP),--keep)

test: lint ## Check style, then types and every test
	@scripts/bootstrap --tests
	$(WITHIN) 3000 $(SIDE_BY_SIDE) -m "not alone"
	$(WITHIN) 600 $(BIN)/python -m pytest -q -m alone $(ALONE)

test-fast: setup-try ## Run the tests that take less than a few seconds each and need no more than make try
	$(WITHIN) 600 $(SIDE_BY_SIDE) -m "not slow and not alone and not extra"

dist: setup-try ## Build wheel and sdist, with checksums, and try them on each Python that is here (some minutes)
	$(WITHIN) 1800 scripts/build-dist

docs: ## Build the documents as a site in .site/built, which python -m http.server -d .site/built shows
	@scripts/bootstrap --docs
	$(WITHIN) 300 $(BIN)/python scripts/build-docs

fmt: setup-try ## Format the code
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

lint: setup-try ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## Check types
	$(WITHIN) 600 $(BIN)/mypy

bench: setup ## Measure transport, exchange and keyBy (some minutes)
	$(WITHIN) 900 $(BIN)/minishuffle bench transport
	$(WITHIN) 900 $(BIN)/minishuffle bench exchange
	$(WITHIN) 900 $(BIN)/minishuffle bench keyby --records 100000000
	$(WITHIN) 900 $(BIN)/minishuffle bench keyby --emit each --records 30000000
	$(WITHIN) 900 $(BIN)/minishuffle bench keyby --format rows --record event --emit each --records 6000000
	$(WITHIN) 900 $(BIN)/minishuffle bench spark

soak: soak-setup ## Run what takes too long for the tests (some hours): failures, silent hosts, workers that hang or that functions end, planned stops, spinning threads, seeds, examples
	$(MAKE) soak-failures soak-hosts soak-hung soak-killers soak-kept soak-stops soak-spinning soak-seeds soak-examples soak-drain soak-pause soak-reach soak-tls soak-blocking soak-tcp soak-join soak-savepoint soak-ledger

soak-setup:
	@scripts/bootstrap --soak

soak-failures: soak-setup ## A hundred failures of all kinds, as root those of hosts too (about 10 minutes)
	$(WITHIN) 3600 $(BIN)/minishuffle drill --times 100 --every 0.2 --seed $${SEED:-1}

soak-hosts: soak-setup ## Thousands of SIGSTOPs and lost packets, after which nobody is to be lost; as root (half an hour)
	$(WITHIN) 3600 $(BIN)/python scripts/soak-hosts

soak-hung: soak-setup ## Ten workers stopped by SIGSTOP and ten killed: how soon all slots are there again (2 minutes)
	$(WITHIN) 900 $(BIN)/python scripts/soak-hung
	MINISHUFFLE_SOAK=1 $(WITHIN) 300 $(BIN)/python -m pytest -q tests/e2e/test_hung_workers.py

soak-killers: soak-setup ## Functions that end their process in each way, as root for want of memory too (about 5 minutes)
	MINISHUFFLE_SOAK=1 $(WITHIN) 1800 $(BIN)/python -m pytest -q --timeout 900 tests/e2e/test_killers.py

soak-kept: soak-setup ## Fifty jobs with a guarantee, eight failures in each, compared with plain Python, and stores that fail (half an hour)
	MINISHUFFLE_SOAK=1 $(WITHIN) 7200 $(BIN)/python -m pytest -q tests/e2e/test_at_least_once.py tests/e2e/test_fallback.py

soak-stops: soak-setup ## SIGTERM of coordinators, second ones, and clusters without their files (4 minutes)
	$(WITHIN) 900 $(BIN)/python scripts/soak-stops

soak-reach: soak-setup ## Workers that cannot reach each other, as root (1 minute)
	$(WITHIN) 300 $(BIN)/python scripts/soak-reach

soak-tls: soak-setup ## Certificates that change while processes are killed, and what nodes and Prometheus do with TLS; as root (3 minutes)
	MINISHUFFLE_SOAK=1 $(WITHIN) 900 $(BIN)/python -m pytest -q --timeout 600 tests/e2e/test_tls.py tests/observe/test_prometheus.py
	MINISHUFFLE_SOAK=1 $(WITHIN) 900 $(BIN)/python -m pytest -q --timeout 600 -k tls tests/bench/test_wire.py
	MINISHUFFLE_SOAK=1 $(WITHIN) 900 $(BIN)/python -m pytest -q --timeout 600 -k tls tests/deploy/test_walkthrough.py

soak-tcp: soak-setup ## TCP flow control beside credit: results, recovery, the stages of back-pressure, siblings (15 minutes)
	MINISHUFFLE_SOAK=1 $(WITHIN) 900 $(BIN)/python -m pytest -q --timeout 600 tests/bench/test_siblings.py tests/e2e/test_tcp_flow_control.py
	MINISHUFFLE_SOAK=1 $(WITHIN) 1800 $(BIN)/python -m pytest -q --timeout 1800 tests/examples/test_backpressure.py

soak-spinning: soak-setup ## Ten minutes of threads that compute, without a suspicion or a verdict
	MINISHUFFLE_SOAK=1 $(WITHIN) 1200 $(BIN)/python -m pytest -q -s --timeout 1200 -m alone tests/e2e/test_suspicion.py

soak-blocking: soak-setup ## kill -9 of both sides of a blocking exchange at each moment, and before consumers are deployed (2 minutes)
	MINISHUFFLE_SOAK=1 $(WITHIN) 600 $(BIN)/python -m pytest -q --timeout 300 tests/e2e/test_blocking_exchanges.py tests/e2e/test_first_output.py

soak-seeds: soak-setup ## Ten thousand simulated clusters
	MINISHUFFLE_SOAK=1 $(WITHIN) 14400 $(BIN)/python -m pytest -q -n 2 --dist load --timeout 3600 $(SIMULATED)

soak-examples: soak-setup ## The tests with two thousand examples of each property
	MINISHUFFLE_SOAK=1 $(WITHIN) 10000 $(SIDE_BY_SIDE) --timeout 3600 -m "not alone" --ignore $(SIMULATED) --ignore tests/e2e/test_killers.py --ignore tests/api/test_ledger.py

soak-drain: soak-setup ## Three workers restarted five times under a job, and clusters ended in each order
	MINISHUFFLE_SOAK=1 $(WITHIN) 900 $(BIN)/python -m pytest -q --timeout 600 tests/e2e/test_leaving_workers.py

soak-pause: soak-setup ## The join of ads at full rate, paused fifty times: how long that takes (2 minutes)
	MINISHUFFLE_SOAK=1 $(WITHIN) 1200 $(BIN)/python -m pytest -q -s --timeout 1200 tests/e2e/test_pause.py

soak-join: soak-setup ## The join of ads under a guarantee, and a worker killed each 10 s (half an hour)
	$(WITHIN) 3600 $(BIN)/python scripts/soak-join

soak-savepoint: soak-setup ## Savepoints of a gigabyte with each guarantee: how long a task stands, and what follows at twice and half the parallelism (10 minutes)
	$(WITHIN) 1800 $(BIN)/python scripts/soak-savepoint

soak-ledger: soak-setup ## All that was recorded of jobs, played again (6 minutes)
	MINISHUFFLE_SOAK=1 $(WITHIN) 7200 $(BIN)/python -m pytest -q --timeout 3600 tests/api/test_ledger.py

clean: ## Remove .venv and everything that was built
	rm -rf .venv .site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
