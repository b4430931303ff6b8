# `make quickstart` and `make test` work on a fresh machine with Python >= 3.11 and make.
# Linux without a GPU: `make setup TORCH_INDEX=<address of PyTorch's CPU wheels>` saves gigabytes (see README).
PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
STAMP := $(VENV)/.setup-done
PYTEST := $(BIN)/python -m pytest

.PHONY: setup system quickstart test test-all test-long chaos check bench docs format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: isthmus needs Python >= 3.11; name one: make setup PYTHON=python3.12"; exit 2; }
	@echo "setup: a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get -qq update && apt-get -qqy install python3-venv && $(PYTHON) -m venv $(VENV); \
		else echo "error: python3 -m venv failed; on Debian and Ubuntu: apt-get install python3-venv"; exit 2; fi; }
	@$(PIP) --upgrade pip setuptools wheel
	@echo "setup: PyTorch and what training needs (a few minutes on the first run)"
	@$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	@$(PIP) --no-build-isolation --editable '.[quickstart]' --group dev
	@touch $@

# What only the system's package manager has: Chromium (the test that looks at the report), nginx (a delayed object store),
# rclone, FUSE and iproute2 (hosts and mounts of the emulated clouds) need root on Debian or Ubuntu; Azurite (Blob) needs npm
# and goes to a cache folder. What is missing, its tests are skipped.
AZURITE := 3.37.0
TEST_CACHE := $(or $(ISTHMUS_TEST_CACHE),$(HOME)/.cache/isthmus-tests)
APT := $(if $(shell command -v chromium),,chromium) \
	$(if $(wildcard /usr/lib/nginx/modules/ngx_http_lua_module.so),,nginx-light libnginx-mod-http-lua) \
	$(if $(shell command -v rclone),,rclone fuse3) $(if $(shell command -v ip),,iproute2)

system:
	@if [ -n "$(strip $(APT))" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "setup: $(strip $(APT)), for tests"; apt-get -qq update; \
		for package in $(APT); do \
			DEBIAN_FRONTEND=noninteractive apt-get -qqy install --no-install-recommends $$package >/dev/null \
				|| echo "setup: $$package could not be installed; its tests will be skipped"; \
		done; \
	fi
	@if [ ! -e "$(TEST_CACHE)/azurite-$(AZURITE)/node_modules/.bin/azurite-blob" ] && command -v npm >/dev/null; then \
		echo "setup: Azurite $(AZURITE), for the tests of az://"; \
		npm install --prefix "$(TEST_CACHE)/azurite-$(AZURITE)" --no-audit --no-fund --loglevel=error azurite@$(AZURITE) >/dev/null \
			|| { echo "setup: Azurite could not be installed; its tests will be skipped"; rm -rf "$(TEST_CACHE)/azurite-$(AZURITE)"; }; \
	fi

quickstart: setup
	$(BIN)/isthmus quickstart

test: setup system
	$(PYTEST) tests/unit -m "not slow and not long" -n 2
	$(PYTEST) tests/conformance tests/e2e tests/faults -m "not slow and not long" -n 2 --dist loadfile --durations 10

# The slow tests too.
test-all: test
	$(PYTEST) tests -m slow --durations 10

# Runs broken in every known way in every phase, 20 minutes: make chaos SEED=7 EVENTS=100. Its log: build/chaos/chaos.log.
chaos: setup
	PYTHONPATH=tests/helpers $(BIN)/python tests/faults/chaos.py --seed $(or $(SEED),1) --events $(or $(EVENTS),100)

# What takes minutes each: every phase of a checkpoint killed, stalls of whole ranks, the matrix of strategies, families.
test-long: setup system
	$(PYTEST) tests -m long --durations 10

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PYTEST) tests/unit/test_walls.py
	@# A type checker cannot follow pyproject's directory mapping: build the wheel, install it, check that.
	@rm -rf build && mkdir -p build/wheel build/site
	@$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	@$(BIN)/python -m pip install --quiet --no-deps --target build/site build/wheel/*.whl
	MYPYPATH=build/site $(BIN)/mypy --cache-dir .mypy_cache -p isthmus

bench: setup
	$(BIN)/python benchmarks/cli_start.py
	$(BIN)/python benchmarks/dry_run.py
	$(BIN)/python benchmarks/paced_reader.py
	$(BIN)/python benchmarks/trainer_step.py
	$(BIN)/python benchmarks/ema_cost.py
	$(BIN)/python benchmarks/stream.py --quick --skip-peers

# Pages that are made from the code; a test says when one is old.
docs: setup
	$(BIN)/python -m isthmus.backends.lint_page docs/lint.md

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis quickstart
