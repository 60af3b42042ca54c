# Thin targets over deps/setup.py, the CMake presets and pytest. `make help` lists them.
.DEFAULT_GOAL := build
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
MAKEFLAGS += --no-print-directory
.NOTPARALLEL:

JOBS ?= $(shell nproc 2>/dev/null || echo 2)
PRESET ?= release
BIN := build/$(PRESET)/bin
SETUP := python3 deps/setup.py
# A CMake that the set-up had to fetch is here.
export PATH := $(or $(LOWKV_CACHE_DIR),$(HOME)/.cache/lowkv)/bin:$(PATH)
# The value of one of the paths that the set-up knows, e.g. $(call dep,LOWKV_MODEL): a shell expression.
dep = $$($(SETUP) --paths | python3 -c 'import json,sys; print(json.load(sys.stdin)["$(1)"])')
# Ninja where it is, in new build folders.
export CMAKE_GENERATOR ?= $(if $(shell command -v ninja),Ninja,Unix Makefiles)
# $(call BUILD,preset[,targets]): configured once; the build itself configures again where that is needed.
BUILD = mkdir -p build; [[ -e build/$(1)/CMakeCache.txt && -z "$(CMAKE_OPTIONS)" ]] || \
	cmake --preset $(1) $(CMAKE_OPTIONS) >build/$(1)-configure.log || \
	{ cat build/$(1)-configure.log; rm -f build/$(1)/CMakeCache.txt; exit 1; }; \
	cmake --build --preset $(1) -j $(JOBS) $(if $(2),--target $(2))
# The core in build/release, which other builds take from there.
CORE = $(SETUP) headers; $(call BUILD,release,lowkv lowkv_filters lowkv_calibrate)

.PHONY: help
help: ## this list
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

.PHONY: setup
setup: ## fetch and build the pinned dependencies into ~/.cache/lowkv (once)
	@$(SETUP)

.PHONY: build
build: setup ## build everything (PRESET=release, debug, ...; CMAKE_OPTIONS=-DLOWKV_CUDA=ON: with it from then on)
	@$(call BUILD,$(PRESET))

.PHONY: demo
demo: ## stream an answer from the packed cache, then compare schemes: builds only what that takes
	@$(SETUP) headers model llama-libraries demo-text
	$(call BUILD,$(PRESET),lowkv_cli ggml-lowkv)
	deps/demo.sh "$(BIN)/lowkv" "$(call dep,LOWKV_MODEL)" "$(call dep,LOWKV_DEMO_PROMPT)"

.PHONY: llama
llama: ## stock llama.cpp's programs (about 7 minutes): `lowkv run` finds them where the PATH has none
	@$(SETUP) llama

.PHONY: test
test: test-cpp test-eval test-e2e test-python ## what every change must pass: C++, the real model, the Python package

.PHONY: nightly
nightly: test ## `make test` and all lanes, one after the other (hours); `make lanes` lists them
	@tests/lanes.py --all

.PHONY: lanes
lanes: ## the lanes of nightly: what each runs, and about how long
	@tests/lanes.py --list

