"""Size limits below which PyTorch's op is faster, because host overhead dominates.

A kernel of ours takes some Python to prepare and, with gradients, an autograd node in Python;
PyTorch's ops have theirs in C++. Which calls PyTorch's op serves sooner was measured, on the CPU in
float32. The dispatcher hands exactly those to the backend `torch` (`yields`). Functions and modules
whose preparation would take as long as the call ask the same limits before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _native, _switches
from .dispatch import Call, PreferLater, _state

_is_compiling = torch.compiler.is_compiling
_tracing_state = torch._C._get_tracing_state
_transforms = torch._C._are_functorch_transforms_active
_is_grad_enabled = torch.is_grad_enabled
_FLOAT = torch.float32
_PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})

#: Whether any call counts as small, and whether functions and modules may pass the dispatcher by.
_on = _short = True


@dataclass(frozen=True)
class Limit:
    """The size from which a call of an op runs on our kernel."""

    #: What is counted, in words.
    unit: str
    #: Calls with less than this are PyTorch's: those without gradients, and those with.
    inference: int
    training: int
    #: Elements of the op's matrices, at most. For a few rows and larger ones PyTorch's products
    #: take up to twice the kernels' time.
    weights: int | None = None

    #: With gradients, rows at most. In each thread PyTorch adds those of a norm's weight and bias up
    #: row by row, and of more rows gives sums further from the truth than the error budget allows.
    #: However many threads there are, as results must not depend on their number.
    rows: int | None = None

    def holds(self, work: int, rows: int, *tensors: Tensor | None) -> bool:
        """Whether a call of this size is below the limit. Always True without the native module."""
        if _native.module is None:
            return True
        if _is_grad_enabled() and (self.inference != self.training or self.rows is not None):
            for tensor in tensors:
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    return work < self.training and (self.rows is None or rows <= self.rows)
        return work < self.inference


# With tiles products of float32 take a fraction of PyTorch's time, once there is some work.
_TILES = _native.module is not None and _native.module.isa() == "amx"
LINEAR = Limit("multiply-adds", 1 << (20 if _TILES else 25), 1 << 25, weights=1 << 16)
FEED_FORWARD = Limit("multiply-adds", 1 << (20 if _TILES else 22), 1 << 24, weights=1 << 17)
LAYER_NORM = Limit("elements", 1 << 16, 1 << 18, rows=128)
#: In evaluation of what PyTorch has one operator for: self-attention without masks.
MULTIHEAD_ATTENTION = Limit("elements", 1 << 15, 0)
ADD_LAYER_NORM = Limit("elements", 1 << 14, 1 << 18, rows=128)
#: PyTorch's fused attention on the CPU has no second derivative.
ATTENTION = Limit("multiply-adds", 1 << 18, 0)
CROSS_ENTROPY = Limit("elements", 1 << 17, 1 << 18)
_LOGITS = 1 << (13 if _TILES else 17)
LINEAR_CROSS_ENTROPY = Limit("logits", _LOGITS, _LOGITS, weights=1 << 16)
#: Elements of the table, and eight times those looked up, with gradients; without them a look-up is
#: PyTorch's anyway.
EMBEDDING = 1 << 19


def linear(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether `torch.nn.functional.linear` is to take the call, unless a backend is named."""
    return (
        _short
        and type(input) is Tensor
        and _state.backend is None
        and isinstance(weight, Tensor)
        and not _is_compiling()
        and _tracing_state() is None
        and input.is_cpu
        and input.dtype is _FLOAT
        and weight.numel() <= LINEAR.weights  # type: ignore[operator]
        and LINEAR.holds(input.numel() * weight.shape[0], 0, input, weight, bias)
    )


