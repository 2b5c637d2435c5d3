"""Shared test helpers: the kernels that can run here, how to run and check them, and subprocesses."""

from __future__ import annotations

import functools
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from transformer_fast import _native, dispatch
from transformer_fast._native import TORCH_VERSION
from transformer_fast.dispatch import Kernel, why_not
from transformer_fast.reference import DIFFERENTIABLE
from transformer_fast.specs import OPS
from transformer_fast.testing import (
    Truth,
    call_of,
    check,
    check_gradients,
    embed_all_in_nan,
    nan_memory,
    require_grad,
    truth_of,
)
from transformer_fast.testing.oracle import as_results

#: The dtypes whose error an fp64 oracle can measure.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Instruction sets of this machine, narrowest vectors first, with the types that have dot products.
_DOTS = (
    {isa: set(_native.module.dot_types(isa)) for isa in _native.module.supported_isas()}
    if (_native.module)
    else {}
)
INT8_ISAS: tuple[str, ...] = tuple(_DOTS)
#: The sets that add more than 8-bit products; the others have builds of 8-bit kernels only.
ISAS = tuple(isa for isa, dots in _DOTS.items() if dots != {"int8"})
#: All pairs (instruction set, int8) that select different builds.
ISAS_AND_INT8 = [(isa, int8) for int8 in (False, True) for isa in (INT8_ISAS if int8 else ISAS)]
#: Instruction sets with their own builds of the fp32 kernels, and all pairs (dtype, instruction
#: set) that select different builds.
FLOAT_ISAS = tuple(isa for isa, dots in _DOTS.items() if not dots)
BUILDS = [(d, isa) for d in DTYPES for isa in (FLOAT_ISAS if d == torch.float32 else ISAS)]


#: Attention cases in which nearly every probability is 0 or 1. Gradients of queries and keys are then
#: small differences of dO V and dO O. A kernel that stores O in low precision has an error of
#: eps |dO| |O| in dO O, as Triton's and PyTorch's have, and exceeds the budget there. The CPU kernels
#: sum these differences key by key.
SATURATED = frozenset(
    (
        "scores of deviation 100",
        "scores of deviation 300",
        "scores of deviation 300, few queries",
    )
)


class Target(NamedTuple):
    """A kernel, for one dtype and, for CPU kernels, one instruction set."""

    kernel: Kernel
    dtype: torch.dtype
    isa: str | None

    def __str__(self) -> str:
        parts = [self.kernel.backend, self.isa, str(self.dtype)[6:]]
        return "-".join(part for part in parts if part)

    @property
    def op(self) -> str:
        return self.kernel.op

    @property
    def device(self) -> str:
        return (
            "cuda" if "cuda" in self.kernel.devices and "cpu" not in self.kernel.devices else "cpu"
        )

    def refusal(self, arguments: tuple[Any, ...]) -> str | None:
        call = call_of(self.op, on(self, arguments))
        return "; ".join(why_not(self.kernel, call)) or None


def _cannot_run_here(kernel: Kernel) -> str | None:
    if kernel.unavailable is not None:
        return kernel.unavailable
    if kernel.backend in ("triton", "cuda") and not torch.cuda.is_available():
        return "no GPU here; tests/triton_kernels runs small cases in Triton's interpreter"
    return None


def kernels(op: str | None = None) -> list[Kernel]:
    """Returns all kernels except the reference."""
    ops = dispatch.OPS if op is None else (op,)
    return [k for name in ops for k in dispatch.kernels(name) if k.backend != "reference"]


def isas_of(op: str) -> tuple[str, ...]:
    return INT8_ISAS if op.startswith("int8") else ISAS


def kernel_of(op: str, backend: str = "cpu") -> Kernel:
    (kernel,) = (k for k in dispatch.kernels(op) if k.backend == backend)
    return kernel


class Backend(NamedTuple):
    """One of our backends as it can run here: without a GPU, on its emulator.

    ``way``: for the CPU, an instruction set other than the one in use; for Triton, the library of
    the matrix products.
    """

    name: str
    way: str | None = None

    def __str__(self) -> str:
        return " ".join(filter(None, self))

    @property
    def isa(self) -> str | None:
        return self.way if self.name == "cpu" else None

    def of(self, op: str, dtype: torch.dtype = torch.float32) -> Target:
        return Target(kernel_of(op, self.name), dtype, self.isa)

    def has(self, op: str) -> bool:
        return any(kernel.backend == self.name for kernel in dispatch.kernels(op))


