"""Kernels that run whole sub-layers, layers and stacks in one call, in every dtype and instruction
set."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import threading
import time
from typing import Any

import pytest
import torch
from harness import DTYPES, ISAS, ISAS_AND_INT8, in_use
from module_checks import cast, check_budget
from torch import Tensor

from transformer_fast import explain, nn
from transformer_fast.backends import cpu_blocks, cpu_packing
from transformer_fast.dispatch import use_backend
from transformer_fast.functional import quantize_weight
from transformer_fast.measure.calls import record
from transformer_fast.nn import bound
from transformer_fast.ops.arguments import LayerStack

pytestmark = [
    pytest.mark.usefixtures("two_threads"),
    pytest.mark.skipif(not ISAS, reason="no native kernels here"),
]

B, T, S, M, H, HIDDEN = 3, 37, 21, 64, 4, 100
CAUSAL = nn.Transformer.generate_square_subsequent_mask


def hidden_of(length: int) -> Tensor:
    """Padding mask, True at padding: some sequences end early, one begins late."""
    hidden = torch.arange(length) >= torch.tensor([[length], [length // 3], [length]])
    hidden[2, :4] = True
    return hidden


def cases(dtype: torch.dtype) -> dict[str, tuple[bool, dict[str, Any]]]:
    """name: (whether the layer is a decoder layer, its masks)"""
    future = CAUSAL(T, dtype=dtype)
    return {
        "encoder": (False, {}),
        "causal": (False, {"src_mask": future, "is_causal": True}),
        "added": (False, {"src_mask": torch.rand(T, T).to(dtype)}),
        "padding": (False, {"src_key_padding_mask": hidden_of(T)}),
        "decoder": (True, {"tgt_mask": future, "tgt_is_causal": True}),
        "memory padding": (True, {"memory_key_padding_mask": hidden_of(S)}),
    }


def check(
    module: Any,
    inputs: tuple[Tensor, ...],
    masks: dict[str, Any],
    isa: str,
    batch_first: bool = True,
) -> int:
    """Compares the module with float64; returns the number of sub-layers that ran as one call.

    The budget is the error of the reference. Positions that ``masks`` marks as padding are not
    compared.
    """
    dtype = inputs[0].dtype
    with in_use(isa), torch.no_grad():
        with record() as found:
            ours = module(*inputs, **masks)
        again = module(*inputs, **masks)
        with use_backend("reference"):
            close = module(*inputs, **masks)
            true = copy.deepcopy(module).double()(
                *cast(inputs, torch.float64), **cast(masks, torch.float64)
            )
    assert ours.dtype == dtype
    assert torch.equal(ours, again)
    seen = next((~v for k, v in masks.items() if k in _OWN_PADDING), None)
    if seen is not None:
        if not batch_first:
            seen = seen.t()
        ours, close, true = ours[seen], close[seen], true[seen]
    check_budget(ours, close, true)
    return sum(n for (name, _), n in found.calls.items() if name.endswith("sub-layer"))


_OWN_PADDING = ("src_key_padding_mask", "tgt_key_padding_mask")


@pytest.mark.sampled(30)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("case", cases(torch.float32))
def test_layers_match_float64(isa: str, dtype: torch.dtype, norm_first: bool, case: str) -> None:
    torch.manual_seed(0)
    crossed, masks = cases(dtype)[case]
    for batch_first in (True, False):
        kind = nn.TransformerDecoderLayer if crossed else nn.TransformerEncoderLayer
        layer = kind(M, H, HIDDEN, batch_first=batch_first, norm_first=norm_first)
        shapes = [(B, T, M)] + ([(B, S, M)] if crossed else [])
        inputs = tuple(torch.randn(s).to(dtype) for s in shapes)
        if not batch_first:
            inputs = tuple(x.transpose(0, 1) for x in inputs)
        called = check(layer.eval().to(dtype), inputs, masks, isa, batch_first)
        assert called == (3 if crossed else 2)


@pytest.mark.sampled(30)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_few_and_many_rows(isa: str, dtype: torch.dtype, activation: str, rows: int) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(M, H, HIDDEN, activation=activation, batch_first=True)
    inputs = (torch.randn(1, rows, M).to(dtype),)
    layer = layer.eval().to(dtype)
    assert check(layer, inputs, {}, isa) == 2
    with torch.inference_mode():  # parameters of inference mode: packed copies are not cached
        uncached = copy.deepcopy(layer)
    assert check(uncached, inputs, {}, isa) == 2


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch_first", [False, True])
def test_stacks_compute_real_tokens_only(isa: str, dtype: torch.dtype, batch_first: bool) -> None:
    torch.manual_seed(0)
    options = {"batch_first": batch_first}
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(M, H, HIDDEN, **options), 2)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(M, H, HIDDEN, **options), 2)
    x, memory = (torch.randn(B, n, M).to(dtype) for n in (T, S))
    if not batch_first:
        x, memory = x.transpose(0, 1), memory.transpose(0, 1)
    for stack, inputs, masks, each in (
        (encoder, (x,), {"src_key_padding_mask": hidden_of(T)}, 2),
        (
            decoder,
            (x, memory),
            {
                "tgt_mask": CAUSAL(T).isinf(),
                "tgt_is_causal": True,
                "tgt_key_padding_mask": torch.arange(T) >= torch.tensor([[T], [9], [20]]),
                "memory_key_padding_mask": hidden_of(S),
            },
            3,
        ),
    ):
        assert check(stack.eval().to(dtype), inputs, masks, isa, batch_first) == 2 * each


@torch.no_grad()
def test_threads_can_call_a_layer_while_its_packed_weights_are_freed() -> None:
    layer = nn.TransformerEncoderLayer(M, H, HIDDEN, batch_first=True).eval()
    x = torch.randn(B, T, M)
    true, wrong = layer(x), []

    @torch.no_grad()
    def call() -> None:
        for _ in range(200):
            if not torch.equal(layer(x), true):
                wrong.append(True)

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    while any(caller.is_alive() for caller in callers):
        cpu_packing.forget()
        time.sleep(1e-4)
    assert not wrong


def test_packed_weights_are_freed_with_the_layer() -> None:
    gc.collect()
    cpu_packing.forget()
    layer = nn.TransformerEncoderLayer(M, H, HIDDEN, batch_first=True).eval()
    with torch.no_grad():
        layer(torch.randn(B, T, M))
    assert cpu_packing.held_bytes() > 0
    known = len(bound._kept)
    del layer
    gc.collect()
    assert cpu_packing.held_bytes() == 0
    assert len(bound._kept) == known - 1


@pytest.mark.parametrize("isa", ISAS)
def test_differing_layers_run_one_by_one(isa: str) -> None:
    torch.manual_seed(0)
    like = {"dim_feedforward": HIDDEN, "batch_first": True}
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(M, H, **like), 3)
    encoder.layers[1] = nn.TransformerEncoderLayer(M, 2 * H, activation="gelu", **like)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(M, H, **like), 2)
    decoder.layers[1] = nn.TransformerDecoderLayer(M, 2 * H, **like)
    x, memory = torch.randn(B, T, M), torch.randn(B, S, M)
    assert check(encoder.eval(), (x,), {}, isa) == 6
    assert check(encoder, (x,), {"src_key_padding_mask": hidden_of(T)}, isa) == 6
    assert check(decoder.eval(), (x, memory), {}, isa) == 6
    assert check(decoder, (x, memory), {"memory_key_padding_mask": hidden_of(S)}, isa) == 6
    # options that differ from those of its self-attention
    for heads, batch_first in ((2 * H, True), (H, False)):
        layer = nn.TransformerDecoderLayer(M, H, **like).eval()
        layer.multihead_attn = nn.MultiheadAttention(M, heads, batch_first=batch_first).eval()
        assert check(layer, (x, torch.randn(B, T, M)), {}, isa) == 0


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_and_fully_masked_memory(isa: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(M, H, HIDDEN, batch_first=True)
    decoder = nn.TransformerDecoder(layer, 2).eval().to(dtype)
    x, none = torch.randn(B, T, M).to(dtype), torch.empty(B, 0, M, dtype=dtype)
    assert check(decoder, (x, none), {}, isa) == 6
    hidden = {"memory_key_padding_mask": torch.ones(B, S, dtype=torch.bool)}
    assert check(decoder, (x, torch.randn(B, S, M).to(dtype)), hidden, isa) == 6
    with torch.no_grad():
        assert decoder(none, x, memory_key_padding_mask=hidden_of(T)).shape == none.shape


def test_unsupported_calls_run_module_by_module() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(M, H, HIDDEN, batch_first=True).eval()
    x = torch.randn(4, B, T, M)
    with torch.no_grad():
        true = torch.stack([layer(part) for part in x])
        torch.testing.assert_close(torch.func.vmap(layer)(x), true)
        names = dict(layer.named_parameters())
        stacked = {name: torch.stack([p, 2 * p]) for name, p in names.items()}
        both = torch.func.vmap(
            lambda parameters: torch.func.functional_call(layer, parameters, (x[0],))
        )(stacked)
        torch.testing.assert_close(both[0], true[0])

    mask = torch.zeros(T, T, requires_grad=True)
    stack = nn.TransformerEncoder(layer, 2).requires_grad_(False)
    stack(x[0], mask=mask, is_causal=False).sum().backward()
    assert mask.grad is not None
    assert mask.grad.abs().max() > 0


def test_stack_of_the_other_kind_of_layer_raises() -> None:
    x = torch.randn(B, T, M)
    of_decoders = nn.TransformerEncoder(nn.TransformerDecoderLayer(M, H, HIDDEN), 1)
    of_encoders = nn.TransformerDecoder(nn.TransformerEncoderLayer(M, H, HIDDEN), 1)
    with torch.no_grad():
        with pytest.raises(TypeError):
            of_decoders.eval()(x)
        with pytest.raises(TypeError):
            of_encoders.eval()(x, x)


@pytest.mark.parametrize(("isa", "int8"), ISAS_AND_INT8)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_first", [False, True])
def test_separate_projections_give_the_bits_of_joined_ones(
    isa: str, dtype: torch.dtype, int8: bool, norm_first: bool
) -> None:
    torch.manual_seed(0)
    for width, rows in ((24, 1), (24, 15), (64, 150)):  # partial panels; blocks of rows
        maps = [(torch.randn(width, width), torch.randn(width).to(dtype)) for _ in range(4)]
        maps += [
            (torch.randn(n, k), torch.randn(n).to(dtype)) for n, k in ((40, width), (width, 40))
        ]
        biases = [bias for _, bias in maps]
        quantised = [quantize_weight(weight) for weight, _ in maps]
        weights = [w for w, _ in quantised] if int8 else [w.to(dtype) for w, _ in maps]
        scales = [scale for _, scale in quantised]
        norm = torch.randn(width).to(dtype), None

        def run(
            kinds: list[int], maps: list[Any], scales: list[Tensor], kind_of_norm: int
        ) -> Tensor:
            parameters = [p for i, pair in enumerate(maps) for p in (*pair, *(norm * (i % 2)))]  # noqa: B023
            stack = LayerStack(
                kinds, norm_first, [kind_of_norm] * len(kinds), 4, True, "gelu", parameters,
                unfactored(scales) if int8 else [], [1e-5] * len(kinds),
            )  # fmt: skip
            with torch.no_grad(), in_use(isa):
                return cpu_blocks.layers(stack, x, memory=x.flip(1) if 1 in kinds else None)  # noqa: B023

        x = torch.randn(3, rows // 3 or 1, width).to(dtype)
        pairs = [*zip(weights, biases, strict=True)]
        joined = torch.cat(weights[:3]), torch.cat(biases[:3])
        kinds = [0] if width % 32 else [0, 1]  # cross-attention (1) needs whole panels of queries
        for kind, kind_of_norm in itertools.product(kinds, range(4)):
            got = run([3, kind, 2], pairs, scales, kind_of_norm)
            expected = run(
                [kind, 2], [joined, *pairs[3:]], [torch.cat(scales[:3]), *scales[3:]], kind_of_norm
            )
            assert torch.equal(got, expected)


def unfactored(scales: list[Any]) -> list[Any]:
    """Returns the scales with None inserted after each pair, for the factors of the two inputs."""
    pairs = zip(scales[0::2], scales[1::2], strict=True)
    return [each for pair in pairs for each in (*pair, None, None)]


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x (B, T, H, D) by rotary position embeddings, tables (1 or B, T, channels)."""
    some, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    a, b = some.chunk(2, -1)
    return torch.cat([some * cos[:, :, None] + torch.cat([-b, a], -1) * sin[:, :, None], rest], -1)


