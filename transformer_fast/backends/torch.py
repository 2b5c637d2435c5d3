"""PyTorch's own fused ops, for calls on which they are the fastest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _native, fast_path, reference
from .._context import is_exporting, settings
from ..dispatch import Call, Kernel, register, unpacked
from ..ops.arguments import (
    AttentionArguments,
    CrossEntropyArguments,
    FeedForwardArguments,
    LinearCrossEntropyArguments,
)
from ..ops.attention import with_query_lengths
from ..ops.chunked_loss import chunked_loss, register_losses
from ..ops.cross_entropy import BACKWARD, FORWARD, cross_entropy_on
from ..ops.layer_norm import NORMS, behind_sum
from ..ops.operator import DROPOUT

#: True if our CPU kernels are missing: then this backend need not match their dropout patterns and NaN
#: handling, and PyTorch's ops are faster than the reference.
_ALONE = _native.module is None

#: Dtypes that the CPU operator of dropout supports.
_NATIVE = (torch.float32, torch.bfloat16, torch.float16)


def _attention(arguments: AttentionArguments) -> tuple[Tensor, Tensor | None]:
    """Computes attention; fully masked rows become zero without a device synchronization.

    Keys and values that are masked for all queries, by ``key_lengths`` or the mask, are zeroed. NaN
    in other masked keys may reach the results, as in PyTorch.
    """
    query, key, value, attn_mask, key_lengths, is_causal, scale, dropout_p, *_ = arguments
    need_weights = arguments.need_weights
    hidden = _padding(query, key, attn_mask, key_lengths)
    if hidden is not None:
        rows = hidden.transpose(-2, -1)
        key, value = key.masked_fill(rows, 0.0), value.masked_fill(rows, 0.0)
    is_bool = attn_mask is None or attn_mask.dtype == torch.bool
    only_padding = is_bool and (attn_mask is None or _is_padding(attn_mask, key))
    mask, blind = attn_mask, None
    if hidden is not None and only_padding:
        # Finite, so that a fully masked query attends to zeroed keys and values, which gives zeros
        # and no gradients. For other queries e^-1e30 is 0, and so is e^-60000.
        far = -6e4 if query.dtype == torch.float16 else -1e30
        mask = torch.zeros_like(hidden, dtype=query.dtype).masked_fill_(hidden, far)
        if is_causal:
            future = mask.new_full((query.shape[-2], key.shape[-2]), -math.inf).triu_(1)
            mask, is_causal = mask + future, False
        blind = hidden if need_weights else None
    elif attn_mask is not None or (is_causal and need_weights):
        # Fully masked queries attend to all keys, and their results are zeroed afterwards: so no
        # implementation of PyTorch produces NaN in the gradients.
        visible: Any = reference.visible_places(query, key, attn_mask, key_lengths, is_causal)
        seen = visible.any(dim=-1, keepdim=True)
        blind = seen.logical_not()
        if attn_mask is None or is_bool:
            mask = visible == seen
        else:
            if is_causal or key_lengths is not None:
                attn_mask = torch.where(visible, attn_mask, -math.inf)
            mask = attn_mask.masked_fill(blind, 0.0)
        is_causal = False
    gqa = arguments.enable_gqa and bool(
        key.shape[-3] != query.shape[-3]
    )  # `bool`: shapes are tensors in torch.jit.trace
    if gqa and is_exporting():  # the TorchScript ONNX exporter has no GQA
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


attention = with_query_lengths(_attention)


def _is_padding(mask: Tensor, key: Tensor) -> bool:
    """True if a mask is the same for all queries, and for the heads that share keys."""
    return mask.dim() == 4 and mask.shape[-2] == 1 and mask.shape[1] in (1, key.shape[1])


def _padding(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, key_lengths: Tensor | None
) -> Tensor | None:
    """Returns a bool (B, 1 or H, 1, S), True at keys that are masked for all queries; None: no
    mask."""
    if attn_mask is not None and not _is_padding(attn_mask, key):
        attn_mask = None
    visible = reference.visible_places(query, key, attn_mask, key_lengths, False)
    return None if visible is None else visible.logical_not()


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
    """Applies dropout. On CPU tensors it drops the elements that the CPU kernels drop for this
    seed. On other devices, in exported programs and without CPU kernels it is PyTorch's dropout,
    which is one kernel and draws its pattern from PyTorch's generator."""
    if _ALONE or not input.is_cpu or is_exporting():
        return F.dropout(input, p)
    if 0.0 < p < 1.0 and input.dtype in _NATIVE:
        return DROPOUT.of["cpu"](input, p, seed)  # type: ignore[no-any-return]
    return reference.dropout(input, p, seed)


