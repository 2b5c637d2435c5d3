"""Op table entries of int8_linear and int8_feed_forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..reference.int8_linear import (
    LARGEST,
    STEPS,
    int8_linear,
    quantize_rows,
    quantize_weight,
    width_of,
)
from ..reference.linear import activate
from .feed_forward import _feed_forward
from .feed_forward import common_cases as common_network_cases
from .linear import _linear, common_cases
from .spec import Case, Draw, OpSpec, Text, bytes_of, case, rows_of


def linear_arguments(
    *sizes: Any, factors: bool = False, **options: Any
) -> Callable[[Draw], tuple[Any, ...]]:
    """Like `linear`'s, with a quantised weight. Rows differ in size, sign and offset."""
    build = _linear(*sizes, **options)

    def quantized(draw: Draw) -> tuple[Any, ...]:
        x, weight, bias, activation, residual = build(draw)
        found = (drawn_factors(draw, x.shape[-1]),) if factors else ()
        return varied(draw, x), *quantize_weight(weight, *found), bias, activation, residual, *found

    return quantized


def feed_forward_arguments(
    *sizes: Any, factors: tuple[bool, bool] = (False, False), **options: Any
) -> Callable[[Draw], tuple[Any, ...]]:
    build = _feed_forward(*sizes, **options)

    def quantized(draw: Draw) -> tuple[Any, ...]:
        x, weight1, bias1, weight2, bias2, activation, _, _ = build(draw)
        found = [
            drawn_factors(draw, weight.shape[1]) if has else None
            for has, weight in zip(factors, (weight1, weight2), strict=True)
        ]
        one, two = quantize_weight(weight1, found[0]), quantize_weight(weight2, found[1])
        rest = tuple(found) if any(factors) else ()
        return varied(draw, x), *one, bias1, *two, bias2, activation, *rest

    return quantized


def drawn_factors(draw: Draw, columns: int) -> Tensor:
    """Returns powers of two, float32 (columns,)."""
    return (draw.normal(columns).float() * 2.0).round().clamp(-4.0, 0.0).exp2()


def varied(draw: Draw, x: Tensor) -> Tensor:
    """Returns x with rows scaled at random; in some rows all values have the same sign."""
    size = draw.normal(*x.shape[:-1], 1).exp()
    kind = draw.normal(*x.shape[:-1], 1)
    return torch.where(kind > 1.0, x.abs(), torch.where(kind < -1.0, -x.abs(), x)) * size


def _transposed(draw: Draw) -> tuple[Any, ...]:
    _, weight, scale, bias, _, _ = linear_arguments((1,), 33, 24)(draw)
    return draw.normal(33, 40).t(), weight.t().contiguous().t(), scale, bias, None, None


def _strided(draw: Draw) -> tuple[Any, ...]:
    x = draw.normal(6, 9, 80)[:, ::3, 5:48]
    weight, scale = quantize_weight(draw.weight(50, 90))
    residual = draw.normal(3, 6, 50).transpose(0, 1)
    scale = scale.repeat(2, 1).t()[:, 1]
    return x, weight[:, 3:46], scale, draw.normal(50, 2)[:, 0], "relu", residual


_LINEAR_CASES = (
    *common_cases(linear_arguments),
    case("transposed", _transposed),
    case("strided", _strided),
    case("callable activation", linear_arguments((15,), 32, 32, activation=Tensor.sin)),
    case("factors", linear_arguments((37,), 61, 53, factors=True, activation="relu")),
    case("factors, one row", linear_arguments((1,), 67, 510, factors=True, residual=True)),
)
_FEED_FORWARD_CASES = (
    *common_network_cases(feed_forward_arguments),
    case("factors", feed_forward_arguments((300,), 31, 101, factors=(True, True))),
    case("factors of the input", feed_forward_arguments((19,), 32, 96, factors=(True, False))),
    case(
        "factors of the hidden units", feed_forward_arguments((9,), 32, 96, factors=(False, True))
    ),
)


def _name(rows: int, *sizes: int, activation: str | None = None) -> str:
    return "x".join(map(str, (rows, *sizes))) + (f", {activation}" if activation else "")


def _bench(rows: int, inputs: int, outputs: int, activation: str | None = None) -> Case:
    build = linear_arguments((rows,), inputs, outputs, activation=activation)
    return case(_name(rows, inputs, outputs, activation=activation), build)


def _bench_network(rows: int, activation: str, model: int = 512, hidden: int = 2048) -> Case:
    build = feed_forward_arguments((rows,), model, hidden, activation=activation)
    return case(_name(rows, model, hidden, activation=activation), build)


def _linear_flops(arguments: tuple[Any, ...]) -> float:
    return 2.0 * rows_of(arguments[0]) * arguments[1].numel()


def _network_flops(arguments: tuple[Any, ...]) -> float:
    return 2.0 * rows_of(arguments[0]) * (arguments[1].numel() + arguments[4].numel())


def _bytes(weight: int) -> Callable[[tuple[Any, ...]], float]:
    """Returns a function for a call's memory traffic; ``weight``: index of its last weight."""

    def bytes_moved(arguments: tuple[Any, ...]) -> float:
        x = arguments[0]
        result = rows_of(x) * arguments[weight].shape[0] * x.element_size()
        tensors = (value for value in arguments if isinstance(value, Tensor))
        return bytes_of(*tensors) + result

    return bytes_moved


