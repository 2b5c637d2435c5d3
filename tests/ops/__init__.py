"""Test data of each op beyond the op table: ``<op>.py`` has the op's `Row`, from which all tests
draw.

This module defines `Row` and what rows share: random calls, and dropout's numbers in NumPy.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from transformer_fast.specs import OPS, spec

Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Row:
    """Test data of an op that the op table does not have."""

    #: Planted bugs: name -> (the case that has to find the bug, the op with the bug).
    bugs: dict[str, tuple[str, Callable[..., Any]]]
    #: Swept sizes: name -> a function that returns the arguments with that size equal to n.
    sweeps: dict[str, Callable[[spec.Draw, int], Arguments]]
    #: Calls of few elements, for finite differences. The last one has all gradients that exist.
    small: Callable[[spec.Draw], list[Arguments]]
    #: Calls large enough for several threads, split by rows, by columns and by heads.
    large: Callable[[spec.Draw], list[Arguments]]
    #: Strategy for random calls in a dtype.
    drawn: Callable[[torch.dtype], st.SearchStrategy[Drawn]]
    #: Name of a case with as many optional arguments as possible.
    sample: str
    #: Calls like `large` that fill all scratch memory with NaN; None: those of `large`.
    filling: Callable[[spec.Draw], list[Arguments]] | None = None
    #: If true, second derivatives on PyTorch's samples are compared with PyTorch's. gradgradcheck
    #: covers all ops.
    second_derivatives: bool = True


def wrong(op: str, then: Callable[..., Any] | None = None, **changes: Any) -> Callable[..., Any]:
    """Returns the reference with changed arguments: values, or functions of the call's named
    arguments.

    ``then`` takes the call and the right results, and returns others.
    """

    def run(*arguments: Any) -> Any:
        call = SimpleNamespace(**OPS[op].named(arguments))
        new = {name: x(call) if callable(x) else x for name, x in changes.items()}
        results = OPS[op].reference(*{**vars(call), **new}.values())
        if then is None:
            return results
        return then(call, *(results if isinstance(results, tuple) else (results,)))

    return run


def some(n: int, least: int = 300) -> int:
    """Returns the number of rows of n elements that are enough for a reliable error ratio."""
    return least // max(1, n) + 1


# Random calls -------------------------------------------------------------------------------------

SMALL = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17)
MIDDLE = (31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 97)
LARGE = (127, 128, 129, 191, 255, 257, 300, 383, 511, 513)
Draw = Callable[[st.SearchStrategy[Any]], Any]


class Drawn(NamedTuple):
    """A call of an op, and the arguments whose gradients are checked (empty: none)."""

    arguments: tuple[Any, ...]
    names: tuple[str, ...]
    offset: int

    def __repr__(self) -> str:
        """Prints shapes instead of elements: hypothesis warns about long texts, which hides the
        failure.
        """
        told = [
            f"{str(one.dtype)[6:]}{list(one.shape)}" if isinstance(one, Tensor) else repr(one)
            for one in self.arguments
        ]
        return f"Drawn({', '.join(told)}; gradients of {self.names}, offset {self.offset})"


VALUES = {"normal": 6, "small": 1, "large": 1, "equal rows": 1, "zeros": 1, "far": 1, "sparse": 1}
# Not for bfloat16: the processor's own conversion to it (vcvtneps2bf16) flushes denormals to 0.
DENORMAL = {**VALUES, "denormal": 1}


class Numbers:
    """Random tensors of a dtype from a seed."""

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

    def of_kind(self, kind: str, *shape: int) -> Tensor:
        """Returns values of a kind; a sum of a few hundred of their squares does not overflow the
        dtype.
        """
        half = self.dtype == torch.float16
        if kind == "small":
            return self.normal(*shape, scale=1e-4 if half else 1e-12)
        if kind == "large":
            return self.normal(*shape, scale=30.0 if half else 1e4)
        if kind == "denormal":
            return self.normal(*shape, scale=1e-6 if half else 1e-40)
        if kind == "zeros":
            return torch.zeros(shape, dtype=self.dtype)
        if kind == "far":
            return self.normal(*shape, shift=100.0)
        x = self.normal(*shape)
        if kind == "equal rows" and x.dim() >= 2:
            return x[..., :1, :].expand(shape).clone()
        if kind == "sparse":
            return torch.where(self.bools(*shape, true=0.1), x, 0.0)
        return x


LAYOUTS = {"contiguous": 6, "transposed": 1, "steps": 1, "wide rows": 1, "flipped": 1, "negated": 1}


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Returns the same values with other strides."""
    if x.dim() == 0 or layout == "contiguous":
        return x
    if layout == "transposed" and x.dim() >= 2:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    gap = math.nan if x.is_floating_point() else 99
    if layout == "steps":
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), gap, dtype=x.dtype)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    if layout == "wide rows":
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), gap, dtype=x.dtype)
        wide[..., : x.shape[-1]] = x
        return wide[..., : x.shape[-1]]
    if layout == "flipped" and x.dim() >= 2:
        # Reverses the order of the dimensions in memory.
        order = tuple(reversed(range(x.dim())))
        return x.permute(order).contiguous().permute(order)
    if layout == "negated":
        return torch._neg_view(-x)
    return x


