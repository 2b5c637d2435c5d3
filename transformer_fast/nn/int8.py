"""8-bit weights of modules, for ``accelerate(model, quantize="int8")``.

A quantised module has a record, `Int8Weights`. `fusion.affine` then returns an `Int8Weight` in place of
the parameter, and `run_linear` and `run_feed_forward` take either.

A float weight is quantised once (`quantized`). The values are kept until the weight changes, which is
found as for packed weights (`backends.cpu_packing.Snapshot`), or its memory is freed. Programs of
torch.compile call operators that look the values up when they run.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional, memory
from .._context import (
    PLAIN,
    in_torch_func,
    is_exporting,
    is_functorch_wrapped,
    only_torch_supports,
    values_are_known,
)
from .._on_import import when_imported
from ..functional._check import autocast

#: Name of the attribute of a quantised module that holds its record.
INT8 = "_int8_of_accelerate"
#: A weight whose float values were freed is an int8 parameter, and its scales are a buffer of this name.
SCALE_OF = "{}_scale"


@dataclass
class Int8Weight:
    """A quantised weight: ``values * scale[:, None]``. Slices and splits by rows, like the tensor."""

    #: int8 (out_features, in_features), a parameter or a view of one: packed copies of it are kept.
    values: Tensor
    #: float32 (out_features,). None while a program is traced: values are then the float weight.
    scale: Tensor | None
    #: Dtype of the float weight.
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def __getitem__(self, rows: slice) -> Int8Weight:
        scale = None if self.scale is None else self.scale[rows]
        return Int8Weight(self.values[rows], scale, self.dtype)

    def split(self, sizes: list[int]) -> list[Int8Weight]:
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return [self[end - size : end] for size, end in zip(sizes, ends, strict=True)]


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
#: A weight as `fusion.affine` returns it.
Weight = Tensor | Int8Weight

#: (address, shape, strides, dtype) of a float weight -> its state when quantised, and the result.
_kept: dict[tuple[Any, ...], tuple[Any, Int8Weight]] = {}


def _key(weight: Tensor) -> tuple[Any, ...]:
    return weight.data_ptr(), weight.shape, weight.stride(), weight.dtype


def unchanged(later: list[Any]) -> bool:
    """Completes the checks of `quantized`; False: the 8-bit values must not be used."""
    return memory.COPIES["cpu"].all_unchanged(later)


def quantized(weight: Tensor, later: list[Any] | None = None) -> Weight:
    """Returns the weight in 8 bits: the kept values, or new ones if it has changed.

    The weight itself if it cannot be quantised, see `why_float`.

    Args:
        weight: (out_features, in_features).
        later: what the caller passes to `unchanged` before it uses the values, to read many weights
            at once; None: they are checked now.

    Raises:
        ValueError: the weight has NaN or infinity.
    """
    key = _key(weight)
    kept = _kept.get(key)
    if kept is None or not kept[0].is_unchanged(weight, 1, later):
        if why_float(weight) is not None:
            return weight
        with torch.inference_mode(False), torch.no_grad():
            # Taken before the weight is read: a concurrent write makes the values stale.
            state = memory.COPIES["cpu"].snapshot(weight, weight, lambda _: _kept.pop(key, None))
            values, scale = functional.quantize_weight(weight)
            parameter = torch.nn.Parameter(values.contiguous(), requires_grad=False)
            setattr(parameter, memory.PRIVATE, True)
            kept = _kept[key] = state, Int8Weight(parameter, scale, weight.dtype)
    return kept[1]


def forget(module: torch.nn.Module | None = None) -> None:
    """Drops the kept 8-bit values of a module's weights, or all."""
    if module is None:
        _kept.clear()
    for weight in () if module is None else module.parameters():
        if why_float(weight) is None:
            for each in (weight, weight.t()) if weight.dim() == 2 else ():
                _kept.pop(_key(each), None)


def held_bytes() -> int:
    weights = [weight for _, weight in list(_kept.values())]
    return sum(w.values.nbytes + 4 * w.values.shape[0] for w in weights)


memory.packings.append((held_bytes, forget))


