"""Op table entries of cross_entropy and linear_cross_entropy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .spec import Case, Draw, OpSpec, Text, bytes_of, case

_IGNORED = -100


def _targets(draw: Draw, rows: int, classes: int, ignored: float) -> Tensor:
    target = draw.integers(rows, end=classes)
    return target.masked_fill(draw.bools(rows, true=ignored), _IGNORED) if ignored else target


def _loss(
    rows: int, classes: int, *, smoothing: float = 0.0, ignored: float = 0.0, scale: float = 2.0
) -> Callable[[Draw], tuple[Any, ...]]:
    def build(draw: Draw) -> tuple[Any, ...]:
        x = draw.normal(rows, classes, scale=scale)
        return x, _targets(draw, rows, classes, ignored), _IGNORED, smoothing

    return build


def _laid_out(rows: int, classes: int, change: Callable[[Tensor], Tensor]) -> Any:
    def build(draw: Draw) -> tuple[Any, ...]:
        x = change(draw.normal(rows, classes))
        return x, _targets(draw, x.shape[0], x.shape[1], 0.2), _IGNORED, 0.1

    return build


def _planes(
    groups: int, classes: int, rows: int, view: Callable[[Tensor], Tensor] = lambda x: x
) -> Any:
    """Logits (groups, rows, classes) whose classes are planes in memory, as an image's are."""

    def build(draw: Draw) -> tuple[Any, ...]:
        x = view(draw.normal(groups, classes, rows)).transpose(1, 2)
        target = _targets(draw, x.shape[0] * x.shape[1], classes, 0.2)
        return x, target.view(x.shape[:2]), _IGNORED, 0.1

    return build


def _hidden_classes(draw: Draw) -> tuple[Any, ...]:
    x, target, *rest = _loss(260, 70)(draw)
    hidden = draw.bools(260, 70).scatter(1, target[:, None], False)
    return x.masked_fill(hidden, -math.inf), target, *rest


def _hidden_blocks(smoothing: float) -> Any:
    """Logits with -inf in a whole block of classes: the first, a middle or the last, row by row."""

    def build(draw: Draw) -> tuple[Any, ...]:
        x, row = draw.normal(260, 150), torch.arange(260, device=draw.device) % 3
        begin = torch.tensor([0, 60, 80], device=draw.device)[row, None]
        place = torch.arange(150, device=draw.device)
        x.masked_fill_(
            (place >= begin) & (place < begin + 80 - 10 * (row[:, None] != 1)), -math.inf
        )
        return x, torch.where(row == 0, 75, 3), _IGNORED, smoothing

    return build


def _rising(draw: Draw) -> tuple[Any, ...]:
    # In rising rows every block of classes has a new maximum, in falling rows (the flipped ones) only
    # the first block has. The logits differ by up to 1200; exp of that overflows fp32.
    x = torch.linspace(-600.0, 600.0, 300, device=draw.device).to(draw.dtype).repeat(260, 1)
    x[::2] = x[::2].flip(1)
    return x, draw.integers(260, end=300), _IGNORED, 0.1


def _garbage_in_padding(draw: Draw) -> tuple[Any, ...]:
    x, target, *rest = _loss(300, 150, smoothing=0.1, ignored=0.4)(draw)
    garbage = torch.tensor([math.nan, math.inf, -math.inf], device=draw.device).repeat(100)
    return torch.where((target == _IGNORED)[:, None], garbage[:, None].to(x), x), target, *rest


def _nothing_but_hidden(smoothing: float) -> Any:
    def build(draw: Draw) -> tuple[Any, ...]:
        x, *rest = _loss(260, 150, smoothing=smoothing)(draw)
        x[::5] = -math.inf
        return x, *rest

    return build


def _hidden_target(smoothing: float, value: float = -math.inf) -> Any:
    def build(draw: Draw) -> tuple[Any, ...]:
        x, target, *rest = _loss(260, 150, smoothing=smoothing)(draw)
        return x.scatter(1, target[:, None], value), target, *rest

    return build


