"""Helpers that build masks, and warnings about wrong ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from module_cases import CASES, B, M, S, T
from torch import Tensor
from torch._subclasses import FakeTensorMode

from transformer_fast import _native, fast_path, functional, nn
from transformer_fast.functional import attention, masks

TOKENS = torch.tensor([[5, 6, 7, 8], [5, 0, 7, 0]])


def test_causal_masks() -> None:
    lower = [[True, False, False], [True, True, False], [True, True, True]]
    assert functional.causal_mask(3).tolist() == lower
    hidden = functional.causal_mask(3, true_means="hidden")
    assert torch.equal(hidden, ~torch.tensor(lower))
    assert functional.causal_mask(0).shape == (0, 0)
    assert functional.causal_mask(2, device="meta").is_meta


def test_padding_masks() -> None:
    real = torch.tensor([[True, True, True, True], [True, False, True, False]])
    assert torch.equal(functional.padding_mask(TOKENS, 0), real[:, None, None])
    assert torch.equal(functional.padding_mask(TOKENS, 0, true_means="hidden"), ~real)


def test_both_polarities_give_the_same_result() -> None:
    """The same mask, in SDPA's polarity and in torch.nn's."""
    layer = nn.MultiheadAttention(16, 2, batch_first=True)
    with torch.no_grad():
        layer.in_proj_weight.copy_(torch.eye(16).repeat(3, 1))
        layer.out_proj.weight.copy_(torch.eye(16))
    x = torch.randn(2, 4, 16)
    theirs = layer(
        x, x, x, need_weights=False,
        attn_mask=functional.causal_mask(4, true_means="hidden"),
        key_padding_mask=functional.padding_mask(TOKENS, 0, true_means="hidden"),
    )[0]  # fmt: skip
    heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
    visible = functional.padding_mask(TOKENS, 0) & functional.causal_mask(4)
    ours = functional.scaled_dot_product_attention(heads, heads, heads, visible)
    torch.testing.assert_close(ours.transpose(1, 2).flatten(2), theirs)


def test_invalid_arguments_raise() -> None:
    for length in (-1, 2.0, "a"):
        with pytest.raises(ValueError, match=r"length must be a whole number, 0 or more, not"):
            functional.causal_mask(length)
    with pytest.raises(TypeError, match=r"'tokens' \(position 1\) must be Tensor, not list"):
        functional.padding_mask([[1]], 0)
    with pytest.raises(TypeError, match=r"'pad_token' \(position 2\) must be int, not NoneType"):
        functional.padding_mask(TOKENS, None)
    assert torch.equal(
        functional.padding_mask(TOKENS, torch.tensor(0)), functional.padding_mask(TOKENS, 0)
    )
    for given in ((None, TOKENS), (TOKENS, None)):
        with pytest.raises(TypeError, match=r"'(key|value)' \(position [23]\) must be Tensor"):
            functional.scaled_dot_product_attention(TOKENS, *given)
    with pytest.raises(ValueError, match=r'true_means must be "visible" or "hidden", not .keep.'):
        functional.causal_mask(3, true_means="keep")
    with pytest.raises(ValueError, match="true_means"):
        functional.padding_mask(TOKENS, 0, true_means="True")
    with pytest.raises(ValueError, match=r"tokens must have shape \(batch, length\), not \[4\]"):
        functional.padding_mask(TOKENS[0], 0)


def _warned(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in caught]


@pytest.fixture
def nothing_seen() -> Iterator[None]:
    masks._looked_at.clear()
    yield
    masks._looked_at.clear()


#: Function or module -> the names of its mask arguments.
NAMED = {
    "sdpa": ("attn_mask",),
    "attention": ("attn_mask", "key_padding_mask"),
    "encoder layer": ("src_mask", "src_key_padding_mask"),
    "encoder": ("mask", "src_key_padding_mask"),
    "decoder layer": (
        "tgt_mask", "memory_mask", "tgt_key_padding_mask", "memory_key_padding_mask",
    ),
    "decoder": ("tgt_mask", "memory_mask", "tgt_key_padding_mask", "memory_key_padding_mask"),
}  # fmt: skip


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(("kind", "name"), [(k, n) for k in NAMED for n in NAMED[k]])
@pytest.mark.usefixtures("nothing_seen")
def test_float_masks_of_zeros_and_ones_warn_once(kind: str, name: str, training: bool) -> None:
    mask = torch.ones(B if "padding" in name else T, S if "memory" in name else T)
    mask[0, 1:] = 0
    if kind == "sdpa":
        run: Any = functional.scaled_dot_product_attention
        inputs: tuple[Tensor, ...] = (torch.randn(B, T, M),) * 3
    else:
        run = CASES[kind].make(nn).train(training).requires_grad_(training)
        inputs = CASES[kind].inputs()

    def call() -> None:
        with torch.set_grad_enabled(training):
            run(*inputs, **{name: mask})

    (message,) = _warned(call)
    assert message.startswith(f"{name} is a float mask that holds only 0 and 1")
    assert f"{name} != 0" in message
    assert _warned(call) == []


@pytest.mark.usefixtures("nothing_seen")
def test_other_masks_do_not_warn() -> None:
    x = torch.randn(1, 2, 4, 8)
    lower = torch.ones(4, 4).tril()
    for mask in (
        lower.bool(),
        torch.zeros(4, 4),
        (1 - lower) * -1e9,
        torch.zeros(4, 4).masked_fill(lower == 0, -torch.inf),
        lower + 0.5 * lower.T,
        lower.clone().requires_grad_(),
    ):
        masks._looked_at.clear()
        assert (
            _warned(lambda mask=mask: functional.scaled_dot_product_attention(x, x, x, mask)) == []
        )


@pytest.mark.thorough
@pytest.mark.usefixtures("nothing_seen")
def test_traced_programs_do_not_read_the_mask() -> None:
    x, mask = torch.randn(1, 2, 4, 8), torch.ones(4, 4).tril()

    def attend(x: Tensor, mask: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x, mask)

    with FakeTensorMode(allow_non_fake_inputs=True):
        assert _warned(lambda: attend(torch.empty(1, 2, 4, 8), torch.empty(4, 4))) == []
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert not any("float mask" in one for one in _warned(lambda: compiled(x, mask)))
    assert len(_warned(lambda: attend(x, mask))) == 1


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(5, 6), (1, 6), (2, 1, 5, 6), (1, 3, 1, 6), (2, 3, 5, 1)], ids=str
)
def test_masks_of_plain_calls_bypass_the_dispatcher(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = torch.float32 if dtype == torch.bool else dtype
    query, key, value = (torch.randn(2, 3, n, 8, dtype=of) for n in (5, 6, 6))
    visible = torch.rand(shape) > 0.3
    mask = visible if dtype == torch.bool else torch.zeros(shape).masked_fill(~visible, -1e9).to(of)
    attend = functional.scaled_dot_product_attention
    with fast_path.small_size_fallback(short=False):
        expected = attend(query, key, value, mask)
    if _native.autograd is not None:
        monkeypatch.setattr(attention, "general_attention", None)
    assert torch.equal(attend(query, key, value, mask), expected)


@pytest.mark.parametrize("shape", [(5, 7), (3, 5, 6), (4, 3, 5, 6), (1, 2, 3, 5, 6)], ids=str)
def test_other_masks_get_the_general_checks(shape: tuple[int, ...]) -> None:
    """These masks have a wrong size, or another number of dimensions."""
    query, key, value = (torch.randn(2, 3, n, 8) for n in (5, 6, 6))
    for mask in (torch.ones(shape, dtype=torch.bool), torch.randn(shape)):
        results = []
        for run in (functional.scaled_dot_product_attention, F.scaled_dot_product_attention):
            try:
                results.append(run(query, key, value, mask))
            except RuntimeError as error:
                results.append(type(error))
        ours, theirs = results
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(ours, theirs)
        else:
            assert ours == theirs
