"""Draws calls of ops that ordinary tests do not think of; each is a function of what is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALL = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17)
MIDDLE = (31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 97)
LARGE = (127, 128, 129, 191, 255, 257, 300, 383, 511, 513)
Draw = Callable[[st.SearchStrategy[Any]], Any]


def exact(value: Any) -> Any:
    """A tensor as NumPy's, in fp64 if it has floating-point numbers."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    return (value.double() if value.is_floating_point() else value).resolve_neg().numpy()


class Drawn(NamedTuple):
    """A call of an op, and of which arguments gradients are checked (none: not at all)."""

    arguments: tuple[Any, ...]
    names: tuple[str, ...]
    offset: int

    def __repr__(self) -> str:
        """Shapes in place of elements: hypothesis warns of a long text, and that hides what failed."""
        told = [
            f"{str(one.dtype)[6:]}{list(one.shape)}" if isinstance(one, Tensor) else repr(one)
            for one in self.arguments
        ]
        return f"Drawn({', '.join(told)}; gradients of {self.names}, offset {self.offset})"


def sizes(*groups: tuple[int, ...]) -> st.SearchStrategy[int]:
    """One of the sizes: small ones more often than middle ones, and so on."""
    return st.one_of(*(st.sampled_from(group) for group in groups))


def kinds(table: dict[str, int]) -> st.SearchStrategy[str]:
    """A key, as often as its weight says."""
    return st.sampled_from([name for name, weight in table.items() for _ in range(weight)])


class Numbers:
    """Tensors of a dtype from a seed, in values and in strides that are drawn."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return (drawn * scale + shift).to(self.dtype)

    def integers(self, *shape: int, end: int) -> Tensor:
        return torch.randint(0, max(1, end), shape, generator=self.generator)

    def bools(self, *shape: int, true: float = 0.5) -> Tensor:
        return torch.rand(shape, generator=self.generator) < true

    def one_of(self, *choices: Any) -> Any:
        return choices[int(torch.randint(0, len(choices), (), generator=self.generator))]


LAYOUTS = {"contiguous": 6, "transposed": 1, "steps": 1, "wide rows": 1, "flipped": 1, "negated": 1}


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values in other strides."""
    if x.dim() == 0 or layout == "contiguous":
        return x
    if layout == "transposed" and x.dim() >= 2:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "steps":
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), math.nan, dtype=x.dtype)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    if layout == "wide rows":
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), math.nan, dtype=x.dtype)
        wide[..., : x.shape[-1]] = x
        return wide[..., : x.shape[-1]]
    if layout == "flipped" and x.dim() >= 2:
        # Dimensions in the opposite order in memory.
        order = tuple(reversed(range(x.dim())))
        return x.permute(order).contiguous().permute(order)
    if layout == "negated":
        return torch._neg_view(-x)
    return x


VALUES = {"normal": 6, "small": 1, "large": 1, "equal rows": 1, "zeros": 1, "far": 1, "sparse": 1}
# Not for bfloat16: the processor's own conversion to it (vcvtneps2bf16) makes them 0.
DENORMAL = {**VALUES, "denormal": 1}


def valued(numbers: Numbers, kind: str, *shape: int) -> Tensor:
    """Values of a kind; what a sum of a few hundred of them squared still holds in the dtype."""
    half = numbers.dtype == torch.float16
    if kind == "small":
        return numbers.normal(*shape, scale=1e-4 if half else 1e-12)
    if kind == "large":
        return numbers.normal(*shape, scale=30.0 if half else 1e4)
    if kind == "denormal":
        return numbers.normal(*shape, scale=1e-6 if half else 1e-40)
    if kind == "zeros":
        return torch.zeros(shape, dtype=numbers.dtype)
    if kind == "far":
        return numbers.normal(*shape, shift=100.0)
    x = numbers.normal(*shape)
    if kind == "equal rows" and x.dim() >= 2:
        return x[..., :1, :].expand(shape).clone()
    if kind == "sparse":
        return torch.where(numbers.bools(*shape, true=0.1), x, 0.0)
    return x


class Drawing(Numbers):
    """Tensors in values and in strides that are drawn, too."""

    def __init__(self, draw: Draw, dtype: torch.dtype) -> None:
        super().__init__(dtype, draw(st.integers(0, 2**32)))
        self.draw = draw

    def valued(self, *shape: int, denormal: bool = False) -> Tensor:
        return valued(self, self.draw(kinds(DENORMAL if denormal else VALUES)), *shape)

    def laid_out(self, x: Tensor) -> Tensor:
        return laid_out(x, self.draw(kinds(LAYOUTS)))


def leading(draw: Draw, most: int) -> tuple[int, ...]:
    """Leading dimensions of at most so many elements."""
    shape = draw(
        st.sampled_from(
            [(1,), (3,), (2, 3), (), (7,), (16,), (17,), (0,), (64,), (73,), (2, 0, 3), (1, 1, 5),
             (129,), (150,), (8, 20)]
        )
    )  # fmt: skip
    return shape if math.prod(shape) <= most else (3,)
