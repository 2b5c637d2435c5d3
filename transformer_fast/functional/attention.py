"""Public scaled_dot_product_attention, and `attend`: unchecked, with mask and causal together."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..dispatch import Call, select
from ..reference.dropout import draw_seed
from ._check import (
    autocast,
    require_floating,
    require_optional_tensor,
    require_probability,
    require_same_device,
    require_tensor,
    wants_grad,
)

_NAME = "scaled_dot_product_attention"


def _dtype_name(dtype: torch.dtype) -> str:
    names = {torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half"}
    names |= {torch.bfloat16: "c10::BFloat16", torch.int64: "long int", torch.int32: "int"}
    names |= {torch.uint8: "unsigned char", torch.int8: "signed char", torch.int16: "short int"}
    return names.get(dtype, str(dtype).removeprefix("torch."))


def _check_mask_dtype(mask: Tensor, query: Tensor) -> None:
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(
            "Expected attn_mask dtype to be bool or float or to match query dtype, but got "
            f"attn_mask.dtype: {_dtype_name(mask.dtype)} and  query.dtype: "
            f"{_dtype_name(query.dtype)} instead."
        )


def _check_qkv(query: Tensor, key: Tensor, value: Tensor) -> None:
    for position, (name, tensor) in enumerate(
        (("query", query), ("key", key), ("value", value)), 1
    ):
        require_tensor(_NAME, name, position, tensor)
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(
            "Expected query, key, and value to have the same dtype, but got query.dtype: "
            f"{_dtype_name(query.dtype)} key.dtype: {_dtype_name(key.dtype)} and value.dtype: "
            f"{_dtype_name(value.dtype)} instead."
        )
    if not query.device == key.device == value.device:
        raise RuntimeError(
            "Expected query, key, and value to have the same device type, but got query.device: "
            f"{query.device} key.device: {key.device} and value.device: {value.device} instead."
        )
    if query.dim() < 2 or key.dim() < 2 or value.dim() < 2:
        raise RuntimeError(
            "Expected query, key, and value to all be  at least 2 dimensional, but got query.dim: "
            f"{query.dim()}, key.dim: {key.dim()} and value.dim: {value.dim()} instead."
        )
    require_floating("query", query)


def _check_sizes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    if query.shape[-1] != key.shape[-1]:
        raise RuntimeError(
            f"query and key must have the same head size (last dimension), but got "
            f"{query.shape[-1]} and {key.shape[-1]}"
        )
    if key.shape[-2] != value.shape[-2]:
        raise RuntimeError(
            f"key and value must have the same length (dimension -2), but got {key.shape[-2]} and "
            f"{value.shape[-2]}"
        )
    heads, key_heads = query.shape[1], key.shape[1]
    if value.shape[1] != key_heads:
        raise RuntimeError(
            f"key and value must have the same number of heads, but got {key_heads} and "
            f"{value.shape[1]}"
        )
    if heads != key_heads and (not enable_gqa or key_heads == 0 or heads % key_heads):
        raise RuntimeError(
            f"the number of query heads, {heads}, must equal that of the keys, {key_heads}"
            + ("" if not enable_gqa else ", or be a multiple of it")
            + ("" if enable_gqa else "; enable_gqa=True allows a multiple of it")
        )


def _to_four(tensor: Tensor, batch: torch.Size) -> Tensor:
    """(*batch, H, L, D) from anything that broadcasts to it, folded to (B, H, L, D)."""
    tensor = tensor.expand(*batch, *tensor.shape[-3:])
    return tensor.reshape(math.prod(batch), *tensor.shape[-3:])


def _mask_to_four(mask: Tensor, batch: torch.Size, sizes: tuple[int, int, int]) -> Tensor:
    """The mask as (1 or B, 1 or H, 1 or T, 1 or S), a view wherever its strides allow."""
    target = (*batch, *sizes)
    too_big = mask.dim() > len(target)
    if too_big or any(
        m not in (1, t) for m, t in zip(reversed(mask.shape), reversed(target), strict=False)
    ):
        raise RuntimeError(
            f"attn_mask of shape {list(mask.shape)} does not broadcast to the attention scores, "
            f"{list(target)}"
        )
    mask = mask.reshape((1,) * (len(target) - mask.dim()) + tuple(mask.shape))
    lead = mask.shape[:-3]
    if all(size == 1 for size in lead):
        return mask.reshape(1, *mask.shape[-3:])
    if tuple(lead) != tuple(batch):
        mask = mask.expand(*batch, *mask.shape[-3:])
    return mask.reshape(math.prod(batch), *mask.shape[-3:])


def _check_lengths(key_lengths: Tensor, batch: int) -> None:
    require_tensor(_NAME, "key_lengths", 9, key_lengths)
    if key_lengths.is_floating_point() or key_lengths.dtype == torch.bool:
        raise TypeError(f"key_lengths must have an integer dtype, not {key_lengths.dtype}")
    if tuple(key_lengths.shape) != (batch,):
        raise ValueError(
            f"key_lengths must have shape [{batch}], one length per batch element, not "
            f"{list(key_lengths.shape)}"
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
) -> tuple[Call, tuple[Any, ...]]:
    seed = draw_seed(query.device) if 0.0 < dropout_p < 1.0 else None
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
    )
    return call, (
        query, key, value, mask, key_lengths, is_causal, scale, dropout_p, seed, enable_gqa,
        need_weights,
    )  # fmt: skip


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
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention on (B, H, T, D) for callers that have checked their arguments; no checks here.

    Unlike the public function it takes a mask together with ``is_causal`` (both hide), so that a
    padding mask (B, 1, 1, S) need not be expanded. Returns (output, weights or None).
    """
    call, arguments = prepare_attend(
        query, key, value, mask, key_lengths, is_causal, scale, dropout_p, need_weights, enable_gqa
    )
    return select(call, backend).run(*arguments)


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
    need_weights: bool = False,
) -> tuple[Call, tuple[Any, ...]]:
    require_tensor(_NAME, "query", 1, query)
    require_tensor(_NAME, "key", 2, key)
    require_tensor(_NAME, "value", 3, value)
    require_optional_tensor(_NAME, "attn_mask", 4, attn_mask)
    p = require_probability("dropout_p", dropout_p)
    query, key, value = autocast(query, key, value)  # type: ignore[assignment]
    _check_qkv(query, key, value)
    if attn_mask is not None:
        if is_causal:
            raise RuntimeError(
                "_scaled_dot_product_attention: Explicit attn_mask should not be set when "
                "is_causal=True"
            )
        _check_mask_dtype(attn_mask, query)
    require_same_device("query", query, attn_mask=attn_mask, key_lengths=key_lengths)

    if (
        query.dim() == key.dim() == value.dim() == 4
        and query.shape[0] == key.shape[0] == (value.shape[0])
    ):
        batch = query.shape[:1]
    else:
        # 2-D and 3-D tensors have no dimension of heads; torch broadcasts all leading dimensions.
        query, key, value = (
            x.reshape((1,) * (4 - x.dim()) + tuple(x.shape)) if x.dim() == 2
            else x.unsqueeze(-3) if x.dim() == 3
            else x
            for x in (query, key, value)
        )  # fmt: skip
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.unsqueeze(-3)
        try:
            batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
        except RuntimeError:
            raise RuntimeError(
                "the batch dimensions of query, key and value must broadcast, but got shapes "
                f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
            ) from None
        query, key, value = (_to_four(x, batch) for x in (query, key, value))
    _check_sizes(query, key, value, enable_gqa)
    if attn_mask is not None:
        attn_mask = _mask_to_four(attn_mask, batch, (query.shape[1], query.shape[2], key.shape[2]))
    if key_lengths is not None:
        _check_lengths(key_lengths, query.shape[0])
    return prepare_attend(
        query, key, value, attn_mask, key_lengths, is_causal, scale, p, need_weights, enable_gqa
    )


