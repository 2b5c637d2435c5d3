"""Determines the changes that `accelerate` makes to a model, and completes its report."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from .._cgroup import thread_advice
from ..nn.drop_in import KNOWN_PACKAGES, recorded_classes
from . import (
    classes,
    generation,
    hugging_face,
    mlp,
    packing,
    padded_positions,
    quantize,
    written_layers,
)
from .classes import Change, ClassChange, class_of_ours
from .converters import Filter, converted, why_not_converted
from .parts import explain_parts, in_parts, is_model, is_ours
from .report import Entry, Report


def recorded(name: str, module: torch.nn.Module) -> list[Change]:
    """Returns the changes that are recorded in the module."""
    found: list[Change] = []
    attention = hugging_face.recorded(name, module)
    if attention is not None:
        found.append(attention)
    changed = recorded_classes(module)
    if changed is not None:
        found.append(ClassChange(name, module, *changed))
    quantised = quantize.recorded(name, module)
    return found if quantised is None else [*found, quantised]


def _find(
    name: str, module: torch.nn.Module, refused: hugging_face.Refused, cache: mlp.Cache
) -> Change | str | None:
    """Returns the change, the reason not to change the module, or None if its class is unknown."""
    target = converted(module)
    if target is None:
        found = hugging_face.find(name, module, refused)
        if found is not None:
            return classes.replaced_forward(module) or found
    target = target or classes.class_for(module) or why_not_converted(module)
    if target is None:
        return mlp.find(name, module, cache) or written_layers.find(name, module)
    if isinstance(target, str):
        return target
    reason = classes.replaced_forward(module)
    return reason or ClassChange(name, module, type(module), target)


def _find_stack(
    name: str,
    module: torch.nn.Module,
    root: torch.nn.Module,
    changes: list[Change],
    filter_fn: Filter | None,
    skip_padding: bool,
) -> ClassChange | str | None:
    """Returns the result of `packing.find` for a stack of transformers' layers."""
    if not name or not isinstance(module, torch.nn.ModuleList):
        return None
    path, owners = name.split("."), []
    for end in range(len(path)):
        owners.append(root.get_submodule(".".join(path[:end])))
    model: Any = next((owner for owner in reversed(owners) if is_model(owner)), None)
    if model is None:
        return None
    for owner in filter(is_model, owners):
        if "forward" in owner.__dict__:
            kind = type(owner).__name__
            return f"the forward of {kind} was replaced on the instance, and may read padding"
    has_ours = any(change.module is model for change in changes) or is_ours(model.config)

    def is_wanted(inner: str) -> bool:
        return filter_fn is None or filter_fn(module.get_submodule(inner), f"{name}.{inner}")

    own = [] if has_ours else hugging_face.changes_of_attention(module, is_wanted)
    if isinstance(own, str):
        return own
    ours = hugging_face.with_our_attention if has_ours else packing.applied(own) if own else None
    return packing.find(name, module, owners[-1], model.config, ours, own, is_wanted, skip_padding)


def make_plan(
    model: torch.nn.Module,
    filter_fn: Filter | None,
    report: Report,
    skip_padding: bool,
) -> list[Change]:
    """Returns the changes for the whole model; adds a report entry per module of a known class."""
    changes: list[Change] = []
    refused = hugging_face.refused(model)
    read: set[torch.nn.Module] = set()
    cache: mlp.Cache = {}
    for name, module in model.named_modules():
        if module in read:
            continue
        kind = type(module).__name__
        changed = [
            change
            for change in recorded(name, module)
            if not (
                hugging_face.is_over(change)
                or padded_positions.is_change(change)
                or generation.is_change(change)
            )
        ]
        by_name = not changed and is_model(module) and is_ours(module.config)
        if by_name:
            report.entries.append(Entry(name, kind, "already", hugging_face.described(module)))
            continue
        if changed or classes.is_ours(module):
            own = None if changed else classes.overrides_ours(module)
            if own is not None:
                report.entries.append(Entry(name, kind, "left", reason=own))
            else:
                now = changed[0].now if changed else class_of_ours(type(module))
                report.entries.append(Entry(name, kind, "already", now))
                switched = packing.policy(name, module, skip_padding)
                changes += [] if switched is None else [switched]
                read |= _read_by(module, changed[0] if changed else None)
            continue
        found = _find(name, module, refused, cache) or _find_stack(
            name, module, model, changes, filter_fn, skip_padding
        )
        quantised = classes.quantised(module)
        if quantised is not None and (found is not None or hasattr(module, "weight")):
            found = quantised
        if found is None:
            continue
        if not isinstance(found, str) and filter_fn is not None and not filter_fn(module, name):
            found = "filter_fn excludes it"
        if isinstance(found, str):
            report.entries.append(Entry(name, kind, "left", reason=found))
        else:
            changes.append(found)
            note = found.note if isinstance(found, ClassChange) else ""
            report.entries.append(Entry(name, kind, "swapped", found.now, note))
            read |= _read_by(module, found)
    return changes


