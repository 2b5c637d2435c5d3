"""Argument checks that several ops share, and those of attention, which also reshape its arguments
to (B, H, L, D). Errors have PyTorch's exception type and wording where PyTorch has one."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import dispatch
from .._context import function_mode_is_active, is_observed, only_torch_supports, values_are_known
from ..reference.linear import ACTIVATIONS


def same_error_as(torch_call: Callable[[], Any], otherwise: Exception) -> NoReturn:
    """Raises the exception of PyTorch's call; ``otherwise`` if that call succeeds."""
    with torch.no_grad():
        torch_call()
    raise otherwise


def defers_to_torch(op: str, backend: Any, *tensors: Tensor | None, also: bool = False) -> bool:
    """True if the call must run PyTorch's function: because of its tensors (`only_torch_supports`),
    because ``also`` is true, or because a user's mode observes it (`_context.is_observed`). In the
    first two cases a named backend with kernels raises NotImplementedError.
    """
    if backend is None and function_mode_is_active() and is_observed():
        return True
    if not (also or only_torch_supports(*tensors)):
        return False
    backend = dispatch.named_backend() if backend is None else backend
    if backend not in (None, "torch", "reference"):
        dispatch.check_name(backend)
        raise NotImplementedError(
            f"backend {backend!r} does not support this call of {op}: a tensor is of a subclass "
            "that overrides PyTorch's functions, or sparse, nested, complex, or on meta."
        )
    return True


def wrong_type(
    function: str, name: str, position: int | None, wanted: str, value: Any
) -> TypeError:
    """``position``: None for keyword-only arguments."""
    place = "" if position is None else f" (position {position})"
    return TypeError(
        f"{function}(): argument '{name}'{place} must be {wanted}, not {type(value).__name__}"
    )


def require_tensor(
    function: str, name: str, position: int | None, value: Any, optional: bool = False
) -> None:
    if not (isinstance(value, Tensor) or (optional and value is None)):
        raise wrong_type(function, name, position, "Tensor", value)


def are_tensors(required: tuple[Any, ...], optional: tuple[Any, ...]) -> bool:
    """True if all arguments are tensors: faster than a call of `require_tensor` for each."""
    for value in required:
        if not isinstance(value, Tensor):
            return False
    for value in optional:  # noqa: SIM110 - faster than `all` of a generator
        if not (value is None or isinstance(value, Tensor)):
            return False
    return True


def require_floating(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must have a floating-point dtype, not {tensor.dtype}")


def require_rows(name: str, tensor: Tensor) -> None:
    require_floating(name, tensor)
    if tensor.dim() == 0:
        raise ValueError(f"{name} must have at least one dimension, not 0")


def require_float(function: str, name: str, value: Any, position: int | None = None) -> Any:
    """Returns the value as a number, for all types that PyTorch accepts; symbolic while tracing."""
    if isinstance(value, (float, int, torch.SymFloat, torch.SymInt)):
        return value
    if isinstance(value, numbers.Real) or (isinstance(value, Tensor) and value.dim() == 0):
        return float(value)
    raise wrong_type(function, name, position, "float", value)


def require_bool(function: str, name: str, value: Any) -> None:
    if not isinstance(value, (bool, torch.SymBool)):
        raise wrong_type(function, name, None, "bool", value)


def require_probability(function: str, name: str, p: Any) -> float:
    if type(p) is not float:
        p = float(require_float(function, name, p))
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{name} must be between 0 and 1, not {p}")
    return p


def require_same_device(first_name: str, first: Tensor, **others: Tensor | None) -> None:
    device = first.device
    for name, tensor in others.items():
        if tensor is not None and tensor.device != device:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {first_name} is on "
                f"{device} and {name} is on {tensor.device}"
            )


def named_activation(
    activation: str | Callable[[Tensor], Tensor] | None,
) -> str | Callable[[Tensor], Tensor] | None:
    """Returns the name of a well-known callable, because kernels support activations by name.

    Raises ValueError if the activation is neither a known name nor callable.
    """
    if callable(activation):
        try:
            return _KNOWN_CALLABLES.get(activation, activation)
        except TypeError:  # a callable without a hash
            return activation
    if activation is not None and (
        not isinstance(activation, str) or activation not in ACTIVATIONS
    ):
        raise ValueError(
            f"activation must be one of {', '.join(ACTIVATIONS)}, or a callable, not {activation!r}"
        )
    return activation


