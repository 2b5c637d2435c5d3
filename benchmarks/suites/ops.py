"""Suites of single ops: benchmark cases of the op table, call overhead, and scaling.

The cases run forward, and with gradients. Scaling is by length, batch, head size, padding, mask
density, rows and threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from transformer_fast import functional
from transformer_fast.measure.accuracy import BothWays, scores_of
from transformer_fast.measure.benchmark_case import Arguments, BenchmarkCase, Candidate
from transformer_fast.measure.cases import op_case
from transformer_fast.measure.clock import Plan
from transformer_fast.specs import OPS, Case, feed_forward, layer_norm
from transformer_fast.specs.attention import _bench, _bools

from . import Maker, Scope, Suite, lengths, spread

#: Largest FLOPs and bytes of a case in a quick run.
_QUICK_FLOPS, _QUICK_BYTES = 3e9, 5e7
#: Largest FLOPs of a case's forward pass if gradients are timed, which are checked in fp64.
_MOST_FLOPS, _MOST_QUICK_FLOPS = 2e10, 6e8


def away_from_the_kink(op: str, arguments: Arguments) -> Arguments:
    """Returns the arguments with `spread` biases if the activation is ReLU."""
    named = OPS[op].named(arguments)
    biases = ("bias", "bias1") if named.get("activation") == "relu" else ()
    return tuple(spread(x) if k in biases and x is not None else x for k, x in named.items())


def _as_called(found: BenchmarkCase, gradients: bool = False) -> BenchmarkCase:
    """Returns the case with the chosen kernel as users call it: small calls run in an entry in C++.

    Left as they are: PyTorch's op; calls with dropout, since public functions draw their own seed;
    losses, which they round to the dtype of the logits.
    """
    spec = OPS[found.op]
    drops = spec.named(found.inputs[0][0]).get("seed") is not None
    if found.chosen == "torch" or drops or found.op.endswith("cross_entropy"):
        return found
    public = spec.public_function(functional)
    run = BothWays(found.op, public) if gradients else public
    candidates = [
        replace(c, run=c.run and run) if c.name == found.chosen else c for c in found.candidates
    ]
    return replace(found, candidates=candidates)


def _of_table(scope: Scope, op: str, case: Case, gradients: bool) -> BenchmarkCase:
    inputs = scope.draw(op, case)
    if gradients:
        inputs = [[away_from_the_kink(op, *calls)] for calls in inputs]
    offered = [] if gradients else scope.offered("op", op, inputs[0][0])
    found = op_case(op, case.name, inputs, scope.backends, offered, gradients)
    return _as_called(found, gradients)


def table(scope: Scope, gradients: bool = False) -> Iterator[tuple[str, Maker]]:
    """Yields the benchmark cases in the scope; in a quick run only small ones."""
    most = _MOST_QUICK_FLOPS if scope.quick else _MOST_FLOPS
    for op in scope.ops:
        spec = OPS[op]
        for case in spec.bench_cases if spec.gradients_of or not gradients else ():
            arguments = case.build(scope.dtype, "meta", None)
            flops, moved = spec.flops(arguments), spec.bytes(arguments)
            small = flops <= _QUICK_FLOPS and moved <= _QUICK_BYTES
            if (small or not scope.quick) and (flops <= most or not gradients):
                yield f"{op} {case}", functools.partial(_of_table, scope, op, case, gradients)


# Call overhead: the public functions on almost no data. `benchmarks.gpu` times launches on GPUs.


def _call(scope: Scope, op: str) -> BenchmarkCase:
    spec = OPS[op]
    benchmark_case = op_case(op, "call", scope.draw(op, spec.tiny), ("reference",))
    name = f"{benchmark_case.chosen}, public function"
    public = Candidate(name, spec.public_function(functional))
    return replace(
        benchmark_case, candidates=[public, *benchmark_case.candidates], chosen=public.name,
        flops=0.0, useful_flops=0.0, bytes=0.0,  # no roofline: the arithmetic is negligible
    )  # fmt: skip


def overhead(scope: Scope) -> Iterator[tuple[str, Maker]]:
    for op in scope.ops:
        yield f"{op} call", functools.partial(_call, scope, op)


# Scaling with length, batch, threads and other sizes.

#: Fewer rounds than for a table, because a curve has many points: some ten minutes for all on two
#: cores.
SCALING_PLAN = Plan(rounds=15, seconds=1.0, least=3, sample=0.002)
#: Most scores for which the reference is timed; it computes all of them, which takes long beyond this.
_MOST_SCORES = 1 << 27


def _point(scope: Scope, op: str, name: str, case: Case, threads: int | None) -> BenchmarkCase:
    if threads is not None:
        # The probes of the roof use this number, too. `cli.compare.run` restores the previous one.
        torch.set_num_threads(threads)
    inputs = scope.draw(op, case)
    arguments = inputs[0][0]
    # Without torch.compile, which would take longer for every size than everything else.
    others = replace(scope, peers=[one for one in scope.peers if one.name != "torch.compile"])
    offered = others.offered("op", op, arguments)
    benchmark_case = _as_called(op_case(op, name, inputs, scope.backends, offered))
    if op != "attention" or (scores := scores_of(arguments)) <= _MOST_SCORES:
        return benchmark_case
    reason = f"it computes {scores:.1e} scores one by one"
    candidates = [
        Candidate("reference", None, one.reason or reason) if one.name == "reference" else one
        for one in benchmark_case.candidates
    ]
    return replace(benchmark_case, candidates=candidates)


def _series(op: str, values: Sequence[float] | None, build: Callable[[Any], Case]) -> Suite:
    """Returns a suite with one case per value; None: numbers of threads, up to PyTorch's."""

    def suite(scope: Scope) -> Iterator[tuple[str, Maker]]:
        if op not in scope.ops:
            return
        most = torch.get_num_threads()
        powers = {2**i for i in range(most.bit_length()) if 2**i <= most}
        for value in sorted(powers | {most}) if values is None else values:
            name, threads = f"{value:g}", int(value) if values is None else None
            yield f"{op} {name}", functools.partial(_point, scope, op, name, build(value), threads)

    return suite


