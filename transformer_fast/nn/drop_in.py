"""What drop-in modules have in common: their state where `transformer_fast.accelerate` has swapped
their class, and the calls that `torch.nn` runs: of nested tensors, in torch.fx, without kernels."""

from __future__ import annotations

import copyreg
import sys
import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch.fx import Proxy
from torch.nn.utils.parametrize import is_parametrized

from .. import _native, dispatch
from .._context import function_mode_is_active, is_observed

#: The attribute that holds the class the module had before, and the one it was given. Instances hold
#: it, and so do classes that exist for `accelerate` alone.
RECORD = "_classes_of_accelerate"


def recorded_classes(module: torch.nn.Module) -> tuple[type, type] | None:
    """The class that `accelerate` replaced and its replacement, or None if it did not.

    The class's own record is that of modules made by ``type(module)(...)``, such as a slice of a
    Sequential, which `accelerate` has not seen.
    """
    record: tuple[type, type] | None = module.__dict__.get(RECORD)
    return type(module).__dict__.get(RECORD) if record is None else record


class _QConfig:
    """The attribute ``qconfig``, which `torch.ao.quantization` assigns before it converts modules.

    It looks modules up by their exact class, and skips ours without a word. The value is kept in
    the instance, so that the attribute is missing until it is assigned.
    """

    def __get__(self, module: torch.nn.Module | None, owner: type) -> Any:
        try:
            return vars(module)["qconfig"]
        except (KeyError, TypeError):
            raise AttributeError("qconfig") from None

    def __set__(self, module: torch.nn.Module, value: Any) -> None:
        vars(module)["qconfig"] = value
        if recorded_classes(module) is not None:
            of, first = "that accelerate replaced", "call transformer_fast.restore(model)"
        else:
            of, first = "of transformer_fast.nn", "build the model from torch.nn"
        warn_user(
            f"torch.ao.quantization does not convert modules {of}: {first}, quantise it, and then "
            "accelerate the modules that are not quantised"
        )

    def __delete__(self, module: torch.nn.Module) -> None:
        vars(module).pop("qconfig", None)


def warn_user(message: str) -> None:
    """Warns at the first line that led here and is not in this package, torch or contextlib."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and _is_internal(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _is_internal(module: str) -> bool:
    return module.split(".")[0] in ("contextlib", "torch", "transformer_fast", "typing_extensions")


def pytorchs_forward(kind: type) -> Any:
    """The ``forward`` of a class as the class's own module defines it, or None if it was replaced.

    A replacement that keeps name and module (`functools.wraps`) still has other globals.
    """
    for base in kind.__mro__:
        forward = base.__dict__.get("forward")
        if forward is not None:
            module = sys.modules.get(base.__module__)
            return forward if getattr(forward, "__globals__", None) is vars(module) else None
    return None


#: By class, the classes whose ``forward`` its calls run, each with that function as it was defined.
_FORWARDS: dict[type, tuple[tuple[Any, Any], ...]] = {}


def note_forward(kind: type) -> None:
    """Records the ``forward`` of a class, and of the torch.nn class that it extends, for `is_patched`."""
    known: list[tuple[Any, Any]] = []
    for base in kind.__mro__:
        if base is kind or "forward" in base.__dict__:
            defined = base.__module__.partition(".")[0] in ("torch", "transformer_fast")
            known.append((base, pytorchs_forward(base) if defined else base.forward))  # type: ignore[attr-defined]
        if base.__module__.startswith("torch."):
            _FORWARDS.setdefault(base, tuple(known[-1:]))
            break
    _FORWARDS[kind] = tuple(known)


def is_patched(*kinds: type) -> bool:
    """True if ``forward`` was replaced on a class of modules, or on the torch.nn class that it extends.

    Of classes that are neither torch.nn's nor ours the ``forward`` counts that they had when first seen.
    """
    for kind in kinds:
        known = _FORWARDS.get(kind)
        if known is None:
            if torch.compiler.is_compiling():
                continue
            note_forward(kind)
            known = _FORWARDS[kind]
        for base, forward in known:
            if base.forward is not forward:
                return True
    return False


class DropIn(torch.nn.Module):
    """Base of the classes that `accelerate` assigns to existing modules.

    Such a module is copied as it is, but pickled as what it was before: a pickle has to load where
    this library is not installed. On all other instances this has no effect.
    """

    qconfig = _QConfig()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        note_forward(cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        record = recorded_classes(self)
        if record is None or reduced[0] not in (copyreg.__newobj__, copyreg._reconstructor):  # type: ignore[attr-defined]
            return reduced
        state = reduced[2]
        if isinstance(state, dict):
            state = {name: value for name, value in state.items() if name != RECORD}
        # Not __newobj__, which pickle allows for the object's own class only.
        return copyreg._reconstructor, (record[0], object, None), state  # type: ignore[attr-defined]

    def __copy__(self) -> Any:
        copied, state = _remade(self)
        _give_state(copied, state.copy() if isinstance(state, dict) else state)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if is_parametrized(self):
            # Its state raises when asked for. PyTorch gives classes without a `__deepcopy__` one that
            # does this.
            copied = self.__new__(type(self))
            memo[id(self)] = copied
            copied.__dict__ = deepcopy(self.__dict__, memo)
            return copied
        copied, state = _remade(self)
        memo[id(self)] = copied
        _give_state(copied, deepcopy(state, memo))
        return copied


def _remade(module: DropIn) -> tuple[Any, Any]:
    """A new instance of the module's own class, and the state it is to get."""
    reduced: Any = super(DropIn, module).__reduce_ex__(4)
    make, arguments, state = reduced[:3]
    return make(*arguments), state


def _give_state(module: Any, state: Any) -> None:
    if state is not None:
        module.__setstate__(state)


def runs_torch_forward(input: Any, kind: type) -> bool:
    """Whether a module that extends ``kind`` should leave a call on ``input`` to `by_torch`."""
    return (
        isinstance(input, Proxy)
        or is_patched(kind)
        or (function_mode_is_active() and is_observed())
        or getattr(input, "is_nested", False)
        or (_native.module is None and without_kernels(input))
    )


def without_kernels(input: Any) -> bool:
    """Whether the native module is missing where ``input`` is, so that `torch.nn`'s own forward is the
    fastest. A named backend and strict mode ask for the package's ops."""
    return (
        _native.module is None
        and getattr(input, "is_cpu", False)
        and dispatch.named_backend() is None
        and not dispatch.is_strict()
    )


def by_torch(
    module: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """The result of ``forward``, torch's own; for torch.fx one node that calls ``module``.

    torch.fx does not look into the modules of torch.nn, and so must not look into ours.
    """
    if isinstance(args[0], Proxy):
        tracer: Any = args[0].tracer
        return tracer.create_proxy("call_module", tracer.path_of_module(module), args, kwargs)
    return forward(*args, **kwargs)
