"""CUDA C++ kernels for NVIDIA GPUs (``csrc/cuda``), for calls that are bound by launches: launching
such short kernels from Python takes several times their own time.

The operators are in a library of their own that is loaded only with a PyTorch that has CUDA
(`_native.load_cuda`). Tests load one whose kernels were compiled for the CPU.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .. import _native
from ..dispatch import STATES, Call, Kernel, register
from ..ops.attention import attention_on
from ..ops.cross_entropy import cross_entropy_on
from ..ops.feed_forward import feed_forward_on
from ..ops.linear import CODES, linear_on
from ..ops.operator import OPERATORS
from .norms import norm_kernels

_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
#: With more keys a kernel takes longer than its launch, and PyTorch's flash and cuDNN are faster.
MAX_KEYS = 512
#: The kernels have no tiles for larger heads.
MAX_HEAD = 128


def define_operators() -> None:
    """Defines the operators of the loaded library."""
    for name in ("attention", "layer_norm", "linear", "feed_forward"):
        OPERATORS[f"{name}_training"].define("cuda")
        OPERATORS[f"{name}_backward"].define("cuda")
    for name in ("cross_entropy", "cross_entropy_backward"):
        OPERATORS[name].define("cuda")


def _refuse_place(call: Call) -> str | None:
    first = call.tensors[0]
    if first.is_cuda:
        return _native.why_no_code(*torch.cuda.get_device_capability(first.device))
    return None


def _refuse_attention(call: Call) -> str | None:
    given = call.arguments
    query, key = given.query, given.key
    sizes = [tensor.shape[-1] for tensor in call.tensors]
    if max(sizes) > MAX_HEAD:
        return f"it supports head sizes up to {MAX_HEAD}, and the call has {max(sizes)}"
    queries, keys = given.longest or (query.shape[-2], key.shape[-2])
    # The decode kernel has no limit: it splits the keys of one query among blocks.
    decodes = queries == 1 and not (call.needs_grad or given.need_weights or given.dropout_p)
    if keys > MAX_KEYS and not decodes:
        return f"it supports up to {MAX_KEYS} keys, and the call has {keys}"
    return _refuse_place(call)


def _remark_on_products(call: Call) -> str:
    return "with PyTorch's matrix products (cuBLAS), each followed by one kernel"


def _state() -> str:
    why_not = _native.cuda_why_not
    if why_not is None and torch.cuda.is_available():
        why_not = _native.why_no_code(*torch.cuda.get_device_capability())
    return why_not or f"loaded from {_native.CUDA_LIBRARY.name}"


def kernels(device: str, unavailable: str | None) -> list[Kernel]:
    """Returns the kernels to register, for tensors on this type of device."""
    found = (
        *norm_kernels("cuda", ["layer_norm"]),
        Kernel(
            "attention",
            "cuda",
            attention_on("cuda"),
            mask_gradient=True,
            query_lengths=True,
            refuses=_refuse_attention,
        ),
        Kernel("linear", "cuda", linear_on("cuda"), remark=_remark_on_products),
        Kernel("feed_forward", "cuda", feed_forward_on("cuda"), remark=_remark_on_products),
        Kernel("cross_entropy", "cuda", cross_entropy_on("cuda")),
    )
    return [
        replace(
            kernel,
            devices=(device,),
            dtypes=_FLOATS,
            gradients=True,
            dropout=True,
            activations=frozenset(CODES),
            unavailable=unavailable,
            refuses=kernel.refuses or _refuse_place,
            proven=frozenset(),
        )
        for kernel in found
    ]


if _native.cuda_why_not is None:
    define_operators()
STATES["cuda"] = _state
for _each in kernels("cuda", _native.cuda_why_not):
    register(_each)
