"""The shape of the op table's rows, and how the inputs of a case are drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .. import reference

#: ``build(dtype, device, generator)`` gives the positional arguments of ``reference.<op>``.
Build = Callable[[torch.dtype, "torch.device | str", "torch.Generator | None"], tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """One call of an op: a name, and what draws fresh arguments for it."""

    name: str
    build: Build
    #: Whether its gradients are of interest, too.
    gradients: bool = True

    def __str__(self) -> str:
        return self.name


def _everything(arguments: tuple[Any, ...]) -> float:
    return 1.0


@dataclass(frozen=True)
class OpSpec:
    """What is known about an op, whoever implements it."""

    name: str
    #: One sentence.
    summary: str
    #: Where the op is defined.
    paper: str
    #: Names of the reference's arguments and results, in order.
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    #: The arguments that may have gradients.
    gradients_of: tuple[str, ...]
    #: Small calls that between them reach every decision of the reference.
    cases: tuple[Case, ...]
    #: The calls whose speed is reported.
    bench_cases: tuple[Case, ...]
    #: Arithmetic of a call as if nothing were masked: 2 * M * N * K per matrix product.
    flops: Callable[[tuple[Any, ...]], float]
    #: Least memory traffic of a call: every argument read once, every result written once.
    bytes: Callable[[tuple[Any, ...]], float]
    #: PyTorch's equivalent as a user would write it, with the reference's signature. For comparison only:
    #: unlike the backend `torch`, it may let NaN at masked positions reach the result.
    pytorch: Callable[..., Any]
    #: A call with next to no data: its time is overhead.
    tiny: Case
    #: What `compare` runs it on: names, and functions that give a call for each batch of the text.
    text_cases: tuple[tuple[str, Callable[[Text], list[tuple[Any, ...]]]], ...]
    #: Calls in sizes that say something about a GPU, see `specs.gpu`.
    gpu_cases: tuple[Case, ...]
    #: The classes of `proof.shape_class` that `compare` measures: those of ordinary batches.
    gpu_classes: tuple[str, ...]
    #: Larger sizes, which ``python -m benchmarks.gpu`` times beside `gpu_cases`.
    gpu_bench_cases: tuple[Case, ...] = ()
    #: The public function on the reference's arguments, of which `functional` is the first, as far as
    #: `tiny` needs; None: its name and its arguments are the reference's.
    public: Callable[..., Any] | None = None
    #: The part of `flops` that masks leave to do, in [0, 1].
    useful_share: Callable[[tuple[Any, ...]], float] = _everything

    @property
    def reference(self) -> Callable[..., Any]:
        """The function that specifies the op."""
        function: Callable[..., Any] = getattr(reference, self.name)
        return function

    def useful_flops(self, arguments: tuple[Any, ...]) -> float:
        """Arithmetic of a call that its masks leave to do."""
        return self.flops(arguments) * self.useful_share(arguments)

    def named(self, arguments: tuple[Any, ...]) -> dict[str, Any]:
        """The arguments by name; hints behind them, which only some kernels take, are left out.

        The last may be missing where None is their default.
        """
        missing = (None,) * (len(self.arguments) - len(arguments))
        return dict(zip(self.arguments, (*arguments, *missing), strict=False))

    def case(self, name: str) -> Case:
        """The case or bench case of that name."""
        for case in (*self.cases, *self.bench_cases):
            if case.name == name:
                return case
        raise KeyError(f"{self.name} has no case {name!r}")


@dataclass(frozen=True)
class Draw:
    """Draws a case's tensors, already rounded to the dtype under test."""

    dtype: torch.dtype
    device: torch.device | str
    generator: torch.Generator | None

    def _float(self, draw: Callable[..., Tensor], shape: tuple[int, ...]) -> Tensor:
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        place = self.device if self.generator is None else self.generator.device
        return draw(shape, dtype=dtype, device=place, generator=self.generator)

    def normal(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        """Normal values of standard deviation ``scale`` around ``shift``."""
        drawn = self._float(torch.randn, shape)
        return drawn.mul_(scale).add_(shift).to(self.device, self.dtype)

    def weight(self, rows: int, columns: int) -> Tensor:
        """The matrix of a linear map that keeps the size of its input."""
        return self.normal(rows, columns, scale=1.0 / math.sqrt(max(1, columns)))

    def bools(self, *shape: int, true: float = 0.5) -> Tensor:
        """True with that probability."""
        return (self._float(torch.rand, shape) < true).to(self.device)

    def integers(self, *shape: int, end: int) -> Tensor:
        """int64 in [0, end)."""
        drawn = self._float(torch.rand, shape).double() * end
        return drawn.to(self.device, torch.int64).clamp_(max=end - 1)

    def seed(self) -> Tensor:
        """A dropout seed with bits in both words."""
        drawn = self._float(torch.rand, ()).double() * 2**62
        return drawn.to(torch.int64).to(self.device)


@dataclass(frozen=True)
class Text(Draw):
    """Draws calls on batches of a text (`measure.cases`) under one random embedding."""

    batches: Sequence[Any]
    #: The token behind the end of a text.
    padding: int
    #: Those of the base model, a `measure.cases.Size`.
    size: Any

    @cached_property
    def embedded(self) -> list[Tensor]:
        table = self.normal(self.size.vocabulary, self.size.model)
        return [table[batch.tokens] for batch in self.batches]

    def parameters(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Weight and bias of a linear map."""
        return self.weight(rows, columns), self.normal(rows, scale=0.1)

    def heads(self, x: Tensor) -> Tensor:
        """A projection of x, split into heads: (B, H, T, D), strided as in a real model."""
        projected = x @ self.weight(self.size.model, self.size.model).t()
        return projected.unflatten(-1, (self.size.heads, -1)).transpose(1, 2)


def case(name: str, build: Callable[[Draw], tuple[Any, ...]], gradients: bool = True) -> Case:
    """A case from a function of a `Draw`."""
    return Case(
        name, lambda dtype, device, generator: build(Draw(dtype, device, generator)), gradients
    )


def bytes_of(*tensors: Tensor | None) -> float:
    """Bytes of the distinct elements: what is expanded or absent costs nothing more."""
    total = 0
    for tensor in tensors:
        if tensor is not None:
            sizes = zip(tensor.shape, tensor.stride(), strict=True)
            total += math.prod(n for n, stride in sizes if stride != 0 or n == 0) * (
                tensor.element_size()
            )
    return float(total)