.PHONY: check
check: ## one test: T=NAME, of C++ (sorted_codec), or of pytest (tests/e2e/test_run.py)
	@test -n "$(T)" || { echo "make check needs T=NAME, for example T=sorted_codec or T=tests/e2e/test_run.py"; exit 1; }
	case "$(T)" in
	*e2e/*) $(MAKE) test-e2e LONG=1 WORKERS=1 E2E="$(T)" ;;
	*python/*) $(MAKE) test-python LONG=1 WORKERS=1 PY="$(T)" ;;
	*) $(SETUP); $(call BUILD,$(PRESET),test_$(subst .,_,$(T))); "$(BIN)/test_$(subst .,_,$(T))" $(ARGS) ;;
	esac

space := $(subst ,, )
# LONG=1 runs all of tests/e2e and tests/python: else those that are not marked long.
SHORT := $(if $(LONG),,-m "not long")
E2E := tests/e2e
PY := tests/python
# Tests at once, by files: each takes one thread and up to a gigabyte.
WORKERS ?= 2
AT_ONCE = --timeout 300 $(if $(filter-out 1,$(WORKERS)),-n $(WORKERS) --dist loadfile)

.PHONY: test-cpp
test-cpp: build ## C++ tests, every kernel on every implementation (LONG=1: every case, not every second)
	@LOWKV_TEST_SAMPLE=$(if $(LONG),1,2) ctest --preset $(PRESET) -j $(JOBS)

.PHONY: test-eval
test-eval: setup ## what the scripts of eval/ count and remember, and those that check documents (seconds, no model)
	@"$(call dep,LOWKV_PYTHON)" -m pytest -q tests/eval tests/documents $(PYTEST_ARGS)

.PHONY: test-e2e
test-e2e: build ## the plug-in and the command on a real model
	@$(SETUP) text gemma venv-transformers
	LOWKV_BUILD_DIR="$(CURDIR)/build/$(PRESET)" "$(call dep,LOWKV_PYTHON)" -m pytest $(E2E) $(SHORT) $(AT_ONCE) \
	    $(PYTEST_ARGS)

.PHONY: test-long
test-long: ## what `make test` leaves out because it is long: every second case of the kernels', tests of e2e and the package
	@$(MAKE) test-cpp LONG=1
	$(MAKE) test-e2e test-python SHORT="-m long"

.PHONY: test-uses
test-uses: build ## uses of llama-server that no other test has: several slots at once, a client that goes back (5 minutes)
	LOWKV_BUILD_DIR="$(CURDIR)/build/$(PRESET)" "$(call dep,LOWKV_PYTHON)" -m pytest tests/uses $(PYTEST_ARGS)

.PHONY: test-llama
test-llama: build ## llama.cpp's own server tests, stock and with the plug-in (10 minutes)
	@$(SETUP) venv-llama-server-tests
	LOWKV_BUILD_DIR="$(CURDIR)/build/$(PRESET)" "$(call dep,LOWKV_PYTHON)" tests/llama_server/run.py \
	    --table docs/llama.cpp-server-tests.md

VERSIONS ?= 0.11.0 0.13.1 0.15.3 0.20.2 0.22.0 0.24.0 0.25.1 0.25.3
.PHONY: test-versions
test-versions: build ## the plug-in under older llama.cpp (VERSIONS="0.11.0 0.25.1": their ggml) and the set-up's
	@parts="llama $(addprefix llama-,$(VERSIONS))"
	$(SETUP) $$parts
	LOWKV_MATRIX="$$parts" LOWKV_BUILD_DIR="$(CURDIR)/build/$(PRESET)" "$(call dep,LOWKV_PYTHON)" -m pytest \
	    tests/matrix $(PYTEST_ARGS)

.PHONY: test-trial
test-trial: build ## how a ggml is tried that lowkv does not know: with one thing changed in each of seven (10 minutes)
	LOWKV_MATRIX=trial LOWKV_BUILD_DIR="$(CURDIR)/build/$(PRESET)" "$(call dep,LOWKV_PYTHON)" -m pytest \
	    tests/matrix/test_trial.py $(PYTEST_ARGS)

.PHONY: newest
newest: build ## the newest llama.cpp that PyPI has, tried as `lowkv run` tries one (5 minutes)
	LOWKV_MATRIX=newest LOWKV_BUILD_DIR="$(CURDIR)/build/$(PRESET)" "$(call dep,LOWKV_PYTHON)" -m pytest -rA \
	    tests/matrix/test_newest.py $(PYTEST_ARGS)

BUILDS ?= dl noomp debug static
.PHONY: test-builds
test-builds: build ## the plug-in under llama.cpp built in other ways (BUILDS="dl noomp": which)
	@parts="$(addprefix llama-,$(BUILDS))"
	$(SETUP) llama $$parts
	LOWKV_MATRIX="llama $$parts" LOWKV_BUILD_DIR="$(CURDIR)/build/$(PRESET)" "$(call dep,LOWKV_PYTHON)" -m pytest \
	    tests/matrix $(PYTEST_ARGS)

PACKAGE := build/python/site
# $(call INSTALL,folder[,settings[,source[,preset]]]): the Python package in folder/site, or that of another source, on
# the core of build/preset
INSTALL = CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) "$(call dep,LOWKV_TRANSFORMERS_PYTHON)" -m pip \
	--disable-pip-version-check install --quiet --upgrade --no-deps --no-build-isolation --target $(1)/site \
	--config-settings=build-dir=$(CURDIR)/$(1)/cmake --config-settings=cmake.define.LOWKV_WERROR=ON \
	--config-settings=cmake.define.LOWKV_CORE=$(CURDIR)/build/$(or $(4),release) $(2) $(or $(3),.)
# $(call PYTEST,paths,tests): tests of the package, with these paths behind its own
PYTEST = LOWKV_MODEL="$(call dep,LOWKV_MODEL)" PYTHONPATH="$(CURDIR)/$(PACKAGE):$(1)" \
	"$(call dep,LOWKV_TRANSFORMERS_PYTHON)" -m pytest $(2) $(PYTEST_ARGS)

.PHONY: package
package: ## build the Python package into build/python/site, on the core in build/release
	@$(CORE)
	$(SETUP) model venv-transformers lmcache
	$(call INSTALL,build/python)

.PHONY: package-opencl
package-opencl: ## the same with OpenCL devices, into build/python-opencl/site
	@$(CORE)
	$(SETUP) model venv-transformers
	$(call INSTALL,build/python-opencl,--config-settings=cmake.define.LOWKV_OPENCL=ON)

# The package lowkv-cuda beside it: with the kernels on the host, into build/python-cuda/site, or for GPUs.
.PHONY: package-cuda-emulated
package-cuda-emulated: package ## lowkv-cuda with its kernels run on the host, for tests, into build/python-cuda/site
	$(call INSTALL,build/python-cuda,--config-settings=cmake.define.LOWKV_CUDA=OFF \
	    --config-settings=cmake.define.LOWKV_CUDA_EMULATED=ON,./python/cuda)

.PHONY: package-cuda
package-cuda: package ## lowkv-cuda for GPUs, by nvcc, into build/python-gpu/site (CUDA_TARGETS=90: of that kind alone)
	@type -P nvcc >/dev/null || { echo "make package-cuda needs nvcc, of the CUDA toolkit (12.8 or newer)"; exit 1; }
	$(call INSTALL,build/python-gpu,$(if $(CUDA_TARGETS),--config-settings="cmake.define.LOWKV_CUDA_TARGETS=$(subst $(space),;,$(CUDA_TARGETS))"),./python/cuda)

.PHONY: test-python-cuda
test-python-cuda: package-cuda-emulated ## the Python package's caches on CUDA's kernels, run on the host
	@# Tensor cores take long on a host: test_devices.py has them, C++ tests have every case.
	LOWKV_DEVICE=cuda $(call PYTEST,$(CURDIR)/build/python-cuda/site,tests/python/test_devices.py)
	LOWKV_TEST_TENSOR=none LOWKV_DEVICE=cuda $(call PYTEST,$(CURDIR)/build/python-cuda/site,tests/python)

.PHONY: test-python
test-python: package ## the Python package, on the newest transformers
	@$(call PYTEST,$(call dep,LOWKV_LMCACHE),$(PY) $(SHORT) $(AT_ONCE))

.PHONY: test-older-transformers
test-older-transformers: package ## the Python package on the previous and the oldest transformers
	@$(SETUP) oldest-transformers previous-transformers
	$(call PYTEST,$(call dep,LOWKV_PREVIOUS_TRANSFORMERS),tests/python/test_families.py)
	$(call PYTEST,$(call dep,LOWKV_OLDEST_TRANSFORMERS),tests/python/test_families.py tests/python/test_generate.py)

.PHONY: test-sweep
test-sweep: package ## every type of model that transformers has, tiny, with an exact cache and with none, against stock
	@$(call PYTEST,$(CURDIR)/tests/sweep,tests/sweep)

.PHONY: test-llama-cpp-python
test-llama-cpp-python: build package ## lowkv.llama_cpp in a real llama-cpp-python (builds it: 10 minutes, once)
	@$(SETUP) llama-cpp-python
	LOWKV_BUILD_DIR="$(CURDIR)/build/$(PRESET)" LOWKV_MODEL="$(call dep,LOWKV_MODEL)" \
	    LOWKV_LLAMA_CPP_PYTHON="$(call dep,LOWKV_LLAMA_CPP_PYTHON)" \
	    "$(call dep,LOWKV_PYTHON)" -m pytest tests/e2e/test_llama_cpp_python.py $(PYTEST_ARGS)

.PHONY: test-vllm
test-vllm: package ## lowkv in vLLM on the CPU: engines with small models and SmolLM2 (half an hour; 2 GB of packages)
	@$(SETUP) venv-vllm
	LOWKV_MODEL="$(call dep,LOWKV_MODEL)" PYTHONPATH="$(CURDIR)/$(PACKAGE)" "$(call dep,LOWKV_VLLM_PYTHON)" -m pytest \
	    tests/vllm $(PYTEST_ARGS)

.PHONY: dist
dist: ## a release's files in dist/: the wheel with command and plug-in, its source archive, the tar.gz, checksums
	@$(SETUP) headers model venv-transformers llama-libraries llama-portable venv-dist
	$(call BUILD,release,lowkv lowkv_filters lowkv_calibrate lowkv_calibration_files)
	deps/dist.py

.PHONY: dist-aarch64
dist-aarch64: ## the tar.gz for 64-bit ARM, by Debian's cross compiler; its doctor and an answer under qemu-user
	@type -P $(AARCH64_TOOLS) >/dev/null || { echo "make dist-aarch64 $(AARCH64_HINT)"; exit 1; }
	$(SETUP) headers model llama-libraries llama-aarch64
	$(call BUILD,aarch64,lowkv lowkv_calibrate lowkv_calibration_files)
	deps/dist.py --aarch64
	for words in doctor "generate -n 4 -p Once -m $(call dep,LOWKV_MODEL)"; do
	    qemu-aarch64 -L /usr/aarch64-linux-gnu build/dist/tree-aarch64/bin/lowkv $$words
	done

.PHONY: test-dist
test-dist: dist ## what `make dist` made, in an empty environment, and in a root without compiler and Python
	@$(SETUP) llama
	LOWKV_DIST="$(CURDIR)/dist" "$(call dep,LOWKV_PYTHON)" -m pytest tests/release $(PYTEST_ARGS)

.PHONY: test-deploy
test-deploy: ## deploy/ by the schemas of compose files and Kubernetes, and by Grafana's types
	@$(SETUP) venv-deploy
	"$(call dep,LOWKV_DEPLOY_PYTHON)" -m pytest tests/deploy $(PYTEST_ARGS)

.PHONY: docs
docs: package ## the API reference of the Python package, in build/docs
	@$(SETUP) api-docs
	PYTHONPATH="$(CURDIR)/$(PACKAGE):$(call dep,LOWKV_LMCACHE):$(call dep,LOWKV_API_DOCS)" \
	    "$(call dep,LOWKV_TRANSFORMERS_PYTHON)" deps/api_reference.py build/docs

.PHONY: site
site: ## the documentation site in build/site, with the API reference if `make docs` has made it; any warning fails
	@$(SETUP) venv-site
	NO_MKDOCS_2_WARNING=1 "$(call dep,LOWKV_SITE_PYTHON)" -m mkdocs build --strict
	echo "the site: build/site/index.html, or python3 -m http.server -d build/site"

.PHONY: change-cost
change-cost: setup ## what a preset, a word, a subcommand, an instruction set cost in files: made in a copy, built and tested
	@deps/change_cost.py $(CHANGES)

# The package on the core of build/coverage, whose counts it adds to. Python runs in one process: coverage.py, found by a
# path alone, does not follow the workers of pytest.
.PHONY: coverage
coverage: ## which lines and branches `make test` runs, by room (an hour); build/coverage/report.html has each line
	@$(SETUP) text gemma venv-transformers lmcache venv-coverage
	$(call BUILD,coverage)
	$(call INSTALL,build/python-coverage,--config-settings=cmake.define.CMAKE_CXX_FLAGS=--coverage,,coverage)
	find build/coverage build/python-coverage -name '*.gcda' -delete
	LOWKV_TEST_SAMPLE=2 ctest --preset coverage -j $(JOBS)
	$(MAKE) test-e2e PRESET=coverage
	site=$$(echo "$$(dirname $(call dep,LOWKV_COVERAGE_PYTHON))"/../lib/python*/site-packages)
	LOWKV_MODEL="$(call dep,LOWKV_MODEL)" PYTHONPATH="$(CURDIR)/build/python-coverage/site:$(call dep,LOWKV_LMCACHE):$$site" \
	    "$(call dep,LOWKV_TRANSFORMERS_PYTHON)" -m coverage run --branch --source=lowkv \
	    --data-file=build/coverage/.coverage -m pytest $(PY) $(SHORT) $(PYTEST_ARGS)
	"$(call dep,LOWKV_COVERAGE_PYTHON)" tests/covered.py --collect