def _result_shape(query: Tensor, key: Tensor, value: Tensor) -> torch.Size | None:
    """The leading shape of the result where it is not (B, H)."""
    if (
        query.dim() == key.dim() == value.dim() == 4
        and query.shape[0] == key.shape[0] == (value.shape[0])
    ):
        return None
    return torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])


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
    need_weights: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention, like `torch.nn.functional.scaled_dot_product_attention`.

    ``output = dropout(softmax(scale * Q K^T + mask)) V``

    Args:
        query: (..., H, T, D). key: (..., H, S, D). value: (..., H, S, Dv).
        attn_mask: broadcastable to (..., H, T, S). bool: True = may attend. float: added to the
            scores, -inf hides. None: no mask. It is read through its strides, never expanded.
        dropout_p: probability in [0, 1] of dropping a weight; always applied, like torch's.
        is_causal: query t sees keys s <= t (upper-left aligned); not together with attn_mask.
        scale: multiplies the scores; None means 1 / sqrt(D).
        enable_gqa: key and value may have fewer heads, a divisor of the query's.
        key_lengths: int (B,), keys at positions >= key_lengths[b] are hidden. None: all are real.
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
        need_weights=need_weights,
    )
    output, weights = select(call, backend).run(*arguments)
    lead = _result_shape(query, key, value)
    if lead is not None:
        output = output.reshape(*lead, *output.shape[-2:])
    if not need_weights:
        return output
    return output, weights if lead is None else weights.reshape(*lead, *weights.shape[-2:])