_KNOWN_CALLABLES: dict[Any, str] = {
    torch.nn.functional.relu: "relu",
    torch.relu: "relu",
    torch.nn.functional.gelu: "gelu",
    torch.nn.functional.silu: "silu",
}


def casts_itself(op: str, first: Tensor, backend: str | None) -> bool:
    """True if autocast is on and only PyTorch's ops can run the call.

    PyTorch's ops cast their arguments, and cache casts of parameters until the autocast region ends.
    """
    if backend is not None or not isinstance(first, Tensor) or torch.compiler.is_compiling():
        return False
    kind = "cpu" if first.is_cpu else first.device.type
    return (
        kind != "meta" and torch.is_autocast_enabled(kind) and dispatch.only_pytorch_runs(op, first)
    )


def autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns the tensors, cast to autocast's dtype if autocast is on for their device."""
    first = tensors[0]
    assert first is not None
    kind = "cpu" if first.is_cpu else first.device.type  # reading `device.type` is slower
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in tensors
    )


# Attention ----------------------------------------------------------------------------------------

NAME = "scaled_dot_product_attention"

_CPP_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
    torch.int64: "long int",
    torch.int32: "int",
    torch.int16: "short int",
    torch.int8: "signed char",
    torch.uint8: "unsigned char",
}


def _dtype_name(dtype: torch.dtype) -> str:
    return _CPP_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _raise_like_torch(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, otherwise: Exception
) -> NoReturn:
    # One query is enough for the error, and cheap. Only PyTorch's implementation MATH checks the
    # sizes.
    with sdpa_kernel([SDPBackend.MATH]):
        same_error_as(
            lambda: F.scaled_dot_product_attention(
                query[..., :1, :], key, value, enable_gqa=enable_gqa
            ),
            otherwise,
        )


def check_mask_dtype(mask: Tensor, query: Tensor) -> None:
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(
            "Expected attn_mask dtype to be bool or float or to match query dtype, but got "
            f"attn_mask.dtype: {_dtype_name(mask.dtype)} and  query.dtype: "
            f"{_dtype_name(query.dtype)} instead."
        )


def check_qkv(query: Tensor, key: Tensor, value: Tensor) -> None:
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(
            "Expected query, key, and value to have the same dtype, but got query.dtype: "
            f"{_dtype_name(query.dtype)} key.dtype: {_dtype_name(key.dtype)} and value.dtype: "
            f"{_dtype_name(value.dtype)} instead."
        )
    if not query.device == key.device == value.device:
        raise RuntimeError(
            "Expected query, key, and value to have the same device type, but got query.device: "
            f"{query.device} key.device: {key.device} and value.device: {value.device} instead."
        )
    if query.dim() < 2 or key.dim() < 2 or value.dim() < 2:
        raise RuntimeError(
            "Expected query, key, and value to all be  at least 2 dimensional, but got query.dim: "
            f"{query.dim()} key.dim: {key.dim()} and value.dim: {value.dim()} instead."
        )
    if not query.is_floating_point():
        wrong = ValueError(f"query must have a floating-point dtype, not {query.dtype}")
        _raise_like_torch(query, key, value, False, wrong)