.PHONY: mutants
mutants: package ## faults made at random, and whether the tests see them (SAMPLE=20 SEED=the day ROOMS="core Python" AGAIN=1)
	@$(SETUP) text gemma llama venv-mutants
	"$(call dep,LOWKV_MUTANTS_PYTHON)" tests/mutants.py $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEED),--seed $(SEED)) \
	    $(foreach room,$(ROOMS),--room $(room)) $(if $(AGAIN),--again)

.PHONY: test-core
test-core: setup ## the core and its tests without guests/, which must not be needed
	@$(call BUILD,core)
	ctest --preset core -j $(JOBS)

.PHONY: test-asan
test-asan: setup ## core tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@$(call BUILD,asan-ubsan)
	ctest --preset asan-ubsan -j $(JOBS)

.PHONY: test-tsan
test-tsan: setup ## core tests that run on several threads, and the plug-in's of two models, under ThreadSanitizer
	@$(call BUILD,tsan)
	ctest --preset tsan -j $(JOBS)

# What the targets in Python import: the package, its tests' models and files, atheris.
FUZZ_PATH = $(CURDIR)/$(PACKAGE):$(call dep,LOWKV_LMCACHE):$(call dep,LOWKV_ATHERIS):$(CURDIR)/tests/python:$(CURDIR)/tests/python/saving
SECONDS := 60
.PHONY: fuzz
fuzz: package ## libFuzzer on what reads others' bytes, SECONDS=60 each (T="image scheme": these); its corpus stays in the cache
	@type -P clang++-19 >/dev/null || { echo "make fuzz needs clang++-19; on Debian 12: apt-get install clang-19" \
	    "libclang-rt-19-dev libomp-19-dev"; exit 1; }
	$(SETUP) headers llama-libraries fuzz
	$(call BUILD,fuzz,fuzz_targets)
	PYTHONPATH="$(FUZZ_PATH)" tests/fuzz/run.py --build build/fuzz --seconds $(SECONDS) \
	    --python "$(call dep,LOWKV_TRANSFORMERS_PYTHON)" $(T)

