"""The fast path of calls on plain CPU tensors, and the sizes below which PyTorch's op is faster.

Argument checks and dispatch take as long as many kernels. An entry in C++ (`entry`) checks a call, and
runs small ones with autograd nodes in C++. Without entries, PyTorch's op is faster for small calls,
since ours need Python, and with gradients a node in Python. The sizes were measured on the CPU in
float32 and are here only: functions and modules read them, entries get them from `bind`, and the
dispatcher gets them as `PreferLater` records (`prefers_later`). Ops and modules without an entry use
`_context.is_plain_eager`, which establishes everything about a call except shapes and size.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _context, _native
from ._context import changed, is_observed, own_settings, settings, values_are_known
from ._on_import import when_imported
from .dispatch import Call, PreferLater, at_change, mixes_dtypes, registry
from .ops import attention, feed_forward, layer_norm, linear
from .ops.arguments import RECORDS

_is_autocast_enabled = torch.is_autocast_enabled
_STRIDED = torch.strided
FLOAT = torch.float32


@dataclass
class Limit:
    """The size from which a call of an op runs on our kernel."""

    #: Name of the unit in which sizes are counted.
    unit: str
    #: Calls below these sizes run on PyTorch's op: without gradients, and with.
    inference: int
    training: int
    #: Largest number of elements in the op's matrices for which these sizes hold: with larger ones
    #: and few rows PyTorch's products take up to twice the kernels' time.
    weights: int = 1 << 62
    #: Calls below this size run on PyTorch's op with any number of weights.
    any_weights: int = 0
    #: Largest number of rows with gradients. PyTorch sums the gradients of a norm's weight and bias
    #: row by row in each thread, and over more rows the rounding error exceeds the error budget. It
    #: does not depend on the number of threads, since results must not.
    rows: int = 1 << 62
    #: The dtypes with a limit; calls in other dtypes always run on our kernel.
    dtypes: frozenset[torch.dtype] = frozenset({FLOAT})

    def __post_init__(self) -> None:
        #: (inference, training), indexed by whether a call needs gradients.
        self.below = self.inference, self.training
        if _native.module is None and not _native.unannounced:
            self.below = 1 << 62, 1 << 62


# On Intel's CPUs MKL computes products of one to a dozen rows in 0.4 to 0.9 of the time of our kernels,
# which are made for more rows. With AMX tiles our products in float32 take a fraction of PyTorch's time
# from `_SMALL` multiply-adds on.
_INTEL = _native.module is not None and _native.module.is_intel()
_TILES = _native.module is not None and _native.module.isa() == "amx"
_SMALL = 1 << 22
LINEAR = Limit(
    "multiply-adds", _SMALL if _TILES else 1 << 25, 1 << 25, weights=1 << 16,
    any_weights=_SMALL if _INTEL else 0,
)  # fmt: skip
FEED_FORWARD = Limit(
    "multiply-adds", _SMALL, 1 << 24, weights=1 << 17, any_weights=_SMALL if _INTEL else 0,
)  # fmt: skip
LAYER_NORM = Limit("elements", 1 << 16, 1 << 18, rows=128)
#: Self-attention without masks in evaluation, for which PyTorch has one operator.
MULTIHEAD_ATTENTION = Limit("elements", 1 << 15, 0)
ADD_LAYER_NORM = Limit("elements", 1 << 14, 1 << 18, rows=128)
#: PyTorch's fused attention on the CPU has no second derivative.
ATTENTION = Limit("multiply-adds", 1 << 15, 0)
CROSS_ENTROPY = Limit(
    "elements (one of low precision counts 1.25, one of a row of fewer than 16 counts 32 times, one of"
    " planes of classes 0.75)",
    3 << 15,
    1 << 17,
    dtypes=frozenset({FLOAT, torch.bfloat16, torch.float16}),
)
#: Smaller calls run as a linear layer and PyTorch's loss, with all logits in memory.
LINEAR_CROSS_ENTROPY = Limit("logits", 1 << 18, 1 << 20)
#: Counts the elements of the table, plus eight times the looked-up ones, with gradients. Without
#: gradients PyTorch's op always runs.
EMBEDDING = Limit("elements", 1 << 62, 1 << 19)
LIMITS = (
    LINEAR, FEED_FORWARD, LAYER_NORM, MULTIHEAD_ATTENTION, ADD_LAYER_NORM, ATTENTION, CROSS_ENTROPY,
    LINEAR_CROSS_ENTROPY, EMBEDDING,
)  # fmt: skip


def rows(input: Tensor, weight: Tensor | None) -> int:
    """Returns the number of rows of a norm's input; 0 without a weight, where it is not limited."""
    return 0 if weight is None else input.numel() // max(1, weight.numel())


