"""Base of the drop-in modules: state of modules whose class `transformer_fast.accelerate` replaced, and
the calls that `torch.nn` runs: on nested tensors, in torch.fx, without kernels."""

from __future__ import annotations

import copyreg
import sys
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch.fx import Proxy
from torch.nn.utils.parametrize import is_parametrized

from .. import _native, dispatch
from .._context import function_mode_is_active, is_observed
from .int8 import INT8, HoldsInt8, is_freed

#: Name of the attribute that holds the original class and its replacement. Replaced instances have
#: this attribute, and so do classes that `accelerate` creates.
RECORD = "_classes_of_accelerate"


def recorded_classes(module: torch.nn.Module) -> tuple[type, type] | None:
    """Returns the class that `accelerate` replaced and its replacement, or None.

    Modules created by ``type(module)(...)`` after `accelerate`, such as a slice of a Sequential, have the
    record of their class.
    """
    record: tuple[type, type] | None = module.__dict__.get(RECORD)
    return type(module).__dict__.get(RECORD) if record is None else record


def original_class(module: torch.nn.Module) -> type:
    """Returns the class that the module had before `accelerate`, or has been given since."""
    kind, record = type(module), recorded_classes(module)
    return kind if record is None or record[1] is not kind else record[0]


class _QConfig:
    """The attribute ``qconfig``, which `torch.ao.quantization` assigns before it converts modules.

    It looks modules up by their exact class and silently skips ours; assignment warns of that. The value
    is stored in the instance, so that the attribute is missing until it is assigned.
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
    """Warns at the innermost line of the stack that is not in this package, torch or contextlib."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and _is_internal(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _is_internal(module: str) -> bool:
    return module.split(".")[0] in ("contextlib", "torch", "transformer_fast", "typing_extensions")


def pytorchs_forward(kind: type) -> Any:
    """Returns the ``forward`` of a class as the class's own module defines it, or None if replaced.

    A replacement that keeps name and module (`functools.wraps`) still has other globals.
    """
    for base in kind.__mro__:
        forward = base.__dict__.get("forward")
        if forward is not None:
            module = sys.modules.get(base.__module__)
            return forward if getattr(forward, "__globals__", None) is vars(module) else None
    return None


#: Packages whose layers a trial call can test: they branch neither on values of tokens, nor on their
#: positions in the batch, nor on state.
KNOWN_PACKAGES = ("peft", "torch", "transformer_fast", "transformers")


def is_of_others(value: Any) -> bool:
    """True if a method of any kind, or a property, runs code that is not of `KNOWN_PACKAGES`."""
    for function in functions_of(value):
        package = function.__globals__.get("__name__", "").partition(".")[0]
        if package not in KNOWN_PACKAGES and package not in sys.stdlib_module_names:
            return True
    return False


def functions_of(value: Any) -> Iterator[FunctionType]:
    """Yields the functions of a method of any kind, or of a property, and those that they wrap."""
    for function in (value, *(getattr(value, name, None) for name in ("__func__", "fget"))):
        while function is not None:
            if isinstance(function, FunctionType):
                yield function
            function = getattr(function, "__wrapped__", None)


#: (class, name, method) of each method that a call of a class's modules may run, before anything
#: replaced it; None: it was replaced before. Of PyTorch's classes and ours only ``forward``.
_Methods = tuple[tuple[type, str, Any], ...]
#: Methods of module-level classes, which stay. Subclasses of `DropIn` hold theirs in `_NOTED`.
_METHODS: dict[type, _Methods] = {}
_NOTED = "_methods_at_first"
#: Methods of other classes, as weak references to classes and methods.
_weak_methods: WeakKeyDictionary[type, tuple[tuple[Any, str, Any], ...]] = WeakKeyDictionary()


def _note(kind: type, methods: _Methods) -> None:
    found = getattr(sys.modules.get(kind.__module__), kind.__name__, None)
    if issubclass(kind, DropIn):
        type.__setattr__(kind, _NOTED, methods)
    elif kind.__module__.partition(".")[0] in KNOWN_PACKAGES and found is kind:
        _METHODS.setdefault(kind, methods)
    elif kind not in _weak_methods:
        _weak_methods[kind] = tuple((ref(b), name, _weak(method)) for b, name, method in methods)


def _weak(value: Any) -> Callable[[], Any]:
    try:
        return ref(value)
    except TypeError:  # None, or another type without weak references
        return lambda: value


def note_methods(kind: type) -> _Methods:
    """Returns the methods of the class and its bases before any was replaced; see `_Methods`."""
    known: _Methods | None = _METHODS.get(kind) or kind.__dict__.get(_NOTED)
    if known is not None:
        return known
    if (weak := _weak_methods.get(kind)) is not None:
        return tuple((base(), name, method()) for base, name, method in weak)
    found: list[tuple[type, str, Any]] = []
    for base in kind.__mro__:
        package = base.__module__.partition(".")[0]
        is_defined = package in ("torch", "transformer_fast")
        for name, value in () if is_defined else vars(base).items():
            if isinstance(value, FunctionType) and name[:2] != "__" and name != "forward":
                found.append((base, name, value))
        if base is kind or "forward" in base.__dict__:
            forward = pytorchs_forward(base) if is_defined else base.forward  # type: ignore[attr-defined]
            if package == "transformers" and is_of_others(forward):
                forward = None
            found.append((base, "forward", forward))
        if base.__module__.startswith("torch."):
            _note(base, tuple(found[-1:]))
            break
    _note(kind, tuple(found))
    return tuple(found)


