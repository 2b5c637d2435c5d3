"""Modules of torch.nn that a captured graph holds as one call, run by those of `transformer_fast.nn`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import nn
from .editor import Editor


def rewrite_modules(editor: Editor) -> None:
    """Put our functions in for torch's, whose arguments they take."""
    for node in editor.graph.nodes:
        op, function = _FUNCTIONS.get(node.target, ("", None))
        if function is None:
            continue
        given = inspect.signature(function).bind(*node.args, **node.kwargs).arguments
        if given.get("static_k") is None and given.get("static_v") is None:
            node.target = function
            editor.found(op, node)


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: None = None,
    static_v: None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`F.multi_head_attention_forward` without ``static_k`` and ``static_v``."""
    module = _filled(
        _attention(int(embed_dim_to_check), int(num_heads)),
        {
            "in_proj_weight": in_proj_weight, "in_proj_bias": in_proj_bias, "bias_k": bias_k,
            "bias_v": bias_v, "q_proj_weight": q_proj_weight, "k_proj_weight": k_proj_weight,
            "v_proj_weight": v_proj_weight, "out_proj.weight": out_proj_weight,
            "out_proj.bias": out_proj_bias,
        },
        training=training, dropout=dropout_p, add_zero_attn=add_zero_attn,
        _qkv_same_embed_dim=not use_separate_proj_weight,
    )  # fmt: skip
    found: tuple[Tensor, Tensor | None] = module.forward(
        query,
        key,
        value,
        key_padding_mask,
        need_weights,
        attn_mask,
        average_attn_weights,
        is_causal,
    )
    return found


def encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """`torch._transformer_encoder_layer_fwd`, which is for inference."""
    layer = _filled(
        # While a graph is captured, eps may be symbolic.
        _encoder_layer(
            int(embed_dim), int(num_heads), len(ffn_weight_1), use_gelu, float(eps), norm_first
        ),
        {
            "self_attn.in_proj_weight": qkv_weight, "self_attn.in_proj_bias": qkv_bias,
            "self_attn.out_proj.weight": proj_weight, "self_attn.out_proj.bias": proj_bias,
            "norm1.weight": norm_weight_1, "norm1.bias": norm_bias_1,
            "norm2.weight": norm_weight_2, "norm2.bias": norm_bias_2,
            "linear1.weight": ffn_weight_1, "linear1.bias": ffn_bias_1,
            "linear2.weight": ffn_weight_2, "linear2.bias": ffn_bias_2,
        },
    )  # fmt: skip
    if mask is not None and mask_type != 1 and mask.dim() == 4:
        # One mask for all batches and heads is not written out for each.
        is_one = mask.stride()[:2] == (0, 0) and mask.shape[0] > 0
        mask = mask[0, 0] if is_one else mask.flatten(0, 1)
    hidden = None if mask is None else mask.to(torch.bool)
    masks = {"src_key_padding_mask" if mask_type == 1 else "src_mask": hidden}
    found: Tensor = layer.forward(src, **masks)
    return found


@functools.cache
def _attention(width: int, heads: int) -> Any:
    return nn.MultiheadAttention(width, heads, device="meta")


@functools.cache
def _encoder_layer(
    width: int, heads: int, hidden: int, gelu: bool, eps: float, norm_first: bool
) -> Any:
    return nn.TransformerEncoderLayer(
        width, heads, hidden, 0.0, F.gelu if gelu else F.relu, eps, True, norm_first, device="meta"
    ).eval()


def _filled(module: Any, parameters: Mapping[str, Tensor | None], **attributes: Any) -> Any:
    """A module like ``module`` with other parameters, by their qualified names."""
    own: dict[str, Tensor | None] = {}
    inner: dict[str, dict[str, Tensor | None]] = {}
    for name, tensor in parameters.items():
        child, _, of_child = name.partition(".")
        if of_child:
            inner.setdefault(child, {})[of_child] = tensor
        else:
            own[name] = tensor
    filled = object.__new__(type(module))
    children = {
        n: _filled(child, inner.get(n, {})) for n, child in module._modules.items() if child
    }
    # What the template has as a plain None would hide a parameter.
    rest = {name: value for name, value in module.__dict__.items() if name not in own}
    filled.__dict__ = {**rest, **attributes, "_parameters": own, "_modules": children}
    return filled


_FUNCTIONS: dict[Any, tuple[str, Any]] = {
    F.multi_head_attention_forward: ("attention", multi_head_attention_forward),
    torch._transformer_encoder_layer_fwd: ("encoder_layer", encoder_layer),
}
