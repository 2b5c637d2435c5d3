"""One step of training: forward, loss, backward and AdamW."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from transformer_fast import functional
from transformer_fast.measure.accuracy import StepChecker
from transformer_fast.measure.benchmark_case import BenchmarkCase, Candidate
from transformer_fast.measure.calls import forced, record
from transformer_fast.measure.modules import parameter_bytes, twins
from transformer_fast.measure.ops import TIMES_FORWARD
from transformer_fast.measure.text import Batch
from transformer_fast.measure.transformers import Seq2Seq, transformer_work

from ..scope import Maker, Scope
from .models import Case
from .ops import spread_biases

EAGER, FUSED = "torch eager", "torch linear_cross_entropy"
#: (model, source, target, the tokens that are right) -> loss
Loss = Callable[[Any, Batch, Batch, Tensor], Tensor]
_CASES, _QUICK = (Case(8, 128, 32000, 6),), (Case(4, 32, 1000, 2),)


def by_logits(cross_entropy: Callable[..., Tensor]) -> Loss:
    """The loss as tutorials write it."""

    def loss(model: Any, source: Batch, target: Batch, following: Tensor) -> Tensor:
        return cross_entropy(model(source, target).flatten(0, 1), following)

    return loss


def fused(linear_cross_entropy: Callable[..., Tensor], **options: Any) -> Loss:
    """The output projection and the loss in one op, without logits."""

    def loss(model: Any, source: Batch, target: Batch, following: Tensor) -> Tensor:
        decoded, output = model.decoded(source, target).flatten(0, 1), model.output
        return linear_cross_entropy(
            decoded, output.weight, following, linear_bias=output.bias, **options
        )

    return loss


_THEIRS = by_logits(nn.functional.cross_entropy)


class Step:
    """A training step of a model of its own; returns the loss and every gradient.

    The learning rate is 0: AdamW does all of its arithmetic, and the weights stay what they are, so
    every step of every candidate can be checked against the same truth.
    """

    def __init__(self, model: nn.Module, loss: Loss = _THEIRS, fused: bool = True) -> None:
        self.model, self.loss = model.train(), loss
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0, fused=fused)

    @torch.enable_grad()
    def __call__(self, source: Batch, target: Batch) -> tuple[Tensor, ...]:
        following = target.tokens.roll(-1, 1).flatten()
        loss = self.loss(self.model, source, target, following)
        loss.backward()
        self.optimizer.step()
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        self.optimizer.zero_grad(set_to_none=True)
        return (loss.detach(), *gradients)


def _torch_fused(theirs: nn.Module) -> Candidate:
    """PyTorch's own op for it, which came with 2.13, in chunks."""
    op = getattr(nn.functional, "linear_cross_entropy", None)
    if op is None:
        return Candidate(FUSED, None, "this PyTorch has no linear_cross_entropy", ours=False)
    step = Step(copy.deepcopy(theirs), fused(op, options=nn.LinearCrossEntropyOptions()))
    return Candidate(FUSED, step, ours=False)


def _contest(scope: Scope, case: Case, fuses: bool) -> BenchmarkCase:
    # No dropout: other random numbers would be other results.
    ours, theirs = twins(
        lambda namespace: spread_biases(Seq2Seq(namespace, case.size, dropout=0.0)),
        scope.dtype,
        scope.device,
    )
    inputs = case.inputs(scope)
    loss = by_logits(functional.cross_entropy)
    oracle = Step(copy.deepcopy(theirs).double(), fused=False)
    reference = forced(Step(copy.deepcopy(ours), loss), "reference")
    step = Step(ours, fused(functional.linear_cross_entropy) if fuses else loss)
    with record() as found:
        step(*inputs[0][0])
    chosen = found.backends
    candidates = [
        *([Candidate(chosen, step)] if chosen != "reference" else []),
        Candidate("reference", reference),
        *([_torch_fused(theirs)] if fuses else []),
        Candidate(EAGER, Step(theirs), ours=False),
    ]
    work = transformer_work(case.size, parameter_bytes(theirs), scope.dtype.itemsize)
    names = ("loss", *(f"grad of {name}" for name, _ in theirs.named_parameters()))
    return scope.case(
        "training step", f"{case}{', fused loss' if fuses else ''}", inputs, candidates,
        StepChecker(oracle, reference, names), work(*inputs[0][0]), chosen,
        (EAGER, FUSED) if fuses else (EAGER,), TIMES_FORWARD,
    )  # fmt: skip


def suite(scope: Scope) -> Iterator[tuple[str, Maker]]:
    for case in _QUICK if scope.quick else _CASES:
        for fuses in (False, True):
            label = f"training step {case}{', fused loss' if fuses else ''}"
            yield label, functools.partial(_contest, scope, case, fuses)
