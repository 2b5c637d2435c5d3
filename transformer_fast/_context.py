"""The context of a call: the package's settings, PyTorch's modes, transforms and tracers, and the types
of the tensors. `is_plain_eager` combines them for the fast path.

The only module on the path of eager calls that uses `torch._C`; registration of operators and the
native module are elsewhere.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _native

own_settings: ContextVar[Any] = ContextVar("transformer_fast settings")


@dataclass(eq=False)
class Settings:
    """The package's settings in one context (`contextvars`); ``settings`` holds the process's."""

    #: Backend set by `use_backend`, or None.
    backend: str | None = None
    strict: bool = False
    #: True if exported programs keep the package's operators.
    export_operators: bool = False
    #: True if the result of a row must not depend on the number of rows.
    batch_invariant: bool = False
    #: False turns the small-size fallback off, also without `batch_invariant`; see `falls_back`.
    small_size_fallback: bool = True
    #: True if plain eager calls may bypass the dispatcher.
    bypass: bool = True
    #: Hashable values in every key of the call cache, for tests and commands; see `key_scope`.
    key_scope: tuple[Any, ...] = ()
    #: The GPU architecture whose tables are read, instead of the device's.
    architecture: int | None = None
    #: Receives the launches of Triton kernels, which then do not run.
    take_launch: Callable[[Any], None] | None = None
    #: The changes that the active blocks of this context make, in order of entry.
    blocks: tuple[dict[str, Any], ...] = ()
    #: Derived from the fields above. `is_direct`: plain eager calls bypass the dispatcher.
    #: `falls_back`: small calls run on PyTorch's op.
    is_direct: bool = True
    falls_back: bool = True

    #: The settings of the innermost block in code that Dynamo traces; an attribute of ``settings``
    #: only. Dynamo simulates its assignment, so it is None in running code.
    traced: Settings | None = None

    #: The context's settings: those of its blocks, else those of the process. A property with a
    #: builtin getter: Dynamo reads such a property while it traces, and guards on it. It cannot
    #: trace `ContextVar.get`.
    current = property(own_settings.get)

    def change(self, changes: dict[str, Any]) -> None:
        for name, value in changes.items():
            setattr(self, name, value)
        self.is_direct = self.bypass and self.backend is None
        self.falls_back = self.small_size_fallback and not self.batch_invariant
        if self.batch_invariant and _native.module is not None:
            # From the first use on, C++ operators call this function: they cannot read contexts of
            # Python.
            _native.module.read_batch_invariant_from(partial(_batch_invariant_of, settings))


#: Reads a setting without a Python frame.
_batch_invariant_of = attrgetter("current.batch_invariant")
#: Defaults of the process, see `set_defaults`: the settings of contexts outside of all blocks.
settings = Settings()


def current_settings() -> Settings:
    """Returns the settings of the context, or of the traced code's blocks while a program is
    traced. Hot paths read ``settings.current``."""
    return settings.traced or settings.current


#: The settings of contexts inside blocks.
_in_blocks: weakref.WeakSet[Settings] = weakref.WeakSet()
_lock = threading.Lock()


def change_defaults(changes: dict[str, Any]) -> None:
    """Changes the settings of the process. A block keeps the values that it has set itself."""
    with _lock:
        settings.change(changes)
        for each in _in_blocks:
            own = {name for block in each.blocks for name in block}
            each.change({name: value for name, value in changes.items() if name not in own})


def _set_blocks(blocks: tuple[dict[str, Any], ...]) -> None:
    with _lock:
        found = _with_blocks(blocks) if blocks else settings
        if blocks:
            _in_blocks.add(found)
    own_settings.set(found)


def _with_blocks(blocks: tuple[dict[str, Any], ...]) -> Settings:
    found = replace(settings, blocks=blocks)
    for changes in blocks:
        found.change(changes)
    return found


@contextmanager
def changed(**changes: Any) -> Iterator[None]:
    """Context manager that changes settings of the context.

    Its end removes only its own changes. So blocks that overlap, such as those of suspended
    generators, may end in any order.
    """
    if torch.compiler.is_dynamo_compiling():
        before = settings.traced
        settings.traced = _with_blocks((*current_settings().blocks, changes))
        try:
            yield
        finally:
            settings.traced = before
        return
    _set_blocks((*settings.current.blocks, changes))
    try:
        yield
    finally:
        _set_blocks(tuple(one for one in settings.current.blocks if one is not changes))


#: Exact tensor types without overrides of ``__torch_function__`` or ``__torch_dispatch__``.
PLAIN = frozenset({Tensor, torch.nn.Parameter})
_STRIDED = torch.strided
#: Subclasses that support operators through their schema, fake implementation or sharding rules.
_SUPPORT_OPERATORS = frozenset(
    {
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch._subclasses.functional_tensor.FunctionalTensor",
        "torch.distributed.tensor.DTensor",
        "torch.distributed.tensor._api.DTensor",
        "torch.distributed._functional_collectives.AsyncCollectiveTensor",
    }
)

# Checks for tracers, modes and transforms, one call each; those of `torch._C` take about 70 ns.
is_compiling = torch.compiler.is_compiling
is_jit_tracing = torch._C._is_tracing
#: Length of the stack of function modes, nearly always 0: hot paths evaluate it before `is_observed`.
#: Dynamo of PyTorch 2.10 cannot trace `_is_torch_function_mode_enabled`.
function_mode_is_active = torch._C._len_torch_function_stack
#: Length of the stack of dispatch modes, those of FakeTensorMode and make_fx included.
dispatch_modes = torch._C._len_torch_dispatch_stack
#: True within torch.func's transforms.
in_torch_func = torch._C._are_functorch_transforms_active
_profiler_enabled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
_is_grad_enabled = torch.is_grad_enabled
#: Wrappers of torch.func's transforms, and of ``is_grads_batched=True``.
is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor
#: For a running backward: whether autograd executes a node; raises for leaves whose gradients it returns.
is_node_executed = torch._C._will_engine_execute_node  # type: ignore[attr-defined]
unwrap_if_dead = torch._C._functorch.unwrap_if_dead
#: ``fp32_precision(device, op)``: "ieee", "tf32", ...
fp32_precision = torch._C._get_fp32_precision_getter


def is_traced() -> bool:
    """True while torch.compile, torch.export or torch.jit.trace records a program."""
    return is_compiling() or is_jit_tracing()


def is_recorded() -> bool:
    """True if calls of operators may be recorded: while tracing, or under a dispatch mode."""
    return is_compiling() or is_jit_tracing() or dispatch_modes() > 0


def may_be_recomputed() -> bool:
    """True in a backward and under hooks of saved tensors: a checkpoint may compute the same call twice,
    and must run the same code both times.
    """
    if torch._C._current_graph_task_id() != -1:
        return True
    hooks: object = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None


#: The ``__torch_function__`` of a Tensor subclass that does not override PyTorch's functions.
disabled_torch_function = torch._C._disabled_torch_function_impl

#: True while torch.export records a program, with or without `export_operators`.
in_torch_export = torch.compiler.is_exporting


def is_exporting() -> bool:
    """True while a program is recorded that may run where this package is not installed.

    These are programs of torch.export, from which the ONNX exporter and AOTInductor start, unless
    `export_operators` is on, and all programs of torch.jit.trace.
    """
    if is_compiling():
        return torch.compiler.is_exporting() and not current_settings().export_operators
    return is_jit_tracing()


def is_observed() -> bool:
    """True if a user's `TorchFunctionMode` is active: the mode must then receive the same calls of
    PyTorch functions that `torch.nn` makes, for all sizes.

    PyTorch's own modes (default device, tracers) do not count: they work with operators. No mode counts
    if a backend is named or in strict mode, which require kernels.
    """
    if is_compiling() or not torch._C._is_torch_function_mode_enabled():
        return False
    if settings.current.backend is not None or settings.current.strict:
        return False
    modes = torch.overrides._get_current_function_mode_stack()
    return any(not type(mode).__module__.startswith("torch.") for mode in modes)


def no_active_modes() -> bool:
    """True if no dispatch or function mode, transform, tracer or profiler is active, so that
    skipping operator calls is unobservable. Does not check for compilation."""
    return not (
        dispatch_modes()
        or function_mode_is_active()
        or forward_ad._current_level >= 0
        or in_torch_func()
        or is_jit_tracing()
        or _profiler_enabled()
    )


def in_forward_mode() -> bool:
    """True within a level of forward-mode differentiation, whether or not a tensor has a tangent."""
    return forward_ad._current_level >= 0


def has_transforms() -> bool:
    """True within torch.func's transforms and levels of forward-mode differentiation."""
    return in_torch_func() or forward_ad._current_level >= 0


