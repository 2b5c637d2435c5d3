"""Public functions: `accelerate`, `restore` and `accelerated`.

`transformer_fast` imports this module at startup. The modules that do the work (`plan`, `classes`,
`verify`) are therefore imported on first use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .. import _native
from .converters import Filter
from .report import Report

if TYPE_CHECKING:
    from .classes import Change


def accelerate(
    model: torch.nn.Module,
    *,
    filter_fn: Filter | None = None,
    verify: Any = None,
    quantize: str | None = None,
    keep_weights: bool = True,
    calibration: Any = None,
    skip_padding: bool = True,
) -> Report:
    """Replaces modules of a model by those of `transformer_fast`, in place and reversibly.

    A module of torch.nn gets the class of the same name in `transformer_fast.nn`, if there is one.
    Only ``module.__class__`` changes. Losses and embeddings keep their class. So does each
    `torch.nn.Linear` of a replaced layer, because the layer reads its weight. A module of any class
    whose forward is ``linear2(dropout(activation(linear1(x))))`` runs as one fused call.
    Parameters, buffers, hooks, names, ``state_dict`` and references to them are preserved. Results
    stay the same up to rounding, with the exceptions of `transformer_fast.nn`: a query whose keys
    are all masked gives 0, outputs at padded positions may be 0 (see ``skip_padding``), and dropout
    drops other elements.
    `restore` undoes the change. A second call with the same options changes nothing; one with
    ``quantize="int8"`` adds 8-bit weights.

    A subclass of yours is replaced by a class that inherits from it and ours, unless it overrides
    methods that the replacement needs. The same holds for subclasses of transformers' layers.
    Modules that cannot be replaced safely are left unchanged: modules with overridden or replaced
    methods, with parametrised, quantised or distributed weights, or with parts that PyTorch never
    calls. The report gives the reasons, and lists the modules that are not recognised.
    `register_converter` adds your own classes.

    A copy (``copy.deepcopy``) is as fast as its original. A pickle (``torch.save(model)``) holds
    the original model, so that it loads without this library; accelerate it again after loading.
    `torch.ao.quantization` does not convert replaced modules, and they warn of it. So quantise
    first; `accelerate` then replaces the other modules. Call it before ``fully_shard`` and
    ``parametrize``; DistributedDataParallel and ``torch.compile`` may come before or after.

    Args:
        model: any module, on any device.
        filter_fn: takes a module and its qualified name; returns False to leave it unchanged.
        quantize: "int8": linear maps, feed-forward networks and the projections of attention run on
            8-bit products in inference, on CPUs: each weight in 8 bits with a scale for each output, each
            row of the input in 254 steps found at run time, the sums exact. Norms, softmax and residual
            connections keep their dtype. Changed weights are quantised again. Calls that need gradients
            raise NotImplementedError. Weights stay in their dtype if no kernel supports them in 8 bits:
            on other devices, in float64, with NaN or infinity. None: products in the weights' dtype.
        keep_weights: False: the float weights of quantised modules are freed. ``state_dict`` and pickles
            then hold the int8 values (under the weight's name) and their scales (``..._scale``); a model
            accelerated in the same way loads them, or a state_dict with float weights. ``module.weight``
            keeps its shape and dtype: reads give the 8-bit values times the scales, whole weights can be
            written, and a write to a part raises RuntimeError. `restore` raises.
        calibration: example inputs as in verify, or a list of such. The inputs of quantised linear maps
            are multiplied by powers of two, one for each channel, before they are rounded to 8 bits, and
            the columns of the weights are divided by them, where this reduces the error on these inputs
            by a tenth or more. Nothing else that the model computes changes. None: no factors.
        skip_padding: True: layers of Hugging Face's models are not computed at the padded positions of a
            batch, and their outputs there are zeros, unless the model's own code reads one of them: a
            classifier's first token with padding on the left, labels other than -100 at padded positions,
            heads for CTC and question answering. Then the results are those of transformers. False: all
            positions are computed. The last call's value holds.
        verify: example inputs: a tuple of positional arguments, a dict of keyword arguments, or one
            tensor. The original and the accelerated model are run on them (eval and train mode,
            forward and gradients; layers also with padding). If results differ by more than
            rounding, the model is restored, with a warning. With quantize, this comparison is made
            before the weights are quantised. Then the error of 8 bits is measured and reported, and the
            model is restored only if its outputs are no longer finite. None: not verified.

    Returns:
        A `Report`; print it.

    Raises:
        TypeError: ``model`` is not a module, or another argument has a wrong type.
        ValueError: quantize is unknown, or keep_weights=False comes without it or for a
            DistributedDataParallel.
        Exception: what the model raises during ``verify``; the model is then unchanged.
    """
    from .classes import apply_all, undo_all
    from .plan import complete, generation_plan, make_plan, padding_plan
    from .quantize import check_options, finish, measure
    from .quantize import make_plan as plan_of_weights
    from .smooth import set_factors

    _require_module(model)
    given: Any = filter_fn
    if given is not None and not callable(given):
        kind = type(given).__name__
        raise TypeError(f"filter_fn must be a function of (module, name), not {kind}")
    check_options(model, quantize, keep_weights, calibration)
    if not isinstance(skip_padding, bool):
        raise TypeError(f"skip_padding must be True or False, not {skip_padding!r}")
    if _native.unannounced:
        _native.warn_of_absence()
    report = Report()
    changes = make_plan(model, filter_fn, report, skip_padding)
    apply_all(changes)
    try:
        for plan in (padding_plan, partial(generation_plan, filter_fn=filter_fn)):
            more = plan(model, report)  # reads the classes that the previous plan assigned
            apply_all(more)
            changes += more
        if verify is not None and changes:
            from .verify import verify_changes

            verify_changes(model, changes, verify, report)
        if quantize is not None and report.verified is not False:
            weights: Any = plan_of_weights(model, filter_fn, report)
            if calibration is not None:
                set_factors(model, weights, calibration)
            apply_all(weights)
            changes += weights
            if verify is not None and weights:
                measure(model, weights, verify, report)
        if report.verified is False:
            undo_all(changes)
            changes = []
        complete(model, report)
        if quantize is not None and report.verified is not False:
            finish(model, report, keep_weights)
    except BaseException:
        undo_all(changes)
        raise
    return report


def restore(model: torch.nn.Module) -> list[str]:
    """Undoes the changes of `accelerate` to ``model``.

    Returns:
        The names of the modules that were restored; empty if there was nothing to restore.

    Raises:
        TypeError: ``model`` is not a module.
        RuntimeError: a module's class was changed again after `accelerate`, or its float weights were
            freed; nothing is restored.
    """
    from ..nn import int8
    from .classes import undo_all
    from .padded_positions import is_change

    _require_module(model)
    changes = _changes_of(model)
    undo_all(changes)
    int8.forget(model)
    return [*dict.fromkeys(change.name for change in changes if not is_change(change))]


@contextmanager
def accelerated(
    model: torch.nn.Module,
    *,
    filter_fn: Filter | None = None,
    verify: Any = None,
    quantize: str | None = None,
    skip_padding: bool = True,
) -> Iterator[Report]:
    """Context manager that accelerates ``model`` within the block and restores it afterwards.

    Yields the `Report`. Arguments and exceptions: as in `accelerate`.
    """
    from .classes import undo_all

    _require_module(model)
    before = {(change.name, type(change)) for change in _changes_of(model)}
    report = accelerate(
        model, filter_fn=filter_fn, verify=verify, quantize=quantize, skip_padding=skip_padding
    )
    try:
        yield report
    finally:
        changes = _changes_of(model)
        undo_all([each for each in changes if (each.name, type(each)) not in before])


def _changes_of(model: torch.nn.Module) -> list[Change]:
    """Returns the changes of `accelerate` that are in effect in the model."""
    from .plan import recorded

    return [c for name, module in model.named_modules() for c in recorded(name, module)]


def _require_module(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
