"""Replaces the class of an existing module, or returns the reason not to."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from .. import nn
from .._context import PLAIN
from ..nn import fusion
from ..nn.drop_in import (
    KNOWN_PACKAGES,
    RECORD,
    functions_of,
    is_of_others,
    original_class,
    subclass,
)
from ..nn.int8 import INT8
from ..nn.transformer_layers import may_have_fast_path

#: Attributes that do not affect what a module computes: those of every module, and our records.
OF_ANY_MODULE = frozenset({*vars(torch.nn.Module()), "_is_hf_initialized", INT8, RECORD})
#: Types of attributes that are compared by value.
PLAIN_VALUES = (
    bool, int, float, str, type(None), types.FunctionType, types.BuiltinFunctionType,
    functools.partial,
)  # fmt: skip


def is_plain(value: Any) -> bool:
    """True for an attribute that is compared by value."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return isinstance(value, (*PLAIN_VALUES, torch.dtype, torch.device))


class Change(Protocol):
    """A change of one module; ``apply`` and ``undo`` either complete, or raise without effect."""

    name: str
    module: torch.nn.Module

    @property
    def now(self) -> str:
        """The class that the module runs as after `apply`, for the report."""

    def apply(self) -> None: ...

    def undo(self) -> None: ...


@dataclass
class ClassChange:
    """Assigns another class to the module and records both; attributes stay the same objects."""

    name: str
    module: torch.nn.Module
    before: type
    after: type
    #: A remark for the report.
    note: str = ""
    #: The class before an earlier change, whose record this one replaces; None: ``before``.
    original: type | None = None

    @property
    def now(self) -> str:
        return class_of_ours(self.after)

    def apply(self) -> None:
        self.module.__class__ = self.after
        self.module.__dict__[RECORD] = (self.original or self.before, self.after)

    def undo(self) -> None:
        if type(self.module) is not self.after:
            raise RuntimeError(
                f"{self.name or 'the model'} cannot be restored: after accelerate its class was "
                f"changed again, to {type(self.module).__name__}; undo that first"
            )
        self.module.__class__ = self.before
        self.module.__dict__.pop(RECORD, None)
        if self.original is not None:
            self.module.__dict__[RECORD] = (self.original, self.before)


def apply_all(changes: Sequence[Change]) -> None:
    """Makes all changes, or none if one of them raises."""
    _all_or_none(changes, lambda c: c.apply(), lambda c: c.undo())


def undo_all(changes: Sequence[Change]) -> None:
    """Undoes all changes, or none if one of them raises."""
    _all_or_none(list(reversed(changes)), lambda c: c.undo(), lambda c: c.apply())


def _all_or_none(
    changes: Sequence[Change], do: Callable[[Change], Any], reverse: Callable[[Change], Any]
) -> None:
    done: list[Change] = []
    try:
        for change in changes:
            do(change)
            done.append(change)
    except BaseException:
        for change in reversed(done):
            reverse(change)
        raise


@contextmanager
def undone(changes: Sequence[Change]) -> Iterator[None]:
    """Context manager that undoes the changes within the block."""
    undo_all(changes)
    try:
        yield
    finally:
        apply_all(changes)


def class_of_ours(cls: type) -> str:
    """Returns the name of the first class in the MRO that is ours, else the class's own name."""
    for base in cls.__mro__:
        if base.__module__.startswith("transformer_fast."):
            parts = base.__module__.split(".")
            return ".".join([*parts[: 3 if parts[1] == "accelerate" else 2], base.__name__])
    return f"{cls.__module__}.{cls.__qualname__}"


