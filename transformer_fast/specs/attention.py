"""Op table: attention."""

from __future__ import annotations

from typing import Any

import torch

from ..reference.attention import visible_places
from .attention_cases import BENCH_CASES, CASES
from .spec import OpSpec, bytes_of


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
    useful_share=_useful_share,
)  # fmt: skip
