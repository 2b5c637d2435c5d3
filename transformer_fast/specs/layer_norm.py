"""Op table entries of layer norm and RMS norm, each with and without a residual connection."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.layer_norm import behind_sum
from ..reference.dropout import dropout
from .spec import Case, Draw, OpSpec, Text, bytes_of, case

_EPS = 1e-5


def _plain(*shape: int, scale: float = 1.0, shift: float = 0.0, eps: float = _EPS) -> Any:
    def build(draw: Draw) -> tuple[Any, ...]:
        columns = shape[-1]
        x = draw.normal(*shape, scale=scale, shift=shift)
        return x, (columns,), draw.normal(columns), draw.normal(columns), eps

    return build


def _affine(weight: bool, bias: bool) -> Any:
    def build(draw: Draw) -> tuple[Any, ...]:
        x, shape, w, b, eps = _plain(9, 64)(draw)
        return x, shape, w if weight else None, b if bias else None, eps

    return build


def _laid_out(*shape: int, change: Any) -> Any:
    def build(draw: Draw) -> tuple[Any, ...]:
        x = change(draw.normal(*shape))
        columns = x.shape[-1]
        return x, (columns,), draw.normal(columns), draw.normal(columns), _EPS

    return build


def _outlier(draw: Draw) -> tuple[Any, ...]:
    # One large square and many small equal ones: a running sum rounds each small square the same
    # way, so the rounding errors add up.
    x = draw.normal(2, 4096, scale=0.0)
    x[:, 15] = 3.0
    return x, (4096,), None, None, _EPS


def _strided_affine(draw: Draw) -> tuple[Any, ...]:
    x, weight = draw.normal(11, 40), draw.normal(40, 2)[:, 1]
    return x, (40,), weight, draw.normal(1).expand(40), _EPS


_CASES = (
    case("rows of 64", _plain(9, 64)),
    case("three dimensions", _plain(3, 5, 48)),
    case("prime columns", _plain(13, 61)),
    case("2^k + 1 columns", _plain(7, 257)),
    case("one row", _plain(1, 1031)),
    case("one dimension", _plain(384)),
    case("one column", _plain(400, 1)),
    case("no weight, no bias", _affine(False, False)),
    case("weight only", _affine(True, False)),
    case("bias only", _affine(False, True)),
    case("two dimensions normalised", lambda draw: (
        draw.normal(5, 7, 12), (7, 12), draw.normal(7, 12), draw.normal(7, 12), _EPS)),
    case("values far from zero", _plain(9, 96, shift=100.0)),
    case("values of the size of eps", _plain(9, 96, scale=3e-3)),
    case("large eps", _plain(9, 96, eps=0.5)),
    case("constant rows", _laid_out(10, 1, change=lambda x: x.expand(10, 48))),
    case("one outlier in a long row", _outlier),
    case("transposed", _laid_out(56, 8, change=lambda x: x.t())),
    case("every third row", _laid_out(27, 48, change=lambda x: x[::3])),
    case("columns of wider rows", _laid_out(9, 100, change=lambda x: x[:, 3:67])),
    case("every other column", _laid_out(9, 96, change=lambda x: x[:, ::2])),
    case("expanded rows", _laid_out(1, 60, change=lambda x: x.expand(9, 60))),
    case("strided weight, expanded bias", _strided_affine),
)  # fmt: skip


def _added(plain: Callable[[Draw], tuple[Any, ...]], dropout_p: float = 0.0) -> Any:
    def build(draw: Draw) -> tuple[Any, ...]:
        x, *rest = plain(draw)
        residual = draw.normal(*x.shape)
        seed = draw.seed() if 0.0 < dropout_p < 1.0 else None
        return x, residual, *rest, dropout_p, seed

    return build


def _with_residual(name: str, dropout_p: float = 0.0) -> Any:
    one = next(c for c in _CASES if c.name == name)
    return _added(lambda draw: one.build(draw.dtype, draw.device, draw.generator), dropout_p)


def _garbage_dropped(draw: Draw) -> tuple[Any, ...]:
    x, *rest, p, seed = _with_residual("three dimensions", 0.5)(draw)
    dropped = dropout(torch.ones_like(x), p, seed) == 0
    return x.masked_fill(dropped, math.nan), *rest, p, seed


def _residual_laid_out(draw: Draw) -> tuple[Any, ...]:
    x, shape, weight, bias, eps = _plain(4, 9, 32)(draw)
    return x, draw.normal(9, 4, 32).transpose(0, 1), shape, weight, bias, eps, 0.0, None


_ADD_CASES = (
    *(case(c.name, _with_residual(c.name)) for c in _CASES),
    case("residual laid out otherwise", _residual_laid_out),
    case("residual is input", lambda draw: (
        (given := _plain(9, 64)(draw))[0], *given, 0.0, None)),
    case("dropout", _with_residual("three dimensions", 0.1)),
    case("dropout, two dimensions normalised", _with_residual("two dimensions normalised", 0.3)),
    case("dropout, prime columns", _with_residual("prime columns", 0.5)),
    case("dropout, garbage in dropped elements", _garbage_dropped),
    case("everything dropped", _with_residual("rows of 64", 1.0)),
)  # fmt: skip


def _without_bias(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Converts the arguments of layer_norm or add_layer_norm to those of the RMS norm."""
    place = 3 if len(arguments) == len(LAYER_NORM.arguments) else 4
    return *arguments[:place], *arguments[place + 1 :]


