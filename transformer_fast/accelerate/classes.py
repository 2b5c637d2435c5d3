"""Changing the class of a living module: to which of ours, or why not, and back again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
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
        """What the module runs as then, for the report."""

    def apply(self) -> None: ...

    def undo(self) -> None: ...


@dataclass
class ClassChange:
    """The module gets another class and remembers its own; all it holds stays where it is."""

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
                f"{self.name or 'the model'} cannot be restored: since accelerate its class was "
                f"changed again, to {type(self.module).__name__}; take that back first"
            )
        self.module.__class__ = self.before
        self.module.__dict__.pop(RECORD, None)


def apply_all(changes: Sequence[Change]) -> None:
    """All changes, or none if one of them raises."""
    _all_or_none(changes, lambda c: c.apply(), lambda c: c.undo())


def undo_all(changes: Sequence[Change]) -> None:
    """All changes taken back, or none if one of them raises."""
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
    """Within the block the model is as it was before."""
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


#: What stays torch's; see `accelerate`. Linear maps of swapped layers do, too: `plan`.
_LEFT = ("CrossEntropyLoss", "Embedding", "functional")
#: Methods of torch's that ours does not call, beside forward.
_REPLACED: dict[str, tuple[str, ...]] = {
    "MultiheadAttention": ("merge_masks",),
    "TransformerEncoderLayer": ("_sa_block", "_ff_block"),
    "TransformerDecoderLayer": ("_sa_block", "_mha_block", "_ff_block"),
}
#: Torch's class, ours, and the methods of torch's that ours does not call.
_CLASSES: dict[type[torch.nn.Module], tuple[type[torch.nn.Module], tuple[str, ...]]] = {
    getattr(torch.nn, name): (getattr(nn, name), ("forward", *_REPLACED.get(name, ())))
    for name in nn._OURS
    if name not in _LEFT
}
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)

_subclasses: dict[tuple[Any, ...], type[torch.nn.Module]] = {}


def class_for(module: torch.nn.Module) -> type[torch.nn.Module] | str | None:
    """The class to swap to, a sentence why not, or None for a module that is none of torch's."""
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
    """Whether the module was built as one of `transformer_fast.nn`."""
    return isinstance(module, tuple(ours for ours, _ in _CLASSES.values()))


def overrides_ours(module: torch.nn.Module) -> str | None:
    """What a subclass of one of ours, or its instance, does in its own way; None if nothing."""
    for ours, replaced in _CLASSES.values():
        if isinstance(module, ours):
            # Of the layers' blocks ours honours what a subclass has; forward is all that counts.
            return _own(module, ours, replaced[:1])
    return None


def subclass(
    theirs: type, bases: tuple[type, ...], **attributes: Any
) -> type[torch.nn.Module] | str:
    """A class of these bases under the name of theirs, or a sentence why there is none."""
    key = (bases, *attributes.items())
    if key not in _subclasses:
        names = {"__module__": theirs.__module__, "__qualname__": theirs.__qualname__}
        try:
            _subclasses[key] = type(theirs.__name__, bases, {**names, **attributes})
        except Exception as error:  # of the user's metaclass or __init_subclass__
            return f"{theirs.__name__} does not let itself be subclassed: {error}"
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
    return f"its {names} is parametrised, and so its class is not torch's; accelerate first"


def replaced_forward(module: torch.nn.Module) -> str | None:
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance, and a new class would not change that"
    return None


def _own(module: torch.nn.Module, base: type, names: Sequence[str]) -> str | None:
    """Which of these methods of ``base`` a subclass or the instance has of its own."""
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
    # Names that ours adds, which something of the user's would hide.
    for name in vars(ours):
        if not hasattr(base, name) and hasattr(module, name):
            return f"it has something of its own named {name}, as our class does"
    return None


def weights(module: torch.nn.Module) -> str | None:
    """Tensor subclasses (DTensor, quantised) at places where a kernel would get them."""
    inner = [("", module)]
    inner += [(name + ".", m) for name, m in module.named_children() if type(m) in fusion.LINEAR]
    for prefix, one in inner:
        for name, parameter in one.named_parameters(recurse=False):
            if type(parameter) not in _PLAIN_TENSORS or type(parameter.data) is not torch.Tensor:
                kind = type(parameter.data).__name__
                if kind == "DTensor":
                    return f"its {prefix}{name} is a DTensor; call accelerate before distributing"
                return f"its {prefix}{name} is a {kind}, which no kernel reads"
    return None


def _output_projection(module: torch.nn.Module) -> str | None:
    if not isinstance(module, torch.nn.MultiheadAttention):
        return None
    projection = module.out_proj
    if fusion.is_unhooked(projection, fusion.LINEAR):
        return None
    # Torch only ever reads out_proj.weight; ours calls a module that is not plain. So the numbers
    # would change, to those the user may have wanted all along, but they would change.
    if type(projection) in fusion.LINEAR:
        return "its out_proj has hooks, which torch never calls and ours would"
    return f"its out_proj is {fusion.a_kind(projection)}, which torch never calls and ours would"


def _skipped_in_inference(layer: Any) -> str | None:
    """What torch's inference path for encoder layers never calls, and ours would."""
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
            return f"in inference torch never calls its {name}, {fusion.a_kind(inner)}, {_WOULD}"
    reads = {1: "relu", 2: "gelu"}[layer.activation_relu_or_gelu]
    if fusion.activation_name(layer.activation) != reads:
        return f"in inference torch takes {reads} and never calls its activation, {_WOULD}"
    return None


_WOULD = "and ours would: the numbers would change"
