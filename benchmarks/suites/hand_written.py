"""Code that somebody wrote by hand, under ``torch.compile(model, backend="transformer_fast")``.

The rewritten code stands against the same code as it was written, against torch.compile's own
backend, and against the same weights in `transformer_fast.nn`, which is what it is to come near to.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import transformer_fast
from transformer_fast.measure.calls import forced
from transformer_fast.measure.contest import Arguments, Contender, Contest
from transformer_fast.measure.judge import ModuleJudge, StepJudge
from transformer_fast.measure.modules import parameter_bytes, twins, with_fast_path
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
from . import layers
from .backward import spread
from .models import batches
from .training import TIMES_FORWARD, Step

#: (B, T), and the share of places that hold text.
_LAYERS = ((8, 128, 1.0), (8, 128, 0.65))
#: (B, S = T, vocabulary, layers, share)
_MODELS = ((8, 128, 8000, 2, 1.0), (8, 128, 8000, 2, 0.65))
_TRAINING = (8, 128, 8000, 2, 1.0)
_QUICK = (4, 32, 1000, 2)

CHOSEN, NN, AS_WRITTEN = "rewritten", "transformer_fast.nn", "torch eager"


def rewritten(model: nn.Module) -> Callable[..., Tensor]:
    """What a user of the backend has."""
    return torch.compile(model, backend=transformer_fast.compile_backend, dynamic=False)


class _OnBatches(nn.Module):
    """A model that takes tokens, given `Batch`es; ``run`` is the model, or what became of it."""

    def __init__(self, model: nn.Module, run: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.model, self.run = model, model if run is None else run

    def forward(self, source: Batch, target: Batch) -> Tensor:
        return self.run(source.tokens, target.tokens)


def _contest(
    scope: Scope,
    contenders: list[Contender],
    inputs: list[list[Arguments]],
    judge: Any,
    work: tuple[float, float, float],
    op: str,
    case: str,
) -> Contest:
    dense, useful, moved = work
    return Contest(
        op=op,
        case=case,
        inputs=inputs,
        contenders=contenders,
        judge=judge,
        flops=dense,
        useful_flops=useful,
        bytes=moved,
        dtype=scope.dtype,
        device=scope.device,
        chosen=CHOSEN,
        torch=(AS_WRITTEN, "torch.compile"),
    )


def _layer(scope: Scope, batch: int, length: int, share: float) -> Contest:
    size = Size()
    ours, theirs = twins(
        lambda nn: nn.TransformerEncoderLayer(
            size.model, size.heads, size.hidden, batch_first=True
        ),
        scope.dtype,
        scope.device,
    )
    written = hand_written.EncoderLayer(size).eval().to(scope.device, scope.dtype)
    written.load_state_dict(hand_written.renamed(theirs.state_dict()))

    def visible(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(x: Tensor, mask: None, padding: Tensor | None) -> Tensor:
            return run(x, None if padding is None else ~padding[:, None, None, :])

        return forward

    inputs = layers.calls(scope, batch, length, share)
    oracle = with_fast_path(copy.deepcopy(theirs).double(), False)
    reference = forced(ours, "reference")
    contenders = [
        Contender(CHOSEN, visible(rewritten(written))),
        Contender(NN, ours),
        Contender("reference", reference),
        Contender(AS_WRITTEN, visible(written), ours=False),
        *peers.contenders(scope.peers, "hand_written", written, visible),
    ]
    case = f"({batch},{length})" + (f", {share:.0%} real" if share < 1.0 else "")
    work = encoder_work(size, parameter_bytes(theirs))(*inputs[0][0])
    return _contest(
        scope, contenders, inputs, ModuleJudge(oracle, reference, real_places), work,
        op="hand-written encoder_layer", case=case,
    )  # fmt: skip


def _models(scope: Scope, size: Size, dropout: float) -> tuple[nn.Module, nn.Module, nn.Module]:
    """(of our nn, of torch's, by hand), with the same weights."""

    def make(namespace: Any) -> nn.Module:
        model = Seq2Seq(namespace, size, dropout)
        for name, parameter in model.named_parameters():
            if name.endswith("linear1.bias"):
                parameter.data = spread(parameter.data)
        return model

    ours, theirs = twins(make, scope.dtype, scope.device)
    positions: Any = theirs.positions
    written = hand_written.Transformer(size, positions).eval().to(scope.device, scope.dtype)
    written.load_state_dict(hand_written.renamed(theirs.state_dict()))
    return ours, theirs, written


def _about(layers: int, batch: int, length: int, vocabulary: int, share: float) -> str:
    case = f"{layers}+{layers}, ({batch},{length}), V = {vocabulary}"
    return case + (f", {share:.0%} real" if share < 1.0 else "")


def _model(
    scope: Scope, batch: int, length: int, vocabulary: int, layers: int, share: float
) -> Contest:
    size = Size(layers=layers, vocabulary=vocabulary)
    ours, theirs, written = _models(scope, size, 0.1)
    inputs: list[list[Arguments]] = [
        [batches(scope, batch, length, vocabulary, share, seed)] for seed in range(2)
    ]

    def tokens(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda source, target: run(source.tokens, target.tokens)

    oracle = with_fast_path(copy.deepcopy(theirs).double(), False)
    reference = forced(ours, "reference")
    contenders = [
        Contender(CHOSEN, tokens(rewritten(written))),
        Contender(NN, ours),
        Contender("reference", reference),
        Contender(AS_WRITTEN, tokens(written), ours=False),
        *peers.contenders(scope.peers, "hand_written", written, tokens),
    ]
    work = transformer_work(size, parameter_bytes(theirs), scope.dtype.itemsize)(*inputs[0][0])
    return _contest(
        scope, contenders, inputs,
        ModuleJudge(oracle, reference, lambda source, target: target.real), work,
        op="hand-written transformer", case=_about(layers, batch, length, vocabulary, share),
    )  # fmt: skip


def _training(
    scope: Scope, batch: int, length: int, vocabulary: int, layers: int, share: float
) -> Contest:
    size = Size(layers=layers, vocabulary=vocabulary)
    ours, theirs, written = _models(scope, size, 0.0)
    step = Step(_OnBatches(copy.deepcopy(written)))
    model = copy.deepcopy(written)
    rewritten_step = Step(_OnBatches(model, rewritten(model)))
    inputs: list[list[Arguments]] = [
        [batches(scope, batch, length, vocabulary, share, seed)] for seed in range(2)
    ]
    reference = forced(Step(copy.deepcopy(ours)), "reference")
    contenders = [
        Contender(CHOSEN, rewritten_step),
        Contender(NN, Step(ours)),
        Contender("reference", reference),
        Contender(AS_WRITTEN, step, ours=False),
    ]
    work = transformer_work(size, parameter_bytes(theirs), scope.dtype.itemsize)
    dense, useful, moved = (TIMES_FORWARD * part for part in work(*inputs[0][0]))
    oracle = Step(copy.deepcopy(theirs).double(), fused=False)
    names = tuple(name for name, _ in written.named_parameters())
    judge = _Judge(oracle, reference, tuple(name for name, _ in theirs.named_parameters()), names)
    return _contest(
        scope, contenders, inputs, judge, (dense, useful, moved),
        op="hand-written training step", case=_about(layers, batch, length, vocabulary, share),
    )  # fmt: skip


class _Judge(StepJudge):
    """Of steps of both: the gradients by hand are judged under the names of ``torch.nn``.

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
    models = ((*_QUICK, 0.65),) if scope.quick else _MODELS
    # Without padding: what is computed at padded places differs, and it is part of the loss.
    training = (*_QUICK, 1.0) if scope.quick else _TRAINING
    works = [("transformer", _model, case) for case in models]
    for kind, make, case in (*works, ("training step", _training, training)):
        batch, length, vocabulary, count, share = case
        label = f"hand-written {kind} {_about(count, batch, length, vocabulary, share)}"
        yield label, functools.partial(make, scope, *case)
