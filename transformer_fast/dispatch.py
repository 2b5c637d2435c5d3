"""Kernel selection: records of kernels and their limits, `select`, `explain`.

A backend registers `Kernel` records: limits as data plus one function per op. `select` takes the
first kernel without a reason to refuse the call. Sizes at which a later backend was measured to be faster
are `PreferLater` records. Of several kernels that are validated on this machine it takes the fastest.
`explain` gives the reasons, in sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _native, _switches, proof
from ._context import (
    PLAIN,
    change_defaults,
    changed,
    current_settings,
    function_mode_is_active,
    has_transforms,
    is_compiling,
    is_exporting,
    is_jit_tracing,
    is_transformed,
    settings,
)
from .ops.arguments import RECORDS, LayerArguments
from .reference import ANNOTATED as ANNOTATED
from .reference import OPS as OPS
from .reference.dropout import draw_seed

#: In the order in which `select` tries them.
BACKENDS = ("cuda", "triton", "cpu", "torch", "reference")
#: Layer-level ops, which `find` dispatches; decomposed into `OPS` if no kernel supports the call.
FUSED = ("encoder_layer", "decoder_layer", "decode_step", "argmax", "embedding")
#: Text of `explain` for a layer-level op that no kernel supports.
COMPOSED = "runs as separate ops, each with its own backend"
#: Backend -> function that returns its status line in `info`.
STATES: dict[str, Callable[[], str]] = {}
#: GPU architecture -> function that lists the launches to compile ahead of time, as pairs
#: (description, function that compiles it). It raises NotImplementedError with the reason if there
#: are none.
AHEAD: dict[int, Callable[[], list[tuple[str, Callable[[], Any]]]]] = {}
#: Device type -> `lookup` of the call cache of its backends (`backends.call_cache`).
CALL_CACHES: dict[str, Callable[..., tuple[Any, Any]]] = {}
#: Names of device types in the sentences of `explain`.
_PLACES = {"cpu": "the CPU", "cuda": "a GPU"}
ANY_DTYPE: frozenset[torch.dtype] = frozenset()


class Call(NamedTuple):
    """A call as the limits of kernels describe it; see `make_call`."""

    op: str
    #: The tensors that kernels compute with; the first gives device and dtype.
    tensors: tuple[Any, ...]
    #: True if autograd records the call.
    needs_grad: bool
    #: The op's record of `ops.arguments`; of a layer-level op a `LayerArguments`.
    arguments: Any


def make_call(arguments: Any, needs_grad: bool) -> Call:
    """Returns the call of an op's record."""
    return Call(type(arguments).op, arguments.tensors(), needs_grad, arguments)


