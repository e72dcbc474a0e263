# make install | demo | quick | test | test-faults | check | bench | bench-quick | bare | test-gpu | test-sanitize; each
# but test-gpu first makes .venv if it is missing or out of date.
# More arguments: make demo ARGS="--workers 2 --json out.json", make test ARGS="-k codec",
# make bench BENCH=kernels ARGS="--json kernels.json"

PYTHON ?= python3
ARGS ?=
BENCH ?= step kernels collectives

# Containers set it, and then each of hundreds of processes compiles what it imports.
export PYTHONDONTWRITEBYTECODE :=

BIN := .venv/bin
CSRC := $(wildcard $(foreach e,c cpp hpp h cu cuh,runtime_ext/csrc/*.$(e) runtime_ext/csrc/*/*.$(e)))
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

# Folders with tests of `make quick`.
QUICK_TESTS := $(addprefix tests/,codecs collectives commands control engine kernels planner)

.PHONY: install demo quick test test-faults check bench bench-quick bare test-gpu test-sanitize sanitizers system
.DELETE_ON_ERROR:

# Nothing but the set-up.
install: system .venv/.installed

demo: system .venv/.installed
	@$(BIN)/cgx-ray demo $(ARGS)

# Before a commit: lint of what differs from main, and the tests that start neither ranks nor Ray.
quick: .venv/.installed
	@base=$$(git merge-base HEAD main 2>/dev/null || echo HEAD); \
	changed=$$(git diff --name-only --diff-filter=d $$base -- '*.py'; git ls-files --others --exclude-standard -- '*.py'); \
	[ -z "$$changed" ] || { $(BIN)/ruff check $$changed && $(BIN)/ruff format --check $$changed; }
	@$(BIN)/pytest -q -m "not (gpu or slow or long)" -n 2 $(QUICK_TESTS) $(ARGS)

test: system .venv/.installed
	@$(BIN)/pytest -m "not gpu and not slow" -n 4 $(ARGS)

# Every fault of docs/reliability.md, and all tests that are too slow for `make test`.
test-faults: system .venv/.installed
	@$(BIN)/pytest -m "(fault or slow) and not gpu" -n 2 $(ARGS)

# Files with a test marked gpu, except in tests/ray: those need Ray.
GPU_TESTS = $(sort $(filter-out tests/ray/%,$(shell grep -rl --include='test_*.py' 'pytest\.mark\.gpu' tests)))

# Tests on a GPU, `bench gpu`, and every codec under compute-sanitizer where there is one. All parts run, also after one
# has failed. Uses what PYTHON has, and neither .venv, Ray nor the network: torch, CuPy, cuda-bindings, nanobind, psutil,
# pytest, pytest-timeout, hypothesis and cmake, and for the bench click, rich and matplotlib. PYTHONSAFEPATH keeps
# ./cgx_ray, which lacks the native module, off the path, also in processes that tests start.
# Deprecations are no errors, because the versions are not those of constraints.txt.
test-gpu:
	@rm -rf build/gpu/cgx_ray && mkdir -p build/gpu && cp -rL cgx_ray build/gpu/
	cmake -S . -B build/gpu/native -DPython_EXECUTABLE="$$($(PYTHON) -c 'import sys; print(sys.executable)')" -DCMAKE_BUILD_TYPE=Release
	cmake --build build/gpu/native --parallel
	@cp build/gpu/native/_native*.so build/gpu/cgx_ray/runtime_ext/
	@cp build/gpu/native/_search*.so build/gpu/cgx_ray/planner/
	@export PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/build/gpu:$(CURDIR); failed=0; \
	$(PYTHON) -m pytest -m gpu -W default::DeprecationWarning $(GPU_TESTS) $(ARGS) || failed=1; \
	$(PYTHON) -m bench gpu --json build/gpu/verdict.json || failed=1; \
	for tool in $$(command -v compute-sanitizer >/dev/null && echo memcheck racecheck initcheck); do echo "$$tool:"; \
	PYTHONPATH=$(CURDIR)/build/gpu:$(CURDIR)/tests timeout 120 compute-sanitizer --tool $$tool --error-exitcode 1 \
	$(PYTHON) -m support.cuda.small_run || failed=1; done; \
	exit $$failed

