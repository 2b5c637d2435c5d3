"""One step of training: forward, loss, backward and AdamW."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from transformer_fast.measure.calls import forced, record
from transformer_fast.measure.contest import Arguments, Contender, Contest
from transformer_fast.measure.judge import StepJudge
from transformer_fast.measure.modules import parameter_bytes, twins
from transformer_fast.measure.text import Batch
from transformer_fast.measure.transformers import Seq2Seq, Size, transformer_work

from ..scope import Maker, Scope
from .backward import spread
from .models import batches

#: (B, S = T, vocabulary, layers)
_CASES = ((8, 128, 32000, 6),)
_QUICK = ((4, 32, 1000, 2),)
#: Forward once, and backward does each product twice.
TIMES_FORWARD = 3.0


class Step:
    """A training step of a model of its own; returns the loss and every gradient.

    The learning rate is 0: AdamW does all of its arithmetic, and the weights stay what they are, so
    every step of every contender can be checked against the same truth.
    """

    def __init__(self, model: nn.Module, fused: bool = True) -> None:
        self.model = model.train()
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0, fused=fused)

    @torch.enable_grad()
    def __call__(self, source: Batch, target: Batch) -> tuple[Tensor, ...]:
        logits = self.model(source, target)
        following = target.tokens.roll(-1, 1)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())
        loss.backward()
        self.optimizer.step()
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        self.optimizer.zero_grad(set_to_none=True)
        return (loss.detach(), *gradients)


def _contenders(
    ours: nn.Module,
    theirs: nn.Module,
    reference: Callable[..., tuple[Tensor, ...]],
    arguments: Arguments,
) -> tuple[Sequence[Contender], str]:
    step = Step(copy.deepcopy(ours))
    with record() as found:
        step(*arguments)
    chosen = "+".join(sorted({backend for _, backend in found.calls}))
    automatic = Contender(chosen, step)
    eager = Contender("torch eager", Step(theirs), ours=False)
    ours_too = [automatic] if chosen != "reference" else []
    return [*ours_too, Contender("reference", reference), eager], chosen


def _contest(scope: Scope, batch: int, length: int, vocabulary: int, layers: int) -> Contest:
    size = Size(layers=layers, vocabulary=vocabulary)

    def make(namespace: Any) -> nn.Module:
        # No dropout: other random numbers would be other results.
        model = Seq2Seq(namespace, size, dropout=0.0)
        for name, parameter in model.named_parameters():
            if name.endswith("linear1.bias"):
                parameter.data = spread(parameter.data)
        return model

    ours, theirs = twins(make, scope.dtype, scope.device)
    oracle = Step(copy.deepcopy(theirs).double(), fused=False)
    reference = forced(Step(copy.deepcopy(ours)), "reference")
    inputs: list[list[Arguments]] = [
        [batches(scope, batch, length, vocabulary, 1.0, seed)] for seed in range(2)
    ]
    contenders, chosen = _contenders(ours, theirs, reference, inputs[0][0])
    work = transformer_work(size, parameter_bytes(theirs), scope.dtype.itemsize)
    dense, useful, moved = work(*inputs[0][0])
    names = ("loss", *(f"grad of {name}" for name, _ in theirs.named_parameters()))
    return Contest(
        op="training step",
        case=f"{layers}+{layers}, ({batch},{length}), V = {vocabulary}",
        inputs=inputs,
        contenders=contenders,
        judge=StepJudge(oracle, reference, names),
        flops=TIMES_FORWARD * dense,
        useful_flops=TIMES_FORWARD * useful,
        bytes=TIMES_FORWARD * moved,
        dtype=scope.dtype,
        device=scope.device,
        chosen=chosen,
        torch=("torch eager",),
    )


def suite(scope: Scope) -> Iterator[tuple[str, Maker]]:
    for case in _QUICK if scope.quick else _CASES:
        batch, length, _, layers = case
        label = f"training step {layers}+{layers} ({batch},{length})"
        yield label, functools.partial(_contest, scope, *case)
