"""Op table entry of linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..reference import linear
from .spec import Case, Draw, OpSpec, Text, bytes_of, case, rows_of


def _linear(
    lead: tuple[int, ...], inputs: int, outputs: int, *, bias: bool = True,
    activation: Any = None, residual: bool = False,
) -> Callable[[Draw], tuple[Any, ...]]:  # fmt: skip
    def build(draw: Draw) -> tuple[Any, ...]:
        x, weight = draw.normal(*lead, inputs), draw.weight(outputs, inputs)
        b = draw.normal(outputs) if bias else None
        return x, weight, b, activation, draw.normal(*lead, outputs) if residual else None

    return build


def _strided(draw: Draw) -> tuple[Any, ...]:
    x = draw.normal(6, 9, 80)[:, ::3, 5:48]
    weight = draw.weight(50, 90)[:, 3:46]
    residual = draw.normal(3, 6, 50).transpose(0, 1)
    return x, weight, draw.normal(50, 2)[:, 0], "relu", residual


def _expanded(draw: Draw) -> tuple[Any, ...]:
    x = draw.normal(1, 32).expand(12, 32)
    return x, draw.weight(40, 32), draw.normal(1).expand(40), None, draw.normal(40).expand(12, 40)


def common_cases(build: Callable[..., Callable[[Draw], tuple[Any, ...]]]) -> tuple[Case, ...]:
    """Returns the cases of all linear maps; ``build`` has the parameters of `_linear`."""
    return (
        case("bias", build((19,), 48, 40)),
        case("no bias", build((19,), 48, 40, bias=False)),
        case("three dimensions", build((3, 7), 32, 48)),
        case("primes", build((37,), 61, 53, residual=True)),
        case("2^k + 1", build((65,), 129, 33, activation="relu")),
        case("many row blocks", build((260,), 70, 66)),
        case("one row", build((1,), 67, 510)),
        case("one dimension", build((), 67, 512)),
        case("one input", build((40,), 1, 12)),
        case("one output", build((400,), 24, 1)),
        case("long sums", build((11,), 2050, 40)),
        case("relu", build((17,), 48, 40, activation="relu")),
        case("gelu", build((17,), 48, 40, activation="gelu")),
        case("gelu_tanh", build((17,), 48, 40, activation="gelu_tanh")),
        case("silu", build((17,), 48, 40, activation="silu")),
        case("residual", build((17,), 48, 40, residual=True)),
        case("silu, residual", build((17,), 48, 40, activation="silu", residual=True)),
        case("silu, residual, no bias", build((17,), 48, 40, bias=False, activation="silu",
                                               residual=True)),
    )  # fmt: skip


_CASES = (
    *common_cases(_linear),
    case("transposed input", lambda draw: (
        draw.normal(33, 40).t(), draw.weight(24, 33), draw.normal(24), None, None)),
    case("transposed weight",
         lambda draw: (draw.normal(21, 33), draw.weight(33, 29).t(), None, None, None)),
    case("strided", _strided),
    case("expanded", _expanded),
    case("callable activation", _linear((15,), 32, 32, activation=Tensor.sin)),
)  # fmt: skip


def _bench(
    rows: int, inputs: int, outputs: int, activation: str | None = None, residual: bool = False
) -> Case:
    name = f"{rows}x{inputs}x{outputs}"
    name += (f", {activation}" if activation else "") + (", residual" if residual else "")
    return case(name, _linear((rows,), inputs, outputs, activation=activation, residual=residual))


def _flops(arguments: tuple[Any, ...]) -> float:
    return 2.0 * rows_of(arguments[0]) * arguments[1].numel()


def _bytes(arguments: tuple[Any, ...]) -> float:
    x, weight, bias, _, residual = arguments
    result = rows_of(x) * weight.shape[0] * x.element_size()
    return bytes_of(x, weight, bias, residual) + result


def _text(text: Text) -> list[tuple[Any, ...]]:
    parameters = text.parameters(text.size.model, text.size.model)
    return [(x, *parameters, None, x.flip(0)) for x in text.embedded]


def _widening_text(text: Text) -> list[tuple[Any, ...]]:
    parameters = text.parameters(text.size.hidden, text.size.model)
    return [(x, *parameters, "gelu", None) for x in text.embedded]


LINEAR = OpSpec(
    name="linear",
    summary="A linear map, then optionally an activation and a residual.",
    paper='"Attention Is All You Need", section 3.2.2 (projections)',
    arguments=("input", "weight", "bias", "activation", "residual"),
    results=("output",),
    gradients_of=("input", "weight", "bias", "residual"),
    cases=_CASES,
    bench_cases=(
        _bench(4096, 512, 1536),
        _bench(4096, 512, 512),
        _bench(4096, 512, 512, residual=True),
        _bench(4096, 512, 2048, activation="relu"),
        _bench(1024, 512, 1536),
        _bench(256, 512, 512),
        _bench(32, 512, 512),
        _bench(1, 512, 512),
        _bench(1, 512, 32000),
    ),
    flops=_flops,
    bytes=_bytes,
    pytorch=linear,
    tiny=_bench(1, 8, 8),
    text_cases=(("512 → 512", _text), ("512 → 2048, gelu", _widening_text)),
    gpu_cases=tuple(
        _bench(rows, 512, 2048, activation)
        for rows in (32, 1000, 4096, 16384)
        for activation in (None, "gelu")
    ),
    public=lambda functional, *given: functional.linear(
        *given[:3], activation=given[3], residual=given[4]
    ),
)
