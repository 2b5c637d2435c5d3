"""What all tests share: fixed random numbers, and a process that every test leaves as it was."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# Threads that wait sleep: where several processes share the cores, spinning takes the others' time.
# OpenMP asks once, when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Compiled graphs that Inductor finds on the disk may be of another version: it does not see that what
# an operator returns has changed.
os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")

import hypothesis
import pytest
import torch

from transformer_fast import _native, call_cache, dispatch, fast_path
from transformer_fast.backends import cuda as cuda_backend
from transformer_fast.backends import triton as triton_backend
from transformer_fast.functional import _operator

# Triton asks when it is first imported whether to interpret; what other tests import (transformers)
# imports it too.
sys.path.insert(0, str(Path(__file__).parent / "triton"))
sys.path.insert(0, str(Path(__file__).parent / "cuda"))
sys.path.insert(0, str(Path(__file__).parent / "accelerate"))  # models by hand
import interpreted
import simt_build
from harness import BACKENDS, CUBLAS, FLOAT_ISAS, ISAS, Backend, in_use

# A shell starts background jobs with the keyboard's interrupt ignored, and so would the tests be.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("fixed")

# Most calls here are too small for a second thread. Tests of what depends on threads set them.
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    if torch.cuda.is_available():  # drivers and compilers warn of what is theirs
        config.addinivalue_line("filterwarnings", "default")


if interpreted.WHY_NOT is not None:
    collect_ignore_glob = ["triton/test_triton_[!h]*.py"]

#: Percentage of a test's cases on these backends that run in `make test`: they run on emulators.
_EMULATED = {"triton": 4, "cuda": 15}
_GOLDEN = (5**0.5 - 1) / 2


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as `thorough` the cases that `sampled` leaves to `make test-all`, and all instruction sets
    between the lowest and the best.

    The first case of every test and backend stays. The golden ratio spreads the others evenly over
    every parameter, whatever its period in the order of cases.
    """
    cases: Counter[tuple[str, str]] = Counter()
    for item in items:
        callspec = getattr(item, "callspec", None)
        values = [] if callspec is None else callspec.params.values()
        emulated = [v.name for v in values if isinstance(v, Backend) and v.name in _EMULATED]
        percents = [mark.args[0] for mark in item.iter_markers("sampled")]
        percents += [_EMULATED[name] for name in emulated]
        test = item.nodeid.partition("[")[0], "".join(emulated)
        left_out = cases[test] * _GOLDEN % 1.0 * 100 >= min(percents, default=100)
        cases[test] += 1
        isas = {getattr(value, "isa", value) for value in values if _names_isa(value)}
        if left_out or isas & set(ISAS[1:-1]):
            item.add_marker(pytest.mark.thorough)


def _names_isa(value: object) -> bool:
    return isinstance(getattr(value, "isa", value), str)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """An illegal access spoils its process for CUDA, and every later test would be blamed for it.

    So such a process ends. Under pytest-xdist the test counts as failed and another process takes
    the rest.
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
    # What torch.manual_seed does, less a stack trace kept for each kind of device that is not here.
    torch.default_generator.manual_seed(20170612)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(20170612)


@pytest.fixture(autouse=True)
def process_left_alone() -> Iterator[None]:
    """A backend or flag that a test forgets to put back would decide later tests; kernels that it
    registers go."""

    def flags() -> tuple[object, ...]:
        state = dispatch._state.backend, dispatch._state.strict
        torchs = torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()
        return *state, *torchs, torch.get_num_threads()

    before = flags()
    registered = dict(dispatch._state.kernels), dict(dispatch._state.usable)
    yield
    dispatch._state.kernels, dispatch._state.usable = registered
    assert flags() == before


@pytest.fixture(autouse=True)
def small_calls_on_kernels() -> Iterator[None]:
    """Most calls here are so small that the dispatcher would leave them to PyTorch."""
    with fast_path.handed_over(on=False):
        yield


@pytest.fixture
def small_calls(small_calls_on_kernels: None) -> Iterator[None]:
    """Small calls go where they go for everybody else."""
    with fast_path.handed_over(on=True, short=True):
        yield


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20170612)


@pytest.fixture
def threads() -> Iterator[None]:
    """The test may set the number of threads."""
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


@pytest.fixture(params=ISAS or ["none"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this machine has, in use."""
    yield from _in_use(request.param)


@pytest.fixture(params=FLOAT_ISAS or ["none"])
def float_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Those with builds of the fp32 kernels of their own."""
    yield from _in_use(request.param)


@pytest.fixture
def amx() -> Iterator[str]:
    yield from _in_use("amx")


@pytest.fixture(scope="session")
def operators() -> str:
    """The device whose tensors the operators ``cuda_*`` take: the GPU where there is one and the library
    was built, and else the CPU, for the SIMT machine compiled from the same sources."""
    if simt_build.ON_GPU:
        return "cuda"
    if _native.cuda_why_not is None:
        pytest.skip("the operators of the GPU are loaded, and there is no GPU")
    if simt_build.WHY_NOT is not None:
        pytest.skip(simt_build.WHY_NOT)
    torch.ops.load_library(str(simt_build.library()))
    cuda_backend.define_operators()
    from torch.utils.flop_counter import flop_registry  # imports Triton

    # One more overload changes the hash of a packet, under which the registry keeps it.
    formulas = [*flop_registry.items()]
    flop_registry.clear()
    flop_registry.update(formulas)
    _operator.tell()
    return "cpu"


@pytest.fixture
def cuda(operators: str) -> str:
    """The same; the dispatcher knows of them while the test runs."""
    for kernel in cuda_backend.kernels(operators, None):
        dispatch.register(kernel)
    return operators


@pytest.fixture
def triton() -> str:
    """Where Triton's kernels run; the dispatcher knows of the interpreter while the test runs."""
    if interpreted.WHY_NOT is not None:
        pytest.skip(interpreted.WHY_NOT)
    for kernel in triton_backend.kernels(interpreted=interpreted.DEVICE == "cpu"):
        dispatch.register(kernel)
    call_cache.forget()  # tests change tiles by hand
    return interpreted.DEVICE


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Where kernels of the backend that the test's folder is named after run: `cuda` or `triton`."""
    where: str = request.getfixturevalue(request.path.parent.name)
    return where


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 x 16 in Triton's interpreter, so that small calls take many."""
    monkeypatch.setattr("transformer_fast.backends.triton.config.interpreter_tile", (16, 16))


@pytest.fixture(params=BACKENDS, ids=str)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """Each that has kernels of its own, ready to run."""
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
