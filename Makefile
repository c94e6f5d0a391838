# make quickstart   its own environment, ingot compiled for this machine, the whole path on the model that ships here
# make test         test extras, then every test that is not marked slow, JOBS at a time
# make docs         the site of docs/ in build/site, its links checked
# make lint         ruff, clang-format, clang-tidy and mypy
# make wheel        dist/ingot-*.whl, which needs no compiler where it is installed: manylinux, if auditwheel installs
# make sdist        dist/ingot-*.tar.gz, which needs one
# make native       the native module in place, for PYTHONPATH=src
# make haswell      kernel tests on an emulated processor that has AVX2 and nothing newer (needs qemu-user)
# make tiles        kernels for AMX on a machine with AVX-512 and BF16 but no tile registers: their instructions trapped
# make sanitize     kernel tests under AddressSanitizer and UndefinedBehaviorSanitizer (SANITIZED=native: the slow ones too)
# make tsan         kernels, sessions, executor and a server under ThreadSanitizer
# make mutants      plants faults one by one and names those that no test notices (an hour; MUTANT_ARGS="--only bench")

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
PYTEST_ARGS ?=
MUTANT_ARGS ?=
SANITIZED ?= native and not slow

PIP := $(VENV)/bin/pip --disable-pip-version-check -q
ROOMS := src convert builder plugins runtime configs
SOURCES := pyproject.toml $(wildcard CMakeLists.txt) $(shell find $(ROOMS) -type f \( -name '*.py' -o -name '*.pyi' \
	-o -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' -o -name '*.txt' -o -name '*.cmake' -o -name '*.toml' \
	-o -name '*.json' \
	-o -name '*.safetensors' -o -name '*.md' -o -name '*.html' \))

# Kernels of AVX-512, its BF16 and AMX in plain C++ too: for tests, no part of the wheel that ships.
EMULATED := --config-settings=cmake.define.INGOT_EMULATE=ON

unexport PYTHONPATH # what is tested is what was installed
unexport PYTHONDONTWRITEBYTECODE # each worker and each process that a test starts would compile the modules again

.PHONY: quickstart test lint docs wheel sdist native sanitize tsan tiles trapped-tiles haswell mutants clean preflight
.DELETE_ON_ERROR:

# An environment that has the kernels of all machines keeps them; else those of this one are compiled, which is quicker.
QUICK := $(if $(wildcard $(VENV)/.installed),$(VENV)/.installed,$(VENV)/.installed-here)
quickstart: $(QUICK)
	@$(VENV)/bin/ingot quickstart --output_dir build/quickstart

test: $(VENV)/.installed-test
	$(VENV)/bin/python -m pytest -n $(JOBS) $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	git ls-files '*.cpp' '*.h' '*.cu' '*.cuh' | xargs $(VENV)/bin/clang-format --dry-run --Werror
	PATH="$(abspath $(VENV))/bin:$$PATH" cmake -S . -B build/lint -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_EXPORT_COMPILE_COMMANDS=ON \
		-DPython_EXECUTABLE=$(abspath $(VENV)/bin/python) >/dev/null
	git ls-files 'plugins/cpu/*.cpp' | grep -vE '_(vector|int8|pairs|tiles)\.cpp$$' | xargs -P $(JOBS) -n 4 $(VENV)/bin/clang-tidy -p build/lint --quiet
	$(VENV)/bin/mypy

docs: $(VENV)/.installed-dev
	$(VENV)/bin/zensical build --strict --clean
	@echo "build/site/index.html"

wheel: dist/.built
	@ls dist/ingot-*.whl

sdist: | preflight $(VENV)/bin/pip
	@mkdir -p dist && rm -f dist/ingot-*.tar.gz
	@git describe --always --dirty --abbrev=12 --exclude='*' > COMMIT || echo unknown > COMMIT
	@$(PIP) install build && $(VENV)/bin/python -m build --sdist --outdir dist . > /dev/null; code=$$?; rm -f COMMIT; exit $$code
	@ls dist/ingot-*.tar.gz

preflight:
	$(eval problem := $(shell $(if $(filter command environment,$(firstword $(origin CXX))),CXX='$(CXX)') .ci/preflight $(PYTHON)))
	$(if $(problem),$(error $(problem)))

$(VENV)/bin/pip: | preflight
	@$(PYTHON) -m venv $(VENV)

dist/.built: $(SOURCES) | preflight $(VENV)/bin/pip
	@mkdir -p dist && rm -f dist/ingot-*.whl build/wheel/ingot-*.whl
	@echo "Building the wheel: kernels of every instruction set are compiled, $(JOBS) at a time. This takes some minutes."
	@CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PIP) wheel --no-deps -w build/wheel .
	@.ci/manylinux $(VENV)/bin/python build/wheel dist
	@touch $@

$(VENV)/.installed-here: $(SOURCES) | preflight $(VENV)/bin/pip
	@echo "Installing ingot into $(VENV): its dependencies, and kernels compiled for this machine. This takes about three minutes on two cores."
	@CMAKE_BUILD_PARALLEL_LEVEL=$$(nproc) .ci/quietly build/install.log $(PIP) install --no-compile \
		--config-settings=cmake.define.INGOT_LEVELS=native ".[serve]"
	@touch $@

$(VENV)/.installed: dist/.built
	$(PIP) install --force-reinstall --no-deps dist/ingot-*.whl
	$(PIP) install dist/ingot-*.whl
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed constraints.txt
	$(PIP) install --no-compile -c constraints.txt "$$(ls dist/ingot-*.whl)[test]"
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PIP) install --force-reinstall --no-deps $(EMULATED) .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-test
	$(PIP) install --no-compile -c constraints.txt "$$(ls dist/ingot-*.whl)[dev]"
	@touch $@

