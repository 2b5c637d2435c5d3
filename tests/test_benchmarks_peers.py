"""Peers: what of those of GPUs can be held to the reference without one, and processes."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import sys
import types

import pytest
import torch
from torch._dynamo.backends import registry
from torch._dynamo.utils import counters
from torch._inductor import config
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.peers import (
    contenders,
    inductor_tuned,
    liger,
    load,
    openvino,
    xformers,
    zentorch,
)
from benchmarks.peers import flex_attention as flex
from benchmarks.processes import Remote
from transformer_fast.measure.modules import with_fast_path
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


def _layer() -> tuple[torch.nn.Module, tuple[torch.Tensor, None, torch.Tensor]]:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    return layer, (torch.randn(2, 9, 64), None, torch.arange(9) >= torch.tensor([[9], [4]]))


@pytest.fixture
def settings():
    """Inductor's, which must be the same afterwards."""
    before = config.freezing, config.max_autotune, config.joint_custom_post_pass
    yield
    after = config.freezing, config.max_autotune, config.joint_custom_post_pass
    assert after == before


@pytest.mark.parametrize("peer", [inductor_tuned, zentorch], ids=lambda peer: peer.NAME)
@torch.no_grad()
def test_a_compiler_with_frozen_weights_leaves_them_and_others_alone(peer, settings) -> None:
    if (reason := peer.available()) is not None:
        pytest.skip(reason)
    layer, arguments = _layer()
    seen = ~arguments[2]
    expected = layer(*arguments)[seen]
    weights = {name: weight.clone() for name, weight in layer.state_dict().items()}
    run = peer.encoder_layer(layer, arguments)
    autotuned = counters["inductor"]["select_algorithm_autotune"]
    torch.testing.assert_close(run(*arguments)[seen], expected)
    if peer is inductor_tuned:
        assert counters["inductor"]["select_algorithm_autotune"] > autotuned
    torch.testing.assert_close(layer.state_dict(), weights, rtol=0, atol=0)
    layer.linear1.weight.mul_(2)
    torch.testing.assert_close(run(*arguments)[seen], expected)
    # Plain torch.compile is not given what was compiled for it.
    plain = with_fast_path(torch.compile(layer, dynamic=False), False)
    torch.testing.assert_close(plain(*arguments)[seen], layer(*arguments)[seen])


@torch.no_grad()
def test_what_zentorch_sets_when_it_compiles_is_taken_back(monkeypatch, settings) -> None:
    seen = []

    def backend(graph, inputs):
        seen.append((config.freezing, config.fx_graph_cache))
        config.joint_custom_post_pass = lambda graph: None
        return graph

    monkeypatch.setitem(sys.modules, "zentorch", types.ModuleType("zentorch"))
    monkeypatch.setitem(registry._BACKENDS, "zentorch", None)
    monkeypatch.setitem(registry._COMPILER_FNS, "zentorch", backend)
    layer, arguments = _layer()
    run, kept = zentorch.encoder_layer(layer, arguments), ~arguments[2]
    for _ in range(2):
        torch.testing.assert_close(run(*arguments)[kept], layer(*arguments)[kept])
    assert seen == [(True, False)]


def test_zentorch_is_for_one_torch(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not installed" in str(zentorch.available())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.13.0.2")
    assert "1.13.0.2 is not for torch" in str(zentorch.available())