def _rms(built: Case) -> Case:
    def build(draw: Draw) -> tuple[Any, ...]:
        return _without_bias(built.build(draw.dtype, draw.device, draw.generator))

    return case(built.name, build)


def _rms_cases(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    return tuple(_rms(one) for one in cases if one.name != "bias only")


def _bench(rows: int, columns: int) -> Case:
    return case(f"{rows}x{columns}", _plain(rows, columns))


def _add_bench(rows: int, columns: int, dropout_p: float = 0.0) -> Case:
    name = f"{rows}x{columns}" + (f", dropout {dropout_p}" if dropout_p else "")
    return case(name, _added(_plain(rows, columns), dropout_p))


def _flops(each: int, summands: int = 1) -> Callable[[tuple[Any, ...]], float]:
    """Returns a FLOP counter: ``each`` per element, plus one for the weight and one for the bias.

    ``summands``: number of tensor arguments other than weight and bias. Roots are not counted.
    """

    def count(arguments: tuple[Any, ...]) -> float:
        return float(arguments[0].numel()) * (each + len(_tensors(arguments)) - summands)

    return count


def _bytes(arguments: tuple[Any, ...]) -> float:
    """Returns the memory traffic: every argument read once, one result written once."""
    return bytes_of(*_tensors(arguments)) + arguments[0].numel() * arguments[0].element_size()


def _tensors(arguments: tuple[Any, ...]) -> list[Tensor]:
    return [each for each in arguments if isinstance(each, Tensor) and each.dim() > 0]


def _add_bytes(arguments: tuple[Any, ...]) -> float:
    """Like `_bytes`, plus a second result: the sum of input and residual."""
    return _bytes(arguments) + arguments[0].numel() * arguments[0].element_size()


def _text(text: Text) -> list[tuple[Any, ...]]:
    model = text.size.model
    weight, bias = text.normal(model, scale=0.1, shift=1.0), text.normal(model, scale=0.1)
    return [(x, (model,), weight, bias, _EPS) for x in text.embedded]


def _add_text(text: Text) -> list[tuple[Any, ...]]:
    sublayer = text.weight(text.size.model, text.size.model)
    return [(x @ sublayer, x, *rest, 0.0, None) for x, *rest in _text(text)]


_GPU_SIZES = [(rows, columns) for rows in (32, 1000, 4096, 16384) for columns in (512, 1024, 4096)]


LAYER_NORM = OpSpec(
    name="layer_norm",
    summary="Layer normalisation over the trailing dimensions.",
    paper='Ba, Kiros, Hinton 2016; "Attention Is All You Need", section 3.1',
    arguments=("input", "normalized_shape", "weight", "bias", "eps"),
    results=("output",),
    gradients_of=("input", "weight", "bias"),
    cases=_CASES,
    bench_cases=(_bench(4096, 512), _bench(65536, 512), _bench(4096, 2048), _bench(32, 512)),
    flops=_flops(5),  # mean 1, minus the mean 1, square and add 2, times rstd 1
    bytes=_bytes,
    pytorch=F.layer_norm,
    tiny=case("call", _plain(1, 8)),
    text_cases=(("512", _text),),
    gpu_cases=tuple(_bench(*sizes) for sizes in _GPU_SIZES),
    gpu_bench_cases=(_bench(32768, 1024), _bench(65536, 1024)),
)

ADD_LAYER_NORM = OpSpec(
    name="add_layer_norm",
    summary="Residual connection with dropout, and layer normalisation of the sum, in one pass.",
    paper='"Attention Is All You Need", sections 3.1 and 5.4',
    arguments=(
        "input", "residual", "normalized_shape", "weight", "bias", "eps", "dropout_p", "seed",
    ),
    results=("normalized", "sum"),
    gradients_of=("input", "residual", "weight", "bias"),
    cases=_ADD_CASES,
    bench_cases=(
        _add_bench(4096, 512),
        _add_bench(65536, 512),
        _add_bench(32, 512),
        _add_bench(4096, 512, 0.1),
    ),
    flops=_flops(6, 2),
    bytes=_add_bytes,
    pytorch=behind_sum(F.layer_norm, lambda x, p, seed: F.dropout(x, p)),
    tiny=_add_bench(1, 8),
    text_cases=(("512", _add_text),),
    gpu_cases=tuple(_add_bench(*sizes, p) for sizes in _GPU_SIZES for p in (0.0, 0.1)),
    gpu_bench_cases=(_add_bench(32768, 1024, 0.1), _add_bench(65536, 1024, 0.1)),
    public=lambda functional, *given: functional.add_layer_norm(*given[:6]),
)  # fmt: skip

RMS_NORM = OpSpec(
    name="rms_norm",
    summary="Division by the root mean square over the trailing dimensions.",
    paper='Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"',
    arguments=("input", "normalized_shape", "weight", "eps"),
    results=("output",),
    gradients_of=("input", "weight"),
    cases=_rms_cases(_CASES),
    bench_cases=_rms_cases(LAYER_NORM.bench_cases),
    flops=_flops(3),  # square and add 2, times 1 / rms 1
    bytes=_bytes,
    pytorch=F.rms_norm,
    tiny=_rms(LAYER_NORM.tiny),
    text_cases=(("512", lambda text: [_without_bias(one) for one in _text(text)]),),
    gpu_cases=_rms_cases(LAYER_NORM.gpu_cases),
)

ADD_RMS_NORM = OpSpec(
    name="add_rms_norm",
    summary="Residual connection with dropout, and RMS norm of the sum, in one pass.",
    paper='Zhang and Sennrich 2019; "Attention Is All You Need", sections 3.1 and 5.4',
    arguments=("input", "residual", "normalized_shape", "weight", "eps", "dropout_p", "seed"),
    results=("normalized", "sum"),
    gradients_of=("input", "residual", "weight"),
    cases=_rms_cases(_ADD_CASES),
    bench_cases=_rms_cases(ADD_LAYER_NORM.bench_cases),
    flops=_flops(4, 2),
    bytes=_add_bytes,
    pytorch=behind_sum(F.rms_norm, lambda x, p, seed: F.dropout(x, p)),
    tiny=_rms(ADD_LAYER_NORM.tiny),
    text_cases=(("512", lambda text: [_without_bias(one) for one in _add_text(text)]),),
    gpu_cases=_rms_cases(ADD_LAYER_NORM.gpu_cases),
    public=lambda functional, *given: functional.add_rms_norm(*given[:5]),
)
