"""Replaces the class of an existing module by one of ours, or gives the reason against it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from .. import nn
from ..nn import fusion
from ..nn.drop_in import RECORD
from ..nn.transformer_layers import may_have_shortcut


class Change(Protocol):
    """A change of one module; ``apply`` and ``undo`` either do all of it or raise."""

    name: str
    module: torch.nn.Module

    @property
    def now(self) -> str:
        """The class that the module then runs as, for the report."""

    def apply(self) -> None: ...

    def undo(self) -> None: ...


@dataclass
class ClassChange:
    """The module gets another class and records its own; its attributes stay the same objects."""

    name: str
    module: torch.nn.Module
    before: type
    after: type

    @property
    def now(self) -> str:
        return class_of_ours(self.after)

    def apply(self) -> None:
        self.module.__dict__[RECORD] = (self.before, self.after)
        try:
            self.module.__class__ = self.after
        except BaseException:
            self.module.__dict__.pop(RECORD, None)
            raise

    def undo(self) -> None:
        if type(self.module) is not self.after:
            raise RuntimeError(
                f"{self.name or 'the model'} cannot be restored: after accelerate its class was "
                f"changed again, to {type(self.module).__name__}; undo that first"
            )
        self.module.__class__ = self.before
        self.module.__dict__.pop(RECORD, None)


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
    """Context manager within which the changes are undone."""
    undo_all(changes)
    try:
        yield
    finally:
        apply_all(changes)


def class_of_ours(cls: type) -> str:
    """The name of the class, ours or the user's, that does the work."""
    for base in cls.__mro__:
        if base.__module__.startswith("transformer_fast."):
            parts = base.__module__.split(".")
            return ".".join([*parts[: 3 if parts[1] == "accelerate" else 2], base.__name__])
    return f"{cls.__module__}.{cls.__qualname__}"


#: Classes that are not replaced; see `accelerate`. Nor are linear layers that a replaced layer reads:
#: `plan`.
_LEFT = ("CrossEntropyLoss", "Embedding", "functional")
#: Methods of PyTorch's class that ours does not call, beside forward.
_REPLACED: dict[str, tuple[str, ...]] = {
    "MultiheadAttention": ("merge_masks",),
    "TransformerEncoderLayer": ("_sa_block", "_ff_block"),
    "TransformerDecoderLayer": ("_sa_block", "_mha_block", "_ff_block"),
}
#: By PyTorch's class: ours, and the methods of PyTorch's that ours does not call.
_CLASSES: dict[type[torch.nn.Module], tuple[type[torch.nn.Module], tuple[str, ...]]] = {
    getattr(torch.nn, name): (getattr(nn, name), ("forward", *_REPLACED.get(name, ())))
    for name in nn._OURS
    if name not in _LEFT
}
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)

_subclasses: dict[tuple[Any, ...], type[torch.nn.Module]] = {}


def class_for(module: torch.nn.Module) -> type[torch.nn.Module] | str | None:
    """The class to replace the module's by, the reason why not, or None if it is not PyTorch's."""
    base = next((cls for cls in type(module).__mro__ if cls in _CLASSES), None)
    if type(module) is torch.nn.modules.linear.NonDynamicallyQuantizableLinear:
        return None  # torch.nn.MultiheadAttention reads its weights
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
    """The override in a subclass of one of our classes, or its instance, as a reason, or None."""
    for ours, replaced in _CLASSES.values():
        if isinstance(module, ours):
            # Of the layers' blocks ours honours what a subclass has; forward is all that counts.
            return _own(module, ours, replaced[:1])
    return None


def subclass(
    theirs: type, bases: tuple[type, ...], **attributes: Any
) -> type[torch.nn.Module] | str:
    """A class of these bases under the name of theirs, or the reason why there is none."""
    key = (bases, *attributes.items())
    if key not in _subclasses:
        names = {"__module__": theirs.__module__, "__qualname__": theirs.__qualname__}
        try:
            made = type(theirs.__name__, bases, {**names, **attributes})
            setattr(made, RECORD, (theirs, made))
            _subclasses[key] = made
        except Exception as error:  # of the user's metaclass or __init_subclass__
            return f"{theirs.__name__} cannot be subclassed: {error}"
    return _subclasses[key]


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
    """That torch.ao.quantization has converted the module, or prepared it for that."""
    path = type(module).__module__.split(".")
    is_prepared = path[:3] == ["torch", "ao", "nn"]
    if is_prepared and "quantized" in path:
        return "it is quantised"
    if is_prepared or getattr(module, "qconfig", None) is not None:
        return "it is prepared for quantisation; call accelerate after it is converted"
    return None


def replaced_forward(module: torch.nn.Module) -> str | None:
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance, which a new class would not change"
    return None


def _own(module: torch.nn.Module, base: type, names: Sequence[str]) -> str | None:
    """The first of these methods of ``base`` that a subclass or the instance overrides."""
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
    # Names that our class adds, which an attribute of the user's would hide.
    for name in vars(ours):
        if not hasattr(base, name) and hasattr(module, name):
            return f"its own attribute {name} would hide the method that the replacement needs"
    return None


def weights(module: torch.nn.Module) -> str | None:
    """The reason against parameters that a kernel would read: tensor subclasses such as DTensor."""
    inner: list[tuple[str, Any]] = [("", module)]
    inner += [(name + ".", m) for name, m in module.named_children() if type(m) in fusion.LINEAR]
    for prefix, one in inner:
        for name, parameter in one.named_parameters(recurse=False):
            if is_lazy(parameter):
                return (
                    f"its {prefix}{name} is not initialised; call the model once before accelerate"
                )
            if type(parameter) not in _PLAIN_TENSORS or type(parameter.data) is not torch.Tensor:
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
    # PyTorch only reads out_proj.weight; our class calls a module that is not plain. So results
    # would change, possibly to those that the user wanted all along.
    what = "has hooks" if type(projection) in fusion.LINEAR else f"is {fusion.a_kind(projection)}"
    return f"its out_proj {what}; PyTorch never calls it, {_WOULD}"


def _skipped_in_inference(layer: Any) -> str | None:
    """The reason against a part that PyTorch's inference path for encoder layers never calls."""
    if not isinstance(layer, torch.nn.TransformerEncoderLayer) or not may_have_shortcut(layer):
        return None
    for name, plain in (
        ("self_attn", (torch.nn.MultiheadAttention, nn.MultiheadAttention)),
        ("linear1", fusion.LINEAR),
        ("linear2", fusion.LINEAR),
        ("norm1", fusion.LAYER_NORM),
        ("norm2", fusion.LAYER_NORM),
    ):
        inner = getattr(layer, name)
        known = any(type(inner).forward is cls.forward for cls in plain)
        if not known or "forward" in inner.__dict__:
            kind = fusion.a_kind(inner)
            return f"in inference PyTorch never calls its {name} ({kind}), {_WOULD}"
    reads = {1: "relu", 2: "gelu"}[layer.activation_relu_or_gelu]
    if fusion.activation_name(layer.activation) != reads:
        return f"in inference PyTorch uses {reads} and never calls its activation, {_WOULD}"
    return None


_WOULD = "and the replacement would, which changes results"
