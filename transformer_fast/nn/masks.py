"""Masks of the nn modules: checks, conversion to SDPA's polarity, and detection of causal masks.

In torch.nn a bool mask says True = hidden; in `transformer_fast.functional` True = may attend.
Float masks are added in both.
"""

from __future__ import annotations

import math
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .._context import values_are_known
from ..functional import masks
from ..functional._check import check_mask_dtype


def check_masks(
    attn_mask: Tensor | None,
    attn_name: str,
    key_padding_mask: Tensor | None,
    padding_name: str,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None]:
    """Returns both masks, as float masks if only one is bool; raises and warns as PyTorch does."""
    for mask, name in ((key_padding_mask, padding_name), (attn_mask, attn_name)):
        if mask is not None and not (torch.is_floating_point(mask) or mask.dtype == torch.bool):
            raise AssertionError(f"only bool and floating types of {name} are supported")
    if attn_mask is not None or key_padding_mask is not None:
        warn_of_zeros_and_ones(**{attn_name: attn_mask, padding_name: key_padding_mask})
    if attn_mask is None or key_padding_mask is None or attn_mask.dtype == key_padding_mask.dtype:
        return attn_mask, key_padding_mask
    warnings.warn(
        f"Support for mismatched {padding_name} and {attn_name} "
        "is deprecated. Use same type for both instead.",
        stacklevel=3,
    )
    return additive(attn_mask, dtype), additive(key_padding_mask, dtype)


def warn_of_zeros_and_ones(**named: Tensor | None) -> None:
    """Calls `functional.masks.warn_of_zeros_and_ones` for masks in torch.nn's polarity."""
    for name, mask in named.items():
        if mask is not None:
            masks.warn_of_zeros_and_ones(
                name,
                mask,
                f"Give {name} != 0 if 1 means hidden, as True does in torch.nn, or {name} == 0 if "
                "1 means may attend.",
            )


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Returns a torch.nn mask as a float mask: 0 where visible, -inf where hidden."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


def combine(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, batch: int, heads: int
) -> Tensor | None:
    """Returns one SDPA mask (1 or B, 1 or H, 1 or T, S) for torch.nn's two.

    attn_mask (T, S) or (B * H, T, S); key_padding_mask (B, S). Padding alone stays (B, 1, 1, S);
    only both together need (B, 1 or H, T, S).
    """
    hidden = None
    if attn_mask is not None and attn_mask.dim() == 2:
        hidden = attn_mask[None, None]
    elif attn_mask is not None:
        hidden = attn_mask.unflatten(0, (batch, heads))
    if key_padding_mask is None:
        return hidden.logical_not() if hidden is not None and hidden.dtype == torch.bool else hidden
    padding = key_padding_mask[:, None, None, :]
    padding_is_bool = padding.dtype == torch.bool
    if hidden is None:
        return padding.logical_not() if padding_is_bool else padding
    if hidden.dtype == torch.bool:
        if padding_is_bool:
            return hidden.logical_not() & padding.logical_not()
        return torch.where(hidden, -math.inf, padding)
    return torch.where(padding, -math.inf, hidden) if padding_is_bool else hidden + padding


def from_padding_mask(padding: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Returns (lengths, mask) for padding (B, S), True = padded: the lengths (B,) if it is at the end
    of each sequence, else a mask (B, 1, 1, S) in SDPA's polarity; the other is None."""
    real = padding.logical_not()
    lengths = real.sum(dim=1)
    first = torch.arange(real.shape[1], device=real.device) < lengths[:, None]
    return (lengths, None) if torch.equal(first, real) else (None, real[:, None, None, :])


def to_attention_mask(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    query: Tensor,
    key: Tensor,
    sequence: int,
    heads: int,
    appended: int = 0,
) -> Tensor | None:
    """Returns the checked SDPA mask; keys that were appended are visible to all queries.

    ``sequence`` is the dimension of query's and key's tokens, 0 or 1; the other one is the batch.
    """
    if attn_mask is None and key_padding_mask is None:
        return None
    batch, length, keys = query.shape[1 - sequence], query.shape[sequence], key.shape[sequence]
    if attn_mask is not None:
        rank = attn_mask.dim()
        shape = (length, keys) if rank == 2 else (batch * heads, length, keys)
        if attn_mask.shape != shape:
            raise RuntimeError(
                f"The shape of the {rank}D attn_mask is {attn_mask.shape}, but should be {shape}."
            )
        attn_mask = F.pad(attn_mask, (0, appended)) if appended else attn_mask
    if key_padding_mask is not None:
        if appended:
            key_padding_mask = F.pad(key_padding_mask, (0, appended))
        for dim, size in enumerate((batch, keys + appended)):
            if key_padding_mask.shape[dim] != size:
                raise AssertionError(
                    f"Expected key_padded_mask.shape[{dim}] to be {size}, "
                    f"but got {key_padding_mask.shape[dim]}"
                )
    mask = combine(attn_mask, key_padding_mask, batch, heads)
    if mask is not None:
        check_mask_dtype(mask, query)
    return mask


def is_causal_mask(mask: Tensor | None, hint: bool | None, size: int) -> bool:
    """Returns the caller's hint; without one, True if ``mask`` is exactly the causal mask of ``size``.

    False while tracing, when values are unknown: the mask is then applied as any other.
    """
    if hint is not None:
        return hint is True
    if mask is None or mask.shape != (size, size) or not values_are_known(mask):
        return False
    return _is_causal_on_gpu(mask) if mask.is_cuda else _is_causal(mask)


#: Mask on a GPU -> ((version, address), True if the mask is causal).
_causal: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _is_causal_on_gpu(mask: Tensor) -> bool:
    """Cached per mask and version, so that the host waits for the device once, not in each call.

    False while a CUDA graph is captured: at each replay the mask may hold other values.
    """
    if torch.cuda.is_current_stream_capturing():
        return False
    if mask.is_inference():  # without a version counter
        return _is_causal(mask)
    now = mask._version, mask.data_ptr()
    cached = _causal.get(mask)
    if cached is None or cached[0] != now:
        cached = _causal[mask] = now, _is_causal(mask)
    return bool(cached[1])


def _is_causal(mask: Tensor) -> bool:
    size, hidden = len(mask), True if mask.dtype == torch.bool else -math.inf
    # Reading two corners rules out most other masks cheaply.
    if mask.is_cpu and size > 1 and (mask[0, -1].item() != hidden or mask[-1, 0].item() != 0):
        return False
    causal = torch.full((size, size), hidden, dtype=mask.dtype, device=mask.device).triu(1)
    return torch.equal(mask, causal)