native: $(VENV)/.installed-dev
	PATH="$(abspath $(VENV))/bin:$$PATH" cmake -S . -B build/native -DCMAKE_BUILD_TYPE=Release -DINGOT_IN_PLACE=ON -DINGOT_EMULATE=ON -DPython_EXECUTABLE=$(abspath $(VENV)/bin/python)
	PATH="$(abspath $(VENV))/bin:$$PATH" cmake --build build/native -j$(JOBS)

sanitize: $(VENV)/.installed-test
	rm -rf build/sanitize/site
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PIP) install --no-deps --target build/sanitize/site \
		--config-settings=cmake.define.INGOT_SANITIZE=address $(EMULATED) --config-settings=build-dir=build/sanitize/cmake .
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 PYTHONPATH=build/sanitize/site \
		$(VENV)/bin/python -m pytest -n $(JOBS) --timeout 1800 tests/plugins -m "$(SANITIZED)" --emulated-twins -p no:cacheprovider

tsan: $(VENV)/.installed-test
	rm -rf build/tsan/site
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PIP) install --no-deps --target build/tsan/site \
		--config-settings=cmake.define.INGOT_SANITIZE=thread --config-settings=build-dir=build/tsan/cmake .
	CXX="$(CXX)" .ci/tsan $(VENV)/bin/python build/tsan/site $(JOBS)

# Tile registers need no trap. It would not hold there: ldtilecfg runs without permission, and tilezero faults.
tiles: $(VENV)/.installed-test
	@if [ "$$($(VENV)/bin/python -c 'from ingot.plugins.cpu.native import detect_isa; print(detect_isa())')" = amx ]; then \
		echo "this machine has tile registers: make test runs the kernels for AMX on them, without a trap"; \
	else $(MAKE) trapped-tiles; fi

# Built as deep as the wheel, so that ccache knows the kernels that are the same.
trapped-tiles: $(VENV)/.installed-test
	@grep -qw avx512_bf16 /proc/cpuinfo || { echo "this machine lacks AVX-512 with BF16, which kernels for AMX use beside tiles"; exit 1; }
	rm -rf build/tiles-site
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PIP) install --no-deps --target build/tiles-site \
		--config-settings=cmake.define.INGOT_TILE_TRAP=ON $(EMULATED) --config-settings=build-dir=build/tiles .
	@isa=$$(PYTHONPATH=build/tiles-site $(VENV)/bin/python -c 'from ingot.plugins.cpu.native import detect_isa; print(detect_isa())'); \
		[ "$$isa" = amx ] || { echo "tiles are trapped, but the machine offers $$isa, expected amx"; exit 1; }
	PYTHONPATH=build/tiles-site $(VENV)/bin/python -m pytest -n $(JOBS) --timeout 1800 tests/plugins/cpu -m native -k amx -p no:cacheprovider
	PYTHONPATH=build/tiles-site $(VENV)/bin/python -m pytest -n $(JOBS) --timeout 1800 tests/e2e -m "native and not slow" -p no:cacheprovider
	PYTHONPATH=build/tiles-site $(VENV)/bin/python -m pytest -n $(JOBS) --timeout 1800 $(wildcard tests/runtime/*.py) tests/house/test_support.py \
		tests/e2e/test_float64.py -p no:cacheprovider

HASWELL := qemu-x86_64 -cpu Haswell $(VENV)/bin/python
haswell: $(VENV)/.installed-test
	@command -v qemu-x86_64 >/dev/null || { echo "there is no qemu-x86_64: apt install qemu-user"; exit 1; }
	@isa=$$($(HASWELL) -c 'from ingot.plugins.cpu.native import detect_isa; print(detect_isa())' 2>/dev/null); \
		[ "$$isa" = avx2 ] || { echo "the emulated processor offers $${isa:-nothing}, expected avx2"; exit 1; }
	$(HASWELL) -m pytest --timeout 1800 -p no:cacheprovider tests/plugins/cpu/test_kernels.py tests/plugins/cpu/test_matmul_quantised.py \
		-k "avx2 and not company and not largest"

mutants: $(VENV)/.installed-test
	$(VENV)/bin/python -m tests.mutation --jobs $(JOBS) $(MUTANT_ARGS)

clean:
	rm -rf build dist $(VENV)
