"""8-bit weights of modules, for ``accelerate(model, quantize="int8")``.

A quantised module has a record, `Int8Weights`. `fusion.affine` then returns an `Int8Weight` in place of
the parameter, and `run_linear` and `run_feed_forward` take either.

A float weight is quantised once (`quantized`). The values are kept until the weight changes, which is
found as for packed weights (`backends.cpu_packing.Snapshot`), or its memory is freed. Programs of
torch.compile call operators that look the values up when they run.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from .. import functional, memory
from .._context import (
    PLAIN,
    disabled_torch_function,
    in_torch_export,
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
#: Formats: name of a weight with freed floats -> names of its scales and factors in a state_dict.
SCALE_OF = "{}_scale"
FACTORS_OF = "{}_factors"


@dataclass
class Int8Weight:
    """A quantised weight: ``values * scale[:, None] * factors``. Slices and splits by rows, like the
    tensor."""

    #: int8 (out_features, in_features), a parameter or a view of one: packed copies of it are kept.
    values: Tensor
    #: float32 (out_features,). None while a program is traced; `values` is then the float weight.
    scale: Tensor | None
    #: Dtype of the float weight.
    dtype: torch.dtype
    #: Factors by which inputs are multiplied before rounding, float32 (in_features,); None: ones.
    factors: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def __getitem__(self, rows: slice) -> Int8Weight:
        scale = None if self.scale is None else self.scale[rows]
        return Int8Weight(self.values[rows], scale, self.dtype, self.factors)

    def split(self, sizes: list[int]) -> list[Int8Weight]:
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return [self[end - size : end] for size, end in zip(sizes, ends, strict=True)]


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
#: A weight as `fusion.affine` returns it.
Weight = Tensor | Int8Weight

#: (address, shape, strides, dtype) of a float weight and the address of its factors -> the weight's
#: state when it was quantised, and the result.
_kept: dict[tuple[Any, ...], tuple[Any, Int8Weight]] = {}


def _key(weight: Tensor, factors: Tensor | None = None) -> tuple[Any, ...]:
    of_factors = None if factors is None else factors.data_ptr()
    return weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, of_factors


def unchanged(later: list[Any]) -> bool:
    """Runs the checks that `quantized` deferred to ``later``; False: an 8-bit value is stale."""
    return memory.COPIES["cpu"].all_unchanged(later)


def quantized(
    weight: Tensor, later: list[Any] | None = None, factors: Tensor | None = None
) -> Weight:
    """Returns the weight in 8 bits: the kept values, or new ones if it has changed.

    The weight itself if it cannot be quantised, see `why_float`.

    Args:
        weight: (out_features, in_features).
        later: list for checks of many weights at once; the caller must pass it to `unchanged`
            before it uses the values. None: the weight is checked now.
        factors: see `Int8Weight`; they are never changed in place.

    Raises:
        ValueError: the weight has NaN or infinity.
    """
    key = _key(weight, factors)
    kept = _kept.get(key)
    if kept is None or not kept[0].is_unchanged(weight, later):
        if why_float(weight) is not None:
            return weight
        with torch.inference_mode(False), torch.no_grad():
            # Taken before the weight is read: a concurrent write makes the values stale.
            state = memory.COPIES["cpu"].snapshot(weight, weight, lambda _: _kept.pop(key, None))
            values, scale = functional.quantize_weight(weight, factors)
            parameter = torch.nn.Parameter(values.contiguous(), requires_grad=False)
            setattr(parameter, memory.PRIVATE, True)
            kept = _kept[key] = state, Int8Weight(parameter, scale, weight.dtype, factors)
    return kept[1]


def snapshot_of(weight: Tensor, transposed: bool, factors: Tensor | None) -> Any:
    """Returns the state of a weight when its kept 8-bit values were computed, or None."""
    kept = _kept.get(_key(weight.t() if transposed else weight, factors))
    return None if kept is None or kept[0].fingerprint is None else kept[0]


def forget(module: torch.nn.Module | None = None) -> None:
    """Drops the kept 8-bit values of a module's weights, or all."""
    addresses = None if module is None else {
        p.data_ptr() for p in module.parameters() if why_float(p) is None
    }  # fmt: skip
    for key in [key for key in _kept.copy() if addresses is None or key[0] in addresses]:
        found = _kept.pop(key, None)
        if found is not None:
            found[0].alive = False  # for holders of the snapshot, see `snapshot_of`


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
        #: Name of a float weight -> its `Int8Weight.factors`.
        self.factors: dict[str, Tensor] = {}

    def of(self, module: torch.nn.Module, name: str, later: list[Any] | None = None) -> Weight:
        """Returns the weight, (out_features, in_features), as products read it. ``later``: see
        `quantized`.

        Returns the float weight if no kernel multiplies it in 8 bits (on other devices, in
        float64), and if it is not a parameter: torch.nn.utils has pruned or parametrised it.

        Raises:
            NotImplementedError: the weight needs a gradient.
            ValueError: the weight was changed and has NaN or infinity.
        """
        # Module.__getattr__ takes ten times as long.
        parameters = module._parameters
        weight: Tensor = parameters[name] if name in parameters else getattr(module, name)  # type: ignore[assignment]
        if name not in parameters:
            return weight.t() if self.transposed else weight
        if weight.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                "int8 weights have no gradients: call the model under torch.no_grad(), or train it after "
                "transformer_fast.restore(model)"
            )
        if type(weight) is FreedWeight:
            # torch.export traces operations on a tensor subclass, but not reads of its attributes.
            if in_torch_export():
                return weight.t() if self.transposed else weight
            return _int8_of(weight)
        turned, factors = weight.t() if self.transposed else weight, self.factors.get(name)
        if values_are_known(weight) or (in_torch_func() and not is_functorch_wrapped(weight)):
            return quantized(turned, later, factors)
        if not weight.is_cpu or weight.dtype not in FLOATS or only_torch_supports(weight):
            return turned
        if is_exporting():  # the program contains PyTorch's operators only
            values, scale = functional.quantize_weight(turned, factors)
            return Int8Weight(values, scale, weight.dtype, factors)
        return Int8Weight(turned, None, weight.dtype, factors)

    def has_factors(self, module: torch.nn.Module) -> bool:
        freed = (weight.held.factors for _, weight in freed_weights(module))
        return bool(self.factors) or any(factors is not None for factors in freed)

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

    def free(self, module: torch.nn.Module, done: dict[Any, FreedWeight]) -> None:
        """Replaces float weights by `FreedWeight`s; ``done``: collects them, for shared weights."""
        for name in self.names:
            weight, factors = module._parameters[name], self.factors.pop(name, None)
            if weight is None or type(weight) is FreedWeight:
                continue
            key = weight, self.transposed, None if factors is None else factors.data_ptr()
            if key not in done:
                done[key] = FreedWeight.of(weight, self.transposed, factors)
            module._parameters[name] = done[key]  # type: ignore[assignment]


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


