"""The dispatcher's kernels and their limits, in words."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..dispatch import Kernel, why_unproven
from ..reference.linear import ACTIVATIONS

_ACTIVATED = ("linear", "feed_forward")
_DTYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


def dtype_names(dtypes: frozenset[torch.dtype]) -> str:
    """'fp32 bf16'; no limit is 'any'."""
    named = [name for dtype, name in _DTYPES.items() if dtype in dtypes]
    return " ".join([*named, *(str(d)[6:] for d in dtypes if d not in _DTYPES)]) or "any"


def activation_names(kernel: Kernel) -> str:
    """'named' for all that have a name, 'any' for callables too; '' where there is none."""
    if kernel.op not in _ACTIVATED:
        return ""
    if kernel.activations is None:
        return "any"
    known = {name for name in kernel.activations if name}
    return "named" if known == set(ACTIVATIONS) else " ".join(sorted(known))


def state(kernel: Kernel) -> str:
    if kernel.unavailable is not None:
        return "cannot run"
    return "ready" if why_unproven(kernel) is None else "if named"


def kernel_row(kernel: Kernel) -> tuple[str, ...]:
    """backend, state, devices, dtypes, gradients, dropout, activations."""
    gradients = "yes" if kernel.gradients else "no"
    if kernel.op == "attention" and kernel.gradients and not kernel.mask_gradient:
        gradients = "not of masks"
    has_dropout = "dropout" if kernel.op not in ("layer_norm", "linear") else ""
    return (
        kernel.backend,
        state(kernel),
        " ".join(kernel.devices) or "any",
        dtype_names(kernel.dtypes),
        gradients,
        ("yes" if kernel.dropout else "no") if has_dropout else "",
        activation_names(kernel),
    )


def reasons(kernels: Iterable[Kernel]) -> list[str]:
    """Why some cannot run here: 'cpu: the native module was not built (all its ops)'."""
    found: dict[tuple[str, str], list[str]] = {}
    totals: dict[str, int] = {}
    for kernel in kernels:
        totals[kernel.backend] = totals.get(kernel.backend, 0) + 1
        why = kernel.unavailable or why_unproven(kernel)
        if why is not None:
            found.setdefault((kernel.backend, why), []).append(kernel.op)
    return [
        f"{backend}: {why} ({'all its ops' if len(ops) == totals[backend] else ', '.join(ops)})"
        for (backend, why), ops in found.items()
    ]
