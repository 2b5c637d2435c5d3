"""Converters that users register for classes of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch

#: Takes a module, gives the class to swap it to, or a sentence that says why not.
Converter = Callable[[torch.nn.Module], "type[torch.nn.Module] | str"]

_registered: dict[type[torch.nn.Module], Converter] = {}


def register_converter(
    cls: type[torch.nn.Module], converter: Converter | type[torch.nn.Module] | None
) -> None:
    """Teach `accelerate` a class of yours.

    Args:
        cls: modules of exactly this class are converted; subclasses are not.
        converter: a subclass of ``cls`` to swap to (same attributes, faster forward), or a function
            from a module to such a subclass or to a sentence that says why this one stays as it is.
            None forgets what was registered for ``cls``.

    Raises:
        TypeError: ``cls`` is not a module class, or ``converter`` is neither.

    An example, for attention written by hand::

        class FastAttention(MyAttention):
            def forward(self, x, mask=None):
                ...transformer_fast.functional.scaled_dot_product_attention(q, k, v, mask)...

        transformer_fast.accelerate.register_converter(MyAttention, FastAttention)
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.nn.Module)):
        raise TypeError(f"cls must be a subclass of torch.nn.Module, not {cls!r}")
    if converter is None:
        _registered.pop(cls, None)
        return
    if isinstance(converter, type):
        _check_class(cls, converter)
        target = converter
        _registered[cls] = lambda module: target
    elif callable(converter):
        _registered[cls] = converter
    else:
        raise TypeError(
            f"converter must be a subclass of {cls.__name__} or a function, not {converter!r}"
        )


def _check_class(before: type, after: object) -> None:
    if not (isinstance(after, type) and issubclass(after, before)):
        raise TypeError(
            f"a converter of {before.__name__} must give a subclass of it or a sentence, "
            f"not {after!r}"
        )


def convert(module: torch.nn.Module) -> type[torch.nn.Module] | str | None:
    """What the converter of exactly the module's class says; None if there is none."""
    converter = _registered.get(type(module))
    if converter is None:
        return None
    target = converter(module)
    if not isinstance(target, str):
        _check_class(type(module), target)
    return target


def why_not_converted(module: torch.nn.Module) -> str | None:
    """Of an instance of a subclass of a registered class: that it is one."""
    for base in type(module).__mro__[1:]:
        if base in _registered:
            return (
                f"a converter is registered for {base.__name__}, and not for its subclass "
                f"{type(module).__name__}"
            )
    return None
