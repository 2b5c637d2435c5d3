"""What tests share: the kernels that can run here, what runs them, and processes."""

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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from transformer_fast import _native, dispatch
from transformer_fast.dispatch import Kernel, why_not
from transformer_fast.specs import OPS
from transformer_fast.testing import (
    Truth,
    call_of,
    check,
    check_gradients,
    embed_all_in_nan,
    nan_memory,
    require_grad,
)
from transformer_fast.testing.oracle import as_results

#: Those that an fp64 oracle can check.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Values of the widest vector in each instruction set.
ISAS: tuple[str, ...] = tuple(_native.module.supported_isas()) if _native.module else ()
#: Those with builds of the fp32 kernels of their own; and each dtype on those that have its.
FLOAT_ISAS = tuple(isa for isa in ISAS if isa in ("baseline", "avx2", "avx512"))
BUILDS = [(d, isa) for d in DTYPES for isa in (FLOAT_ISAS if d == torch.float32 else ISAS)]


#: Cases of attention in which nearly every probability is 0 or 1. Gradients of queries and keys are
#: then small differences of dO V and dO O, of which a kernel that keeps O in a half type knows but
#: eps |dO| |O|, as Triton's and PyTorch's do: they do not stay within the budget there. The CPU's
#: kernels sum such differences up key by key.
SATURATED = frozenset(
    (
        "scores of deviation 100",
        "scores of deviation 300",
        "scores of deviation 300, few queries",
    )
)


class Target(NamedTuple):
    """A kernel, on one dtype and (for the CPU's kernels) one instruction set."""

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
        return "no GPU here; tests/triton runs small cases in Triton's interpreter"
    return None


def kernels(op: str | None = None) -> list[Kernel]:
    """All but the references."""
    ops = dispatch.OPS if op is None else (op,)
    return [k for name in ops for k in dispatch.kernels(name) if k.backend != "reference"]


def kernel_of(op: str, backend: str = "cpu") -> Kernel:
    (kernel,) = (k for k in dispatch.kernels(op) if k.backend == backend)
    return kernel


class Backend(NamedTuple):
    """Kernels of our own as they can run here: without a GPU on what stands in for one.

    ``way``: the CPU's instruction set, where not the one in use; of Triton's products whose they are.
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


#: For the fixture `backend`.
CPU, TRITON, CUDA = Backend("cpu"), Backend("triton"), Backend("cuda")
CUBLAS = Backend("triton", "products of cuBLAS")
BACKENDS = [*(Backend("cpu", isa) for isa in ISAS), TRITON, CUDA]


def each_op(backends: Sequence[Backend]) -> pytest.MarkDecorator:
    """Each op on each backend that has it."""
    found = [
        pytest.param(op, one, id=f"{op}-{one}") for op in OPS for one in backends if one.has(op)
    ]
    return pytest.mark.parametrize(("op", "backend"), found, indirect=["backend"])


EVERY_KERNEL = each_op((CPU, TRITON, CUDA))


def targets(op: str | None = None, *, all_isas: bool = True) -> list[Any]:
    """What `parametrize` takes; a kernel that cannot run here is one skip with its reason."""
    found = []
    for kernel in kernels(op):
        reason = _cannot_run_here(kernel)
        isas: tuple[str | None, ...] = (None,)
        if kernel.backend == "cpu" and ISAS:
            isas = ISAS if all_isas else ISAS[-1:]
        dtypes = [d for d in DTYPES if not kernel.dtypes or d in kernel.dtypes]
        for dtype in dtypes[:1] if reason else dtypes:
            for isa in isas[:1] if reason else isas:
                marks = [pytest.mark.skip(reason=reason)] if reason else []
                target = Target(kernel, dtype, isa)
                found.append(pytest.param(target, id=f"{kernel.op}-{target}", marks=marks))
    return found


def targets_and_cases(**options: Any) -> list[Any]:
    """Every target with every case of the op table that its kernel accepts."""
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
    """The arguments of a case, drawn once."""
    generator = torch.Generator().manual_seed(0)
    arguments: tuple[Any, ...] = OPS[op].case(case).build(dtype, "cpu", generator)
    return arguments


def on(target: Target, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.to(target.device) if isinstance(x, torch.Tensor) else x for x in arguments)


@contextmanager
def in_use(isa: str | None) -> Iterator[None]:
    """Within the block kernels run on this instruction set, if it names one."""
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
    """The kernel's result, on its instruction set, in memory that started as NaN."""
    with in_use(target.isa), torch.no_grad(), nan_memory():
        return target.kernel.run(*arguments)


