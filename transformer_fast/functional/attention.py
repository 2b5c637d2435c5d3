"""Attention: the public functions; and `attend`, without checks, which supports a mask together
with causality."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from .._context import is_plain_eager
from .._native import TORCH_VERSION
from ..dispatch import Call, lookup, make_call, run
from ..fast_path import FLOAT, direct_kernel, entry
from ..ops.arguments import AttentionArguments
from ..ops.autograd import wants_grad
from ._check import (
    NAME,
    are_tensors,
    autocast,
    check_lengths,
    check_mask_dtype,
    check_qkv,
    check_sizes,
    check_starts,
    defers_to_torch,
    fold,
    is_folded,
    mask_to_four,
    require_bool,
    require_float,
    require_same_device,
    require_tensor,
)
from .masks import is_looked_at, warn_of_zeros_and_ones

__all__ = ["scaled_dot_product_attention", "varlen_attn"]

_enter = entry("attention")


def attend(
    arguments: AttentionArguments,
    backend: str | None = None,
    insert: Any = None,
    finish: Callable[[Any], Any] | None = None,
) -> Any:
    """Attention for callers that have checked their arguments; no checks here.

    Unlike the public function it supports a mask together with ``is_causal`` (both hide), so that a
    padding mask (B, 1, 1, S) need not be expanded. Returns (output, weights or None), or ``finish`` of
    it. ``insert``: from `dispatch.lookup`.
    """
    return run(make_call(arguments, wants_grad(*arguments[:4])), backend, insert, finish)


def attend_directly(arguments: AttentionArguments) -> tuple[Tensor, Tensor | None]:
    """`attend`, without the dispatcher if possible."""
    query, key, value, mask, lengths, is_causal, scale, p, _, grouped, weighs, *_ = arguments
    if p != 0.0 or arguments.softcap is not None or arguments.query_lengths is not None:
        return attend(arguments)  # type: ignore[no-any-return]
    if lengths is None and not weighs and not arguments.contiguous:
        output = _enter(query, key, value, mask, p, is_causal, scale, grouped, is_looked_at)
        if output is not None:
            return output, None
    if (
        (mask is not None and (not mask.is_cpu or mask.layout is not torch.strided))
        or (mask is not None and mask.dtype not in (torch.bool, FLOAT, query.dtype))
        or is_plain_eager(query, key, value, mask, lengths) is None
    ):
        return attend(arguments)  # type: ignore[no-any-return]
    function = direct_kernel("attention", (query, key, value)) or attend
    return function(arguments)  # type: ignore[no-any-return]


def check_attention(given: AttentionArguments, backend: str | None = None) -> Call:
    arguments, _ = _check(given, False)
    return make_call(arguments, wants_grad(*arguments[:4]))


#: The first PyTorch whose fused attention on CPUs takes (B, L, D).
FUSES_3D = (2, 14)


def _check(
    given: AttentionArguments, like_query: bool
) -> tuple[AttentionArguments, torch.Size | None]:
    """Returns the checked arguments, as (B, H, L, D), and the result's leading dimensions if they
    are not (B, H)."""
    query, key, value, attn_mask, key_lengths, is_causal, scale, dropout_p, *_ = given
    enable_gqa, need_weights, query_lengths, longest, softcap, _ = given[9:]
    if not are_tensors((query, key, value), (attn_mask, key_lengths, query_lengths)):
        require_tensor(NAME, "query", 1, query)
        require_tensor(NAME, "key", 2, key)
        require_tensor(NAME, "value", 3, value)
        require_tensor(NAME, "attn_mask", 4, attn_mask, optional=True)
        require_tensor(NAME, "key_lengths", None, key_lengths, optional=True)
        require_tensor(NAME, "query_lengths", None, query_lengths, optional=True)
    p = require_float(NAME, "dropout_p", dropout_p)
    require_bool(NAME, "is_causal", is_causal)
    require_bool(NAME, "enable_gqa", enable_gqa)
    if scale is not None:
        scale = require_float(NAME, "scale", scale)
    if softcap is not None:
        softcap = require_float(NAME, "softcap", softcap)
        if not 0.0 < softcap < math.inf:
            raise ValueError(f"softcap must be a positive number or None, not {softcap}")
    query, key, value = autocast(query, key, value)  # type: ignore[assignment]
    check_qkv(query, key, value)
    if attn_mask is not None:
        if is_causal:
            raise RuntimeError(
                "_scaled_dot_product_attention: Explicit attn_mask should not be set when "
                "is_causal=True"
            )
        check_mask_dtype(attn_mask, query)
        warn_of_zeros_and_ones(
            "attn_mask", attn_mask, "Give attn_mask != 0, in which True = may attend."
        )
    if not 0.0 <= p <= 1.0:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    require_same_device(
        "query", query, attn_mask=attn_mask, key_lengths=key_lengths, query_lengths=query_lengths
    )
    lead = None
    fused_3d = (
        TORCH_VERSION >= FUSES_3D and query.is_cpu and query.dim() == key.dim() == value.dim() == 3
    )
    if is_folded(query, key, value, enable_gqa):
        batch = query.shape[:1]
    else:
        query, key, value, attn_mask, batch, lead = fold(query, key, value, attn_mask, enable_gqa)
    check_sizes(query, key, value, enable_gqa)
    if attn_mask is not None:
        attn_mask = mask_to_four(attn_mask, batch, (query.shape[1], query.shape[2], key.shape[2]))
    if longest is None and key_lengths is not None:
        check_lengths("key_lengths", key_lengths, query.shape[0], key.shape[2])
    if longest is None and query_lengths is not None:
        check_lengths("query_lengths", query_lengths, query.shape[0], query.shape[2])
    if lead is not None and not fused_3d:
        contiguous: bool | None = True
    else:
        contiguous = None if like_query else _is_unfused(query, value, attn_mask, p)
    checked = AttentionArguments(
        query, key, value, attn_mask, key_lengths, is_causal, scale, p, None, enable_gqa, need_weights,
        query_lengths, longest, softcap, contiguous,
    )  # fmt: skip
    return checked, lead


@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., scale: float | None = ..., enable_gqa: bool = ..., *,
    key_lengths: Tensor | None = ..., query_lengths: Tensor | None = ..., softcap: float | None = ...,
    need_weights: Literal[False] = ..., backend: str | None = ...,
) -> Tensor: ...  # fmt: skip


@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., scale: float | None = ..., enable_gqa: bool = ..., *,
    key_lengths: Tensor | None = ..., query_lengths: Tensor | None = ..., softcap: float | None = ...,
    need_weights: Literal[True], backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., scale: float | None = ..., enable_gqa: bool = ..., *,
    key_lengths: Tensor | None = ..., query_lengths: Tensor | None = ..., softcap: float | None = ...,
    need_weights: bool, backend: str | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    key_lengths: Tensor | None = None,
    query_lengths: Tensor | None = None,
    softcap: float | None = None,
    need_weights: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention, like `torch.nn.functional.scaled_dot_product_attention`.

    ``output = dropout(softmax(scale * Q K^T + mask)) V``

    Args:
        query: (..., H, T, D). key: (..., H, S, D). value: (..., H, S, Dv).
        attn_mask: broadcastable to (..., H, T, S), read through its strides, never expanded. bool:
            True = may attend. float: added to the scores, -inf hides; on the CPU the first mask of
            each shape causes a warning if it holds only 0 and 1. None: no mask.
        dropout_p: probability in [0, 1] of dropping a weight; always applied, as in PyTorch. The
            pattern is this package's (Philox); PyTorch's own ops (backend "torch") draw PyTorch's.
        is_causal: query t sees keys s <= t (upper-left aligned); not together with attn_mask.
        scale: factor of the scores; None: 1 / sqrt(D).
        enable_gqa: key and value may have fewer heads, a divisor of the query's.
        key_lengths: int (B,) in [0, S], keys at positions >= key_lengths[b] are hidden. None: no key is.
            Values are checked on the CPU only.
        query_lengths: int (B,) in [0, T], rows at positions >= query_lengths[b] are no queries: their
            output is 0, and neither their values nor their gradients have any effect. None: all are
            queries.
        softcap: the scores are softcap * tanh(scores / softcap), before the mask is added. None: not
            capped.
        need_weights: also return the probabilities (..., H, T, S), after dropout.
        backend: None: the dispatcher chooses; a named backend never falls back.

    Returns:
        (..., H, T, Dv), or that and the weights. A query with every key masked gets output,
        weights and gradients of 0 (PyTorch: 0, NaN or the mean of V, by path). Strides are PyTorch's:
        those of query, or contiguous if PyTorch has no fused kernel (on the CPU with dropout).

    Raises:
        RuntimeError, TypeError, ValueError: arguments are invalid (PyTorch's wording where it has
            one). NotImplementedError: the named backend does not support the call.

    Source: "Attention Is All You Need", section 3.2.1.
    """
    if (
        backend is None
        and key_lengths is None
        and query_lengths is None
        and not need_weights
        and softcap is None
    ):
        result = _enter(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, is_looked_at
        )
        if result is not None:
            return result  # type: ignore[no-any-return]
    arguments = AttentionArguments(
        query, key, value, attn_mask, key_lengths, is_causal, scale, dropout_p, None, enable_gqa,
        need_weights, query_lengths, softcap=softcap,
    )  # fmt: skip
    return general_attention(arguments, backend)  # type: ignore[no-any-return]