def _powers(first: int, last: int) -> list[int]:
    return [2**i for i in range(first.bit_length() - 1, last.bit_length())]


def attention(batch: int, length: int, size: int = 64, **options: Any) -> Case:
    return _bench("", batch, 8, length, size, **options)


def _padded(real: float) -> Case:
    kept = (
        {} if real == 1.0 else {"lengths": lambda draw, *_: lengths(8, 512, real).to(draw.device)}
    )
    return attention(8, 512, **kept)


def _masked(density: float) -> Case:
    return attention(2, 1024, mask=_bools("ts", density) if density < 1.0 else None)


_LENGTHS, _SHARES = _powers(32, 16384), (0.1, 0.25, 0.5, 0.75, 1.0)
_SIZES = (8, 16, 32, 48, 64, 80, 96, 128, 192, 256)

#: The end of each key names the quantity on the x axis; the case's name is its value.
SCALING = {
    "attention (1,8,T,64), T": _series("attention", _LENGTHS, lambda t: attention(1, t)),
    "causal attention (1,8,T,64), T":
        _series("attention", _LENGTHS, lambda t: attention(1, t, causal=True)),
    "attention (B,8,128,64), B": _series("attention", _powers(1, 64), lambda b: attention(b, 128)),
    "attention (2,8,1024,D), D": _series("attention", _SIZES, lambda d: attention(2, 1024, d)),
    "attention (8,8,512,64), share of real keys": _series("attention", _SHARES, _padded),
    "attention (2,8,1024,64), density of a random mask": _series("attention", _SHARES, _masked),
    "feed_forward 512x2048, rows": _series("feed_forward", _powers(1, 16384), feed_forward._bench),
    "layer_norm 512, rows":
        _series("layer_norm", _powers(1, 65536)[::2], lambda rows: layer_norm._bench(rows, 512)),
    "attention (4,8,1024,64), threads": _series("attention", None, lambda _: attention(4, 1024)),
    "feed_forward 4096x512x2048, threads":
        _series("feed_forward", None, lambda _: feed_forward._bench(4096)),
}  # fmt: skip