class Int8Weights:
    """The record of a quantised module.

    Args:
        names: the quantised parameters.
        transposed: True if they are (in_features, out_features).
    """

    def __init__(self, names: tuple[str, ...], transposed: bool = False) -> None:
        self.names, self.transposed = names, transposed
        #: Dtype of the float weights before they were freed; None: they were not.
        self.freed: torch.dtype | None = None

    def of(self, module: torch.nn.Module, name: str, later: list[Any] | None = None) -> Weight:
        """Returns the weight, (out_features, in_features), as products read it. ``later``: see
        `quantized`.

        That is the float weight itself where no kernel multiplies in 8 bits (on other devices, in
        float64), and where it is no parameter: torch.nn.utils has pruned or parametrised it.

        Raises:
            NotImplementedError: the weight needs a gradient.
            ValueError: the weight was changed and has NaN or infinity.
        """
        # Module.__getattr__ takes ten times as long.
        parameters = module._parameters
        weight: Tensor = parameters[name] if name in parameters else getattr(module, name)  # type: ignore[assignment]
        turned = weight.t() if self.transposed else weight
        if name not in parameters:
            return turned
        if self.freed is not None:
            return Int8Weight(turned, module._buffers[SCALE_OF.format(name)], self.freed)
        if weight.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                "int8 weights have no gradients: call the model under torch.no_grad(), or train it after "
                "transformer_fast.restore(model)"
            )
        if values_are_known(weight) or (in_torch_func() and not is_functorch_wrapped(weight)):
            return quantized(turned, later)
        if not weight.is_cpu or weight.dtype not in FLOATS or only_torch_supports(weight):
            return turned
        if is_exporting():  # the program has PyTorch's operators alone
            return Int8Weight(*functional.quantize_weight(turned), weight.dtype)
        return Int8Weight(turned, None, weight.dtype)

    def held_bytes(self, module: torch.nn.Module) -> tuple[int, int]:
        """Returns the bytes of the float weights and of the 8-bit ones, scales included."""
        before = after = 0
        for name in self.names:
            with torch.no_grad():
                weight = self.of(module, name)
            before += weight.shape.numel() * weight.dtype.itemsize
            if isinstance(weight, Int8Weight) and weight.scale is not None:
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

    def to_float(self, state: dict[str, Any], prefix: str) -> None:
        """Replaces 8-bit weights in a state_dict by floats; they are the same 8-bit values again."""
        for name in self.names if self.freed is not None else ():
            scale = state.pop(prefix + SCALE_OF.format(name))
            values = state[prefix + name].float()
            scaled = values * (scale if self.transposed else scale[:, None])
            state[prefix + name] = scaled.to(self.freed)

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
    if weight.dtype not in FLOATS:
        return f"is {str(weight.dtype)[6:]}, for which kernels have no products of 8 bits"
    if weight.numel() == 0 or 1 not in weight.stride():
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
    input: Tensor, weight: Weight, bias: Tensor | None, activation: str | None = None
) -> Tensor:
    """Returns ``activation(input @ weight.T + bias)``."""
    if not isinstance(weight, Int8Weight):
        return functional.linear(input, weight, bias, activation=activation)
    if weight.scale is None:
        return linear_of_float(*autocast(input, bias), weight.values, activation)
    return functional.int8_linear(input, weight.values, weight.scale, bias, activation=activation)


def run_feed_forward(
    input: Tensor,
    weight1: Weight,
    bias1: Tensor | None,
    weight2: Weight,
    bias2: Tensor | None,
    activation: str,
    dropout_p: float = 0.0,
) -> Tensor:
    """Returns the feed-forward network of these weights, with dropout of the hidden units."""
    one, two = isinstance(weight1, Int8Weight), isinstance(weight2, Int8Weight)
    if not (one or two):
        return functional.feed_forward(
            input, weight1, bias1, weight2, bias2, activation=activation, dropout_p=dropout_p  # type: ignore[arg-type]
        )  # fmt: skip
    if not (isinstance(weight1, Int8Weight) and isinstance(weight2, Int8Weight)) or dropout_p:
        hidden = run_linear(input, weight1, bias1, activation)
        return run_linear(F.dropout(hidden, dropout_p), weight2, bias2)
    if weight1.scale is None or weight2.scale is None:
        input, bias1, bias2 = autocast(input, bias1, bias2)  # type: ignore[assignment]
        return feed_forward_of_float(
            input, bias1, bias2, weight1.values, weight2.values, activation
        )
    return functional.int8_feed_forward(
        input, weight1.values, weight1.scale, bias1, weight2.values, weight2.scale, bias2,
        activation=activation,
    )  # fmt: skip


# The same with float weights, which the operators quantise when they run.


@torch.library.custom_op(
    "transformer_fast::cpu_int8_linear_of_float",
    mutates_args=(),
    schema="(Tensor input, Tensor? bias, Tensor weight, str? activation) -> Tensor",
)
def linear_of_float(
    input: Tensor, bias: Tensor | None, weight: Tensor, activation: str | None
) -> Tensor:
    return run_linear(input, quantized(weight), bias, activation)


@torch.library.custom_op(
    "transformer_fast::cpu_int8_feed_forward_of_float",
    mutates_args=(),
    schema="(Tensor input, Tensor? bias1, Tensor? bias2, Tensor weight1, Tensor weight2,"
    " str activation) -> Tensor",
)
def feed_forward_of_float(
    input: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    weight1: Tensor,
    weight2: Tensor,
    activation: str,
) -> Tensor:
    weights = quantized(weight1), bias1, quantized(weight2), bias2
    return run_feed_forward(input, *weights, activation)


def _result(input: Tensor, weight: Tensor) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


linear_of_float.register_fake(lambda input, bias, weight, *_: _result(input, weight))
feed_forward_of_float.register_fake(
    lambda input, bias1, bias2, weight1, weight2, *_: _result(input, weight2)
)


def _register_flops(module: ModuleType) -> None:
    def count(input: Tensor, *rest: Any, out_val: Any = None) -> int:
        weights = [x for x in rest if isinstance(x, Tensor) and x.dim() == 2]
        return sum(2 * (input.numel() // max(1, input.shape[-1])) * w.numel() for w in weights)

    ours = torch.ops.transformer_fast
    for packet in (ours.cpu_int8_linear_of_float, ours.cpu_int8_feed_forward_of_float):
        module.register_flop_formula(packet, get_raw=True)(count)


when_imported("torch.utils.flop_counter", _register_flops)
