"""Attention and masks for the two registries of transformers.

Both have to know the name: a model whose attention alone is registered gets no mask at all, and
attends to padding without a word.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import functional

NAME = "transformer_fast"


def register() -> None:
    """Make the name known; does nothing if it is."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


#: Arguments that transformers' function for 'sdpa' ignores, and the one that asks for weights.
_KNOWN = frozenset({
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "logits_to_keep",
    "max_length_k", "max_length_q", "num_items_in_batch", "output_attentions",
    "output_hidden_states", "output_router_logits", "position_ids", "return_dict", "seq_idx",
    "sliding_window", "use_cache",
})  # fmt: skip


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What attention modules of transformers call; returns (B, T, H, D) and the weights or None.

    query (B, H, T, D), key and value (B, H or fewer, S, D); attention_mask as `sdpa_mask` makes it:
    bool, True = may attend, or float and added. The weights are there if output_attentions asks.
    With an argument that is not known here it is transformers' function for 'sdpa'.
    """
    if any(found is not None and name not in _KNOWN for name, found in kwargs.items()):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal,
            position_bias=position_bias, **kwargs,
        )  # fmt: skip
    length, keys = query.shape[2], key.shape[2]
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal = bool(is_causal) and attention_mask is None and length > 1
    if causal and keys > length:  # a cache of fixed size; what lies behind is not there yet
        key, value = key[:, :, :length], value[:, :, :length]
        position_bias = None if position_bias is None else position_bias[..., :length]
    mask = _mask(attention_mask, position_bias, causal, query, key)
    found = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        dropout_p=dropout,
        is_causal=causal and position_bias is None,
        scale=scaling,
        enable_gqa=key.shape[1] < query.shape[1],
        need_weights=bool(kwargs.get("output_attentions")),
    )
    output, weights = found if isinstance(found, tuple) else (found, None)
    return output.transpose(1, 2).contiguous(), weights


def _mask(
    mask: Tensor | None, bias: Tensor | None, causal: bool, query: Tensor, key: Tensor
) -> Tensor | None:
    """Mask and learned bias as one mask for our function."""
    if mask is not None and mask.dim() == 4 and mask.shape[2] > 1 and mask.stride(2) == 0:
        mask = mask[:, :, :1]  # padding alone, expanded to all queries
    if bias is None:
        return mask
    # A finite number, as in transformers: a row that sees nothing there is no row of zeros here.
    lowest = torch.finfo(query.dtype).min
    if causal:
        places = (query.shape[2], key.shape[2])
        mask = torch.ones(places, dtype=torch.bool, device=query.device).tril()
    if mask is None:
        return bias
    return torch.where(mask, bias, lowest) if mask.dtype == torch.bool else bias + mask
