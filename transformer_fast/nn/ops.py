"""Drop-in modules of `torch.nn` that are one op each."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import dispatch, fast_path
from .._context import is_observed, is_traced, settings
from ..functional.cross_entropy import cross_entropy
from ..functional.layer_norm import layer_norm, rms_norm
from ..functional.linear import linear
from ..ops.arguments import LayerArguments
from ..ops.autograd import differentiates_again, wants_grad
from .drop_in import DropIn, by_torch, pytorchs_forward, runs_torch_forward
from .int8 import INT8, run_linear

__all__ = ["CrossEntropyLoss", "Embedding", "LayerNorm", "Linear", "RMSNorm"]

# `drop_in.is_patched` written out: to call it would take a twentieth of a small op's time.
_KINDS = (
    torch.nn.Linear, torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.Embedding,
    torch.nn.CrossEntropyLoss,
)  # fmt: skip
_LINEAR, _LAYER_NORM, _RMS_NORM, _EMBEDDING, _LOSS = _KINDS
_LINEAR_FORWARD, _LAYER_NORM_FORWARD, _RMS_NORM_FORWARD, _EMBEDDING_FORWARD, _LOSS_FORWARD = map(
    pytorchs_forward, _KINDS
)


class Linear(DropIn, torch.nn.Linear):
    """`torch.nn.Linear`, run by `transformer_fast.functional.linear`.

    ``y = x W^T + b`` over the last dimension: (*, in_features) to (*, out_features), W of shape
    (out_features, in_features). Arguments, attributes and state_dict are PyTorch's.

    Source: "Attention Is All You Need", sections 3.2.2 (projections) and 3.4.
    """

    def forward(self, input: Tensor) -> Tensor:
        # Module.__getattr__ would take a tenth of a small op's time.
        parameters = self._parameters
        try:
            weight, bias = parameters["weight"], parameters["bias"]
        except KeyError:  # parametrised by torch.nn.utils
            weight, bias = self.weight, self.bias  # type: ignore[assignment]
        if INT8 in self.__dict__:
            return run_linear(input, self.__dict__[INT8].of(self, "weight"), bias)
        if (
            type(input) is not Tensor and runs_torch_forward(input, _LINEAR)
        ) or _LINEAR.forward is not _LINEAR_FORWARD:
            return by_torch(self, super().forward, input)
        return linear(input, weight, bias)  # type: ignore[arg-type]


class LayerNorm(DropIn, torch.nn.LayerNorm):
    """`torch.nn.LayerNorm`, run by `transformer_fast.functional.layer_norm`.

    ``y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over the trailing
    ``normalized_shape``, with the biased variance and fp32 statistics for bfloat16 and float16.
    Arguments, attributes and state_dict are PyTorch's.

    Source: Ba, Kiros, Hinton 2016; "Attention Is All You Need", section 3.1.
    """

    def forward(self, input: Tensor) -> Tensor:
        # Module.__getattr__ would take a tenth of a small op's time.
        parameters = self._parameters
        try:
            weight, bias = parameters["weight"], parameters["bias"]
        except KeyError:  # parametrised by torch.nn.utils
            weight, bias = self.weight, self.bias
        if (
            type(input) is not Tensor and runs_torch_forward(input, _LAYER_NORM)
        ) or _LAYER_NORM.forward is not _LAYER_NORM_FORWARD:
            return by_torch(self, super().forward, input)
        return layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class RMSNorm(DropIn, torch.nn.RMSNorm):
    """`torch.nn.RMSNorm`, run by `transformer_fast.functional.rms_norm`.

    ``y = x / sqrt(mean(x^2) + eps) * weight`` over the trailing ``normalized_shape``, with fp32
    statistics for bfloat16 and float16. Arguments, attributes and state_dict are PyTorch's.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
    """

    def forward(self, x: Tensor) -> Tensor:
        if (
            (type(x) is not Tensor and runs_torch_forward(x, _RMS_NORM))
            or _RMS_NORM.forward is not _RMS_NORM_FORWARD
            or is_observed()
        ):
            return by_torch(self, super().forward, x)
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)


class _LookUp(torch.autograd.Function):
    """PyTorch's look-up with our gradient of the table."""

    @staticmethod
    def forward(
        ctx: Any, kernel: dispatch.Kernel, table: Tensor, tokens: Tensor, padding: int
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.kernel, ctx.rows, ctx.padding = kernel, table.shape[0], padding
        return torch.nn.functional.embedding(tokens, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:  # type: ignore[override]
        (tokens,) = ctx.saved_tensors
        if differentiates_again():  # only PyTorch's operator is differentiable
            found = torch.ops.aten.embedding_dense_backward(
                grad, tokens, ctx.rows, ctx.padding, False
            )
        else:
            found = ctx.kernel.function(grad, tokens, ctx.rows, ctx.padding)
        return None, found, None, None


class Embedding(DropIn, torch.nn.Embedding):
    """`torch.nn.Embedding`, with its own kernel for the gradient on the CPU.

    ``y[i] = table[tokens[i]]``: tokens (*), int64, to (*, embedding_dim). The gradient is a table of
    zeros except for the rows looked up, each of which is summed over its positions in order: bit for bit
    PyTorch's. The kernel supports float32 tables. ``sparse``, ``max_norm``, ``scale_grad_by_freq``, other
    dtypes, other devices, and calls traced by torch.compile or a torch.func transform run on PyTorch.
    Arguments, attributes and state_dict are PyTorch's.

    Source: "Attention Is All You Need", section 3.4.
    """

    def forward(self, input: Tensor) -> Tensor:
        # Module.__getattr__ would take a tenth of a small op's time.
        table, current = self._parameters.get("weight"), settings.current
        if (
            table is not None
            and type(input) is Tensor
            and _EMBEDDING.forward is _EMBEDDING_FORWARD
            and current.is_direct
            and current.falls_back
            and (
                table.numel() + 8 * input.numel() * table.shape[-1] < fast_path.EMBEDDING.below[1]
                or not (torch.is_grad_enabled() and table.requires_grad)
            )
        ):
            return F.embedding(
                input, table, self.padding_idx, self.max_norm, self.norm_type,
                self.scale_grad_by_freq, self.sparse,
            )  # fmt: skip
        if runs_torch_forward(input, _EMBEDDING):
            return by_torch(self, super().forward, input)
        kernel = self._kernel(input)
        if kernel is None:
            return super().forward(input)
        padding = -1 if self.padding_idx is None else self.padding_idx
        return _LookUp.apply(kernel, self.weight, input, padding)  # type: ignore[no-any-return,no-untyped-call]

    def _kernel(self, input: Tensor) -> dispatch.Kernel | None:
        """Returns the kernel of the table's gradient, or None if PyTorch computes it."""
        if not (
            type(input) is Tensor
            and input.dtype == torch.int64
            and input.is_cpu
            and not (self.sparse or self.scale_grad_by_freq or self.max_norm is not None)
            and not is_traced()
            and wants_grad(self.weight)
        ):
            return None
        return dispatch.find(dispatch.Call("embedding", (self.weight,), True, LayerArguments()))


class CrossEntropyLoss(DropIn, torch.nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss`, run by `transformer_fast.functional.cross_entropy`.

    ``(1 - s) * -log p[target] + s * mean of -log p`` with ``p = softmax(input)``, reduced over
    the targets that are not ``ignore_index``. Arguments and attributes are PyTorch's. Calls with class
    weights, or probabilities as target, run on PyTorch.

    Source: "Attention Is All You Need", section 5.4.
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        if (
            (type(input) is not Tensor and runs_torch_forward(input, _LOSS))
            or _LOSS.forward is not _LOSS_FORWARD
            or is_observed()
        ):
            return by_torch(self, super().forward, input, target)
        return cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )
