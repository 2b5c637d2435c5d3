"""``accelerate(..., calibration=)``: factors that even out the channels before products in 8 bits.

The input of a quantised linear map is multiplied, channel by channel, by factors before its rows are
rounded, and the columns of the weight are divided by them before it is quantised. Channels with outliers
then leave more of the 254 steps of a row to the others. Norms, float weights and the results of every
other module stay as they are. The factors are powers of two of at most 1, so that products with them are
exact and cannot overflow.

Source: Xiao et al. 2023, "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large
Language Models", equation 4 with alpha = 1/2.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .. import functional
from ..models.attention_weights import evaluating
from ..nn.int8 import Int8Weight, run_linear
from .quantize import QuantizeChange
from .verify import forward_only, parse_inputs

#: Largest magnitude of the factors' exponents, before they are shifted to at most 0.
_MOST = 8.0
#: A channel's largest value counts as at least this share of the largest of all.
_LEAST = 1e-6
#: Rows of the calibration inputs on which the error with and without factors is compared.
_ROWS = 64
#: Factors are kept if they leave at most this share of the error: they cost a few per cent of the time.
_GAIN = 0.9

#: The inputs of an attention's weights, as positions in its call.
_INPUTS = {
    "in_proj_weight": (0, 1, 2), "q_proj_weight": (0,), "k_proj_weight": (1,), "v_proj_weight": (2,),
}  # fmt: skip
_NAMES = "query", "key", "value"


@dataclass(eq=False)
class _Reader:
    """A quantised weight, and samples of the inputs that it was multiplied by."""

    change: QuantizeChange
    name: str
    #: Weights with the same input. They share factors, so that the input is rounded once.
    group: list[_Reader] = field(default_factory=list)
    #: float32 (in_features,): the largest magnitudes. None: no input was seen.
    size: Tensor | None = None
    #: Some of the rows, float32 (at most 2 _ROWS, in_features).
    rows: Tensor | None = None

    def __post_init__(self) -> None:
        self.group = [self]

    @property
    def weight(self) -> Tensor:
        """float32 (out_features, in_features)"""
        weight: Any = self.change.module._parameters[self.name]
        return (weight.t() if self.change.record.transposed else weight).detach().float()

    def read(self, x: Tensor) -> None:
        rows = x.detach().float().reshape(-1, x.shape[-1])
        rows = rows[rows.isfinite().all(-1)]
        if len(rows) == 0:
            return
        size = rows.abs().amax(0)
        self.size = size if self.size is None else torch.maximum(size, self.size)
        rows = rows[:: -(-len(rows) // _ROWS)]
        if self.rows is not None:
            rows = torch.cat((self.rows, rows))
            rows = rows[:: -(-len(rows) // _ROWS)]
        self.rows = rows.clone()

    def error(self, factors: Tensor | None) -> float:
        """Returns the squared relative error of the products in 8 bits."""
        assert self.rows is not None
        weight = self.weight
        values, scale = functional.quantize_weight(weight, factors)
        found = run_linear(self.rows, Int8Weight(values, scale, weight.dtype, factors), None)
        expected = self.rows @ weight.t()
        return float((found - expected).norm() / expected.norm().clamp(min=1e-30)) ** 2


def set_factors(
    model: torch.nn.Module, changes: Sequence[QuantizeChange], calibration: Any
) -> None:
    """Gives the records of ``changes`` the factors that reduce the error on the calibration inputs."""
    given = calibration if isinstance(calibration, list) else [calibration]
    inputs = [parse_inputs(one, "calibration") for one in given]
    readers = {
        change.module: [_Reader(change, name) for name in change.record.names] for change in changes
    }
    seen: Any = WeakIdKeyDictionary()
    with evaluating(model), ExitStack() as hooks:
        for module, found in readers.items():
            read = functools.partial(_read, found, seen)
            hooks.enter_context(module.register_forward_pre_hook(read, with_kwargs=True))
        for each in inputs:
            forward_only(model, each)
    groups = {id(one.group): one.group for found in readers.values() for one in found}
    with torch.no_grad():
        for group in groups.values():
            factors = _factors(group)
            if factors is not None:
                for one in group:
                    one.change.record.factors[one.name] = factors


def _read(readers: list[_Reader], seen: Any, module: Any, args: Any, kwargs: Any) -> None:
    """Records the inputs of a call. ``seen``: live input tensor -> its first reader."""
    for reader in readers:
        if isinstance(module, torch.nn.MultiheadAttention):
            given = [*args, *(kwargs[name] for name in _NAMES[len(args) :] if name in kwargs)]
            inputs = [given[i] for i in _INPUTS[reader.name] if i < len(given)]
        else:
            inputs = [*args, *kwargs.values()][:1]
        for x in {id(x): x for x in inputs}.values():
            if not isinstance(x, Tensor) or x.is_nested or not x.is_floating_point():
                continue
            if x.dim() > 0 and x.shape[-1] == reader.weight.shape[1]:
                reader.read(x)
                _join(reader, seen.setdefault(x, reader))


def _join(one: _Reader, other: _Reader) -> None:
    if one.group is not other.group:
        other.group += one.group
        for each in one.group:
            each.group = other.group


def _factors(group: list[_Reader]) -> Tensor | None:
    """Returns factors (in_features,) for weights of the same input; None: without them is better."""
    sizes = [one.size for one in group if one.size is not None]
    if len(sizes) < len(group):
        return None
    size = torch.stack(sizes).amax(0)
    column = torch.stack([one.weight.abs().amax(0) for one in group]).amax(0)
    if not (size.any() and column.any()):
        return None
    ratio = [each.clamp(min=float(each.amax()) * _LEAST).log2() for each in (size, column)]
    half = (ratio[0] - ratio[1]) / 2
    exponent = (half.median() - half).round().clamp(-_MOST, _MOST)
    if not exponent.any():
        return None
    factors = (exponent - exponent.amax()).exp2()
    try:
        after = sum(one.error(factors) for one in group)
    except ValueError:  # a weight divided by its factors would overflow
        return None
    before = sum(one.error(None) for one in group)
    return factors if after <= _GAIN**2 * before else None