def freed_weights(module: torch.nn.Module) -> list[tuple[str, FreedWeight]]:
    """Returns the module's own parameters that ``accelerate(keep_weights=False)`` freed."""
    return [(n, p) for n, p in module._parameters.items() if type(p) is FreedWeight]  # type: ignore[misc]


def is_freed(module: torch.nn.Module) -> bool:
    return any(type(parameter) is FreedWeight for parameter in module._parameters.values())


class FreedWeight(Tensor):
    """A parameter that holds the 8-bit values of a weight whose floats `accelerate` freed.

    It has the float weight's shape and dtype, so that code of a model, of PyTorch or of a user reads and
    writes it as before. Every operation reads the floats ``values * scale[:, None] * factors``, computed
    for this operation, and a write to it is quantised. Views of it are copies, which refuse writes.
    """

    #: `values` has this tensor's shape.
    held: Int8Weight
    #: True if the shape is (in_features, out_features).
    transposed: bool
    _is_param = True
    #: Operations decompose as for plain tensors; `__torch_dispatch__` gets the resulting ones.
    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: Any, held: Int8Weight, transposed: bool) -> FreedWeight:
        made: Any = Tensor._make_wrapper_subclass(
            cls, held.values.shape, dtype=held.dtype, device=held.values.device
        )
        made.held, made.transposed = held, transposed
        return made  # type: ignore[no-any-return]

    def __init__(self, held: Int8Weight, transposed: bool) -> None: ...

    @staticmethod
    def of(weight: Tensor, transposed: bool, factors: Tensor | None) -> FreedWeight:
        """Quantises a weight for which `why_float` returns no reason."""
        turned = weight.t() if transposed else weight
        with torch.inference_mode(False), torch.no_grad():
            found = quantized(turned, None, factors)
            assert isinstance(found, Int8Weight)
            _kept.pop(_key(turned, factors), None)  # writes will change the values in place
            values = found.values.t().contiguous() if transposed else found.values
            return FreedWeight._made(values, found.scale, factors, weight.dtype, transposed)

    @staticmethod
    def _made(
        values: Tensor,
        scale: Tensor | None,
        factors: Tensor | None,
        dtype: torch.dtype,
        turned: bool,
    ) -> FreedWeight:
        if type(values) is not torch.nn.Parameter:  # packed copies are kept for parameters
            with torch.inference_mode(False):
                values = torch.nn.Parameter(values.detach(), requires_grad=False)
        return FreedWeight(Int8Weight(values, scale, dtype, factors), turned)

    def floats(self) -> Tensor:
        """Returns the float weight, a new tensor."""
        found = _int8_of(self)
        assert found.scale is not None
        wide = found.values.float() * found.scale[:, None]
        wide = wide if found.factors is None else wide * found.factors
        return (wide.t().contiguous() if self.transposed else wide).to(self.dtype)

    def write(self, new: Tensor) -> None:
        """Quantises new floats; from another `FreedWeight` it copies the 8-bit values."""
        held = self.held
        assert held.scale is not None
        if isinstance(new, FreedWeight) and new.transposed == self.transposed:
            values, scale, factors = new.held.values, new.held.scale, new.held.factors
            held.factors = None if factors is None else factors.clone()
        else:
            new = torch.empty(self.shape, dtype=self.dtype, device=self.device).copy_(new.detach())
            turned = new.t() if self.transposed else new
            values, scale = functional.quantize_weight(turned, held.factors)
            values = values.t() if self.transposed else values
        with torch.no_grad():
            held.values.copy_(values)
            held.scale.copy_(scale)  # type: ignore[arg-type]
        # Writes inside `__torch_dispatch__` do not increment the version counter.
        torch.autograd.graph.increment_version(held.values)

    def moved(self, fn: Callable[[Tensor], Tensor]) -> FreedWeight:
        """Returns the weight after ``Module._apply(fn)``. Scales and factors stay in float32."""
        held = self.held
        values = fn(held.values.detach())

        def each(tensor: Tensor | None) -> Tensor | None:
            found = None if tensor is None else fn(tensor)
            right = found is None or found.dtype == torch.float32
            return found if right else tensor.to(values.device)  # type: ignore[union-attr]

        dtype = fn(torch.empty(0, dtype=self.dtype, device=held.values.device)).dtype
        return FreedWeight._made(
            values, each(held.scale), each(held.factors), dtype, self.transposed
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default and type(args[0]) is FreedWeight:
            return FreedWeight(args[0].held, args[0].transposed)
        if func is torch.ops.aten.copy_.default and type(args[0]) is FreedWeight:
            args[0].write(args[1])
            return args[0]
        floats: dict[int, Tensor] = {}

        def read(x: Any) -> Any:
            if not isinstance(x, (FreedWeight, _FreedView)):
                return x
            return floats.setdefault(id(x), x.floats())

        result = func(*tree_map(read, args), **tree_map(read, kwargs))
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        for argument in func._schema.arguments:
            x = given.get(argument.name)
            if not isinstance(x, (FreedWeight, _FreedView)) or argument.alias_info is None:
                continue
            if argument.alias_info.is_write:
                if isinstance(x, _FreedView):
                    raise RuntimeError(_NO_VIEWS)
                x.write(floats[id(x)])
                if result is floats[id(x)]:
                    return x
            else:
                return tree_map(lambda y: _FreedView(y) if type(y) is Tensor else y, result)
        return result

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        self.write(new)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.held.values.nbytes

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FreedWeight(8-bit values of a weight {list(self.shape)} in {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> FreedWeight:
        copied = memo[id(self)] = FreedWeight(deepcopy(self.held, memo), self.transposed)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return FreedWeight, (self.held, self.transposed)

    def __tensor_flatten__(self) -> Any:
        parts = {"values": self.held.values, "scale": self.held.scale, "factors": self.held.factors}
        return [n for n, t in parts.items() if t is not None], (self.held.dtype, self.transposed)

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> FreedWeight:
        dtype, transposed = context
        held = Int8Weight(inner["values"], inner["scale"], dtype, inner.get("factors"))
        return FreedWeight(held, transposed)

    # The inner tensors that `__tensor_flatten__` names.
    values = property(lambda self: self.held.values)  # type: ignore[assignment]
    scale = property(lambda self: self.held.scale)
    factors = property(lambda self: self.held.factors)


def _int8_of(weight: FreedWeight) -> Int8Weight:
    """Returns the weight in the layout of products, (out_features, in_features).

    A function, because torch.compile calls methods of tensors in its program.
    """
    values = weight.values.t() if weight.transposed else weight.values
    return Int8Weight(values, weight.scale, weight.dtype, weight.factors)


_NO_VIEWS = (
    "this is a part or a view of a weight whose floats accelerate(keep_weights=False) freed, and a write "
    "to it would be lost: write to the whole weight, or call accelerate with keep_weights=True"
)


class _FreedView(Tensor):
    """Result of a view of a `FreedWeight`: a copy of the floats, which refuses writes."""

    copied: Tensor
    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: Any, copied: Tensor) -> _FreedView:
        made: Any = Tensor._make_wrapper_subclass(
            cls, copied.shape, strides=copied.stride(), dtype=copied.dtype, device=copied.device
        )
        made.copied = copied
        return made  # type: ignore[no-any-return]

    def __init__(self, copied: Tensor) -> None: ...

    def floats(self) -> Tensor:
        return self.copied

    __torch_dispatch__ = FreedWeight.__torch_dispatch__  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.copied)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return deepcopy(self.copied, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.copied.__reduce_ex__(protocol)


class HoldsInt8(torch.nn.Module):
    """Base of modules that may be quantised.

    In a state_dict, a `FreedWeight` is its int8 values, under the weight's name, and its scales and
    factors (`SCALE_OF`, `FACTORS_OF`).
    """

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        freed = freed_weights(self)
        for name, _ in freed:
            self._parameters[name] = None
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            self._parameters.update(freed)  # type: ignore[arg-type]
        for name, weight in freed:
            self._parameters[name] = weight.moved(fn)  # type: ignore[assignment]
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
        for name, weight in freed_weights(self):
            held = weight.held
            parts = (name, held.values), (SCALE_OF.format(name), held.scale)
            parts = *parts, (FACTORS_OF.format(name), held.factors)  # type: ignore[assignment]
            destination |= {
                prefix + n: t if keep_vars else t.detach() for n, t in parts if t is not None
            }

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        for name in self.__dict__[INT8].names if INT8 in self.__dict__ else ():
            values, scale = (state_dict.get(prefix + n) for n in (name, SCALE_OF.format(name)))
            if values is None or scale is None or values.dtype is not torch.int8:
                continue
            del state_dict[prefix + SCALE_OF.format(name)]
            factors = state_dict.pop(prefix + FACTORS_OF.format(name), None)
            now: Any = self._parameters.get(name)
            dtype = torch.float32 if now is None else now.dtype
            transposed = self.__dict__[INT8].transposed
            loaded = FreedWeight._made(values, scale, factors, dtype, transposed)
            # A module with float weights loads floats.
            state_dict[prefix + name] = loaded if type(now) is FreedWeight else loaded.floats()
        super()._load_from_state_dict(state_dict, prefix, *rest)  # type: ignore[no-untyped-call]


def to_float(module: torch.nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Replaces 8-bit weights in the state_dict by floats that quantise to the same values."""
    for name, weight in freed_weights(module):
        for part in (SCALE_OF, FACTORS_OF):
            state.pop(prefix + part.format(name), None)
        state[prefix + name] = weight.floats()


def is_quantized_from(weight: Any, floats: Tensor) -> bool:
    """True if the weight is a `FreedWeight` with the 8-bit values of a float weight."""
    if type(weight) is not FreedWeight or weight.transposed or weight.shape != floats.shape:
        return False
    values, scale = functional.quantize_weight(floats, factors=weight.held.factors)
    held = weight.held
    return torch.equal(values, held.values) and torch.equal(scale, held.scale)  # type: ignore[arg-type]


def run_linear(
    input: Tensor, weight: Weight, bias: Tensor | None, activation: str | None = None
) -> Tensor:
    """Returns ``activation(input @ weight.T + bias)``."""
    if not isinstance(weight, Int8Weight):
        return functional.linear(input, weight, bias, activation=activation)
    if weight.scale is None:
        input, bias = autocast(input, bias)  # type: ignore[assignment]
        return linear_of_float(input, bias, weight.values, weight.factors, activation)
    return functional.int8_linear(
        input, weight.values, weight.scale, bias, activation=activation, factors=weight.factors
    )


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
            input, bias1, bias2, weight1.values, weight2.values, weight1.factors, weight2.factors,
            activation,
        )  # fmt: skip
    return functional.int8_feed_forward(
        input, weight1.values, weight1.scale, bias1, weight2.values, weight2.scale, bias2,
        activation=activation, factors1=weight1.factors, factors2=weight2.factors,
    )  # fmt: skip


# Operators that take float weights and quantise them when they run, for compiled programs.


@torch.library.custom_op(
    "transformer_fast::cpu_int8_linear_of_float",
    mutates_args=(),
    schema="(Tensor input, Tensor? bias, Tensor weight, Tensor? factors, str? activation) -> Tensor",
)
def linear_of_float(
    input: Tensor,
    bias: Tensor | None,
    weight: Tensor,
    factors: Tensor | None,
    activation: str | None,
) -> Tensor:
    return run_linear(input, quantized(weight, None, factors), bias, activation)


@torch.library.custom_op(
    "transformer_fast::cpu_int8_feed_forward_of_float",
    mutates_args=(),
    schema="(Tensor input, Tensor? bias1, Tensor? bias2, Tensor weight1, Tensor weight2,"
    " Tensor? factors1, Tensor? factors2, str activation) -> Tensor",
)
def feed_forward_of_float(
    input: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    weight1: Tensor,
    weight2: Tensor,
    factors1: Tensor | None,
    factors2: Tensor | None,
    activation: str,
) -> Tensor:
    weights = quantized(weight1, None, factors1), bias1, quantized(weight2, None, factors2), bias2
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
