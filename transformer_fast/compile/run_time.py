"""Functions that rewritten graphs call at run time.

They compute attention with the masks that users write. They also run `torch.nn` modules that a
captured graph holds as one call, by the equivalent modules of `transformer_fast.nn`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from .. import nn
from .._context import values_are_known
from ..functional._check import autocast
from ..functional.attention import attend_directly
from ..nn.int8 import INT8, Int8Weight, Int8Weights, run_feed_forward, run_linear
from ..ops.arguments import AttentionArguments


class Mask(NamedTuple):
    """A prepared attention mask, computed once per forward pass for all layers that share it."""

    #: True where a query may attend, (1 or B, 1 or H, 1 or T, 1 or S). None: everywhere, within the
    #: causal mask.
    visible: Tensor | None
    #: True for rows in which a finite fill hides every key, (..., 1 or T, 1): all keys then get
    #: equal weights. None: there is no such row.
    fully_masked: Tensor | None
    is_causal: bool


def _data_is_known(tensor: Tensor) -> bool:
    """True if values can be read without synchronising with a device."""
    return tensor.is_cpu and values_are_known(tensor)


def to_four(mask: Tensor, rank: int) -> Tensor:
    """Reshapes a mask of scores with ``rank`` dimensions for scores (B, H, T, S)."""
    if rank == 3 and mask.dim() == 3:
        return mask.unsqueeze(1)
    return mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))


def spread(mask: Tensor, over: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """Expands a mask to the shape ``over`` and reshapes it to the shape of the scores."""
    return mask.expand(over).reshape(shape)


def reorder(mask: Tensor, order: tuple[int, ...]) -> Tensor:
    """Permutes a mask to the dimension order of the attention's scores."""
    return mask.reshape((1,) * (len(order) - mask.dim()) + tuple(mask.shape)).permute(order)


def prepare_hidden(condition: Tensor, hides: bool, fill: float, rank: int) -> Mask:
    """Prepares the mask of ``scores.masked_fill(condition, fill)``; ``hides=False`` negates it.

    With a finite fill, a fully masked row has equal scores, and so equal weights for all keys.
    """
    is_finite = math.isfinite(fill)
    if condition.dtype != torch.bool:
        condition = condition != 0
    visible = to_four(condition.logical_not() if hides else condition, rank)
    if _data_is_known(visible) and bool(visible.all()):
        return Mask(None, None, False)
    fully_masked = None
    if is_finite:
        fully_masked = visible.any(dim=-1, keepdim=True).logical_not()
        if _data_is_known(fully_masked) and not bool(fully_masked.any()):
            fully_masked = None
        if fully_masked is not None:
            visible = visible | fully_masked
    if fully_masked is None:
        padding = _causal_with(visible)
        if padding is not None:
            return Mask(None if bool(padding.all()) else padding, None, True)
    return Mask(visible, fully_masked, False)


def prepare_added(bias: Tensor, rank: int) -> Tensor | Mask:
    """Prepares a mask that is added to the scores; a mask of 0 and -inf becomes a bool mask."""
    bias = to_four(bias, rank)
    if _data_is_known(bias) and not bias.requires_grad:
        visible = bias == 0.0
        if bool((visible | (bias == -math.inf)).all()):
            return prepare_hidden(visible, False, -math.inf, 4)
    return bias


def _causal_with(visible: Tensor) -> Tensor | None:
    """Returns the key mask (B or 1, 1, 1, S) that, with causality, equals ``visible``; or None."""
    length, keys = visible.shape[-2:]
    if length != keys or length < 2 or not _data_is_known(visible):
        return None
    if bool(visible[..., 0, -1].any()):  # rejects most masks that are not causal
        return None
    last = visible[..., -1:, :]
    causal = torch.ones((length, keys), dtype=torch.bool).tril()
    return last if torch.equal(visible, (causal & last).expand(visible.shape)) else None


