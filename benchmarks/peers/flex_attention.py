"""PyTorch's FlexAttention, compiled, on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import Offer

NAME = "FlexAttention"


def available() -> str | None:
    try:
        import torch.nn.attention.flex_attention  # noqa: F401
    except ImportError:
        return "this torch has no FlexAttention"
    return None


def sees(mask: Tensor | None, lengths: Tensor | None, causal: bool) -> Callable[..., Tensor] | None:
    """Which keys a query sees, as FlexAttention asks for it; None: all."""
    if (mask is None or mask.dtype != torch.bool) and lengths is None and not causal:
        return None

    def visible(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        seen = s >= 0
        if causal:
            seen = seen & (s <= t)
        if lengths is not None:
            seen = seen & (s < lengths[b])
        if mask is not None and mask.dtype == torch.bool:
            seen = seen & mask[b, h, t, s]
        return seen

    return visible


def attend(attention: Callable[..., Tensor], mask_of: Callable[..., Any], *given: Any) -> Tensor:
    """The output for the arguments of ``reference.attention``.

    The block mask is made at each call, as our kernels look for what is hidden at each call.
    """
    query, key, value, mask, lengths, causal, scale, _, _, gqa, *_ = given
    b, h, t, s = (*query.shape[:3], key.shape[2])
    if mask is not None:
        mask = mask.expand(b, h, t, s)
    visible, added = sees(mask, lengths, causal), None
    if mask is not None and mask.dtype != torch.bool:

        def added(score: Tensor, b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
            return score + mask[b, h, t, s]

    blocks = None
    if visible is not None:
        blocks = mask_of(visible, b, h if mask is not None else None, t, s, device=query.device)
    return attention(
        query, key, value, score_mod=added, block_mask=blocks, scale=scale, enable_gqa=gqa
    )


def op(op: str, arguments: tuple[Any, ...], known: bool = False) -> Offer:
    """``known``: the block mask is made at the first call with a mask or with lengths, and kept."""
    if op != "attention":
        return None
    if arguments[0].device.type != "cuda":
        return "it is measured on cuda tensors"
    if arguments[7]:
        return "it has no dropout"
    if arguments[10]:
        return "it gives no weights"
    if arguments[11] is not None:
        return "it takes no query lengths"
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    if not known:
        return lambda *given: (attend(compiled, create_block_mask, *given), None)
    # The tensors are kept, so that no other has their identity.
    masks: dict[tuple[int, int], tuple[Any, ...]] = {}

    def run(*given: Any) -> tuple[Tensor, None]:
        def kept(*asked: Any, **where: Any) -> Any:
            key = id(given[3]), id(given[4])
            if key not in masks:
                masks[key] = create_block_mask(*asked, **where), given
            return masks[key][0]

        return attend(compiled, kept, *given), None

    return run
