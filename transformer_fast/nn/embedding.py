"""Drop-in `torch.nn.Embedding`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import dispatch, fast_path
from ..autograd import wants_grad
from ..functional._pointwise import EMBEDDING_BACKWARD
from .drop_in import DropIn
from .tracing import by_torch, is_torchs


class _LookUp(torch.autograd.Function):
    """torch's look-up with our gradient of the table."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, tokens: Tensor, padding: int) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows, ctx.padding = table.shape[0], padding
        return torch.nn.functional.embedding(tokens, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (tokens,) = ctx.saved_tensors
        if grad.requires_grad and torch.is_grad_enabled():  # torch's can be differentiated again
            found = torch.ops.aten.embedding_dense_backward(
                grad, tokens, ctx.rows, ctx.padding, False
            )
        else:
            found = EMBEDDING_BACKWARD.of["cpu"](grad, tokens, ctx.rows, ctx.padding)
        return found, None, None


class Embedding(DropIn, torch.nn.Embedding):
    """`torch.nn.Embedding`, whose gradient comes from a kernel of ours on the CPU.

    ``y[i] = table[tokens[i]]``: tokens (*), int64, to (*, embedding_dim). Its gradient is a table of
    zeros but for the rows looked up, each the sum over its places in order: torch's numbers, bit for
    bit. The kernel takes float32 tables; ``sparse``, ``max_norm``, ``scale_grad_by_freq``, other
    dtypes, other devices, and calls that torch.compile or a transform of torch.func traces, are
    torch's. Arguments, attributes and state_dict are torch's.

    Source: "Attention Is All You Need", section 3.4.
    """

    def forward(self, input: Tensor) -> Tensor:
        # Module.__getattr__ takes a tenth of a small call.
        table = self._parameters.get("weight")
        grad = None if self.max_norm is not None else fast_path.plain(input, table)
        if (
            table is not None
            and grad is not None
            and (
                not grad
                or table.numel() + 8 * input.numel() * table.shape[-1]
                < fast_path.EMBEDDING.below[1]
            )
        ):
            padding = -1 if self.padding_idx is None else self.padding_idx
            return torch.embedding(table, input, padding, self.scale_grad_by_freq, self.sparse)
        if is_torchs(input):
            return by_torch(self, super().forward, input)
        if not self._has_kernel(input):
            return super().forward(input)
        padding = -1 if self.padding_idx is None else self.padding_idx
        return _LookUp.apply(self.weight, input, padding)  # type: ignore[no-any-return,no-untyped-call]

    def _has_kernel(self, input: Tensor) -> bool:
        return (
            type(input) is Tensor
            and input.dtype == torch.int64
            and input.is_cpu
            and not (self.sparse or self.scale_grad_by_freq or self.max_norm is not None)
            and not dispatch.is_traced()
            and wants_grad(self.weight)
            and dispatch.find(dispatch.Call("embedding", (self.weight,), True)) is not None
        )