_CASES = (
    case("plain", _loss(260, 64)),
    case("smoothing", _loss(260, 64, smoothing=0.1)),
    case("all smooth", _loss(260, 64, smoothing=1.0)),
    case("padding", _loss(300, 48, smoothing=0.1, ignored=0.4)),
    case("padding, no smoothing", _loss(300, 48, ignored=0.4)),
    case("nothing but padding", _loss(250, 48, smoothing=0.1, ignored=1.0)),
    case("a class that is padding",
         lambda draw: (draw.normal(400, 6), draw.integers(400, end=6), 3, 0.1)),
    case("prime classes", _loss(251, 1031, smoothing=0.1)),
    case("2^k + 1 classes", _loss(250, 4097)),
    case("one class", _loss(260, 1, smoothing=0.1)),
    case("two classes", _loss(400, 2)),
    case("large logits", _loss(260, 300, scale=40.0)),
    case("logits far from zero",
         lambda draw: (draw.normal(260, 70, shift=100.0), draw.integers(260, end=70), _IGNORED, 0.1)),
    case("hidden classes", _hidden_classes),
    case("hidden blocks", _hidden_blocks(0.0)),
    case("rising classes", _rising),
    case("targets apart", lambda draw: (
        draw.normal(260, 64), draw.integers(260, 2, end=64)[:, 1], _IGNORED, 0.1)),
    case("garbage in padding", _garbage_in_padding),
    case("garbage: smoothing over hidden blocks", _hidden_blocks(0.1)),
    case("garbage: nothing but hidden classes", _nothing_but_hidden(0.0)),
    case("garbage: nothing but hidden classes, smoothing", _nothing_but_hidden(0.1)),
    case("garbage: hidden targets", _hidden_target(0.0)),
    case("garbage: hidden targets, smoothing", _hidden_target(0.1)),
    case("targets far below", _hidden_target(0.1, -6e4)),
    case("transposed", _laid_out(56, 270, lambda x: x.t())),
    case("every third row", _laid_out(780, 48, lambda x: x[::3])),
    case("columns of wider rows", _laid_out(260, 100, lambda x: x[:, 3:67])),
    case("every other column", _laid_out(260, 96, lambda x: x[:, ::2])),
    case("planes", _planes(3, 19, 100)),
    case("planes of two classes", _planes(2, 2, 333)),
    case("planes of many classes", _planes(2, 150, 130)),
    case("small planes", _planes(60, 30, 5)),
    case("parts of planes", _planes(3, 20, 120, lambda x: x[:, :, 7:107])),
    case("every other pixel", _planes(3, 20, 200, lambda x: x[:, :, ::2])),
    case("groups of rows", _planes(3, 40, 90, lambda x: x.mT.contiguous().mT)),
    case("expanded rows", _laid_out(1, 60, lambda x: x.expand(260, 60))),
)  # fmt: skip


def _linear_loss(
    rows: int, inputs: int, classes: int, *, bias: bool = True, smoothing: float = 0.1,
    ignored: float = 0.2,
) -> Callable[[Draw], tuple[Any, ...]]:  # fmt: skip
    def build(draw: Draw) -> tuple[Any, ...]:
        x, weight = draw.normal(rows, inputs), draw.weight(classes, inputs)
        b = draw.normal(classes) if bias else None
        return x, weight, b, _targets(draw, rows, classes, ignored), _IGNORED, smoothing

    return build


def _linear_strided(draw: Draw) -> tuple[Any, ...]:
    x, weight = draw.normal(520, 90)[::2, 7:50], draw.weight(43, 77).t()
    return x, weight, draw.normal(77, 2)[:, 1], _targets(draw, 260, 77, 0.2), _IGNORED, 0.1


_LINEAR_CASES = (
    case("bias", _linear_loss(260, 48, 60)),
    case("no bias", _linear_loss(260, 48, 60, bias=False)),
    case("no smoothing, no padding", _linear_loss(260, 48, 60, smoothing=0.0, ignored=0.0)),
    case("primes", _linear_loss(257, 61, 103)),
    case("more classes than one part", _linear_loss(250, 16, 4200)),
    case("many rows", _linear_loss(1100, 33, 70)),
    case("one input", _linear_loss(400, 1, 12)),
    case("one class", _linear_loss(260, 24, 1)),
    case("nothing but padding", _linear_loss(260, 24, 31, ignored=1.0)),
    case("strided", _linear_strided),
)


def _bench(rows: int, classes: int, smoothing: float = 0.0) -> Case:
    name = f"{rows}x{classes}" + (f", smoothing {smoothing}" if smoothing else "")
    return case(name, _loss(rows, classes, smoothing=smoothing))


def _linear_bench(rows: int, inputs: int, classes: int) -> Case:
    build = _linear_loss(rows, inputs, classes, bias=False, ignored=0.0)
    return case(f"{rows}x{inputs}x{classes}, smoothing 0.1", build)