LEADING = [
    (1,), (3,), (2, 3), (), (7,), (16,), (17,), (0,), (64,), (73,), (2, 0, 3), (1, 1, 5), (129,), (150,),
    (8, 20),
]  # fmt: skip


class Drawing(Numbers):
    """Random tensors whose kinds of values and strides hypothesis draws too."""

    def __init__(self, draw: Draw, dtype: torch.dtype) -> None:
        super().__init__(dtype, draw(st.integers(0, 2**32)))
        self.draw = draw

    def size(self, *groups: tuple[int, ...]) -> int:
        """Draws a size from groups of sizes; small sizes come more often than middle ones."""
        return self.draw(st.one_of(*(st.sampled_from(group) for group in groups)))  # type: ignore[no-any-return]

    def kind(self, table: dict[str, int]) -> str:
        """Draws a key with the frequency given by its weight."""
        names = [name for name, weight in table.items() for _ in range(weight)]
        return self.draw(st.sampled_from(names))  # type: ignore[no-any-return]

    def lead(self, most: int) -> tuple[int, ...]:
        """Draws leading dimensions with at most ``most`` elements."""
        shape: tuple[int, ...] = self.draw(st.sampled_from(LEADING))
        return shape if math.prod(shape) <= most else (3,)

    def valued(self, *shape: int, denormal: bool = False) -> Tensor:
        return self.of_kind(self.kind(DENORMAL if denormal else VALUES), *shape)

    def laid_out(self, x: Tensor, layout: str | None = None) -> Tensor:
        return laid_out(x, self.kind(LAYOUTS) if layout is None else layout)


# Random numbers -----------------------------------------------------------------------------------


def philox(key: tuple[int, int], counter: Any) -> Any:
    """Philox4x32-10 of counters (..., 4), as defined by Salmon et al. 2011."""
    words = [counter[..., i].astype(np.uint64) for i in range(4)]
    low32 = np.uint64(0xFFFFFFFF)
    for turn in range(10):
        k = [np.uint64((key[i] + turn * w) % 2**32) for i, w in enumerate((0x9E3779B9, 0xBB67AE85))]
        one = words[0] * np.uint64(0xD2511F53)
        two = words[2] * np.uint64(0xCD9E8D57)
        words = [
            (two >> np.uint64(32)) ^ words[1] ^ k[0],
            two & low32,
            (one >> np.uint64(32)) ^ words[3] ^ k[1],
            one & low32,
        ]
    return np.stack(words, axis=-1)


def numbers(seed: int, rows: Any, columns: int) -> Any:
    """Returns random numbers below 2^16, (rows, columns), as dropout draws them.

    Each Philox counter gives eight numbers; its first word counts along the row.
    """
    counter = np.zeros((len(rows), -(-columns // 8), 4), np.uint64)
    counter[..., 0] = np.arange(counter.shape[1])[None, :]
    counter[..., 1] = (rows % 2**32)[:, None]
    counter[..., 2] = (rows // 2**32)[:, None]
    words = philox((seed % 2**32, (seed >> 32) % 2**32), counter)
    halves = np.stack([words % 2**16, words // 2**16], axis=-1)
    return halves.reshape(len(rows), 8 * counter.shape[1])[:, :columns]


def kept(shape: tuple[int, ...], p: float, seed: int | None) -> Any:
    """Returns the factor of dropout for each element: 0 or 1 / (1 - p)."""
    if p == 0.0:
        return np.ones(shape)
    if p == 1.0:
        return np.zeros(shape)
    assert seed is not None
    drawn = numbers(seed, np.arange(math.prod(shape[:-1])), shape[-1])
    stays = drawn >= min(max(math.floor(p * 65536 + 0.5), 1), 65535)
    return (stays / (1.0 - p)).reshape(shape)


_ROWS: dict[str, Row] = {}
for _one in pkgutil.iter_modules(__path__):
    _ROWS |= importlib.import_module(f"{__name__}.{_one.name}").ROWS
ROWS: dict[str, Row] = {op: _ROWS[op] for op in OPS}
