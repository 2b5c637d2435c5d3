"""Scaled dot-product attention ("Attention Is All You Need", section 3.2.1).

    output = softmax(scale * Q K^T + mask) V

With a soft cap c, c tanh(scale * Q K^T / c) takes the place of the scores scale * Q K^T (Gemma 2, 2024).

Padded batches: query (B, H, T, D), key (B, Hkv, S, D), value (B, Hkv, S, Dv), mask broadcastable to
(B, H, T, S), key_lengths and query_lengths (B,).

Packed sequences: query (1, H, N, D), key (1, Hkv, M, D), value (1, Hkv, M, Dv), longest (T, S).
key_lengths and query_lengths are cumulative, (B + 1,): the start row of each sequence, then the end
row of the last one. Packed calls have neither mask nor weights.

Semantics of every backend:

- a bool mask is True where a query may attend; a float mask is added, and its -inf masks out;
- causal is aligned to the upper left: query t attends to keys s <= t;
- keys at positions >= key_lengths[b] are masked out;
- queries at positions >= query_lengths[b] are padding: their output is 0, and neither their values
  nor the gradients of their outputs affect any result or gradient;
- packed sequences give the results of the same sequences padded to T queries and S keys; rows of a
  sequence beyond those are ignored, and rows that belong to no sequence are padding;
- a fully masked query gets output 0, weights 0 and gradients 0;
- masked-out keys and values (NaN and inf included) never affect the output of a query that they are
  masked out for;
- bfloat16 and float16 are computed in fp32 and rounded once, at the end;
- the output of a kernel has the strides of `empty_output`, called with the last argument
  ``contiguous``; the output of composed ops has them only if ``contiguous`` is not None.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._context import values_are_known
from .dropout import dropout

__all__ = ["attention", "supports_query_lengths", "visible_places"]


def empty_output(query: Tensor, key: Tensor, value: Tensor, contiguous: bool = False) -> Tensor:
    """Returns an uninitialised output (B, H, T, Dv) with the strides of PyTorch's attention output.

    PyTorch's fused kernels return ``empty_like(query)``, so that heads that were split off by a
    view can be merged by a view. Its unfused attention returns a contiguous tensor; it runs if the
    last dimension has a stride other than 1 or a tensor is empty. ``contiguous``: PyTorch would run
    its unfused attention for a reason that the other arguments do not show. PyTorch has no fused
    kernel for Dv != D; without ``contiguous`` heads and positions then are in the query's order.
    """
    if contiguous or _is_unfused(query, key, value):
        return query.new_empty((*query.shape[:-1], value.shape[-1]))
    if query.shape[-1] == value.shape[-1]:
        return torch.empty_like(query)
    return empty_heads(query, value.shape[-1])


def _is_unfused(query: Tensor, key: Tensor, value: Tensor) -> bool:
    adjacent = query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    return not adjacent or _is_zero(query.numel() * key.shape[-2])


def _is_zero(size: int | torch.SymInt) -> bool:
    """True if the size is 0; False if it is data-dependent (an unbacked symbol)."""
    if isinstance(size, torch.SymInt):
        from torch.fx.experimental.symbolic_shapes import guard_or_false

        return bool(guard_or_false(size == 0))
    return size == 0


def empty_heads(like: Tensor, size: int) -> Tensor:
    """Returns an uninitialised tensor (B, H, T, size) with heads and positions ordered as in
    ``like``."""
    batch, heads, length, _ = like.shape
    if like.stride(1) < like.stride(2):
        return like.new_empty((batch, length, heads, size)).transpose(1, 2)
    return like.new_empty((batch, heads, length, size))


def _laid_out(
    output: Tensor, query: Tensor, key: Tensor, value: Tensor, contiguous: bool
) -> Tensor:
    """Returns the output with the strides of `empty_output`, by a differentiable copy if needed."""
    if contiguous or query.is_contiguous() or _is_unfused(query, key, value):
        return output.contiguous()
    strides = query.stride()
    if 0 in strides:  # an expanded query: stride 0
        strides = torch.empty_like(query).stride()
    order: list[int] = []
    for dim in range(4):  # Dynamo cannot sort by symbolic keys
        before = [other for other in order if strides[other] >= strides[dim]]
        order = [*before, dim, *(other for other in order if other not in before)]
    back = [order.index(dim) for dim in range(4)]
    return output.permute(order).contiguous().permute(back)


def visible_places(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    key_lengths: Tensor | None,
    is_causal: bool,
) -> Tensor | None:
    """Returns a bool mask broadcastable to (B, H, T, S), True where query t may attend to key s."""
    length, keys = query.shape[-2], key.shape[-2]
    device = query.device
    visible: Tensor | None = None
    if attn_mask is not None:
        visible = attn_mask if attn_mask.dtype == torch.bool else attn_mask != -math.inf
    if is_causal:
        past = torch.ones((length, keys), dtype=torch.bool, device=device).tril()
        visible = past if visible is None else visible & past
    if key_lengths is not None:
        position = torch.arange(keys, device=device)
        real = (position < key_lengths.to(device)[:, None])[:, None, None, :]
        visible = real if visible is None else visible & real
    return visible


Attention = Callable[..., tuple[Tensor, Tensor | None]]


def supports_query_lengths(attention: Attention) -> Attention:
    """Decorator that adds the arguments ``query_lengths``, ``longest`` and ``contiguous``.

    Query rows beyond a query length are set to 0 before and after the call, which zeroes their
    gradients, too. Packed sequences are padded for the call, and its output is packed again.
    """

    @functools.wraps(attention)
    def run(*arguments: Any) -> tuple[Tensor, Tensor | None]:
        given, more = arguments[:11], arguments[11:]
        query_lengths, longest, softcap, contiguous = more + (None,) * (4 - len(more))
        weights: Tensor | None = None
        if longest is not None:
            output = via_padding(run, *given, query_lengths, longest, softcap)
        elif query_lengths is None:
            output, weights = attention(*given, softcap)
        else:
            output, weights = _of_real(attention, query_lengths, *given, softcap)
        if contiguous is not None:
            query, key, value = given[:3]
            output = _laid_out(output, query, key, value, contiguous)
        return output, weights

    return run


def _of_real(
    attention: Attention, query_lengths: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor | None]:
    """Calls ``attention`` and zeroes query rows beyond ``query_lengths`` before and after.

    Keys that only those rows would see are masked out by ``key_lengths``: their NaNs would reach
    gradients.
    """
    query, key, value, attn_mask, key_lengths, is_causal, *rest = arguments
    query_lengths = query_lengths.to(query.device)
    # torch.arange would return a plain tensor; this is a DTensor where query_lengths is one.
    position = query_lengths.new_ones(query.shape[-2]).cumsum(0) - 1
    beyond = (position >= query_lengths[:, None])[:, None, :, None]
    # No key lengths if they would hide nothing: they cost a mask. On GPUs the check would wait.
    if is_causal or not (
        query_lengths.is_cpu and values_are_known(query_lengths) and bool((query_lengths > 0).all())
    ):
        keys = key.shape[-2]
        seen = query_lengths.clamp(0, keys) if is_causal else query_lengths.clamp(0, 1) * keys
        key_lengths = (
            seen if key_lengths is None else torch.minimum(key_lengths.to(seen.device), seen)
        )
    output, weights = attention(
        query.masked_fill(beyond, 0.0), key, value, attn_mask, key_lengths, is_causal, *rest
    )
    if weights is not None:
        weights = weights.masked_fill(beyond, 0.0)
    return output.masked_fill(beyond, 0.0), weights


def via_padding(attention: Attention, *arguments: Any) -> Tensor:
    """Computes the output of packed sequences by padding them, without a device synchronisation."""
    query, key, value, _, key_lengths, *given, query_lengths, (queries, keys), softcap = arguments
    output, _ = attention(
        _padded(query[0], query_lengths, queries), _padded(key[0], key_lengths, keys),
        _padded(value[0], key_lengths, keys), None, key_lengths.diff(), *given, query_lengths.diff(),
        None, softcap,
    )  # fmt: skip
    return _packed(output, query_lengths, query.shape[2])[None]


def _padded(x: Tensor, starts: Tensor, length: int) -> Tensor:
    """Pads packed rows (H, N, D) to (B, H, length, D); padding rows have arbitrary values."""
    heads, rows, size = x.shape
    batch = starts.shape[0] - 1
    if rows == 0:  # an empty sum gives zeros that autograd records
        return x.sum().expand(batch, heads, length, size)
    row = starts[:-1, None] + torch.arange(length, device=x.device)
    found = x.transpose(0, 1).index_select(0, row.clamp_(0, rows - 1).flatten())
    return found.unflatten(0, (batch, length)).transpose(1, 2)


def _packed(x: Tensor, starts: Tensor, rows: int) -> Tensor:
    """Packs (B, H, T, D) to (H, N, D) with N = ``rows``; rows of no sequence are zero."""
    batch, _, length, _ = x.shape
    row = torch.arange(rows, device=x.device)
    flat = x.transpose(1, 2).flatten(0, 1)
    if flat.shape[0] == 0:
        return (flat.new_zeros((rows, *flat.shape[1:])) + flat.sum()).transpose(0, 1)
    sequence = torch.searchsorted(starts[1:].contiguous(), row, right=True)
    within = row - starts.index_select(0, sequence)
    none = (sequence == batch) | (within < 0) | (within >= length)
    position = (sequence * length + within).masked_fill_(none, 0)
    found = flat.index_select(0, position).masked_fill(none[:, None, None], 0.0)
    return found.transpose(0, 1)


def _scores(query: Tensor, key: Tensor) -> Tensor:
    if key.dim() == query.dim():
        return query @ key.transpose(-2, -1)
    return (query[..., None, :] @ key.transpose(-2, -1))[..., 0, :]


def _mix(weights: Tensor, value: Tensor) -> Tensor:
    if value.dim() == weights.dim():
        return weights @ value
    return (weights[..., None, :] @ value)[..., 0, :]


@supports_query_lengths
def attention(
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
    softcap: float | None,
) -> tuple[Tensor, Tensor | None]:
    dtype = query.dtype
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(groups, dim=-3) for x in (key, value))
    if dtype in (torch.float16, torch.bfloat16):
        query, key, value = query.float(), key.float(), value.float()

    visible = visible_places(query, key, attn_mask, key_lengths, is_causal)
    if visible is not None:
        if not values_are_known(key):
            # Tracing cannot branch on values: keys that no query may attend to are always zeroed.
            seen = visible.any(dim=-2).unsqueeze(-1)
            key, value = torch.where(seen, key, 0.0), torch.where(seen, value, 0.0)
        elif not bool(torch.isfinite(key.detach().sum() + value.detach().sum())):
            # A sum is finite only if every element is. If finite elements overflow, this path runs
            # without need. It is exact but slow: every query gets its own copy of keys and values,
            # (B, H, T, S, D), with the masked-out ones zeroed.
            seen = visible.unsqueeze(-1)
            key = torch.where(seen, key[..., None, :, :], 0.0)
            value = torch.where(seen, value[..., None, :, :], 0.0)

    scores = _scores(query, key) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        scores = scores + attn_mask
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    if scores.shape[-1]:
        highest = scores.detach().amax(dim=-1, keepdim=True)
        scores = scores - torch.where(highest == -math.inf, 0.0, highest)
    weights = torch.exp(scores)
    total = weights.sum(dim=-1, keepdim=True)
    weights = weights / torch.where(total == 0.0, 1.0, total)
    weights = dropout(weights, dropout_p, seed)
    output = _mix(weights, value)
    return output.to(dtype), weights.to(dtype) if need_weights else None
