"""A layer's sub-layers in one call each, where nobody could tell the difference.

Each function returns None where the sub-layer has to be composed of ops or modules: gradients,
active dropout, hooks, replaced modules, dtypes or devices other than the blocks' own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..backends import cpu_blocks
from . import bypass
from .multihead_attention import MultiheadAttention

#: Cross-attention takes queries and keys from parts of one packed weight, cut between panels.
_PANEL = 32


def _norm_fits(norm: torch.nn.Module, width: int) -> bool:
    return bypass.is_plain(norm, bypass.LAYER_NORM) and norm.normalized_shape == (width,)


def _inactive(dropout: torch.nn.Module) -> bool:
    return bypass.is_plain(dropout, bypass.DROPOUT) and (
        not dropout.training or bool(dropout.p == 0.0)
    )


def attention_fits(
    module: torch.nn.Module,
    dropout: torch.nn.Module,
    norm: torch.nn.Module,
    x: Tensor,
    cross: bool = False,
) -> bool:
    """Whether `attention` would run the sub-layer, given inputs and masks that fit."""
    if not (
        bypass.is_plain(module, (MultiheadAttention,))
        and isinstance(module, MultiheadAttention)
        and module._qkv_same_embed_dim
        and module.bias_k is None
        and not module.add_zero_attn
        and (not module.training or module.dropout == 0.0)
        and bypass.is_plain(module.out_proj, bypass.LINEAR)
        and _norm_fits(norm, module.embed_dim)
        and _inactive(dropout)
        and x.shape[-1] == module.embed_dim
        and (not cross or module.embed_dim % _PANEL == 0)
    ):
        return False
    out = module.out_proj
    return cpu_blocks.fits(
        x, module.in_proj_weight, module.in_proj_bias, out.weight, out.bias,
        norm.weight, norm.bias,  # type: ignore[arg-type]
    )  # fmt: skip


def attention(
    module: torch.nn.Module,
    dropout: torch.nn.Module,
    norm: torch.nn.Module,
    norm_first: bool,
    x: Tensor,
    memory: Tensor | None,
    mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    query_starts: Tensor | None = None,
    key_starts: Tensor | None = None,
) -> Tensor | None:
    """``norm(x + module(x, memory))`` or its pre-norm form; masks in torch.nn's polarity."""
    if not attention_fits(module, dropout, norm, x, memory is not None):
        return None
    assert isinstance(module, MultiheadAttention)
    combined = None
    if query_starts is None:
        source = x if memory is None else memory
        sequence = 1 if module.batch_first else 0
        if (
            x.dim() != 3
            or source.dim() != 3
            or source.shape[2] != x.shape[2]
            or source.shape[1 - sequence] != x.shape[1 - sequence]
            or not cpu_blocks.fits(source)
            or (is_causal and mask is None)
        ):
            return None
        both = mask is not None and key_padding_mask is not None
        if both and mask.dtype != key_padding_mask.dtype:  # type: ignore[union-attr]
            return None
        combined = module._mask(
            None if is_causal else mask, key_padding_mask, x, source, sequence, 0
        )
        if combined is not None and combined.dtype not in (torch.bool, torch.float32, x.dtype):
            return None
    out = module.out_proj
    return cpu_blocks.attention(
        x,
        memory,
        module.in_proj_weight,
        module.in_proj_bias,
        out.weight,
        out.bias,
        norm.weight,  # type: ignore[arg-type]
        norm.bias,  # type: ignore[arg-type]
        norm.eps,  # type: ignore[arg-type]
        norm_first,
        module.num_heads,
        module.batch_first,
        combined,
        None,
        is_causal,
        query_starts,
        key_starts,
    )


def feed_forward_fits(
    linear1: torch.nn.Module,
    activation: Callable[[Tensor], Tensor],
    dropout: torch.nn.Module,
    linear2: torch.nn.Module,
    dropout_after: torch.nn.Module,
    norm: torch.nn.Module,
    x: Tensor,
) -> bool:
    """Whether `feed_forward` would run the sub-layer."""
    return (
        bypass.activation_name(activation) is not None
        and bypass.is_plain(linear1, bypass.LINEAR)
        and bypass.is_plain(linear2, bypass.LINEAR)
        and _inactive(dropout)
        and _inactive(dropout_after)
        and x.shape[-1] == linear1.in_features == linear2.out_features
        and linear1.out_features == linear2.in_features
        and _norm_fits(norm, x.shape[-1])
        and cpu_blocks.fits(
            x, linear1.weight, linear1.bias, linear2.weight, linear2.bias,  # type: ignore[arg-type]
            norm.weight, norm.bias,  # type: ignore[arg-type]
        )
    )  # fmt: skip


def feed_forward(
    linear1: torch.nn.Module,
    activation: Callable[[Tensor], Tensor],
    dropout: torch.nn.Module,
    linear2: torch.nn.Module,
    dropout_after: torch.nn.Module,
    norm: torch.nn.Module,
    norm_first: bool,
    x: Tensor,
) -> Tensor | None:
    """``norm(x + FFN(x))`` or its pre-norm form."""
    if not feed_forward_fits(linear1, activation, dropout, linear2, dropout_after, norm, x):
        return None
    name = bypass.activation_name(activation)
    assert name is not None
    return cpu_blocks.feed_forward(
        x,
        linear1.weight,  # type: ignore[arg-type]
        linear1.bias,  # type: ignore[arg-type]
        linear2.weight,  # type: ignore[arg-type]
        linear2.bias,  # type: ignore[arg-type]
        norm.weight,  # type: ignore[arg-type]
        norm.bias,  # type: ignore[arg-type]
        norm.eps,  # type: ignore[arg-type]
        norm_first,
        name,
    )
