"""Triton kernels for NVIDIA GPUs. Importing this module registers them, but does not import Triton.

With ``TRITON_INTERPRET=1`` in the environment they run in Triton's interpreter, on CPU tensors, too.
That is slow and meant for tests.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...dispatch import AHEAD, STATES, Call, Kernel, compute_capability, register, rows
from ...ops.linear import CODES
from ...proof import columns_of
from ..norms import norm_kernels
from . import operators
from .plans import Replayed

#: Architectures for which `config` has tiles, warps and stages.
ARCHITECTURES = (80, 86, 90, 100, 120)
#: Largest rows of norms that fit in the registers of one program, forward and backward.
MAX_COLUMNS = 16384
MAX_COLUMNS_BACKWARD = 8192
#: Largest head size that fits in registers and shared memory.
MAX_HEAD = 256
#: Linear layers of up to this many rows use cuBLAS, followed by an epilogue kernel; see `matmul`.
FEW_ROWS = 64

_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def _why_not_installed() -> str | None:
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:  # a namespace package: a folder named triton
        return "Triton is not installed (pip install triton)"
    return None


def table_for(capability: int) -> int:
    """Returns the architecture whose tiles a GPU of this capability (10 * major + minor) uses.

    It is the highest one of the same family that is not higher, which has the same instructions (8.9
    also has the shared memory of 8.6; 11.0 was first called 10.1). Families without tables use the
    tiles of 8.6, because no later GPU has less shared memory.
    """
    family = {11: 10}.get(capability // 10, capability // 10)
    below = [a for a in ARCHITECTURES if a // 10 == family and a <= capability]
    return max(below, default=86)


def _refuse_place(call: Call) -> str | None:
    first = call.tensors[0]
    if first.is_cuda:
        if torch.version.hip is not None:
            return "its tile sizes are for NVIDIA GPUs"
        capability = compute_capability(first.device)
        if capability < 80:
            has = f"{capability // 10}.{capability % 10}"
            return f"it needs compute capability 8.0 or higher, and this GPU has {has}"
    return None


def _refuse_norm(call: Call) -> str | None:
    columns = columns_of(call)
    most = MAX_COLUMNS_BACKWARD if call.needs_grad else MAX_COLUMNS
    if columns > most:
        when = " with gradients" if call.needs_grad else ""
        return f"it supports up to {most} columns{when}, and the call has {columns}"
    return _refuse_place(call)


def _refuse_attention(call: Call) -> str | None:
    for tensor in call.tensors:
        if tensor.shape[-1] > MAX_HEAD:
            return f"it supports head sizes up to {MAX_HEAD}, and the call has {tensor.shape[-1]}"
    return _refuse_place(call)


def _remark_on_linear(call: Call) -> str | None:
    if rows(call) > FEW_ROWS:
        return None
    return f"with PyTorch's matrix product (cuBLAS), the fastest for up to {FEW_ROWS} rows"


def warm(
    dtypes: Iterable[torch.dtype] = (torch.bfloat16,),
    heads: Iterable[int] = (64,),
    columns: Iterable[int] = (512,),
    classes: Iterable[int] = (),
    device: torch.device | int | None = None,
) -> int:
    """Compile the Triton kernels for calls of these sizes in advance, so that no step waits for it.

    Compiles all variants by masks, causality, lengths, dropout and activations, forward and backward.
    There are no variants by the numbers of rows, queries, keys and sequences. Triton caches the kernels
    on disk, so that later processes only load them.

    Args:
        dtypes: dtypes of the tensors. heads: head sizes D of attention.
        columns: row sizes M of norms. classes: numbers of classes of losses.
        device: a GPU; None: the current one.

    Returns:
        The number of kernels that the calls launch; shared kernels count for each call.

    Raises:
        NotImplementedError: Triton is not installed. RuntimeError: there is no such GPU.
    """
    if (why_not := _why_not_installed()) is not None:
        raise NotImplementedError(why_not)
    from . import compile_ahead, config

    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    elif isinstance(device, int):
        device = torch.device("cuda", device)
    architecture = config.architecture(device)
    if architecture == 0:
        raise RuntimeError(f"kernels are compiled for a GPU, and device {str(device)!r} is none")
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        cases = compile_ahead.cases(dtypes, heads, columns, classes)
        return sum(compile_ahead.warm(case, architecture) for case in cases)


def kernels(interpreted: bool) -> list[Kernel]:
    """Returns the kernels to register; in the interpreter they support CPU tensors, too."""
    found = (
        *norm_kernels("triton", refuses=_refuse_norm),
        Kernel(
            "attention",
            "triton",
            operators.attention,
            mask_gradient=True,
            query_lengths=True,
            refuses=_refuse_attention,
        ),
        Kernel("linear", "triton", operators.linear, remark=_remark_on_linear),
        Kernel("feed_forward", "triton", operators.feed_forward, remark=_remark_on_linear),
        Kernel("cross_entropy", "triton", operators.cross_entropy),
        Kernel("linear_cross_entropy", "triton", operators.linear_cross_entropy),
    )
    return [
        replace(
            kernel,
            devices=("cpu", "cuda") if interpreted else ("cuda",),
            dtypes=_DTYPES,
            gradients=True,
            dropout=True,
            activations=frozenset(CODES),
            refuses=kernel.refuses or _refuse_place,
            unavailable=_why_not_installed(),
            proven=frozenset(),
            record=Replayed,
        )
        for kernel in found
    ]


def _state() -> str:
    """Returns a sentence on Triton's state for `info`, without importing Triton."""
    if _why_not_installed() is not None:
        return "not installed (pip install triton); its kernels cannot run or be compiled"
    version = importlib.metadata.version("triton")
    if torch.cuda.is_available():
        capability = compute_capability()
        tiles = table_for(capability)
        other = f" with the tiles of sm_{tiles} (sm_{capability} has none)"
        return f"{version}, runs on the GPU{'' if tiles == capability else other}"
    if _INTERPRETED:
        return f"{version}, in its interpreter, on CPU tensors (TRITON_INTERPRET)"
    return f"{version}; without a GPU it runs only in its interpreter (TRITON_INTERPRET=1)"


def _ahead(architecture: int) -> list[tuple[str, Callable[[], Any]]]:
    if (why_not := _why_not_installed()) is not None:
        raise NotImplementedError(why_not)
    if _INTERPRETED:
        raise NotImplementedError(
            "kernels cannot be compiled while TRITON_INTERPRET is set: unset it"
        )
    from .compile_ahead import cases, compile_launch, launches

    return [
        (case.name, partial(compile_launch, launch, architecture))
        for case in cases()
        for launch in launches(case, architecture)
    ]


STATES["triton"] = _state
AHEAD.update({architecture: partial(_ahead, architecture) for architecture in ARCHITECTURES})
for _kernel in kernels(_INTERPRETED):
    register(_kernel)