#: Names in `transformer_fast.nn` that `accelerate` does not use as replacements.
#: Linear layers whose weights a replaced layer reads are not replaced either; see `plan`.
_LEFT = ("CrossEntropyLoss", "Embedding", "functional")
#: Methods of PyTorch's class, besides ``forward``, that our class does not call.
_REPLACED: dict[str, tuple[str, ...]] = {
    "MultiheadAttention": ("merge_masks",),
    "TransformerEncoderLayer": ("_sa_block", "_ff_block"),
    "TransformerDecoderLayer": ("_sa_block", "_mha_block", "_ff_block"),
}
#: PyTorch's class -> our class, and the methods of PyTorch's class that ours does not call.
_CLASSES: dict[type[torch.nn.Module], tuple[type[torch.nn.Module], tuple[str, ...]]] = {
    getattr(torch.nn, name): (getattr(nn, name), ("forward", *_REPLACED.get(name, ())))
    for name in nn._OURS
    if name not in _LEFT
}


def class_for(module: torch.nn.Module) -> type[torch.nn.Module] | str | None:
    """Returns the replacement class, the reason not to, or None if the class is not PyTorch's."""
    base = next((cls for cls in type(module).__mro__ if cls in _CLASSES), None)
    if type(module) is torch.nn.modules.linear.NonDynamicallyQuantizableLinear:
        return None  # an output projection: its torch.nn.MultiheadAttention reads the weights
    if base is None or is_ours(module):
        return None
    ours, replaced = _CLASSES[base]
    reason = (
        sharded(module)
        or parametrised(module)
        or _overrides(module, base, ours, replaced)
        or weights(module)
        or _output_projection(module)
        or _skipped_in_inference(module)
    )
    if reason is not None:
        return reason
    if type(module) is base:
        return ours
    return subclass(type(module), (type(module), ours))


def is_ours(module: torch.nn.Module) -> bool:
    """True if the module was built from a class of `transformer_fast.nn`."""
    return isinstance(module, tuple(ours for ours, _ in _CLASSES.values()))


def overrides_ours(module: torch.nn.Module) -> str | None:
    """Returns the reason if a subclass of ours, or an instance, overrides forward."""
    for ours, replaced in _CLASSES.values():
        if isinstance(module, ours):
            # Our layers call overridden _sa_block and _ff_block, so only forward matters.
            return _own(module, ours, replaced[:1])
    return None


def sharded(module: torch.nn.Module) -> str | None:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, fsdp.FSDPModule):
        return "it is sharded by fully_shard; call accelerate before fully_shard"
    return None


def parametrised(module: torch.nn.Module) -> str | None:
    if not parametrize.is_parametrized(module):
        return None
    names = ", ".join(module.parametrizations)  # type: ignore[arg-type]
    return f"its {names} is parametrised; call accelerate before register_parametrization"


def quantised(module: torch.nn.Module) -> str | None:
    """Returns the reason if torch.ao.quantization has converted or prepared the module."""
    path = type(module).__module__.split(".")
    is_prepared = path[:3] == ["torch", "ao", "nn"]
    if is_prepared and "quantized" in path:
        return "it is quantised"
    if is_prepared or getattr(module, "qconfig", None) is not None:
        return "it is prepared for quantisation; call accelerate after it is converted"
    return None


#: Class -> its attributes, and the name of the first for which `is_of_others` is True, or None.
_names_of_others: dict[type, tuple[list[Any], str | None]] = {}


def code_of_others(layer: torch.nn.Module) -> str | None:
    """Returns the reason if calls of the layer run code for which `is_of_others` is True."""
    modules = [*layer.modules()]
    kinds = dict.fromkeys(map(original_class, modules))
    found = [(x, name) for x in dict.fromkeys(b for k in kinds for b in k.__mro__)
             if (name := _name_of_others(x)) is not None]  # fmt: skip
    found += [
        (type(module), name)
        for module in modules
        for name, value in vars(module).items()
        if callable(value) and is_of_others(value)
    ]
    if not found:
        return None
    return (
        f"{found[0][0].__name__}.{found[0][1]} is not code of torch, transformers or peft, "
        "and may need padded batches"
    )


