"""``accelerate(model, quantize="int8")``: the modules that get 8-bit weights, and the error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .. import nn
from .._explain import explain
from ..models.attention_weights import evaluating
from ..models.embedding import OutputProjection
from ..nn.drop_in import warn_user
from ..nn.int8 import INT8, Int8Weights, is_freed, why_float
from . import classes, hugging_face
from .classes import Change, ClassChange, undone
from .hugging_face_layers import Conv1D
from .report import Entry, Int8Report, Report

SCHEMES = ("int8",)


@dataclass
class QuantizeChange:
    """Gives the module the record of 8-bit weights, and a class that reads it if its own does not."""

    name: str
    module: torch.nn.Module
    record: Int8Weights
    swap: ClassChange | None = None

    @property
    def now(self) -> str:
        kind = type(self.module) if self.swap is None else self.swap.after
        return f"{classes.class_of_ours(kind)} in int8"

    def apply(self) -> None:
        if self.swap is not None:
            self.swap.apply()
        self.module.__dict__[INT8] = self.record

    def undo(self) -> None:
        if is_freed(self.module):
            raise RuntimeError(
                f"{self.name or 'the model'} cannot be restored: accelerate(keep_weights=False) freed "
                "its float weights; build the model again and load its original weights"
            )
        del self.module.__dict__[INT8]
        if self.swap is not None:
            self.swap.undo()


def recorded(name: str, module: torch.nn.Module) -> QuantizeChange | None:
    """Returns the change of the module that `restore` has to undo."""
    record = module.__dict__.get(INT8)
    return None if record is None else QuantizeChange(name, module, record)


def check_options(
    model: torch.nn.Module, scheme: Any, keep_weights: bool, calibration: Any
) -> None:
    if scheme is not None and scheme not in SCHEMES:
        raise ValueError(f"quantize must be None or one of {', '.join(SCHEMES)}, not {scheme!r}")
    if calibration is not None and scheme is None:
        raise ValueError("calibration needs quantize")
    if not keep_weights and scheme is None:
        raise ValueError(
            "keep_weights=False needs quantize: it frees the weights that are quantised"
        )
    if not keep_weights and isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise ValueError(
            "with DistributedDataParallel pass model.module: DDP holds the float weights, which "
            "keep_weights=False frees"
        )


def make_plan(
    model: torch.nn.Module,
    filter_fn: Callable[[torch.nn.Module, str], bool] | None,
    report: Report,
) -> list[Change]:
    """Returns the changes for the whole model, after its modules were replaced.

    Updates the report's entries.
    """
    changes: list[Change] = []
    entries = {entry.name: index for index, entry in enumerate(report.entries)}
    read: dict[torch.nn.Module, str] = {}
    for name, module in model.named_modules():
        read |= _read_by_torch(name, module)
        known = entries.get(name)
        if INT8 in module.__dict__ or (
            known is not None and report.entries[known].outcome == "left"
        ):
            continue
        found = read.get(module) or _find(name, module)
        if found is None:
            continue
        if not isinstance(found, str) and filter_fn is not None and not filter_fn(module, name):
            found = "filter_fn excludes it"
        kind = type(module).__name__
        if isinstance(found, str):
            now = "" if known is None else report.entries[known].now
            new = Entry(name, kind, "swapped" if now else "left", now, f"not quantised: {found}")
        else:
            changes.append(found)
            new = Entry(name, kind, "swapped", found.now, int8=True)
        if known is None:
            report.entries.append(new)
        else:
            report.entries[known] = new
    return changes


def _read_by_torch(name: str, module: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """Returns linear layer -> why it stays in float: PyTorch's code may read its weight."""
    kinds = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)
    if not isinstance(module, kinds) or classes.is_ours(module):
        return {}
    reason = f"{name or 'the model'} is PyTorch's {type(module).__name__}, which reads its weight"
    return {m: reason for m in module.children() if isinstance(m, torch.nn.Linear)}


def _find(name: str, module: Any) -> QuantizeChange | str | None:
    """Returns the change, the reason not to, or None if the module has no weight to quantise."""
    swap, transposed = None, False
    names: tuple[str, ...] = ("weight",)
    if isinstance(module, nn.MultiheadAttention):
        if not module._qkv_same_embed_dim:
            names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        else:
            names = ("in_proj_weight",)
    elif isinstance(module, Conv1D):
        transposed = True
    elif isinstance(module, torch.nn.Linear):
        if type(module) is NonDynamicallyQuantizableLinear:
            swap = ClassChange(name, module, type(module), nn.Linear)
        elif not classes.is_ours(module):
            after = classes.quantised(module) or classes.class_for(module)
            if not isinstance(after, type):
                return after
            swap = ClassChange(name, module, type(module), after)
    elif not isinstance(module, OutputProjection):
        return None
    reason = classes.parametrised(module) or classes.weights(module) or classes.sharded(module)
    if reason is not None:
        return reason
    if classes.is_ours(module) and (own := classes.overrides_ours(module)) is not None:
        return own
    record = Int8Weights(names, transposed)
    for each in names:
        weight = module._parameters.get(each)
        if weight is None:
            return f"its {each} is no parameter"
        if (reason := why_float(weight) or _no_kernel(weight, transposed)) is not None:
            return f"its {each} {reason}"
        try:
            with torch.no_grad():
                record.of(module, each)
        except ValueError:
            return f"its {each} has NaN or infinity"
    return QuantizeChange(name, module, record, swap)


