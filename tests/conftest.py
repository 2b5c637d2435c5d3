"""Shared fixtures: fixed random numbers, and a check that every test leaves the process unchanged."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

# Waiting threads sleep: where several processes share the cores, spinning threads take time from
# the others. OpenMP reads the variable once, when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Inductor's graphs on disk may be outdated: their key does not include the code of our operators.
os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")

import hypothesis
import pytest
import torch

from transformer_fast import _context, _native, dispatch, fast_path
from transformer_fast.backends import call_cache
from transformer_fast.backends import cuda as cuda_backend
from transformer_fast.backends import triton as triton_backend
from transformer_fast.ops import operator as _operator
from transformer_fast.specs import OPS

# Triton reads TRITON_INTERPRET at its first import. Modules that other tests import, such as
# transformers, import Triton too.
sys.path.insert(0, str(Path(__file__).parent / "triton_kernels"))
sys.path.insert(0, str(Path(__file__).parent / "cuda"))
sys.path.insert(0, str(Path(__file__).parent / "accelerate"))  # hand-written models
import interpreted
import simt_build
from harness import (
    BACKENDS,
    CUBLAS,
    FLOAT_ISAS,
    INT8_ISAS,
    ISAS,
    Backend,
    in_use,
    open_autocast_blocks,
)

# A shell starts background jobs with SIGINT ignored, and tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("fixed")

# Most calls here are too small for a second thread. Tests of threading set the number themselves.
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    if torch.cuda.is_available():  # drivers and compilers emit warnings that are not ours
        config.addinivalue_line("filterwarnings", "default")


if interpreted.WHY_NOT is not None:
    collect_ignore_glob = ["triton_kernels/test_triton_[!h]*.py"]

#: Percentages of a test's cases on these backends that run in `make test` and in `make test-all`.
#: Without a GPU they are emulated, which is slow and does not test this machine.
_OF_GPUS = {"triton": (0, 6), "cuda": (0, 100)}
if torch.cuda.is_available():
    _OF_GPUS = {"triton": (4, 100), "cuda": (15, 100)}
#: The compile backend beyond test_compile_backend.py: its programs are the same on every machine.
_COMPILED = ("test_compile_constants.py", "test_compile_modes.py", "test_compile_sublayers.py")
#: Percentage of the cases on instruction sets between the lowest and the best in `make test-all`.
_BETWEEN = 40
_GOLDEN = (5**0.5 - 1) / 2


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks cases as `thorough`, which `make test` omits, or as `exhaustive`, which `make test-all`
    omits too.

    `thorough`: the cases beyond the first percentage of a test's `sampled` mark, and all instruction
    sets between the lowest and the best. The first case of every test and backend runs, unless the
    percentage is 0.
    `exhaustive`: the cases beyond the second percentage, and those with that mark. Of the others the
    first case of every test, op, backend and instruction set always runs. The golden ratio spreads
    the rest evenly over every parameter, whatever its period in the order of cases.
    """
    cases: Counter[tuple[str, ...]] = Counter()
    for item in items:
        callspec = getattr(item, "callspec", None)
        values = [] if callspec is None else [*callspec.params.values()]
        of_gpus = {v.name for v in values if isinstance(v, Backend) and v.name in _OF_GPUS}
        of_gpus |= {"cuda"} if item.path.parent.name == "cuda" else set()
        between = _names(values, "isa", INT8_ISAS[1:-1])
        percents = [(100, 100), *(_OF_GPUS[name] for name in of_gpus)]
        percents += [(*mark.args, 100)[:2] for mark in item.iter_markers("sampled")]
        percents += [(100, _BETWEEN)] if between else []
        percents += [(0, 100)] if item.path.name in _COMPILED else []
        test = item.nodeid.partition("[")[0], *sorted(of_gpus)
        each = "each", *test, *_names(values, "op", OPS), *_names(values, "isa", INT8_ISAS)
        some, most = (min(column) for column in zip(*percents, strict=True))
        exhaustive = item.get_closest_marker("exhaustive") is not None
        exhaustive |= cases[each] * _GOLDEN % 1.0 * 100 >= most
        if exhaustive:
            item.add_marker(pytest.mark.exhaustive)
        if exhaustive or between or cases[test] * _GOLDEN % 1.0 * 100 >= some:
            item.add_marker(pytest.mark.thorough)
        cases[test] += 1
        cases[each] += 1


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exempts the millions of objects that exist after the collection from garbage collections."""
    gc.collect()
    gc.freeze()


def _names(values: list[object], attribute: str, known: Container[str]) -> list[str]:
    """Returns the known names among the values and among their attributes."""
    found = (getattr(value, attribute, value) for value in values)
    return [name for name in found if isinstance(name, str) and name in known]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Ends a process in which CUDA has failed with an illegal access.

    Every later test in that process would fail for that reason. Under pytest-xdist the current test
    counts as failed, and another process runs the rest.
    """
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            pytest.exit(f"CUDA cannot be used in this process any more: {error}", 3)
        print(error, file=sys.__stderr__, flush=True)
        os._exit(3)


