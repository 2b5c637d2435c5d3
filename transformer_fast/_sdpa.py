"""`enable_sdpa`: runs `F.scaled_dot_product_attention` of the whole process on the CPU kernel.

Registers an override of PyTorch's fused operator for CPU tensors as a provider of PyTorch's flash
attention. PyTorch checks the arguments before it calls the operator, and uses its own backward, which
reads the log-sum-exp of each row of scores (B, H, T). Shapes and memory layouts of the results are those
of PyTorch's meta function, on which compiled programs rely. The output has the query's order of
dimensions in memory, as PyTorch's kernel returns it.
"""

from __future__ import annotations

import logging
import math
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention as _registry

from . import _native, dispatch
from .dispatch import Call, make_call, select
from .ops.arguments import AttentionArguments
from .ops.attention import TRAINING

_log = logging.getLogger("transformer_fast")

NAME = "transformer_fast"
OPERATOR = "_scaled_dot_product_flash_attention_for_cpu"


class _Override:
    """Overrides PyTorch's operator until `remove`. named: the backend that the user named."""

    def __init__(self, named: str | None) -> None:
        self.named = named
        self._logged: set[str] = set()
        theirs = torch.library.get_kernel(f"aten::{OPERATOR}", "CPU")
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
        self._run_theirs = partial(theirs.call_boxed, keys)
        self._library = torch.library.Library("aten", "IMPL", "CPU")
        with warnings.catch_warnings():
            # PyTorch warns that a kernel is overridden.
            warnings.simplefilter("ignore", UserWarning)
            self._library.impl(OPERATOR, self._run, "CPU")

    def remove(self) -> None:
        self._library._destroy()

    def _run(
        self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0,
        is_causal: bool = False, *, attn_mask: Tensor | None = None, scale: float | None = None,
    ) -> Any:  # fmt: skip
        if self._chooses_ours(query, key, value, dropout_p, is_causal, attn_mask):
            return attend(query, key, value, attn_mask, is_causal, scale)
        return self._run_theirs(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )

    def _chooses_ours(
        self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool,
        mask: Tensor | None,
    ) -> bool:  # fmt: skip
        arguments = AttentionArguments(query, key, value, mask, None, is_causal, None, dropout_p)
        call = make_call(arguments, needs_grad=False)  # the backward is PyTorch's
        named = dispatch.named_backend() or self.named
        try:
            backend = select(call, named).backend
        except NotImplementedError:  # the named backend does not support the call
            backend = ""
        # PyTorch's backward would drop other elements than our forward.
        fits = dropout_p == 0.0 and value.shape[-1] == query.shape[-1]
        if fits and backend == "cpu" and query.numel() > 0 and key.numel() > 0:
            return True
        self._log_reason(call, named)
        return False

    def _log_reason(self, call: Call, named: str | None) -> None:
        """Logs why PyTorch's kernel runs, once for each reason."""
        if not _log.isEnabledFor(logging.INFO):
            return
        reason = _why_not_ours(call, named)
        if reason not in self._logged:
            self._logged.add(reason)
            _log.info("scaled_dot_product_attention runs on PyTorch's own kernel: %s", reason)


def _why_not_ours(call: Call, named: str | None) -> str:
    """Returns the reasons why our kernel does not run the call, in one line."""
    lines = []
    if named not in (None, "cpu"):
        lines.append(f"use_backend selects {named!r}")
    for kernel in dispatch.kernels("attention"):
        if kernel.backend == "cpu" and (reasons := dispatch.why_not(kernel, call)):
            lines.append(f"cpu: {'; '.join(reasons)}")
    return ". ".join(lines) or "it is empty, or its values are of another size than its queries"


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the output, and the log-sum-exp (B, H, T) in fp32; 0 in fully masked rows.

    For these rows the backward computes the weights as exp(-inf - 0).
    """
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    output, _, row_max, row_sum = TRAINING.of["cpu"](
        query, key, value, mask, None, is_causal, scale, 0.0, None, False
    )
    lse = row_max + row_sum.log()
    batch, heads, length = lse.shape
    rows = lse.new_empty((batch, length, heads)).transpose(1, 2).copy_(lse)
    return output, rows.masked_fill_(rows == -math.inf, 0.0)


_before: str | None = None
_named: str | None = None


def enable_sdpa(backend: str | None = None) -> None:
    """Run `torch.nn.functional.scaled_dot_product_attention` on this package's CPU kernel from now on.

    For code that you cannot change: it affects every caller of PyTorch's function in this process,
    eager or compiled, with or without gradients. The forward runs on this package's kernel, the backward
    on PyTorch's. Calls that the kernel does not support run on PyTorch's as before;
    `transformer_fast.explain` and the log "transformer_fast" at level INFO give the reasons. Calls
    that PyTorch does not run on its fused attention stay on PyTorch, too: those with dropout, a mask
    that needs a gradient, 3-D inputs on CPUs before PyTorch 2.14, or values of another size than
    queries. A second call with the same backend changes nothing. Tensors on GPUs stay on PyTorch.

    Args:
        backend: None: the dispatcher chooses for each call. "cpu": our kernel runs all calls that it
            supports, validated or not. `use_backend` and TRANSFORMER_FAST_BACKEND take precedence.

    Raises:
        ValueError: the backend has no such kernel.
        RuntimeError: the CPU kernels were not built, or this PyTorch cannot restore its own kernel
            afterwards (2.10).
    """
    global _before, _named
    if backend not in (None, "cpu"):
        raise ValueError(f"backend must be cpu or None, not {backend!r}")
    if _native.why_not is not None:
        raise RuntimeError(f"enable_sdpa: there is no CPU kernel: {_native.why_not}")
    if not hasattr(_registry, "restore_flash_attention_impl"):
        raise RuntimeError(
            f"enable_sdpa: torch {torch.__version__} cannot restore its attention kernel afterwards "
            "(it lacks torch.nn.attention.restore_flash_attention_impl)"
        )
    current = _registry.current_flash_attention_impl()
    if current == NAME and _named == backend:
        return
    _registry.register_flash_attention_impl(NAME, register_fn=partial(_Override, backend))
    _registry.activate_flash_attention_impl(NAME)
    _named = backend
    if current != NAME:
        _before = current


def disable_sdpa() -> None:
    """Undo `enable_sdpa`; the provider that was active before is active again.

    Does nothing without `enable_sdpa`, or if another provider has replaced it.
    """
    global _before
    if getattr(_registry, "current_flash_attention_impl", lambda: None)() != NAME:
        return
    _registry.restore_flash_attention_impl()
    if _before is not None:
        _registry.activate_flash_attention_impl(_before)
        _before = None
