"""PyTorch's own ops as a backend, which CUDA tensors use until a kernel is validated there.

Without a GPU, operators are counted on meta tensors, which have the same candidates. Results are
checked on CPU tensors.
"""

from __future__ import annotations

import itertools
import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from harness import DTYPES, SATURATED, OnDevice, Operators, drawn, kernel_of, name_of

from transformer_fast import dispatch, explain, fast_path, functional, nn
from transformer_fast.functional import _check
from transformer_fast.specs import OPS
from transformer_fast.testing import check, check_gradients

pytestmark = pytest.mark.sampled(65)

ATTENTION = OPS["attention"]
#: Cases with NaN in keys that a mask hides; with PyTorch it reaches the queries, as the guide says.
_SPOILT = ("garbage in the future", "garbage under a bool mask", "garbage under a float mask")


def attention_cases() -> list[Any]:
    found = []
    for case, dtype in itertools.product(ATTENTION.cases, DTYPES):
        named = ATTENTION.named(drawn("attention", case.name, dtype))
        # On CPU tensors dropout draws other elements than the reference; low-precision weights have
        # PyTorch's rounding.
        weights = named["need_weights"] and dtype != torch.float32
        supported = named["dropout_p"] == 0.0 and named["softcap"] is None
        if supported and not weights and case.name not in _SPOILT:
            found.append(pytest.param(case.name, dtype, id=f"{case.name}-{str(dtype)[6:]}"))
    return found


@pytest.fixture
def no_fully_masked_rows(monkeypatch):
    """Fails if PyTorch gets a fully masked row, for which some of its GPU kernels return NaN."""
    theirs = F.scaled_dot_product_attention

    def checked(query, key, value, mask, *rest, **options):
        if mask is not None and mask.shape[-1]:
            assert (mask if mask.dtype == torch.bool else mask != -math.inf).any(dim=-1).all()
        return theirs(query, key, value, mask, *rest, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", checked)


@pytest.mark.parametrize(("case", "dtype"), attention_cases())
def test_attention_is_within_the_budget(no_fully_masked_rows, case, dtype):
    """For every mask, fully masked rows are zero, and NaN in masked keys has no effect."""
    arguments = drawn("attention", case, dtype)
    check("attention", kernel_of("attention", "torch").run(*arguments), arguments)
    if case not in SATURATED:
        check_gradients("attention", kernel_of("attention", "torch").run, arguments)


@pytest.mark.parametrize("case", _SPOILT)
def test_garbage_under_masks_has_an_effect(case):
    """The control: other cases with garbage are within the budget."""
    arguments = drawn("attention", case, torch.float32)
    assert kernel_of("attention", "torch").run(*arguments)[0].isnan().any()


# Operators ---------------------------------------------------------------------------------------


#: Operators that launch no kernel on a GPU.
_VIEWS = {
    "alias", "as_strided", "_reshape_alias", "_unsafe_view", "detach", "expand", "permute", "select",
    "slice", "split", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
}  # fmt: skip


def as_on_a_gpu():
    """Context manager in which calls on meta tensors go to the dispatcher, as on CUDA tensors."""
    return mock.patch.object(_check, "only_torch_supports", return_value=False)


def operators_of(module, arguments, training):
    with as_on_a_gpu(), OnDevice() as seen, torch.set_grad_enabled(training):
        result = module(*arguments[0], **arguments[1])
        if training:
            (result if isinstance(result, torch.Tensor) else result[0]).sum().backward()
    names = [name_of(func) for func in seen.seen]
    assert "randint" not in names, "PyTorch's dropout takes no seed"
    return [name for name in names if name not in _VIEWS]


def counts(make, call, training):
    """Returns the numbers of operators in PyTorch's module and in ours."""
    made = [make(library).train(training) for library in (torch.nn, nn)]
    return [len(operators_of(module, call, training)) for module in made]


def layer_call(kind: str, padded: bool, causal: bool) -> tuple[Any, Any]:
    x, memory = torch.randn(2, 10, 64), torch.randn(2, 12, 64)
    mask = torch.ones(10, 10, dtype=torch.bool).triu(1) if causal else None
    padding = torch.zeros(2, 10, dtype=torch.bool) if padded else None
    if kind == "Encoder":
        return (x, mask, padding), {"is_causal": causal}
    other = torch.zeros(2, 12, dtype=torch.bool) if padded else None
    return (x, memory, mask, None, padding, other), {"tgt_is_causal": causal}


@pytest.mark.thorough
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("norm_first", [False, True], ids=["", "norm first"])
@pytest.mark.parametrize("kind", ["Encoder", "Decoder"])
def test_layers_run_at_most_two_more_operators_than_pytorch(
    kind, norm_first, training, padded, causal
):
    """With gradients and dropout in training, and without synchronization."""

    def make(library):
        layer = getattr(library, f"Transformer{kind}Layer")
        return layer(64, 4, 128, batch_first=True, norm_first=norm_first)

    with torch.device("meta"):
        theirs, ours = counts(make, layer_call(kind, padded, causal), training)
    assert 15 < ours <= theirs + 2


@pytest.mark.thorough
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_stacks_do_not_synchronize(training, padded):
    with torch.device("meta"):
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)
        decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(64, 4, 128, batch_first=True), 2)
        for stack, kind in ((encoder, "Encoder"), (decoder, "Decoder")):
            for causal in (False, True):
                assert operators_of(
                    stack.train(training), layer_call(kind, padded, causal), training
                )


