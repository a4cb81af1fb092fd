# Everything runs in .venv, which the first target that needs it sets up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The pinned set was resolved for CPython 3.11; other versions take the newest that fits.
CONSTRAIN := $(shell $(PYTHON) -c 'import sys; print("-c constraints.txt" if sys.version_info[:2] == (3, 11) else "")')
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet $(CONSTRAIN)
# Dozens of processes import the same modules: where bytecode must not be kept, each compiles them anew.
unexport PYTHONDONTWRITEBYTECODE
# All simulators together, in an environment of their own: their libraries are many and heavy.
SIMS := .venvs/sims
CONSTRAIN_SIMS := $(subst constraints.txt,constraints-sims.txt,$(CONSTRAIN))
PIP_SIMS := $(SIMS)/bin/python -m pip install --disable-pip-version-check --quiet $(CONSTRAIN_SIMS)
PROTOS := $(wildcard protos/rlightning/v1/*.proto)
# Most tests wait for servers, so more workers than cores pay.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
NOT_LOCAL := not real_env and not docker and not netns and not node and not browser and not gpu and not crash and not ray

.DEFAULT_GOAL := help
.PHONY: help install sims demo test test-fast test-crash test-docker test-gpu test-netns test-node test-browser test-ray test-real-env screenshots ci \
  bench bench-hosted bench-smoke bench-peers prove-demo prove-clients prove-flakes prove-robot prove-sb3 prove-learning prove-crash prove-checkpoint \
  prove-weights prove-wheel prove-ray prove-scaling \
  protos protos-check protos-breaking lint format types layers pythons wheels-check wheel cover clean

help:  ## Show what can be made.
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[all]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.run

install: $(VENV)/.dev  ## Set up .venv with everything a developer needs.

$(SIMS)/.done: pyproject.toml constraints-sims.txt
	$(PYTHON) -m venv $(SIMS)
	# Modules are compiled when they are imported: of these gigabytes few are.
	$(PIP_SIMS) --no-compile -e '.[all,sims]' pytest pytest-asyncio pytest-timeout pytest-xdist
	# Its own pins (Python 3.12, another torch) are for Isaac Sim, which is not installed.
	$(PIP_SIMS) --no-compile --no-deps --ignore-requires-python isaaclab==3.0.0
	@touch $@

sims: $(SIMS)/.done  ## Set up .venvs/sims with every simulator that has an adapter.

demo: $(VENV)/.run  ## Start a cluster of local processes and solve CartPole with it.
	$(BIN)/rlightning train configs/cartpole.yaml

test: $(VENV)/.dev  ## Run the tests that need neither root, Docker, a simulator nor a GPU.
	$(PYTEST) -m "$(NOT_LOCAL)"

test-fast: $(VENV)/.dev  ## Run the unit, property, golden and architecture tests.
	$(PYTEST) -m "$(NOT_LOCAL) and not slow" tests/unit tests/property tests/golden tests/architecture

test-crash: $(VENV)/.dev  ## Kill services and learners at every place where that is interesting.
	$(PYTEST) -m crash tests/integration tests/e2e

test-docker: $(VENV)/.dev  ## Build the images and run the compose stack on a Docker engine; starts one if there is none.
	$(BIN)/python -m pytest -m docker -o faulthandler_timeout=0 tests/docker

test-gpu: $(VENV)/.dev  ## Run the tests that need a CUDA device; needs a torch for CUDA.
	$(BIN)/python -m pytest -n0 -m gpu tests/unit

test-netns: $(VENV)/.dev  ## Cut and silence real links between network namespaces; needs root, iproute2 and iptables.
	$(BIN)/python -m pytest -n0 -m netns tests/netns

test-real-env: $(SIMS)/.done  ## Compare every adapter with the real simulator, each in processes of its own.
	$(SIMS)/bin/python -m pytest -n 2 -m real_env -o timeout=900 -o faulthandler_timeout=0 tests/real_env tests/integration/gym_client

test-node: $(VENV)/.dev  ## Attach the JavaScript client of examples/ to a cluster; needs Node.js and npm.
	$(BIN)/python -m pytest -n0 -m node tests/clients

$(VENV)/.ray: $(VENV)/.dev
	$(PIP) -e '.[ray]'
	@touch $@

test-ray: $(VENV)/.ray  ## Place services on two local nodes of Ray.
	$(BIN)/python -m pytest -n0 -m ray -o faulthandler_timeout=0 tests/ray

test-browser: $(VENV)/.dev  ## Look at the dashboard in a browser, on desk and phone; needs Debian's Chromium.
	$(BIN)/python -m pytest -n0 -m browser tests/browser

screenshots: test-browser  ## Take the pictures in docs/ anew.
	cp build/screenshots/*.png docs/

protos: $(VENV)/.dev  ## Generate rlightning/v1 from protos/.
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=. --pyi_out=. $(PROTOS)

protos-check: $(VENV)/.dev  ## Fail when rlightning/v1 is stale or the protos break their rules.
	cd protos && ../$(BIN)/buf lint && ../$(BIN)/buf format --diff --exit-code
	@rm -rf build/protos && mkdir -p build/protos
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=build/protos --pyi_out=build/protos $(PROTOS)
	diff -r --exclude=__init__.py --exclude=__pycache__ build/protos/rlightning/v1 rlightning/v1

protos-breaking: $(VENV)/.dev  ## Compare the protos with those of main.
	cd protos && ../$(BIN)/buf breaking --against '../.git#branch=main,subdir=protos'

lint: $(VENV)/.dev  ## Check style and spelling.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

format: $(VENV)/.dev  ## Mend style.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	cd protos && ../$(BIN)/buf format -w

types: $(VENV)/.dev  ## Check types, those of the library also as Python 3.10 sees it.
	$(BIN)/mypy
	$(BIN)/mypy --python-version 3.10 -p rlightning

layers: $(VENV)/.dev  ## Check that imports point down only.
	$(BIN)/lint-imports

pythons: $(VENV)/.dev  ## Import the base install on every CPython 3.10-3.13 that this machine has.
	$(BIN)/python -m tests.pythons

wheels-check: $(VENV)/.dev  ## Resolve a client's wheels for Linux, macOS and Windows on CPython 3.10-3.13.
	$(BIN)/python -m tests.wheels $(WHEELS_FOR)

wheel: $(VENV)/.dev  ## Build the wheel and the sdist into dist/.
	$(BIN)/python -m build --outdir dist

bench: $(VENV)/.dev  ## Measure everything; prints the tables of benchmarks/RESULTS.md.
	$(BIN)/python -m benchmarks all

bench-hosted: $(SIMS)/.done  ## Measure hosted envs beside gymnasium's AsyncVectorEnv and envpool.
	$(SIMS)/bin/python -m benchmarks hosted

bench-smoke: $(VENV)/.dev  ## Measure the main ratios briefly; fail where one is three times past its bound.
	$(BIN)/python -m benchmarks smoke

bench-peers: $(VENV)/.ray  ## Measure acting and batching against Ray's actors and TorchRL's inference server.
	$(BIN)/python -m benchmarks peers

prove-demo: $(VENV)/.run  ## Solve CartPole with ten seeds in a row, each within a minute.
	$(BIN)/python -m benchmarks.prove_demo

prove-crash: $(VENV)/.dev  ## Kill the buffer server 200 times; nothing that it acked may be lost.
	$(BIN)/python -m tests.integration.durability.crash 200

prove-checkpoint: $(VENV)/.dev  ## Checkpoint 2 GB while writers write, and load it again.
	$(BIN)/python -m benchmarks.prove_checkpoint 2000

prove-weights: $(VENV)/.dev  ## Publish and pull weights of 1.2 GB, and look at memory.
	$(BIN)/python -m benchmarks.prove_weights 1200

prove-wheel: $(VENV)/.dev  ## Install the wheel with all it needs in an empty environment elsewhere, and solve CartPole there.
	$(BIN)/python -m tests.installed $(CONSTRAIN)

prove-ray: $(VENV)/.ray  ## Solve CartPole on two local nodes of Ray, and remove one in the middle.
	$(BIN)/python -m benchmarks.prove_ray

prove-scaling: $(VENV)/.dev  ## Measure what services take by message, row and byte, and predict many hosts.
	$(BIN)/python -m benchmarks.prove_scaling

prove-robot: $(VENV)/.dev  ## Cut off a robot on another machine, restart its servers, narrow its link; needs root, iproute2.
	$(BIN)/python -m tests.netns.robot

prove-clients: $(VENV)/.dev  ## Freeze and kill clients among many, and slow an env among eight: the others keep their rate.
	$(BIN)/python -m benchmarks.prove_clients

prove-sb3: $(SIMS)/.done  ## Let Stable-Baselines3 learn CartPole in remote envs, and measure what rows save.
	$(SIMS)/bin/python -m benchmarks.prove_sb3

# The simulators of both sides have to be the same.
.venvs/sb3/.done: constraints-sims.txt
	$(PYTHON) -m venv .venvs/sb3
	.venvs/sb3/bin/python -m pip install --disable-pip-version-check --quiet $(CONSTRAIN_SIMS) \
	  stable-baselines3 'gymnasium[classic-control,mujoco]' ale-py opencv-python-headless matplotlib
	@touch $@

$(VENV)/.learning: $(VENV)/.run
	$(BIN)/python -m pip install --disable-pip-version-check --quiet $(CONSTRAIN_SIMS) -e '.[ale,mujoco]'
	@touch $@

prove-learning: $(VENV)/.learning .venvs/sb3/.done  ## Train with three seeds each, and with Stable-Baselines3; keeps what has finished.
	$(BIN)/python -m benchmarks.prove_learning

prove-flakes: $(VENV)/.dev  ## Run the tests ten times in a row.
	for i in 1 2 3 4 5 6 7 8 9 10; do $(PYTEST) -q -m "$(NOT_LOCAL)" || exit 1; done

cover: $(VENV)/.dev  ## Measure branch coverage of the tests.
	$(PYTEST) -m "$(NOT_LOCAL)" --cov --cov-report=term-missing:skip-covered

# The demo comes first: in a new checkout it runs on what `.[all]` brings, before the developer's packages are there.
# All four would take twice as long; what has wheels for both ends seldom lacks those between.
ci: WHEELS_FOR = 3.10 3.13
ci: demo protos-check lint types layers test test-crash test-netns test-node test-browser test-ray test-docker test-real-env pythons prove-wheel wheels-check bench-smoke  ## Everything that CI runs.

clean:  ## Remove what was built; keeps runs/.
	rm -rf $(VENV) .venvs build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
