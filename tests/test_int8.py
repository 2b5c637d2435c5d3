"""8-bit products: int8_linear and int8_feed_forward against their reference, on each instruction set."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import DTYPES, FLOAT_ISAS, INT8_ISAS, check_threads, in_use, same_bits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from transformer_fast import (
    _native,
    accelerate,
    explain,
    functional,
    nn,
    reference,
    use_backend,
)  # fmt: skip
from transformer_fast.backends import cpu_blocks
from transformer_fast.measure.calls import record
from transformer_fast.ops.arguments import LayerStack
from transformer_fast.ops.layer_norm import LAYER
from transformer_fast.testing.parity import OUTPUT_FACTOR, compare

needs_native = pytest.mark.skipif(_native.module is None, reason=str(_native.why_not))


def drawn(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype = torch.float32, bias: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns input, weight, scale and bias. Rows differ in size, sign and offset."""
    generator = torch.Generator().manual_seed(rows * 1000 + inputs)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x = normal(rows, inputs) * normal(rows, 1).exp() + 3.0 * (normal(rows, 1) > 1.0)
    x[1::7] = x[1::7].abs()
    x[2::7] = -x[2::7].abs()
    b = normal(outputs).to(dtype) if bias else None
    return x.to(dtype), *reference.quantize_weight(normal(outputs, inputs)), b


def network(
    rows: int, inputs: int, hidden: int, outputs: int, dtype: torch.dtype = torch.float32
) -> tuple[Any, ...]:
    _, weight2, scale2, bias2 = drawn(1, hidden, outputs, dtype)
    return *drawn(rows, inputs, hidden, dtype), weight2, scale2, bias2


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Any, *rest: Any) -> Tensor:
    activation, residual, *factors = rest
    return functional.int8_linear(
        x, weight, scale, bias, activation=activation, residual=residual,
        factors=factors[0] if factors else None, backend="cpu",
    )  # fmt: skip


def int8_feed_forward(*arguments: Any) -> Tensor:
    *tensors, activation, one, two = (*arguments, None, None)[:10]
    return functional.int8_feed_forward(
        *tensors, activation=activation, factors1=one, factors2=two, backend="cpu"
    )


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_feed_forward_differs_from_the_reference_by_single_steps(int8_isa, activation):
    """An activation's relative error, 2e-4, may move a hidden unit by one of its row's 254 steps."""
    arguments = (*network(40, 48, 96, 24), activation)
    x, weight1, scale1, bias1, weight2, scale2, _, _ = arguments
    hidden = reference.int8_linear(x, weight1, scale1, bias1, activation, None)
    steps = (hidden.amax(-1).clamp(min=0) - hidden.amin(-1).clamp(max=0)) / 254
    difference = int8_feed_forward(*arguments) - reference.int8_feed_forward(*arguments)
    one = steps[:, None] * weight2.abs().amax(-1) * scale2
    assert (difference.abs() <= 2.0 * one).all()
    # Most units keep their step, so the difference is small compared with the rounding to steps.
    rounding = steps[:, None] * weight2.float().norm(dim=-1) * scale2 / math.sqrt(12.0)
    assert difference.norm() <= 0.1 * rounding.norm()


