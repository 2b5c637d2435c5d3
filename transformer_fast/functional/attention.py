"""Public scaled_dot_product_attention, and `attend`: unchecked, with mask and causal together."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .. import memo, small
from ..dispatch import Call, select
from ._check import (
    autocast,
    is_torchs,
    require_float,
    require_optional_tensor,
    require_same_device,
    require_tensor,
    require_unnamed,
    wants_grad,
)
from ._check_attention import (
    NAME,
    check_flags,
    check_lengths,
    check_mask_dtype,
    check_qkv,
    check_sizes,
    check_starts,
    fold,
    is_folded,
    mask_to_four,
    result_lead,
)


def prepare_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    need_weights: bool,
    enable_gqa: bool = False,
    query_lengths: Tensor | None = None,
    longest: tuple[int, int] | None = None,
) -> tuple[Call, tuple[Any, ...]]:
    tensors = (query, key, value)
    call = Call(
        "attention",
        tensors,
        wants_grad(query, key, value, mask),
        dropout_p,
        None,
        mask,
        is_causal,
        key_lengths,
        need_weights,
        query_lengths=query_lengths,
        longest=longest,
    )
    arguments = (
        query, key, value, mask, key_lengths, is_causal, scale, dropout_p, None, enable_gqa,
        need_weights,
    )  # fmt: skip
    if query_lengths is None:
        return call, arguments
    return call, (*arguments, query_lengths) if longest is None else (
        *arguments, query_lengths, longest,
    )  # fmt: skip


def _output(results: tuple[Tensor, Tensor | None]) -> Tensor:
    return results[0]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    need_weights: bool = False,
    *,
    enable_gqa: bool = False,
    query_lengths: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention on (B, H, T, D) for callers that have checked their arguments; no checks here.

    Unlike the public function it takes a mask together with ``is_causal`` (both hide), so that a
    padding mask (B, 1, 1, S) need not be expanded. Returns (output, weights or None).
    """
    call, arguments = prepare_attend(
        query, key, value, mask, key_lengths, is_causal, scale, dropout_p, need_weights, enable_gqa,
        query_lengths,
    )  # fmt: skip
    kernel = select(call, backend)
    if call.dropout_p != 0.0:
        arguments = memo.seeded(kernel, call, arguments)
    return kernel.run(*arguments)