def attention(
    query: Tensor, key: Tensor, value: Tensor, hidden: Mask | None, added: Tensor | Mask | None,
    scale: float, dropout_p: float, need_weights: bool, contiguous: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Returns ``dropout(softmax(masked_fill(scale Q K^T + added, hidden))) V``, and the weights.

    query (..., T, D), key (..., S, D) and value (..., S, Dv) have rank 2, 3 or 4. Keys and values
    may broadcast over batches or heads (size 1). ``contiguous``: the output has to be contiguous,
    like that of a product; otherwise its memory may have any order of dimensions.
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
        if hidden.fully_masked is not None:
            query = torch.where(hidden.fully_masked, 0.0, query)
            added = None if added is None else torch.where(hidden.fully_masked, 0.0, added)
        if added is not None:
            mask = added if mask is None else torch.where(mask, added, -math.inf)
    arguments = AttentionArguments(
        query, key, value, mask, None, is_causal, scale, dropout_p, need_weights=need_weights,
        contiguous=contiguous or None,
    )  # fmt: skip
    output, weights = attend_directly(arguments)
    if rank < 4:
        dims = (0, 1) if rank == 2 else (1,)
        output = output.squeeze(dims)
        weights = None if weights is None else weights.squeeze(dims)
    return output, weights


def _as_added(mask: Mask, like: Tensor) -> Tensor:
    """Converts a bool mask to an additive one, for the rare combination of a fill and a bias."""
    visible = mask.visible
    if mask.is_causal:
        length = like.shape[-2]
        causal = torch.ones((length, length), dtype=torch.bool, device=like.device).tril()
        visible = causal if visible is None else visible & causal
    assert visible is not None
    zero = torch.zeros((), dtype=like.dtype, device=like.device)
    return torch.where(visible, zero, -math.inf)


#: Key in a body's ``meta`` under which Dynamo stores a checkpoint's ``context_fn``.
CONTEXT = "_checkpoint_context_fn"


def checkpoint(body: GraphModule, *args: Any, **options: Any) -> Any:
    """Runs `torch.utils.checkpoint.checkpoint` with the caller's options.

    It never uses the reentrant variant, like torch.compile itself: captured bodies take the
    parameters as arguments.
    """
    options["use_reentrant"] = False
    if CONTEXT in body.meta:
        options["context_fn"] = body.meta[CONTEXT]
    return torch.utils.checkpoint.checkpoint(body, *args, **options)


#: Arguments of PyTorch's functions that are parameters of its modules.
_ATTENTION = {
    name: name.replace(".", "_")
    for name in (
        "in_proj_weight", "in_proj_bias", "bias_k", "bias_v", "q_proj_weight", "k_proj_weight",
        "v_proj_weight", "out_proj.weight", "out_proj.bias",
    )
}  # fmt: skip
_ENCODER_LAYER = {
    "self_attn.in_proj_weight": "qkv_weight", "self_attn.in_proj_bias": "qkv_bias",
    "self_attn.out_proj.weight": "proj_weight", "self_attn.out_proj.bias": "proj_bias",
    "norm1.weight": "norm_weight_1", "norm1.bias": "norm_bias_1",
    "norm2.weight": "norm_weight_2", "norm2.bias": "norm_bias_2",
    "linear1.weight": "ffn_weight_1", "linear1.bias": "ffn_bias_1",
    "linear2.weight": "ffn_weight_2", "linear2.bias": "ffn_bias_2",
}  # fmt: skip


def int8_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None
) -> Tensor:
    """`functional.linear` with a float weight that is quantised when this first runs."""
    return run_linear(input, Int8Weight(weight, None, weight.dtype), bias, activation)


def int8_feed_forward(
    input: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None, *,
    activation: str, dropout_p: float = 0.0,
) -> Tensor:  # fmt: skip
    """`functional.feed_forward` with float weights that are quantised when this first runs."""
    one, two = (Int8Weight(weight, None, weight.dtype) for weight in (weight1, weight2))
    return run_feed_forward(input, one, bias1, two, bias2, activation, dropout_p)


def multi_head_attention_forward(int8: bool = False, **given: Any) -> tuple[Tensor, Tensor | None]:
    """`F.multi_head_attention_forward` by keyword, without ``static_k`` and ``static_v``.

    ``int8``: the projections run on 8-bit products.
    """
    module = _filled(
        _attention(int(given["embed_dim_to_check"]), int(given["num_heads"])),
        {name: given[argument] for name, argument in _ATTENTION.items()}, int8,
        training=given["training"], dropout=given["dropout_p"], add_zero_attn=given["add_zero_attn"],
        _qkv_same_embed_dim=not given["use_separate_proj_weight"],
    )  # fmt: skip
    found: tuple[Tensor, Tensor | None] = module.forward(
        given["query"], given["key"], given["value"], given["key_padding_mask"],
        given["need_weights"], given["attn_mask"], given["average_attn_weights"],
        given["is_causal"],
    )  # fmt: skip
    return found


def encoder_layer(
    *,
    src: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
    int8: bool = False,
    **given: Any,
) -> Tensor:
    """`torch._transformer_encoder_layer_fwd` (private) by keyword; an inference-only function."""
    layer = _filled(
        # eps may be symbolic during a capture.
        _encoder_layer(
            int(given["embed_dim"]), int(given["num_heads"]), len(given["ffn_weight_1"]),
            given["use_gelu"], float(given["eps"]), given["norm_first"],
        ),
        {name: given[argument] for name, argument in _ENCODER_LAYER.items()},
        int8,
    )  # fmt: skip
    if mask is not None and mask_type != 1 and mask.dim() == 4:
        # A mask that is the same for all batches and heads stays two-dimensional.
        is_one = mask.stride()[:2] == (0, 0) and mask.shape[0] > 0
        mask = mask[0, 0] if is_one else mask.flatten(0, 1)
    hidden = None if mask is None else mask.to(torch.bool)
    masks = {"src_key_padding_mask" if mask_type == 1 else "src_mask": hidden}
    # PyTorch's function returns autocast's dtype, the layer itself the dtype of src.
    found: Tensor = layer.forward(*autocast(src), **masks)
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


def _filled(
    module: Any, parameters: Mapping[str, Tensor | None], int8: bool = False, **attributes: Any
) -> Any:
    """Returns a copy of ``module`` with other parameters, given by their qualified names.

    ``int8``: products with them run on 8 bits.
    """
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
        n: _filled(child, inner.get(n, {}), int8) for n, child in module._modules.items() if child
    }
    # A parameter that is None in the template is an instance attribute, which would hide the new
    # one.
    rest = {name: value for name, value in module.__dict__.items() if name not in own}
    matrices = tuple(
        name for name, tensor in own.items() if tensor is not None and tensor.dim() == 2
    )
    if int8 and matrices:
        rest[INT8] = Int8Weights(matrices)
    filled.__dict__ = {**rest, **attributes, "_parameters": own, "_modules": children}
    return filled
