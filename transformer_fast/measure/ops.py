"""The contest of one op, forward or with gradients: all backends that take it, and PyTorch's op."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from .. import dispatch
from ..dispatch import BACKENDS
from ..specs import OPS
from ..testing import call_of, require_grad
from . import torch_ops
from .calls import chosen
from .contest import Arguments, Contender, Contest
from .judge import BothWays, OpJudge, judge_of, leaves, scores_of


def _of_backends(op: str, arguments: Arguments, wanted: Collection[str]) -> list[Contender]:
    call = call_of(op, arguments)
    kernels = {kernel.backend: kernel for kernel in dispatch.kernels(op)}
    found = []
    for backend in BACKENDS:
        if backend not in wanted:
            continue
        kernel = kernels.get(backend)
        if kernel is None:
            found.append(Contender(backend, None, "it has no kernel for this op"))
        elif too_large := _too_large(op, backend, arguments):
            found.append(Contender(backend, None, too_large))
        elif reasons := dispatch.why_not(kernel, call):
            found.append(Contender(backend, None, "; ".join(reasons)))
        elif backend == "triton" and arguments[0].device.type == "cpu":
            reason = "it would run in Triton's interpreter, whose speed says nothing"
            found.append(Contender(backend, None, reason))
        else:
            found.append(Contender(backend, kernel.run))
    return found


#: The reference is left out where attention's scores take more bytes; it holds several copies.
_MOST_SCORE_BYTES = 3 << 30


def _too_large(op: str, backend: str, arguments: Arguments) -> str | None:
    if op == "attention" and backend == "reference":
        size = scores_of(arguments) * max(4, arguments[0].element_size())
        if size > _MOST_SCORE_BYTES:
            return f"its scores alone would take {size / 2**30:.0f} GiB"
    return None


def _of_torch(op: str, arguments: Arguments) -> Contender:
    reason = torch_ops.why_not(OPS[op].named(arguments).get("dropout_p", 0.0))
    return Contender("torch", None if reason else torch_ops.OPS[op], reason, ours=False)


#: Cost of forward and backward: backward computes two products for each of the forward's, reads the
#: inputs and the upstream gradient, and writes the gradients.
TIMES_FORWARD = 3.0


@torch.enable_grad()
def op_contest(
    op: str,
    case: str,
    inputs: Sequence[Sequence[Arguments]],
    backends: Collection[str] = BACKENDS,
    peers: Sequence[Contender] = (),
    gradients: bool = False,
) -> Contest:
    """The case for these inputs (see `Contest.inputs`); always includes the reference and torch.

    ``backends``: which get a row; a backend that cannot run the call is listed with the reason.
    ``gradients``: forward and backward; all inputs must then have the same shapes.
    """
    if gradients:
        inputs = [[require_grad(op, arguments) for arguments in calls] for calls in inputs]
    first = inputs[0][0]
    spec = OPS[op]
    wanted = {*backends, "reference"} - {"torch"}
    contenders = _of_backends(op, first, wanted)
    choice = chosen(op, first)
    # The same op in both cases; as the dispatcher's choice it is held to our error budget.
    as_choice = choice == "torch"
    contenders.append(_of_backends(op, first, ("torch",))[0] if as_choice else _of_torch(op, first))
    if gradients:
        contenders = [
            c if c.run is None else replace(c, run=BothWays(op, c.run)) for c in contenders
        ]
    leading = next(x for x in first if isinstance(x, torch.Tensor))
    times = TIMES_FORWARD if gradients else 1.0
    return Contest(
        op=op,
        case=case,
        inputs=inputs,
        contenders=[*contenders, *peers],
        judge=OpJudge(op, list(leaves(op, first))) if gradients else judge_of(op, first),
        flops=times * sum(spec.flops(arguments) for arguments in inputs[0]),
        useful_flops=times * sum(spec.useful_flops(arguments) for arguments in inputs[0]),
        bytes=times * sum(spec.bytes(arguments) for arguments in inputs[0]),
        dtype=leading.dtype,
        device=leading.device,
        chosen=choice,
        torch=("torch", "torch.compile"),
    )
