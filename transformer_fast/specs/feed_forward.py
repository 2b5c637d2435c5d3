"""Op table entry of feed_forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..reference.linear import activate
from .spec import Case, Draw, OpSpec, Text, bytes_of, case, rows_of


def _feed_forward(
    lead: tuple[int, ...], model: int, hidden: int, *, outputs: int | None = None,
    bias: tuple[bool, bool] = (True, True), activation: Any = "relu", dropout_p: float = 0.0,
) -> Callable[[Draw], tuple[Any, ...]]:  # fmt: skip
    def build(draw: Draw) -> tuple[Any, ...]:
        out = model if outputs is None else outputs
        x = draw.normal(*lead, model)
        weight1, weight2 = draw.weight(hidden, model), draw.weight(out, hidden)
        bias1 = draw.normal(hidden) if bias[0] else None
        bias2 = draw.normal(out) if bias[1] else None
        seed = draw.seed() if 0.0 < dropout_p < 1.0 else None
        return x, weight1, bias1, weight2, bias2, activation, dropout_p, seed

    return build


def _strided(draw: Draw) -> tuple[Any, ...]:
    x = draw.normal(5, 6, 70)[:, ::2, 3:43]
    weight1, weight2 = draw.weight(40, 72).t(), draw.weight(33, 80)[:, 4:76]
    return (
        x, weight1, draw.normal(1).expand(72), weight2, draw.normal(33, 2)[:, 1], "relu", 0.0, None,
    )  # fmt: skip


def _expanded(draw: Draw) -> tuple[Any, ...]:
    _, *rest = _feed_forward((20,), 24, 64)(draw)
    return draw.normal(24).expand(20, 24), *rest


def common_cases(build: Callable[..., Callable[[Draw], tuple[Any, ...]]]) -> tuple[Case, ...]:
    """Returns the cases of all networks; ``build`` has the parameters of `_feed_forward`."""
    return (
        case("relu", build((19,), 32, 96)),
        case("gelu", build((19,), 32, 96, activation="gelu")),
        case("gelu_tanh", build((19,), 32, 96, activation="gelu_tanh")),
        case("silu", build((19,), 32, 96, activation="silu")),
        case("three dimensions", build((3, 7), 32, 64)),
        case("primes", build((37,), 31, 101, outputs=29)),
        case("2^k + 1", build((65,), 33, 129)),
        case("many row blocks", build((300,), 40, 72)),
        case("one row", build((1,), 300, 517)),
        case("one dimension", build((), 300, 130)),
        case("one hidden value", build((30,), 20, 1)),
        case("no bias", build((19,), 32, 96, bias=(False, False))),
        case("first bias only", build((19,), 32, 96, bias=(True, False))),
        case("second bias only", build((19,), 32, 96, bias=(False, True))),
        case("callable activation", build((19,), 24, 40, activation=Tensor.tanh)),
    )


_CASES = (
    *common_cases(_feed_forward),
    case("strided", _strided),
    case("expanded", _expanded),
    case("dropout", _feed_forward((3, 7), 32, 90, dropout_p=0.1)),
    case("everything dropped", _feed_forward((19,), 32, 64, dropout_p=1.0)),
)


def _bench(
    rows: int, activation: str = "relu", dropout_p: float = 0.0, model: int = 512,
    hidden: int = 2048,
) -> Case:  # fmt: skip
    name = f"{rows}x{model}x{hidden}, {activation}"
    name += f", dropout {dropout_p}" if dropout_p else ""
    build = _feed_forward((rows,), model, hidden, activation=activation, dropout_p=dropout_p)
    return case(name, build)


def _flops(arguments: tuple[Any, ...]) -> float:
    x, weight1, _, weight2, *_ = arguments
    return 2.0 * rows_of(x) * (weight1.numel() + weight2.numel())


def _bytes(arguments: tuple[Any, ...]) -> float:
    x, weight1, bias1, weight2, bias2, *_ = arguments
    result = rows_of(x) * weight2.shape[0] * x.element_size()
    return bytes_of(x, weight1, bias1, weight2, bias2) + result


def _by_pytorch(
    x: Tensor, w1: Tensor, b1: Any, w2: Tensor, b2: Any, activation: Any, p: float, seed: Any
) -> Tensor:
    hidden = activate(F.linear(x, w1, b1), activation)
    return F.linear(F.dropout(hidden, p) if p else hidden, w2, b2)


def _text(text: Text) -> list[tuple[Any, ...]]:
    first = text.parameters(text.size.hidden, text.size.model)
    second = text.parameters(text.size.model, text.size.hidden)
    return [(x, *first, *second, "relu", 0.0, None) for x in text.embedded]


FEED_FORWARD = OpSpec(
    name="feed_forward",
    summary="The position-wise feed-forward network.",
    paper='"Attention Is All You Need", section 3.3',
    arguments=(
        "input", "weight1", "bias1", "weight2", "bias2", "activation", "dropout_p", "seed",
    ),
    results=("output",),
    gradients_of=("input", "weight1", "bias1", "weight2", "bias2"),
    cases=_CASES,
    bench_cases=(
        _bench(4096),
        _bench(1024),
        _bench(256),
        _bench(32),
        _bench(1),
        _bench(4096, "gelu"),
        _bench(4096, dropout_p=0.1),
    ),
    flops=_flops,
    bytes=_bytes,
    pytorch=_by_pytorch,
    tiny=_bench(1, model=8, hidden=8),
    text_cases=(("512 → 2048, relu", _text),),
    gpu_cases=tuple(
        _bench(rows, dropout_p=p, model=1024, hidden=4096)
        for rows in (32, 1000, 4096, 16384)
        for p in (0.0, 0.1)
    ),
    gpu_bench_cases=tuple(_bench(rows, model=1024, hidden=4096) for rows in (32768, 65536)),
    public=lambda functional, *given: functional.feed_forward(*given[:5], activation=given[5]),
)  # fmt: skip
