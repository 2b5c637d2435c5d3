"""Code that somebody wrote by hand, under ``torch.compile(model, backend="transformer_fast")``.

The rewritten code stands against the same code as it was written and after `accelerate`, against
torch.compile's own backend, and against the same weights in `transformer_fast.nn`, which is what it
is to come near to.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import transformer_fast
from transformer_fast.measure.accuracy import ModuleChecker, StepChecker
from transformer_fast.measure.benchmark_case import Arguments, BenchmarkCase, Candidate
from transformer_fast.measure.calls import forced
from transformer_fast.measure.modules import parameter_bytes, twins, with_fast_path
from transformer_fast.measure.ops import TIMES_FORWARD
from transformer_fast.measure.text import Batch
from transformer_fast.measure.transformers import (
    Seq2Seq,
    Size,
    encoder_work,
    real_places,
    transformer_work,
)

from .. import hand_written, peers
from ..scope import Maker, Scope
from .models import Case, calls
from .ops import spread_biases
from .training import Step

#: (B, T), and the share of places that hold text.
_LAYERS = ((8, 128, 1.0), (8, 128, 0.65))
_MODELS = (Case(8, 128, 8000, 2), Case(8, 128, 8000, 2, 0.65))
_QUICK = Case(4, 32, 1000, 2)
#: As tutorials have them: what a call costs beside its work decides.
_TUTORIALS = (Case(1, 20, 100, 2, width=64), Case(4, 80, 100, 2, width=128))

CHOSEN, NN, AS_WRITTEN = "rewritten", "transformer_fast.nn", "torch eager"
ACCELERATED = "accelerated"


def rewritten(model: nn.Module) -> Callable[..., Tensor]:
    """What a user of the compile backend has."""
    torch._dynamo.reset()  # or, after some models, Dynamo compiles no more of the same code
    return torch.compile(model, backend=transformer_fast.compile_backend, dynamic=False)


def accelerated(model: nn.Module) -> nn.Module:
    """What a user of `accelerate` has."""
    model = copy.deepcopy(model)
    transformer_fast.accelerate(model)
    return model


class _OnBatches(nn.Module):
    """A model that takes tokens, given `Batch`es; ``run`` is the model, or what became of it."""

    def __init__(self, model: nn.Module, run: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.model, self.run = model, model if run is None else run

    def forward(self, source: Batch, target: Batch) -> Tensor:
        return self.run(source.tokens, target.tokens)


def _forward(
    scope: Scope,
    name: str,
    case: object,
    models: tuple[nn.Module, nn.Module, nn.Module],
    inputs: list[list[Arguments]],
    adapt: Callable[[Callable[..., Tensor]], Callable[..., Tensor]],
    real: Callable[..., Tensor],
    work: Callable[..., Sequence[float]],
) -> BenchmarkCase:
    """Of one forward pass; ``adapt``: makes of what is written by hand what takes the inputs."""
    ours, theirs, written = models
    oracle = with_fast_path(copy.deepcopy(theirs).double(), False)
    reference = forced(ours, "reference")
    candidates = [
        Candidate(CHOSEN, adapt(rewritten(written))),
        Candidate(ACCELERATED, adapt(accelerated(written))),
        Candidate(NN, ours),
        Candidate("reference", reference),
        Candidate(AS_WRITTEN, adapt(written), ours=False),
        *peers.candidates(scope.peers, "hand_written", written, adapt),
    ]
    return scope.case(
        f"hand-written {name}", case, inputs, candidates, ModuleChecker(oracle, reference, real),
        work(*inputs[0][0]), CHOSEN, (AS_WRITTEN, "torch.compile"),
    )  # fmt: skip


def _layer(scope: Scope, batch: int, length: int, share: float) -> BenchmarkCase:
    size = Size()
    ours, theirs = twins(
        lambda nn: nn.TransformerEncoderLayer(
            size.model, size.heads, size.hidden, batch_first=True
        ),
        scope.dtype,
        scope.device,
    )
    written = hand_written.Layer(size).eval().to(scope.device, scope.dtype)
    written.load_state_dict(hand_written.renamed(theirs.state_dict()))

    def visible(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(x: Tensor, mask: None, padding: Tensor | None) -> Tensor:
            return run(x, None if padding is None else ~padding[:, None, None, :])

        return forward

    case = f"({batch},{length})" + (f", {share:.0%} real" if share < 1.0 else "")
    work = encoder_work(size, parameter_bytes(theirs))
    inputs = calls(scope, batch, length, share)
    return _forward(
        scope, "encoder_layer", case, (ours, theirs, written), inputs, visible, real_places, work
    )


def _models(scope: Scope, size: Size, dropout: float) -> tuple[nn.Module, nn.Module, nn.Module]:
    """(of our nn, of torch's, by hand), with the same weights."""

    ours, theirs = twins(
        lambda namespace: spread_biases(Seq2Seq(namespace, size, dropout)),
        scope.dtype,
        scope.device,
    )
    positions: Any = theirs.positions
    written = hand_written.Transformer(size, positions).eval().to(scope.device, scope.dtype)
    written.load_state_dict(hand_written.renamed(theirs.state_dict()))
    return ours, theirs, written


def _model(scope: Scope, case: Case) -> BenchmarkCase:
    models = _models(scope, case.size, 0.1)
    return _forward(
        scope, "transformer", case, models, case.inputs(scope),
        lambda run: lambda source, target: run(source.tokens, target.tokens),
        lambda source, target: target.real,
        transformer_work(case.size, parameter_bytes(models[1]), scope.dtype.itemsize),
    )  # fmt: skip


def _training(scope: Scope, case: Case) -> BenchmarkCase:
    ours, theirs, written = _models(scope, case.size, 0.0)
    model = copy.deepcopy(written)
    reference = forced(Step(copy.deepcopy(ours)), "reference")
    candidates = [
        Candidate(CHOSEN, Step(_OnBatches(model, rewritten(model)))),
        Candidate(ACCELERATED, Step(_OnBatches(accelerated(written)))),
        Candidate(NN, Step(ours)),
        Candidate("reference", reference),
        Candidate(AS_WRITTEN, Step(_OnBatches(copy.deepcopy(written))), ours=False),
    ]
    work = transformer_work(case.size, parameter_bytes(theirs), scope.dtype.itemsize)
    inputs = case.inputs(scope)
    oracle = Step(copy.deepcopy(theirs).double(), fused=False)
    names = tuple(name for name, _ in written.named_parameters())
    checker = _Checker(
        oracle, reference, tuple(name for name, _ in theirs.named_parameters()), names
    )
    return scope.case(
        "hand-written training step", case, inputs, candidates, checker, work(*inputs[0][0]),
        CHOSEN, (AS_WRITTEN, "torch.compile"), TIMES_FORWARD,
    )  # fmt: skip


class _Checker(StepChecker):
    """Of steps of both: the gradients by hand are checked under the names of ``torch.nn``.

    Not the other way round, because the gradient of a key's bias is 0 (softmax takes a constant
    away) and what a step has in its place is rounding, which only counts as part of a whole.
    """

    def __init__(
        self, oracle: Any, reference: Any, names: tuple[str, ...], by_hand: tuple[str, ...]
    ) -> None:
        super().__init__(oracle, reference, ("loss", *(f"grad of {name}" for name in names)))
        self.parameters, self.by_hand = names, by_hand

    def _results(self, result: Any, arguments: Arguments) -> tuple[Tensor | None, ...]:
        loss, *gradients = result
        if len(gradients) != len(self.by_hand):
            return loss, *gradients
        found = hand_written.packed(dict(zip(self.by_hand, gradients, strict=True)))
        return loss, *(found[name.removeprefix("transformer.")] for name in self.parameters)


def suite(scope: Scope) -> Iterator[tuple[str, Maker]]:
    for layer in _LAYERS[-1:] if scope.quick else _LAYERS:
        label = f"hand-written encoder_layer ({layer[0]},{layer[1]}), {layer[2]:.0%} real"
        yield label, functools.partial(_layer, scope, *layer)
    models = (_QUICK._replace(share=0.65),) if scope.quick else (*_MODELS, *_TUTORIALS)
    for case in models:
        yield f"hand-written transformer {case}", functools.partial(_model, scope, case)
    # Without padding: what is computed at padded places differs, and it is part of the loss.
    for case in (_QUICK,) if scope.quick else (_MODELS[0], *_TUTORIALS):
        yield f"hand-written training step {case}", functools.partial(_training, scope, case)