def test_garbage_rows_have_no_effect_on_others(int8_isa):
    x, weight, scale, bias = drawn(150, 90, 70)
    garbage = x.clone()
    garbage[::3] = math.nan
    kept = torch.arange(150) % 3 != 0
    rest = weight, scale, bias, "silu", None
    assert same_bits(int8_linear(garbage, *rest)[kept], int8_linear(x, *rest)[kept])
    whole = (*network(150, 90, 130, 70), "gelu")
    found = int8_feed_forward(garbage, *whole[1:])
    assert found[::3].isnan().all()
    assert found[kept].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_rows(int8_isa, dtype):
    """NaN and infinity give NaN in their row; zeros and rows narrower than 2^-100 give the bias. A finite
    row gives what float32 gives, even if its range exceeds float32."""
    x, weight, scale, bias = drawn(9, 70, 40, dtype)
    x[0, 69], x[1, 3], x[2, 20] = math.nan, math.inf, -math.inf
    x[3] = 0.0
    if dtype != torch.float16:
        x[4, :2] = torch.tensor([3e38, -3e38])  # their difference overflows
        x[7, :2] = torch.tensor([-2e38, 2e38])
    if dtype == torch.float32:
        x[5], x[6] = x[5] * 2.0**-110, x[6] * 2.0**-140
    one = x, weight, scale, bias, "relu", None
    two = x, weight, scale, bias, *drawn(1, 40, 11, dtype)[1:], "relu"
    for name, found in (
        ("int8_linear", int8_linear(*one)),
        ("int8_feed_forward", int8_feed_forward(*two)),
    ):
        expected = getattr(reference, name)(*(one if name == "int8_linear" else two))
        # Conversions differ in the sign of NaN.
        assert same_bits(found.isnan(), expected.isnan())
        assert same_bits(found.nan_to_num(), expected.nan_to_num())
        assert found[:3].isnan().all()
        assert name == "int8_feed_forward" or not found[3:].isnan().any()
        assert found[[3, 5, 6, 8]].isfinite().all()
    assert same_bits(int8_linear(*one)[3], bias.relu())


@pytest.mark.parametrize("factors", [False, True])
def test_rows_whose_range_exceeds_float32_have_the_error_of_their_steps(int8_isa, factors):
    x, weight, scale, bias = drawn(40, 70, 30)
    x = x / x.abs().amax(-1, keepdim=True) * 3e38
    x[0, :2], x[1, :2] = torch.tensor([2e38, -2e38]), torch.finfo(torch.float32).max
    scale = scale * 1e-4  # no sum exceeds float32
    given = torch.ones(70).scatter(0, torch.arange(0, 70, 3), 0.25) if factors else None
    found = int8_linear(x, weight, scale, bias, None, None, given)
    assert same_bits(found, reference.int8_linear(x, weight, scale, bias, None, None, given))
    real = weight.double() * scale.double()[:, None] * (1.0 if given is None else given.double())
    expected = x.double() @ real.T + bias
    assert (x.amax(-1) - x.amin(-1)).isinf().any()
    assert ((found - expected).norm(dim=-1) <= 0.02 * expected.norm(dim=-1)).all()


def test_sums_are_exact_at_the_limits_of_8_bits(int8_isa):
    """Values for which instructions that add two products in 16 bits saturate; sums of 31 bits."""
    for columns, value in ((256, 127), (256, -127), (65536, 127), (65536, -128)):
        weight = torch.full((3, columns), value, dtype=torch.int8)
        x = torch.full((5, columns), 254.0)
        x[1] = -254.0
        x[2, ::2] = 0.0
        x[3, ::2] = -127.0
        x[3, 1::2] = 127.0
        arguments = x, weight, torch.ones(3), None, None, None
        assert same_bits(int8_linear(*arguments), reference.int8_linear(*arguments))


@needs_native
def test_a_packed_weight_is_read_by_its_own_instruction_set_only():
    """Packed copies for other instruction sets differ in the panels' width, but not in size."""
    x, weight, scale, bias = drawn(40, 64, 64)
    arguments = x, torch.nn.Parameter(weight, requires_grad=False), scale, bias, None, None
    expected = reference.int8_linear(*arguments)
    for isa in (*INT8_ISAS, *INT8_ISAS[::-1]):
        with in_use(isa), torch.no_grad():
            assert same_bits(int8_linear(*arguments), expected)


def test_a_sum_of_zero_is_not_negative(int8_isa):
    """Integers have no -0: covers products of 0 and negative values, in rows and columns of zeros."""
    x = torch.tensor([[0.0], [-0.0], [1.0], [-1.0]])
    weight = torch.tensor([[-3], [0]], dtype=torch.int8)
    arguments = x, weight, torch.ones(2), None, None, None
    for run in (int8_linear, reference.int8_linear):
        found = run(*arguments)
        assert not found[found == 0.0].signbit().any()


