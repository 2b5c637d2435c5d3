"""8-bit weights of modules, for ``accelerate(model, quantize="int8")``.

A quantised module has a record, `Int8Weights`. `fusion.affine` then returns an `Int8Weight` in place of
the parameter, and `run_linear` and `run_feed_forward` take either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional, memory
from .._context import PLAIN, values_are_known

#: Name of the attribute of a quantised module that holds its record.
INT8 = "_int8_of_accelerate"
#: A weight whose float values were freed is an int8 parameter, and its scales are a buffer of this name.
SCALE_OF = "{}_scale"


@dataclass
class Int8Weight:
    """A quantised weight: ``values * scale[:, None]``. Slices and splits by rows, like the tensor."""

    #: int8 (out_features, in_features); packed copies of it are kept.
    values: Tensor
    #: float32 (out_features,)
    scale: Tensor
    #: Dtype of the weight before.
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def __getitem__(self, rows: slice) -> Int8Weight:
        return Int8Weight(self.values[rows], self.scale[rows], self.dtype)

    def split(self, sizes: list[int]) -> list[Int8Weight]:
        parts = zip(self.values.split(sizes), self.scale.split(sizes), strict=True)
        return [Int8Weight(values, scale, self.dtype) for values, scale in parts]


#: A weight as `fusion.affine` returns it.
Weight = Tensor | Int8Weight


class Int8Weights:
    """The record of a quantised module: its 8-bit weights, by parameter name.

    While the module has the float weights, they are quantised once, and again after a change. Changes
    are found as those of packed weights are (`backends.cpu_packing.Snapshot`). A copy of the module
    quantises its own.

    Args:
        names: parameters of the module.
        transposed: True if they are (in_features, out_features).
    """

    def __init__(self, names: tuple[str, ...], transposed: bool = False) -> None:
        self.names, self.transposed = names, transposed
        #: Dtype of the weights before they were freed; None: they were not.
        self.freed: torch.dtype | None = None
        self._kept: dict[str, tuple[Any, Int8Weight]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Int8Weights:
        copied = Int8Weights(self.names, self.transposed)
        copied.freed = self.freed
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_kept": {}}

    def of(self, module: torch.nn.Module, name: str) -> Weight:
        """Returns the weight, (out_features, in_features), as products read it.

        That is the parameter itself where no kernel multiplies in 8 bits: on other devices, in float64.

        Raises:
            NotImplementedError: the weight needs a gradient.
            ValueError: the weight was changed and has NaN or infinity.
        """
        weight: Tensor = module._parameters[name]  # type: ignore[assignment]
        if self.freed is not None:
            values = weight.t() if self.transposed else weight
            return Int8Weight(values, module._buffers[SCALE_OF.format(name)], self.freed)  # type: ignore[arg-type]
        if weight.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                "int8 weights have no gradients: call the model under torch.no_grad(), or train it after "
                "transformer_fast.restore(model)"
            )
        if not values_are_known(weight):
            # Traced: the compile backend keeps the values of expressions of parameters.
            turned = weight.t() if self.transposed else weight
            return Int8Weight(*functional.quantize_weight(turned), weight.dtype)
        kept = self._kept.get(name)
        if kept is None or not kept[0].is_unchanged(weight, 1):
            if why_float(weight) is not None:
                return weight.t() if self.transposed else weight
            kept = self._kept[name] = self._quantized(weight)
        return kept[1]

    def _quantized(self, weight: Tensor) -> tuple[Any, Int8Weight]:
        with torch.inference_mode(False), torch.no_grad():
            # Taken before the weight is read: a concurrent write makes the values stale.
            snapshot = memory.COPIES["cpu"].snapshot(weight, weight)
            turned = weight.t() if self.transposed else weight
            values, scale = functional.quantize_weight(turned)
            parameter = torch.nn.Parameter(values.contiguous(), requires_grad=False)
            return snapshot, Int8Weight(parameter, scale, weight.dtype)

    def held_bytes(self, module: torch.nn.Module) -> tuple[int, int]:
        """Returns the bytes of the float weights and of the 8-bit ones, scales included."""
        before = after = 0
        for name in self.names:
            with torch.no_grad():
                weight = self.of(module, name)
            before += weight.shape.numel() * weight.dtype.itemsize
            if isinstance(weight, Int8Weight):
                after += weight.values.nbytes + weight.scale.nbytes
        return before, after

    def free(self, module: torch.nn.Module) -> None:
        """Replaces the float weights by the 8-bit ones."""
        for name in self.names:
            with torch.inference_mode(False), torch.no_grad():
                weight = self.of(module, name)
                assert isinstance(weight, Int8Weight)
                values = weight.values.t().contiguous() if self.transposed else weight.values
                parameter = torch.nn.Parameter(values, requires_grad=False)
            module._parameters[name] = parameter
            module.register_buffer(SCALE_OF.format(name), weight.scale)
            dtype = weight.dtype
        self.freed = dtype
        self._kept.clear()

    def before_load(self, state: dict[str, Any], prefix: str) -> None:
        """Quantises the float weights in a state_dict that a module without them loads."""
        for name in self.names if self.freed is not None else ():
            weight = state.get(prefix + name)
            if isinstance(weight, Tensor) and weight.is_floating_point():
                turned = weight.t() if self.transposed else weight
                values, scale = functional.quantize_weight(turned)
                state[prefix + name] = values.t() if self.transposed else values
                state[prefix + SCALE_OF.format(name)] = scale


def why_float(weight: Tensor) -> str | None:
    """Returns the reason why a weight cannot be quantised here, or None."""
    if type(weight) not in PLAIN or weight.layout is not torch.strided:
        return f"is a {type(weight).__name__}"
    if not weight.is_cpu or "cpu" not in memory.COPIES:
        return f"is on {weight.device}, without kernels for products of 8 bits"
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"is {str(weight.dtype)[6:]}, for which kernels have no products of 8 bits"
    if weight.numel() == 0 or 1 not in weight.stride() or weight.is_neg():
        return "is empty or has gaps in memory"
    if weight.is_inference():
        return "was created in inference mode, where changes of it are not found"
    return None


def is_freed(module: torch.nn.Module) -> bool:
    """True if ``accelerate(keep_weights=False)`` freed the module's float weights."""
    record: Int8Weights | None = module.__dict__.get(INT8)
    return record is not None and record.freed is not None