def is_transformed(*tensors: Tensor | None) -> bool:
    """True if these tensors carry tangents of forward mode, or a torch.func transform is active.

    Kernels have no rules for either; the reference, in plain PyTorch, has PyTorch's.
    """
    return in_torch_func() or (forward_ad._current_level >= 0 and has_tangents(*tensors))


def has_tangents(*tensors: Tensor | None) -> bool:
    return forward_ad._current_level >= 0 and any(
        tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in tensors
    )


def values_are_known(tensor: Tensor) -> bool:
    """True if Python may branch on the values: a plain tensor with data, no tracing, no transform."""
    if (
        type(tensor) not in PLAIN
        or is_compiling()
        or is_jit_tracing()
        or in_torch_func()
        or tensor.is_meta
    ):
        return False
    if not dispatch_modes():
        return True
    keys, mode = torch._C._TorchDispatchModeKey, torch._C._get_dispatch_mode
    return mode(keys.FAKE) is None and mode(keys.PROXY) is None


def are_plain_on_cpu(tensors: Iterable[Tensor | None]) -> bool:
    """True if all are strided tensors in CPU memory, of no subclass."""
    for tensor in tensors:
        if tensor is not None and not (
            type(tensor) in PLAIN and tensor.layout is _STRIDED and tensor.is_cpu
        ):
            return False
    return True


