"""The fast path of calls on plain CPU tensors, and the sizes below which PyTorch's op is faster.

Checks and dispatch take as long as many a kernel. `plain` is the guard of all ops: of a call that it
lets through nothing is left to ask but shapes, and how large it is. A kernel of ours takes some Python
to prepare and, with gradients, an autograd node in Python; PyTorch's ops have theirs in C++. For which
calls PyTorch's op is faster was measured, on the CPU in float32, and stands here once: functions and
modules ask it, and the dispatcher has it as `PreferLater` (`prefers_later`).
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
from .dispatch import Call, PreferLater, _state, function_mode_is_active, is_observed, select

_is_compiling = torch.compiler.is_compiling
_tracing_state = torch._C._get_tracing_state
_transforms = torch._C._are_functorch_transforms_active
_is_grad_enabled = torch.is_grad_enabled
_is_autocast_enabled = torch.is_autocast_enabled
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_STRIDED = torch.strided
FLOAT = torch.float32

#: Whether any call counts as small, and whether calls may pass the dispatcher by.
_on = _short = True


@dataclass
class Limit:
    """The size from which a call of an op runs on our kernel."""

    #: What is counted, in words.
    unit: str
    #: Calls with less than this are PyTorch's: those without gradients, and those with.
    inference: int
    training: int
    #: At most so many elements of the op's matrices: with larger ones and few rows PyTorch's products
    #: take up to twice the kernels' time.
    weights: int = 1 << 62
    #: With gradients, rows at most. In each thread PyTorch adds those of a norm's weight and bias up
    #: row by row, and of more rows gives sums further from the truth than the error budget allows.
    #: However many threads there are, as results must not depend on their number.
    rows: int = 1 << 62
    #: Of other dtypes all calls run on our kernel.
    dtypes: frozenset[torch.dtype] = frozenset({FLOAT})

    def __post_init__(self) -> None:
        self.switch(True)

    def switch(self, on: bool) -> None:
        #: ``inference`` and ``training``, to be asked by whether a call needs gradients.
        self.below = (self.inference, self.training) if on else (0, 0)
        if on and _native.module is None:
            self.below = 1 << 62, 1 << 62


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
#: Of low precision PyTorch's op is given float32, as the reference is.
CROSS_ENTROPY = Limit(
    "elements (one of low precision counts 1.5, one of a row of fewer than 16 counts 32 times)",
    3 << 15,
    1 << 17,
    dtypes=frozenset({FLOAT, torch.bfloat16, torch.float16}),
)
_LOGITS = 1 << (13 if _TILES else 17)
LINEAR_CROSS_ENTROPY = Limit("logits", _LOGITS, _LOGITS, weights=1 << 16)
#: Elements of the table, and eight times those looked up, with gradients; without them a look-up is
#: PyTorch's anyway.
EMBEDDING = Limit("elements", 1 << 62, 1 << 19)
LIMITS = (
    LINEAR, FEED_FORWARD, LAYER_NORM, MULTIHEAD_ATTENTION, ADD_LAYER_NORM, ATTENTION, CROSS_ENTROPY,
    LINEAR_CROSS_ENTROPY, EMBEDDING,
)  # fmt: skip


def rows(input: Tensor, weight: Tensor | None) -> int:
    """Rows of a norm's input; 0 without a weight, since their number is then not limited."""
    return 0 if weight is None else input.numel() // max(1, weight.numel())


def plain(first: Any, *others: Any) -> bool | None:
    """Whether a call on these tensors needs gradients, or None: it goes through the dispatcher.

    That is a call that is traced, transformed or observed (`dispatch.is_observed`), for which a backend
    is named, or whose tensors are of subclasses, nested or elsewhere than in CPU memory. PyTorch's own
    op needs no more.
    """
    if (
        not _short
        or type(first) is not Tensor
        or (function_mode_is_active() and is_observed())
        or not first.is_cpu
        or first.is_nested
        or _state.backend is not None
        or _is_compiling()
        or _tracing_state() is not None
        or _transforms()
        or forward_ad._current_level >= 0
    ):
        return None
    follows = _is_grad_enabled()
    grad = follows and first.requires_grad
    for tensor in others:
        if tensor is not None:
            if type(tensor) not in _PLAIN:
                return None
            if follows and not grad and tensor.requires_grad:
                grad = True
    return grad  # type: ignore[no-any-return]


#: By op, the dtypes that other limits of the CPU's kernel than those above are about, with gradients.
LIMITED: dict[str, frozenset[torch.dtype]] = {}