def check_sizes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Checks the sizes of query (B, H, T, D), key (B, Hkv, S, D) and value (B, Hkv, S, Dv)."""
    q, k, v = query.shape, key.shape, value.shape
    wrong = None
    if q[-1] != k[-1]:
        wrong = (
            f"query and key must have the same head size (last dimension), but got "
            f"{q[-1]} and {k[-1]}"
        )
    elif k[-2] != v[-2]:
        wrong = (
            f"key and value must have the same length (dimension -2), but got {k[-2]} and {v[-2]}"
        )
    elif v[1] != k[1]:
        wrong = f"key and value must have the same number of heads, but got {k[1]} and {v[1]}"
    elif q[1] != k[1] and (k[1] == 0 or q[1] % k[1]):
        wrong = (
            "Number of heads in key and value must divide the number of heads in query, but got "
            f"{k[1]} and {q[1]}"
        )
        raise RuntimeError(wrong)
    if wrong is not None:
        _raise_like_torch(query, key, value, enable_gqa, RuntimeError(wrong))


def is_folded(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """True if all three have the shape (B, H, L, D) already, without broadcasting."""
    q, k, v = query.shape, key.shape, value.shape
    return (
        len(q) == len(k) == len(v) == 4
        and q[0] == k[0] == v[0]
        and (enable_gqa or q[1] == k[1] == v[1])
    )


def fold(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, torch.Size, torch.Size]:
    """Reshapes query, key and value to (B, H, L, D), as views wherever their strides allow. Also
    returns the dimensions folded into B, and the leading dimensions of the result.

    All leading dimensions broadcast, that of heads too unless ``enable_gqa``.
    """
    first = query, key, value
    if max(x.dim() for x in first) <= 3 and not enable_gqa:
        # Three dimensions are (batch, length, head size): insert a dimension of one head.
        query, key, value = (x.unsqueeze(-3) for x in first)
        if mask is not None and mask.dim() == 3:
            mask = mask.unsqueeze(-3)
    query, key, value = (
        x.reshape((1,) * (4 - x.dim()) + tuple(x.shape)) for x in (query, key, value)
    )
    try:
        batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
        heads = [x.shape[-3] for x in (query, key, value)]
        if not enable_gqa:
            heads = [torch.broadcast_shapes(*((h,) for h in heads))[0]] * 3
    except RuntimeError:
        shapes = ", ".join(str(list(x.shape)) for x in first)
        wrong = f"the leading dimensions of query, key and value must broadcast, but got {shapes}"
        _raise_like_torch(*first, enable_gqa, RuntimeError(wrong))
    own = 3 if enable_gqa else 2
    lead = torch.broadcast_shapes(*(x.shape[:-own] for x in first))
    query, key, value = (
        x.expand(*batch, h, *x.shape[-2:]).reshape(math.prod(batch), h, *x.shape[-2:])
        for x, h in zip((query, key, value), heads, strict=True)
    )
    return query, key, value, mask, batch, torch.Size((*lead, *first[0].shape[-own:-2]))


def mask_to_four(mask: Tensor, batch: torch.Size, sizes: tuple[int, int, int]) -> Tensor:
    """Returns the mask as (1 or B, 1 or H, 1 or T, 1 or S), a view wherever its strides allow."""
    target = (*batch, *sizes)
    for place, (given, size) in enumerate(
        zip(reversed(mask.shape), reversed(target), strict=False)
    ):
        if given != 1 and given != size:  # `in` cannot compare symbolic sizes
            raise RuntimeError(
                f"The size of tensor a ({size}) must match the size of tensor b ({given}) at "
                f"non-singleton dimension {max(len(target), mask.dim()) - 1 - place}"
            )
    if mask.dim() > len(target):
        raise RuntimeError(
            f"output with shape {list(target)} doesn't match the broadcast shape "
            f"{list(torch.broadcast_shapes(target, mask.shape))}"
        )
    if mask.dim() == len(target) == 4:
        return mask
    mask = mask.reshape((1,) * (len(target) - mask.dim()) + tuple(mask.shape))
    lead = mask.shape[:-3]
    if all(size == 1 for size in lead):
        return mask.reshape(1, *mask.shape[-3:])
    if tuple(lead) != tuple(batch):
        mask = mask.expand(*batch, *mask.shape[-3:])
    return mask.reshape(math.prod(batch), *mask.shape[-3:])


def check_lengths(name: str, lengths: Tensor, batch: int, longest: int) -> None:
    """Checks lengths of sequences padded to ``longest``; their values only on the CPU, where
    reading them needs no synchronization."""
    kind = lengths.dtype
    if kind == torch.bool or kind.is_floating_point or kind.is_complex:
        raise TypeError(f"{name} must have an integer dtype, not {kind}")
    if tuple(lengths.shape) != (batch,):
        raise ValueError(
            f"{name} must have shape [{batch}], one length per batch element, not "
            f"{list(lengths.shape)}"
        )
    if batch > 0 and lengths.is_cpu and values_are_known(lengths):
        values = lengths.tolist()
        if min(values) < 0 or max(values) > longest:
            raise ValueError(
                f"{name} must be between 0 and the padded length, {longest}, and it has values from "
                f"{min(values)} to {max(values)}"
            )


def check_starts(cu_seq_q: Tensor, cu_seq_k: Tensor) -> None:
    for name, starts in {"cu_seq_q": cu_seq_q, "cu_seq_k": cu_seq_k}.items():
        if starts.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 or int64, not {starts.dtype}")
        if starts.dim() != 1 or starts.shape[0] == 0:
            raise ValueError(f"{name} must have shape [sequences + 1], not {list(starts.shape)}")
    if cu_seq_q.shape != cu_seq_k.shape:
        raise ValueError(
            "cu_seq_q and cu_seq_k must be of the same sequences, but there are "
            f"{cu_seq_q.shape[0] - 1} and {cu_seq_k.shape[0] - 1}"
        )
