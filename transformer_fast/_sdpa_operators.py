"""PyTorch's fused attention operators, overridden by this package's kernels, for `enable_sdpa`.

PyTorch's autograd calls these operators and uses its own backward, which reads the log-sum-exp of each
row of scores (B, H, T). Shapes and memory layouts of the results are those of PyTorch's meta functions,
on which compiled programs rely. The output has the query's order of dimensions in memory, as
PyTorch's kernels return it. For fully masked rows, each backward expects another log-sum-exp, with
which it computes gradients of 0.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import dispatch
from .dispatch import Call, make_call, select
from .ops.arguments import AttentionArguments
from .ops.attention import TRAINING

_log = logging.getLogger("transformer_fast")

#: Backends whose kernels may replace PyTorch's.
BACKENDS = ("cpu", "triton")

#: By dispatch key: the operators that F.scaled_dot_product_attention may call.
OPERATORS: dict[str, tuple[str, ...]] = {
    "CPU": ("_scaled_dot_product_flash_attention_for_cpu",),
    "CUDA": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    ),
}


class Override:
    """Overrides PyTorch's kernels for one dispatch key, until `remove`."""

    def __init__(
        self, device: str, named: str | None, theirs: dict[str, Any] | None = None
    ) -> None:
        """``named``: the backend that the user named. ``theirs``: PyTorch's kernels; None: looked up."""
        self.device, self.named = device, named
        if theirs is None:
            names = OPERATORS[device]
            theirs = {name: torch.library.get_kernel(f"aten::{name}", device) for name in names}
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device))
        self._logged: set[str] = set()
        self._library = torch.library.Library("aten", "IMPL", device)
        with warnings.catch_warnings():
            # PyTorch warns that a kernel is overridden.
            warnings.simplefilter("ignore", UserWarning)
            for name, kernel in theirs.items():
                run_theirs = partial(kernel.call_boxed, keys)
                self._library.impl(name, self._operator(name, run_theirs), device)

    def remove(self) -> None:
        self._library._destroy()

    def _operator(self, name: str, run_theirs: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function that replaces PyTorch's kernel of the operator ``name``."""
        results_of, has_bias = _RESULTS[name]
        first = 2 if has_bias else 0

        def run(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **kwargs: Any) -> Any:
            mask, wants_lse = rest[:2] if has_bias else (kwargs.get("attn_mask"), True)
            options = rest[first:] + _DEFAULTS[len(rest) - first :]
            dropout_p, is_causal, return_debug_mask = options
            backend = None
            if not return_debug_mask:
                backend = self._choose(query, key, value, dropout_p, is_causal, mask)
            if backend is None:
                return run_theirs(query, key, value, *rest, **kwargs)
            scale = kwargs.get("scale")
            output, lse = attend(backend, query, key, value, mask, is_causal, scale)
            return results_of(output, lse, key.shape[2], wants_lse)

        return run

    def _choose(
        self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool,
        mask: Tensor | None,
    ) -> str | None:  # fmt: skip
        """Returns the backend that runs the call; None if PyTorch's kernel does."""
        arguments = AttentionArguments(query, key, value, mask, None, is_causal, None, dropout_p)
        call = make_call(arguments, needs_grad=False)  # the backward is PyTorch's
        named = dispatch.named_backend()
        if named is None and self.named is not None and runs_on(self.named, query.device.type):
            named = self.named
        try:
            backend = select(call, named).backend
        except NotImplementedError:  # the named backend does not support the call
            backend = ""
        # PyTorch's backward would drop other elements than our forward.
        fits = dropout_p == 0.0 and value.shape[-1] == query.shape[-1]
        if fits and backend in BACKENDS and query.numel() > 0 and key.numel() > 0:
            return backend
        self._log_reason(call, named)
        return None

    def _log_reason(self, call: Call, named: str | None) -> None:
        """Logs why PyTorch's kernel runs, once for each reason."""
        if not _log.isEnabledFor(logging.INFO):
            return
        reason = why_not_ours(call, named)
        if reason not in self._logged:
            self._logged.add(reason)
            _log.info("scaled_dot_product_attention runs on PyTorch's own kernel: %s", reason)


# The results of each operator, from the output (B, H, T, D), the log-sum-exp (B, H, T), the number of
# keys, and whether the log-sum-exp is requested.


def _cpu_results(output: Tensor, lse: Tensor, *_: Any) -> tuple[Tensor, ...]:
    batch, heads, length = lse.shape
    rows = lse.new_empty((batch, length, heads)).transpose(1, 2).copy_(lse)
    # The backward computes the weights of fully masked rows as exp(-inf - 0).
    return output, rows.masked_fill_(rows == -math.inf, 0.0)


def _flash_results(output: Tensor, lse: Tensor, keys: int, *_: Any) -> tuple[Any, ...]:
    state = torch.zeros(2, dtype=torch.uint64, device=output.device)
    seed, debug_mask = state.new_zeros(()), output.new_empty(0)
    return output, lse, None, None, output.shape[2], keys, state, seed, debug_mask


def _efficient_results(
    output: Tensor, lse: Tensor, keys: int, wants_lse: bool
) -> tuple[Tensor, ...]:
    length = lse.shape[2]
    # Padded to a multiple of 32 with inf, which also stands for fully masked rows.
    padded = -(-length // 32) * 32 if wants_lse else 0
    rows = lse.new_full((*lse.shape[:2], padded), math.inf)
    if wants_lse:
        rows[..., :length] = lse.masked_fill(lse == -math.inf, math.inf)
    joined = output.transpose(1, 2).contiguous().transpose(1, 2)
    return joined, rows, *_no_dropout(output)


def _cudnn_results(output: Tensor, lse: Tensor, keys: int, *_: Any) -> tuple[Any, ...]:
    rows = lse.masked_fill(lse == -math.inf, math.inf).unsqueeze(-1)
    return output, rows, None, None, output.shape[2], keys, *_no_dropout(output), None


def _no_dropout(like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the random seed and offset of a call without dropout, which the backward ignores."""
    zero = torch.zeros((), dtype=torch.int64, device=like.device)
    return zero, zero.clone()


#: By operator: the function above, and whether ``attn_bias, compute_log_sumexp`` follow the value.
_RESULTS: dict[str, tuple[Callable[[Tensor, Tensor, int, bool], tuple[Any, ...]], bool]] = {
    "_scaled_dot_product_flash_attention_for_cpu": (_cpu_results, False),
    "_scaled_dot_product_flash_attention": (_flash_results, False),
    "_scaled_dot_product_efficient_attention": (_efficient_results, True),
    "_scaled_dot_product_cudnn_attention": (_cudnn_results, True),
}
#: Defaults of ``dropout_p, is_causal, return_debug_mask``, the last positional arguments.
_DEFAULTS = (0.0, False, False)


def why_not_ours(call: Call, named: str | None) -> str:
    """Returns the reasons why our kernels do not run the call, in one line."""
    lines = []
    for kernel in dispatch.kernels("attention"):
        reasons = dispatch.why_not(kernel, call)
        if kernel.backend != named and (reason := dispatch.why_unproven(kernel, call)) is not None:
            reasons.append(reason)
        if kernel.backend in BACKENDS and reasons:
            lines.append(f"{kernel.backend}: {'; '.join(reasons)}")
    if named is not None and named not in BACKENDS:
        lines.insert(0, f"use_backend selects {named!r}")
    if call.arguments.dropout_p != 0.0:
        lines.insert(0, "it has dropout, which PyTorch's backward has to repeat")
    return ". ".join(lines) or "it is empty, or its values are of another size than its queries"


def runs_on(backend: str, device: str) -> bool:
    """True if the backend has an attention kernel for tensors on this type of device."""
    return any(
        kernel.backend == backend and (not kernel.devices or device in kernel.devices)
        for kernel in dispatch.kernels("attention")
    )


def attend(
    backend: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the output, and the log-sum-exp (B, H, T) in fp32; -inf in fully masked rows."""
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    output, _, row_max, row_sum = TRAINING.of[backend](
        query, key, value, mask, None, is_causal, scale, 0.0, None, False
    )
    return output, row_max + row_sum.log()
