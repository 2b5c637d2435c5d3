"""CUDA C++ kernels for NVIDIA GPUs (``csrc/cuda``), where launches decide: short kernels whose host
time from Python would be several times their own.

The operators are in a library of their own that is loaded only with a PyTorch that has CUDA
(`_native.load_cuda`). Tests load one whose kernels were compiled for the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import _native, autograd
from ..autograd import Attention, FeedForward, Linear, needs_function
from ..dispatch import Call, Kernel, register
from ..functional._operator import register_fakes
from ..functional.cross_entropy import BACKWARD, FORWARD, cross_entropy_on
from ..functional.layer_norm import add_layer_norm_on, define_norms, layer_norm_on
from ..reference import taking_query_lengths
from . import native_pairs
from .native_pairs import ACTIVATIONS, on

_ops = torch.ops.transformer_fast
_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
#: With more keys a kernel takes longer than its launch, and PyTorch's flash and cuDNN are faster.
MAX_KEYS = 512
#: Larger heads have no tiles.
MAX_HEAD = 128


def _kernel(op: str, function: Any, results: int = 1, keeps: bool = False, **limits: Any) -> Kernel:
    """The kernel of an op whose autograd function takes the arguments of its reference.

    ``keeps``: the pair's forward takes, last, whether to keep what only a backward asks for.
    """
    pair, more = autograd.pairs[op]["cuda"], (False,) if keeps else ()

    def run(*arguments: Any) -> Any:
        if needs_function(*(each for each in arguments if isinstance(each, Tensor))):
            found = function.apply("cuda", *arguments)
            if isinstance(found, Tensor):
                return found
        else:
            found = pair.forward(*arguments, *more)
        return found[0] if results == 1 else found[:results]

    return Kernel(op, "cuda", run, **limits)


def _linear_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    keep: bool = True,
) -> tuple[Tensor, Tensor]:
    """``keep``: whether a backward follows."""
    return _ops.cuda_linear(  # type: ignore[no-any-return]
        input, weight, bias, residual, ACTIVATIONS[activation], keep and activation is not None
    )


def _attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_lengths: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    need_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _ops.cuda_attention(  # type: ignore[no-any-return]
        query, key, value, attn_mask, _lengths(key_lengths), is_causal, scale, dropout_p,
        on(query.device, seed), need_weights,
    )  # fmt: skip


def _attention_backward(
    grad: Tensor,
    grad_weights: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_lengths: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    output: Tensor,
    weights: Tensor | None,
    row_max: Tensor,
    row_sum: Tensor,
    wants: Sequence[bool],
) -> tuple[Tensor, ...]:
    return _ops.cuda_attention_backward(  # type: ignore[no-any-return]
        grad, grad_weights, query, key, value, attn_mask, _lengths(key_lengths), is_causal, scale,
        dropout_p, on(query.device, seed), row_max, row_sum, *wants,
    )  # fmt: skip


def _lengths(key_lengths: Tensor | None) -> Tensor | None:
    """In one of the two types that kernels read."""
    if key_lengths is None or key_lengths.dtype in (torch.int32, torch.int64):
        return key_lengths
    return key_lengths.to(torch.int64)


@taking_query_lengths
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_lengths: Tensor | None,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    seed: Tensor | None,
    enable_gqa: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0
    arguments = (
        query, key, value, attn_mask, key_lengths, is_causal, scale, dropout_p, seed, need_weights
    )  # fmt: skip
    if needs_function(query, key, value, attn_mask):
        return Attention.apply("cuda", *arguments)
    output, weights, _, _ = _attention_forward(*arguments)
    return output, weights if need_weights else None


def define_operators() -> None:
    """Of the library, which was loaded."""
    define_norms("cuda", inference=False)
    for one in (FORWARD, BACKWARD):
        one.define("cuda")
    register_fakes("cuda_")


def _refuse_place(call: Call) -> str | None:
    first = call.tensors[0]
    assert first is not None
    if first.is_cuda:
        return _native.why_no_code(*torch.cuda.get_device_capability(first.device))
    return None


def _refuse_attention(call: Call) -> str | None:
    query, key, value = (tensor for tensor in call.tensors[:3] if tensor is not None)
    sizes = [tensor.shape[-1] for tensor in (query, key, value)]
    if max(sizes) > MAX_HEAD:
        return f"it takes head sizes up to {MAX_HEAD} and the call has {max(sizes)}"
    queries, keys = call.longest or (query.shape[-2], key.shape[-2])
    # One query's keys are shared out among blocks.
    decodes = queries == 1 and not (call.needs_grad or call.need_weights or call.dropout_p)
    if keys > MAX_KEYS and not decodes:
        return f"it takes up to {MAX_KEYS} keys and the call has {keys}"
    return _refuse_place(call)


def _remark_on_products(call: Call) -> str:
    return "with PyTorch's products (cuBLAS) and one kernel behind each"


def kernels(device: str, unavailable: str | None) -> list[Kernel]:
    """What is registered, for tensors on this kind of device."""
    found = (
        Kernel("layer_norm", "cuda", layer_norm_on("cuda")),
        Kernel("add_layer_norm", "cuda", add_layer_norm_on("cuda")),
        Kernel(
            "attention",
            "cuda",
            attention,
            mask_gradient=True,
            query_lengths=True,
            refuses=_refuse_attention,
        ),
        _kernel("linear", Linear, keeps=True, remark=_remark_on_products),
        _kernel("feed_forward", FeedForward, keeps=True, remark=_remark_on_products),
        Kernel("cross_entropy", "cuda", cross_entropy_on("cuda")),
    )
    return [
        replace(
            kernel,
            devices=(device,),
            dtypes=_FLOATS,
            gradients=True,
            dropout=True,
            activations=frozenset(ACTIVATIONS),
            unavailable=unavailable,
            refuses=kernel.refuses or _refuse_place,
            proven=frozenset(),
        )
        for kernel in found
    ]


native_pairs.register("cuda", _linear_forward)
autograd.register("attention", "cuda", _attention_forward, _attention_backward)

if _native.cuda_why_not is None:
    define_operators()
for _each in kernels("cuda", _native.cuda_why_not):
    register(_each)
