"""What rewritten graphs call: attention with masks as users write them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...functional._check import autocast
from ...functional.attention import attend
from ...reference import values_are_known


class Mask(NamedTuple):
    """Prepared once per forward pass, for all layers that share it."""

    #: Where a query may look, (1 or B, 1 or H, 1 or T, 1 or S); None: anywhere (that is causal).
    visible: Tensor | None
    #: Rows that the user's finite fill makes see all keys alike, (..., 1 or T, 1); None: no row.
    blind: Tensor | None
    is_causal: bool


def _data_is_known(tensor: Tensor) -> bool:
    """Whether looking at values is possible and makes nobody wait."""
    return tensor.is_cpu and values_are_known(tensor)


def _to_four(mask: Tensor, rank: int) -> Tensor:
    """A mask of scores with ``rank`` dimensions, for scores (B, H, T, S)."""
    if rank == 3 and mask.dim() == 3:
        return mask.unsqueeze(1)
    return mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))


def spread(mask: Tensor, over: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """A mask for scores that are looked at as ``over``, for the same scores as ``shape``."""
    return mask.expand(over).reshape(shape)


def reorder(mask: Tensor, order: tuple[int, ...]) -> Tensor:
    """A mask for scores whose dimensions stand in another order than the attention's."""
    return mask.reshape((1,) * (len(order) - mask.dim()) + tuple(mask.shape)).permute(order)


def prepare_hidden(condition: Tensor, hides: bool, fill: float, rank: int) -> Mask:
    """The mask of ``scores.masked_fill(condition, fill)``; ``hides=False``: of its opposite.

    With a finite fill a row that sees nothing has equal scores everywhere, and so equal weights.
    """
    if condition.dtype != torch.bool:
        condition = condition != 0
    visible = _to_four(condition.logical_not() if hides else condition, rank)
    if _data_is_known(visible) and bool(visible.all()):
        return Mask(None, None, False)
    blind = None
    if math.isfinite(fill):
        blind = visible.any(dim=-1, keepdim=True).logical_not()
        if _data_is_known(blind) and not bool(blind.any()):
            blind = None
        if blind is not None:
            visible = visible | blind
    if blind is None:
        padding = _causal_with(visible)
        if padding is not None:
            return Mask(None if bool(padding.all()) else padding, None, True)
    return Mask(visible, blind, False)


def prepare_added(bias: Tensor, rank: int) -> Tensor | Mask:
    """A mask that is added to the scores; as a bool mask if it only hides."""
    bias = _to_four(bias, rank)
    if _data_is_known(bias) and not bias.requires_grad:
        visible = bias == 0.0
        if bool((visible | (bias == -math.inf)).all()):
            return prepare_hidden(visible, False, -math.inf, 4)
    return bias


def _causal_with(visible: Tensor) -> Tensor | None:
    """The (B or 1, 1, 1, S) such that visible is that and causal; None if there is none."""
    length, keys = visible.shape[-2:]
    if length != keys or length < 2 or not _data_is_known(visible):
        return None
    if bool(visible[..., 0, -1].any()):  # most masks that are not causal end here
        return None
    last = visible[..., -1:, :]
    causal = torch.ones((length, keys), dtype=torch.bool).tril()
    return last if torch.equal(visible, (causal & last).expand(visible.shape)) else None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Mask | None,
    added: Tensor | Mask | None,
    scale: float,
    dropout_p: float,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """``dropout(softmax(masked_fill(scale Q K^T + added, hidden)))``, times V, and the weights.

    query (..., T, D), key (..., S, D), value (..., S, Dv) of rank 2, 3 or 4; keys and values may be
    the same for several batches or heads (size 1).
    """
    query, key, value = autocast(query, key, value)  # type: ignore[assignment]
    rank = query.dim()
    if rank < 4:
        where = (0, 1) if rank == 2 else (1,)
        for dim in where:
            query, key, value = (x.unsqueeze(dim) for x in (query, key, value))
    if key.shape[:-2] != query.shape[:-2] or value.shape[:-2] != query.shape[:-2]:
        key, value = (x.expand(*query.shape[:-2], *x.shape[-2:]) for x in (key, value))
    if isinstance(added, Mask):
        hidden, added = (added, None) if hidden is None else (hidden, _as_added(added, query))
    mask = added
    is_causal = False
    if hidden is not None:
        mask, is_causal = hidden.visible, hidden.is_causal
        if hidden.blind is not None:
            query = torch.where(hidden.blind, 0.0, query)
            added = None if added is None else torch.where(hidden.blind, 0.0, added)
        if added is not None:
            mask = added if mask is None else torch.where(mask, added, -math.inf)
    output, weights = attend(
        query, key, value, mask, None, is_causal, scale, dropout_p, need_weights
    )
    if rank < 4:
        dims = (0, 1) if rank == 2 else (1,)
        output = output.squeeze(dims)
        weights = None if weights is None else weights.squeeze(dims)
    return output, weights


def _as_added(mask: Mask, like: Tensor) -> Tensor:
    """A bool mask as one to add, for the rare case of a fill next to it."""
    visible = mask.visible
    if mask.is_causal:
        length = like.shape[-2]
        causal = torch.ones((length, length), dtype=torch.bool, device=like.device).tril()
        visible = causal if visible is None else visible & causal
    assert visible is not None
    zero = torch.zeros((), dtype=like.dtype, device=like.device)
    return torch.where(visible, zero, -math.inf)
