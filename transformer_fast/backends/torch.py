"""PyTorch's own fused ops, where they are the fastest thing that takes the call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _native, reference, small
from ..dispatch import Call, Kernel, is_exporting, register

#: What cpu_dropout takes.
_NATIVE = (torch.float32, torch.bfloat16, torch.float16)


def layer_norm(
    input: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    total = residual + (input if dropout_p == 0.0 else _dropout(input, dropout_p, seed))
    return F.layer_norm(total, normalized_shape, weight, bias, eps), total


@reference.taking_query_lengths
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_lengths: Tensor | None,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    seed: Tensor | None,
    enable_gqa: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """Rows with nothing visible are zero, without asking the device whether there are any.

    They attend to everything first, so that no path of PyTorch's makes NaN of them on the way to
    gradients. Keys and values that are hidden from every query are cleared. NaN in those that some
    queries see may reach the queries that they are hidden from, as in PyTorch.
    """
    mask, blind = attn_mask, None
    bare = attn_mask is None and key_lengths is None and not need_weights
    visible = reference.visible_places(query, key, attn_mask, key_lengths, is_causal and not bare)
    if visible is not None:
        blind = visible.any(dim=-1, keepdim=True).logical_not()
        if attn_mask is None or attn_mask.dtype == torch.bool:
            mask = visible.logical_or(blind)
        else:
            if is_causal or key_lengths is not None:
                attn_mask = torch.where(visible, attn_mask, -math.inf)
            mask = attn_mask.masked_fill(blind, 0.0)
        is_causal = False
        hidden = _hidden_keys(visible, key.shape[-3])
        key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)
    gqa = enable_gqa and bool(key.shape[-3] != query.shape[-3])  # a tensor in torch.jit.trace
    if gqa and is_exporting():  # the TorchScript exporter of ONNX takes no grouped heads
        groups = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(groups, dim=-3) for x in (key, value))
        gqa = False
    weights = None
    if need_weights:
        weights = _weights(query, key, mask, blind, scale, dropout_p)
        if gqa:
            value = value.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
        return weights @ value, weights
    output = F.scaled_dot_product_attention(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=gqa
    )
    return output if blind is None else output.masked_fill(blind, 0.0), None


def _hidden_keys(visible: Tensor, heads: int) -> Tensor:
    """Where keys are hidden from every query, as (B, H, S, 1) of the keys' heads."""
    one = visible.shape[-2] == 1
    seen = visible.transpose(-2, -1) if one else visible.any(dim=-2).unsqueeze(-1)
    if seen.dim() == 4 and seen.shape[1] not in (1, heads):
        seen = seen.unflatten(1, (heads, -1)).any(dim=2)
    return seen.logical_not()


def _weights(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    blind: Tensor | None,
    scale: float | None,
    dropout_p: float,
) -> Tensor:
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0
    if key.shape[-3] != query.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    scores = (query * scale) @ key.transpose(-2, -1)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(mask.logical_not(), -math.inf)
    elif mask is not None:
        scores = scores + mask.to(scores.dtype)
    weights = scores.softmax(dim=-1)
    if blind is not None:
        weights = weights.masked_fill(blind, 0.0)
    return F.dropout(weights, dropout_p) if dropout_p != 0.0 else weights


def _dropout(input: Tensor, p: float, seed: Tensor | None) -> Tensor:
    """On CPU tensors the elements that every backend drops for this seed; elsewhere, and in exported
    programs, PyTorch's own dropout, which is one kernel and has its generator's pattern."""
    if not input.is_cpu or is_exporting():
        return F.dropout(input, p)
    if 0.0 < p < 1.0 and input.is_cpu and input.dtype in _NATIVE and _native.module is not None:
        return torch.ops.transformer_fast.cpu_dropout(input, p, seed)  # type: ignore[no-any-return]
    return reference.dropout(input, p, seed)


def feed_forward(
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str | Callable[[Tensor], Tensor],
    dropout_p: float,
    seed: Tensor | None,
) -> Tensor:
    hidden = reference.linear(input, weight1, bias1, activation, None)
    if dropout_p != 0.0:
        hidden = _dropout(hidden, dropout_p, seed)
    return F.linear(hidden, weight2, bias2)


def cross_entropy(
    input: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
) -> Tensor:
    if label_smoothing != 0.0 and is_exporting():  # which exporters to ONNX drop, or refuse
        return reference.cross_entropy(input, target, ignore_index, label_smoothing)
    # For half types PyTorch rounds the log-probabilities.
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    if (
        wide.requires_grad
        and torch.is_grad_enabled()
        and not small.ignores_no_nan(wide, target, ignore_index)
    ):
        wide = wide.masked_fill((target == ignore_index).unsqueeze(1), 0.0)
    return F.cross_entropy(
        wide,
        target,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )


def _linear_losses(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    return cross_entropy(F.linear(input, weight, bias), target, ignore_index, label_smoothing)


def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    summed: bool = False,
) -> Tensor:
    if is_exporting():
        return _linear_losses(input, weight, bias, target, ignore_index, label_smoothing)
    return reference.in_parts(
        "torch", input, weight, bias, target, ignore_index, label_smoothing, summed
    )


def _refuse_attention(call: Call) -> str | None:
    if not call.tensors[0].is_cpu:  # type: ignore[union-attr]
        return None
    if call.mask is not None or call.key_lengths is not None or call.is_causal:
        return (
            "PyTorch lets NaN at hidden places through, and what a row with nothing to attend to "
            "gives depends on its path, so on CPU tensors it takes unmasked calls only"
        )
    if call.need_weights:
        return "PyTorch's fused attention returns no weights"
    if call.dropout_p != 0.0:
        return "PyTorch's attention drops other weights than all backends do on CPU tensors"
    return None


def _refuse_layer_norm(call: Call) -> str | None:
    x = call.tensors[0]
    assert x is not None
    if call.needs_grad and x.device.type == "cpu" and x.dtype in (torch.float16, torch.bfloat16):
        return "PyTorch's CPU backward keeps half types' statistics in the half type"
    return None


def _keep_dropout(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.p, seed = inputs
    ctx.save_for_backward(seed)


def _dropout_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (seed,) = ctx.saved_tensors
    return torch.ops.transformer_fast.cpu_dropout(grad, ctx.p, seed), None, None


def _register() -> None:
    if _native.module is not None:
        torch.library.register_autograd(
            "transformer_fast::cpu_dropout", _dropout_backward, setup_context=_keep_dropout
        )
    reference.register_losses("torch", _linear_losses)
    names = frozenset({None, *reference.ACTIVATIONS})
    for kernel in (
        Kernel("layer_norm", "torch", layer_norm, gradients=True, refuses=_refuse_layer_norm),
        Kernel(
            "add_layer_norm",
            "torch",
            add_layer_norm,
            gradients=True,
            dropout=True,
            refuses=_refuse_layer_norm,
        ),
        Kernel(
            "attention",
            "torch",
            attention,
            gradients=True,
            mask_gradient=True,
            query_lengths=True,
            dropout=True,
            refuses=_refuse_attention,
        ),
        # The reference is made of PyTorch's products and activations already.
        Kernel("linear", "torch", reference.linear, gradients=True, activations=names),
        Kernel(
            "feed_forward",
            "torch",
            feed_forward,
            gradients=True,
            dropout=True,
            activations=names,
        ),
        Kernel("cross_entropy", "torch", cross_entropy, gradients=True),
        Kernel("linear_cross_entropy", "torch", linear_cross_entropy, gradients=True),
    ):
        register(kernel)


_register()