def _kinds_of_data() -> dict[str, Tensor]:
    """Returns rows (256, 300) as Transformers have them, before linear maps."""
    torch.manual_seed(0)
    x = torch.randn(256, 300)
    large = torch.ones(300)
    large[:3] = 20.0
    return {
        "normal": x,
        "1 % of the channels 20 times as large": x * large,
        "long tails": torch.distributions.StudentT(torch.tensor(4.0)).sample((256, 300)),
        "rows of varied size": x * torch.exp(0.7 * torch.randn(256, 1)),
        "hidden units of GELU": torch.nn.functional.gelu(x),
        "hidden units of ReLU": x.relu(),
    }


@pytest.mark.parametrize("kind", _kinds_of_data())
def test_the_error_is_that_of_rounding_to_the_steps(kind):
    """The error against float64 is that of uniform errors of a step, in rows and weight columns."""
    x, weight = _kinds_of_data()[kind], torch.randn(200, 300)
    values, scale = functional.quantize_weight(weight)
    found = functional.int8_linear(x, values, scale).double()
    expected = x.double() @ weight.double().T
    steps = (x.amax(-1).clamp(min=0) - x.amin(-1).clamp(max=0)) / 254
    # Zeros are quantised exactly, so they do not count.
    of_rows = steps.square().outer(weight.square().sum(-1)) * (x != 0).float().mean()
    of_columns = x.square().sum(-1).outer(scale.square())
    predicted = ((of_rows + of_columns).sum() / 12).sqrt()
    assert 0.9 < float((found - expected).norm() / predicted) < 1.1


WIDTH, HEADS, HIDDEN = 64, 4, 100


def sublayers(kinds: list[int]) -> tuple[list[Any], list[Any]]:
    """Returns the parameters and scales of two layers; some weights have no factors of the input."""
    generator = torch.Generator().manual_seed(0)
    parameters: list[Any] = []
    scales: list[Any] = []
    attends, network = ((3 * WIDTH, WIDTH), (WIDTH, WIDTH)), ((HIDDEN, WIDTH), (WIDTH, HIDDEN))
    for kind in 2 * kinds:
        both: list[Any] = []
        for rows, columns in network if kind == 2 else attends:
            weight = torch.randn(rows, columns, generator=generator) * columns**-0.5
            drawn = torch.randint(-3, 1, (columns,), generator=generator).float().exp2()
            factors = drawn if len(parameters) % 3 else None
            values, scale = reference.quantize_weight(weight, factors)
            parameters += [torch.nn.Parameter(values, requires_grad=False)]
            parameters += [torch.randn(rows, generator=generator)]
            both.append((scale, factors))
        scales += [scale for scale, _ in both] + [factors for _, factors in both]
        parameters += [torch.randn(WIDTH, generator=generator), None]
    return parameters, scales