NEEDS_OPENCL = type -P clinfo >/dev/null && clinfo -l | grep -q Device || { echo "make $@ needs an OpenCL device and" \
	"clinfo; on Debian: apt-get install pocl-opencl-icd clinfo opencl-c-headers ocl-icd-opencl-dev"; exit 1; }

.PHONY: test-opencl
test-opencl: ## lowkv::opencl on the device LOWKV_TEST_OPENCL (opencl:NAME), or the first: codes, attention, the cache, Python
	@$(NEEDS_OPENCL)
	$(CORE)
	$(call BUILD,opencl,opencl_tests)
	ctest --preset opencl -j $(JOBS)
	$(MAKE) test-python-opencl

CACHE_ON = cache_on plugin_operations plugin_stats memory_budget
.PHONY: test-cache-on
test-cache-on: ## the plug-in for llama.cpp with its caches on the device LOWKV_TEST_OPENCL, or the first
	@$(NEEDS_OPENCL)
	$(SETUP)
	$(CORE)
	$(call BUILD,opencl,lowkv_cli ggml-lowkv)
	LOWKV_DEVICE="$${LOWKV_TEST_OPENCL:-opencl}" LOWKV_BUILD_DIR="$(CURDIR)/build/opencl" "$(call dep,LOWKV_PYTHON)" \
	    -m pytest $(CACHE_ON:%=tests/e2e/test_%.py) -m "not long" -k "not rows" $(PYTEST_ARGS) # latent rows

