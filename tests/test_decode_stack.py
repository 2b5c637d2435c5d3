"""A decoding step of a whole stack in one call, compared with the ops it consists of."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from harness import ISAS, ISAS_AND_INT8, in_use
from module_checks import check_budget
from torch import Tensor

from transformer_fast import _native, accelerate, models
from transformer_fast.backends import cpu_packing
from transformer_fast.backends.cpu_blocks import DecodeStack
from transformer_fast.measure.calls import record
from transformer_fast.ops.arguments import LayerStack
from transformer_fast.recipe import Kind, NormKind
from transformer_fast.reference import (
    add_layer_norm,
    attention,
    feed_forward,
    int8_feed_forward,
    int8_linear,
    layer_norm,
    linear,
    quantize_weight,
)  # fmt: skip
from transformer_fast.testing import GRADIENT_FACTOR

pytestmark = [
    pytest.mark.usefixtures("two_threads"),
    pytest.mark.skipif(not ISAS, reason="no native kernels here"),
]

LAYERS, HEADS, SIZE, HIDDEN, POSITIONS = 2, 2, 16, 50, 12
WIDTH = HEADS * SIZE


def make_sublayers(crossed: bool, layers: int = LAYERS) -> list[list[Tensor | None]]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    def attended(parts: int) -> list[Tensor | None]:
        first = [normal(parts * WIDTH, WIDTH), normal(parts * WIDTH)]
        return [*first, normal(WIDTH, WIDTH), normal(WIDTH), normal(WIDTH) + 1, normal(WIDTH)]

    found = []
    for _ in range(layers):
        found.append(attended(3))
        if crossed:
            found.append(attended(1))
        network = [normal(HIDDEN, WIDTH), normal(HIDDEN), normal(WIDTH, HIDDEN), normal(WIDTH)]
        found.append([*network, normal(WIDTH) + 1, None])
    return found


def flat(sublayers: list[list[Any]]) -> list[Any]:
    return [parameter for sublayer in sublayers for parameter in sublayer]


def _linear(x: Tensor, weight: Any, bias: Any) -> Tensor:
    if isinstance(weight, Tensor):
        return linear(x, weight, bias, None, None)
    values, scale, factors = weight
    return int8_linear(x, values, scale, bias, None, None, factors)


def _network(x: Tensor, w1: Any, b1: Any, w2: Any, b2: Any, activation: str) -> Tensor:
    if isinstance(w1, Tensor):
        return feed_forward(x, w1, b1, w2, b2, activation, 0.0, None)
    (w1, s1, f1), (w2, s2, f2) = w1, w2
    return int8_feed_forward(x, w1, s1, b1, w2, s2, b2, activation, f1, f2)


def step_of_parts(
    x: Tensor,
    cache: Tensor,
    start: int,
    sublayers: list[list[Tensor]],
    memories: list[Tensor],
    norm_first: bool,
    activation: str,
    mask: Tensor | None,
    lengths: Tensor | None,
) -> Tensor:
    """Computes what `DecodeStack` does, with the references; also writes the cache."""

    def attend(x: Tensor, weights: Any, both: Tensor, end: int, seen: Any, causal: bool) -> Tensor:
        in_weight, in_bias, out_weight, out_bias = weights
        rows, heads, _, size = both.shape[1:]
        projected = _linear(x, in_weight, in_bias)
        projected = projected.view(rows, -1, len(in_bias) // WIDTH, heads, size)
        query, *new = projected.permute(2, 0, 3, 1, 4).unbind(0)
        for kept, part in zip(both, new, strict=False):
            kept[:, :, start:end] = part
        keys, values = both[:, :, :, :end].unbind(0)
        y = attention(
            query, keys, values, seen[0], seen[1], causal, size**-0.5, 0.0, None, False, False
        )[0]
        return _linear(y.transpose(1, 2).reshape(x.shape), out_weight, out_bias)

    each = 3 if memories else 2
    for i, (*weights, norm_weight, norm_bias) in enumerate(sublayers):
        layer, kind = divmod(i, each)
        entered = layer_norm(x, (WIDTH,), norm_weight, norm_bias, 1e-5) if norm_first else x
        if kind + 1 == each:
            y = _network(entered, *weights, activation)
        elif kind == 0:
            end = start + x.shape[0] // cache.shape[2]
            y = attend(entered, weights, cache[layer], end, (None, None), start == 0)
        else:
            memory = memories[layer]
            y = attend(entered, weights, memory, memory.shape[3], (mask, lengths), False)
        if norm_first:
            x = x + y
        else:
            x = add_layer_norm(y, x, (WIDTH,), norm_weight, norm_bias, 1e-5, 0.0, None)[0]
    return x


@pytest.mark.sampled(40)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(
    ("isa", "quantized", "tokens", "start", "beams", "memory"),
    [
        (isa, quantized, *case)
        for isa, quantized in ISAS_AND_INT8
        for case in [
            (1, 3, 3, "mask"), (5, 0, 6, "whole"), (1, 7, 1, None),
            *([] if quantized else [
                (1, 7, 1, "whole"), (1, 0, 1, "lengths"), (5, 0, 1, "lengths"),
                (5, 0, 1, None), (520, 0, 1, None),
            ]),
        ]
    ],
)  # fmt: skip
def test_a_step_matches_its_ops(
    isa: str,
    dtype: torch.dtype,
    norm_first: bool,
    tokens: int,
    start: int,
    beams: int,
    memory: str | None,
    quantized: bool,
) -> None:
    sources, source = 3, 9
    rows, positions = sources * beams, max(POSITIONS, tokens)
    generator = torch.Generator().manual_seed(1)
    sublayers = make_sublayers(memory is not None)
    x = torch.randn(rows * tokens, WIDTH, generator=generator)
    cache = torch.randn(LAYERS, 2, rows, HEADS, positions, SIZE, generator=generator)
    shape = (LAYERS, 2, sources, HEADS, source, SIZE)
    memories = list(torch.randn(shape, generator=generator)) if memory else []
    lengths = torch.tensor([source, 5, 0]) if memory == "lengths" else None
    mask = torch.rand(sources, 1, 1, source, generator=generator) < 0.6
    seen = mask if memory == "mask" else None
    activation = "gelu" if beams > 1 else "relu"

    def run(of: Any, kind: torch.dtype) -> tuple[Tensor, Tensor]:
        def to(tensor: Tensor | None) -> Any:
            return None if tensor is None else tensor.to(dtype).to(kind)

        kept = to(cache).clone()
        weights = [[to(w) for w in sublayer] for sublayer in sublayers]
        # The fp64 reference multiplies by the dequantised weights.
        for sublayer in weights if quantized else ():
            for i in (0, 2):
                columns = torch.arange(sublayer[i].shape[1])
                factors = (-(columns % 3)).float().exp2() if beams > 1 else None
                values, scale = quantize_weight(sublayer[i], factors)
                exact = values.to(kind) * scale[:, None].to(kind)
                exact = exact if factors is None else exact * factors
                sublayer[i] = exact if kind == torch.float64 else (values, scale, factors)
        remembered = [to(m) for m in memories]
        given = to(x)
        before = given.clone()
        y = of(given, kept, start, weights, remembered, norm_first, activation, seen, lengths)
        assert torch.equal(given, before)
        return y, kept

    def ours(
        x: Tensor, cache: Tensor, start: int, weights: Any, memories: Any, norm_first: bool,
        activation: str, mask: Tensor | None, lengths: Tensor | None,
    ) -> Tensor:  # fmt: skip
        scales = [s[i][n] for s in weights for n in (1, 2) for i in (0, 2)] if quantized else []
        tensors = [w[0] if isinstance(w, tuple) else w for s in weights for w in s]
        tensors = [w if w is None else torch.nn.Parameter(w, False) for w in tensors]
        eps = [1e-5] * len(weights)
        kept = cache
        if quantized and dtype == torch.float32 and "bf16" in _native.module.dot_types(isa):
            kept, memories = cache.bfloat16(), [m.bfloat16() for m in memories]
        stack = stack_of(tensors, scales, eps, norm_first, activation, bool(memories))
        step = DecodeStack(stack, x.shape[0], memories, mask, lengths)
        y = step(x, kept, start)
        cache.copy_(kept)
        return y

    with in_use(isa), torch.no_grad():
        true, reference = run(step_of_parts, torch.float64), run(step_of_parts, dtype)
        found, again = run(ours, dtype), run(ours, dtype)
    for a, b, t, same in zip(found, reference, true, again, strict=True):
        assert torch.equal(a, same)
        # Errors of several layers add up, as in gradients.
        check_budget(a, b, t, GRADIENT_FACTOR)


@pytest.fixture
def parameters() -> list[list[Any]]:
    sublayers = make_sublayers(crossed=False, layers=1)
    return [[w if w is None else torch.nn.Parameter(w) for w in s] for s in sublayers]


def stack_of(
    parameters: list[Any], scales: list[Any], eps: list[float], norm_first: bool, activation: str,
    crossed: bool,
) -> LayerStack:  # fmt: skip
    kinds = [Kind.SELF_ATTENTION, Kind.CROSS_ATTENTION, Kind.FEED_FORWARD]
    if not crossed:
        del kinds[1]
    norms = [NormKind.LAYER] * len(kinds)
    return LayerStack(
        [*map(int, kinds)], norm_first, [*map(int, norms)], HEADS, True, activation, parameters, scales,
        eps,
    )  # fmt: skip


@torch.no_grad()
def check_step(step: DecodeStack, parameters: list[list[Any]]) -> None:
    x, cache = torch.randn(8, WIDTH), torch.zeros(1, 2, 8, HEADS, POSITIONS, SIZE)
    found = step(x, cache.clone(), 0)
    true = step_of_parts(x, cache.clone(), 0, parameters, [], False, "relu", None, None)
    torch.testing.assert_close(found, true)


def packed_of(step: DecodeStack) -> list[Tensor | None]:
    return step.packed(step.weights, step.rows)


def make_step(parameters: list[list[Any]]) -> DecodeStack:
    return DecodeStack(stack_of(flat(parameters), [], [1e-5, 1e-5], False, "relu", False), 8, [])


def test_changed_weights_take_effect(parameters: list[list[Any]]) -> None:
    step = make_step(parameters)
    check_step(step, parameters)
    for parameter in (parameters[0][0], parameters[1][2]):
        for change in (
            # A single element, which a comparison of samples would miss.
            lambda p: p[3, 7].add_(9.0),
            lambda p: setattr(p, "data", p.detach().clone().index_fill_(0, torch.tensor(5), 2.0)),
            lambda p: p.data.neg_(),  # a write that does not increment the version counter
        ):
            with torch.no_grad():
                change(parameter)
            check_step(step, parameters)


@torch.no_grad()
def test_writes_during_packing_take_effect(
    parameters: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make_step(parameters)
    pack = cpu_packing.packed_weight

    def written_to(weight: Tensor, rows: int) -> Tensor | None:
        packed = pack(weight, rows)
        if weight is parameters[1][0]:
            parameters[0][0][3, 7] += 9.0  # writes to the first weight, which is already packed
        return packed

    with monkeypatch.context() as patch:
        patch.setattr(cpu_packing, "packed_weight", written_to)
        packed_of(step)
    check_step(step, parameters)


@torch.no_grad()
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_decoders_use_it_if_supported(quantize: str | None) -> None:
    @dataclasses.dataclass
    class Swish:  # not hashable
        beta: float = 1.0

        def __call__(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(self.beta * x)

    memory = torch.randn(2, 5, WIDTH)
    embedding = torch.nn.Embedding(20, WIDTH)
    for dtype in (torch.float32, torch.bfloat16):
        for activation in ("gelu", Swish()):
            layer = torch.nn.TransformerDecoderLayer(
                WIDTH, HEADS, HIDDEN, activation=activation, batch_first=True
            )
            stack = torch.nn.TransformerDecoder(layer, 2).eval().to(dtype)
            if quantize:
                accelerate(stack, quantize=quantize)
            embedding.to(dtype)
            with record() as found:
                models.generate(
                    stack, memory.to(dtype), prefix=1, max_new_tokens=4, end_token=-1,
                    embed=lambda tokens, start: embedding(tokens),
                    project=lambda x: x @ embedding.weight.t(),
                )  # fmt: skip
            steps = 4 if isinstance(activation, str) else 0
            assert found.calls["decoding step", "cpu"] == steps


def test_invalid_steps_raise() -> None:
    x, cache = torch.randn(2, WIDTH), torch.zeros(1, 2, 2, HEADS, 3, SIZE)
    good = make_sublayers(crossed=True, layers=1)
    memory = torch.zeros(2, 2, HEADS, 4, SIZE)

    def step(
        x: Tensor = x,
        cache: Tensor = cache,
        start: int = 0,
        memories: Any = (memory,),
        change: tuple[int, int, Tensor | None] | None = None,
        lengths: Tensor | None = None,
        crossed: bool = True,
    ) -> None:
        sublayers = [list(s) for s in good]
        if change is not None:
            sublayers[change[0]][change[1]] = change[2]
        stack = stack_of(flat(sublayers), [], [1e-5] * 3, False, "relu", crossed)
        DecodeStack(stack, 2, memories, key_lengths=lengths)(x, cache, start)

    step()
    for wrong, arguments in {
        "the cache has 3 positions": {"start": 3},
        "cache has 3 positions": {"start": 2**63 - 1},
        "requires int8 projections": {"cache": cache.bfloat16(), "memories": (memory.bfloat16(),)},
        "the cache has no layers": {"cache": cache[:0]},
        "several tokens at once must be the first": {"x": x.repeat(2, 1), "start": 1},
        "in_weight must be": {"change": (0, 0, good[1][0])},
        "out_weight must be": {"change": (1, 2, good[0][0])},
        "weight2 must be": {"change": (2, 2, good[2][0])},
        "the bias of weight1 must": {"change": (2, 1, torch.zeros(3))},
        "the norm must have": {"change": (1, 4, torch.ones(4))},
        "input does not fit cache": {"x": torch.randn(3, WIDTH)},
        "input must be float32": {"x": x.double()},
        "cache must be": {"cache": cache.double()},
        "memory must be": {"memories": [memory[0]]},
        "memory must have 2 heads of 16": {"memories": [memory[:, :, :1]]},
        "a memory for each of 1 layers": {"memories": [memory] * 2},
        "2 sub-layers for each of 1 layers": {"crossed": False},
        "attend to its cache, and to its memory": {"memories": []},
        "key_lengths must hold 2 integers": {"lengths": torch.tensor([1])},
    }.items():
        with pytest.raises(RuntimeError, match=wrong):
            step(**arguments)  # type: ignore[arg-type]


@pytest.mark.thorough
@pytest.mark.parametrize("crossed", [False, True])
def test_opcheck_of_decode_stack(crossed: bool) -> None:
    eps = [1e-5] * (6 if crossed else 4)
    stack = stack_of(flat(make_sublayers(crossed)), [], eps, True, "relu", crossed)
    memories = [torch.randn(2, 2, HEADS, 4, SIZE) for _ in range(LAYERS if crossed else 0)]
    step = DecodeStack(stack, 2, memories)
    arguments = (
        torch.randn(2, WIDTH), torch.zeros(LAYERS, 2, 2, HEADS, 3, SIZE), 1, memories,
        stack.kinds, stack.parameters, packed_of(step), [], eps, True, stack.norms, HEADS, 0.25, 1,
        *[None] * 5,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.transformer_fast.decode_stack.cpu, arguments)