def is_patched(*kinds: type) -> bool:
    """True if ``forward`` was replaced on a class of modules, or on the torch.nn class that it extends.

    Methods of classes of other packages are compared with those that they had at the first call.
    """
    for kind in kinds:
        methods = _METHODS.get(kind) or getattr(kind, _NOTED, None)
        if methods is None:
            if torch.compiler.is_compiling():
                continue
            methods = note_methods(kind)
        for base, name, method in methods:
            if getattr(base, name, None) is not method:
                return True
    return False


_subclasses: WeakValueDictionary[tuple[Any, ...], type[torch.nn.Module]] = WeakValueDictionary()


def subclass(
    theirs: type, bases: tuple[type, ...], **attributes: Any
) -> type[torch.nn.Module] | str:
    """Returns a class with these bases and the name of ``theirs``, or the reason why it fails."""
    key = (bases, *attributes.items())
    made = _subclasses.get(key)
    if made is None:
        names = {"__module__": theirs.__module__, "__qualname__": theirs.__qualname__}
        try:
            made = type(theirs.__name__, bases, {**names, **attributes})
            setattr(made, RECORD, (theirs, made))
            _subclasses[key] = made
        except Exception as error:  # raised by the user's metaclass or __init_subclass__
            return f"{theirs.__name__} cannot be subclassed: {error}"
    return made


def _unpickled(original: type, bases: tuple[type, ...]) -> torch.nn.Module:
    """Returns an empty instance of the class that `accelerate` gave a module of class ``original``."""
    kind = bases[0] if len(bases) == 1 else subclass(original, bases)
    module: Any = object.__new__(kind)  # type: ignore[arg-type]
    if kind is not original:
        module.__dict__[RECORD] = (original, kind)
    return module  # type: ignore[no-any-return]


#: PyTorch's code reads the weights of these layers' linear layers, and converts 8-bit ones to
#: floats.
_READERS = (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer)


class DropIn(HoldsInt8):
    """Base of the classes that `accelerate` assigns to existing modules.

    A copy of such a module keeps its class, but a pickle has the original one, so that it loads where
    this library is not installed. Other instances are not affected. If
    ``accelerate(keep_weights=False)`` freed weights, a pickle has our class, which runs in 8 bits.
    """

    qconfig = _QConfig()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        note_methods(cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        record, int8 = recorded_classes(self), self.__dict__.get(INT8)
        if (record is None and int8 is None) or reduced[0] not in (
            copyreg.__newobj__, copyreg._reconstructor,  # type: ignore[attr-defined]
        ):  # fmt: skip
            return reduced
        original, kind = record or (type(self), type(self))
        freed = is_freed(self) or (
            isinstance(self, _READERS) and any(map(is_freed, self.modules()))
        )
        left = (RECORD,) if freed else (RECORD, INT8)
        state = reduced[2]
        if isinstance(state, dict):
            state = {name: value for name, value in state.items() if name not in left}
        if freed:
            is_made = RECORD in kind.__dict__
            return _unpickled, (original, kind.__bases__ if is_made else (kind,)), state
        # `copyreg.__newobj__` would fail: pickle requires that it gets the object's own class.
        return copyreg._reconstructor, (original, object, None), state  # type: ignore[attr-defined]

    def __copy__(self) -> Any:
        copied, state = _remade(self)
        _give_state(copied, state.copy() if isinstance(state, dict) else state)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if is_parametrized(self):
            # Parametrised modules raise when pickled, so `_remade` cannot copy them. PyTorch
            # gives this `__deepcopy__` to parametrised classes that define none.
            copied = self.__new__(type(self))
            memo[id(self)] = copied
            copied.__dict__ = deepcopy(self.__dict__, memo)
            return copied
        copied, state = _remade(self)
        memo[id(self)] = copied
        _give_state(copied, deepcopy(state, memo))
        return copied


def _remade(module: DropIn) -> tuple[Any, Any]:
    """Returns a new instance of the module's own class, and the state to give it."""
    reduced: Any = super(DropIn, module).__reduce_ex__(4)
    make, arguments, state = reduced[:3]
    return make(*arguments), state


def _give_state(module: Any, state: Any) -> None:
    if state is not None:
        module.__setstate__(state)


def runs_torch_forward(input: Any, kind: type) -> bool:
    """True if a module that extends ``kind`` must run torch.nn's forward on ``input``; see `by_torch`."""
    return (
        isinstance(input, Proxy)
        or is_patched(kind)
        or (function_mode_is_active() and is_observed())
        or getattr(input, "is_nested", False)
        or (_native.module is None and without_kernels(input))
    )


def without_kernels(input: Any) -> bool:
    """True if torch.nn's own forward is the fastest: on CPU tensors, if the native module is missing.
    False if a backend is named or in strict mode: these require the package's ops."""
    return (
        _native.module is None
        and getattr(input, "is_cpu", False)
        and dispatch.named_backend() is None
        and not dispatch.is_strict()
    )


def by_torch(
    module: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Returns the result of torch.nn's ``forward``; for torch.fx one node that calls ``module``.

    torch.fx does not trace into the modules of torch.nn, and must not trace into ours.
    """
    if isinstance(args[0], Proxy):
        tracer: Any = args[0].tracer
        return tracer.create_proxy("call_module", tracer.path_of_module(module), args, kwargs)
    if _native.unannounced:
        _native.warn_of_absence()
    return forward(*args, **kwargs)
