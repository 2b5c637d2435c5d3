"""nn.MultiheadAttention: shapes, options and masks of torch.nn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from module_checks import assert_close, attention_pair
from torch import Tensor

from transformer_fast import nn

B, H, T, S, M = 2, 3, 4, 5, 6


def pair(**kwargs: Any) -> tuple[torch.nn.MultiheadAttention, torch.nn.MultiheadAttention]:
    return attention_pair(M, H, **kwargs)


def masks(batched: bool, keys: int = S) -> Iterator[dict[str, Any]]:
    padding = torch.zeros(B, keys, dtype=torch.bool)
    padding[0, -2:] = padding[1, 1] = True
    padding = padding if batched else padding[0]
    seen = torch.rand(T, keys) < 0.6
    seen[:, 0] = True
    per_head = torch.rand((B if batched else 1) * H, T, keys) < 0.6
    per_head[..., 0] = True
    for attn in (None, ~seen, ~per_head):
        for pad in (None, padding):
            yield {"attn_mask": attn, "key_padding_mask": pad}
            if attn is not None or pad is not None:
                yield {
                    "attn_mask": None if attn is None else torch.randn(attn.shape),
                    "key_padding_mask": None
                    if pad is None
                    else torch.zeros(pad.shape).masked_fill(pad, -torch.inf),
                }


def inputs(batched: bool, batch_first: bool, kind: str, kdim: int = M, vdim: int = M) -> Any:
    def make(length: int, width: int) -> Tensor:
        if not batched:
            return torch.randn(length, width)
        return torch.randn(B, length, width) if batch_first else torch.randn(length, B, width)

    query = make(T, M)
    if kind == "self":
        return query, query, query
    key = make(S, kdim)
    return query, key, key if kind == "shared" else make(S, vdim)


#: (options of the module, kind of call)
CALLS: list[tuple[dict[str, Any], str]] = [
    *(({"batch_first": first}, kind) for first in (True, False) for kind in ("self", "shared")),
    ({"batch_first": True}, "distinct"),
    ({}, "distinct"),
    ({"add_bias_kv": True}, "distinct"),
    ({"add_zero_attn": True}, "distinct"),
    ({"add_bias_kv": True, "add_zero_attn": True}, "distinct"),
    ({"kdim": 7, "vdim": 4}, "distinct"),
    ({"kdim": 7, "vdim": 4, "bias": False, "add_bias_kv": True}, "distinct"),
    ({"bias": False}, "distinct"),
    ({"vdim": 4, "batch_first": True, "add_zero_attn": True}, "distinct"),
]


@pytest.mark.sampled(40)
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize(("options", "kind"), CALLS, ids=str)
def test_masks_layouts_and_options(options: dict[str, Any], kind: str, batched: bool) -> None:
    theirs, ours = pair(**options)
    plain, sizes = set(options) <= {"batch_first"}, (options.get("kdim", M), options.get("vdim", M))
    for training, weights, average in itertools.product((True, False), repeat=3):
        if not plain and training is average:
            continue
        theirs.train(training)
        ours.train(training)
        for mask in masks(batched, T if kind == "self" else S):
            given = inputs(batched, options.get("batch_first", False), kind, *sizes)
            how = {"need_weights": weights, "average_attn_weights": average}
            assert_close(ours, theirs, *given, **how, **mask)


def test_returned_weights_are_those_after_dropout() -> None:
    ours = nn.MultiheadAttention(8, 2, dropout=0.25, batch_first=True)
    with torch.no_grad():
        ours.out_proj.weight.copy_(torch.eye(8))
    x = torch.randn(3, 64, 8)
    output, weights = ours(x, x, x, average_attn_weights=False)
    assert weights.shape == (3, 2, 64, 64)
    dropped = (weights == 0).double().mean().item()
    deviation = (0.25 * 0.75 / weights.numel()) ** 0.5
    assert abs(dropped - 0.25) < 5 * deviation
    _, _, v = torch.nn.functional.linear(x, ours.in_proj_weight, ours.in_proj_bias).chunk(3, -1)
    mixed = weights @ v.unflatten(-1, (2, 4)).transpose(1, 2)
    torch.testing.assert_close(output, mixed.transpose(1, 2).flatten(2))
    ours.eval()
    assert (ours(x, x, x)[1] > 0).all()


def test_out_proj_is_called_as_a_module() -> None:
    theirs, ours = pair(batch_first=True)
    x = torch.randn(B, T, M)
    seen: list[torch.Size] = []
    ours.out_proj.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    assert_close(ours, theirs, x, x, x)
    assert set(seen) == {(B, T, M)}

    class Adapted(torch.nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1.0

    ours.out_proj.__class__ = Adapted
    with torch.no_grad():
        torch.testing.assert_close(ours(x, x, x)[0], theirs(x, x, x)[0] + 1.0)


def test_float_mask_gradient() -> None:
    theirs, ours = pair(batch_first=True)
    x = torch.randn(B, T, M)
    grads = []
    bias = torch.randn(B * H, T, T)
    for module in (theirs, ours):
        leaf = bias.clone().requires_grad_()
        module(x, x, x, attn_mask=leaf, need_weights=False)[0].square().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("sizes", [(0, T, S), (B, 0, S), (B, T, 0)], ids=["B", "T", "S"])
def test_empty_inputs(sizes: tuple[int, int, int]) -> None:
    _, ours = pair(batch_first=True)
    batch, length, keys = sizes
    memory = torch.randn(batch, keys, M)
    output, weights = ours(torch.randn(batch, length, M), memory, memory)
    assert output.shape == (batch, length, M)
    assert weights.shape == (batch, length, keys)
    assert torch.equal(output, ours.out_proj.bias.expand_as(output)) or keys


@pytest.mark.parametrize("sizes", [(B, T, 12), (8, 64, 128)], ids=["small", "large"])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("kind", ["self", "shared", "distinct"])
def test_inference_tensors_as_inputs_in_training(
    sizes: tuple[int, int, int], need_weights: bool, kind: str
) -> None:
    """Autograd cannot save inference tensors; PyTorch saves the copies that its transpositions
    make."""
    width = sizes[2]
    theirs, ours = attention_pair(width, H if width == 12 else 4, batch_first=True)
    with torch.inference_mode():
        query = torch.randn(sizes)
        given = {
            "self": (query, query, query),
            "shared": (query, *[torch.randn(sizes)] * 2),
            "distinct": (query, torch.randn(sizes), torch.randn(sizes)),
        }[kind]
        padding = torch.randn(sizes[:2])

    def gradients(module: torch.nn.Module, *args: Tensor, **masks: Tensor) -> Any:
        output = module(*args, need_weights=need_weights, **masks)[0]
        return torch.autograd.grad(output.square().sum(), [*module.parameters()])

    for masks in ({}, {"key_padding_mask": padding}):
        gradients(theirs, *given, **masks)
        copies = {id(x): x.clone() for x in given}  # inputs that are one tensor get one copy
        expected = gradients(
            ours, *[copies[id(x)] for x in given], **{name: x.clone() for name, x in masks.items()}
        )
        torch.testing.assert_close(gradients(ours, *given, **masks), expected, rtol=0, atol=0)


@pytest.mark.parametrize("sizes", [(2, 3, 12), (4, 40, 64)])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_inputs_can_be_written_before_backward_as_in_pytorch(
    sizes: tuple[int, int, int], requires_grad: bool
) -> None:
    for module in (
        nn.MultiheadAttention(sizes[2], 4, batch_first=True),
        nn.TransformerEncoderLayer(sizes[2], 4, 24, 0.0, batch_first=True),
    ):
        found = []
        for change in (False, True):
            leaf = torch.linspace(-1, 1, math.prod(sizes)).view(sizes).requires_grad_(requires_grad)
            x = leaf * 1.5
            output = module(x, x, x)[0] if isinstance(module, nn.MultiheadAttention) else module(x)
            if change:
                x.add_(1.0)
            found.append(torch.autograd.grad(output.square().sum(), [*module.parameters()]))
        torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_run_in_pytorch() -> None:
    ours = nn.MultiheadAttention(4, 2, batch_first=True).eval()
    x = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(2, 4)])
    with torch.no_grad():
        output, _ = ours(x, x, x, need_weights=False)
        expected = ours(x[0], x[0], x[0], need_weights=False)[0]
    assert output.is_nested
    torch.testing.assert_close(output[0], expected)


def test_mixed_mask_dtypes_warn_and_work() -> None:
    theirs, ours = pair()
    query = torch.randn(T, B, M)
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[:, -1] = True
    bias = torch.randn(T, T)
    for attn, pad in (
        (bias, padding),
        (torch.ones(T, T).triu(1).bool(), torch.zeros(B, T).masked_fill(padding, -torch.inf)),
    ):
        kwargs = {"attn_mask": attn, "key_padding_mask": pad}
        with pytest.warns(UserWarning, match="mismatched key_padding_mask and attn_mask") as warned:
            ours(query, query, query, **kwargs)
        with pytest.warns(UserWarning, match="mismatched") as theirs_warned:
            theirs(query, query, query, **kwargs)
        assert {str(w.message) for w in warned} == {str(w.message) for w in theirs_warned}
        with pytest.warns(UserWarning, match="mismatched"):
            assert_close(ours, theirs, query, query, query, **kwargs)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("how", ["bool", "float", "padding", "both"])
def test_fully_masked_rows_are_zero(need_weights: bool, training: bool, how: str) -> None:
    _, ours = pair(batch_first=True)
    ours.train(training)
    query = torch.randn(B, T, M, requires_grad=True)
    memory = torch.randn(B, S, M, requires_grad=True)
    hidden = torch.zeros(T, S, dtype=torch.bool)
    hidden[1] = True
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[1] = True
    empty = torch.zeros(B, T, dtype=torch.bool)
    kwargs: dict[str, Any] = {}
    if how == "padding":
        kwargs["key_padding_mask"] = padding
        empty[1] = True
    elif how == "float":
        kwargs["attn_mask"] = torch.zeros(T, S).masked_fill(hidden, -torch.inf)
        empty[:, 1] = True
    else:
        kwargs["attn_mask"] = hidden
        empty[:, 1] = True
        if how == "both":
            kwargs["key_padding_mask"] = padding
            empty[1] = True
    output, weights = ours(query, memory, memory, need_weights=need_weights, **kwargs)
    assert torch.equal(output[empty], ours.out_proj.bias.expand_as(output[empty]))
    assert not torch.equal(output[~empty], ours.out_proj.bias.expand_as(output[~empty]))
    if need_weights:
        assert not weights[empty].any()
        torch.testing.assert_close(weights[~empty].sum(-1), torch.ones((~empty).sum()))
    output.sum().backward()
    assert not query.grad[empty].any()
    assert query.grad[~empty].any()
    assert torch.isfinite(memory.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in ours.parameters())


def test_is_causal_hint_overrides_the_mask() -> None:
    """The hint overrides a mask that is not causal, in the same cases as in PyTorch."""
    theirs, ours = pair()
    x = torch.randn(T, B, M)
    mask = torch.ones(T, T, dtype=torch.bool).tril(-1)
    for weights in (True, False):
        for training in (True, False):
            theirs.train(training)
            ours.train(training)
            kwargs = {"attn_mask": mask, "is_causal": True, "need_weights": weights}
            assert_close(ours, theirs, x, x, x, **kwargs)


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
@pytest.mark.parametrize("padded", [True, False])
def test_is_causal_hint_with_appended_keys(options: dict[str, Any], padded: bool) -> None:
    theirs, ours = pair(**options)
    x = torch.randn(T, B, M)
    kwargs: dict[str, Any] = {"attn_mask": torch.ones(T, T, dtype=torch.bool).triu(1)}
    if padded:
        kwargs["key_padding_mask"] = torch.zeros(B, T, dtype=torch.bool)
        kwargs["key_padding_mask"][0, 3:] = True
    assert_close(ours, theirs, x, x, x, need_weights=False, is_causal=True, **kwargs)