.PHONY: test-python-opencl
test-python-opencl: package-opencl ## the Python package's caches on the device LOWKV_TEST_OPENCL, or the first
	LOWKV_DEVICE="$${LOWKV_TEST_OPENCL:-opencl}" LOWKV_MODEL="$(call dep,LOWKV_MODEL)" \
	    PYTHONPATH="$(CURDIR)/build/python-opencl/site" "$(call dep,LOWKV_TRANSFORMERS_PYTHON)" -m pytest tests/python \
	    $(PYTEST_ARGS)

.PHONY: compile-opencl
compile-opencl: ## lowkv::opencl's kernels for three of Intel's GPUs (tgllp, dg2, pvc) by ocloc; nothing is run
	@type -P ocloc >/dev/null || { echo "make compile-opencl needs ocloc; on Debian 12: apt-get install" \
	    "intel-opencl-icd opencl-c-headers ocl-icd-opencl-dev"; exit 1; }
	$(CORE)
	$(call BUILD,opencl,compile_opencl)

.PHONY: compile-cuda
compile-cuda: ## lowkv::cuda and its tests by nvcc, for sm_75 to sm_120 (CUDA_TARGETS="80 90": for those); nothing is run
	@type -P nvcc >/dev/null || { echo "make compile-cuda needs nvcc, of the CUDA toolkit (12.8 or newer)"; exit 1; }
	$(CORE)
	$(if $(CUDA_TARGETS),mkdir -p build; cmake --preset cuda -DLOWKV_CUDA_TARGETS="$(subst $(space),;,$(CUDA_TARGETS))" >build/cuda-configure.log)
	$(call BUILD,cuda,test_gpu_codes test_gpu_attention test_gpu_caller)

