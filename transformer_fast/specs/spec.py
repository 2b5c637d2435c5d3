"""`OpSpec`, an entry of the op table, and `Draw`, which generates the random inputs of its cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from .. import reference

#: ``build(dtype, device, generator)`` returns the positional arguments of ``reference.<op>``.
Build = Callable[[torch.dtype, "torch.device | str", "torch.Generator | None"], tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """A named call of an op, and the function that generates its arguments."""

    name: str
    build: Build
    #: True if its gradients are checked and timed, too.
    gradients: bool = True
    #: The op, set by the `OpSpec` that has the case.
    op: str = ""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class OpSpec:
    """Specification of an op, independent of the backends."""

    name: str
    #: Description in one sentence.
    summary: str
    #: The publication that defines the op.
    paper: str
    #: Names of the reference's arguments and results, in order.
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    #: Names of the differentiable arguments.
    gradients_of: tuple[str, ...]
    #: Small calls for tests; together they cover every edge case of the reference.
    cases: tuple[Case, ...]
    #: Calls for benchmarks.
    bench_cases: tuple[Case, ...]
    #: FLOPs of a call, masks ignored: 2 * M * N * K per matrix product.
    flops: Callable[[tuple[Any, ...]], float]
    #: Least memory traffic of a call: every argument read once, every result written once.
    bytes: Callable[[tuple[Any, ...]], float]
    #: The PyTorch equivalent that a user would write, with the reference's signature. A baseline for
    #: timings only: unlike in the backend `torch`, NaN at masked positions may reach the result.
    pytorch: Callable[..., Any]
    #: A call with almost no data, whose time is the overhead of a call.
    tiny: Case
    #: Cases of `compare`: (name, function that returns the arguments of one call per batch of text).
    text_cases: tuple[tuple[str, Callable[[Text], list[tuple[Any, ...]]]], ...]
    #: Calls in GPU-sized shapes that `prove` and ``python -m benchmarks.gpu`` check and time. Each
    #: represents its class of `proof.shape_class`; calls of classes without a case run PyTorch's
    #: kernels. The checked call is the timed one, so its fp64 reference has to fit into memory. The
    #: reference of attention runs head by head, unless the case has dropout.
    gpu_cases: tuple[Case, ...]
    #: Larger sizes, which ``python -m benchmarks.gpu`` times beside `gpu_cases`.
    gpu_bench_cases: tuple[Case, ...] = ()
    #: ``public(functional, *arguments)`` calls the public function with the arguments of a
    #: reference call without dropout. None: it has the reference's name and arguments.
    public: Callable[..., Any] | None = None
    #: The kind of products, whose measured rate is the roof: a name of `measure.roof.peaks`. None:
    #: that of the call's dtype.
    product: str | None = None
    #: True if kernels must return the bits of the reference for these arguments.
    exact: Callable[[tuple[Any, ...]], bool] = lambda arguments: False
    #: Returns the largest change of a call's results if an intermediate value rounds to the next
    #: integer instead; None: the op does not round to integers.
    step: Callable[[tuple[Any, ...]], float] | None = None
    #: Fraction of `flops` that is not masked out, in [0, 1].
    useful_share: Callable[[tuple[Any, ...]], float] = lambda arguments: 1.0

    def __post_init__(self) -> None:
        for field in ("cases", "bench_cases", "gpu_cases", "gpu_bench_cases"):
            own = tuple(replace(one, op=self.name) for one in getattr(self, field))
            object.__setattr__(self, field, own)

    @property
    def reference(self) -> Callable[..., Any]:
        """The function that specifies the op."""
        function: Callable[..., Any] = getattr(reference, self.name)
        return function

    def useful_flops(self, arguments: tuple[Any, ...]) -> float:
        """Returns the FLOPs of a call that are not masked out."""
        return self.flops(arguments) * self.useful_share(arguments)

    def named(self, arguments: tuple[Any, ...]) -> dict[str, Any]:
        """Returns the arguments by name.

        Trailing arguments that default to None may be missing. Hints that follow the arguments, and
        that only some kernels take, are left out.
        """
        missing = (None,) * (len(self.arguments) - len(arguments))
        return dict(zip(self.arguments, (*arguments, *missing), strict=False))

    def public_function(self, functional: Any) -> Callable[..., Any]:
        """Returns the op's function of the module ``functional``; its arguments: see `public`."""
        if self.public is None:
            return getattr(functional, self.name)  # type: ignore[no-any-return]
        return partial(self.public, functional)

    def case(self, name: str) -> Case:
        """Returns the case or benchmark case with that name."""
        for case in (*self.cases, *self.bench_cases):
            if case.name == name:
                return case
        raise KeyError(f"{self.name} has no case {name!r}")


