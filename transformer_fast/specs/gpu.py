"""Calls of the op table in sizes that say something about a GPU: what `prove` checks and times (of
`COMMON` also `compare`), and what ``python -m benchmarks.gpu`` reports.

They stand for their classes of `proof.shape_class`: of calls in other classes PyTorch's own take care.
What is checked is the call that is timed, so its fp64 reference has to fit into memory: of attention
a head at a time, unless it has dropout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attention_cases import _attention, _in_sequence
from .cross_entropy import _linear_loss, _loss
from .feed_forward import _feed_forward
from .layer_norm import _add_bench, _bench, _rms_with_residual, _without_bias
from .linear import _linear
from .spec import Case, Draw, case


class GpuCase(NamedTuple):
    op: str
    case: Case
    #: Whether its gradients are of interest, too.
    gradients: bool = True

    @property
    def name(self) -> str:
        return self.case.name


def _norms() -> Iterator[GpuCase]:
    for rows in (32, 1000, 4096, 16384):
        for columns in (512, 1024, 4096):
            plain = _bench(rows, columns)
            yield GpuCase("layer_norm", plain)
            yield GpuCase("rms_norm", case(plain.name, _without_bias(plain)))
            for dropout_p in (0.0, 0.1):
                added = _add_bench(rows, columns, dropout_p)
                yield GpuCase("add_layer_norm", added)
                yield GpuCase("add_rms_norm", case(added.name, _rms_with_residual(added)))


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
) -> GpuCase:
    name = f"({batch},{heads},{queries},{keys},{size}), {seen}"
    build = _attention(batch, heads, queries, keys, size, dropout_p=dropout_p, **_VISIBLE[seen])
    name += f", dropout {dropout_p}" if dropout_p else ""
    # Steps of decoding have no gradients.
    return GpuCase("attention", case(name, build), queries > 4)


def _packed_case(heads: int, sequences: int, longest: int, size: int) -> GpuCase:
    # From half of the longest to all of it.
    lengths = [longest - i * longest // (2 * sequences) for i in range(sequences)]
    name = f"{sequences} packed sequences of up to {longest}, ({heads},{size})"
    return GpuCase("attention", case(name, _in_sequence(heads, lengths, size)))


_UNMASKED = ("no mask", "causal", "key lengths")
#: Sequences of 16 heads: one, and enough for all multiprocessors.
_FEW, _MANY = 1, 16


def _attentions() -> Iterator[GpuCase]:
    for size in (64, 96, 128):
        for seen in _VISIBLE if size != 96 else _UNMASKED:
            for length in (128, 1024):
                if seen != "lengths of both":
                    yield _attention_case(_FEW, 16, length, length, size, seen)
                yield _attention_case(8192 // length, 16, length, length, size, seen)
        # A decoder's tokens, by themselves or a few at a time.
        for seen in ("no mask", "key lengths"):
            for keys in (128, 1024, 4096, 8192):
                for batch in (_FEW, _MANY):
                    yield _attention_case(batch, 16, 1, keys, size, seen)
                    if size != 96 and keys < 8192:
                        yield _attention_case(batch, 16, 4, keys, size, seen)
    for size in (64, 128):
        for longest, sequences in ((128, 32), (1024, 8)):
            yield _packed_case(16, sequences, longest, size)
        for seen in _UNMASKED:
            yield _attention_case(5, 16, 2048, 2048, size, seen)
            yield _attention_case(_FEW, 16, 4096, 4096, size, seen)
            yield _attention_case(_FEW, 16, 8192, 8192, size, seen)
        for seen in ("no mask", "causal"):
            yield _attention_case(5, 16, 4096, 4096, size, seen)
        for seen in ("documents", "bias"):
            for batch in (_FEW, _MANY):
                yield _attention_case(batch, 16, 1, 1024, size, seen)
        # A decoder's attention to a source of another length.
        for seen in ("no mask", "key lengths"):
            for queries, keys in ((128, 1024), (1024, 128)):
                for batch in (_FEW, _MANY):
                    yield _attention_case(batch, 16, queries, keys, size, seen)
    for length in (128, 1024):
        for seen in _UNMASKED:
            yield _attention_case(2, 16, length, length, 64, seen, 0.1)
            yield _attention_case(6, 16, length, length, 64, seen, 0.1)


def _maps() -> Iterator[GpuCase]:
    for rows in (32, 1000, 4096, 16384):
        for activation in (None, "gelu"):
            name = f"{rows}x512x2048{', gelu' if activation else ''}"
            build = _linear((rows,), 512, 2048, activation=activation)
            yield GpuCase("linear", case(name, build))
        for dropout_p in (0.0, 0.1):
            name = f"{rows}x1024x4096, relu{f', dropout {dropout_p}' if dropout_p else ''}"
            build = _feed_forward((rows,), 1024, 4096, dropout_p=dropout_p)
            yield GpuCase("feed_forward", case(name, build))


def _losses() -> Iterator[GpuCase]:
    for rows in (1000, 8192):
        for classes in (1000, 8192, 32000):
            build = _loss(rows, classes, smoothing=0.1, ignored=0.2)
            yield GpuCase("cross_entropy", case(f"{rows}x{classes}", build))
        build = _linear_loss(rows, 512, 32000, smoothing=0.1)
        yield GpuCase("linear_cross_entropy", case(f"{rows}x512x32000", build))


GPU_CASES: tuple[GpuCase, ...] = (*_norms(), *_attentions(), *_maps(), *_losses())

#: Of each op the classes of `proof.shape_class` that `compare` measures: those of ordinary batches.
COMMON: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm"),
        ("up to 8192 rows, up to 1024 columns",),
    ),
    "attention": tuple(
        f"up to 64 values a head, {lengths}, more than 64 heads in the batch, {seen}"
        for lengths, visible in (
            ("up to 512 queries, up to 512 keys", _UNMASKED),
            ("more than 512 queries, up to 2048 keys", _UNMASKED),
            ("1 query, up to 2048 keys", ("no mask",)),
        )
        for seen in visible
    ),
    "linear": ("up to 8192 rows", "up to 8192 rows, activation or residual"),
    "feed_forward": ("up to 8192 rows",),
    "cross_entropy": ("up to 8192 rows, more than 16384 classes",),
    "linear_cross_entropy": ("up to 8192 rows",),
}


def _large() -> Iterator[GpuCase]:
    for size in (64, 128):
        for length in (512, 1024, 2048, 4096, 8192):
            for seen in ("no mask", "causal", "key lengths", "documents"):
                if seen in ("no mask", "causal") or length >= 4096:
                    yield _attention_case(16384 // length, 16, length, length, size, seen)
        for batch in (1, 32):
            yield _attention_case(batch, 16, 1, 4096, size, "key lengths")
    for rows in (32768, 65536):
        yield GpuCase("layer_norm", _bench(rows, 1024))
        yield GpuCase("add_layer_norm", _add_bench(rows, 1024, 0.1))
    for rows in (32768, 65536):
        name = f"{rows}x1024x4096, relu"
        yield GpuCase("feed_forward", case(name, _feed_forward((rows,), 1024, 4096)))


_NAMES = {(one.op, one.name) for one in GPU_CASES}
#: Larger sizes, which ``python -m benchmarks.gpu`` times beside `GPU_CASES`.
BENCH_CASES: tuple[GpuCase, ...] = tuple(
    one for one in _large() if (one.op, one.name) not in _NAMES
)