def _read_by(module: torch.nn.Module, change: Change | None) -> set[torch.nn.Module]:
    """Returns the linear layers whose weights the module's new class reads without calling them."""
    if change is not None and not isinstance(change, ClassChange):
        return set()
    kind = type(module) if change is None else change.after
    if issubclass(kind, (mlp.ByGraph, written_layers.WrittenLayer)):
        return set()  # calls these layers if it cannot be fused
    return {child for child in module.children() if isinstance(child, torch.nn.Linear)}


def padding_plan(model: torch.nn.Module, report: Report) -> list[Change]:
    """Returns the changes for skipping padding in a model that has all other changes.

    Adds to the report what happens at padded positions.
    """
    stacks = [(n, m) for n, m in model.named_modules() if isinstance(m, packing.UnpaddedLayers)]
    plan = padded_positions.make_plan(model, [each for each in stacks if each[1]._skips_padding])
    notes = padded_positions.describe(model, stacks, plan.changes) | plan.computed
    changes: list[Change] = [*plan.changes]
    for name in plan.computed:
        switched = packing.policy(name, model.get_submodule(name), False)
        changes += [] if switched is None else [switched]
    _add_notes(report, notes)
    return changes


def generation_plan(
    model: torch.nn.Module, report: Report, filter_fn: Filter | None
) -> list[Change]:
    """Returns the changes of decoders whose steps become one call, after all changes of layers."""
    changes, notes = generation.make_plan(model, filter_fn or (lambda module, name: True))
    _add_notes(report, notes)
    return [*changes]


def _add_notes(report: Report, notes: dict[str, str]) -> None:
    for index, entry in enumerate(report.entries):
        if entry.name in notes and entry.outcome != "left":
            reason = "; ".join(filter(None, (entry.reason, notes[entry.name])))
            report.entries[index] = replace(entry, reason=reason)


def complete(model: torch.nn.Module, report: Report) -> None:
    """Adds backends, counts and notes to the report, after the changes were made or undone.

    Never raises: a module that cannot be called yet, for example without a weight, gets a note.
    """
    failed: dict[str, str] = {}
    for index, entry in enumerate(report.entries):
        try:
            report.entries[index] = _completed(entry, model, report.verified)
        except Exception as error:
            failed.setdefault(f"{type(error).__name__}: {error}", entry.name or "the model")
    try:
        _count_weights(model, report)
        report.notes += _remarks(model, report)
    except Exception as error:
        failed.setdefault(f"{type(error).__name__}: {error}", "the model as a whole")
    report.notes += [f"No details of {name} ({error})." for error, name in failed.items()]
    if (advice := thread_advice()) is not None and any(x.is_cpu for x in model.parameters()):
        report.notes.append(advice)


#: Modules whose weights are not operands of a matrix multiplication with the tokens.
_NO_PRODUCTS = (torch.nn.Embedding, torch.nn.EmbeddingBag, torch.nn.LayerNorm)
_STACKS = (torch.nn.TransformerEncoder, torch.nn.TransformerDecoder, torch.nn.Transformer)