def feed_forward(arguments: FeedForwardArguments) -> Tensor:
    input, weight1, bias1, weight2, bias2, activation, dropout_p, seed = arguments
    # Not `torch._addmm_activation`: cuBLASLt selects a kernel by shape and alignment, some versions'
    # ReLU makes 0 of NaN, and the GELU of some kernels is tanh.approx also in float32, so that a
    # check on one input does not hold for another shape.
    hidden = reference.linear(input, weight1, bias1, activation, None)
    if dropout_p != 0.0:
        hidden = _dropout(hidden, dropout_p, seed)
    return F.linear(hidden, weight2, bias2)


def cross_entropy(arguments: CrossEntropyArguments) -> Tensor:
    if is_exporting():
        input, target, ignore_index, label_smoothing = arguments
        if label_smoothing != 0.0:  # ONNX exporters drop it, or raise
            return reference.cross_entropy(*arguments)
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        wide = wide.movedim(-1, 1)
        return F.cross_entropy(wide, target, ignore_index=ignore_index, reduction="none")
    return _cross_entropy(arguments)


def _cross_entropy_forward(
    input: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Returns (losses, log-probabilities), both in at least float32."""
    wide = torch.promote_types(input.dtype, torch.float32)
    log_p = torch.log_softmax(input, dim=-1, dtype=wide)
    losses = F.nll_loss(log_p, target, ignore_index=ignore_index, reduction="none")
    if label_smoothing != 0.0:
        mean = log_p.mean(dim=-1).masked_fill(target == ignore_index, 0.0)
        losses = (1.0 - label_smoothing) * losses - label_smoothing * mean
    return losses, log_p


def _cross_entropy_backward(
    grad: Tensor,
    input: Tensor,
    target: Tensor,
    log_p: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    """Returns ``grad * (p - (1 - s) * (v == target) - s / V)``; reads log p once.

    The derivative of ELU is e^x for x <= 0, so its backward gives ``grad * p``. For NaN it gives
    ``grad``, which is 0 in ignored rows and NaN in other rows that hold NaN; vectorized CPU code,
    which gives NaN, gets none from ignored rows.
    """
    ignored = target == ignore_index
    place = target.masked_fill(ignored, 0)[:, None]
    log_p_target = log_p.gather(1, place)
    grad = torch.where(log_p_target.isnan(), log_p_target, grad[:, None])
    grad = grad.masked_fill(ignored[:, None], 0.0)
    if log_p.is_cpu and not fast_path.ignores_no_nan(input, target, ignore_index):
        log_p = log_p.masked_fill(ignored[:, None], 0.0)
    share = label_smoothing / input.shape[1]
    found = torch.empty_like(input, memory_format=torch.contiguous_format)
    wide = found if share == 0.0 else torch.empty_like(log_p)
    torch.ops.aten.elu_backward.grad_input(grad, 1, 1, 1, False, log_p, grad_input=wide)
    if share != 0.0:
        torch.sub(wide, grad * share, out=found)
    # expm1 avoids cancellation: for p near 1, p - 1 would lose all significant bits.
    at_target = torch.expm1(log_p_target).add_(label_smoothing - share).mul_(grad)
    at_target = at_target.masked_fill(ignored[:, None], 0.0)
    return found.scatter_(1, place, at_target.to(found.dtype))


FORWARD.of["torch"], BACKWARD.of["torch"] = _cross_entropy_forward, _cross_entropy_backward
_cross_entropy = cross_entropy_on("torch")


def linear_cross_entropy(arguments: LinearCrossEntropyArguments) -> Tensor:
    if is_exporting():
        logits = F.linear(*arguments[:3])
        return cross_entropy(CrossEntropyArguments(logits, *arguments[3:6]))
    return chunked_loss("torch", arguments)


def _linear_cross_entropy_remark(call: Call) -> str | None:
    if _ALONE or settings.current.backend is not None or not call.tensors[0].is_cpu:
        return None
    return "it is small: a linear layer, on its own backend, and PyTorch's loss"


def _refuse_attention(call: Call) -> str | None:
    given = call.arguments
    if _ALONE or not given.query.is_cpu:
        return None
    if given.attn_mask is not None or given.key_lengths is not None or given.is_causal:
        return (
            "used only for calls without a mask, because PyTorch lets NaNs through masked positions "
            "and treats fully masked rows inconsistently"
        )
    if given.need_weights:
        return "PyTorch's fused attention returns no weights"
    if given.dropout_p != 0.0:
        return "PyTorch's attention draws another dropout pattern than this package's backends"
    return None


def _refuse_layer_norm(call: Call) -> str | None:
    x = call.tensors[0]
    if _ALONE:
        return None
    if call.needs_grad and x.device.type == "cpu" and x.dtype in (torch.float16, torch.bfloat16):
        return "PyTorch's backward keeps the statistics in low precision on the CPU"
    return None


def _drops_as_torch(call: Call) -> bool:
    """True if dropout uses PyTorch's generator: attention, all ops on GPUs, exported programs."""
    return call.op == "attention" or not call.tensors[0].is_cpu or is_exporting()


def _keep_dropout(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.p, seed = inputs
    ctx.save_for_backward(seed)


def _dropout_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (seed,) = ctx.saved_tensors
    return DROPOUT.of["cpu"](grad, ctx.p, seed), None, None


def _norms() -> Iterator[Kernel]:
    formulas = {op: norm.pytorch for op, norm in NORMS.items()}
    # PyTorch has no op for these: the reference's formula, with `_dropout`.
    formulas[reference.ANNOTATED[0]] = reference.annotated_layer_norm
    for op, formula in formulas.items():
        refuses = _refuse_layer_norm if formula is F.layer_norm else None
        yield Kernel(op, "torch", unpacked(formula), refuses=refuses)
        behind = unpacked(behind_sum(formula, _dropout))
        yield Kernel(f"add_{op}", "torch", behind, refuses=refuses)


def _register() -> None:
    if _native.module is not None:
        torch.library.register_autograd(
            torch.ops.transformer_fast.dropout.cpu, _dropout_backward, setup_context=_keep_dropout
        )
    linear = unpacked(reference.linear)
    register_losses("torch", linear, cross_entropy)
    names = frozenset({None, *reference.ACTIVATIONS})
    for kernel in (
        *_norms(),
        Kernel(
            "attention",
            "torch",
            attention,
            mask_gradient=True,
            query_lengths=True,
            refuses=_refuse_attention,
        ),
        # The reference consists of PyTorch's products and activations, so it is used as it is.
        Kernel("linear", "torch", linear),
        Kernel("feed_forward", "torch", feed_forward),
        Kernel("cross_entropy", "torch", cross_entropy),
        Kernel(
            "linear_cross_entropy",
            "torch",
            linear_cross_entropy,
            remark=_linear_cross_entropy_remark,
        ),
    ):
        register(
            replace(
                kernel,
                gradients=True,
                dropout=True,
                drops_as_torch=_drops_as_torch,
                activations=names,
            )
        )


_register()