def by_ops(
    x: Tensor, memory: Tensor, kinds: list[int], parameters: list[Any], scales: list[Any],
    norm_first: bool, lowp: torch.dtype,
) -> Tensor:  # fmt: skip
    """What fused layers compute, one op after the other; attention in ``lowp``."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return functional.layer_norm(x, (WIDTH,), weight, backend="cpu")

    def split(y: Tensor) -> Tensor:
        return y.to(lowp).unflatten(-1, (-1, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)

    for i, kind in enumerate(2 * kinds):
        w1, b1, w2, b2, weight, _ = parameters[6 * i : 6 * i + 6]
        s1, s2, f1, f2 = scales[4 * i : 4 * i + 4]
        entered = norm(x, weight) if norm_first else x
        if kind == 2:
            y = x + int8_feed_forward(entered, w1, s1, b1, w2, s2, b2, "gelu", f1, f2)
        else:
            one, rest = slice(WIDTH), slice(WIDTH, None)
            source = entered if kind == 0 else memory
            (q,) = split(int8_linear(entered, w1[one], s1[one], b1[one], None, None, f1))
            k, v = split(int8_linear(source, w1[rest], s1[rest], b1[rest], None, None, f1))
            y = functional.scaled_dot_product_attention(q, k, v, backend="cpu")
            y = int8_linear(y.transpose(1, 2).flatten(2).to(x.dtype), w2, s2, b2, None, x, f2)
        x = y if norm_first else norm(y, weight)
    return x


def fused(
    x: Tensor, memory: Any, kinds: list[int], parameters: list[Any], scales: list[Any], first: bool
) -> Tensor:
    given = x, None, False, memory if 1 in kinds else None
    rest = (
        kinds,
        first,
        [LAYER] * len(kinds),
        HEADS,
        True,
        "gelu",
        parameters,
        scales,
        [1e-5] * (len(parameters) // 6),
    )
    return cpu_blocks.layers(LayerStack(*rest), *given)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kinds", [[0, 2], [0, 1, 2]], ids=str)
def test_fused_layers_have_the_bits_of_their_ops(int8_isa, threads, norm_first, kinds):
    """With few rows threads share each product; with more each thread takes blocks of rows."""
    parameters, scales = sublayers(kinds)
    plain = [p if p is None else p.detach() for p in parameters]  # no Parameters: no packed copies
    lowp = torch.bfloat16 if "bf16" in _native.module.dot_types() else torch.float32
    rest = kinds, parameters, scales, norm_first
    for batch, length in ((1, 3), (3, 37)):
        x, memory = torch.randn(batch, length, WIDTH), torch.randn(batch, 21, WIDTH)
        run = functools.partial(fused, x, memory, *rest)
        with torch.inference_mode():
            found = run()
            check_threads(run)
            assert same_bits(found, by_ops(x, memory, *rest, lowp)), (batch, length)
            assert same_bits(fused(x, memory, kinds, plain, scales, norm_first), found)
            assert same_bits(fused(x[:1], memory[:1], *rest), found[:1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("left", ["", "self_attn", "linear"])
def test_fused_layers_keep_the_error_budget(int8_isa, dtype, left):
    """The unit is the error of the composed reference against float weights in fp64.

    ``left``: modules that are not quantised.
    """
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, batch_first=True, activation="gelu")
    x = torch.randn(3, 20, WIDTH).to(dtype)
    layer.eval().to(dtype)
    exact = copy.deepcopy(layer).double()
    accelerate(layer, quantize="int8", filter_fn=lambda _, name: not (left and left in name))
    with torch.no_grad(), use_backend("reference"):
        true, close = exact(x.double()), layer(x)
    with torch.no_grad(), record() as calls:
        found = layer(x)
        assert calls.calls["attention sub-layer", "cpu"] == 1
        assert explain("encoder_layer", layer, x).backend == "cpu"
    result = compare("layer", found, close, true, OUTPUT_FACTOR)
    assert result.ok, result


def test_weights_without_known_values_are_quantized():
    """Values cannot be checked while compiling, and those of fake and meta tensors never."""
    weight = torch.randn(6, 5)
    compiled = torch.compile(functional.quantize_weight, fullgraph=True, backend="eager")
    values, scale = functional.quantize_weight(weight)
    assert all(map(same_bits, compiled(weight), (values, scale)))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = functional.quantize_weight(mode.from_tensor(weight))
    for found in (fake, functional.quantize_weight(weight.to("meta"))):
        assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in (values, scale)]


def test_explain_tells_which_products_run(int8_isa):
    units = int8_isa not in FLOAT_ISAS
    found = explain("int8_linear", *drawn(5, 16, 12))
    assert found.backend == "cpu"
    assert ("16 bits" in str(found)) != units
    assert ("16 bits" in str(explain("int8_feed_forward", *network(5, 16, 12, 7)))) != units


def wrong_calls() -> Iterator[tuple[str, type[Exception], Callable[[], Any]]]:
    x, weight, scale, bias = drawn(5, 16, 12)
    call = functional.int8_linear
    yield "weight must be int8", ValueError, lambda: call(x, weight.float(), scale)
    yield "takes 16", ValueError, lambda: call(x[:, :15], weight, scale)
    yield "scale must be float32", ValueError, lambda: call(x, weight, scale.double())
    yield "factors must be float32", ValueError, lambda: call(x, weight, scale, factors=scale)
    yield (
        "factors must be float32",
        ValueError,
        lambda: functional.quantize_weight(x, factors=x[0].double()),
    )
    yield r"of shape \[12\]", ValueError, lambda: call(x, weight, scale[:5])
    yield "bias must have shape", ValueError, lambda: call(x, weight, scale, bias[:5])
    yield "bias must have the dtype", ValueError, lambda: call(x, weight, scale, bias.double())
    yield "residual must have the shape", ValueError, lambda: call(x, weight, scale, residual=x)
    yield "activation must be one", ValueError, lambda: call(x, weight, scale, activation="tanh")
    yield "must be Tensor", TypeError, lambda: call(x, weight, None)
    yield "floating-point", ValueError, lambda: call(weight, weight, scale)
    yield "at least one dim", ValueError, lambda: call(x[0, 0], weight, scale)
    plain = x.clone()
    yield "restore", NotImplementedError, lambda: call(x.clone().requires_grad_(), weight, scale)
    yield (
        "restore",
        NotImplementedError,
        lambda: torch.func.jvp(lambda x: call(x, weight, scale), (plain,), (plain,)),
    )
    yield "must be finite", ValueError, lambda: functional.quantize_weight(x / 0.0)
    yield "must be a matrix", ValueError, lambda: functional.quantize_weight(bias)
    yield "floating-point", ValueError, lambda: functional.quantize_weight(weight)
    sparse, narrow = plain.to_sparse(), plain.to(torch.float8_e4m3fn)
    yield "input must be dense", ValueError, lambda: call(sparse, weight, scale)
    yield "weight must be dense", ValueError, lambda: call(plain, weight.to_sparse(), scale)
    yield "weight must be dense", ValueError, lambda: functional.quantize_weight(sparse)
    yield "input must be float32", ValueError, lambda: call(narrow, weight, scale)
    whole = network(5, 16, 12, 7)
    feed = functional.int8_feed_forward
    yield "input must be dense", ValueError, lambda: feed(sparse, *whole[1:])
    yield "input must be float32", ValueError, lambda: feed(narrow, *whole[1:])
    yield "the hidden block has 12", ValueError, lambda: feed(*whole[:4], weight, *whole[5:])
    yield "not None", ValueError, lambda: feed(*whole, activation=None)
    learned = whole[0].clone().requires_grad_()
    yield "restore", NotImplementedError, lambda: feed(learned, *whole[1:])


@pytest.mark.parametrize(("message", "error", "call"), list(wrong_calls()))
def test_wrong_calls_name_the_argument(message, error, call):
    with pytest.raises(error, match=message):
        call()


@needs_native
def test_operators_refuse_wrong_arguments():
    x, weight, scale, bias = drawn(5, 16, 12)
    operators = torch.ops.transformer_fast
    deep = torch.zeros(2, 65537, dtype=torch.int8)
    for message, arguments in (
        ("int8 matrix", (x, weight.float(), scale, bias)),
        ("must be .out, 15.", (x[:, :15], weight, scale, bias)),
        ("one float32 value per row", (x, weight, scale[:5], bias)),
        ("bias must have one value", (x, weight, scale, bias[:5])),
        ("bias must be float32", (x, weight, scale, bias.double())),
        ("at most 65536 columns", (torch.zeros(1, 65537), deep, torch.ones(2), None)),
    ):
        with pytest.raises(RuntimeError, match=message):
            operators.int8_linear.cpu(*arguments, None, None, 0)
        with pytest.raises(RuntimeError, match=message):
            operators.int8_feed_forward.cpu(*arguments, *network(5, 16, 12, 7)[4:], None, None, 1)
    for factors in (torch.ones(15), torch.ones(16).double()):
        with pytest.raises(RuntimeError, match="one float32 value per column of weight"):
            operators.int8_linear.cpu(x, weight, scale, bias, None, factors, 0)
