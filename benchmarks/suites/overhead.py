"""What a call costs beside its work: the public functions on next to no data.

Calls of Triton's kernels are measured without a GPU: compiler and driver are stubbed, so what is left
is the host's part, all that leads to the launch. Beside it stands PyTorch's op, with its work on the CPU.
Those are calls that were made before, as all but the first steps of a program are: what is remembered
of the check of a row is known when it is timed. What remembering takes has a row of its own, of the two
calls that come before: the first is looked at, the second is recorded.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from transformer_fast import call_cache, functional
from transformer_fast.backends.triton.stub import stubbed
from transformer_fast.measure.benchmark_case import Arguments, BenchmarkCase, Candidate
from transformer_fast.measure.ops import op_case
from transformer_fast.specs import OPS

from ..scope import Maker, Scope


def _contest(scope: Scope, op: str) -> BenchmarkCase:
    spec = OPS[op]
    benchmark_case = op_case(op, "call", scope.draw(op, spec.tiny), ("reference",))
    run = functools.partial(spec.public, functional) if spec.public else getattr(functional, op)
    public = Candidate(f"{benchmark_case.chosen}, public function", run)
    return replace(
        benchmark_case,
        candidates=[public, *benchmark_case.candidates],
        chosen=public.name,
        # Arithmetic has no part in it, so there is no roof to come near to.
        flops=0.0, useful_flops=0.0, bytes=0.0,
    )  # fmt: skip


#: Calls in each piece of work, since the stub is put in place around them.
CALLS = 100


class _Alike(NamedTuple):
    """Of what was never computed: only dtypes and shapes can be right."""

    ok: bool
    error: float = 0.0
    ratio: float = 0.0


def _host_arguments(op: str) -> tuple[Any, ...]:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    if op == "attention":
        return tuple(zeros(1, 2, 4, 16) for _ in range(3))
    return zeros(4, 16), (16,), zeros(16), zeros(16)


_HOST: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "attention": (functional.scaled_dot_product_attention, F.scaled_dot_product_attention),
    "layer_norm": (functional.layer_norm, F.layer_norm),
}


#: The first calls of a kind, until it is remembered.
FIRST = 2


def _host_case(op: str, what: str) -> BenchmarkCase:
    ours, theirs = _HOST[op]
    times = FIRST if what == "first calls" else CALLS

    def calls(call: Callable[..., Any], *arguments: Any) -> Any:
        if what != "gradients":
            return [call(*arguments) for _ in range(times)][-1]
        own = [x.detach().requires_grad_() if isinstance(x, torch.Tensor) else x for x in arguments]
        wanted = [x for x in own if isinstance(x, torch.Tensor)]
        with torch.enable_grad():
            for _ in range(times):
                result = call(*own)
                found = torch.autograd.grad(result, wanted, result)
        return tuple(found)

    def stubbed_calls(*arguments: Any) -> Any:
        with stubbed() as machine:
            machine.launches = None
            if what == "first calls":
                call_cache.forget()
            return calls(ours, *arguments)

    def checker(result: Any, arguments: Arguments) -> _Alike:
        wanted = calls(theirs, *arguments)
        pairs = zip(*((x if isinstance(x, tuple) else (x,)) for x in (result, wanted)), strict=True)
        return _Alike(all(x.shape == y.shape and x.dtype == y.dtype for x, y in pairs))

    name = "triton, launcher stubbed"
    told = {"first calls": "first call", "gradients": "forward and backward"}.get(what, what)
    return BenchmarkCase(
        op,
        f"{times} times {told}, the host's part",
        [[_host_arguments(op)] for _ in range(2)],
        [Candidate(name, stubbed_calls), Candidate("torch", functools.partial(calls, theirs))],
        checker,
        dtype=torch.bfloat16, chosen=name, reference="torch",
    )  # fmt: skip


def _host_can_be_measured() -> bool:
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None or torch.cuda.is_available():
        return False
    from transformer_fast.backends.triton.runtime import INTERPRETED

    return not INTERPRETED


def suite(scope: Scope) -> Iterator[tuple[str, Maker]]:
    for op in scope.ops:
        yield f"{op} call", functools.partial(_contest, scope, op)
    if _host_can_be_measured():
        for op in _HOST:
            if op in scope.ops:
                for what in ("call", "gradients", "first calls"):
                    yield f"{op} {what} on triton", functools.partial(_host_case, op, what)