def _step(arguments: tuple[Any, ...]) -> float:
    """Hidden values are rounded to bfloat16, then to the steps of their row. If activations differ in
    their last bits, about one of 16 moves by a bfloat16 unit, which is up to a step, and by a step."""
    x, weight1, scale1, bias1, _, scale2, _, activation, *factors = arguments
    one, two = factors or (None, None)
    hidden = int8_linear(x, weight1, scale1, bias1, activation, None, one)
    if hidden.numel() == 0 or scale2.numel() == 0:
        return 0.0
    hidden = hidden if two is None else hidden * two
    step = width_of(hidden.float()).nan_to_num(0.0, 0.0, 0.0).amax() / STEPS
    moved = max(1.0, hidden.shape[-1] / 16)
    return float(2.0 * step * LARGEST * scale2.amax() * moved**0.5)


def _map_by_pytorch(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Any, activation: Any, factors: Any = None
) -> Tensor:
    """PyTorch's product takes signed values: a row's values less the middle of its range."""
    wide = torch.promote_types(x.dtype, torch.float32)
    quantized, row_scale = quantize_rows(x.flatten(0, -2) if x.dim() > 1 else x[None], factors)
    middle = (quantized.amax(-1, keepdim=True) + quantized.amin(-1, keepdim=True)).div(2).ceil()
    signed = (quantized - middle).to(torch.int8)
    shift = middle.int() * weight.sum(-1, dtype=torch.int32)
    y = (torch._int_mm(signed, weight.t()) + shift).to(wide) * scale.to(wide) * row_scale.to(wide)
    y = activate(y if bias is None else y + bias.to(wide), activation)
    return y.reshape(*x.shape[:-1], -1)


def _linear_by_pytorch(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Any, activation: Any, residual: Any,
    factors: Any = None,
) -> Tensor:  # fmt: skip
    y = _map_by_pytorch(x, weight, scale, bias, activation, factors)
    return (y if residual is None else y + residual.to(y.dtype)).to(x.dtype)


def _network_by_pytorch(
    x: Tensor, w1: Tensor, s1: Tensor, b1: Any, w2: Tensor, s2: Tensor, b2: Any, activation: Any,
    factors1: Any = None, factors2: Any = None,
) -> Tensor:  # fmt: skip
    hidden = _map_by_pytorch(x, w1, s1, b1, activation, factors1)
    hidden = hidden.to(torch.bfloat16).to(hidden.dtype)
    return _map_by_pytorch(hidden, w2, s2, b2, None, factors2).to(x.dtype)


def _text(text: Text) -> list[tuple[Any, ...]]:
    weight, bias = text.parameters(text.size.hidden, text.size.model)
    return [(x, *quantize_weight(weight), bias, "gelu", None) for x in text.embedded]


def _network_text(text: Text) -> list[tuple[Any, ...]]:
    weight1, bias1 = text.parameters(text.size.hidden, text.size.model)
    weight2, bias2 = text.parameters(text.size.model, text.size.hidden)
    weights = *quantize_weight(weight1), bias1, *quantize_weight(weight2), bias2
    return [(x, *weights, "relu") for x in text.embedded]


_PAPER = "Jacob et al. 2018, with scales found at run time"
INT8_LINEAR = OpSpec(
    name="int8_linear",
    summary="A linear map with 8-bit products, then optionally an activation and a residual.",
    paper=_PAPER,
    arguments=("input", "weight", "scale", "bias", "activation", "residual", "factors"),
    results=("output",),
    gradients_of=(),
    cases=_LINEAR_CASES,
    bench_cases=(
        _bench(4096, 512, 2048, "relu"),
        _bench(4096, 512, 2048, "gelu"),
        *(_bench(rows, 512, 2048) for rows in (128, 16, 4, 1)),
        _bench(1, 512, 32000),
    ),
    flops=_linear_flops,
    bytes=_bytes(1),
    pytorch=_linear_by_pytorch,
    tiny=_bench(1, 8, 8),
    text_cases=(("512 → 2048, gelu", _text),),
    gpu_cases=(),
    public=lambda functional, *given: functional.int8_linear(
        *given[:4], **dict(zip(("activation", "residual", "factors"), given[4:], strict=False))
    ),
    product="int8",
    exact=lambda arguments: arguments[4] in (None, "relu"),
)
INT8_FEED_FORWARD = OpSpec(
    name="int8_feed_forward",
    summary="The position-wise feed-forward network with 8-bit products.",
    paper=_PAPER,
    arguments=(
        "input", "weight1", "scale1", "bias1", "weight2", "scale2", "bias2", "activation",
        "factors1", "factors2",
    ),
    results=("output",),
    gradients_of=(),
    cases=_FEED_FORWARD_CASES,
    bench_cases=(
        _bench_network(4096, "relu"),
        _bench_network(4096, "gelu"),
        *(_bench_network(rows, "relu") for rows in (128, 16, 4, 1)),
    ),
    flops=_network_flops,
    bytes=_bytes(4),
    pytorch=_network_by_pytorch,
    tiny=_bench_network(1, "relu", 8, 8),
    text_cases=(("512 → 2048, relu", _network_text),),
    gpu_cases=(),
    public=lambda functional, *given: functional.int8_feed_forward(
        *given[:7], **dict(zip(("activation", "factors1", "factors2"), given[7:], strict=False))
    ),
    product="int8",
    step=_step,
    exact=lambda arguments: arguments[7] == "relu",
)  # fmt: skip