@pytest.mark.thorough
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_attention_runs_at_most_three_more_operators_than_pytorch(need_weights, training):
    def make(library):
        return library.MultiheadAttention(64, 4, dropout=0.1, batch_first=True)

    with torch.device("meta"):
        x, padding = torch.randn(2, 10, 64), torch.zeros(2, 10, dtype=torch.bool)
        call = (x, x, x), {"key_padding_mask": padding, "need_weights": need_weights}
        theirs, ours = counts(make, call, training)
    assert 10 < ours <= theirs + 2 + need_weights


# Cross entropy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_nan_in_ignored_rows_gives_no_gradient(monkeypatch, smoothing):
    """Rows shorter than a vector take the code path of a GPU: NaN in ignored rows has no effect."""
    monkeypatch.setattr(fast_path, "ignores_no_nan", lambda *call: True)
    x, target = torch.randn(4, 3), torch.tensor([0, -1, 2, 1])
    x[1], x[2, 0] = math.nan, math.nan
    x.requires_grad_()
    kernel_of("cross_entropy", "torch").run(x, target, -1, smoothing).sum().backward()
    assert (x.grad[1] == 0).all()
    assert x.grad[2].isnan().all()
    assert x.grad[[0, 3]].isfinite().all()


# Selection ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_sums_under_autocast_need_no_casts(monkeypatch, p):
    """A sub-layer's result in bfloat16 and a residual in float32, as PyTorch's sum supports."""
    x, residual, w = torch.randn(3, 8).bfloat16(), torch.randn(3, 8), torch.randn(8)
    with torch.autocast("cpu", torch.bfloat16):
        monkeypatch.setattr(dispatch, "only_pytorch_runs", lambda op, first: True)
        torch.manual_seed(0)
        with Operators() as seen:
            found = functional.add_layer_norm(x, residual, 8, w, dropout_p=p)
        monkeypatch.undo()
        torch.manual_seed(0)
        expected = functional.add_layer_norm(x, residual, 8, w, dropout_p=p, backend="reference")
    assert seen.casts == 0
    assert found[1].dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=2**-8, atol=2**-8)


def test_seeds_are_drawn_only_for_kernels_that_need_them():
    """Explaining a call draws no seed."""
    x, w = torch.randn(3, 8), torch.randn(8, 8)
    q = torch.randn(1, 2, 5, 8)
    before = torch.get_rng_state()
    explain("attention", q, q, q, dropout_p=0.1)
    explain("feed_forward", x, w, None, w, None, dropout_p=0.1)
    with torch.device("meta"):
        there = torch.randn(3, 8)
    with as_on_a_gpu():
        functional.add_layer_norm(there, there, 8, dropout_p=0.1)
    assert torch.equal(torch.get_rng_state(), before)
    functional.add_layer_norm(x, x, 8, dropout_p=0.1)
    drawn_one = torch.get_rng_state()
    torch.set_rng_state(before)
    torch.randint(0, 2**63 - 1, ())
    assert torch.equal(torch.get_rng_state(), drawn_one)


def test_every_op_runs_on_pytorch_by_default():
    """Covers all options that PyTorch's own ops support."""
    with torch.device("meta"):
        x, w, b = torch.randn(5, 8), torch.randn(8, 8, requires_grad=True), torch.randn(8)
        q = torch.randn(2, 4, 5, 8, requires_grad=True)
        mask = torch.ones(5, 5, dtype=torch.bool)
        target = torch.zeros(5, dtype=torch.int64)
        lengths = torch.ones(2, dtype=torch.int64)
        calls = [
            explain("layer_norm", x, 8, w[0]),
            explain("add_layer_norm", x, x, 8, b, dropout_p=0.1),
            explain("linear", x, w, b, activation="gelu", residual=x),
            explain("feed_forward", x, w, b, w, b, dropout_p=0.1),
            explain("cross_entropy", x, target, label_smoothing=0.1),
            explain("linear_cross_entropy", x, w, target),
        ] + [
            explain("attention", q, q, q, **how)
            for how in (
                {},
                {"attn_mask": mask},
                {"attn_mask": torch.zeros(5, 5, requires_grad=True)},
                {"is_causal": True, "key_lengths": lengths},
                {"is_causal": True, "query_lengths": lengths},
                {"dropout_p": 0.1, "need_weights": True},
            )
        ]
    assert [one.backend for one in calls] == ["torch"] * len(calls)
    dropped = explain("attention", torch.randn(2, 4, 5, 8), *[torch.randn(2, 4, 5, 8)] * 2)
    assert dropped.backend != "torch"
