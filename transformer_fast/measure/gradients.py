"""The contest of one op's forward and backward together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..dispatch import BACKENDS
from ..specs import OPS
from ..testing import require_grad
from ..testing.gradients import upstream
from ..testing.oracle import as_results
from .contest import Arguments, Contender, Contest
from .judge import GradientJudge
from .ops import op_contest

#: Backward does each matrix product of the forward twice: for either factor.
FLOPS = 3.0
#: And reads its inputs and the upstream gradient once more, and writes as many gradients.
BYTES = 3.0


class BothWays:
    """Runs the op, then the gradients of a fixed linear function of its results."""

    def __init__(
        self, op: str, run: Callable[..., Any], starts: Sequence[Tensor] | None = None
    ) -> None:
        self.op, self.run, self.starts = op, run, starts

    @torch.enable_grad()
    def __call__(self, *arguments: Any) -> tuple[Tensor, ...]:
        results = [
            (number, result)
            for number, result in enumerate(as_results(self.run(*arguments)))
            if result is not None and result.requires_grad
        ]
        if self.starts is None:
            self.starts = [upstream(result, number) for number, result in results]
        named = OPS[self.op].named(arguments)
        leaves = [x for x in named.values() if isinstance(x, Tensor) and x.requires_grad]
        found = torch.autograd.grad([r for _, r in results], leaves, self.starts, allow_unused=True)
        return tuple(
            torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)
        )


@torch.enable_grad()
def gradient_contest(
    op: str,
    case: str,
    inputs: Sequence[Sequence[Arguments]],
    backends: Collection[str] = BACKENDS,
) -> Contest:
    """As `op_contest`, for forward and backward; each piece of work must be of one shape."""
    wanting = [[require_grad(op, arguments) for arguments in calls] for calls in inputs]
    forward = op_contest(op, case, wanting, backends)
    contenders = [
        replace(contender, run=BothWays(op, contender.run))
        if contender.run is not None
        else Contender(contender.name, None, contender.reason, contender.ours)
        for contender in forward.contenders
    ]
    return replace(
        forward,
        contenders=contenders,
        judge=GradientJudge(op, wanting[0][0]),
        flops=FLOPS * forward.flops,
        useful_flops=FLOPS * forward.useful_flops,
        bytes=BYTES * forward.bytes,
    )