def gated_layer(
    x: Tensor,
    weights: list[Tensor],
    mask: Tensor | None,
    table: tuple[Tensor, ...],
    norm_first: bool,
) -> Tensor:
    """A layer with a gated network and rotated queries and keys; pre-norm without the first norm."""
    qkv, out, gate, up, down, bias, scale = weights
    q, k, v = ((x @ qkv.t() + bias).unflatten(-1, (3, 4, -1))).unbind(2)
    q, k = (turned(heads, *table) for heads in (q, k))
    q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
    x = x + y.transpose(1, 2).flatten(2) @ out.t()

    norm = torch.nn.LayerNorm(x.shape[-1], bias=False)
    norm.weight = torch.nn.Parameter(scale, requires_grad=False)
    x = x if norm_first else norm(x)
    y = norm(x) if norm_first else x
    y = torch.nn.functional.silu(y @ gate.t()) * (y @ up.t())
    return x + y @ down.t() if norm_first else norm(x + y @ down.t())


@pytest.mark.sampled(30)
@pytest.mark.parametrize(("isa", "int8"), ISAS_AND_INT8)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("joined", [False, True])
def test_gated_networks_and_rotated_heads(
    isa: str, int8: bool, dtype: torch.dtype, norm_first: bool, joined: bool
) -> None:
    torch.manual_seed(0)
    width, hidden = 64, 96
    shapes = (3 * width, width), (width, width), (hidden, width), (hidden, width), (width, hidden)
    weights = [torch.randn(shape) / shape[1] ** 0.5 for shape in shapes]
    weights += [torch.randn(3 * width), 1 + 0.1 * torch.randn(width)]
    weights = [weight.to(dtype) for weight in weights]
    scales: list[Any] = []
    values = weights[:5]
    if int8:
        quantised = [quantize_weight(weight.float()) for weight in values]
        values, scales = [w for w, _ in quantised], [s for _, s in quantised]
        weights = [(w * s[:, None]).to(dtype) for w, s in quantised] + weights[5:]
    qkv, out, gate, up, down = values
    ends = weights[6], None
    own = qkv, weights[5], out, None, *((None, None) if norm_first else ends)
    network = (torch.cat([gate, up]) if joined else up, None, down, None, *ends)
    parameters = [*own, *(() if joined else (gate, None, gate, None, None, None)), *network]
    if int8:
        of_gate, of_up = scales[2:4]
        scales = [
            *scales[:2], *(() if joined else (of_gate, of_gate)),
            torch.cat([of_gate, of_up]) if joined else of_up, scales[4],
        ]  # fmt: skip
    kinds = [0, 4] if joined else [0, 5, 4]
    norms = [-1 if norm_first else 0, *([] if joined else [-1]), 0]
    stack = LayerStack(
        kinds,
        norm_first,
        norms,
        4,
        True,
        "silu",
        parameters,
        unfactored(scales),
        [1e-5] * len(kinds),
    )
    run = functools.partial(cpu_blocks.layers, stack)
    # Few rows, blocks of rows, and more rows than pass through a gated network at a time.
    for batch, length, per_batch, channels in (
        (1, 1, 1, 16),
        (3, 5, 3, 8),
        (6, 50, 1, 16),
        (8, 150, 8, 10),
    ):
        x = torch.randn(batch, length, width).to(dtype)
        table = tuple(torch.randn(2, per_batch, length, channels).to(dtype))
        mask = torch.rand(batch, 1, length, length) < 0.7
        mask |= torch.eye(length).bool()
        given = [x, weights, mask, table]
        exact = gated_layer(*cast(given, torch.float64), norm_first)
        expected = gated_layer(*given, norm_first)
        with torch.no_grad(), in_use(isa):
            got = run(x, mask, cos=table[0], sin=table[1])
            if int8:
                assert (got - exact).norm() < 0.03 * exact.norm()
            else:
                check_budget(got, expected, exact)
            starts = torch.arange(batch + 1) * length
            cos, sin = (each.expand(batch, -1, -1).flatten(0, 1) for each in table)
            packed = run(x.flatten(0, 1), mask, starts=starts, cos=cos, sin=sin)
        torch.testing.assert_close(packed.view_as(x), got, rtol=0.0, atol=0.0)


