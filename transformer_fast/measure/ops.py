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

#: The reference is left out where attention's scores take more bytes; it holds several copies.
_MOST_SCORE_BYTES = 3 << 30


def _of_backend(op: str, backend: str, arguments: Arguments) -> Candidate:
    kernel = next((one for one in dispatch.kernels(op) if one.backend == backend), None)
    if kernel is None:
        return Candidate(backend, None, "it has no kernel for this op")
    reason = "; ".join(dispatch.why_not(kernel, call_of(op, arguments)))
    if op == "attention" and backend == "reference":
        size = scores_of(arguments) * max(4, arguments[0].element_size())
        if size > _MOST_SCORE_BYTES:
            reason = f"its scores alone would take {size / 2**30:.0f} GiB"
    if not reason and backend == "triton" and arguments[0].device.type == "cpu":
        reason = "it would run in Triton's interpreter, whose speed says nothing"
    return Candidate(backend, None if reason else kernel.run, reason or None)


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
    candidates = [_of_backend(op, name, first) for name in BACKENDS if name in wanted]
    choice = chosen(op, first)
    # The same op in both cases; as the dispatcher's choice it is held to our error budget.
    as_choice = choice == "torch"
    candidates.append(_of_backend(op, "torch", first) if as_choice else _of_torch(op, first))
    if gradients:
        candidates = [replace(c, run=c.run and BothWays(op, c.run)) for c in candidates]
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
