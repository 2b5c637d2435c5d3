"""PyTorch's own module samples (they ship in its wheel), run against our classes."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("expecttest", reason="torch.testing._internal needs expecttest")
from module_checks import (
    EPS,
    OURS,
    Differentiated,
    Tangents,
    cast,
    check_budget,
    copied,
    fast_path,
    reference_error,
    run,
    to_ours,
)
from torch._subclasses.fake_utils import CrossRefFakeMode
from torch.testing._internal.common_modules import module_db

from transformer_fast import _native, strict
from transformer_fast.nn import masks
from transformer_fast.testing import GRADIENT_FACTOR

#: Losses take no dtype and embeddings no floats: test_cross_entropy.py and test_nn_embedding.py
#: have them.
INFOS = {
    info.module_cls: info
    for info in module_db
    if info.module_cls in OURS
    and info.module_cls not in (torch.nn.CrossEntropyLoss, torch.nn.Embedding)
}


def takes_masks(cls: type) -> bool:
    return any("mask" in name for name in inspect.signature(cls.forward).parameters)


class Case:
    """One sample: torch's module, ours with the same state, and the arguments."""

    def __init__(self, cls: type, sample: Any, dtype: torch.dtype, training: bool) -> None:
        args, kwargs = sample.constructor_input.args, dict(sample.constructor_input.kwargs)
        if cls is torch.nn.TransformerEncoder:
            our_args = (to_ours(args[0]), *args[1:])
        else:
            our_args = args
            kwargs |= {"dtype": dtype}
        self.dtype = dtype
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
            self.theirs = cls(*args, **kwargs)
        self.ours = OURS[cls](*our_args, **kwargs)
        self.ours.load_state_dict(self.theirs.state_dict(), strict=True)
        self.theirs.load_state_dict(self.ours.state_dict(), strict=True)
        self.ours.train(training)
        self.theirs.train(training)
        self.oracle = copied(self.theirs).double()
        self.args, self.kwargs = sample.forward_input.args, dict(sample.forward_input.kwargs)
        self.reference = sample.reference_fn


def cases(cls: type, dtype: torch.dtype, training: bool, grad: bool) -> list[Case]:
    torch.manual_seed(0)
    info = INFOS[cls]
    samples = info.module_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=grad, training=training
    )
    return [Case(cls, sample, dtype, training) for sample in samples]


def results(found: list[Case], grad: bool, derive: Any) -> list[Any]:
    """For each case the errors of torch in fp32, our results and the oracle's."""
    rows = []
    for case in found:
        exact = cast(case.args, torch.float64), cast(case.kwargs, torch.float64)
        oracle = run(derive(case.oracle), *exact, grad)
        errors = reference_error(
            derive(case.theirs if case.dtype == torch.float32 else copied(case.theirs).float()),
            cast(case.args, torch.float32),
            cast(case.kwargs, torch.float32),
            oracle,
        )
        ours = run(derive(case.ours), case.args, case.kwargs, grad)
        assert all(t.dtype == case.dtype for t in ours[0])
        rows.append((errors, ours, oracle))
    return rows


def check(
    cls: type,
    dtype: torch.dtype,
    training: bool,
    grad: bool,
    derive: Any = lambda module: module,
) -> None:
    """Ours errs at most 2x (gradients 3x) what torch does on these samples, plus one rounding.

    The oracle is torch in fp64. For fp64 itself torch's fp32 error is scaled by the two eps.
    """
    # Torch's inference gives zeros at padded places of an encoder's output, its training does not;
    # a Transformer whose decoder may look at them then computes something else.
    padded_inference = cls is torch.nn.Transformer and not training and not grad
    with fast_path(not padded_inference):
        rows = results(cases(cls, dtype, training, grad), grad, derive)
    assert len(rows) >= (7 if takes_masks(cls) else 3)
    scale = EPS[dtype] / EPS[torch.float32]
    # Where a softmax saturates, a gradient's rounding in fp32 tells nothing of that in fp64, so
    # gradients are held to the worst sample.
    worst, worst_of_grads = (max(row[0][column] for row in rows) for column in (0, 1))
    for errors, ours, oracle in rows:
        if derive is Tangents:  # derivatives have the budget of gradients
            check_budget(ours[0], None, oracle[0], GRADIENT_FACTOR, scale * worst)
        else:
            check_budget(ours[0], None, oracle[0], unit=scale * errors[0])
        check_budget(ours[1], None, oracle[1], GRADIENT_FACTOR, scale * worst_of_grads)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("cls", INFOS, ids=lambda cls: cls.__name__)
