"""The contest of one op: every backend that takes the call, and PyTorch's own op."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from .. import dispatch
from ..dispatch import BACKENDS
from ..specs import OPS
from ..testing import call_of
from . import torch_ops
from .calls import chosen
from .contest import Arguments, Contender, Contest
from .judge import judge_of, scores_of


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


#: The reference holds several copies of attention's scores; beyond this many bytes it has no row.
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


def op_contest(
    op: str,
    case: str,
    inputs: Sequence[Sequence[Arguments]],
    backends: Collection[str] = BACKENDS,
    peers: Sequence[Contender] = (),
) -> Contest:
    """A contest on these inputs (see `Contest.inputs`); the reference and torch always take part.

    ``backends`` names those that are to have a row; one that refuses has its reason as the row.
    """
    first = inputs[0][0]
    spec = OPS[op]
    wanted = {*backends, "reference"} - {"torch"}
    contenders = _of_backends(op, first, wanted)
    choice = chosen(op, first)
    # The same op either way; as the dispatcher's choice it is held to our own error budget.
    as_choice = choice == "torch"
    contenders.append(_of_backends(op, first, ("torch",))[0] if as_choice else _of_torch(op, first))
    leading = next(x for x in first if isinstance(x, torch.Tensor))
    return Contest(
        op=op,
        case=case,
        inputs=inputs,
        contenders=[*contenders, *peers],
        judge=judge_of(op, first),
        flops=sum(spec.flops(arguments) for arguments in inputs[0]),
        useful_flops=sum(spec.useful_flops(arguments) for arguments in inputs[0]),
        bytes=sum(spec.bytes(arguments) for arguments in inputs[0]),
        dtype=leading.dtype,
        device=leading.device,
        chosen=choice,
        torch=("torch", "torch.compile"),
    )
