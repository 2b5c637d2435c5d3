"""Kernels and their limits, as the dispatcher knows them, in words."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..dispatch import Kernel

_ACTIVATED = ("linear", "feed_forward")


def dtype_names(dtypes: frozenset[torch.dtype]) -> str:
    """'float32 bfloat16', the shortest name for 'any' being 'any'."""
    if not dtypes:
        return "any"
    order = sorted(dtypes, key=lambda dtype: (-torch.finfo(dtype).bits, str(dtype)))
    return " ".join(str(dtype).removeprefix("torch.") for dtype in order)


def state(kernel: Kernel) -> str:
    if kernel.unavailable is not None:
        return "cannot run"
    return "ready" if kernel.proven else "when named"


def kernel_row(kernel: Kernel) -> tuple[str, ...]:
    """backend, state, devices, dtypes, gradients, dropout, activations."""
    gradients = "yes" if kernel.gradients else "no"
    if kernel.op == "attention" and kernel.gradients and not kernel.mask_gradient:
        gradients = "not of masks"
    activations = ""
    if kernel.op in _ACTIVATED:
        known = kernel.activations
        activations = "any" if known is None else " ".join(sorted(name for name in known if name))
    has_dropout = "dropout" if kernel.op not in ("layer_norm", "linear") else ""
    return (
        kernel.backend,
        state(kernel),
        " ".join(kernel.devices) or "any",
        dtype_names(kernel.dtypes),
        gradients,
        ("yes" if kernel.dropout else "no") if has_dropout else "",
        activations,
    )


def reasons(kernels: Iterable[Kernel]) -> list[str]:
    """Why some cannot run here: 'cpu: the native module was not built (all its ops)'."""
    found: dict[tuple[str, str], list[str]] = {}
    totals: dict[str, int] = {}
    for kernel in kernels:
        totals[kernel.backend] = totals.get(kernel.backend, 0) + 1
        why = kernel.unavailable
        if why is None and not kernel.proven:
            why = "it is not yet proven on a GPU, so it runs only when it is named"
        if why is not None:
            found.setdefault((kernel.backend, why), []).append(kernel.op)
    return [
        f"{backend}: {why} ({'all its ops' if len(ops) == totals[backend] else ', '.join(ops)})"
        for (backend, why), ops in found.items()
    ]