def _count_weights(model: torch.nn.Module, report: Report) -> None:
    """Counts the elements of matrix-multiplication weights in replaced and in other modules."""
    left = {model.get_submodule(entry.name) for entry in report.left}
    ours: set[torch.nn.Module] = set()
    seen: set[torch.Tensor] = set()
    for module in _modules(model):  # parents before children
        if module in left:
            ours -= set(_modules(module))
        elif isinstance(
            module, (packing.UnpaddedLayers, padded_positions.PaddedModel, *generation.KINDS)
        ):
            pass  # the modules inside are counted instead
        elif classes.is_ours(module) or recorded_classes(module) is not None:
            inner = [] if isinstance(module, _STACKS) else _modules(module)
            # Children of unknown classes are called, not fused, so they do not count.
            ours |= {
                module,
                *(child for child in inner if _package(child) in KNOWN_PACKAGES),
            }
        for weight in module._parameters.values():
            if weight is None or weight in seen or isinstance(module, _NO_PRODUCTS):
                continue
            # Position embeddings: a leading 1 is the batch dimension.
            if is_lazy(weight) or weight.is_nested or weight.dim() < 2 or weight.shape[0] == 1:
                continue
            seen.add(weight)
            if module in ours:
                report.weights_swapped += weight.numel()
            else:
                report.weights_left[type(module).__name__] += weight.numel()


def _modules(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns all modules inside, even if the class overrides ``modules``."""
    return [*torch.nn.Module.modules(module)]


def _package(module: torch.nn.Module) -> str:
    return type(module).__module__.split(".")[0]


def _completed(entry: Entry, model: torch.nn.Module, verified: bool | None) -> Entry:
    if entry.outcome == "left":
        return entry
    if entry.outcome == "swapped" and verified is False:
        reason = (
            "verify found a difference, and the model was restored (see the end of this report)"
        )
        return replace(entry, outcome="left", now="", reason=reason)
    module = model.get_submodule(entry.name)
    inference, training = explain_parts(module)
    return replace(entry, inference=inference, training=training, in_parts=in_parts(module))


def _remarks(model: torch.nn.Module, report: Report) -> list[str]:
    remarks = []
    scripted = [n for n, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)]
    if scripted:
        which = f" ({scripted[0]})" if scripted[0] else ""
        remarks.append(f"A TorchScript module{which} cannot be replaced.")
    if scripted[:1] != [""]:
        remarks += _about_others(_others(model, report), bool(report.entries))
    # `_ADVICE` would not help with these reasons, which the report gives already.
    is_explained = report.verified is False or any(
        classes.quantised(model.get_submodule(entry.name)) for entry in report.left
    )
    if report.weights_swapped < report.weights_left.total() and not (remarks or is_explained):
        remarks.append(f"Most of the model's matrix multiplications are unchanged. {_ADVICE}")
    for entry in report.swapped:
        parent, _, _ = entry.name.rpartition(".")
        layer = model.get_submodule(parent) if entry.name else None
        is_theirs = isinstance(layer, torch.nn.TransformerEncoderLayer) and not classes.is_ours(
            layer
        )
        if is_theirs and entry.name.endswith("self_attn"):
            remarks.append(
                f"{parent} was left unchanged. In inference its PyTorch code does not call "
                f"{entry.name}, whose replacement therefore runs in training only."
            )
    if any(padded_positions.SKIPPED in entry.reason for entry in report.entries):
        remarks.append(padded_positions.ZEROS)
    return remarks


_ADVICE = (
    'For hand-written attention use torch.compile(model, backend="transformer_fast"), '
    "transformer_fast.enable_sdpa() or transformer_fast.accelerate.register_converter."
)


def _others(model: torch.nn.Module, report: Report) -> Counter[str]:
    """Counts modules of unknown classes, by class name.

    Only modules that directly hold parameters or linear layers count, as hand-written layers and
    attention do. The model itself counts only if all entries are about linear layers.
    """
    reported = {entry.name for entry in report.entries}
    layers = [n for n in reported if not isinstance(model.get_submodule(n), torch.nn.Linear)]
    return Counter(
        type(module).__name__
        for name, module in model.named_modules()
        if not (name in reported or _package(module) in KNOWN_PACKAGES)
        and (name or not layers)
        and (
            any(parameter is not None for parameter in module._parameters.values())
            or any(isinstance(child, torch.nn.Linear) for child in module.children())
        )
    )


def _about_others(unknown: Counter[str], is_known: bool) -> list[str]:
    """Returns notes about modules of unknown classes, which are left unchanged."""
    names = [name if count == 1 else f"{count} {name}" for name, count in unknown.items()]
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    if not is_known:
        about = f" It consists of {shown}." if names else ""
        return [f"No module of this model was recognised.{about} {_ADVICE}"]
    if names:
        return [f"Not recognised and left unchanged: {shown}. {_ADVICE}"]
    return []