.PHONY: count-cuda
count-cuda: compile-cuda ## the machine instructions of attention's four main kernels, each with its bar; nothing is run
	@$(SETUP) venv-sass
	"$(call dep,LOWKV_SASS_PYTHON)" tests/devices/count_cuda.py build/cuda/devices/cuda/tensor_128.o

.PHONY: compile-hip
compile-hip: ## the kernels' CUDA dialect for two of AMD's GPUs (gfx90a, gfx1030) by hipcc; nothing is run
	@type -P hipcc >/dev/null || { echo "make compile-hip needs hipcc; on Debian: apt-get install hipcc"; exit 1; }
	mkdir -p build/hip
	HIP_PLATFORM=amd hipcc -x hip -include hip/hip_runtime.h --offload-arch=gfx90a --offload-arch=gfx1030 -std=c++20 \
	    -O3 -ffp-contract=off -Wall -Werror -I . -I include -c devices/cuda/kernels.cu -o build/hip/kernels.o

.PHONY: test-cuda
test-cuda: compile-cuda ## lowkv::cuda on the GPU LOWKV_TEST_CUDA (cuda:NUMBER), or the first: codes, attention
	ctest --preset cuda

.PHONY: gpu-folder
gpu-folder: CUDA_TARGETS := $(or $(CUDA_TARGETS),90)
gpu-folder: ## an archive that tests and measures lowkv on a machine with a GPU (CUDA_TARGETS=90: its kind), in build/gpu
	@$(MAKE) compile-cuda package-cuda CUDA_TARGETS="$(CUDA_TARGETS)"
	$(call BUILD,cuda,cuda_attention ggml-lowkv)
	bench/gpu_folder.py build/gpu

