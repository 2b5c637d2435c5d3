"""PyTorch's fused attention operators, for `enable_sdpa`: who runs a call, and what is promised.

PyTorch's autograd stays in charge: it asks an operator for the output and for the log-sum-exp of
every row of scores, and its own backward works with them. Shapes and layouts are those of
PyTorch's meta functions, on which compiled programs rely; our kernels' outputs have that of the
query, as theirs. Rows that see nothing have the
log-sum-exp with which each backward gives them zeros.
"""

from __future__ import annotations

import logging
import math
import warnings
from typing import Any

import torch
from torch import Tensor

from . import dispatch
from .dispatch import Call, select
from .ops.attention import TRAINING

_log = logging.getLogger("transformer_fast")

#: Backends whose kernels may replace PyTorch's.
BACKENDS = ("cpu", "triton")

#: For each device, the operators that F.scaled_dot_product_attention may arrive at.
OPERATORS: dict[str, tuple[str, ...]] = {
    "CPU": ("_scaled_dot_product_flash_attention_for_cpu",),
    "CUDA": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    ),
}


class Override:
    """Ours in front of PyTorch's kernels for one device, until `remove`."""

    def __init__(
        self, device: str, named: str | None, theirs: dict[str, Any] | None = None
    ) -> None:
        """``named``: the backend the user named; ``theirs``: PyTorch's kernels, if not as found."""
        self.device, self.named = device, named
        if theirs is None:
            names = OPERATORS[device]
            theirs = {name: torch.library.get_kernel(f"aten::{name}", device) for name in names}
        self._theirs = theirs
        self._keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device))
        self._told: set[str] = set()
        self._library = torch.library.Library("aten", "IMPL", device)
        with warnings.catch_warnings():
            # PyTorch warns that a kernel is replaced; that is what was asked for.
            warnings.simplefilter("ignore", UserWarning)
            for name in theirs:
                self._library.impl(name, getattr(self, name), device)

    def remove(self) -> None:
        self._library._destroy()

    def _scaled_dot_product_flash_attention_for_cpu(
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
        backend = self._choose(query, key, value, dropout_p, is_causal, attn_mask)
        if backend is None:
            return self._run_theirs(
                "_scaled_dot_product_flash_attention_for_cpu", query, key, value, dropout_p,
                is_causal, attn_mask=attn_mask, scale=scale,
            )  # fmt: skip
        output, lse = attend(backend, query, key, value, attn_mask, is_causal, scale)
        batch, heads, length = lse.shape
        rows = lse.new_empty((batch, length, heads)).transpose(1, 2).copy_(lse)
        # PyTorch has 0 for rows that see nothing: their weights are exp(-inf - 0) in backward.
        return output, rows.masked_fill_(rows == -math.inf, 0.0)

    def _scaled_dot_product_flash_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        backend = None
        if not return_debug_mask:
            backend = self._choose(query, key, value, dropout_p, is_causal, None)
        if backend is None:
            return self._run_theirs(
                "_scaled_dot_product_flash_attention", query, key, value, dropout_p, is_causal,
                return_debug_mask, scale=scale,
            )  # fmt: skip
        output, lse = attend(backend, query, key, value, None, is_causal, scale)
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)
        return (
            output, lse, None, None, query.shape[2], key.shape[2], state,
            state.new_zeros(()), query.new_empty(0),
        )  # fmt: skip

    def _scaled_dot_product_efficient_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: Tensor | None,
        compute_log_sumexp: bool,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        backend = self._choose(query, key, value, dropout_p, is_causal, attn_bias)
        if backend is None:
            return self._run_theirs(
                "_scaled_dot_product_efficient_attention", query, key, value, attn_bias,
                compute_log_sumexp, dropout_p, is_causal, scale=scale,
            )  # fmt: skip
        output, lse = attend(backend, query, key, value, attn_bias, is_causal, scale)
        length = lse.shape[2]
        # Padded to a multiple of 32; infinite there, and where a row sees nothing.
        padded = -(-length // 32) * 32 if compute_log_sumexp else 0
        rows = lse.new_full((*lse.shape[:2], padded), math.inf)
        if compute_log_sumexp:
            rows[..., :length] = lse.masked_fill(lse == -math.inf, math.inf)
        joined = output.transpose(1, 2).contiguous().transpose(1, 2)
        return joined, rows, *_no_dropout(query)

    def _scaled_dot_product_cudnn_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: Tensor | None,
        compute_log_sumexp: bool,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        backend = None
        if not return_debug_mask:
            backend = self._choose(query, key, value, dropout_p, is_causal, attn_bias)
        if backend is None:
            return self._run_theirs(
                "_scaled_dot_product_cudnn_attention", query, key, value, attn_bias,
                compute_log_sumexp, dropout_p, is_causal, return_debug_mask, scale=scale,
            )  # fmt: skip
        output, lse = attend(backend, query, key, value, attn_bias, is_causal, scale)
        rows = lse.masked_fill(lse == -math.inf, math.inf).unsqueeze(-1)
        return (
            output, rows, None, None, query.shape[2], key.shape[2],
            *_no_dropout(query), None,
        )  # fmt: skip

    def _run_theirs(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._theirs[name].call_boxed(self._keys, *args, **kwargs)

    def _choose(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float,
        is_causal: bool,
        mask: Tensor | None,
    ) -> str | None:
        """The backend that runs the call, or None: PyTorch's own kernel does."""
        call = Call(
            "attention",
            (query, key, value),
            needs_grad=False,  # PyTorch's backward takes what we return
            dropout_p=dropout_p,
            mask=mask,
            is_causal=is_causal,
        )
        named = dispatch.named_backend()
        if named is None and self.named is not None and runs_on(self.named, query.device.type):
            named = self.named
        try:
            backend = select(call, named).backend
        except NotImplementedError:  # a backend is named that cannot: PyTorch's can
            backend = ""
        # What another kernel drops, PyTorch's backward would not know.
        fits = dropout_p == 0.0 and value.shape[-1] == query.shape[-1]
        if fits and backend in BACKENDS and query.numel() > 0 and key.numel() > 0:
            return backend
        self._tell(call, named)
        return None

    def _tell(self, call: Call, named: str | None) -> None:
        """Log why PyTorch's kernel runs, once for each reason."""
        if not _log.isEnabledFor(logging.INFO):
            return
        told = why_not_ours(call, named)
        if told not in self._told:
            self._told.add(told)
            _log.info("scaled_dot_product_attention runs on PyTorch's own kernel: %s", told)


def why_not_ours(call: Call, named: str | None) -> str:
    """What speaks against each of our kernels, in one line."""
    told = []
    for kernel in dispatch.kernels("attention"):
        reasons = dispatch.why_not(kernel, call)
        if (
            kernel.backend != named
            and (unproven := dispatch.why_unproven(kernel, call)) is not None
        ):
            reasons.append(unproven)
        if kernel.backend in BACKENDS and reasons:
            told.append(f"{kernel.backend}: {'; '.join(reasons)}")
    if named is not None and named not in BACKENDS:
        told.insert(0, f"{named!r} is named")
    if call.dropout_p != 0.0:
        told.insert(0, "it has dropout, which PyTorch's backward has to repeat")
    return ". ".join(told) or "it is empty, or its values are of another size than its queries"


def runs_on(backend: str, device: str) -> bool:
    """Whether a backend has a kernel of attention for tensors of this kind of device."""
    return any(
        kernel.backend == backend and (not kernel.devices or device in kernel.devices)
        for kernel in dispatch.kernels("attention")
    )


def attend(
    backend: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """The output, and the log-sum-exp of the scores: (B, H, T) fp32, -inf where nothing is seen."""
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    output, _, row_max, row_sum = TRAINING.of[backend](
        query, key, value, mask, None, is_causal, scale, 0.0, None, False
    )
    return output, row_max + row_sum.log()


def _no_dropout(query: Tensor) -> tuple[Tensor, Tensor]:
    """Seed and offset, which nobody reads without dropout."""
    zero = torch.zeros((), dtype=torch.int64, device=query.device)
    return zero, zero.clone()