#: Parameters of the fixture `backend`.
CPU, TRITON, CUDA = Backend("cpu"), Backend("triton"), Backend("cuda")
CUBLAS = Backend("triton", "products of cuBLAS")
BACKENDS = [*(Backend("cpu", isa) for isa in ISAS), TRITON, CUDA]


def each_op(backends: Sequence[Backend], ops: Iterable[str] = OPS) -> pytest.MarkDecorator:
    """Parametrizes a test by op and backend, for the backends that support the op."""
    found = [
        pytest.param(op, one, id=f"{op}-{one}") for op in ops for one in backends if one.has(op)
    ]
    return pytest.mark.parametrize(("op", "backend"), found, indirect=["backend"])


EVERY_KERNEL = each_op((CPU, TRITON, CUDA))


def targets(op: str | None = None, *, all_isas: bool = True) -> list[Any]:
    """Returns parameters for `parametrize`; a kernel that cannot run here gets one skip with the
    reason.
    """
    found = []
    for kernel in kernels(op):
        reason = _cannot_run_here(kernel)
        isas: tuple[str | None, ...] = (None,)
        if kernel.backend == "cpu" and ISAS:
            known = isas_of(kernel.op)
            isas = known if all_isas else known[-1:]
        dtypes = [d for d in DTYPES if not kernel.dtypes or d in kernel.dtypes]
        for dtype in dtypes[:1] if reason else dtypes:
            for isa in isas[:1] if reason else isas:
                marks = [pytest.mark.skip(reason=reason)] if reason else []
                target = Target(kernel, dtype, isa)
                found.append(pytest.param(target, id=f"{kernel.op}-{target}", marks=marks))
    return found


def targets_and_cases(**options: Any) -> list[Any]:
    """Returns every target with every case of the op table that its kernel supports."""
    found = []
    for param in targets(**options):
        (target,) = param.values
        for case in OPS[target.op].cases[: 1 if param.marks else None]:
            arguments = drawn(target.op, case.name, target.dtype)
            if not param.marks and target.refusal(arguments):
                continue
            name = f"{param.id}-{case.name}"
            found.append(pytest.param(target, case.name, id=name, marks=param.marks))
    return found


