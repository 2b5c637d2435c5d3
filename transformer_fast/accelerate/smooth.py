"""``accelerate(..., calibration=)``: factors that even out the channels before products in 8 bits.

Where a norm feeds only linear maps, each channel of its weight and bias is divided by a factor, and the
columns of the maps' weights are multiplied by it. Channels with outliers then leave more of the 254 steps
of a row to the others. The factors are powers of two, so that the float model computes the same bits.

Source: Xiao et al. 2023, "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large
Language Models", equation 4 with alpha = 1/2.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .parts import FACTORS
from .quantize import QuantizeChange, error_of
from .verify import forward_only, parse_inputs

#: Largest magnitude of the factors' exponents.
_MOST = 8.0
#: Largest relative change of the float model's outputs: there should be none.
_ROUNDING = 1e-6


@dataclass
class SmoothChange:
    """Divides the channels of a norm by factors, and multiplies the columns of weights by them."""

    name: str
    module: torch.nn.Module
    factors: Tensor
    #: (module, name of its weight, number of first rows or None for all, True if transposed)
    weights: list[tuple[torch.nn.Module, str, int | None, bool]]
    now = "factors of its channels"

    def apply(self) -> None:
        self._multiply(self.factors)
        self.module.__dict__[FACTORS] = self.factors, self.weights

    def undo(self) -> None:
        self._multiply(1.0 / self.factors)
        del self.module.__dict__[FACTORS]

    def _tensors(self) -> list[tuple[Tensor, Tensor]]:
        """Returns the parameters, and what `apply` multiplies them by."""
        norm, s = self.module._parameters, self.factors
        found = [(each, 1.0 / s) for each in (norm.get("weight"), norm.get("bias"))]
        for module, name, rows, transposed in self.weights:
            weight: Any = module._parameters[name]
            found.append((weight[:rows], s[:, None] if transposed else s))
        return [(each, by) for each, by in found if each is not None]

    def _multiply(self, factors: Tensor) -> None:
        exact = SmoothChange(self.name, self.module, factors, self.weights)
        with torch.no_grad():
            for parameter, by in exact._tensors():
                parameter.mul_(by.to(parameter.dtype))

    def is_exact(self) -> bool:
        """True if `undo` restores every bit: no value becomes too small or too large."""
        pairs = [(t.detach(), by.to(t.dtype)) for t, by in self._tensors()]
        return all(torch.equal(t * by / by, t) for t, by in pairs)


def recorded(name: str, module: torch.nn.Module) -> SmoothChange | None:
    """Returns the change of the norm that `restore` has to undo."""
    record = module.__dict__.get(FACTORS)
    return None if record is None else SmoothChange(name, module, *record)


def smooth(model: torch.nn.Module, changes: Sequence[Any], calibration: Any) -> list[SmoothChange]:
    """Applies factors to norms of the float model, and returns these changes.

    ``changes``: the `QuantizeChange` of each quantised module.
    """
    given = calibration if isinstance(calibration, list) else [calibration]
    inputs, was = (
        [parse_inputs(one, "calibration") for one in given],
        [(m, m.training) for m in model.modules()],
    )
    model.eval()
    try:
        groups: dict[str, list[SmoothChange]] = {}
        for change in _candidates(model, changes, inputs):
            groups.setdefault(re.sub(r"\b\d+\b", "*", change.name), []).append(change)
        kept: list[SmoothChange] = []
        before = forward_only(model, inputs[0]).outputs
        for group in groups.values():
            for change in group:
                change.apply()
            after = forward_only(model, inputs[0]).outputs
            # A residual connection or another consumer of the norm's output shows in the results.
            if all(error_of(after[name], x)[0] <= _ROUNDING for name, x in before.items()):
                kept += group
            else:
                for change in group:
                    change.undo()
        return kept
    finally:
        for module, training in was:
            module.training = training


def _candidates(
    model: torch.nn.Module, changes: Sequence[QuantizeChange], inputs: Sequence[Any]
) -> list[SmoothChange]:
    """Returns a change for each norm whose output is the input of quantised modules."""
    names = {module: name for name, module in model.named_modules()}
    records = {change.module: change.record for change in changes}
    outputs: dict[tuple[int, int], tuple[Any, Tensor]] = {}
    sizes: dict[Any, Tensor] = {}
    readers: dict[Any, dict[Any, int | None]] = {}

    def after_norm(norm: Any, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            outputs[output.data_ptr(), output.numel()] = norm, output  # keeps the address taken

    def before_map(module: Any, args: Any) -> None:
        x = args[0] if args and isinstance(args[0], Tensor) else None
        norm = None if x is None else outputs.get((x.data_ptr(), x.numel()), (None, None))[0]
        if x is not None and norm is not None:
            is_query = isinstance(module, torch.nn.MultiheadAttention) and args[1] is not x
            readers.setdefault(norm, {})[module] = module.embed_dim if is_query else None
            size = x.detach().float().abs().reshape(-1, x.shape[-1]).amax(0)
            sizes[norm] = torch.maximum(size, sizes.get(norm, size))

    hooks: list[Any] = []
    for module in names:
        weight = module._parameters.get("weight")
        if module in records:
            hooks.append(module.register_forward_pre_hook(before_map))
        elif weight is not None and weight.dim() == 1:
            hooks.append(module.register_forward_hook(after_norm))
    try:
        for each in inputs:
            forward_only(model, each)
            outputs.clear()
    finally:
        for hook in hooks:
            hook.remove()
    found = []
    for norm, modules in readers.items():
        weights = [
            (m, name, rows, records[m].transposed)
            for m, rows in modules.items()
            for name in records[m].names
        ]
        columns = [
            m._parameters[name][:rows].detach().float().abs().amax(1 if turned else 0)
            for m, name, rows, turned in weights
        ]
        if any(norm.weight.shape != each.shape for each in columns):
            continue
        ratio = (
            sizes[norm].clamp(min=1e-6) / torch.stack(columns).amax(0).clamp(min=1e-6)
        ).log2() / 2
        exponent = (ratio - ratio.median()).round().clamp(-_MOST, _MOST)
        change = SmoothChange(names[norm], norm, exponent.exp2(), weights)
        if exponent.any() and change.is_exact():
            found.append(change)
    return found
