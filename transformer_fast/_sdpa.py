"""`enable_sdpa`: runs `F.scaled_dot_product_attention` of the whole process on this package's kernels.

Registers the overrides of `_sdpa_operators` as a provider of PyTorch's flash attention. PyTorch checks
the arguments before it calls them.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import attention as _registry

from . import _native, dispatch
from ._sdpa_operators import BACKENDS, Override, runs_on

NAME = "transformer_fast"


class _Overrides:
    """The overrides for all devices of this machine, until `remove`."""

    def __init__(self, backend: str | None) -> None:
        self.backend = backend
        self.parts = []
        try:
            for device in _devices():
                self.parts.append(Override(device, backend))
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        for part in self.parts:
            part.remove()


def _devices() -> list[str]:
    return ["CPU", "CUDA"] if torch.cuda.is_available() else ["CPU"]


_before: str | None = None
_named: str | None = None


def enable_sdpa(backend: str | None = None) -> None:
    """Run `torch.nn.functional.scaled_dot_product_attention` on this package's kernels from now on.

    For code that you cannot change: it affects every caller of PyTorch's function in this process,
    eager or compiled, with or without gradients. The forward runs on this package's kernel, the backward
    on PyTorch's. Calls that the kernels do not support run on PyTorch's as before;
    `transformer_fast.explain` and the log "transformer_fast" at level INFO give the reasons. Calls
    that PyTorch does not run on its fused attention stay on PyTorch, too: those with dropout, a mask
    that needs a gradient, 3-D inputs on CPUs before PyTorch 2.14, or values of another size than
    queries. A second call with the same backend changes nothing.

    CPU tensors run on the C++ kernels. CUDA tensors stay on PyTorch unless ``backend="triton"`` names the
    Triton kernels, which are not validated on a GPU yet.

    Args:
        backend: None: the dispatcher chooses for each call. "cpu" or "triton": this backend runs all
            tensors of its devices, validated or not; the dispatcher chooses for others. `use_backend`
            and TRANSFORMER_FAST_BACKEND take precedence.

    Raises:
        ValueError: the backend has no such kernel.
        RuntimeError: the backend cannot run on this machine, or for None the CPU kernels were not
            built, or this PyTorch cannot restore its own kernel afterwards (2.10).
    """
    global _before, _named
    if backend is not None and backend not in BACKENDS:
        names = ", ".join(BACKENDS)
        raise ValueError(f"backend must be one of {names}, or None, not {backend!r}")
    reason = _why_not(backend)
    if reason is not None:
        raise RuntimeError(f"enable_sdpa: {reason}")
    if not hasattr(_registry, "restore_flash_attention_impl"):
        raise RuntimeError(
            f"enable_sdpa: torch {torch.__version__} cannot restore its attention kernel afterwards "
            "(it lacks torch.nn.attention.restore_flash_attention_impl)"
        )
    current = _registry.current_flash_attention_impl()
    if current == NAME and _named == backend:
        return
    _registry.register_flash_attention_impl(NAME, register_fn=partial(_Overrides, backend))
    _registry.activate_flash_attention_impl(NAME)
    _named = backend
    if current != NAME:
        _before = current


def _why_not(backend: str | None) -> str | None:
    """Returns why the backend (None: the CPU kernels) cannot run here, or None if it can."""
    if backend in (None, "cpu"):
        if _native.why_not is None:
            return None
        reason = f"there is no CPU kernel: {_native.why_not}"
        if backend is None and torch.cuda.is_available():
            reason += '; for CUDA tensors name one, enable_sdpa(backend="triton")'
        return reason
    kernel = next((k for k in dispatch.kernels("attention") if k.backend == backend), None)
    if kernel is None:
        return f"backend {backend!r} has no kernel for attention"
    if kernel.unavailable is not None:
        return f"backend {backend!r} cannot run here: {kernel.unavailable}"
    if torch.cuda.is_available() or runs_on(kernel.backend, "cpu"):
        return None
    built = torch.version.cuda is not None
    why = "PyTorch finds no GPU here" if built else f"torch {torch.__version__} has no CUDA"
    return f"backend {backend!r} runs on {' and '.join(kernel.devices)} tensors, and {why}"


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