def only_torch_supports(*tensors: Tensor | None) -> bool:
    """True if a call with these tensors must run PyTorch's own function.

    These are subclasses that override PyTorch's functions, or what those dispatch to; sparse, mkldnn
    and nested tensors; and a first tensor on meta, since PyTorch decides where the others may be.
    """
    if getattr(tensors[0], "is_meta", False):
        return True
    for tensor in tensors:
        if tensor is None:
            continue
        if isinstance(tensor, Tensor) and (
            (type(tensor) not in PLAIN and _overrides(type(tensor)))
            or tensor.layout is not _STRIDED
            or tensor.is_nested
        ):
            return True
    return False


def _overrides(kind: type[Tensor]) -> bool:
    if kind.__torch_function__ is not torch._C._disabled_torch_function_impl:
        return True
    if kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl:  # type: ignore[comparison-overlap]
        return False
    return f"{kind.__module__}.{kind.__qualname__}" not in _SUPPORT_OPERATORS


def is_plain_eager(first: Any, *others: Any) -> bool | None:
    """Returns whether a call on these tensors needs gradients; None if it must be dispatched.

    A call must be dispatched if it is traced, transformed or observed (`is_observed`), if a backend is
    named, or if a tensor is of a subclass, nested or elsewhere than in CPU memory. Dispatch modes do not
    count: they see PyTorch's operators and the kernels'.
    """
    if (
        not settings.current.is_direct
        or type(first) is not Tensor
        or (function_mode_is_active() and is_observed())
        or not first.is_cpu
        or first.is_nested
        or is_compiling()
        or is_jit_tracing()
        or in_torch_func()
        or forward_ad._current_level >= 0
    ):
        return None
    follows = _is_grad_enabled()
    grad = follows and first.requires_grad
    for tensor in others:
        if tensor is not None:
            if type(tensor) not in PLAIN:
                return None
            if follows and not grad and tensor.requires_grad:
                grad = True
    return grad  # type: ignore[no-any-return]


def vmap_size() -> int:
    """Returns how many calls the active `torch.vmap` levels batch into this one."""
    functorch = torch._C._functorch
    return math.prod(
        functorch.CVmapInterpreterPtr(one).batchSize()
        for one in functorch.get_interpreter_stack() or ()
        if one.key() == functorch.TransformType.Vmap
    )


def autograd_below_modes() -> Any:
    """Context manager: enables autograd in ``__torch_dispatch__``, where its keys are excluded."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
