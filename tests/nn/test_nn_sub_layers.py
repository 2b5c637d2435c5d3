"""Whole sub-layers in one call, in every dtype and on every instruction set."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness import DTYPES, ISAS, use
from torch import Tensor

from transformer_fast import _native, nn
from transformer_fast.dispatch import use_backend
from transformer_fast.measure.calls import record

pytestmark = [
    pytest.mark.usefixtures("two_threads"),
    pytest.mark.skipif(not ISAS, reason="no native kernels here"),
]

B, T, S, M, H, HIDDEN = 3, 37, 21, 64, 4, 100
CAUSAL = nn.Transformer.generate_square_subsequent_mask


def hidden_of(length: int) -> Tensor:
    """True at padding: some sequences end early, one begins late."""
    hidden = torch.arange(length) >= torch.tensor([[length], [length // 3], [length]])
    hidden[2, :4] = True
    return hidden


def cases(dtype: torch.dtype) -> dict[str, tuple[bool, dict[str, Any]]]:
    """Of a layer: whether it is a decoder's, and its masks."""
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
    """Holds the module to fp64, by the reference's error; gives how many sub-layers were one call.

    Places that ``masks`` calls padding are not looked at.
    """
    dtype = inputs[0].dtype
    in_double = {
        k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in masks.items()
    }
    before = _native.module.isa()
    use(isa)
    try:
        with torch.no_grad():
            with record() as found:
                ours = module(*inputs, **masks)
            again = module(*inputs, **masks)
            with use_backend("reference"):
                close = module(*inputs, **masks)
                true = copy.deepcopy(module).double()(*(x.double() for x in inputs), **in_double)
    finally:
        use(before)
    assert ours.dtype == dtype
    assert torch.equal(ours, again)
    seen = next((~v for k, v in masks.items() if k in _OWN_PADDING), None)
    if seen is not None:
        if not batch_first:
            seen = seen.t()
        ours, close, true = ours[seen], close[seen], true[seen]
    limit = 2 * (close - true).abs().max() + 2 * torch.finfo(dtype).eps * true.abs().max()
    assert (ours - true).abs().max() <= limit
    return sum(n for (name, _), n in found.calls.items() if name.endswith("sub-layer"))


_OWN_PADDING = ("src_key_padding_mask", "tgt_key_padding_mask")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("case", cases(torch.float32))
def test_layers(isa: str, dtype: torch.dtype, norm_first: bool, case: str) -> None:
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
    with torch.inference_mode():  # not packed and kept, but packed or read in the call
        unkept = copy.deepcopy(layer)
    assert check(unkept, inputs, {}, isa) == 2


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch_first", [False, True])
def test_stacks_see_real_tokens_only(isa: str, dtype: torch.dtype, batch_first: bool) -> None:
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


def test_other_dtypes_are_composed() -> None:
    layer = nn.TransformerEncoderLayer(M, H, HIDDEN, batch_first=True).eval()
    x = torch.randn(B, T, M)
    with torch.no_grad():
        with record() as found:
            layer.double()(x.double())
        assert not any(name.endswith("sub-layer") for name, _ in found.calls)
        layer.float()
        with record() as found, torch.autocast("cpu", torch.bfloat16):
            layer(x)
        assert not any(name.endswith("sub-layer") for name, _ in found.calls)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bad_blocks_are_errors(dtype: torch.dtype) -> None:
    ops = torch.ops.transformer_fast
    x = torch.randn(2, 3, 8).to(dtype)
    w3, w1 = torch.randn(24, 8).to(dtype), torch.randn(8, 8).to(dtype)
    w2 = w3.t().contiguous()
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32

    def attention(x=x, memory=None, w_in=w3, w_out=w1, norm=None, heads=2) -> None:
        ops.cpu_attention_block(
            x, memory, w_in, None, None, w_out, None, None, norm, None, 1e-5, False, heads, True,
            None, None, False, None, None,
        )  # fmt: skip

    def feed_forward(x=x, w1=w3, w2=w2, b1=None) -> None:
        ops.cpu_feed_forward_block(
            x, w1, None, b1, w2, None, None, None, None, 1e-5, False, 1
        )  # fmt: skip

    attention()
    feed_forward()
    for run, wrong, change in (
        (attention, "input must be float32", {"x": x.double()}),
        (attention, "input must have 3", {"x": x[0]}),
        (attention, "in_weight must be", {"w_in": w1}),
        (attention, "out_weight must be", {"w_out": w1.to(other)}),
        (attention, "the heads must divide", {"heads": 3}),
        (attention, "memory must have the dtype|memory must be float32", {"memory": x.to(other)}),
        (attention, "a multiple of a panel", {"memory": x}),
        (attention, "the norm must have 8", {"norm": torch.ones(4)}),
        (feed_forward, "input must be float32", {"x": x.int()}),
        (feed_forward, "weight1 must be", {"w1": w3.to(other)}),
        (feed_forward, "weight2 must be", {"w2": w3}),
        (feed_forward, "the bias of weight1", {"b1": torch.ones(8).to(dtype)}),
    ):
        with pytest.raises(RuntimeError, match=wrong):
            run(**change)  # type: ignore[operator]