class HoldsInt8(torch.nn.Module):
    """Base of modules that may be quantised."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if not is_freed(self):
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        scales = map(SCALE_OF.format, self.__dict__[INT8].names)
        before = {name: self._buffers[name] for name in scales}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, scale in before.items():
            now = self._buffers[name]
            if now.dtype != torch.float32:  # type: ignore[union-attr]
                self._buffers[name] = scale.to(now.device)  # type: ignore[union-attr]
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        if INT8 in self.__dict__:
            self.__dict__[INT8].before_load(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)  # type: ignore[no-untyped-call]


def run_linear(
    input: Tensor, weight: Weight, bias: Tensor | None, activation: Any = None
) -> Tensor:
    """Returns ``activation(input @ weight.T + bias)``."""
    if isinstance(weight, Int8Weight):
        return functional.int8_linear(
            input, weight.values, weight.scale, bias, activation=activation
        )
    return functional.linear(input, weight, bias, activation=activation)


def run_feed_forward(
    input: Tensor,
    weight1: Weight,
    bias1: Tensor | None,
    weight2: Weight,
    bias2: Tensor | None,
    activation: Any,
    dropout_p: float = 0.0,
) -> Tensor:
    """Returns the feed-forward network of these weights, with dropout of the hidden units."""
    one, two = isinstance(weight1, Int8Weight), isinstance(weight2, Int8Weight)
    if not (one or two):
        return functional.feed_forward(
            input, weight1, bias1, weight2, bias2, activation=activation, dropout_p=dropout_p  # type: ignore[arg-type]
        )  # fmt: skip
    if isinstance(weight1, Int8Weight) and isinstance(weight2, Int8Weight) and dropout_p == 0.0:
        return functional.int8_feed_forward(
            input, weight1.values, weight1.scale, bias1, weight2.values, weight2.scale, bias2,
            activation=activation,
        )  # fmt: skip
    hidden = run_linear(input, weight1, bias1, activation)
    return run_linear(F.dropout(hidden, dropout_p), weight2, bias2)