def check_target(
    target: Target, arguments: tuple[Any, ...], offset: int = 1, truth: Truth | None = None
) -> None:
    """Runs the target among NaN, off alignment, and holds it to the budget."""
    results = as_results(run(target, on(target, embed_all_in_nan(arguments, offset))))
    # The truth is the CPU's, wherever the kernel runs.
    check(target.op, tuple(x if x is None else x.cpu() for x in results), arguments, truth=truth)


#: Gives calls of an op in a dtype, by name.
Build = Callable[[torch.dtype], Iterable[tuple[str, tuple[Any, ...]]]]


def check_calls(
    target: Target, build: Build, offsets: Sequence[int] = (1,), *, gradients: bool = False
) -> None:
    """Holds the results (or the gradients) of each call to the budget; skips if all are refused."""
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
    """Holds results on the way to gradients, and those (if wanted), to the budget."""
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


def same_bits(one: Any, other: Any) -> bool:
    """NaN equals NaN."""

    def bits(tree: Any) -> list[Any]:
        leaves = [x.detach() for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
        return [x.contiguous().view(-1).view(torch.uint8) for x in leaves]

    found, expected = bits(one), bits(other)
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def check_threads(call: Callable[[], Any], counts: Sequence[int] = (1, 2, 3)) -> None:
    """The same bits with any number of threads, which the fixture `threads` puts back."""
    found = []
    for count in counts:
        torch.set_num_threads(count)
        found.append(call())
    assert all(same_bits(one, found[0]) for one in found)


def in_threads(work: Callable[[int], None], count: int) -> None:
    """Runs ``work(number)`` in so many of Python's threads at once."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Watch(TorchDispatchMode):
    """Sees the operators that run within the block."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.see(func, args, result)
        return result

    def see(self, func: Any, arguments: tuple[Any, ...], result: Any) -> None:
        """With what was given by position."""
        raise NotImplementedError


class Operators(Watch):
    """Which operators run within the block."""

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


class Recorder(Watch):
    """Keeps each call of our operators; of calls that differ in numbers only, the first."""

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
    """So many calls of our operators, and their arguments, of those that the kernel makes in these
    calls: without gradients, for all of them, and for one."""
    with Recorder() as found:
        for arguments in calls:
            given = require_grad(kernel.op, arguments)
            if why_not(kernel, call_of(kernel.op, given)):
                continue
            with torch.no_grad():
                kernel.run(*arguments)
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
    """Compiled whole, a call has the same results and gradients."""

    def total(*given: Any) -> torch.Tensor:
        results = as_results(run(*given))
        return sum(r.float().square().sum() for r in results if r is not None)

    torch.compiler.reset()
    found = []
    for function in (total, torch.compile(total, fullgraph=True, backend=backend)):
        leaves = require_grad(op, arguments)
        value = function(*leaves)
        wanted = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
        found.append([value.detach(), *torch.autograd.grad(value, wanted)])
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)


class OnDevice(Operators):
    """As on a GPU: raises where the host would wait for it, or where something is not on meta."""

    WAIT = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "item", "lift_fresh")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert name_of(func) not in self.WAIT, f"the host waits for {name_of(func)}"
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for x in tree_leaves((args, kwargs, result)):
            assert not isinstance(x, torch.Tensor) or x.is_meta, f"{name_of(func)}: not on meta"
        return result


def name_of(func: Any) -> str:
    """An operator's, without its overload."""
    return str(func._schema.name.rpartition("::")[2])


def python(
    *arguments: object, status: int | None = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, in this folder, where Triton does not interpret.

    ``status``: what it must end with; None: anything.
    """
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=Path(__file__).parents[1], env={**kept, **environment}, text=True, capture_output=True,
    )  # fmt: skip
    assert status in (None, done.returncode), done.stdout + done.stderr
    return done