#: Op -> dtypes for which the CPU kernel has further `PreferLater` limits in training.
LIMITED: dict[str, frozenset[torch.dtype]] = {}


def direct_kernel(op: str, tensors: tuple[Any, ...]) -> Callable[[Any], Any] | None:
    """Returns the CPU kernel's function for a call that passed `is_plain_eager` and is not small.

    None if the call must be dispatched: there is no kernel, it needs validation, autocast is on, or the
    tensors are not all of one floating dtype, strided and in CPU memory.
    """
    kernels, usable = registry.usable[op]
    found = usable["cpu"][0]
    if found.backend != "cpu" or kernels is not registry.kernels[op] or _is_autocast_enabled("cpu"):
        return None
    if found.proven is not None:  # the validation record decides
        return None
    dtype = tensors[0].dtype
    if dtype not in found.dtypes:
        return None
    mixed = False
    for tensor in tensors:
        if tensor is not None:
            if tensor.layout is not _STRIDED or not tensor.is_cpu:
                return None
            mixed = mixed or tensor.dtype is not dtype
    if mixed and (found.same_dtype is None or mixes_dtypes(found, tensors)):
        return None
    return found.function


def count_targets(target: Tensor, classes: int, ignore_index: int) -> tuple[int | None, int | None]:
    """Returns the number of valid targets and the first invalid one; ignored targets are neither.

    (None, None) if the values are not read: on other devices, and where `values_are_known` is False.
    """
    if (
        not target.is_cpu
        or target.dtype is not torch.int64
        or not values_are_known(target)
        or not hasattr(ignore_index, "__index__")
        or not -(1 << 63) <= (ignore_index := operator.index(ignore_index)) < 1 << 63
    ):
        return None, None
    if _native.module is not None and target.is_contiguous():  # one pass instead of four operators
        return _native.module.count_targets(  # type: ignore[no-any-return]
            target.data_ptr(), target.numel(), classes, ignore_index
        )
    counts = target != ignore_index
    wrong = target[((target < 0) | (target >= classes)) & counts]
    return int(counts.sum()) - wrong.numel(), int(wrong[0]) if wrong.numel() > 0 else None


def ignores_no_nan(input: Tensor, target: Tensor, ignore_index: int) -> bool:
    """True if all logits (N, C, ...) in ignored rows are known to be finite.

    PyTorch multiplies the gradients of ignored rows by zero, which leaves NaN where logits are NaN or
    infinite.
    """
    if input.dim() == 0:
        return True  # PyTorch's op raises
    classes = input.shape[0 if input.dim() == 1 else 1]
    counted, wrong = count_targets(target, classes, ignore_index)
    if wrong is not None or counted == target.numel():
        return True  # for a wrong target PyTorch's op raises
    return values_are_known(input) and input.is_cpu and math.isfinite(input.detach().sum())


def logits_size(input: Tensor) -> int:
    """Returns the size of logits (N, C) or (N, C, d1, ...) that `CROSS_ENTROPY` limits.

    PyTorch's loop over rows shorter than its vectors is scalar: 15 to 20 times the time per element. Our
    kernel reads planes of classes, (N, C, d1, ...), more slowly than rows.
    """
    count = input.numel()
    if input.dtype is not FLOAT:
        count += count // 4
    if input.dim() > 2:
        count -= count // 4
    return 32 * count if input.dim() == 2 and input.shape[1] < 16 else count