.PHONY: test-opencl-races
test-opencl-races: ## lowkv::opencl's kernels, each in a small case, interpreted by oclgrind, which looks for data races
	@type -P oclgrind >/dev/null || { echo "make test-opencl-races needs oclgrind; on Debian: apt-get install oclgrind"; exit 1; }
	$(CORE)
	$(call BUILD,opencl,test_opencl_codes test_opencl_attention)
	mkdir -p build/oclgrind
	for test in codes attention; do
	    # Its LLVM makes an intrinsic of an optimised program that it can't interpret.
	    LOWKV_TEST_DEVICE=own LOWKV_TEST_OPENCL=opencl:oclgrind oclgrind --data-races --build-options \
	        -cl-opt-disable --log build/oclgrind/$$test.log build/opencl/bin/test_opencl_$$test -tc='small*,rows*'
	    cat build/oclgrind/$$test.log
	    test ! -s build/oclgrind/$$test.log
	done

AARCH64_TOOLS := aarch64-linux-gnu-g++ qemu-aarch64
AARCH64_HINT := needs $(AARCH64_TOOLS); on Debian: apt-get install g++-aarch64-linux-gnu qemu-user
.PHONY: test-aarch64
test-aarch64: ## core tests cross-compiled for 64-bit ARM, under qemu-user (ALL=1: the slow ones too)
	@type -P $(AARCH64_TOOLS) >/dev/null || { echo "make test-aarch64 $(AARCH64_HINT)"; exit 1; }
	$(SETUP) headers
	mkdir -p build
	$(call BUILD,aarch64) --target $(if $(ALL),all,emulated)
	ctest --preset aarch64$(if $(ALL),-all) -j $(JOBS)

WINE := /usr/lib/wine/wine64
WINDOWS_TOOLS := x86_64-w64-mingw32-g++-posix $(WINE)
# Wine's files are in the cache, not in the home folder. It looks for llama.cpp's DLLs in WINEPATH.
define WINDOWS
	type -P $(WINDOWS_TOOLS) >/dev/null || { echo "$(1) needs $(WINDOWS_TOOLS); on Debian:" \
	    "apt-get install g++-mingw-w64-x86-64-posix wine64"; exit 1; }
	$(SETUP) headers model llama-libraries llama-windows llama-msvc
	export WINEPREFIX="$(call dep,LOWKV_CACHE_DIR)/wine" WINEDEBUG=-all
	export WINEPATH="$$(tr / '\\' <<<"Z:$(call dep,LOWKV_LLAMA_WINDOWS)")"
	$(WINE) cmd /c exit </dev/null >/dev/null 2>&1
endef
.PHONY: test-windows
test-windows: build ## for 64-bit Windows by MinGW, under wine64: core, plug-in (in DLLs by MSVC too), command, the zip
	@$(call WINDOWS,make test-windows)
	$(call BUILD,windows,emulated lowkv_cli ggml-lowkv test_windows_host)
	ctest --preset windows -j $(JOBS)
	deps/dist.py --windows
	LOWKV_BUILD_DIR="$(CURDIR)/build/$(PRESET)" "$(call dep,LOWKV_PYTHON)" -m pytest tests/windows $(PYTEST_ARGS)

.PHONY: dist-windows
dist-windows: ## the zip for 64-bit Windows, by Debian's MinGW-w64, in dist/
	@$(call WINDOWS,make dist-windows)
	$(call BUILD,windows,lowkv_cli ggml-lowkv)
	deps/dist.py --windows

.PHONY: compile-macos
compile-macos: ## everything but the tests for macOS on Apple's processors, by zig's clang; nothing is run (5 minutes)
	@$(SETUP) headers llama-libraries macos
	mkdir -p build
	cmake --preset macos -DLOWKV_ZIG="$(call dep,LOWKV_ZIG)" -DLOWKV_MACOS="$(call dep,LOWKV_MACOS)" \
	    >build/macos-configure.log || { cat build/macos-configure.log; exit 1; }
	$(call BUILD,macos,lowkv lowkv_shared lowkv_filters lowkv_calibrate ggml-lowkv lowkv_cli)
	for file in build/macos/lib/libggml-lowkv.so build/macos/bin/lowkv; do
	    test "$$(head -c 4 $$file | od -An -tx4)" = " feedfacf" || { echo "$$file is not for macOS"; exit 1; }
	done