def _name_of_others(kind: type) -> str | None:
    values = [*vars(kind).values()]
    kept = _names_of_others.get(kind)
    if kept is None or len(kept[0]) != len(values) or not all(map(operator.is_, kept[0], values)):
        others = (n for n, x in vars(kind).items() if n != "__init__" and is_of_others(x))
        kept = values, next(others, None)
        if getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind:
            _names_of_others[kind] = kept  # no local classes: the cache would keep them alive
    return kept[1]


class State(NamedTuple):
    """State on which a module's graph depends, besides its children, dtypes and code."""

    #: Name and value of each attribute with a plain value or a function.
    attributes: tuple[tuple[str, Any], ...]
    #: (function, name, value) of each constant outside the class that the class's functions read.
    constants: tuple[tuple[Any, str, Any], ...] = ()
    #: The reason why a graph may not contain all that a call does; None: it does.
    why_not: str | None = None

    @staticmethod
    def of(module: torch.nn.Module) -> State:
        attributes = tuple(
            (name, value)
            for name, value in vars(module).items()
            if name not in OF_ANY_MODULE and name != "training" and is_plain(value)
        )
        own = [value for _, value in attributes if isinstance(value, types.FunctionType)]
        try:
            return State(attributes, _constants_of(original_class(module), *own))
        except _Outside as reason:
            return State(attributes, (), str(reason))

    def without(self, name: str) -> State:
        """Returns the state without the attribute of this name, which the caller reads in each call."""
        return self._replace(attributes=tuple(each for each in self.attributes if each[0] != name))

    def holds(self, module: torch.nn.Module) -> bool:
        """True if the module's attributes and the constants have not changed since the capture."""
        found = module.__dict__
        for name, value in self.attributes:
            if name not in found or found[name] != value:
                return False
        return not self.constants or all(
            of.__globals__.get(name) is value for of, name, value in self.constants
        )


class _Outside(Exception):  # noqa: N818 - a reason, not an error
    """Raised if code reads or changes state that a graph does not contain."""


#: Packages of functions whose results depend on their arguments only.
_PURE = frozenset({
    *KNOWN_PACKAGES, "abc", "collections", "copy", "dataclasses", "einops", "enum", "functools",
    "itertools", "math", "numpy", "operator", "typing", "typing_extensions", "warnings",
})  # fmt: skip
_IMPURE_BUILTINS = frozenset({
    "__import__", "delattr", "eval", "exec", "globals", "id", "input", "locals", "open", "print",
    "setattr", "vars",
})  # fmt: skip


#: Class -> its constants as in `State`, with weak references to functions.
_constants: WeakKeyDictionary[type, list[tuple[ref[Any], str, Any]]] = WeakKeyDictionary()


def _constants_of(kind: type, *functions: types.FunctionType) -> tuple[tuple[Any, str, Any], ...]:
    """Returns the constants that the methods of ``kind`` and the ``functions`` read, as in `State`.

    Code of `KNOWN_PACKAGES` is not searched. Raises `_Outside`.
    """
    if not functions and (kept := _constants.get(kind)) is not None:
        known = tuple((function(), name, value) for function, name, value in kept)
        if all(function is not None for function, _, _ in known):
            return known
    todo = [
        function
        for base in kind.__mro__
        for name, value in vars(base).items()
        if name != "__init__"
        for function in functions_of(value)
    ]
    todo += [inner for function in functions for inner in functions_of(function)]
    found: list[tuple[Any, str, Any]] = []
    seen: set[Any] = set()
    while todo:
        function = todo.pop()
        if function in seen or not is_of_others(function):
            continue
        seen.add(function)
        reads = inspect.getclosurevars(function)
        if not _IMPURE_BUILTINS.isdisjoint(reads.builtins):
            raise _Outside(f"{function.__qualname__} may do more than compute its result")
        for name, value in (*reads.globals.items(), *reads.nonlocals.items()):
            if isinstance(value, types.FunctionType):
                todo += functions_of(value)
            elif isinstance(value, types.ModuleType):
                if value.__name__.partition(".")[0] not in _PURE:
                    raise _Outside(f"{function.__qualname__} reads the module {value.__name__}")
            elif isinstance(value, (bool, int, float, str, type(None), torch.dtype)):
                if name in reads.globals:
                    found.append((function, name, value))
            elif not (isinstance(value, type) or callable(value)):
                raise _Outside(f"{function.__qualname__} reads the variable {name}")
    if not functions:
        _constants[kind] = [(ref(function), name, value) for function, name, value in found]
    return tuple(found)


