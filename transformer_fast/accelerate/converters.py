"""Replacements that users register for their own classes."""

from __future__ import annotations

from collections.abc import Callable

import torch

Filter = Callable[[torch.nn.Module, str], bool]
#: Takes a module; returns the replacement class, or the reason not to replace the module.
Converter = Callable[[torch.nn.Module], "type[torch.nn.Module] | str"]

_converters: dict[type[torch.nn.Module], Converter] = {}


def register_converter(
    cls: type[torch.nn.Module], converter: Converter | type[torch.nn.Module] | None
) -> None:
    """Registers the replacement of a class of yours for `accelerate`.

    Args:
        cls: modules of exactly this class are converted; subclasses are not.
        converter: a subclass of ``cls`` to replace it by (same attributes, faster forward), or a
            function that takes a module and returns such a subclass, or the reason to leave this
            module unchanged. None removes the registration.

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
        _converters.pop(cls, None)
        return
    if isinstance(converter, type):
        _check_class(cls, converter)
        target = converter
        _converters[cls] = lambda module: target
    elif callable(converter):
        _converters[cls] = converter
    else:
        raise TypeError(
            f"converter must be a subclass of {cls.__name__} or a function, not {converter!r}"
        )


def _check_class(before: type, after: object) -> None:
    if not (isinstance(after, type) and issubclass(after, before)):
        raise TypeError(
            f"a converter of {before.__name__} must return a subclass of it or a reason, "
            f"not {after!r}"
        )


def converted(module: torch.nn.Module) -> type[torch.nn.Module] | str | None:
    """Returns the result of the converter registered for exactly the module's class, or None."""
    converter = _converters.get(type(module))
    if converter is None:
        return None
    target = converter(module)
    if not isinstance(target, str):
        _check_class(type(module), target)
    return target


def why_not_converted(module: torch.nn.Module) -> str | None:
    """Returns the reason if the module's class is only a subclass of a registered class."""
    for base in type(module).__mro__[1:]:
        if base in _converters:
            return (
                f"a converter is registered for {base.__name__}, and not for its subclass "
                f"{type(module).__name__}"
            )
    return None