.PHONY: bench
bench: build ## attention kernels against ggml's, then stock llama-bench with and without the plug-in
	@mkdir -p build/bench
	$(BIN)/lowkv-bench attention --json build/bench/attention.json
	"$(call dep,LOWKV_PYTHON)" bench/llama_bench.py --build "build/$(PRESET)" --depths 0,4096,8000

.PHONY: bench-shapes
bench-shapes: build ## decoding at 4k to 32k tokens in the shapes of three real models, stock beside it (an hour, 20 GB)
	"$(call dep,LOWKV_PYTHON)" bench/shapes.py --out docs/performance $(BENCH_ARGS)

.PHONY: bench-length
bench-length: package ## one sequence of a million tokens in all layers: memory, packing, decoding (three minutes, 5 GiB)
	@$(SETUP) venv-transformers
	PYTHONPATH="$(CURDIR)/$(PACKAGE)" "$(call dep,LOWKV_PYTHON)" bench/long_context.py \
	    --python "$(call dep,LOWKV_TRANSFORMERS_PYTHON)" $(BENCH_ARGS)

.PHONY: bench-batch
bench-batch: build ## sequences and tokens a second at equal memory, by stock llama-batched-bench (15 minutes)
	"$(call dep,LOWKV_PYTHON)" bench/llama_batch.py --build "build/$(PRESET)" $(BENCH_ARGS)

.PHONY: bench-vllm
bench-vllm: package ## vLLM under load at equal memory, its own caches beside ours (a quarter of an hour)
	@$(SETUP) venv-vllm
	"$(call dep,LOWKV_PYTHON)" bench/vllm_serve.py $(BENCH_ARGS)

.PHONY: report
report: build ## a dated benchmark report with raw logs in docs/reports (an hour; REPORT_ARGS=--list: of what)
	@$(SETUP) text
	"$(call dep,LOWKV_PYTHON)" bench/report.py --build "build/$(PRESET)" $(REPORT_ARGS)

.PHONY: soak
soak: build ## 10 minutes of mixed work on a llama-server, and what must be as before afterwards (SOAK_ARGS=...)
	@$(SETUP) text
	"$(call dep,LOWKV_PYTHON)" bench/soak.py --build "build/$(PRESET)" $(SOAK_ARGS)

.PHONY: quality
quality: build ## what each scheme loses on a real model: tables and pictures of docs/quality.md (40 minutes)
	@$(SETUP) text bible
	"$(call dep,LOWKV_PYTHON)" eval/quality.py --build "build/$(PRESET)" $(QUALITY_ARGS)

# Each goes on where it was stopped; EVAL_ARGS="--schemes exact,lowkv2" goes to all that take it.
.PHONY: evaluation
evaluation: build package ## texts, pass keys, retrieval, drift, reasoning, lm-eval: two models, hours (EVAL_ARGS=...)
	@$(SETUP) text bible dialogue gemma reasoning-gym lm-eval
	python="$(call dep,LOWKV_PYTHON)"
	"$$python" eval/texts.py --build "build/$(PRESET)"
	"$$python" eval/passkey.py --build "build/$(PRESET)" $(EVAL_ARGS)
	for model in "$(call dep,LOWKV_MODEL)" "$(call dep,LOWKV_GEMMA)"; do
	    for script in retrieval drift reasoning lm_eval_lowkv; do
	        "$$python" "eval/$$script.py" -m "$$model" $(EVAL_ARGS)
	    done
	done
	"$$python" eval/what_you_lose.py

.PHONY: what-you-lose
what-you-lose: ## docs/what-you-lose.md from the CSVs in docs/quality; measures nothing
	@$(SETUP) text bible dialogue gemma
	"$(call dep,LOWKV_PYTHON)" eval/what_you_lose.py

.PHONY: format
format: ## rewrite our C++ with clang-format
	@deps/lint.py --format

.PHONY: lint
lint: build ## clang-format, ruff, clang-tidy, links, names and generated tables in the documents
	@deps/house.py
	deps/lint.py

.PHONY: lint-tidy
lint-tidy: build package ## clang-tidy alone, on all but the tests
	@deps/lint.py --check tidy src/ cli/ plugins/ python/ examples/ devices/host/

.PHONY: clean
clean: ## remove build/ (the cache of dependencies stays)
	rm -rf build