def general_attention(
    arguments: AttentionArguments, backend: str | None = None, like_query: bool = False
) -> Any:
    """`scaled_dot_product_attention` without its fast path.

    ``like_query``: the output of kernels has the query's order in memory also where PyTorch's is
    contiguous.
    """
    query, key, value, attn_mask, key_lengths, is_causal, scale, dropout_p, *_ = arguments
    _, need_weights, query_lengths, _, softcap, _ = arguments[9:]
    tensors = (*arguments[:5], query_lengths)
    others = (*arguments[5:8], *arguments[9:11], softcap, backend, like_query)
    replay, insert = lookup("attention", tensors, others)
    if replay is not None:
        return replay(*tensors)
    if defers_to_torch("attention", backend, *arguments[:4]):
        if key_lengths is None and query_lengths is None and not need_weights and softcap is None:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                enable_gqa=arguments.enable_gqa,
            )  # fmt: skip
        backend = "reference"  # only PyTorch operators
    checked, lead = _check(arguments, like_query)
    if lead is None:
        return attend(checked, backend, insert, None if need_weights else _output)
    output, weights = attend(checked, backend)
    output = output.reshape(*lead, *output.shape[-2:])
    return (output, weights.reshape(*lead, *weights.shape[-2:])) if need_weights else output