@functools.cache
def drawn(op: str, case: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """Returns the arguments of a case, which are drawn only once."""
    generator = torch.Generator().manual_seed(0)
    arguments: tuple[Any, ...] = OPS[op].case(case).build(dtype, "cpu", generator)
    return arguments


def on(target: Target, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.to(target.device) if isinstance(x, torch.Tensor) else x for x in arguments)


@contextmanager
def in_use(isa: str | None) -> Iterator[None]:
    """Context manager that selects an instruction set; None keeps the current one."""
    if isa is None:
        yield
        return
    assert _native.module is not None
    before = _native.module.isa()
    _native.module.set_isa(isa)
    try:
        yield
    finally:
        _native.module.set_isa(before)


def run(target: Target, arguments: tuple[Any, ...]) -> Any:
    """Runs the kernel on the target's instruction set, with new memory filled with NaN."""
    with in_use(target.isa), torch.no_grad(), nan_memory():
        return target.kernel.run(*arguments)


def in_nan(target: Target, arguments: tuple[Any, ...], offset: int = 1) -> tuple[Any, ...]:
    """Returns the arguments on the target's device, misaligned and surrounded by NaN.

    On AMX PyTorch's own products of bfloat16 multiply what lies behind a row by 0, so that NaN there
    spreads: for these the arguments stay as they are.
    """
    of_pytorch = target.kernel.backend not in ("cpu", "triton") and target.device == "cpu"
    if of_pytorch and target.dtype == torch.bfloat16 and "amx" in ISAS:
        return on(target, arguments)
    return embed_all_in_nan(on(target, arguments), offset)


def check_target(
    target: Target, arguments: tuple[Any, ...], offset: int = 1, truth: Truth | None = None
) -> None:
    """Checks the target against the error budget, with misaligned inputs that are surrounded by
    NaN. The inputs are neither modified nor returned.
    """
    given = in_nan(target, arguments, offset)
    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    before, versions = [x.clone() for x in tensors], [x._version for x in tensors]
    results = as_results(run(target, given))
    assert same_bits(tensors, before)
    assert [x._version for x in tensors] == versions
    memory = {x.untyped_storage().data_ptr() for x in tensors}
    assert not any(
        x.untyped_storage().data_ptr() in memory for x in results if x is not None and x.numel()
    )
    # The truth is computed on the CPU, whatever the device of the kernel.
    results = tuple(x if x is None else x.cpu() for x in results)
    truth = truth_of(target.op, arguments) if truth is None else truth
    check(target.op, results, arguments, truth=truth)
    if OPS[target.op].exact(arguments):
        assert same_bits(results, list(truth.expected.values()))


#: Takes a dtype; yields calls of an op as (name, arguments).
Build = Callable[[torch.dtype], Iterable[tuple[str, tuple[Any, ...]]]]


def check_calls(
    target: Target, build: Build, offsets: Sequence[int] = (1,), *, gradients: bool = False
) -> None:
    """Checks results (or gradients) of each call against the budget; skips if no call is supported."""
    refused, accepted = None, 0
    for name, arguments in build(target.dtype):
        wanted = require_grad(target.op, arguments) if gradients else arguments
        refused = target.refusal(wanted)
        for offset in () if refused else offsets:
            accepted += 1
            try:
                if not gradients:
                    check_target(target, arguments, offset)
                    continue
                with in_use(target.isa), nan_memory():
                    check_gradients(target.op, target.kernel.run, on(target, arguments))
            except AssertionError as error:
                raise AssertionError(f"{name}, {offset} off alignment: {error}") from None
    if not accepted:
        pytest.skip(str(refused))


def check_trained(kernel: Kernel, arguments: tuple[Any, ...], gradients: bool = True) -> None:
    """Checks the results of the training path, and optionally the gradients, against the budget."""
    called = require_grad(kernel.op, arguments)
    if reasons := why_not(kernel, call_of(kernel.op, called)):
        pytest.skip("; ".join(reasons))
    seen: list[Any] = []

    def run(*given: Any) -> Any:
        seen.append(kernel.run(*given))
        return seen[-1]

    with nan_memory():
        if gradients:
            check_gradients(kernel.op, run, arguments)
        else:
            run(*called)
    check(kernel.op, seen[0], arguments)


def since_torch(*version: int, why: str) -> pytest.MarkDecorator:
    """Skips a test with an older PyTorch."""
    return pytest.mark.skipif(version > TORCH_VERSION, reason=why)


def same_bits(one: Any, other: Any) -> bool:
    """True if both trees have bitwise equal tensors; NaN equals NaN."""

    def bits(tree: Any) -> list[Any]:
        leaves = [x.detach() for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
        # A copy, because contiguous tensors may have any stride in dimensions of size 0 or 1.
        whole = (x.clone(memory_format=torch.contiguous_format) for x in leaves)
        return [x.view(-1).view(torch.uint8) for x in whole]

    found, expected = bits(one), bits(other)
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def check_threads(call: Callable[[], Any], counts: Sequence[int] = (1, 2, 3)) -> None:
    """Checks that results are bitwise equal for all thread counts; the fixture `threads` resets
    them.
    """
    found = []
    for count in counts:
        torch.set_num_threads(count)
        found.append(call())
    assert all(same_bits(one, found[0]) for one in found)


def in_threads(work: Callable[[int], None], count: int) -> None:
    """Runs ``work(number)`` in ``count`` Python threads at once."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def spied(patch: pytest.MonkeyPatch, owner: Any, name: str, note: Any, into: Any = None) -> Any:
    """Returns a list that gets ``note(result, *args, **kwargs)`` of each ended call of ``owner.name``."""
    found = [] if into is None else into
    right = getattr(owner, name)

    def spy(*args: Any, **kwargs: Any) -> Any:
        result = right(*args, **kwargs)
        found.append(note(result, *args, **kwargs))
        return result

    patch.setattr(owner, name, spy)
    return found


class Watch(TorchDispatchMode):
    """Dispatch mode that passes each operator within the block to `see`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.see(func, args, result)
        return result

    def see(self, func: Any, arguments: tuple[Any, ...], result: Any) -> None:
        """``arguments``: the positional ones."""
        raise NotImplementedError


def open_autocast_blocks() -> int:
    """Returns the number of nested autocast blocks. PyTorch keeps its cache of casts until it is 0."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


class Operators(Watch):
    """Records the operators that run within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def see(self, func: Any, arguments: tuple[Any, ...], result: Any) -> None:
        self.seen.append(func)

    @property
    def ours(self) -> list[str]:
        return [func.__name__ for func in self.seen if func.namespace == "transformer_fast"]

    @property
    def casts(self) -> int:
        return self.seen.count(torch.ops.aten._to_copy.default)


class Functions(TorchFunctionMode):
    """Records the names of the functions of PyTorch that are called within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Recorder(Watch):
    """Records one call of our operators per kind: calls that differ only in values or sizes are
    one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def see(self, func: Any, arguments: tuple[Any, ...], result: Any) -> None:
        if func.namespace == "transformer_fast":
            kinds = (
                (x.dtype, x.dim(), x.is_contiguous(), 0 in x.shape) if isinstance(x, torch.Tensor)
                else repr(x) for x in arguments
            )  # fmt: skip
            plain = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in arguments)
            self.calls.setdefault((func, *kinds), (func, plain))


def operator_calls(kernel: Kernel, calls: list[tuple[Any, ...]], most: int = 6) -> list[Any]:
    """Returns up to ``most`` (operator, arguments) pairs that the kernel calls for ``calls``:
    without gradients, with all gradients, and with one.
    """
    with Recorder() as found:
        for arguments in calls:
            given = require_grad(kernel.op, arguments)
            if why_not(kernel, call_of(kernel.op, given)):
                continue
            with torch.no_grad():
                kernel.run(*arguments)
            if kernel.op not in DIFFERENTIABLE:
                continue
            results = as_results(kernel.run(*given))
            results = tuple(y for y in results if y is not None and y.requires_grad)
            leaves = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
            for wanted in (leaves, leaves[:1], leaves[-1:]):
                ups = [torch.ones_like(y) for y in results]
                torch.autograd.grad(results, wanted, ups, retain_graph=True, allow_unused=True)
    every = list(found.calls.values())
    return random.Random(0).sample(every, min(most, len(every)))


def check_one_graph(
    op: str, run: Any, arguments: tuple[Any, ...], backend: str = "aot_eager"
) -> None:
    """Checks that one compiled graph of the whole call has the same results and gradients."""

    def total(*given: Any) -> torch.Tensor:
        results = as_results(run(*given))
        return sum(r.float().square().sum() for r in results if r is not None)

    torch.compiler.reset()
    found = []
    for function in (total, torch.compile(total, fullgraph=True, backend=backend)):
        leaves = require_grad(op, arguments)
        value = function(*leaves)
        wanted = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
        grads = torch.autograd.grad(value, wanted) if wanted else ()
        found.append([value.detach(), *grads])
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)


class OnDevice(Operators):
    """Imitates a GPU: raises where the host would synchronize, or if a tensor is not on meta."""

    WAIT = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "item", "lift_fresh")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert name_of(func) not in self.WAIT, f"the host waits for {name_of(func)}"
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for x in tree_leaves((args, kwargs, result)):
            assert not isinstance(x, torch.Tensor) or x.is_meta, f"{name_of(func)}: not on meta"
        return result


def name_of(func: Any) -> str:
    """Returns an operator's name, without its overload."""
    return str(func._schema.name.rpartition("::")[2])


def python(
    *arguments: object, status: int | None = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python in a subprocess, in the project's root, without Triton's interpreter.

    ``status``: required exit status; None: any.
    """
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=Path(__file__).parents[1], env={**kept, **environment}, text=True, capture_output=True,
    )  # fmt: skip
    assert status in (None, done.returncode), done.stdout + done.stderr
    return done