def replaced_forward(module: torch.nn.Module) -> str | None:
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance, which a new class would not change"
    return None


def _own(module: torch.nn.Module, base: type, names: Sequence[str]) -> str | None:
    """Returns the reason if a subclass or the instance overrides one of the methods ``names``."""
    for name in names:
        if name in module.__dict__:
            return f"its {name} was replaced on the instance"
        if getattr(type(module), name) is not getattr(base, name):
            return f"{type(module).__name__} has its own {name}"
    return None


def _overrides(
    module: torch.nn.Module, base: type, ours: type, replaced: tuple[str, ...]
) -> str | None:
    own = _own(module, base, replaced)
    if own is not None:
        return own
    # A user's attribute with the name of a method that our class adds would hide that method.
    for name in vars(ours):
        if not hasattr(base, name) and hasattr(module, name):
            return f"its attribute {name} has the name of a method of the replacement class"
    return None


def weights(module: torch.nn.Module) -> str | None:
    """Returns why kernels cannot read a parameter (such as a lazy one or a DTensor), or None."""
    inner: list[tuple[str, Any]] = [("", module)]
    inner += [(name + ".", m) for name, m in module.named_children() if type(m) in fusion.LINEAR]
    for prefix, one in inner:
        for name, parameter in one.named_parameters(recurse=False):
            if is_lazy(parameter):
                return (
                    f"its {prefix}{name} is not initialised; call the model once before accelerate"
                )
            if type(parameter) not in PLAIN or type(parameter.data) is not torch.Tensor:
                kind = type(parameter.data).__name__
                if kind == "DTensor":
                    return f"its {prefix}{name} is a DTensor; call accelerate before distributing"
                return f"its {prefix}{name} is a {kind}, which no kernel supports"
    return None


def _output_projection(module: torch.nn.Module) -> str | None:
    if not isinstance(module, torch.nn.MultiheadAttention):
        return None
    projection = module.out_proj
    if fusion.is_unhooked(projection, fusion.LINEAR):
        return None
    # PyTorch only reads out_proj.weight, while our class calls an out_proj that is hooked or of
    # another class. The replacement would therefore change results, possibly to those that the user
    # intended.
    what = "has hooks" if type(projection) in fusion.LINEAR else f"is {fusion.a_kind(projection)}"
    return f"its out_proj {what}; PyTorch never calls it, {_WOULD}"


def _skipped_in_inference(layer: Any) -> str | None:
    """Returns the reason if PyTorch's inference path ignores a user's module or activation."""
    if not isinstance(layer, torch.nn.TransformerEncoderLayer) or not may_have_fast_path(layer):
        return None
    for name, plain in (
        ("self_attn", (torch.nn.MultiheadAttention, nn.MultiheadAttention)),
        ("linear1", fusion.LINEAR),
        ("linear2", fusion.LINEAR),
        ("norm1", fusion.LAYER_NORM),
        ("norm2", fusion.LAYER_NORM),
    ):
        inner = getattr(layer, name)
        is_original = any(type(inner).forward is cls.forward for cls in plain)
        if not is_original or "forward" in inner.__dict__:
            kind = fusion.a_kind(inner)
            return f"in inference PyTorch never calls its {name} ({kind}), {_WOULD}"
    reads = {1: "relu", 2: "gelu"}[layer.activation_relu_or_gelu]
    if fusion.activation_name(layer.activation) != reads:
        return f"in inference PyTorch uses {reads} and never calls its activation, {_WOULD}"
    return None


_WOULD = "and the replacement would, which changes results"