@pytest.fixture(autouse=True)
def fixed_random_numbers() -> None:
    # Like torch.manual_seed, which also records a stack trace per device type that is missing here.
    torch.default_generator.manual_seed(20170612)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(20170612)


@pytest.fixture(autouse=True)
def process_left_alone() -> Iterator[None]:
    """Fails if a test changes the backend or a global flag, which would affect later tests; removes
    the kernels that the test registered.
    """

    def flags() -> tuple[object, ...]:
        state = _context.settings.current.backend, _context.settings.current.strict
        torchs = torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()
        return *state, *torchs, torch.get_num_threads(), open_autocast_blocks()

    before = flags()
    registered = dict(dispatch.registry.kernels), dict(dispatch.registry.usable)
    yield
    if dispatch.registry.kernels != registered[0]:
        dispatch.registry.kernels, dispatch.registry.usable = registered
        for op in registered[0]:
            fast_path.bind(op)
    assert flags() == before


@pytest.fixture(autouse=True)
def small_calls_on_kernels() -> Iterator[None]:
    """Disables the small-size fallback: most calls here are so small that PyTorch would run them."""
    with fast_path.small_size_fallback(on=False):
        yield


@pytest.fixture
def small_calls(small_calls_on_kernels: None) -> Iterator[None]:
    """Enables the small-size fallback, the default of users."""
    with fast_path.small_size_fallback(on=True, short=True):
        yield


@pytest.fixture
def fresh() -> Iterator[None]:
    """Programs of torch.compile are captured anew in the test, and forgotten after it."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20170612)


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores the number of threads after the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def two_threads(threads: None) -> None:
    torch.set_num_threads(2)


def _in_use(isa: str) -> Iterator[str]:
    if _native.module is None:
        pytest.skip(str(_native.why_not))
    with in_use(isa):
        yield isa


def _each(isas: Sequence[str]) -> Any:
    """Returns a fixture that runs a test on each of these instruction sets."""

    @pytest.fixture(params=isas or ["none"])
    def isa(request: pytest.FixtureRequest) -> Iterator[str]:
        yield from _in_use(request.param)

    return isa


#: Those of this machine: without those of 8-bit products only, with own builds of the fp32 kernels, all.
isa, float_isa, int8_isa = map(_each, (ISAS, FLOAT_ISAS, INT8_ISAS))


@pytest.fixture
def amx() -> Iterator[str]:
    yield from _in_use("amx")


@pytest.fixture(scope="session")
def operators() -> str:
    """The device of the tensors that the operators ``<op>.cuda`` take.

    It is the GPU if there is one and the library was built. Otherwise it is the CPU, for which the
    SIMT machine is compiled from the same sources.
    """
    if simt_build.ON_GPU:
        return "cuda"
    if _native.cuda_why_not is None:
        pytest.skip("the operators of the GPU are loaded, and there is no GPU")
    if simt_build.WHY_NOT is not None:
        pytest.skip(simt_build.WHY_NOT)
    torch.ops.load_library(str(simt_build.library()))
    cuda_backend.define_operators()
    from torch.utils.flop_counter import flop_registry  # imports Triton

    # The new overload changes the packet's hash, which is the key in the registry.
    formulas = [*flop_registry.items()]
    flop_registry.clear()
    flop_registry.update(formulas)
    _operator.register_rules()
    return "cpu"


@pytest.fixture
def cuda(operators: str) -> str:
    """The device of `operators`, with the CUDA kernels registered in the dispatcher."""
    for kernel in cuda_backend.kernels(operators, None):
        dispatch.register(kernel)
    return operators


@pytest.fixture
def triton() -> str:
    """The device of the Triton kernels, which are registered in the dispatcher, also as
    interpreted.
    """
    if interpreted.WHY_NOT is not None:
        pytest.skip(interpreted.WHY_NOT)
    for kernel in triton_backend.kernels(interpreted=interpreted.DEVICE == "cpu"):
        dispatch.register(kernel)
    call_cache.forget()  # tests set tiles directly
    return interpreted.DEVICE


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """The device of the kernels of the test's folder: the fixture `cuda` or `triton`."""
    where: str = request.getfixturevalue(request.path.parent.name.removesuffix("_kernels"))
    return where


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets tiles of 16 x 16 in Triton's interpreter, so that small calls have many tiles."""
    monkeypatch.setattr("transformer_fast.backends.triton.config.interpreter_tile", (16, 16))


@pytest.fixture(params=BACKENDS, ids=str)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """Runs the test on each of our backends and instruction sets."""
    one = request.param
    if one.name != "cpu" and "libasan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("`make sanitize` is for the native module")
    if one.name == "triton":
        request.getfixturevalue("triton")
        rows = 2**31 if one == CUBLAS else 0
        monkeypatch.setattr("transformer_fast.backends.triton.config.few_rows", rows)
    elif one.name == "cuda":
        request.getfixturevalue("cuda")
    elif _native.module is None:
        pytest.skip(str(_native.why_not))
    with in_use(one.isa):
        yield one
