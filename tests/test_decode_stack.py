"""A decoding step of a whole stack in one call, held to the ops it is made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import ISAS, use
from torch import Tensor

from transformer_fast import _native
from transformer_fast.backends.cpu_blocks import DecodeStack
from transformer_fast.reference import add_layer_norm, attention, feed_forward, layer_norm, linear

pytestmark = [
    pytest.mark.usefixtures("two_threads"),
    pytest.mark.skipif(not ISAS, reason="no native kernels here"),
]

LAYERS, HEADS, SIZE, HIDDEN, PLACES = 2, 2, 16, 50, 12
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
    """What `DecodeStack` does, from the references; writes to the cache too."""

    def attend(x: Tensor, weights: Any, both: Tensor, end: int, seen: Any, causal: bool) -> Tensor:
        in_weight, in_bias, out_weight, out_bias = weights
        rows, heads, _, size = both.shape[1:]
        projected = linear(x, in_weight, in_bias, None, None)
        projected = projected.view(rows, -1, in_weight.shape[0] // WIDTH, heads, size)
        query, *new = projected.permute(2, 0, 3, 1, 4).unbind(0)
        for kept, part in zip(both, new, strict=False):
            kept[:, :, start:end] = part
        keys, values = both[:, :, :, :end].unbind(0)
        y = attention(
            query, keys, values, seen[0], seen[1], causal, size**-0.5, 0.0, None, False, False
        )[0]
        return linear(y.transpose(1, 2).reshape(x.shape), out_weight, out_bias, None, None)

    each = 3 if memories else 2
    for i, (*weights, norm_weight, norm_bias) in enumerate(sublayers):
        layer, kind = divmod(i, each)
        entered = layer_norm(x, (WIDTH,), norm_weight, norm_bias, 1e-5) if norm_first else x
        if kind + 1 == each:
            y = feed_forward(entered, *weights, activation, 0.0, None)
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


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(
    ("tokens", "start", "beams", "memory"),
    [
        (1, 7, 1, "whole"), (1, 0, 1, "lengths"), (1, 3, 3, "mask"), (5, 0, 1, "lengths"),
        (5, 0, 6, "whole"), (1, 7, 1, None), (5, 0, 1, None), (520, 0, 1, None),
    ],
)  # fmt: skip
def test_a_step_is_its_parts(
    isa: str,
    dtype: torch.dtype,
    norm_first: bool,
    tokens: int,
    start: int,
    beams: int,
    memory: str | None,
) -> None:
    sources, source = 3, 9
    rows, places = sources * beams, max(PLACES, tokens)
    generator = torch.Generator().manual_seed(1)
    sublayers = make_sublayers(memory is not None)
    x = torch.randn(rows * tokens, WIDTH, generator=generator)
    cache = torch.randn(LAYERS, 2, rows, HEADS, places, SIZE, generator=generator)
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
        weights = [[w if w is None else torch.nn.Parameter(w) for w in s] for s in weights]
        eps = [1e-5] * len(weights)
        step = DecodeStack(
            weights, eps, norm_first, activation, x.shape[0], memories, mask, lengths
        )
        return step(x, cache, start)

    before = _native.module.isa()
    use(isa)
    try:
        with torch.no_grad():
            true, reference = run(step_of_parts, torch.float64), run(step_of_parts, dtype)
            found, again = run(ours, dtype), run(ours, dtype)
    finally:
        use(before)
    for a, b, t, same in zip(found, reference, true, again, strict=True):
        assert torch.equal(a, same)
        limit = 2 * (b - t).abs().max() + 2 * torch.finfo(dtype).eps * t.abs().max()
        assert (a - t).abs().max() <= limit


def test_weights_that_change() -> None:
    sublayers = make_sublayers(crossed=False, layers=1)
    weights = [[w if w is None else torch.nn.Parameter(w) for w in s] for s in sublayers]
    x = torch.randn(8, WIDTH)
    cache = torch.zeros(1, 2, 8, HEADS, PLACES, SIZE)

    @torch.no_grad()
    def check(step: DecodeStack) -> None:
        found = step(x, cache.clone(), 0)
        true = step_of_parts(x, cache.clone(), 0, weights, [], False, "relu", None, None)  # type: ignore[arg-type]
        torch.testing.assert_close(found, true, rtol=1e-4, atol=1e-4)

    step = DecodeStack(weights, [1e-5, 1e-5], False, "relu", 8, [])
    check(step)
    for parameter in (weights[0][0], weights[1][2]):
        assert parameter is not None
        with torch.no_grad():
            parameter.mul_(1.5)
        check(step)
        parameter.data = parameter.detach() * 0.5
        check(step)
        parameter.data.neg_()  # behind PyTorch's back
        check(step)


def test_bad_steps_are_errors() -> None:
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
    ) -> None:
        sublayers = [list(s) for s in good]
        if change is not None:
            sublayers[change[0]][change[1]] = change[2]
        stack = DecodeStack(sublayers, [1e-5] * 3, False, "relu", 2, memories, key_lengths=lengths)
        stack(x, cache, start)

    step()
    for wrong, arguments in {
        "the cache has 3 places": {"start": 3},
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
        "input does not fit memory": {"memories": [memory[:, :, :1]]},
        "a memory for each of 1 layers": {"memories": [memory] * 2},
        "2 packed weights and an eps for each of 2 sub-layers": {"memories": []},
        "key_lengths must hold 2 integers": {"lengths": torch.tensor([1])},
    }.items():
        with pytest.raises(RuntimeError, match=wrong):
            step(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("crossed", [False, True])
def test_opcheck(crossed: bool) -> None:
    stack = DecodeStack(
        make_sublayers(crossed), [1e-5] * (6 if crossed else 4), True, "relu", 2,
        [torch.randn(2, 2, HEADS, 4, SIZE) for _ in range(LAYERS if crossed else 0)],
    )  # fmt: skip
    arguments = (
        torch.randn(2, WIDTH), torch.zeros(LAYERS, 2, 2, HEADS, 3, SIZE), 1, stack.memories,
        stack.parameters, stack.packed(), stack.eps, True, 1, None, None,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.transformer_fast.cpu_decode_stack.default, arguments)
