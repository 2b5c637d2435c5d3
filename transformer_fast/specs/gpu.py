"""Calls of the op table in sizes that say something about a GPU: what `prove` checks and times, and
what ``python -m benchmarks.gpu`` reports.

Of each there are two sizes: one to be held to the fp64 oracle, and one to be timed. Both are in the
same class of `proof.shape_class`, so that the one's numbers speak for the other's time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attention_cases import _attention, _in_sequence
from .cross_entropy import _linear_loss, _loss
from .feed_forward import _feed_forward
from .layer_norm import _add_bench, _bench
from .linear import _linear
from .spec import Case, Draw, case


class GpuCase(NamedTuple):
    op: str
    #: Held to the oracle, and timed.
    checked: Case
    timed: Case

    @property
    def name(self) -> str:
        return f"{self.op} {self.timed.name}"


def _norms() -> Iterator[GpuCase]:
    for columns in (512, 1024, 4096):
        yield GpuCase("layer_norm", _bench(257, columns), _bench(16384, columns))
        for dropout_p in (0.0, 0.1):
            yield GpuCase(
                "add_layer_norm",
                _add_bench(257, columns, dropout_p),
                _add_bench(16384, columns, dropout_p),
            )


def _padding(draw: Draw, b: int, h: int, t: int, s: int) -> Tensor:
    """Key lengths from half of the keys to all of them."""
    return draw.integers(b, end=s // 2 + 1) + (s - s // 2)


def _documents(draw: Draw, b: int, h: int, t: int, s: int) -> Tensor:
    """Four documents in a row, each seen by itself only."""
    of_query = torch.arange(t, device=draw.device) * 4 // t
    of_key = torch.arange(s, device=draw.device) * 4 // s
    return (of_query[:, None] == of_key).expand(b, 1, t, s)


def _bias(draw: Draw, b: int, h: int, t: int, s: int) -> Tensor:
    return draw.normal(1, h, t, s)


_VISIBLE: dict[str, dict[str, Any]] = {
    "no mask": {},
    "causal": {"causal": True},
    "key lengths": {"lengths": _padding},
    "lengths of both": {"lengths": _padding, "query_lengths": _padding},
    "documents": {"mask": _documents},
    "bias": {"mask": _bias},
}


def _attention_case(
    batch: int, heads: int, queries: int, keys: int, size: int, seen: str, dropout_p: float = 0.0
) -> Case:
    name = f"({batch},{heads},{queries},{keys},{size}), {seen}"
    build = _attention(batch, heads, queries, keys, size, dropout_p=dropout_p, **_VISIBLE[seen])
    return case(name + (f", dropout {dropout_p}" if dropout_p else ""), build)


def _packed_case(heads: int, sequences: int, longest: int, size: int) -> Case:
    # From half of the longest to all of it.
    lengths = [longest - i * longest // (2 * sequences) for i in range(sequences)]
    name = f"{sequences} packed sequences of up to {longest}, ({heads},{size})"
    return case(name, _in_sequence(heads, lengths, size))


def _attentions() -> Iterator[GpuCase]:
    for size in (64, 128):
        for longest, few, many in ((128, (4, 3), (16, 32)), (1024, (2, 2), (16, 8))):
            yield GpuCase(
                "attention",
                _packed_case(*few, longest, size),
                _packed_case(*many, longest, size),
            )
        for seen in _VISIBLE:
            for queries, keys, checked, timed in (
                (1, 1024, (3, 4), (32, 16)),
                (128, 128, (3, 4), (32, 16)),
                (1024, 1024, (1, 2), (8, 16)),
            ):
                yield GpuCase(
                    "attention",
                    _attention_case(*checked, queries, keys, size, seen),
                    _attention_case(*timed, queries, keys, size, seen),
                )
        # A decoder's first tokens, and its attention to a source of another length.
        for seen in ("no mask", "key lengths"):
            for queries, keys, checked, timed in (
                (1, 128, (3, 4), (64, 16)),
                (128, 1024, (2, 2), (32, 16)),
                (1024, 128, (2, 2), (32, 16)),
            ):
                yield GpuCase(
                    "attention",
                    _attention_case(*checked, queries, keys, size, seen),
                    _attention_case(*timed, queries, keys, size, seen),
                )
    for length, checked, timed in ((128, (3, 4), (32, 16)), (1024, (1, 2), (8, 16))):
        for seen in ("no mask", "causal", "key lengths"):
            yield GpuCase(
                "attention",
                _attention_case(*checked, length, length, 64, seen, 0.1),
                _attention_case(*timed, length, length, 64, seen, 0.1),
            )


def _maps() -> Iterator[GpuCase]:
    for rows in (32, 1000, 8192):
        few = min(rows, 1100)
        for activation in (None, "gelu"):
            name = f"512x2048{', gelu' if activation else ''}"
            yield GpuCase(
                "linear",
                case(f"{few}x{name}", _linear((few,), 512, 2048, activation=activation)),
                case(f"{rows}x{name}", _linear((rows,), 512, 2048, activation=activation)),
            )
        for dropout_p in (0.0, 0.1):
            name = f"1024x4096, relu{f', dropout {dropout_p}' if dropout_p else ''}"
            yield GpuCase(
                "feed_forward",
                case(f"{few}x{name}", _feed_forward((few,), 1024, 4096, dropout_p=dropout_p)),
                case(f"{rows}x{name}", _feed_forward((rows,), 1024, 4096, dropout_p=dropout_p)),
            )


def _losses() -> Iterator[GpuCase]:
    for classes in (1000, 8192, 32000):
        yield GpuCase(
            "cross_entropy",
            case(f"65x{classes}", _loss(65, classes, smoothing=0.1, ignored=0.2)),
            case(f"8192x{classes}", _loss(8192, classes, smoothing=0.1, ignored=0.2)),
        )
    yield GpuCase(
        "linear_cross_entropy",
        case("1100x512x8000", _linear_loss(1100, 512, 8000, smoothing=0.1)),
        case("8192x512x32000", _linear_loss(8192, 512, 32000, smoothing=0.1)),
    )


GPU_CASES: tuple[GpuCase, ...] = (*_norms(), *_attentions(), *_maps(), *_losses())


def _large() -> Iterator[GpuCase]:
    for size in (64, 128):
        for length in (512, 1024, 2048, 4096, 8192):
            for seen in ("no mask", "causal", "key lengths", "documents"):
                if seen in ("no mask", "causal") or length >= 4096:
                    # Of more than 1024 queries nothing new is to be checked.
                    few = min(length, 1024)
                    yield GpuCase(
                        "attention",
                        _attention_case(1, 2, few, few, size, seen),
                        _attention_case(8, 16, length, length, size, seen),
                    )
        for batch in (1, 32):
            yield GpuCase(
                "attention",
                _attention_case(3, 4, 1, 1024, size, "key lengths"),
                _attention_case(batch, 16, 1, 4096, size, "key lengths"),
            )
    for rows in (32768, 65536):
        yield GpuCase("layer_norm", _bench(257, 1024), _bench(rows, 1024))
        yield GpuCase("add_layer_norm", _add_bench(257, 1024, 0.1), _add_bench(rows, 1024, 0.1))
    for rows in (16384, 32768):
        yield GpuCase(
            "feed_forward",
            case("1100x1024x4096, relu", _feed_forward((1100,), 1024, 4096)),
            case(f"{rows}x1024x4096, relu", _feed_forward((rows,), 1024, 4096)),
        )


_NAMES = {one.name for one in GPU_CASES}
#: Larger sizes, which ``python -m benchmarks.gpu`` times beside `GPU_CASES`.
BENCH_CASES: tuple[GpuCase, ...] = tuple(one for one in _large() if one.name not in _NAMES)