def prepare_scaled_dot_product_attention(
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
    need_weights: bool = False,
    longest: tuple[int, int] | None = None,
) -> tuple[Call, tuple[Any, ...]]:
    require_tensor(NAME, "query", 1, query)
    require_tensor(NAME, "key", 2, key)
    require_tensor(NAME, "value", 3, value)
    require_optional_tensor(NAME, "attn_mask", 4, attn_mask)
    require_optional_tensor(NAME, "key_lengths", None, key_lengths)
    require_optional_tensor(NAME, "query_lengths", None, query_lengths)
    p = require_float(NAME, "dropout_p", dropout_p)
    check_flags(is_causal, enable_gqa)
    if scale is not None:
        scale = require_float(NAME, "scale", scale)
    query, key, value = autocast(query, key, value)  # type: ignore[assignment]
    check_qkv(query, key, value)
    if attn_mask is not None:
        if is_causal:
            raise RuntimeError(
                "_scaled_dot_product_attention: Explicit attn_mask should not be set when "
                "is_causal=True"
            )
        check_mask_dtype(attn_mask, query)
    if not 0.0 <= p <= 1.0:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    require_same_device(
        "query", query, attn_mask=attn_mask, key_lengths=key_lengths, query_lengths=query_lengths
    )
    if is_folded(query, key, value, enable_gqa):
        batch = query.shape[:1]
    else:
        query, key, value, attn_mask, batch = fold(query, key, value, attn_mask, enable_gqa)
    check_sizes(query, key, value, enable_gqa)
    if attn_mask is not None:
        attn_mask = mask_to_four(attn_mask, batch, (query.shape[1], query.shape[2], key.shape[2]))
    if longest is None and key_lengths is not None:
        check_lengths("key_lengths", key_lengths, query.shape[0])
    if longest is None and query_lengths is not None:
        check_lengths("query_lengths", query_lengths, query.shape[0])
    return prepare_attend(
        query, key, value, attn_mask, key_lengths, is_causal, scale, p, need_weights, enable_gqa,
        query_lengths, longest,
    )  # fmt: skip


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
    need_weights: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention, like `torch.nn.functional.scaled_dot_product_attention`.

    ``output = dropout(softmax(scale * Q K^T + mask)) V``

    Args:
        query: (..., H, T, D). key: (..., H, S, D). value: (..., H, S, Dv).
        attn_mask: broadcastable to (..., H, T, S). bool: True = may attend. float: added to the
            scores, -inf hides. None: no mask. It is read through its strides, never expanded.
        dropout_p: probability in [0, 1] of dropping a weight; always applied, like torch's. The
            pattern is that of our Philox, but on PyTorch's own ops (backend "torch") PyTorch's.
        is_causal: query t sees keys s <= t (upper-left aligned); not together with attn_mask.
        scale: multiplies the scores; None means 1 / sqrt(D).
        enable_gqa: key and value may have fewer heads, a divisor of the query's.
        key_lengths: int (B,), keys at positions >= key_lengths[b] are hidden. None: all are real.
        query_lengths: int (B,), rows at positions >= query_lengths[b] are no queries: they give zeros,
            and neither what stands there nor in their gradients has any effect. None: all are.
        need_weights: also return the probabilities (..., H, T, S), after dropout.
        backend: None lets the dispatcher choose; a name never falls back.

    Returns:
        (..., H, T, Dv), or that and the weights. A query that may attend to nothing gets zeros,
        zero weights and zero gradients (torch: 0, NaN or the mean of V, by path).

    Raises:
        RuntimeError, TypeError, ValueError: arguments that do not fit (torch's wording where it
            has one). NotImplementedError: the named backend cannot take the call.

    Source: "Attention Is All You Need", section 3.2.1.
    """
    if (
        backend is None
        and attn_mask is None
        and key_lengths is None
        and query_lengths is None
        and is_causal is False
        and enable_gqa is False
        and not need_weights
        and type(dropout_p) is float
        and dropout_p == 0.0
        and (scale is None or type(scale) is float)
        and small.attention(query, key, value)
    ):
        return F.scaled_dot_product_attention(query, key, value, scale=scale)
    tensors = (query, key, value, attn_mask, key_lengths, query_lengths)
    others = (dropout_p, is_causal, scale, enable_gqa, need_weights, backend)
    remembered = memo.key_of("attention", tensors, others)
    if (again := memo.find(remembered)) is not None:
        return again(*tensors)
    if is_torchs(query, key, value, attn_mask):
        require_unnamed("attention", backend)
        if key_lengths is None and query_lengths is None and not need_weights:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                enable_gqa=enable_gqa,
            )  # fmt: skip
        backend = "reference"  # plain PyTorch
    call, arguments = prepare_scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        key_lengths=key_lengths,
        query_lengths=query_lengths,
        need_weights=need_weights,
    )
    lead = result_lead(query, key, value, enable_gqa)
    if lead is None:
        finish = None if need_weights else _output
        return memo.run(remembered, tensors, call, arguments, backend, finish)
    output, weights = memo.run(None, tensors, call, arguments, backend)
    output = output.reshape(*lead, *output.shape[-2:])
    return (output, weights.reshape(*lead, *weights.shape[-2:])) if need_weights else output


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
    """Attention of packed sequences, each to its own keys, like `torch.nn.attention.varlen`'s.

    The same as `scaled_dot_product_attention` of the sequences padded to ``max_q`` and ``max_k``
    with ``query_lengths`` and ``key_lengths``: the same dropout for a seed, and zeros where there is
    nothing to attend to. Nothing waits for the device, so that CUDA graphs can be captured.

    Args:
        query: (N, H, D), the queries of all sequences, one behind the other.
        key: (M, H, D). value: (M, H, Dv).
        cu_seq_q: int (B + 1,), rising from 0 to N at most; sequence b has the queries
            [cu_seq_q[b], cu_seq_q[b + 1]). Rows behind the last are no queries: they give zeros.
        cu_seq_k: int (B + 1,), likewise for keys. A sequence may have no queries, or no keys.
        max_q, max_k: the longest sequence's queries and keys, or more. What a sequence has beyond
            them is left out.
        is_causal: query t of a sequence sees its keys s <= t (upper-left aligned).
        scale, dropout_p, enable_gqa, backend: as in `scaled_dot_product_attention`.

    Returns:
        (N, H, Dv).

    Raises:
        RuntimeError, TypeError, ValueError: arguments that do not fit; values of cu_seq_q and
            cu_seq_k are not looked at, but nothing outside of the tensors is read or written.
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
    # Rows (N, H, D) as (1, H, N, D).
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    tensors = (q, k, v, None, cu_seq_k, cu_seq_q)
    longest = (max_q, max_k)
    others = (dropout_p, is_causal, scale, enable_gqa, backend, longest)
    remembered = memo.key_of("attention", tensors, others)
    if (again := memo.find(remembered)) is not None:
        return again(*tensors)  # type: ignore[no-any-return]
    if is_torchs(query, key, value):
        require_unnamed("attention", backend)
        backend = "reference"  # plain PyTorch
    call, arguments = prepare_scaled_dot_product_attention(
        q, k, v, None, dropout_p, is_causal, scale, enable_gqa, key_lengths=cu_seq_k,
        query_lengths=cu_seq_q, longest=longest,
    )  # fmt: skip
    return memo.run(remembered, tensors, call, arguments, backend, _rows)  # type: ignore[no-any-return]


def _rows(results: tuple[Tensor, Tensor | None]) -> Tensor:
    """(1, H, N, D) as (N, H, D)."""
    return results[0][0].transpose(0, 1)