def unpacked(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Converts a function with the signature of ``reference.<op>`` into one that takes the record."""
    return lambda arguments: function(*arguments)


@dataclass(frozen=True)
class PreferLater:
    """Calls for which a later backend was measured to be faster than this kernel.

    A preference, not a limit: ignored for explicitly requested backends, and while tracing, where the
    number of rows is dynamic.
    """

    #: Function that returns the size to compare: `rows`, or another one.
    size: Callable[[Call], int]
    #: The sizes for which a later backend is preferred.
    sizes: range
    #: Why the later backend is preferred, as a sentence.
    because: str
    dtypes: frozenset[torch.dtype]
    #: Applies to calls with gradients if True, else to calls without.
    needs_grad: bool
    #: Further condition on the call or the machine.
    when: Callable[[Call], bool] | None = None


def rows(call: Call) -> int:
    """Returns the number of rows of the call's first tensor, viewed as (rows, columns)."""
    first = call.tensors[0]
    return first.numel() // max(1, first.shape[-1])  # type: ignore[no-any-return]


#: Fields of `Kernel`, and the argument that needs the feature.
_FEATURES = {
    "mask_gradient": "attn_mask",
    "query_lengths": "query_lengths",
    "dropout": "dropout_p",
    "softcap": "softcap",
}


@dataclass(frozen=True)
class Kernel:
    """One backend's implementation of one op, and its limits."""

    op: str
    backend: str
    #: Takes the op's record of `ops.arguments`. For `FUSED` ops the backend defines the signature.
    function: Callable[..., Any]
    devices: tuple[str, ...] = ()  # empty: any
    dtypes: frozenset[torch.dtype] = ANY_DTYPE
    #: Number of leading tensors that must share a dtype; the others may also be float32. None: all
    #: tensors share one dtype.
    same_dtype: int | None = None
    gradients: bool = False
    mask_gradient: bool = False
    query_lengths: bool = False
    dropout: bool = False
    softcap: bool = False
    activations: frozenset[str | None] | None = None  # None: any, callables too
    #: Reason why the kernel cannot run on this machine (not built, no GPU, ...), or None.
    unavailable: str | None = None
    #: Compute capabilities (90 for 9.0) on which results and speed are validated. On other GPUs and
    #: on CPUs the kernel runs only if the machine's record selects it, or if its backend is named.
    #: None: no validation is needed.
    proven: frozenset[int] | None = None
    #: Extra check: returns the reason why the call is unsupported, or None.
    refuses: Callable[[Call], str | None] | None = None
    #: The same for conditions that do not depend on the arguments, such as autocast.
    refuses_context: Callable[[], str | None] | None = None
    #: True if dropout uses PyTorch's generator for this call, so that no seed is drawn.
    drops_as_torch: Callable[[Call], bool] | None = None
    #: Calls for which a later backend that supports them was measured to be faster.
    prefers_later: tuple[PreferLater, ...] = ()
    #: Returns a note for `explain` if the call does not run as the backend's name suggests, or None.
    remark: Callable[[Call], str | None] | None = None
    #: Takes a function of tensors that calls ``function`` without gradients, all other arguments fixed.
    #: Returns an equivalent with a shorter launch path; see `call_cache`.
    record: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    #: The features of `_FEATURES` that calls of the op may need and that the kernel lacks.
    limited: frozenset[str] = field(init=False, repr=False, compare=False)
    has_activation: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        has = RECORDS.get(self.op, LayerArguments)._fields
        names = [name for name, argument in _FEATURES.items() if argument in has]
        limited = [name for name in names if not getattr(self, name)]
        object.__setattr__(self, "limited", frozenset(limited))
        object.__setattr__(self, "has_activation", "activation" in has)

    def runs_on(self, kind: str) -> bool:
        """True if the kernel supports tensors on this type of device."""
        return not self.devices or kind in self.devices

    def run(self, *arguments: Any) -> Any:
        """Runs the kernel on arguments of ``reference.<op>``; `FUSED` ops have other arguments."""
        kind = RECORDS.get(self.op)
        return self.function(*arguments if kind is None else (kind(*arguments),))


def mixes_dtypes(kernel: Kernel, tensors: Sequence[Tensor | None]) -> bool:
    """True if the tensors have dtypes that the kernel does not support together."""
    same = kernel.same_dtype
    dtype = tensors[0].dtype  # type: ignore[union-attr]
    if same is None:
        return any(tensor is not None and tensor.dtype != dtype for tensor in tensors)
    others = {tensor.dtype for tensor in tensors[same:] if tensor is not None}
    # Without a weight, the bias must have the rows' dtype: the weight determines the gradients' dtype.
    if tensors[same] is None:
        return bool(others - {dtype})
    return (
        len(others) > 1
        or not others <= {dtype, torch.float32}
        or any(tensor is not None and tensor.dtype != dtype for tensor in tensors[:same])
    )


@dataclass
class Registry:
    kernels: dict[str, tuple[Kernel, ...]] = field(default_factory=dict)
    #: By op, its kernels and, by type of device, those that `_usable` returns.
    usable: dict[str, tuple[tuple[Kernel, ...], dict[str, tuple[Kernel, ...]]]] = field(
        default_factory=dict
    )


registry = Registry()
#: Functions that `register` calls with the op.
at_change: list[Callable[[str], None]] = []


def register(kernel: Kernel) -> None:
    """Adds a kernel; a second one for the same (op, backend) replaces the first."""
    if kernel.op not in (*OPS, *ANNOTATED, *FUSED) or kernel.backend not in BACKENDS:
        raise ValueError(f"unknown op or backend: {kernel.op!r}, {kernel.backend!r}")
    others = [k for k in registry.kernels.get(kernel.op, ()) if k.backend != kernel.backend]
    found = tuple(sorted([*others, kernel], key=lambda k: BACKENDS.index(k.backend)))
    registry.kernels[kernel.op] = found
    registry.usable[kernel.op] = found, {kind: _usable(found, kind) for kind in ("cpu", "cuda")}
    for act in at_change:
        act(kernel.op)


def kernels(op: str) -> tuple[Kernel, ...]:
    """Returns the kernels of an op, in the order in which `select` tries them."""
    return registry.kernels.get(op, ())


def named_backend() -> str | None:
    """Returns the backend set by `use_backend` or the environment, or None."""
    return current_settings().backend


def is_strict() -> bool:
    """True if `strict` is on."""
    return current_settings().strict


def compute_capability(device: torch.device | int | None = None) -> int:
    """Returns the compute capability of a CUDA device (None: the current one) as 10 * major + minor."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def why_unproven(kernel: Kernel, call: Call | None = None) -> str | None:
    """Returns the reason why a kernel is not validated for calls like this one, or None if it is.

    Validation covers results and speed, per machine, dtype and class of shapes. This function is the
    single source of truth for it. Without a call: for any call on the CPU or the current GPU.
    """
    if kernel.proven is None:
        return None
    kind = kernel.devices[0] if kernel.devices else "cuda"
    if call is not None:
        device = call.tensors[0].device
    elif kind == "cuda" and torch.cuda.is_available():
        device = torch.device(kind, torch.cuda.current_device())
    else:
        device = torch.device("cpu")
    if device.type != kind:
        if not kernel.proven:
            return "not validated on a GPU yet, so it is used only if selected by name"
        known = " and ".join(f"sm_{one}" for one in sorted(kernel.proven))
        return f"validated on {known} only, so elsewhere it is used only if selected by name"
    if kernel.proven and compute_capability(device) in kernel.proven:
        return None
    if kernel.op in FUSED:
        return "only ops are validated, not whole layers, so it is used only if selected by name"
    return proof.why_not(kernel.op, kernel.backend, call, device)


def _gain(kernel: Kernel, call: Call) -> float:
    """Returns the measured speed-up of a kernel over PyTorch's op on the call's device; 0 if unknown."""
    if kernel.proven is None:
        return 0.0
    return proof.gain(kernel.op, kernel.backend, call, call.tensors[0].device)


def why_not(kernel: Kernel, call: Call) -> list[str]:
    """Returns the reasons why ``kernel`` cannot run ``call``; empty if it can."""
    reasons = []
    kind = call.tensors[0].device.type
    if not kernel.runs_on(kind):
        known = " and ".join(kernel.devices)
        reasons.append(f"it supports {known} tensors, and these are on {kind}")
    if kernel.unavailable is not None:
        reasons.append(kernel.unavailable)
    if kernel.backend != "reference" and _is_transformed(call):
        reasons.append("it does not support torch.func transforms and forward-mode differentiation")
    return [*reasons, *_reasons_against(kernel, call)]


def _reasons_against(kernel: Kernel, call: Call) -> Iterator[str]:
    """Yields the limits that a call exceeds, except device and availability.

    Choosing takes the first reason, explaining takes all.
    """
    tensors, dtypes = call.tensors, kernel.dtypes
    if dtypes:
        dtype = tensors[0].dtype
        supported = dtype in dtypes
        for tensor in tensors:
            if tensor is not None and tensor.dtype != dtype:
                supported = False
                break
        if not supported:
            yield from _dtype_reasons(kernel, tensors)
    if call.needs_grad and not kernel.gradients:
        yield "it has no backward, and the call needs gradients"
    if kernel.limited:
        limited, given = kernel.limited, call.arguments
        learns_mask = "mask_gradient" in limited and call.needs_grad and kernel.gradients
        if learns_mask and given.attn_mask is not None and given.attn_mask.requires_grad:
            yield "its backward does not compute the gradient of attn_mask"
        if "query_lengths" in limited and given.query_lengths is not None:
            yield "it does not support query_lengths"
        if "dropout" in limited and given.dropout_p != 0.0:
            yield "it does not support dropout"
        if "softcap" in limited and given.softcap is not None:
            yield "it does not support softcap"
    if kernel.has_activation and kernel.activations is not None:
        activation = call.arguments.activation
        if activation is not None and not isinstance(activation, str):
            yield "it supports named activations only, and the call has a callable"
        elif activation not in kernel.activations:
            yield f"it does not support activation {activation!r}"
    if kernel.refuses_context is not None and (refusal := kernel.refuses_context()) is not None:
        yield refusal
    if kernel.refuses is not None and (refusal := kernel.refuses(call)) is not None:
        yield refusal


def _supports(kernel: Kernel, call: Call) -> bool:
    for _ in _reasons_against(kernel, call):
        return False
    return True


def _dtype_reasons(kernel: Kernel, tensors: Sequence[Tensor | None]) -> Iterator[str]:
    wrong = [t.dtype for t in tensors if t is not None and t.dtype not in kernel.dtypes]
    if wrong:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in kernel.dtypes))
        yield f"it supports {names}, and the call has {str(wrong[0])[6:]}"
    if mixes_dtypes(kernel, tensors):
        also = ", or weight and bias in float32" if kernel.same_dtype is not None else ""
        yield f"it needs all tensors in one dtype{also}, and the call mixes dtypes"


def _is_transformed(call: Call) -> bool:
    return is_transformed(*call.tensors, getattr(call.arguments, "attn_mask", None))


def _usable(kernels: tuple[Kernel, ...], kind: str) -> tuple[Kernel, ...]:
    """Returns the kernels that are available for this type of device."""
    return tuple(k for k in kernels if k.unavailable is None and k.runs_on(kind))


def candidates(op: str, first: Any, compiling: bool = False) -> tuple[Kernel, ...]:
    """Returns the kernels of an op for the device of ``first``, in order of preference."""
    kind = "cpu" if first.is_cpu else first.device.type  # reading `device.type` is slower
    kernels = registry.kernels[op]
    if not compiling:  # Dynamo cannot compare the tuples, and need not be fast
        known = registry.usable.get(op)
        if known is not None and known[0] is kernels and kind in known[1]:
            return known[1][kind]
    return _usable(kernels, kind)


def supports_context(op: str, first: Tensor) -> bool:
    """True if a kernel for the device of ``first`` may support a call of the op now, before the call's
    arguments are known."""
    for kernel in candidates(op, first):
        if kernel.refuses_context is None or kernel.refuses_context() is None:
            return True
    return False


def only_pytorch_runs(op: str, first: Tensor) -> bool:
    """True if only PyTorch's ops can be chosen on the device of ``first``, whatever the call: no kernel
    is validated or built there, or none supports the device."""
    if current_settings().backend is not None or current_settings().strict:
        return False
    for kernel in candidates(op, first, is_compiling()):
        if kernel.backend in ("torch", "reference"):
            return True
        if why_unproven(kernel) is None:
            return False
    return True


def why_prefers_later(kernel: Kernel, call: Call) -> str | None:
    """Returns the reason why a later backend is preferred for a supported call, or None."""
    if is_compiling() or settings.current.batch_invariant:
        return None
    needs_grad, dtype = call.needs_grad, call.tensors[0].dtype
    for limit in kernel.prefers_later:
        if (
            limit.needs_grad == needs_grad
            and dtype in limit.dtypes
            # Not ``in``, which compares a symbolic size with every number of the range.
            and limit.sizes.start <= limit.size(call) < limit.sizes.stop
            and (limit.when is None or limit.when(call))
        ):
            return limit.because
    return None


def _why_not_chosen(kernel: Kernel, call: Call) -> list[str]:
    kind = call.tensors[0].device.type
    if not kernel.runs_on(kind):  # the other reasons are irrelevant then
        return [f"the tensors are on {_PLACES.get(kind, f'a {kind} device')}"]
    reasons = why_not(kernel, call)
    if (unproven := why_unproven(kernel, call)) is not None:
        reasons.append(unproven)
    if not reasons and (because := why_prefers_later(kernel, call)) is not None:
        reasons.append(because)
    return reasons


def _reasons(call: Call) -> dict[str, list[str]]:
    """Returns backend -> reasons why it is not chosen; backends of other devices come last."""
    kind = call.tensors[0].device.type
    kernels = sorted(registry.kernels[call.op], key=lambda kernel: not kernel.runs_on(kind))
    return {kernel.backend: _why_not_chosen(kernel, call) for kernel in kernels}


def _reason_lines(reasons: dict[str, list[str]], template: str) -> list[str]:
    """Returns a line for each reason, with the backends that share it."""
    groups: dict[str, list[str]] = {}
    for backend, why in reasons.items():
        groups.setdefault(
            "; ".join(why) or "the selected backend comes first in the order", []
        ).append(backend)
    return [template.format(", ".join(names), why) for why, names in groups.items()]


def _strict_refusal(call: Call) -> NotImplementedError:
    reasons = _reasons(call)
    reasons.pop("reference", None)
    lines = _reason_lines(reasons, "  {}: {}.")
    return NotImplementedError(
        "\n".join([f"strict mode: no kernel supports this call of {call.op}:", *lines])
    )


def select(call: Call, backend: Any = None) -> Kernel:
    """Returns the kernel that runs ``call``.

    ``backend=None``: the validated kernel with the largest gain; else the first that supports the
    call and for which no later backend is preferred, and finally the reference. A named backend, given
    here, by `use_backend` or by ``TRANSFORMER_FAST_BACKEND``, never falls back. While a program is
    exported (`is_exporting`) the kernel consists of PyTorch's operators. Calls under `is_transformed` run
    the reference's formula, even if a backend is named: no kernel has rules for them.

    Raises ValueError for an unknown backend, NotImplementedError (with the reasons) if the named
    backend does not support the call, or in strict mode if only the reference does.
    """
    now = settings.traced or settings.current  # `current_settings` without a call
    if backend is None:
        backend = now.backend
    if has_transforms() and _is_transformed(call):
        if backend is not None:
            check_name(backend)
        if now.strict:
            raise _strict_refusal(call)
        return registry.kernels[call.op][-1]
    if backend is None:
        compiling = is_compiling()
        if (compiling or is_jit_tracing()) and is_exporting():
            return _pytorchs(call)
        preferring = proven = None
        most = -1.0
        for kernel in candidates(call.op, call.tensors[0], compiling):
            if kernel.proven is not None:  # such kernels come before all others
                if _supports(kernel, call) and why_unproven(kernel, call) is None:
                    gain = _gain(kernel, call)
                    if gain > most:
                        proven, most = kernel, gain
                continue
            if proven is not None:
                return proven
            if _supports(kernel, call):
                if kernel.backend == "reference" and (now.strict or preferring is not None):
                    break
                if kernel.prefers_later and why_prefers_later(kernel, call) is not None:
                    preferring = preferring or kernel
                    continue
                return kernel
        if (found := proven or preferring) is not None:
            return found
        raise _strict_refusal(call)
    for kernel in registry.kernels[call.op]:
        if kernel.backend == backend:
            reasons = why_not(kernel, call)
            if not reasons:
                return kernel
            raise NotImplementedError(
                f"backend {backend!r} does not support this call of {call.op}: {'; '.join(reasons)}."
            )
    check_name(backend)
    raise NotImplementedError(f"backend {backend!r} has no kernel for {call.op}.")


def lookup(op: str, tensors: tuple[Any, ...], others: tuple[Any, ...]) -> tuple[Any, Any]:
    """Looks a call up in the call cache of its device's backends; CPU backends have none.

    Returns (replay, insert). ``replay`` is the cached function of the tensors, None on a miss. ``insert``
    is an argument of `run`, which fills the cache; None if the call is not cacheable.
    """
    first = tensors[0]
    # A function mode would intercept the reads of attributes.
    if not CALL_CACHES or type(first) not in PLAIN or function_mode_is_active():
        return None, None
    kind = "cuda" if first.is_cuda else "cpu"
    return CALL_CACHES[kind](op, tensors, others) if kind in CALL_CACHES else (None, None)


def run(
    call: Call,
    backend: str | None = None,
    insert: Callable[..., None] | None = None,
    finish: Callable[[Any], Any] | None = None,
) -> Any:
    """Runs a call on the kernel that `select` returns, with a dropout seed from PyTorch's generator.

    ``insert``: returned by `lookup`. ``finish``: a function that is applied to the kernel's result.
    """
    kernel, arguments = select(call, backend), call.arguments
    if _native.unannounced and call.tensors[0].is_cpu:
        _native.warn_of_absence()
    if 0.0 < getattr(arguments, "dropout_p", 0.0) < 1.0 and not (
        kernel.drops_as_torch is not None and kernel.drops_as_torch(call)
    ):
        arguments = arguments._replace(seed=draw_seed(arguments[0].device))
    if insert is not None:
        insert(kernel, arguments, call.needs_grad, finish)
    elif is_compiling():
        arguments = _distinct(arguments)
    result = kernel.function(arguments)
    return result if finish is None else finish(result)


def _distinct(arguments: Any) -> Any:
    """Returns the record with a view in place of each repeated tensor.

    Dynamo does not trace autograd functions that get the same tensor twice.
    """
    found: list[Any] = []
    for value in arguments:
        if isinstance(value, Tensor) and any(value is one for one in found):
            value = value.view_as(value)
        found.append(value)
    return type(arguments)(*found)


def find(call: Call) -> Kernel | None:
    """Returns the kernel that runs a layer-level op, or None if it must be decomposed into ops.

    A named backend runs its own kernel for it, or its own ops.
    """
    backend = (settings.traced or settings.current).backend  # `current_settings` without a call
    for kernel in candidates(call.op, call.tensors[0]):
        if backend not in (None, kernel.backend) or not _supports(kernel, call):
            continue
        if backend is not None or why_unproven(kernel, call) is None:
            return None if is_transformed(*call.tensors) else kernel
    return None


def _pytorchs(call: Call) -> Kernel:
    """Returns the first of `torch` and `reference` that fits: both use only PyTorch operators."""
    for kernel in registry.kernels[call.op]:
        if kernel.backend == "torch" and not why_not(kernel, call):
            return kernel
    if current_settings().strict:
        raise _strict_refusal(call)
    return registry.kernels[call.op][-1]


def check_name(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`: the selected backend, and why the others are not used.

    ``str()`` returns it in sentences.
    """

    op: str
    #: The backend that would run the call, or None if none can.
    backend: str | None
    #: Backend -> reasons why it would not be selected. Backends of other devices come last.
    reasons: dict[str, list[str]]
    #: A note on how the backend runs the call, or None. If `backend` is None: what happens instead.
    remark: str | None = None
    #: The op with the arguments that matter: shapes and dtypes, and values that are not defaults.
    call: str = ""

    def __str__(self) -> str:
        remark = f": {self.remark}" if self.remark is not None else ""
        head = (
            f"{self.op} runs on '{self.backend}'{remark}."
            if self.backend is not None
            else f"{self.op} {self.remark or 'cannot run on any backend'}."
        )
        others = {f"'{one}'": why for one, why in self.reasons.items() if one != self.backend}
        call = [f"  call: {self.call}"] if self.call else []
        return "\n".join([head, *_reason_lines(others, "  not {}: {}."), *call])


def explain_call(call: Call, backend: str | None = None) -> Explanation:
    """`explain` for a prepared call."""
    found = _explain(call, backend)
    return found if call.op in FUSED else replace(found, call=repr(call.arguments))


def _explain(call: Call, backend: str | None) -> Explanation:
    reasons = _reasons(call)
    named = backend or current_settings().backend
    for name in reasons:
        if named not in (None, name):
            reasons[name] = [f"use_backend or backend= selects {named!r}"]
    if call.op in FUSED:
        found = find(call)
        if found is None:
            return Explanation(call.op, None, reasons, COMPOSED)
        return Explanation(call.op, found.backend, reasons)
    try:
        chosen = select(call, backend)
    except NotImplementedError:
        if named is not None:
            first = {k.backend: why_not(k, call) for k in kernels(call.op) if k.backend == named}
            return Explanation(
                call.op, None, first | {**reasons, **first}, f"cannot run on {named!r}"
            )
        return Explanation(call.op, None, reasons | {"reference": ["strict mode excludes it"]})
    for kernel in registry.kernels[call.op]:
        if kernel is not chosen and chosen.proven is not None and not reasons[kernel.backend]:
            own, best = (_gain(one, call) for one in (kernel, chosen))
            if own:
                sentence = (
                    "on this machine it is {:.3g} times as fast as PyTorch's op, and '{}' {:.3g} "
                    "times"
                )
                reasons[kernel.backend] = [sentence.format(own, chosen.backend, best)]
    remark = chosen.remark(call) if chosen.remark is not None else None
    return Explanation(call.op, chosen.backend, reasons, remark)


def use_backend(backend: str | None) -> AbstractContextManager[None]:
    """Context manager that runs every call on ``backend``.

    It applies to its context (`contextvars`): this thread or asyncio task, no other. `set_defaults` and
    ``TRANSFORMER_FAST_BACKEND`` set it for the process. A backward runs on the backend of its forward.

    Args:
        backend: "cuda", "triton", "cpu", "torch" or "reference"; None: the dispatcher chooses.

    Raises:
        ValueError: the backend is unknown. Inside the block, calls that the backend does not support
            raise NotImplementedError with the reasons.
    """
    if backend is not None:
        check_name(backend)
    return changed(backend=backend)


def strict(enabled: bool = True) -> AbstractContextManager[None]:
    """Context manager in which calls raise NotImplementedError instead of running on the reference.

    It applies to its context, like `use_backend`. `set_defaults` and ``TRANSFORMER_FAST_STRICT=1`` set it
    for the process.

    Args:
        enabled: False turns it off inside the block.
    """
    return changed(strict=enabled)


def export_operators(enabled: bool = True) -> AbstractContextManager[None]:
    """Context manager in which `torch.export` keeps this package's operators in the program.

    Without it an exported program contains only PyTorch operators and runs where this package is not
    installed. With it the program is as fast as a compiled one; import ``transformer_fast`` before
    loading it. ONNX lacks these operators, and programs of `torch.jit.trace` never keep them. It applies
    to its context, like `use_backend`. `set_defaults` and ``TRANSFORMER_FAST_EXPORT_OPERATORS=1`` set it
    for the process.
    """
    return changed(export_operators=enabled)


def batch_invariant(enabled: bool = True) -> AbstractContextManager[None]:
    """Context manager in which a row's result does not depend on the number of rows in the call.

    Otherwise the number of rows selects between CPU kernels that sum in different orders, and between
    those and PyTorch's ops, so that the last bits of a sequence depend on its batch. Covers the forward
    of the CPU kernels in float32, bfloat16 and float16, but not gradients of weights, which are sums over
    the rows, nor the backends `torch` and `reference`. It is slower for few rows. It applies to its
    context, like `use_backend`. `set_defaults` and ``TRANSFORMER_FAST_BATCH_INVARIANT=1`` set it for the
    process.

    Args:
        enabled: False turns it off inside the block.
    """
    return changed(batch_invariant=enabled)


_UNCHANGED: Any = object()


def set_defaults(
    *,
    backend: str | None = _UNCHANGED,
    strict: bool = _UNCHANGED,
    export_operators: bool = _UNCHANGED,
    batch_invariant: bool = _UNCHANGED,
) -> None:
    """Sets the defaults of the process, for all threads and tasks outside of context managers.

    Arguments that are not given stay as they are. The environment variables ``TRANSFORMER_FAST_BACKEND``,
    ``_STRICT``, ``_EXPORT_OPERATORS`` and ``_BATCH_INVARIANT`` are the defaults at the start.

    Args:
        backend: see `use_backend`; None: the dispatcher chooses.
        strict: see `strict`.
        export_operators: see `export_operators`.
        batch_invariant: see `batch_invariant`.

    Raises:
        ValueError: the backend is unknown.
    """
    if backend is not None and backend is not _UNCHANGED:
        check_name(backend)
    given = {
        "backend": backend,
        "strict": strict,
        "export_operators": export_operators,
        "batch_invariant": batch_invariant,
    }
    change_defaults({name: value for name, value in given.items() if value is not _UNCHANGED})


def _read_environment() -> None:
    set_defaults(
        backend=_switches.choice("TRANSFORMER_FAST_BACKEND", BACKENDS),
        strict=_switches.flag("TRANSFORMER_FAST_STRICT"),
        export_operators=_switches.flag("TRANSFORMER_FAST_EXPORT_OPERATORS"),
        batch_invariant=_switches.flag("TRANSFORMER_FAST_BATCH_INVARIANT"),
    )


_read_environment()