@pytest.mark.thorough
@pytest.mark.parametrize("crossed", [False, True])
def test_opcheck(crossed: bool) -> None:
    parameters: list[Any] = []
    for _ in range(2):
        for kind in range(3) if crossed else (0, 2):
            shapes = ((HIDDEN, M), (M, HIDDEN)) if kind == 2 else ((3 * M, M), (M, M))
            for n, k in shapes:
                parameters += [torch.randn(n, k), torch.randn(n)]
            parameters += [torch.randn(M), None]
    arguments = (
        torch.randn(B, T, M), torch.randn(B, S, M) if crossed else None,
        [0, 1, 2] if crossed else [0, 2], parameters, [None] * (len(parameters) // 3), [],
        [1e-5] * (len(parameters) // 6), True, [0] * (3 if crossed else 2), H, 1, True, None, True, None,
        False, None, None, None, None,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.transformer_fast.layers.cpu, arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wrong_operator_arguments_raise(dtype: torch.dtype) -> None:
    ops = torch.ops.transformer_fast
    x = torch.randn(2, 3, 8).to(dtype)
    w3, w1 = torch.randn(24, 8).to(dtype), torch.randn(8, 8).to(dtype)
    w2, ones = w3.t().contiguous(), torch.ones(24)
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    table, wide, turned_over = torch.randn(1, 3, 4), torch.randn(1, 3, 6), torch.randn(3, 2, 4)

    def call(
        kinds,
        parameters,
        x=x,
        memory=None,
        heads=2,
        packed=None,
        starts=None,
        scales=(),
        kind_of_norm=0,
        cos=None,
        sin=None,
        batch_first=True,
        norms=None,
    ) -> None:
        packed = [None] * (len(parameters) // 3) if packed is None else packed
        ops.layers.cpu(
            x, memory, kinds, parameters, packed, scales, [1e-5] * (len(parameters) // 6), False,
            norms or [kind_of_norm] * len(kinds), heads, 1, batch_first, None, False, None, False, starts,
            None, cos, sin,
        )  # fmt: skip

    def attention(w_in=w3, w_out=w1, norm=None, kind=0, **change) -> None:
        call([kind], [w_in, None, w_out, None, norm, None], **change)

    def feed_forward(w1=w3, w2=w2, b1=None, **change) -> None:
        call([2], [w1, b1, w2, None, None, None], **change)

    attention()
    feed_forward()
    none = None, None, None
    for run, wrong, change in (
        (attention, "input must be float32", {"x": x.double()}),
        (attention, "input must have 3", {"x": x[0]}),
        (attention, "in_weight must be", {"w_in": w1}),
        (attention, "out_weight must be", {"w_out": w1.to(other)}),
        (attention, "the heads must divide", {"heads": 3}),
        (attention, "memory must have the dtype|memory must be float32", {"memory": x.to(other)}),
        (attention, "a multiple of a panel", {"memory": x}),
        (attention, "a memory needs one", {"kind": 1}),
        (attention, "no sub-layer of kind 6", {"kind": 6}),
        (attention, "must precede attention", {"kind": 3}),
        (attention, "gates a gated network", {"kind": 5}),
        (attention, "must have a multiple of", {"kind": 4}),
        (attention, "cos and sin come in pairs", {"cos": table}),
        (attention, "requires batch_first", {"cos": table, "sin": table, "batch_first": False}),
        (attention, "of one shape", {"cos": table, "sin": table[:, :2]}),
        (attention, "float32 or input's dtype", {"cos": table.double(), "sin": table.double()}),
        (attention, "must have 3 dimensions", {"cos": table[0], "sin": table[0]}),
        (attention, "an even number of columns", {"cos": table[..., :3], "sin": table[..., :3]}),
        (attention, "an even number of columns", {"cos": wide, "sin": wide}),
        (attention, "a row for each token", {"cos": table[:, :2], "sin": table[:, :2]}),
        (attention, "a row for each token", {"cos": turned_over, "sin": turned_over}),
        (attention, "must have 3 dimensions", {"cos": torch.ones(()), "sin": torch.ones(())}),
        (
            call,
            "gate_weight and weight1 must have one dtype",
            {
                "kinds": [5, 4],
                "parameters": [w3, None, w3, *[None] * 3, w3.char(), None, w2.char(), *[None] * 3],
                "scales": [*[None] * 4, ones, ones[:8], None, None],
            },
        ),
        (attention, "a kind of norm for each", {"norms": [0, 0]}),
        (attention, "no norm of kind 4", {"kind_of_norm": 4}),
        (attention, "2 packed weights", {"packed": [None]}),
        (attention, "starts must not fall", {"x": x[0], "starts": torch.tensor([0, 2, 1])}),
        (attention, "starts must go from 0 to 3", {"x": x[0], "starts": torch.tensor([0, 4])}),
        (attention, "the norm must have 8", {"norm": torch.ones(4)}),
        (attention, "4 or no scales", {"scales": [None]}),
        (attention, "in_weight must be .* or int8 with a scale", {"scales": [ones, *none]}),
        (attention, "scale of in_weight must have 24", {"w_in": w3.char(), "scales": [x, *none]}),
        (feed_forward, "must have one dtype", {"w1": w3.char(), "scales": [ones, *none]}),
        (feed_forward, "input must be float32", {"x": x.int()}),
        (feed_forward, "weight1 must be", {"w1": w3.to(other)}),
        (feed_forward, "weight2 must be", {"w2": w3}),
        (feed_forward, "the bias of weight1", {"b1": torch.ones(8).to(dtype)}),
    ):
        with pytest.raises(RuntimeError, match=wrong):
            run(**change)  # type: ignore[operator]


#: name: (change of a layer, context of the call, masks, reason why the layer is not one call)
REASONS: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "nothing": (lambda layer: layer, None, {}, ""),
    "gradients": (lambda layer: layer, torch.enable_grad, {}, "it has no backward"),
    "dropout": (lambda layer: layer.train(), None, {}, "it does not support dropout"),
    "dtype": (lambda layer: layer.double(), None, {}, "the call has float64"),
    "activation": (
        lambda layer: setattr(layer, "activation", torch.tanh), None, {}, "named activations only",
    ),
    "hook": (
        lambda layer: layer.linear1.register_forward_hook(lambda *_: None), None, {},
        "its linear1 has hooks",
    ),
    "subclass": (
        lambda layer: setattr(layer, "_ff_block", layer._ff_block), None, {}, "_ff_block is replaced",
    ),
    "autocast": (
        lambda layer: layer, lambda: torch.autocast("cpu", torch.bfloat16), {},
        "it does not support autocast",
    ),
    "named": (
        lambda layer: layer, lambda: use_backend("torch"), {},
        "use_backend or backend= selects 'torch'",
    ),
    "masks": (
        lambda layer: layer, None,
        {"src_mask": torch.zeros(T, T), "src_key_padding_mask": hidden_of(T)}, "",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@torch.no_grad()
@pytest.mark.parametrize("case", REASONS)
def test_explain_gives_the_reason_why_a_layer_is_composed(case: str) -> None:
    change, within, masks, reason = REASONS[case]
    layer = nn.TransformerEncoderLayer(M, H, HIDDEN, batch_first=True).eval()
    change(layer)
    x = torch.randn(B, T, M, dtype=layer.norm1.weight.dtype)
    with within() if within else contextlib.nullcontext():
        found = explain("encoder_layer", layer, x, **masks)
        with record() as ran:
            layer(x, **masks)
    assert found.backend == (None if reason else "cpu")
    assert reason in "; ".join(found.reasons["cpu"])
    assert bool(reason) == str(found).startswith("encoder_layer runs as separate ops")
    whole = sum(n for (name, _), n in ran.calls.items() if name.endswith("sub-layer"))
    # The layer converts the masks to one dtype. With a custom activation, its attention still runs
    # as one call.
    assert whole == {"masks": 2, "activation": 1, "hook": 1, "subclass": 1}.get(
        case, 0 if reason else 2
    )


def test_explain_of_other_layers() -> None:
    x = torch.randn(1, 4, 16)
    decoder = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True).eval().requires_grad_(False)
    found = explain("decoder_layer", decoder, x, x, tgt_mask=CAUSAL(4), tgt_is_causal=True)
    assert "multiples of 32" in found.reasons["cpu"][0]
    unlike = {"tgt_mask": torch.zeros(4, 4), "tgt_key_padding_mask": torch.zeros(1, 4).bool()}
    found = explain("decoder_layer", decoder, x, x, **unlike)
    assert found.reasons["cpu"] == ["its masks differ in dtype"]
    theirs = torch.nn.TransformerEncoderLayer(16, 2, 32)
    assert "accelerate swaps it" in explain("encoder_layer", theirs, x).reasons["cpu"][0]
    with pytest.raises(AssertionError, match="only bool and floating types of src_mask"):
        explain("encoder_layer", theirs, x, src_mask=torch.zeros(4, 4).int())
    with pytest.raises(TypeError, match="layer must be a TransformerEncoderLayer, not Linear"):
        explain("encoder_layer", torch.nn.Linear(2, 2), x)
    with pytest.raises(TypeError, match="src_masks"):
        explain("encoder_layer", theirs, x, src_masks=None)