def _flops(arguments: tuple[Any, ...]) -> float:
    # Per logit: maximum, difference, sum of exponentials, sum for the smoothing. The exponentials
    # themselves are not counted.
    return 4.0 * float(arguments[0].numel())


def _bytes(arguments: tuple[Any, ...]) -> float:
    x, target, *_ = arguments
    return bytes_of(x, target) + 4.0 * target.numel()


def _linear_flops(arguments: tuple[Any, ...]) -> float:
    x, weight, *_ = arguments
    return x.shape[0] * weight.shape[0] * (2.0 * x.shape[1] + 4.0)


def _linear_bytes(arguments: tuple[Any, ...]) -> float:
    x, weight, bias, target, *_ = arguments
    return bytes_of(x, weight, bias, target) + 4.0 * x.shape[0]


def _by_pytorch(input: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> Tensor:
    return F.cross_entropy(
        input.movedim(-1, 1), target, ignore_index=ignore_index, reduction="none",
        label_smoothing=label_smoothing,
    )  # fmt: skip


def _linear_by_pytorch(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any
) -> Tensor:
    return _by_pytorch(F.linear(input, weight, bias), target, *rest)


def _linear_text(text: Text) -> list[tuple[Any, ...]]:
    """Returns calls where the target of each position is the next token; padding is ignored."""
    parameters = text.parameters(text.size.vocabulary, text.size.model)
    targets = [F.pad(b.tokens[:, 1:], (0, 1), value=text.padding).flatten() for b in text.batches]
    pairs = zip(targets, text.embedded, strict=True)
    return [(x.flatten(0, 1), *parameters, target, text.padding, 0.1) for target, x in pairs]


def _text(text: Text) -> list[tuple[Any, ...]]:
    return [(x @ weight.t() + bias, *rest) for x, weight, bias, *rest in _linear_text(text)]


CROSS_ENTROPY = OpSpec(
    name="cross_entropy",
    summary="Cross entropy of logits with label smoothing, the loss of each row.",
    paper='"Attention Is All You Need", section 5.4; Szegedy et al. 2015, section 7',
    arguments=("input", "target", "ignore_index", "label_smoothing"),
    results=("losses",),
    gradients_of=("input",),
    cases=_CASES,
    bench_cases=(
        _bench(1024, 32000),
        _bench(1024, 32000, 0.1),
        _bench(4096, 1000),
        case("4x19x128x128", _planes(4, 19, 128 * 128)),
    ),
    flops=_flops,
    bytes=_bytes,
    pytorch=_by_pytorch,
    tiny=_bench(1, 8),
    text_cases=(("{vocabulary} tokens", _text),),
    gpu_cases=tuple(
        case(f"{rows}x{classes}", _loss(rows, classes, smoothing=0.1, ignored=0.2))
        for rows in (1000, 8192)
        for classes in (1000, 8192, 32000)
    ),
    public=lambda functional, x, target, ignored, smoothing: functional.cross_entropy(
        x.movedim(-1, 1), target, ignore_index=ignored, reduction="none", label_smoothing=smoothing
    ),
)

LINEAR_CROSS_ENTROPY = OpSpec(
    name="linear_cross_entropy",
    summary="Cross entropy of a linear map, whose logits are never in memory as a whole.",
    paper='"Attention Is All You Need", sections 3.4 and 5.4',
    arguments=("input", "weight", "bias", "target", "ignore_index", "label_smoothing"),
    results=("losses",),
    gradients_of=("input", "weight", "bias"),
    cases=_LINEAR_CASES,
    bench_cases=(_linear_bench(1024, 512, 32000), _linear_bench(256, 512, 8000)),
    flops=_linear_flops,
    bytes=_linear_bytes,
    pytorch=_linear_by_pytorch,
    tiny=case("call", _linear_loss(1, 8, 8, smoothing=0.0, ignored=0.0)),
    text_cases=(("512 → {vocabulary} tokens", _linear_text),),
    gpu_cases=tuple(
        case(f"{rows}x512x32000", _linear_loss(rows, 512, 32000)) for rows in (1000, 8192)
    ),
    public=lambda functional, x, weight, bias, target, ignored, smoothing: (
        functional.linear_cross_entropy(
            x, weight, target, linear_bias=bias, ignore_index=ignored, reduction="none",
            label_smoothing=smoothing,
        )
    ),
)  # fmt: skip