def _no_kernel(weight: Tensor, transposed: bool) -> str | None:
    """Returns the dispatcher's reason if products with this weight would run on the reference."""
    outputs, inputs = weight.shape[::-1] if transposed else weight.shape
    x = torch.empty(1, inputs, dtype=weight.dtype, device=weight.device)
    scale = torch.empty(outputs, device=weight.device)
    found = explain("int8_linear", x, x.new_empty(outputs, inputs, dtype=torch.int8), scale)
    if found.backend not in (None, "reference"):
        return None
    return f"has no kernel here: {', '.join(found.reasons['cpu'])}"


def finish(model: torch.nn.Module, report: Report, keep_weights: bool) -> None:
    """Completes the report, and frees the float weights unless they are kept."""
    found = report.int8 = report.int8 or Int8Report()
    named = {m: name for name, m in model.named_modules() if INT8 in m.__dict__}
    found.smoothed = [name for m, name in named.items() if m.__dict__[INT8].has_factors(m)]
    quantised = [*named]
    for module in quantised:
        before, after = module.__dict__[INT8].held_bytes(module)
        found.count += 1
        found.bytes_before += before
        found.bytes_after += after
    found.float_bytes = _float_bytes(model, quantised)
    found.keeps_weights = keep_weights
    if not keep_weights:
        done: dict[Any, Any] = {}
        for module in quantised:
            module.__dict__[INT8].free(module, done)
        hugging_face.save_as_float(model)


def _float_bytes(model: torch.nn.Module, quantised: Sequence[torch.nn.Module]) -> Counter[str]:
    """Returns the bytes of the other weights of two or more dimensions, by class."""
    seen = {
        id(p) for m in quantised for n, p in m._parameters.items() if n in m.__dict__[INT8].names
    }
    sizes: Counter[str] = Counter()
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is None or torch.nn.parameter.is_lazy(parameter):
                continue
            # A table stays in float, even if a quantised projection shares it.
            is_table = isinstance(module, torch.nn.Embedding)
            if parameter.dim() > 1 and (is_table or id(parameter) not in seen):
                seen.add(id(parameter))
                sizes[type(module).__name__] += parameter.nbytes
    return sizes


def error_of(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Returns the relative error and the least cosine of a row; rows of zeros do not count."""
    one, two = (t.detach().double().reshape(-1, max(1, t.shape[-1])) for t in (found, expected))
    size = two.norm()
    cosine = torch.nn.functional.cosine_similarity(one, two, dim=-1)[two.norm(dim=-1) > 0]
    error = float((one - two).norm() / size) if size else float(one.norm())
    return error, float(cosine.min()) if cosine.numel() else 1.0


def measure(model: torch.nn.Module, changes: Sequence[Change], inputs: Any, report: Report) -> None:
    """Measures the error of the quantised model and of each quantised module on example inputs.

    A result is wrong only if it is not finite where the model's was. No error budget applies: the
    error of 8 bits is not a rounding error of the float computation.
    """
    from .verify import forward_only, parse_inputs

    example = parse_inputs(inputs)
    errors: dict[str, tuple[float, float]] = {}
    found = report.int8 = Int8Report()

    def compare(change: Any) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            change.apply()
            try:
                again = type(module).forward(module, *args, **kwargs)
            finally:
                change.undo()
            pair = (x[0] if isinstance(x, tuple) else x for x in (again, output))
            error = error_of(*pair)
            errors[change.name] = max(errors.get(change.name, error), error)

        return hook

    with evaluating(model), ExitStack() as hooks:
        after = forward_only(model, example).outputs
        with undone(changes):
            before = forward_only(model, example).outputs
            for change in changes:
                hook = change.module.register_forward_hook(compare(change), with_kwargs=True)
                hooks.enter_context(hook)
            forward_only(model, example)
    pairs = [(after[name], x) for name, x in before.items() if x.numel()]
    for new, old in pairs:
        if not new[old.isfinite()].isfinite().all():
            report.verified = False
            report.notes.append(
                "Verify: the quantised model's outputs are not finite; it was restored."
            )
            warn_user("accelerate restored the model: quantised, its outputs are not finite")
            return
    if pairs:
        measured = [error_of(*pair) for pair in pairs]
        found.error = max(error for error, _ in measured)
        found.cosine = min(cosine for _, cosine in measured)
    if errors:
        found.worst = max(errors, key=lambda name: errors[name][0])
        found.worst_error, found.worst_cosine = errors[found.worst]
