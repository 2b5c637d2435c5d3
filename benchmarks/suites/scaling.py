"""How time grows: with length, batch, head size, padding, mask density, rows and threads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from transformer_fast.measure.accuracy import scores_of
from transformer_fast.measure.benchmark_case import Arguments, BenchmarkCase
from transformer_fast.measure.clock import Plan
from transformer_fast.measure.ops import op_case
from transformer_fast.specs.spec import Draw, case

from .. import peers
from ..scope import Maker, Scope
from .models import lengths

#: Lines of many points need fewer rounds than a figure in a table: some ten minutes on two cores.
PLAN = Plan(rounds=15, seconds=1.0, least=3, sample=0.002)


Build = Callable[[Draw], Arguments]


def _attention(
    batch: int,
    length: int,
    size: int = 64,
    heads: int = 8,
    causal: bool = False,
    real: float = 1.0,
    density: float = 1.0,
) -> Build:
    def build(draw: Draw) -> Arguments:
        qkv = (draw.normal(batch, heads, length, size) for _ in range(3))
        mask = draw.bools(1, 1, length, length, true=density) if density < 1.0 else None
        own = None if real == 1.0 else lengths(batch, length, real).to(draw.device)
        return (*qkv, mask, own, causal, None, 0.0, None, False, False, None)

    return build


def _feed_forward(rows: int, model: int = 512, hidden: int = 2048) -> Build:
    def build(draw: Draw) -> Arguments:
        first = draw.weight(hidden, model), draw.normal(hidden, scale=hidden**-0.5)
        second = draw.weight(model, hidden), draw.normal(model, scale=model**-0.5)
        return (draw.normal(rows, model), *first, *second, "relu", 0.0, None)

    return build


def _layer_norm(rows: int, model: int = 512) -> Build:
    return lambda draw: (
        draw.normal(rows, model), (model,), draw.normal(model), draw.normal(model), 1e-5
    )  # fmt: skip


#: Beyond so many scores what computes them all takes too long, and says nothing new.
_MOST_SCORES = 1 << 27


def _contest(scope: Scope, op: str, name: str, build: Build, threads: int | None) -> BenchmarkCase:
    if threads is not None:
        # Of everything, the probes of the roof too; `run_suite` puts it back.
        torch.set_num_threads(threads)
    inputs = scope.draw(op, case(name, build))
    arguments = inputs[0][0]
    # Compiling for every size would take longer than all the rest.
    others = [peer for peer in scope.peers if not peer.__name__.endswith(".torch_compile")]
    offered = peers.candidates(others, "op", op, arguments)
    benchmark_case = op_case(op, name, inputs, scope.backends, offered)
    if op == "attention" and (scores := scores_of(arguments)) > _MOST_SCORES:
        left_out = {"run": None, "reason": f"it computes {scores:.1e} scores one by one"}
        candidates = [
            replace(one, **left_out) if one.name == "reference" and one.run else one
            for one in benchmark_case.candidates
        ]
        return replace(benchmark_case, candidates=candidates)
    return benchmark_case


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
    "layer_norm 512, rows": _series("layer_norm", _powers(1, 65536)[::2], _layer_norm),
    "attention (4,8,1024,64), threads": _series(
        "attention", (), lambda threads: _attention(4, 1024), by_threads=True
    ),
    "feed_forward 4096x512x2048, threads": _series(
        "feed_forward", (), lambda threads: _feed_forward(4096), by_threads=True
    ),
}  # fmt: skip
