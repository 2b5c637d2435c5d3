"""Models of the tutorials' sizes, where what a call costs beside its work decides.

Each as it is written, once more with ``from transformer_fast import nn`` in place of torch's, and
after `accelerate`; the loss is `CrossEntropyLoss` of the same namespace.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import transformer_fast
from transformer_fast.measure.accuracy import ModuleChecker, StepChecker
from transformer_fast.measure.benchmark_case import Arguments, BenchmarkCase, Candidate
from transformer_fast.measure.calls import forced
from transformer_fast.measure.text import PADDING, Batch
from transformer_fast.measure.transformers import Seq2Seq, Size

from .. import hand_written
from ..scope import Maker, Scope
from .ops import spread_biases

IMPORTED, ACCELERATED, AS_WRITTEN = "import of our nn", "accelerate", "torch eager"
#: (width, B, T, threads)
_SIZES = ((64, 1, 20, 1), (128, 4, 80, 1), (128, 4, 80, 2))
_QUICK = ((64, 1, 20, 1),)
_VOCABULARY = 100


def _written_with(namespace: Any) -> ModuleType:
    """`hand_written` as if its first lines imported ``nn`` from there."""
    spec = hand_written.__spec__
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.nn = namespace  # type: ignore[attr-defined]
    return module


class _OfTorch(nn.Module):
    """`torch.nn.Transformer` between embeddings and a Linear."""

    def __init__(self, namespace: Any, size: Size) -> None:
        super().__init__()
        self.model = Seq2Seq(namespace, size, dropout=0.0)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        full = torch.full((source.shape[0],), source.shape[1], device=source.device)
        return self.model(Batch(source, full), Batch(target, full))


class _DecoderAlone(nn.Module):
    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.model = decoder

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.model(target)


def _positions(size: Size) -> Tensor:
    return Seq2Seq(nn, size._replace(layers=1)).positions


#: (namespace, size) -> the model, on source and target tokens
_MODELS: dict[str, Callable[[Any, Size], nn.Module]] = {
    "transformer by hand": lambda namespace, size: _written_with(namespace).Transformer(
        size, _positions(size)
    ),
    "decoder by hand": lambda namespace, size: _DecoderAlone(
        _written_with(namespace).Decoder(size)
    ),
    "torch.nn.Transformer": _OfTorch,
}


class _Pass:
    """Forward, loss and backward; gives the loss and every gradient.

    The gradients of three projections are one, as in torch.nn: that of a key's bias is 0, and what
    comes in its place is rounding.
    """

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        self.model, self.loss = model.train(), loss

    @torch.enable_grad()
    def __call__(self, source: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        found = self.loss(self.model(source, target).flatten(0, 1), target.roll(-1, 1).flatten())
        found.backward()
        gradients: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                gradients[name], parameter.grad = parameter.grad, None
        return (found.detach(), *hand_written.packed(gradients).values())


def _inputs(scope: Scope, batch: int, length: int) -> list[list[Arguments]]:
    def tokens(generator: torch.Generator) -> Tensor:
        found = torch.randint(_VOCABULARY - 1, (batch, length), generator=generator)
        return (found + (found >= PADDING)).to(scope.device)

    generators = [scope.generator(seed) for seed in range(2)]
    return [[(tokens(one), tokens(one))] for one in generators]


def _contest(
    scope: Scope, name: str, width: int, batch: int, length: int, threads: int, training: bool
) -> BenchmarkCase:
    torch.set_num_threads(threads)
    size = Size(width, width // 16, 4 * width, 2, _VOCABULARY)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = _MODELS[name](nn, size)
    theirs = spread_biases(theirs).eval().to(scope.device, scope.dtype)
    ours = _MODELS[name](transformer_fast.nn, size).eval().to(scope.device, scope.dtype)
    ours.load_state_dict(theirs.state_dict())
    accelerated = copy.deepcopy(theirs)
    transformer_fast.accelerate(accelerated)
    oracle = copy.deepcopy(theirs).double()

    def run(model: nn.Module, namespace: Any = nn) -> Any:
        return _Pass(model, namespace.CrossEntropyLoss()) if training else model

    reference = forced(run(copy.deepcopy(ours), transformer_fast.nn), "reference")
    checker: Any
    if training:
        theirs_run = run(oracle)
        with torch.enable_grad():
            names = hand_written.packed(dict(oracle.named_parameters()))
        checker = StepChecker(theirs_run, reference, ("loss", *(f"grad of {n}" for n in names)))
    else:
        checker = ModuleChecker(oracle, reference, lambda source, target: target != PADDING)
    return BenchmarkCase(
        op=name,
        case=f"d = {width}, ({batch},{length}), {'training' if training else 'evaluation'}, "
        f"{threads} thread{'s' if threads > 1 else ''}",
        inputs=_inputs(scope, batch, length),
        candidates=[
            Candidate(IMPORTED, run(ours, transformer_fast.nn)),
            Candidate(ACCELERATED, run(accelerated)),
            Candidate(AS_WRITTEN, run(theirs), ours=False),
        ],
        checker=checker,
        dtype=scope.dtype,
        device=scope.device,
        chosen=IMPORTED,
        torch=(AS_WRITTEN,),
    )


def suite(scope: Scope) -> Iterator[tuple[str, Maker]]:
    for name in _MODELS:
        for size in _QUICK if scope.quick else _SIZES:
            for training in (False, True):
                width, batch, length, threads = size
                kind = "training" if training else "evaluation"
                label = f"{name}, d = {width}, ({batch},{length}), {threads} threads, {kind}"
                yield label, functools.partial(_contest, scope, name, *size, training)