def _of_feed_forward(call: Any) -> int:
    x, first, _, second, _ = call.tensors
    return x.numel() // max(1, x.shape[-1]) * (first.numel() + second.numel())  # type: ignore[no-any-return]


def _elements(call: Any) -> int:
    return call.tensors[0].numel()  # type: ignore[no-any-return]


#: Op -> (its limit, function that returns a call's size).
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
    """Returns the op's size limits as `PreferLater` records of its CPU kernel."""
    if op not in _RULES:
        return ()
    limit, size = _RULES[op]
    drops = "dropout_p" in RECORDS[op]._fields

    def when(call: Call) -> bool:
        # With dropout PyTorch's op needs further operators.
        if not settings.current.falls_back or (drops and call.arguments.dropout_p != 0.0):
            return False
        if call.needs_grad and limit.rows < 1 << 62:
            return rows(call.tensors[0], call.tensors[-2]) <= limit.rows
        return _weights(call) <= limit.weights or size(call) < limit.any_weights

    return tuple(
        PreferLater(
            size,
            range(below),
            f"PyTorch's op is faster for calls this small (under {below} {limit.unit}"
            + (
                f", at most {limit.weights} weights"
                + (f" or under {limit.any_weights}" if limit.any_weights else "")
                if limit.weights < 1 << 62 and limit.any_weights < below
                else ""
            )
            + (f", at most {limit.rows} rows" if limit.rows < 1 << 62 and needs_grad else "")
            + f", {which} gradients)"
            + ", unless an entry in C++ runs them" * (op == "attention"),
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


#: Op -> (size limits of its entry, without gradients and with; limit of PyTorch's op or None;
#: formula of second derivatives). Below the size limit the entry runs the kernels itself, without
#: cached packed weights (training has none) and the memory pool for large results. Sizes are
#: elements of norms, else multiply-adds. Training 512 rows, 512 -> 128, takes 0.9 of a Python
#: node's time.
_ENTRIES: dict[str, tuple[tuple[int, int], Limit | None, Callable[..., Any] | None]] = {
    "layer_norm": ((1 << 18, 1 << 18), None, layer_norm.gradients_again),
    "add_layer_norm": ((1 << 18, 1 << 18), None, layer_norm.gradients_again),
    "rms_norm": ((1 << 18, 1 << 18), None, layer_norm.gradients_again),
    "add_rms_norm": ((1 << 18, 1 << 18), None, layer_norm.gradients_again),
    "linear": ((1 << 22, 1 << 22) if _TILES else (1 << 25, 1 << 28), LINEAR, linear.products),
    "feed_forward": (
        (1 << 23, 1 << 23) if _TILES else (1 << 26, 1 << 28),
        FEED_FORWARD,
        feed_forward.gradients_again,
    ),
    "attention": ((1 << 22, 1 << 22), None, attention.gradients_again),
    "cross_entropy": ((0, 0), CROSS_ENTROPY, None),
    "linear_cross_entropy": ((0, 0), LINEAR_CROSS_ENTROPY, None),
}
#: Multiply-adds of a product below which whole layers run in their entry, without gradients and with.
#: Larger ones read packed weights or are composed. Two layers in training took 0.66 to 0.97 of the time
#: of composed ones, M from 64 to 512 (AVX2, AVX-512). Entries have no bf16x3 products, for AMX tiles.
LAYER_LIMITS = (1 << 22, 1 << 22) if _TILES else (1 << 24, 1 << 30)
if _native.autograd is None:
    LAYER_LIMITS = 0, 0
#: The dtypes of kernels, numbered as Element in csrc/types.h.
_ELEMENTS = {FLOAT: 1, torch.bfloat16: 2, torch.float16: 3}


def _decline(*_: Any) -> None:
    """Stands for an entry where there is none, and while Dynamo traces."""


def entry(op: str) -> Callable[..., Any]:
    """Returns the op's entry in C++ (``csrc/autograd``), a function of the public function's arguments.

    It checks a call and runs it with autograd nodes in C++, or returns None: the call must be dispatched.
    That is so if the call is traced, transformed or observed, if a backend is named, or if an argument is
    no plain CPU tensor, or wrong. Calls too large for the entry run on the dispatcher's kernel.
    """
    return _decline if _native.autograd is None else getattr(_native.autograd, op)  # type: ignore[no-any-return]


def runs_in_entry(call: Call) -> bool:
    """True if the op's entry runs a small call itself, outside PyTorch's modes and transforms.

    It repeats the conditions of entries of norms, linear layers and networks in csrc/autograd.
    """
    if (
        _native.autograd is None
        or call.op not in ("linear", "feed_forward", "layer_norm", "add_layer_norm")
        or not settings.current.is_direct
        or not settings.current.falls_back
        or _direct(call.op) is None
    ):
        return False
    given, tensors = call.arguments, [x for x in call.tensors if x is not None]
    size, most = _RULES[call.op][1](call), _ENTRIES[call.op][0][call.needs_grad]
    return (
        0 < size < most
        and (call.op != "linear" or given.residual is None)
        and len(getattr(given, "normalized_shape", "1")) == 1
        and not (
            call.needs_grad and max(x.numel() for x in tensors) >= _native.autograd.most_weights
        )
        and _context.are_plain_on_cpu(tensors)
        and all(x.dtype is FLOAT and x.is_contiguous() for x in tensors)
    )


def _direct(op: str) -> Callable[[Any], Any] | None:
    """Returns the CPU kernel's function if the op's entry may run; None: its calls are dispatched."""
    if _native.autograd is None or op not in _ENTRIES:
        return None
    kernel = registry.usable[op][1]["cpu"][0]
    # A validation record decides about kernels that were not timed.
    return kernel.function if kernel.backend == "cpu" and kernel.proven is None else None


def bind(op: str) -> None:
    """Gives the op's entry in C++ the kernel that it calls; to be repeated when kernels change."""
    if _native.autograd is None or op not in _ENTRIES:
        return
    own, limit, formula = _ENTRIES[op]
    limits = (0, 0, 0, 0) if limit is None else (*limit.below, limit.weights, limit.any_weights)
    limited = sum(1 << _ELEMENTS[dtype] for dtype in LIMITED.get(op, ()))
    _native.autograd.bind(op, RECORDS[op], _direct(op), formula, *own, *limits, limited)


at_change.append(bind)


def _trace_entries(dynamo: Any) -> None:
    from torch._dynamo.decorators import substitute_in_graph

    for op in _ENTRIES:
        substitute_in_graph(entry(op), skip_signature_check=True)(_decline)


if _native.autograd is not None:
    assert _native.module is not None
    _native.autograd.connect(_native.module.kernel_table, own_settings, settings, is_observed)
    _native.autograd.bind(
        "encoder_layer", None, None, attention.parts_gradients_again, 0, 0, *LAYER_LIMITS, 0, 0, 0
    )
    when_imported("torch._dynamo", _trace_entries)


def small_size_fallback(
    on: bool | None = None, short: bool | None = None
) -> AbstractContextManager[None]:
    """Context manager that switches the small-size fallback and the dispatcher bypass.

    For tests of kernels, and for commands that record what the dispatcher chose. It applies to its
    context, like `use_backend`.

    Args:
        on: whether small calls run on PyTorch's op; None: unchanged.
        short: whether calls may bypass the dispatcher; None: unchanged.
    """
    given = {"small_size_fallback": on, "bypass": short}
    return changed(**{name: value for name, value in given.items() if value is not None})


def apply_limits() -> None:
    """Recomputes the limits after a change of `_native.unannounced`."""
    for limit in LIMITS:
        limit.__post_init__()


# Large calls reach the dispatcher until it has warned that the kernels are missing.
_native.at_warning.append(apply_limits)