def _output(results: tuple[Tensor, Tensor | None]) -> Tensor:
    return results[0]


def _is_unfused(query: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float) -> bool:
    """True if PyTorch has no fused kernel for the call, so that its result is contiguous. The other
    reasons for a contiguous result are in `reference.attention.empty_output`."""
    return query.shape[-1] != value.shape[-1] or (
        query.is_cpu
        and (
            dropout_p != 0.0
            or (mask is not None and mask.requires_grad and torch.is_grad_enabled())
        )
    )


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    enable_gqa: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Attention of packed sequences, each to its own keys, like `torch.nn.attention.varlen`.

    Equivalent to `scaled_dot_product_attention` of the sequences padded to ``max_q`` and ``max_k``, with
    ``query_lengths`` and ``key_lengths``: the same dropout for a seed, and zeros for queries without
    keys. The host never waits for the device, so that CUDA graphs can be captured.

    Args:
        query: (N, H, D), the concatenated queries of all sequences.
        key: (M, H, D). value: (M, H, Dv).
        cu_seq_q: int (B + 1,), rising from 0 to N at most; sequence b has the queries
            [cu_seq_q[b], cu_seq_q[b + 1]). Rows after the last sequence are no queries: output 0.
        cu_seq_k: int (B + 1,), likewise for keys. A sequence may have no queries, or no keys.
        max_q, max_k: at least the longest sequence's numbers of queries and keys; more of a sequence
            is ignored.
        is_causal: query t of a sequence sees its keys s <= t (upper-left aligned).
        scale, dropout_p, enable_gqa, backend: as in `scaled_dot_product_attention`.

    Returns:
        (N, H, Dv).

    Raises:
        RuntimeError, TypeError, ValueError: arguments are invalid. The values of cu_seq_q and
            cu_seq_k are not checked, but nothing outside the tensors is read or written.
    """
    for place, (name, x) in enumerate(
        {"query": query, "key": key, "value": value, "cu_seq_q": cu_seq_q, "cu_seq_k": cu_seq_k}
        .items()
    ):  # fmt: skip
        require_tensor("varlen_attn", name, place + 1, x)
    for name, x in {"query": query, "key": key, "value": value}.items():
        if x.dim() != 3:
            raise ValueError(
                f"{name} must have shape (rows, heads, head size), not {list(x.shape)}"
            )
    check_starts(cu_seq_q, cu_seq_k)
    require_same_device("query", query, cu_seq_q=cu_seq_q, cu_seq_k=cu_seq_k)
    # Views packed rows (N, H, D) as a batch of one, (1, H, N, D).
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    tensors = (q, k, v, None, cu_seq_k, cu_seq_q)
    longest = (max_q, max_k)
    others = (dropout_p, is_causal, scale, enable_gqa, backend, longest)
    replay, insert = lookup("attention", tensors, others)
    if replay is not None:
        return replay(*tensors)  # type: ignore[no-any-return]
    if defers_to_torch("attention", backend, query, key, value):
        backend = "reference"  # only PyTorch operators
    checked, _ = _check(
        AttentionArguments(
            q, k, v, None, cu_seq_k, is_causal, scale, dropout_p, None, enable_gqa, False, cu_seq_q,
            longest,
        ),
        True,
    )  # fmt: skip
    return attend(checked, backend, insert, _rows)  # type: ignore[no-any-return]


def _rows(results: tuple[Tensor, Tensor | None]) -> Tensor:
    """Returns a batch of one, (1, H, N, D), as packed rows (N, H, D)."""
    return results[0][0].transpose(0, 1)