def layer_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether `torch.layer_norm` is to take the call."""
    return (
        _short
        and type(input) is Tensor
        and _state.backend is None
        and not _is_compiling()
        and _tracing_state() is None
        and input.is_cpu
        and input.dtype is _FLOAT
        # Which function a tensor subclass is asked about differs between this and torch's module.
        and type(weight) in _PLAIN
        and type(bias) in _PLAIN
        and LAYER_NORM.holds(input.numel(), _rows(input, weight), input, weight, bias)
        # The derivative of PyTorch's own forward-mode derivative is wrong.
        and not (_transforms() or forward_ad._current_level >= 0)
    )


def layer_norm_kernel(
    input: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Callable[..., Any] | None:
    """Fast path: returns the CPU kernel if the dispatcher would certainly select it, else None.

    Dispatching costs about as much as normalizing 100 rows.
    """
    if not (
        _short
        and type(input) is Tensor
        and _state.backend is None
        and not _is_compiling()
        and _tracing_state() is None
        and input.is_cpu
        and input.dtype is _FLOAT
        and input.layout is torch.strided
        and not input.is_nested
        and forward_ad._current_level < 0
        and not _transforms()
        and type(eps) is float
        and type(normalized_shape) is tuple
        and len(normalized_shape) == 1
        and input.shape[-1:] == normalized_shape
        and _is_row(weight, normalized_shape)
        and _is_row(bias, normalized_shape)
    ):
        return None
    kernels, usable = _state.usable["layer_norm"]
    first = usable["cpu"][0]
    known = first.backend == "cpu" and kernels is _state.kernels["layer_norm"]
    return first.run if known else None


def _is_row(tensor: Tensor | None, shape: tuple[int, ...]) -> bool:
    return tensor is None or (
        type(tensor) in _PLAIN
        and tensor.dtype is _FLOAT
        and tensor.is_cpu
        and tensor.shape == shape
        and tensor.layout is torch.strided
    )


def _rows(input: Tensor, weight: Tensor | None) -> int:
    return 0 if weight is None else input.numel() // max(1, weight.numel())


def add_layer_norm(
    input: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None
) -> bool:
    """Whether a sum and `torch.layer_norm` are to take the call, nothing being dropped."""
    return (
        _short
        and type(input) is Tensor
        and type(residual) is Tensor
        and _state.backend is None
        and not _is_compiling()
        and _tracing_state() is None
        and input.is_cpu
        and input.dtype is _FLOAT
        and residual.dtype is _FLOAT
        and input.shape == residual.shape
        and type(weight) in _PLAIN
        and type(bias) in _PLAIN
        and ADD_LAYER_NORM.holds(input.numel(), _rows(input, weight), input, residual, weight, bias)
        and not (_transforms() or forward_ad._current_level >= 0)
    )


def feed_forward(
    input: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None
) -> bool:
    """Whether `torch.nn.functional.linear`, twice, is to take the call, nothing being dropped."""
    if not (
        _short
        and type(input) is Tensor
        and _state.backend is None
        and isinstance(weight1, Tensor)
        and isinstance(weight2, Tensor)
        and not _is_compiling()
        and _tracing_state() is None
        and input.is_cpu
        and input.dtype is _FLOAT
        and input.dim() > 0
    ):
        return False
    # PyTorch would spread biases that the op refuses.
    hidden, width, columns = weight1.shape, weight2.shape, input.shape[-1]
    if not (
        len(hidden) == 2
        and len(width) == 2
        and hidden[1] == columns
        and width[1] == hidden[0]
        and (bias1 is None or bias1.shape == hidden[:1])
        and (bias2 is None or bias2.shape == width[:1])
    ):
        return False
    weights = hidden[0] * (columns + width[0])
    work = input.numel() // max(1, columns) * weights
    return (
        weights <= FEED_FORWARD.weights  # type: ignore[operator]
        and FEED_FORWARD.holds(work, 0, input, weight1, bias1, weight2, bias2)
    )


def multihead_attention(input: Tensor) -> bool:
    """Whether torch's operator for it is to take self-attention without masks and gradients."""
    return (
        _short
        and type(input) is Tensor
        and _state.backend is None
        and not _is_compiling()
        and _tracing_state() is None
        and input.is_cpu
        and input.dtype is _FLOAT
        and MULTIHEAD_ATTENTION.holds(input.numel(), 0)
        and not (_is_grad_enabled() and input.requires_grad)
        and _is_untransformed()
    )