# Decoders of all codecs, and what strangers write, under AddressSanitizer and UBSan; mesh, rings, LocalGroup and the
# kernels' threads under ThreadSanitizer. QUICK=1 takes about a minute, as in CI.
BROKEN := tests/codecs/test_fuzzed_messages.py tests/collectives/test_broken_rings.py tests/faults/test_strangers_at_mesh.py
ASAN_TESTS := $(if $(QUICK),$(BROKEN),tests/kernels tests/codecs tests/collectives $(lastword $(BROKEN)))
SANITIZE := $(BIN)/cmake -S . -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DCMAKE_BUILD_TYPE=None
test-sanitize: sanitizers
	@# ThreadSanitizer of g++ 12 wants addresses that are not random.
	$$(setarch -R true 2>/dev/null && echo setarch -R) build/thread/races $(if $(QUICK),1,20)
	@# In C++ exceptions AddressSanitizer looks for libstdc++, which python does not link. Python does not free all memory.
	LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libstdc++.so.6)" \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
	PYTHONPATH=tests/sanitize CGX_RAY_NATIVE="$$(echo $(CURDIR)/build/address/_native*.so)" \
	FUZZ_ROUNDS=$(if $(QUICK),1,50) $(BIN)/pytest -n 0 --capture=no --ignore-glob="*cuda*" $(ASAN_TESTS) $(ARGS)

# The builds of test-sanitize.
sanitizers: system .venv/.installed
	$(SANITIZE) -B build/address -DCGX_RAY_SANITIZE=address
	$(BIN)/cmake --build build/address --target _native --parallel $$(nproc)
	$(SANITIZE) -B build/thread -DCGX_RAY_SANITIZE=thread
	$(BIN)/cmake --build build/thread --target races --parallel $$(nproc)

bench: .venv/.installed
	$(if $(and $(ARGS),$(word 2,$(BENCH))),$(error ARGS are those of one bench: make bench BENCH=kernels ARGS="$(ARGS)"))
	@for bench in $(BENCH); do $(BIN)/python -m bench $$bench $(ARGS) || exit; done

# Under ten minutes on two cores: beside what others offer, and whether each bench of `make bench` still works.
bench-quick: .venv/.installed
	@for bench in peers $(BENCH); do $(BIN)/python -m bench $$bench --quick || exit; done

# sdist, wheel and a bare environment, as a user without a checkout has them: see the script.
bare: .venv/.installed
	@PYTHON=$(PYTHON) .ci/bare

check: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(if $(CSRC),$(BIN)/clang-format --dry-run -Werror $(CSRC))
	$(BIN)/mypy -p cgx_ray -p cgx_ray_autoload -p bench -p dashboards.making
	$(BIN)/lint-imports --no-logo

# Build isolation is off, so that constraints.txt pins the build tools as well. setuptools and wheel build iperf3, which
# has no wheel.
.venv/.installed: pyproject.toml constraints.txt CMakeLists.txt $(CSRC) | system
	@echo "creating .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv
	@echo "installing the build backend"
	@$(PIP_INSTALL) scikit-build-core nanobind ninja cmake setuptools wheel
	@echo "installing cgx_ray, torch and Ray, and compiling the kernels: 2 to 8 minutes the first time, and silent"
	@$(PIP_INSTALL) --no-build-isolation -e ".[dev]"
	@touch $@

# Says in one line what is missing, before anything is installed.
system:
	@command -v $(PYTHON) >/dev/null && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is missing or older than 3.11; give another one: make PYTHON=python3.12"; exit 1; }
	@missing=$$(PYTHON=$(PYTHON) ./missing-packages $(if $(filter test test-faults,$(MAKECMDGOALS)),,--without-tests)); [ -z "$$missing" ] || \
		{ echo "system packages are missing; run: apt-get install $$missing"; exit 1; }
