"""`F.scaled_dot_product_attention` of all code in this process, on our CPU kernel.

PyTorch lets providers of attention put their kernel in place of its own flash attention. What
arrives there has been checked by PyTorch already, and its autograd stays in charge: it asks for the
output and for the log-sum-exp of every row of scores, and its own backward works with them.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention as _registry

from . import _native
from .dispatch import Call, select

NAME = "transformer_fast"
_OPERATOR = "_scaled_dot_product_flash_attention_for_cpu"
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class _Override:
    """Our kernel in place of PyTorch's, until `remove`."""

    def __init__(self) -> None:
        self._theirs = torch.library.get_kernel(f"aten::{_OPERATOR}", "CPU")
        self._library = torch.library.Library("aten", "IMPL", "CPU")
        with warnings.catch_warnings():
            # PyTorch warns that a kernel is replaced; that is what was asked for.
            warnings.simplefilter("ignore", UserWarning)
            self._library.impl(_OPERATOR, self.forward)

    def remove(self) -> None:
        self._library._destroy()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Any:
        if not _is_ours(query, key, value, dropout_p, is_causal, attn_mask):
            return self._theirs.call_boxed(
                _CPU, query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )
        return _attention(query, key, value, attn_mask, is_causal, scale)


def _is_ours(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    attn_mask: Tensor | None,
) -> bool:
    call = Call(
        "attention",
        (query, key, value),
        needs_grad=False,  # PyTorch's backward takes what we return
        dropout_p=dropout_p,
        mask=attn_mask,
        is_causal=is_causal,
    )
    try:
        return select(call).backend == "cpu"
    except NotImplementedError:  # a backend is forced that cannot: PyTorch's can
        return False


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0
    if attn_mask is not None:
        attn_mask = attn_mask.reshape((1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape))
    output, _, shift, norm = torch.ops.transformer_fast.cpu_attention(
        query, key, value, attn_mask, None, is_causal, scale, 0.0, None, False
    )
    # P = exp(scores - shift) norm, so the log of the sum of exp(scores) is shift - log(norm).
    lse = torch.where(norm == 0.0, -math.inf, shift - norm.log())
    # The layouts that PyTorch's operator promises to compiled programs.
    promised = torch.empty_like(query)
    if promised.stride() != output.stride():
        output = promised.copy_(output)
    batch, heads, length = lse.shape
    rows = torch.empty((batch, length, heads), dtype=torch.float32).transpose(1, 2).copy_(lse)
    # PyTorch has 0 for rows that see nothing: their weights, exp(-inf - 0), then are 0 in backward.
    return output, rows.masked_fill_(rows == -math.inf, 0.0)


_before: str | None = None


def enable_sdpa() -> None:
    """Run `torch.nn.functional.scaled_dot_product_attention` on our CPU kernel from now on.

    For code that nobody wants to touch: everything that calls PyTorch's function, in this process,
    eager or compiled, with or without gradients. Forward runs on our kernel, backward on
    PyTorch's. What our kernel does not take (`transformer_fast.explain` tells) runs on PyTorch's as
    before, and so does what never gets to PyTorch's fused CPU attention: dropout, a mask that needs
    a gradient, 3-D inputs, values of another size than queries, CUDA tensors. A second call changes
    nothing.

    Raises:
        RuntimeError: the CPU kernels were not built, or this PyTorch has no such registry.
    """
    global _before
    if _native.why_not is not None:
        raise RuntimeError(f"enable_sdpa: there is no CPU kernel: {_native.why_not}")
    if not hasattr(_registry, "register_flash_attention_impl"):
        raise RuntimeError(
            f"enable_sdpa: torch {torch.__version__} has no registry of attention kernels "
            "(torch.nn.attention.register_flash_attention_impl)"
        )
    current = _registry.current_flash_attention_impl()
    if current == NAME:
        return
    _registry.register_flash_attention_impl(NAME, register_fn=_Override)
    _registry.activate_flash_attention_impl(NAME)
    _before = current


def disable_sdpa() -> None:
    """Take `enable_sdpa` back; whatever provider was active before it is active again.

    Without `enable_sdpa`, or after another provider took its place, this does nothing.
    """
    global _before
    if getattr(_registry, "current_flash_attention_impl", lambda: None)() != NAME:
        return
    _registry.restore_flash_attention_impl()
    if _before is not None:
        _registry.activate_flash_attention_impl(_before)
        _before = None
