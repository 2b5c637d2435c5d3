"""C++ kernels for CPUs, chosen at run time by instruction set (``csrc/cpu``)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .. import _native, fast_path
from ..dispatch import Call, Kernel, PreferLater, register, rows
from ..ops.arguments import LinearCrossEntropyArguments
from ..ops.attention import attention_on
from ..ops.chunked_loss import chunked_loss, keeps_logits, register_losses
from ..ops.cross_entropy import cross_entropy_on, linear_cross_entropy_on
from ..ops.feed_forward import feed_forward_on
from ..ops.int8_linear import DEEPEST, int8_feed_forward_on, int8_linear_on
from ..ops.linear import CODES, linear_on
from ..ops.operator import OPERATORS
from .cpu_packing import implement_packed
from .norms import norm_kernels

_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})

attention = attention_on("cpu")
linear = linear_on("cpu")
feed_forward = feed_forward_on("cpu")
cross_entropy = cross_entropy_on("cpu", in_groups=True)
_linear_cross_entropy_of_floats = linear_cross_entropy_on("cpu")


def linear_cross_entropy(arguments: LinearCrossEntropyArguments) -> Tensor:
    if arguments.input.dtype != torch.float32 or keeps_logits(arguments):
        return chunked_loss("cpu", arguments)
    return _linear_cross_entropy_of_floats(arguments)


def _fake_pack_weight(weight: Tensor, rows: int) -> Tensor:
    # The size depends on the instruction set. Traced programs never contain this operator.
    raise NotImplementedError(
        "pack_weight cannot be traced: pack the weight before the program is traced"
    )


def _refuse_attention(call: Call) -> str | None:
    if call.needs_grad and call.arguments.softcap is not None:
        return "it has no backward with softcap, and the call needs gradients"
    mask = call.arguments.attn_mask
    if mask is None or mask.dtype in (torch.bool, torch.float32, call.arguments.query.dtype):
        return None
    return f"it supports masks in bool, float32 or query's dtype, and this one is {str(mask.dtype)[6:]}"


def too_deep(*weights: Tensor) -> str | None:
    """Returns the reason why a product with one of these int8 weights is not supported, or None."""
    deepest = max(weight.shape[1] for weight in weights)
    if deepest <= DEEPEST:
        return None
    return f"it supports int8 weights of at most {DEEPEST} columns, and one has {deepest}"


def _refuse_int8_depth(call: Call) -> str | None:
    given = call.arguments
    return too_deep(given.weight) if call.op == "int8_linear" else too_deep(given[1], given[4])


def _int8_remark(call: Call) -> str | None:
    assert _native.module is not None  # it is: the kernel is available
    if "int8" in _native.module.dot_types():
        return None
    return f"products run in 16 bits, since {_native.module.isa()} has no dot products of 8 bits"


def _few(dtype: torch.dtype, sizes: range, weights: int = 1) -> PreferLater:
    """Returns the preference for PyTorch's product in training, from ``weights`` weights on.

    Each training step changes the weights, so the kernels would pack them again, which does not pay
    for few rows. Calls without gradients use cached copies.
    """

    def when(call: Call) -> bool:
        tensors = call.tensors
        if call.op == "linear" and (call.arguments.activation or tensors[3] is not None):
            return False
        return tensors[1].numel() >= weights

    return PreferLater(
        rows,
        sizes,
        f"PyTorch's matrix product is faster on this CPU in training for {sizes[0]} to {sizes[-1]} "
        f"rows of {str(dtype)[6:]}" + (f" and {weights} weights or more" if weights > 1 else ""),
        frozenset({dtype}),
        needs_grad=True,
        when=when,
    )


def _preferences() -> dict[str, tuple[PreferLater, ...]]:
    """Returns op -> the sizes at which PyTorch's products were faster on such a CPU.

    Measured with 1 to 512 rows and 2^14 to 2^24 weights, with one and two threads. Of AMD's CPUs with
    AVX-512-BF16 that was a Zen 4.
    """
    if _native.module is None:
        return {}
    isa, is_intel = _native.module.isa(), _native.module.is_intel()
    bf16, fp16 = torch.bfloat16, torch.float16
    if isa == "amx":
        linear = [_few(bf16, range(1, 24), 2**22), _few(bf16, range(24, 257), 2**23)]
        network = [_few(bf16, range(5, 32), 2**20), _few(bf16, range(32, 257), 2**22)]
        linear.append(_few(fp16, range(1, 257), 2**21))
        network.append(_few(fp16, range(1, 513), 2**20))
    else:
        linear = [_few(bf16, range(1, 5), 2**22)] if isa == "avx512_bf16" and is_intel else []
        network = []
    # MKL uses AVX-512 on Intel's CPUs only. There kernels without strips (csrc/cpu/ops/linear) read
    # fewer rows than these from the unpacked weight.
    if is_intel and (isa == "amx" or not isa.startswith("avx512")):
        linear.append(_few(torch.float32, range(16, 129)))
        network.append(_few(torch.float32, range(12, 129)))
    return {"linear": tuple(linear), "feed_forward": tuple(network)}


_PREFER_LATER = _preferences()


def register_kernel(kernel: Kernel) -> None:
    """Registers a kernel with the limits that all kernels of this backend share."""
    others = _PREFER_LATER.get(kernel.op, ())
    fast_path.LIMITED[kernel.op] = frozenset().union(*(limit.dtypes for limit in others))
    register(
        replace(
            kernel,
            devices=("cpu",),
            dtypes=kernel.dtypes or _FLOATS,
            unavailable=_native.why_not,
            proven=None if _native.why_unproven() is None else frozenset(),
            prefers_later=(*fast_path.prefers_later(kernel.op), *others),
        )
    )


def _register() -> None:
    if _native.module is not None:
        for operator in OPERATORS.values():
            operator.define("cpu")
        implement_packed()
        torch.library.register_fake("transformer_fast::pack_weight.cpu", _fake_pack_weight)
    register_losses("cpu", linear, cross_entropy, has_gradients=True)
    for kernel in (
        *norm_kernels("cpu", float_weights=True),
        Kernel(
            "attention",
            "cpu",
            attention,
            gradients=True,
            mask_gradient=True,
            query_lengths=True,
            softcap=True,
            refuses=_refuse_attention,
        ),
        Kernel("linear", "cpu", linear, gradients=True),
        Kernel("feed_forward", "cpu", feed_forward, gradients=True),
        *(
            Kernel(op, "cpu", run, refuses=_refuse_int8_depth, remark=_int8_remark)
            for op, run in (
                ("int8_linear", int8_linear_on("cpu")),
                ("int8_feed_forward", int8_feed_forward_on("cpu")),
            )
        ),
        Kernel("cross_entropy", "cpu", cross_entropy, gradients=True),
        Kernel("linear_cross_entropy", "cpu", linear_cross_entropy, gradients=True),
    ):
        register_kernel(replace(kernel, dropout=True, activations=frozenset(CODES)))


_register()
