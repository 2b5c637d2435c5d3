"""Checks whether calls of modules may be skipped: of one module now, of many while a `Guard` holds."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import _has_any_global_hook as has_global_hook

from .. import _native
from .._context import function_mode_is_active, is_observed
from .drop_in import is_patched, note_methods

#: Attributes of a module with the hooks that its calls run.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: Attributes that make a module's calls run other code than the ``forward`` of its class.
_OTHER_CODE = ("forward", "_compiled_call_impl")
#: Value of a missing key in `Guard.values`.
ABSENT = object()


class Part(NamedTuple):
    """A child module, and the classes whose forward a fused op may replace."""

    name: str
    module: Any
    kinds: tuple[type, ...]

    def why_called(self) -> str | None:
        """Returns the reason why the module must be called and cannot be fused, or None."""
        name, module, kinds = self
        if is_unhooked(module, kinds):
            return None
        if type(module) not in kinds:
            return f"{name} is {a_kind(module)}"
        if has_global_hook():
            return "modules have global hooks"
        if "forward" in module.__dict__:
            return f"{name} has a forward that was replaced on the instance"
        if is_patched(type(module)):
            return f"{name} is {a_kind(module)}, whose forward was replaced on the class"
        if is_observed():
            return "calls are observed by a TorchFunctionMode"
        if module._compiled_call_impl is not None:
            return f"{name} is compiled on its own"
        return f"{name} has hooks"


class Unreadable(Exception):  # noqa: N818 - a reason, not an error
    """Raised with the reason why a layer must be called: "<its part> is ..."."""


def is_unhooked(module: Any, classes: tuple[type, ...]) -> bool:
    """True if the module is unhooked and unmodified: calling it runs only the ``forward`` of its class,
    and nothing observes the functions that this calls."""
    return type(module) in classes and not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or module._compiled_call_impl is not None
        or has_global_hook()
        or is_patched(type(module))
        or (function_mode_is_active() and is_observed())
    )


def a_kind(module: Any) -> str:
    """Returns ``a Linear``, or ``a Linear of peft`` if torch.nn has a class of that name."""
    kind = type(module)
    article = "an" if kind.__name__[:1] in "AEIOU" else "a"
    package = kind.__module__.split(".")[0]
    of = f" of {package}" if package != "torch" and hasattr(torch.nn, kind.__name__) else ""
    return f"{article} {kind.__name__}{of}"


def _compare(
    are: list[Any],
    empty: list[Any],
    classes: list[Any],
    methods: list[Any],
    equal: list[Any],
    absent: Any,
) -> bool:
    """True if all checks of a guard hold; csrc/autograd/guard.cpp computes the same."""
    try:
        return (
            all(values.get(key, absent) is expected for values, key, expected in are)
            and not any(values.get(key, True) for values, key in empty)
            and all(type(module) is kind for module, kind in classes)
            and all(getattr(base, name, None) is method for base, name, method in methods)
            and all(values == copy for values, copy in equal)
        )
    except (RuntimeError, ValueError):  # an attribute is another tensor, or another array
        return False


_holds = _compare if _native.autograd is None else _native.autograd.holds


class Guard:
    """The state that a recipe was read from; the recipe is valid as long as the guard holds.

    The checks are data that native code can verify, too: objects that must be where they were. They
    do not include values, dtypes and devices of tensors.
    """

    __slots__ = ("classes", "empty", "equal", "kind", "methods", "owner", "seen", "values")

    def __init__(self, owner: torch.nn.Module) -> None:
        #: The module that keeps the guard, and its class.
        self.owner, self.kind = weakref.ref(owner), type(owner)
        #: (module, its class)
        self.classes: list[tuple[torch.nn.Module, type]] = []
        #: (mapping, key, the object that is its value, or `ABSENT`)
        self.values: list[tuple[Mapping[str, Any], str, Any]] = []
        #: (mapping, key), whose value is empty
        self.empty: list[tuple[Mapping[str, Any], str]] = []
        #: (mapping, a copy; both must remain equal)
        self.equal: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
        #: (class, name of a method, the method)
        self.methods: list[tuple[type, str, Any]] = []
        #: Modules and classes whose checks are already recorded.
        self.seen: set[Any] = set()

    def holds(self, owner: torch.nn.Module) -> bool:
        """True if nothing has changed, and no hook or mode observes every module's calls."""
        if has_global_hook() or (function_mode_is_active() and is_observed()):
            return False
        lists = self.values, self.empty, self.classes, self.methods, self.equal
        return type(owner) is self.kind and _holds(*lists, ABSENT)

    def value(self, values: Mapping[str, Any], key: str) -> Any:
        """Returns the value of a key, or `ABSENT`."""
        found = values.get(key, ABSENT)
        if (id(values), key) not in self.seen:
            self.seen.add((id(values), key))
            self.values.append((values, key, found))
        return found

    def entry(self, module: torch.nn.Module, mapping: str, key: str) -> Any:
        """Returns an entry of ``_parameters``, ``_buffers`` or ``_modules``, or `ABSENT`."""
        return self.value(self.value(module.__dict__, mapping), key)

    def attribute(self, module: torch.nn.Module, name: str) -> Any:
        """Returns an attribute of the module: its own, a parameter or a child, or the class's."""
        found = self.value(module.__dict__, name)
        for mapping in ("_parameters", "_modules"):
            if found is ABSENT:
                found = self.entry(module, mapping, name)
        return getattr(module, name) if found is ABSENT else found

    def child(self, parent: torch.nn.Module, name: str, path: str, kinds: tuple[type, ...]) -> Any:
        """Returns a child whose class is among ``kinds`` and that need not be called.

        Raises `Unreadable`, with ``path`` as the name of the child.
        """
        module = self.entry(parent, "_modules", name)
        self.unhooked(None if module is ABSENT else module, path, kinds)
        return module

    def children(self, module: torch.nn.Module) -> list[torch.nn.Module]:
        """Returns all children of a container."""
        children = self.value(module.__dict__, "_modules")
        self.equal.append((children, dict(children)))
        return [*children.values()]

    def unhooked(self, module: Any, path: str, kinds: tuple[type, ...] | None = None) -> None:
        """Records that calls of the module run only its class's ``forward``, or raises `Unreadable`."""
        if kinds is None and id(module) in self.seen:
            return
        reason = Part(path, module, kinds or (type(module),)).why_called()
        if reason is not None:
            raise Unreadable(reason)
        self._of_class(module)
        own = module.__dict__
        self.empty += [(own, name) for name in _HOOKS]
        self.values += [(own, name, own.get(name, ABSENT)) for name in _OTHER_CODE]

    def whole(self, owner: torch.nn.Module) -> None:
        """Records all attributes of the owner and of the modules in it; the caller checks their hooks."""
        for module in owner.modules():
            self.equal.append((module.__dict__, dict(module.__dict__)))
            self.equal.append((module._modules, dict(module._modules)))
            self._of_class(module)
        if not self.holds(owner):
            raise Unreadable("a method of a class is replaced, or calls are observed")

    def _of_class(self, module: torch.nn.Module) -> None:
        kind = type(module)
        self.seen.add(id(module))
        if module is not self.owner():
            self.classes.append((module, kind))
        if kind not in self.seen:
            self.seen.add(kind)
            self.methods += note_methods(kind)

    def method(self, owner: torch.nn.Module, name: str, base: type) -> None:
        """Records that the method ``name`` is that of ``base``, or raises `Unreadable`."""
        found, kind = getattr(base, name), type(owner)
        if self.value(owner.__dict__, name) is not ABSENT or getattr(kind, name) is not found:
            raise Unreadable(f"{name} is replaced")
        self.methods.append((kind, name, found))
