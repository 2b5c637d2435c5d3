"""Peers: what of those of GPUs can be held to the reference without one, and processes."""

from __future__ import annotations

import functools
import os

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.peers import contenders, liger, load, openvino, xformers
from benchmarks.peers import flex_attention as flex
from benchmarks.processes import Remote
from transformer_fast.reference import attention

B, H, T, S, D = 2, 3, 40, 50, 16


def given(mask=None, lengths=None, causal=False, size=S):
    torch.manual_seed(0)
    qkv = torch.randn(B, H, T, D), torch.randn(B, H, size, D), torch.randn(B, H, size, D)
    return (*qkv, mask, lengths, causal, 0.3, 0.0, None, False, False)


CASES = {
    "plain": {},
    "causal": {"causal": True},
    "lengths": {"lengths": torch.tensor([S, 7])},
    "bool mask": {"mask": (torch.arange(T)[:, None] >= torch.arange(S) - 9)[None, None]},
    "float mask": {"mask": torch.linspace(-1, 1, T * S).view(1, 1, T, S)},
    "causal, lengths": {"causal": True, "lengths": torch.tensor([S, 7])},
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", CASES)
def test_flex_attention_means_the_same(name: str) -> None:
    arguments = given(**CASES[name])
    expected = attention(*arguments)[0]
    torch.testing.assert_close(flex.attend(flex_attention, create_block_mask, *arguments), expected)


@pytest.mark.parametrize("name", [name for name in CASES if "causal" not in name])
def test_the_bias_for_xformers_means_the_same(name: str) -> None:
    arguments = given(**CASES[name])
    query, key, value = arguments[:3]
    added = xformers.bias(query, S, *arguments[3:5])
    found = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=added, scale=0.3
    )
    torch.testing.assert_close(found, attention(*arguments)[0])


def test_on_the_cpu_they_say_why_not() -> None:
    peers = load(["flex_attention", "liger", "xformers"])
    assert peers == [flex, liger, xformers]
    for found in contenders(peers, "op", "attention", given()):
        assert found.run is None
        assert found.reason


def test_a_contender_in_a_process_of_its_own():
    elsewhere = Remote(functools.partial, os.getpid)
    assert elsewhere() not in (os.getpid(), None)
    power = Remote(functools.partial, pow, 2)
    assert [power(exponent) for exponent in (5, 6)] == [32, 64]
    with pytest.raises(TypeError):
        power("five")
    assert power(7) == 128
    with pytest.raises(ValueError, match="invalid literal"):
        Remote(int, "nothing to call")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_openvino_means_the_same(dtype: torch.dtype, masked: bool) -> None:
    if (reason := openvino.available()) is not None:
        pytest.skip(reason)
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 48, batch_first=True).eval().to(dtype)
    x = torch.randn(2, 9, 32).to(dtype)
    padding = torch.arange(9) >= torch.tensor([[9], [4]]) if masked else None
    run = openvino.encoder_layer(layer, (x, None, padding))
    assert callable(run), run
    with torch.no_grad():
        expected = layer(x, None, padding)
        found = run(x, None, padding)
    assert found.dtype == dtype
    limit = {} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    seen = slice(None) if padding is None else ~padding
    torch.testing.assert_close(found[seen], expected[seen], **limit)
