# `make serve` and `make test` set everything up first; both are quick when nothing has changed.
# Variables: HOST= PORT= MODEL= DEVICE=cpu|cuda NODES= PYTHON= ARGS= (more flags for overture serve, pytest or the bench)

SHELL := bash
DEVICE ?= cpu
NODES ?= 1
PY := .venv/bin/python

# The first start compiles what it imports; without the compiled files every start would take a minute.
unexport PYTHONDONTWRITEBYTECODE

# The stamps carry a checksum of the lists, so a changed list installs again and a fresh checkout of the same one does not.
sum = $(firstword $(shell cat $(1) | cksum))
RUNTIME := .venv/.runtime-$(DEVICE)-$(call sum,requirements/$(DEVICE).txt requirements/install.sh requirements/torchvision_operators.py pyproject.toml overture_client/pyproject.toml)
TESTING := .venv/.testing-$(call sum,requirements/test.txt)
# What places several nodes; one node needs none of it.
RAY := .venv/.ray-$(call sum,requirements/ray.txt)

# Some shells export HOST as the machine's name: take it from make's own command line only.
ifneq ($(origin HOST),command line)
HOST :=
endif
FLAGS := $(if $(HOST),--host $(HOST)) $(if $(PORT),--port $(PORT)) $(if $(MODEL),--model $(MODEL)) --device $(DEVICE)
SEVERAL := $(filter-out 1,$(NODES))

# Four processes on two cores, because for half of its time a test waits for a process, a page or a core; a file's tests all in one of them (they share an engine), in the order that the engines need.
WORKERS := -n 4 --dist loadfile --no-loadscope-reorder --durations=10

.PHONY: help venv serve ray node test fuzz dockerfile docs-check lint format bench bench-sim clients models results wheels pins gpu-kit vllm-names browser clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

venv: $(RUNTIME) ## make .venv with everything that serving needs

serve: $(RUNTIME) $(if $(SEVERAL),$(RAY)) ## start the gateway (HOST= PORT= MODEL= DEVICE=cuda NODES=2 ARGS=)
	@exec .venv/bin/overture serve $(FLAGS) $(if $(SEVERAL),--nodes $(NODES)) $(ARGS)

ray: $(RUNTIME) $(RAY) ## install Ray, for clusters of several machines

node: $(RUNTIME) $(RAY) ## add this machine to a gateway's cluster (ARGS='--ray-address HOST:PORT …'; docs/operations/nodes.md)
	@exec .venv/bin/overture node $(if $(MODEL),--model $(MODEL)) --device $(DEVICE) $(ARGS)

# Lint runs beside the tests, as it has one process and they wait a third of their time. What it says is shown if it fails, after the tests.
test: $(RUNTIME) $(TESTING) $(RAY) browser ## lint and all tests (ARGS='-k name' for some)
	@status=0; $(MAKE) --no-print-directory lint >.venv/lint.log 2>&1 & lint=$$!; \
	$(PY) -m pytest $(WORKERS) $(ARGS) || status=$$?; \
	wait $$lint && echo "lint: nothing to mend" >&2 || { status=$$?; cat .venv/lint.log >&2; }; exit $$status

fuzz: $(RUNTIME) $(TESTING) ## others' test suites against a server: eight minutes, the websocket's needs Python 2.7 (docs/conformance.md)
	$(PY) -m bench.fuzz.api
	$(PY) -m bench.fuzz.autobahn

dockerfile: ## lint the Dockerfile by hadolint and build it by Docker (docs/deploy.md)
	hadolint Dockerfile
	docker build --target cpu $(ARGS) .

docs-check: $(RUNTIME) $(TESTING) ## run every block of commands in README and docs that can run here, and follow their links (make test does, too)
	$(PY) -m pytest -q tests/integration/test_docs.py tests/lint/test_docs.py

lint: $(RUNTIME) $(TESTING) ## ruff, import rules, types, rules of our own (tests/lint), whether the results are up to date
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	.venv/bin/lint-imports --no-logo
	$(PY) -m mypy
	$(PY) -m pytest -q -p no:xdist tests/lint
	$(PY) -m bench.results check

format: $(TESTING) ## let ruff mend what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(RUNTIME) ## measure the gateway (ARGS=--quick)
	$(PY) -m bench.live.gateway $(ARGS)

models: $(RUNTIME) $(TESTING) ## serve a tiny model of each family, compare with transformers, write docs/models.md (three quarters of an hour)
	$(PY) -m bench.live.correct --table docs/models.md $(ARGS)

clients: $(RUNTIME) ## ask a real server with the clients that others wrote, write docs/clients.md (ARGS='--only openai')
	$(PY) -m tests.clients $(ARGS)

bench-sim: $(RUNTIME) $(TESTING) ## run the papers' tables in virtual time, keep their figures, write the results
	$(PY) -m bench.results sim

results: $(RUNTIME) $(TESTING) ## make bench/RESULTS.md and docs/plots from the kept runs
	$(PY) -m bench.results write

wheels: $(RUNTIME) ## build the server's and the client's wheel into dist/ (docs/install.md)
	@$(PY) requirements/wheels.py

pins: ## resolve requirements/*.in into pinned lists with hashes
	python3 requirements/pin.py

gpu-kit: $(RUNTIME) ## pack vLLM, what it needs and this checkout for a machine with a GPU that reaches no registry (KIT=folder)
	$(PY) -m bench.live.gpu.kit $(or $(KIT),build/gpu-kit)

vllm-names: $(RUNTIME) $(TESTING) ## look for all names of vLLM's in each version that is supported (downloads 660 MB); VLLM=0.33.0 ARGS=tests: run tests with its code
	$(PY) -m tests.vllm_versions $(VLLM) $(if $(VLLM),$(ARGS))

browser:
	@requirements/browser.sh

clean: ## remove .venv and caches (sessions are kept elsewhere)
	rm -rf .venv *.egg-info build .*_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

$(RUNTIME):
	@requirements/install.sh $(DEVICE) $@

# vLLM is imported meanwhile, which compiles it once: the processes of the tests would all compile it at the same time.
$(TESTING): $(RUNTIME)
	@echo "installing the test tools"
	@$(PY) -m engine_bridge.driver.vllm_api >/dev/null 2>&1 & \
	$(PY) -m pip install -qq --disable-pip-version-check --no-input --no-deps --require-hashes -r requirements/test.txt && wait
	@rm -f .venv/.testing-*; touch $@

$(RAY): $(RUNTIME)
	@echo "installing Ray (75 MB to fetch)"
	@$(PY) -m pip install -qq --disable-pip-version-check --no-input --no-compile --no-deps --require-hashes -r requirements/ray.txt
	@rm -f .venv/.ray-*; touch $@
