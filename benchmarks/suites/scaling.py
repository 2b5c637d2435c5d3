"""How time grows: with length, batch, head size, padding, mask density, rows and threads."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from transformer_fast.measure.contest import Contest
from transformer_fast.measure.ops import op_contest
from transformer_fast.specs import Case

from ..scope import Maker, Scope
from .layers import lengths

Draw = Callable[[tuple[int, ...]], Tensor]


def _attention(
    batch: int,
    length: int,
    size: int = 64,
    heads: int = 8,
    causal: bool = False,
    real: float = 1.0,
    density: float = 1.0,
) -> Callable[..., tuple[Any, ...]]:
    def build(dtype: torch.dtype, device: Any, generator: Any) -> tuple[Any, ...]:
        shape = batch, heads, length, size
        qkv = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(3))
        mask = None
        if density < 1.0:
            chance = torch.rand(1, 1, length, length, generator=generator).to(device)
            mask = chance < density
        own = None if real == 1.0 else lengths(batch, length, real).to(device)
        return (*qkv, mask, own, causal, None, 0.0, None, False, False)

    return build


def _feed_forward(rows: int, model: int = 512, hidden: int = 2048) -> Callable[..., Any]:
    def build(dtype: torch.dtype, device: Any, generator: Any) -> tuple[Any, ...]:
        def normal(*shape: int) -> Tensor:
            scale = 1.0 / math.sqrt(shape[-1])
            return (torch.randn(shape, generator=generator) * scale).to(device, dtype)

        x = torch.randn(rows, model, generator=generator).to(device, dtype)
        weights = normal(hidden, model), normal(hidden), normal(model, hidden), normal(model)
        return (x, *weights, "relu", 0.0, None)

    return build


def _layer_norm(rows: int, model: int = 512) -> Callable[..., Any]:
    def build(dtype: torch.dtype, device: Any, generator: Any) -> tuple[Any, ...]:
        x, weight, bias = (
            torch.randn(shape, generator=generator).to(device, dtype)
            for shape in ((rows, model), (model,), (model,))
        )
        return x, (model,), weight, bias, 1e-5

    return build


def _contest(scope: Scope, op: str, name: str, build: Any, threads: int | None) -> Contest:
    contest = op_contest(op, name, scope.draw(op, Case(name, build)), scope.backends)
    if threads is None:
        return contest
    limited = [
        c if c.run is None else replace(c, run=_with_threads(c.run, threads))
        for c in contest.contenders
    ]
    # Peaks are those of all threads: with one thread the way to the roof is that much longer.
    return replace(contest, contenders=limited)


def _with_threads(run: Callable[..., Any], threads: int) -> Callable[..., Any]:
    def limited(*arguments: Any) -> Any:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return run(*arguments)
        finally:
            torch.set_num_threads(before)

    return limited


def _series(
    op: str, values: Sequence[float], build: Callable[[Any], Any], by_threads: bool = False
) -> Callable[[Scope], Iterator[tuple[str, Maker]]]:
    def suite(scope: Scope) -> Iterator[tuple[str, Maker]]:
        if op not in scope.ops:
            return
        chosen = values
        if by_threads:
            most = torch.get_num_threads()
            chosen = sorted({2**i for i in range(most.bit_length()) if 2**i <= most} | {most})
        for value in chosen:
            name = f"{value:g}"
            threads = int(value) if by_threads else None
            yield (
                f"{op} {name}",
                functools.partial(_contest, scope, op, name, build(value), threads),
            )

    return suite


def _powers(first: int, last: int) -> list[int]:
    return [2**i for i in range(first.bit_length() - 1, last.bit_length())]


_SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)

#: Each key says what the case's name, a number, is.
SUITES = {
    "attention (1,8,T,64), T": _series("attention", _powers(32, 16384), lambda t: _attention(1, t)),
    "causal attention (1,8,T,64), T": _series(
        "attention", _powers(32, 16384), lambda t: _attention(1, t, causal=True)
    ),
    "attention (B,8,128,64), B": _series("attention", _powers(1, 64), lambda b: _attention(b, 128)),
    "attention (2,8,1024,D), D": _series(
        "attention", (8, 16, 32, 48, 64, 80, 96, 128, 192, 256), lambda d: _attention(2, 1024, d)
    ),
    "attention (8,8,512,64), share of real keys": _series(
        "attention", _SHARES, lambda real: _attention(8, 512, real=real)
    ),
    "attention (2,8,1024,64), density of a random mask": _series(
        "attention", _SHARES, lambda density: _attention(2, 1024, density=density)
    ),
    "feed_forward 512x2048, rows": _series("feed_forward", _powers(1, 16384), _feed_forward),
    "layer_norm 512, rows": _series("layer_norm", _powers(1, 131072), _layer_norm),
    "attention (4,8,1024,64), threads": _series(
        "attention", (), lambda threads: _attention(4, 1024), by_threads=True
    ),
    "feed_forward 4096x512x2048, threads": _series(
        "feed_forward", (), lambda threads: _feed_forward(4096), by_threads=True
    ),
}  # fmt: skip