def test_same_numbers(cls: type, dtype: torch.dtype, training: bool) -> None:
    """Training with gradients, inference without (where torch takes its fast path)."""
    check(cls, dtype, training, grad=training)


@pytest.mark.skipif(_native.module is None, reason=str(_native.why_not))
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("cls", INFOS, ids=lambda cls: cls.__name__)
def test_kernels_take_every_sample(cls: type, training: bool) -> None:
    """In fp32, with the reference forbidden."""
    with strict():
        check(cls, torch.float32, training, grad=training)


@pytest.mark.parametrize("cls", [c for c in INFOS if c is not torch.nn.Transformer])
def test_second_derivatives(cls: type) -> None:
    check(cls, torch.float32, True, True, Differentiated)


@pytest.mark.parametrize("cls", [c for c in INFOS if c is not torch.nn.Transformer])
def test_forward_mode(cls: type) -> None:
    check(cls, torch.float32, True, False, Tangents)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("cls", [c for c in INFOS if c is not torch.nn.Transformer])
def test_fakes(cls: type, training: bool) -> None:
    """Every operator's fake has the shape, dtype and strides of what the operator makes."""
    found = cases(cls, torch.float32, training, grad=training)
    for case in found[:: max(1, len(found) // 4)]:
        with CrossRefFakeMode():
            run(case.ours, case.args, case.kwargs, training)


@pytest.mark.parametrize("cls", [*filter(takes_masks, INFOS)])
def test_a_flipped_mask_fails(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    right = masks.combine

    def flipped(attn_mask: Any, key_padding_mask: Any, *sizes: int) -> Any:
        if key_padding_mask is not None and key_padding_mask.dtype == torch.bool:
            key_padding_mask = ~key_padding_mask
        return right(attn_mask, key_padding_mask, *sizes)

    monkeypatch.setattr(masks, "combine", flipped)
    with pytest.raises(AssertionError):
        check(cls, torch.float32, training=False, grad=False)


@pytest.mark.parametrize("cls", INFOS, ids=lambda cls: cls.__name__)
def test_the_samples_own_references(cls: type) -> None:
    """Unbatched equals batched, and inference equals training, as torch's samples state it."""
    checked = 0
    for training in (True, False):
        for case in cases(cls, torch.float32, training, grad=False):
            if case.reference is None:
                continue
            expected = case.reference(case.ours, *case.args, **case.kwargs)
            output = case.ours(*case.args, **case.kwargs)
            torch.testing.assert_close(output, expected)
            checked += 1
    if cls in (torch.nn.LayerNorm, torch.nn.TransformerEncoder):
        assert checked == 0
    else:
        assert checked >= (60 if takes_masks(cls) else 6)


def test_torch_layers_in_our_encoder() -> None:
    for case in cases(torch.nn.TransformerEncoder, torch.float32, training=False, grad=False):
        layer = case.theirs.layers[0]
        ours = OURS[torch.nn.TransformerEncoder](layer, 2)
        ours.load_state_dict(case.theirs.state_dict())
        ours.eval()
        assert type(ours.layers[0]) is torch.nn.TransformerEncoderLayer
        torch.testing.assert_close(
            ours(*case.args, **case.kwargs), case.theirs(*case.args, **case.kwargs)
        )
