"""`accelerate`, `restore`, `accelerated` and `register_converter`: swapping the classes of a living
model's modules.

Light to import: `transformer_fast` does so. The work is in `plan`, `classes` and `verify`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from .report import Report

if TYPE_CHECKING:
    from .classes import Change

Filter = Callable[[torch.nn.Module, str], bool]
#: Takes a module, gives the class to swap it to, or a sentence that says why not.
Converter = Callable[[torch.nn.Module], "type[torch.nn.Module] | str"]

_converters: dict[type[torch.nn.Module], Converter] = {}


def accelerate(
    model: torch.nn.Module,
    *,
    filter_fn: Filter | None = None,
    verify: Any = None,
) -> Report:
    """Speed up an existing model in place and reversibly, by `transformer_fast`'s modules.

    Modules of torch.nn that `transformer_fast.nn` has a class for get that class; nothing but
    ``module.__class__`` changes. (Losses and embeddings stay, and each `torch.nn.Linear` of a layer
    that was swapped, since the layer reads its weight.) A module of any class whose forward is
    ``linear2(dropout(activation(linear1(x))))`` becomes one call. Parameters, buffers, hooks, names,
    ``state_dict`` and everybody's references to them stay as they are. So do the numbers, up to
    rounding, with the exceptions that `transformer_fast.nn` has: a query that may attend to nothing
    gives 0, the output at padded places may be 0, and dropout draws other elements. `restore` takes
    it back. A second call changes nothing.

    A subclass of yours gets a class between itself and torch's, unless it overrides what ours would
    replace; so do subclasses of transformers' layers. What cannot be swapped safely (overridden or
    replaced methods, parametrised, quantised or distributed weights, wrapped modules that torch
    itself never calls, or not in inference) is left as it is; the report says why, and which
    modules it does not know. Classes of yours: `register_converter`.

    A copy (``copy.deepcopy``) is as fast as its original. A pickle (``torch.save(model)``) holds
    the model as it was before, so that it loads without this library; accelerate it again there.
    Quantise the model first and then call `accelerate`, for the modules that are not quantised:
    `torch.ao.quantization` does not convert replaced modules, and they warn of it. Call it before
    ``fully_shard`` and ``parametrize``; DistributedDataParallel and ``torch.compile`` may come
    before or after.

    Args:
        model: any module, on any device.
        filter_fn: takes a module and its qualified name, and says whether it may be swapped.
        verify: example inputs: a tuple of positional arguments, a dict of keyword arguments, or one
            tensor. The model is then run before and after (eval and train mode, forward and
            gradients; layers also with padding), and if the numbers differ by more than rounding it
            is restored, with a warning. None: not verified.

    Returns:
        A `Report`; print it.

    Raises:
        TypeError: ``model`` is not a module. Whatever the model raises during ``verify``. The model
            is then as it was.
    """
    from .classes import apply_all, undo_all
    from .plan import complete, make_plan

    _require_module(model)
    report = Report()
    changes = make_plan(model, filter_fn, report)
    apply_all(changes)
    try:
        if verify is not None and changes:
            from .verify import verify_changes

            verify_changes(model, changes, verify, report)
        if report.verified is False:
            undo_all(changes)
            changes = []
        complete(model, report)
    except BaseException:
        undo_all(changes)
        raise
    return report


def restore(model: torch.nn.Module) -> list[str]:
    """Take back what `accelerate` did to ``model``.

    Returns:
        The names of the modules that were restored; empty if there was nothing to restore.

    Raises:
        TypeError: ``model`` is not a module.
        RuntimeError: a module's class was changed again since; then nothing is restored.
    """
    from .classes import undo_all

    _require_module(model)
    changes = _changes_of(model)
    undo_all(changes)
    return [change.name for change in changes]


@contextmanager
def accelerated(
    model: torch.nn.Module, *, filter_fn: Filter | None = None, verify: Any = None
) -> Iterator[Report]:
    """Context manager that accelerates ``model`` within the block and restores it afterwards.

    Gives the `Report`. Arguments and errors: as in `accelerate`.
    """
    from .classes import undo_all

    _require_module(model)
    before = {change.name for change in _changes_of(model)}
    report = accelerate(model, filter_fn=filter_fn, verify=verify)
    try:
        yield report
    finally:
        undo_all([change for change in _changes_of(model) if change.name not in before])


def _changes_of(model: torch.nn.Module) -> list[Change]:
    """What `accelerate` changed in the model and has not been taken back."""
    from .plan import recorded

    return [c for name, module in model.named_modules() for c in recorded(name, module)]


def _require_module(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")


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
            f"a converter of {before.__name__} must give a subclass of it or a sentence, "
            f"not {after!r}"
        )


def converted(module: torch.nn.Module) -> type[torch.nn.Module] | str | None:
    """What the converter of exactly the module's class says; None if there is none."""
    converter = _converters.get(type(module))
    if converter is None:
        return None
    target = converter(module)
    if not isinstance(target, str):
        _check_class(type(module), target)
    return target


def why_not_converted(module: torch.nn.Module) -> str | None:
    """Of an instance of a subclass of a registered class: that it is one."""
    for base in type(module).__mro__[1:]:
        if base in _converters:
            return (
                f"a converter is registered for {base.__name__}, and not for its subclass "
                f"{type(module).__name__}"
            )
    return None