@dataclass(frozen=True)
class Draw:
    """Generates the random tensors of a case, rounded to the dtype under test."""

    dtype: torch.dtype
    device: torch.device | str
    generator: torch.Generator | None

    def _float(self, draw: Callable[..., Tensor], shape: tuple[int, ...]) -> Tensor:
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        place = self.device if self.generator is None else self.generator.device
        return draw(shape, dtype=dtype, device=place, generator=self.generator)

    def normal(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        """Returns normal values with mean ``shift`` and standard deviation ``scale``."""
        drawn = self._float(torch.randn, shape)
        return drawn.mul_(scale).add_(shift).to(self.device, self.dtype)

    def weight(self, rows: int, columns: int) -> Tensor:
        """Returns the weight of a linear layer whose outputs have the magnitude of its inputs."""
        return self.normal(rows, columns, scale=1.0 / math.sqrt(max(1, columns)))

    def bools(self, *shape: int, true: float = 0.5) -> Tensor:
        """Returns bools that are True with probability ``true``."""
        return (self._float(torch.rand, shape) < true).to(self.device)

    def integers(self, *shape: int, end: int) -> Tensor:
        """Returns int64 values in [0, end)."""
        drawn = self._float(torch.rand, shape).double() * end
        return drawn.to(self.device, torch.int64).clamp_(max=end - 1)

    def seed(self) -> Tensor:
        """Returns a dropout seed in [0, 2^62), so that both 32-bit words are used."""
        drawn = self._float(torch.rand, ()).double() * 2**62
        return drawn.to(torch.int64).to(self.device)


@dataclass(frozen=True)
class Text(Draw):
    """Generates calls on batches of text (`measure.cases`), embedded by one random table."""

    batches: Sequence[Any]
    #: The padding token.
    padding: int
    #: Dimensions of the base model, a `measure.cases.Size`.
    size: Any

    @cached_property
    def embedded(self) -> list[Tensor]:
        table = self.normal(self.size.vocabulary, self.size.model)
        return [table[batch.tokens] for batch in self.batches]

    def parameters(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Returns weight and bias of a linear layer."""
        return self.weight(rows, columns), self.normal(rows, scale=0.1)

    def heads(self, x: Tensor) -> Tensor:
        """Returns a projection of x split into heads (B, H, T, D), with the strides of a real model."""
        projected = x @ self.weight(self.size.model, self.size.model).t()
        return projected.unflatten(-1, (self.size.heads, -1)).transpose(1, 2)


def case(name: str, build: Callable[[Draw], tuple[Any, ...]], *rest: Any) -> Case:
    """Returns a case; ``build`` makes arguments from a `Draw`; ``rest``: more fields of `Case`."""
    return Case(name, lambda dtype, device, generator: build(Draw(dtype, device, generator)), *rest)


def rows_of(x: Tensor) -> int:
    """Returns the number of rows of a tensor (..., columns)."""
    return x.numel() // x.shape[-1] if x.shape[-1] else 0


def bytes_of(*tensors: Tensor | None) -> float:
    """Returns the bytes of the distinct elements: expanded dimensions count once, None counts 0."""
    total = 0
    for tensor in tensors:
        if tensor is not None:
            sizes = zip(tensor.shape, tensor.stride(), strict=True)
            total += math.prod(n for n, stride in sizes if stride != 0 or n == 0) * (
                tensor.element_size()
            )
    return float(total)