def attention(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether PyTorch's fused attention is to take the call: no masks, no dropout, no weights."""
    if not (
        _short
        and type(query) is Tensor
        and type(key) is Tensor
        and type(value) is Tensor
        and _state.backend is None
        and not _is_compiling()
        and _tracing_state() is None
        and query.is_cpu
        and query.dtype is _FLOAT
    ):
        return False
    sizes, keys = query.shape, key.shape
    return (
        len(sizes) == 4
        and keys == value.shape
        and len(keys) == 4
        and sizes[:2] == keys[:2]
        and sizes[3] == keys[3]
        and 0 < query.numel() * keys[2] < ATTENTION.inference
        and key.dtype is _FLOAT
        and value.dtype is _FLOAT
        and key.is_cpu
        and value.is_cpu
        and not (
            _is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        )
        and _is_untransformed()
    )


def _is_untransformed() -> bool:
    """Whether autocast, torch.func transforms and forward-mode AD are all off."""
    return not (torch.is_autocast_enabled("cpu") or _transforms() or forward_ad._current_level >= 0)


def embedding(tokens: Tensor, table: Tensor) -> bool:
    """Whether `torch.embedding` is to take the look-up and its gradient."""
    return (
        _short
        and type(tokens) is Tensor
        and _state.backend is None
        and type(table) in _PLAIN
        and not _is_compiling()
        and _tracing_state() is None
        and table.is_cpu
        and (
            not (_is_grad_enabled() and table.requires_grad)
            or table.numel() + 8 * tokens.numel() * table.shape[-1] < EMBEDDING
        )
    )


def cross_entropy(input: Tensor, target: Tensor, ignore_index: int) -> bool:
    """Whether `torch.nn.functional.cross_entropy` is to take the call."""
    return (
        _short
        and type(input) is Tensor
        and type(target) is Tensor
        and _state.backend is None
        and not _is_compiling()
        and _tracing_state() is None
        and input.is_cpu
        and input.dtype is _FLOAT
        and target.dtype is torch.int64
        and CROSS_ENTROPY.holds(input.numel(), 0, input)
        and ignores_no_nan(input, target, ignore_index)
    )


def linear_cross_entropy(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int
) -> bool:
    """Whether PyTorch's linear map and loss, of all logits at once, are to take the call."""
    if not (
        _short
        and type(input) is Tensor
        and type(target) is Tensor
        and _state.backend is None
        and type(weight) in _PLAIN
        and type(bias) in _PLAIN
        and not _is_compiling()
        and _tracing_state() is None
        and input.is_cpu
        and target.is_cpu
        and input.dtype is _FLOAT
        and weight.dtype is _FLOAT
        and (bias is None or (bias.dtype is _FLOAT and bias.shape == weight.shape[:1]))
        and target.dtype is torch.int64
        and weight.dim() == 2
        and input.dim() in (1, 2)
        and target.shape == input.shape[:-1]
    ):
        return False
    logits = target.numel() * weight.shape[0]
    return (
        logits > 0
        and weight.numel() <= LINEAR_CROSS_ENTROPY.weights  # type: ignore[operator]
        and LINEAR_CROSS_ENTROPY.holds(logits, 0, input, weight, bias)
        and _is_untransformed()
        and torch._C._len_torch_dispatch_stack() == 0
        # PyTorch lets what stands in ignored rows reach gradients.
        and ignore_index < 0
        and int(target.min()) >= 0
    )


def ignores_no_nan(input: Tensor, target: Tensor, ignore_index: int) -> bool:
    """Whether all logits in ignored rows are known to be finite.

    PyTorch multiplies the gradients of the others by zero, which leaves NaN.
    """
    if not (
        input.is_cpu
        and target.is_cpu
        and not _is_compiling()
        and _tracing_state() is None
        and not _transforms()
        and torch._C._len_torch_dispatch_stack() == 0
    ):
        return False
    if target.numel() == 0 or (ignore_index < 0 and int(target.min()) >= 0):
        return True
    return math.isfinite(input.detach().sum())


def _elements(call: Call) -> int:
    return call.tensors[0].numel()  # type: ignore[union-attr]


def _of_linear(call: Call) -> int:
    input, weight, *_ = call.tensors
    return input.numel() * weight.shape[0]  # type: ignore[union-attr]


def _of_feed_forward(call: Call) -> int:
    input, weight1, _, weight2, _ = call.tensors
    rows = input.numel() // max(1, input.shape[-1])  # type: ignore[union-attr]
    return rows * (weight1.numel() + weight2.numel())  # type: ignore[union-attr]


def _of_attention(call: Call) -> int:
    query, key, _ = call.tensors
    return query.numel() * key.shape[-2]  # type: ignore[union-attr]


def _of_linear_cross_entropy(call: Call) -> int:
    input, weight, _ = call.tensors
    return input.shape[0] * weight.shape[0]  # type: ignore[union-attr]


_RULES: dict[str, tuple[Limit, Callable[[Call], int]]] = {
    "linear": (LINEAR, _of_linear),
    "feed_forward": (FEED_FORWARD, _of_feed_forward),
    "layer_norm": (LAYER_NORM, _elements),
    "add_layer_norm": (ADD_LAYER_NORM, _elements),
    "attention": (ATTENTION, _of_attention),
    "cross_entropy": (CROSS_ENTROPY, _elements),
    "linear_cross_entropy": (LINEAR_CROSS_ENTROPY, _of_linear_cross_entropy),
}


def _weights(call: Call) -> int:
    return sum([t.numel() for t in call.tensors[1:] if t is not None and t.dim() == 2])


def prefers_later(op: str) -> tuple[PreferLater, ...]:
    """The op's size limits as `PreferLater` records of its CPU kernel."""
    if op not in _RULES:
        return ()
    limit, size = _RULES[op]

    def when(call: Call) -> bool:
        # What is dropped is drawn beside PyTorch's op, in further steps.
        if not _on or call.dropout_p != 0.0:
            return False
        if limit.rows is not None and call.needs_grad:
            return _rows(call.tensors[0], call.tensors[-2]) <= limit.rows  # type: ignore[arg-type]
        return limit.weights is None or _weights(call) <= limit.weights

    return tuple(
        PreferLater(
            size,
            range(below),
            f"PyTorch's op was measured to take less time for calls {which} gradients of fewer "
            f"than {below} {limit.unit}"
            + (f", with at most {limit.weights} weights" if limit.weights else "")
            + (f", of at most {limit.rows} rows" if limit.rows and needs_grad else ""),
            frozenset({_FLOAT}),
            needs_grad=needs_grad,
            when=when,
        )
        for below, which, needs_grad in (
            (limit.inference, "without", False),
            (limit.training, "with", True),
        )
        if below > 0
    )


@contextmanager
def handed_over(on: bool | None = None, short: bool | None = None) -> Iterator[None]:
    """Within the block small calls are PyTorch's or not, past the dispatcher or not.

    For tests of kernels, and for those who ask the dispatcher what ran. None: as it is.
    """
    global _on, _short
    before = _on, _short
    _on = _on if on is None else on
    _short = _on and (_short if short is None else short)
    try:
        yield
    finally:
        _on, _short = before


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Context manager under which a row's result does not depend on how many rows are beside it.

    Otherwise the number of rows selects between CPU kernels that sum in different orders, and
    between those and PyTorch's ops, so that the last bits of a sequence depend on its batch. Covers
    the forward of the CPU kernels in float32, bfloat16 and float16; gradients of weights are sums
    over the rows. What runs on `torch` or `reference` is not covered. It costs speed for few rows.
    It holds in all threads; ``TRANSFORMER_FAST_BATCH_INVARIANT=1`` sets it for the process.
    """
    before = _state.batch_invariant
    with handed_over(on=False):
        _set_batch_invariant(True)
        try:
            yield
        finally:
            _set_batch_invariant(before)


def _set_batch_invariant(on: bool) -> None:
    _state.batch_invariant = on
    if _native.module is not None:
        _native.module.set_batch_invariant(on)


if _switches.flag("TRANSFORMER_FAST_BATCH_INVARIANT"):
    _on = _short = False
    _set_batch_invariant(True)
