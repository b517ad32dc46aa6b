# make serve   set up what is missing and serve the embedded model     (ARGS="--port 9000" adds settings)
# make test    set up what is missing and run the tests                (T=tests/bus runs some of them)
# make fuzz    the native scheduler against vLLM's on 10,000 traces    (N=1000 plays fewer)
# make soak    200 sessions with a KV pool for a quarter of them, then 8 on the embedded model
# make fuzz-sessions   sessions against a model of them, on 1,000 traces of each kind (N=100 plays fewer)
# make lint    ruff and mypy
# make bench-scheduler   time a step without the model, beside the peers
# make aot     compile every model's steps for several TPUs, and show what they cost
# make bench-loading     what memory loading takes, for 2 GB of weights
# make bench-replay      what the journal costs, and whether a mixed run replays
# make bench-cpu         the engine on this CPU, beside its matrix products alone and vLLM's CPU backend
# make bench-structured    JSON by nasty schemas, and what it costs those beside it
# make bench-speculation the engine with drafts and without: the same tokens, and how much faster
# make bench-drafts      what prompt lookup tries and gets right, counted and not timed
# make clean   remove the virtual environment and what a run left in run/

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: serve test fuzz soak lint format clean bench-scheduler bench-loading bench-replay bench-cpu bench-speculation
.PHONY: bench-structured bench-drafts aot fuzz-sessions

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
T ?= tests
N ?= 10000

# Each stamp says that what it is named after is installed as its lock says.
CPU := $(VENV)/stamp-cpu
SELF := $(VENV)/stamp-self
DEV := $(VENV)/stamp-dev

serve: $(SELF)
	@exec $(BIN)/rankbus serve $(ARGS)

# Bytecode is kept whatever the environment says: hundreds of processes would compile the same modules.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(SELF) $(DEV)
	@$(BIN)/python -m pytest $(T)

fuzz: $(SELF) $(DEV)
	@$(BIN)/python -m tests.ranks.fuzz --traces $(N)

soak: $(SELF) $(DEV)
	@$(BIN)/python -m executor.prepare
	@$(BIN)/python -m bench.soak_sessions $(ARGS)

fuzz-sessions: N := 1000
fuzz-sessions: $(SELF) $(DEV)
	@$(BIN)/python -m tests.ranks.session_traces --traces $(N)

lint: $(SELF) $(DEV)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench-scheduler: $(SELF)
	@$(BIN)/python -m executor.prepare
	@$(BIN)/python -m bench.scheduler $(ARGS)

aot: $(SELF)
	@$(BIN)/python -m executor.aot bench/results/aot.json bench/configs/* $(ARGS)

bench-loading: $(SELF)
	@$(BIN)/python -m bench.loading $(ARGS)

bench-replay: $(SELF) $(DEV)
	@$(BIN)/python -m executor.prepare
	@$(BIN)/python -m bench.replay $(ARGS)

bench-cpu: $(SELF) $(DEV)
	@$(BIN)/python -m executor.prepare
	@$(BIN)/python -m bench.cpu $(ARGS)

bench-structured: $(SELF) $(DEV)
	@$(BIN)/python -m executor.prepare
	@$(BIN)/python -m bench.structured $(ARGS)

bench-speculation: $(SELF) $(DEV)
	@$(BIN)/python -m executor.prepare
	@$(BIN)/python -m bench.speculation $(ARGS)

bench-drafts: $(SELF) $(DEV)
	@$(BIN)/python -m executor.prepare
	@$(BIN)/python -m bench.drafts

format: $(DEV)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) run

$(VENV)/stamp-venv:
	@for python in $${PYTHON:-} python3.11 python3.12 python3; do \
	    if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; then \
	        echo "Making $(VENV) with $$($$python --version)"; \
	        $$python -m venv --clear $(VENV); \
	        touch $@; \
	        exit; \
	    fi; \
	done; \
	echo "rankbus needs Python 3.11 or 3.12; name one with PYTHON=/path/to/python" >&2; exit 1

$(CPU): requirements/cpu.lock | $(VENV)/stamp-venv
	@echo "Installing $< (about 2.7 GB; minutes the first time)"
	@$(PIP) install --no-deps --requirement $<
	@touch $@

$(SELF): pyproject.toml $(CPU)
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(DEV): requirements/dev.lock $(CPU)
	@echo "Installing $<"
	@$(PIP) install --no-deps --requirement $<
	@touch $@
