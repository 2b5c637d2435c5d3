"""The benchmark case of one op, forward or with gradients: all backends that take it, and PyTorch's."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from .. import dispatch
from ..dispatch import BACKENDS
from ..specs import OPS
from ..testing import call_of, require_grad
from .accuracy import BothWays, OpChecker, checker_of, leaves, scores_of, unchecked
from .benchmark_case import Arguments, BenchmarkCase, Candidate
from .calls import chosen


def _of_backends(op: str, arguments: Arguments, wanted: Collection[str]) -> list[Candidate]:
    call = call_of(op, arguments)
    kernels = {kernel.backend: kernel for kernel in dispatch.kernels(op)}
    found = []
    for backend in BACKENDS:
        if backend not in wanted:
            continue
        kernel = kernels.get(backend)
        if kernel is None:
            found.append(Candidate(backend, None, "it has no kernel for this op"))
        elif too_large := _too_large(op, backend, arguments):
            found.append(Candidate(backend, None, too_large))
        elif reasons := dispatch.why_not(kernel, call):
            found.append(Candidate(backend, None, "; ".join(reasons)))
        elif backend == "triton" and arguments[0].device.type == "cpu":
            reason = "it would run in Triton's interpreter, whose speed says nothing"
            found.append(Candidate(backend, None, reason))
        else:
            found.append(Candidate(backend, kernel.run))
    return found


#: The reference is left out where attention's scores take more bytes; it holds several copies.
_MOST_SCORE_BYTES = 3 << 30


def _too_large(op: str, backend: str, arguments: Arguments) -> str | None:
    if op == "attention" and backend == "reference":
        size = scores_of(arguments) * max(4, arguments[0].element_size())
        if size > _MOST_SCORE_BYTES:
            return f"its scores alone would take {size / 2**30:.0f} GiB"
    return None


def _of_torch(op: str, arguments: Arguments) -> Candidate:
    reason = unchecked(OPS[op].named(arguments).get("dropout_p", 0.0))
    return Candidate("torch", None if reason else OPS[op].pytorch, reason, ours=False)


#: Cost of forward and backward: backward computes two products for each of the forward's, reads the
#: inputs and the upstream gradient, and writes the gradients.
TIMES_FORWARD = 3.0


@torch.enable_grad()
def op_case(
    op: str,
    case: str,
    inputs: Sequence[Sequence[Arguments]],
    backends: Collection[str] = BACKENDS,
    peers: Sequence[Candidate] = (),
    gradients: bool = False,
) -> BenchmarkCase:
    """The case for these inputs (see `BenchmarkCase.inputs`); always includes the reference and torch.

    ``backends``: which get a row; a backend that cannot run the call is listed with the reason.
    ``gradients``: forward and backward; all inputs must then have the same shapes.
    """
    if gradients:
        inputs = [[require_grad(op, arguments) for arguments in calls] for calls in inputs]
    first = inputs[0][0]
    spec = OPS[op]
    wanted = {*backends, "reference"} - {"torch"}
    candidates = _of_backends(op, first, wanted)
    choice = chosen(op, first)
    # The same op in both cases; as the dispatcher's choice it is held to our error budget.
    as_choice = choice == "torch"
    candidates.append(_of_backends(op, first, ("torch",))[0] if as_choice else _of_torch(op, first))
    if gradients:
        candidates = [
            c if c.run is None else replace(c, run=BothWays(op, c.run)) for c in candidates
        ]
    leading = next(x for x in first if isinstance(x, torch.Tensor))
    times = TIMES_FORWARD if gradients else 1.0
    return BenchmarkCase(
        op=op,
        case=case,
        inputs=inputs,
        candidates=[*candidates, *peers],
        checker=OpChecker(op, list(leaves(op, first))) if gradients else checker_of(op, first),
        flops=times * sum(spec.flops(arguments) for arguments in inputs[0]),
        useful_flops=times * sum(spec.useful_flops(arguments) for arguments in inputs[0]),
        bytes=times * sum(spec.bytes(arguments) for arguments in inputs[0]),
        dtype=leading.dtype,
        device=leading.device,
        chosen=choice,
        torch=("torch", "torch.compile"),
    )
