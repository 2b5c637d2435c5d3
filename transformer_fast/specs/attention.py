"""Op table: attention."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference.attention import taking_query_lengths, visible_places
from .attention_cases import BENCH_CASES, CASES, _attention, _in_sequence, arrange
from .spec import Case, Draw, OpSpec, Text, bytes_of, case


def _sizes(arguments: tuple[Any, ...]) -> tuple[int, int, int, int, int, int]:
    query, key, value = arguments[:3]
    batch, heads, length, size = query.shape
    keys = key.shape[-2]
    if (longest := ATTENTION.named(arguments)["longest"]) is not None:
        batch, (length, keys) = arguments[4].shape[0] - 1, longest
    return batch, heads, length, keys, size, value.shape[-1]


def _flops(arguments: tuple[Any, ...]) -> float:
    batch, heads, length, keys, size, value_size = _sizes(arguments)
    return 2.0 * batch * heads * length * keys * (size + value_size)


def _bytes(arguments: tuple[Any, ...]) -> float:
    query, key, value, mask, key_lengths, *_ = arguments
    batch, heads, length, _ = query.shape
    written = batch * heads * length * (value.shape[-1] + (key.shape[-2] if arguments[10] else 0))
    return bytes_of(query, key, value, mask, key_lengths) + written * query.element_size()


def _useful_share(arguments: tuple[Any, ...]) -> float:
    query, key, _, mask, key_lengths, is_causal, *_ = arguments
    named = ATTENTION.named(arguments)
    query_lengths = named["query_lengths"]
    if named["longest"] is not None:
        batch, _, length, keys, *_ = _sizes(arguments)
        query, key = (
            query[:1, :1, :1].expand(batch, 1, length, -1),
            key[:1, :1, :1].expand(batch, 1, keys, -1),
        )
        key_lengths, query_lengths = key_lengths.diff(), query_lengths.diff()
    visible = visible_places(query, key, mask, key_lengths, is_causal)
    if query_lengths is not None:
        position = torch.arange(query.shape[-2], device=query.device)
        real = (position < query_lengths[:, None])[:, None, :, None]
        visible = real if visible is None else visible & real
    if visible is None or visible.numel() == 0:
        return 1.0
    return int(torch.count_nonzero(visible)) / visible.numel()


def _joined_mask(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    is_causal: bool,
) -> tuple[Tensor | None, bool]:
    """SDPA takes a mask or is_causal, not both; lengths it does not take."""
    keys = key.shape[-2]
    if key_lengths is not None:
        real = torch.arange(keys, device=key.device) < key_lengths[:, None]
        real = real[:, None, None, :]
        if mask is None:
            mask = real
        elif mask.dtype == torch.bool:
            mask = mask & real
        else:
            mask = mask.masked_fill(~real, -math.inf)
    if mask is not None and is_causal:
        past = torch.ones(query.shape[-2], keys, dtype=torch.bool, device=key.device).tril()
        mask = mask & past if mask.dtype == torch.bool else mask.masked_fill(~past, -math.inf)
        is_causal = False
    return mask, is_causal


@taking_query_lengths
def _by_pytorch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_lengths: Tensor | None,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    seed: Tensor | None,
    enable_gqa: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    mask, is_causal = _joined_mask(query, key, attn_mask, key_lengths, is_causal)
    if not need_weights:
        output = F.scaled_dot_product_attention(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return output, None
    # What torch.nn.MultiheadAttention does when it is asked for the weights.
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=key.device).tril()
    if mask is not None:
        hides = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -math.inf) if hides else scores + mask
    weights = torch.softmax(scores, dim=-1)
    if dropout_p:
        weights = F.dropout(weights, dropout_p)
    return weights @ value, weights


def _text(masked: str, text: Text) -> list[tuple[Any, ...]]:
    calls = []
    for batch, x in zip(text.batches, text.embedded, strict=True):
        query, key, value = (text.heads(x) for _ in range(3))
        mask = batch.real[:, None, None, :] if "mask" in masked else None
        lengths = batch.lengths if "lengths" in masked else None
        options: Any = {"causal": "causal" in masked, "weights": "weights" in masked}
        calls.append(arrange(query, key, value, mask=mask, lengths=lengths, **options))
    return calls


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


def _gpu_case(
    batch: int, heads: int, queries: int, keys: int, size: int, seen: str, dropout_p: float = 0.0
) -> Case:
    name = f"({batch},{heads},{queries},{keys},{size}), {seen}"
    build = _attention(batch, heads, queries, keys, size, dropout_p=dropout_p, **_VISIBLE[seen])
    name += f", dropout {dropout_p}" if dropout_p else ""
    # Steps of decoding have no gradients.
    return case(name, build, gradients=queries > 4)


def _packed_case(heads: int, sequences: int, longest: int, size: int) -> Case:
    # From half of the longest to all of it.
    lengths = [longest - i * longest // (2 * sequences) for i in range(sequences)]
    name = f"{sequences} packed sequences of up to {longest}, ({heads},{size})"
    return case(name, _in_sequence(heads, lengths, size))


_UNMASKED = ("no mask", "causal", "key lengths")
#: Sequences of 16 heads: one, and enough for all multiprocessors.
_FEW, _MANY = 1, 16


def _gpu_cases() -> Iterator[Case]:
    for size in (64, 96, 128):
        for seen in _VISIBLE if size != 96 else _UNMASKED:
            for length in (128, 1024):
                if seen != "lengths of both":
                    yield _gpu_case(_FEW, 16, length, length, size, seen)
                yield _gpu_case(8192 // length, 16, length, length, size, seen)
        # A decoder's tokens, by themselves or a few at a time.
        for seen in ("no mask", "key lengths"):
            for keys in (128, 1024, 4096, 8192):
                for batch in (_FEW, _MANY):
                    yield _gpu_case(batch, 16, 1, keys, size, seen)
                    if size != 96 and keys < 8192:
                        yield _gpu_case(batch, 16, 4, keys, size, seen)
    for size in (64, 128):
        for longest, sequences in ((128, 32), (1024, 8)):
            yield _packed_case(16, sequences, longest, size)
        for seen in _UNMASKED:
            yield _gpu_case(5, 16, 2048, 2048, size, seen)
            yield _gpu_case(_FEW, 16, 4096, 4096, size, seen)
            yield _gpu_case(_FEW, 16, 8192, 8192, size, seen)
        for seen in ("no mask", "causal"):
            yield _gpu_case(5, 16, 4096, 4096, size, seen)
        for seen in ("documents", "bias"):
            for batch in (_FEW, _MANY):
                yield _gpu_case(batch, 16, 1, 1024, size, seen)
        # A decoder's attention to a source of another length.
        for seen in ("no mask", "key lengths"):
            for queries, keys in ((128, 1024), (1024, 128)):
                for batch in (_FEW, _MANY):
                    yield _gpu_case(batch, 16, queries, keys, size, seen)
    for length in (128, 1024):
        for seen in _UNMASKED:
            yield _gpu_case(2, 16, length, length, 64, seen, 0.1)
            yield _gpu_case(6, 16, length, length, 64, seen, 0.1)


def _gpu_bench_cases() -> Iterator[Case]:
    for size in (64, 128):
        for length in (512, 1024, 2048, 4096, 8192):
            for seen in ("no mask", "causal", "key lengths", "documents"):
                if seen in ("no mask", "causal") or length >= 4096:
                    yield _gpu_case(16384 // length, 16, length, length, size, seen)
        for batch in (1, 32):
            yield _gpu_case(batch, 16, 1, 4096, size, "key lengths")


ATTENTION = OpSpec(
    name="attention",
    summary="Scaled dot-product attention with masks, causality, key lengths and dropout.",
    paper='"Attention Is All You Need", section 3.2.1',
    arguments=(
        "query", "key", "value", "attn_mask", "key_lengths", "is_causal", "scale", "dropout_p",
        "seed", "enable_gqa", "need_weights", "query_lengths", "longest",
    ),
    results=("output", "weights"),
    gradients_of=("query", "key", "value", "attn_mask"),
    cases=CASES,
    bench_cases=BENCH_CASES,
    flops=_flops,
    bytes=_bytes,
    pytorch=_by_pytorch,
    tiny=case("call", _attention(1, 1, 1, 1, 8)),
    text_cases=(
        ("padding mask", partial(_text, "mask")),
        ("key lengths", partial(_text, "lengths")),
        ("causal", partial(_text, "causal")),
        ("with weights", partial(_text, "lengths weights")),
    ),
    gpu_cases=tuple(_gpu_cases()),
    gpu_classes=tuple(
        f"up to 64 values a head, {lengths}, more than 64 heads in the batch, {seen}"
        for lengths, visible in (
            ("up to 512 queries, up to 512 keys", _UNMASKED),
            ("more than 512 queries, up to 2048 keys", _UNMASKED),
            ("1 query, up to 2048 keys", ("no mask",)),
        )
        for seen in visible
    ),
    gpu_bench_cases=tuple(_gpu_bench_cases()),
    public=lambda functional, *qkv: (functional.scaled_dot_product_attention(*qkv[:3]), None),
    useful_share=_useful_share,
)  # fmt: skip