def kernel(
    op: str, first: Tensor, *others: Tensor | None, grad: bool = False
) -> Callable[..., Any] | None:
    """What runs a `plain` call that is not small: the CPU's kernel, or what limits in training select.

    None: it goes through the dispatcher, since there is no kernel, autocast is on, or the tensors are
    not all of one floating dtype, strided and in CPU memory.
    """
    kernels, usable = _state.usable[op]
    found = usable["cpu"][0]
    if found.backend != "cpu" or kernels is not _state.kernels[op] or _is_autocast_enabled("cpu"):
        return None
    dtype = first.dtype
    if dtype not in found.dtypes or first.layout is not _STRIDED:
        return None
    for tensor in others:
        if tensor is not None and (
            tensor.dtype is not dtype or tensor.layout is not _STRIDED or not tensor.is_cpu
        ):
            return None
    if grad and dtype in LIMITED[op]:
        return select(Call(op, (first, *others), True)).run
    return found.run


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


def logits_size(input: Tensor) -> int:
    """What `CROSS_ENTROPY` counts of logits (N, C) or (N, C, d1, ...).

    PyTorch's loop over rows shorter than its vectors is scalar: 15 to 20 times the time per element.
    """
    count = input.numel()
    if input.dtype is not FLOAT:
        count += count // 2  # the copy in float32
    return 32 * count if input.dim() == 2 and input.shape[1] < 16 else count


def _of_feed_forward(call: Any) -> int:
    x, first, _, second, _ = call.tensors
    return x.numel() // max(1, x.shape[-1]) * (first.numel() + second.numel())  # type: ignore[no-any-return]


def _elements(call: Any) -> int:
    return call.tensors[0].numel()  # type: ignore[no-any-return]


#: By op its limit, and what that counts.
_RULES: dict[str, tuple[Limit, Callable[[Any], int]]] = {
    "linear": (LINEAR, lambda call: call.tensors[0].numel() * call.tensors[1].shape[0]),
    "feed_forward": (FEED_FORWARD, _of_feed_forward),
    "layer_norm": (LAYER_NORM, _elements),
    "add_layer_norm": (ADD_LAYER_NORM, _elements),
    "attention": (ATTENTION, lambda call: call.tensors[0].numel() * call.tensors[1].shape[-2]),
    "cross_entropy": (CROSS_ENTROPY, lambda call: logits_size(call.tensors[0])),
    "linear_cross_entropy": (
        LINEAR_CROSS_ENTROPY, lambda call: call.tensors[0].shape[0] * call.tensors[1].shape[0],
    ),
}  # fmt: skip


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
        if call.needs_grad and limit.rows < 1 << 62:
            return rows(call.tensors[0], call.tensors[-2]) <= limit.rows  # type: ignore[arg-type]
        return _weights(call) <= limit.weights

    return tuple(
        PreferLater(
            size,
            range(below),
            f"PyTorch's op is faster for calls this small (under {below} {limit.unit}"
            + (f", at most {limit.weights} weights" if limit.weights < 1 << 62 else "")
            + (f", at most {limit.rows} rows" if limit.rows < 1 << 62 and needs_grad else "")
            + f", {which} gradients)",
            limit.dtypes,
            needs_grad=needs_grad,
            when=when,
        )
        for below, which, needs_grad in (
            (limit.inference, "no", False),
            (limit.training, "with", True),
        )
        if below > 0
    )


@contextmanager
def handed_over(on: bool | None = None, short: bool | None = None) -> Iterator[None]:
    """Within the block small calls are PyTorch's or not, and calls pass the dispatcher by or not.

    For tests of kernels, and for those who ask the dispatcher what ran. None: as it is.
    """
    before = _on, _short
    _switch(*(was if now is None else now for was, now in zip(before, (on, short), strict=True)))
    try:
        yield
    finally:
        _switch(*before)


def _switch(on: bool, short: bool) -> None:
    global _on, _short
    _on, _short = on, short
    for limit in LIMITS:
        limit.switch(on)


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Context manager in which a row's result does not depend on the number of rows in the call.

    Otherwise the number of rows selects between CPU kernels that sum in different orders, and between
    those and PyTorch's ops, so that the last bits of a sequence depend on its batch. Covers the forward
    of the CPU kernels in float32, bfloat16 and float16, but not gradients of weights, which are sums over
    the rows, nor the backends `torch` and `reference`. It is slower for few rows. It applies to all
    threads; ``TRANSFORMER_FAST_BATCH_INVARIANT=1`` sets it for the process.
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
    _switch(False, True)
    _set_batch_invariant(True)
