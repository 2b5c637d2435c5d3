"""PyTorch's own samples of functions (they ship in its wheel), run against ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_utils import CrossRefFakeMode
from torch.testing._internal import composite_compliance

pytest.importorskip("expecttest", reason="torch.testing._internal needs expecttest")
from module_checks import EPS, Differentiated, Tangents, cast, check_budget, relative_error, run
from ops import ROWS
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_map

from transformer_fast import _native, nn, strict
from transformer_fast import functional as F
from transformer_fast.testing import GRADIENT_FACTOR, OUTPUT_FACTOR

MHA = "multi_head_attention_forward"


def multi_head_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, width: int, heads: int,
    in_proj_weight: Tensor | None, in_proj_bias: Tensor, bias_k: Tensor, bias_v: Tensor,
    add_zero_attn: bool, dropout_p: float, out_weight: Tensor, out_bias: Tensor, *,
    q_proj_weight: Tensor | None, k_proj_weight: Tensor | None, v_proj_weight: Tensor | None,
    attn_mask: Tensor | None, training: bool, use_separate_proj_weight: bool,
) -> Any:  # fmt: skip
    """Torch's function, as our module with these weights."""
    # Of a kdim of its own, so that the module has its weights apart.
    kdim = width + 1 if use_separate_proj_weight else None
    module = nn.MultiheadAttention(
        width, heads, dropout_p, add_bias_kv=True, add_zero_attn=add_zero_attn, kdim=kdim
    )
    weights = {
        "in_proj_weight": in_proj_weight,
        "q_proj_weight": q_proj_weight,
        "k_proj_weight": k_proj_weight,
        "v_proj_weight": v_proj_weight,
        "in_proj_bias": in_proj_bias,
        "bias_k": bias_k.view(1, 1, -1),
        "bias_v": bias_v.view(1, 1, -1),
        "out_proj.weight": out_weight,
        "out_proj.bias": out_bias,
    }
    given = {name: weight for name, weight in weights.items() if weight is not None}
    assert given.keys() == dict(module.named_parameters()).keys()
    return torch.func.functional_call(
        module.train(training), given, (query, key, value), {"attn_mask": attn_mask}
    )


INFOS = {info.name.rpartition(".")[2]: info for info in op_db if info.name.startswith("nn.")}
#: Of PyTorch's functions those that ours take the place of. test_cross_entropy.py has losses.
OURS: dict[str, Callable[..., Any]] = {
    name: getattr(F, name) for name in F.__all__ if name in INFOS and "cross_entropy" not in name
}
OURS |= {MHA: multi_head_attention_forward}
#: How many samples torch has at least (without gradients).
SAMPLES = {"linear": 18, "scaled_dot_product_attention": 25, MHA: 192}
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def samples(name: str, dtype: torch.dtype, grad: bool) -> list[Arguments]:
    """Without dropout, which draws other elements in ours."""
    torch.manual_seed(0)
    found = []
    for sample in INFOS[name].sample_inputs("cpu", dtype, requires_grad=grad):
        args, kwargs = [sample.input, *sample.args], dict(sample.kwargs)
        if "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        if name == MHA:
            args[10] = 0.0
        found.append((tuple(args), kwargs))
    return found


def nudged(sample: Arguments) -> Any:
    """In fp64, every value off by half of fp32's eps, up or down."""
    generator = torch.Generator().manual_seed(0)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        sign = torch.randint(2, leaf.shape, generator=generator) * 2 - 1
        moved = leaf.detach() * (1 + EPS[torch.float32] / 2 * sign.double())
        return moved.requires_grad_(leaf.requires_grad)

    return tree_map(one, cast(sample, torch.float64))


def check(
    name: str,
    dtype: torch.dtype,
    grad: bool,
    ours: Callable[..., Any],
    derive: Callable[..., Any] = lambda function: function,
) -> None:
    """Ours errs at most 2x (gradients 3x) what torch does on these samples, plus one rounding.

    The oracle is torch in fp64. Samples have a few dozen elements, so torch's error of one of them
    is a matter of luck, and of the machine: ours is held to torch's worst, which counts as at least
    what a rounding of the inputs makes of the true results. For fp64 it is scaled by the two eps.
    """
    theirs, ours = derive(getattr(torch.nn.functional, name)), derive(ours)
    rows = []
    for sample in samples(name, dtype, grad):
        oracle = run(theirs, *cast(sample, torch.float64), grad)
        found = run(theirs, *cast(sample, torch.float32), grad)
        moved = run(theirs, *nudged(sample), grad)
        got = run(ours, *sample, grad)
        assert all(x.dtype == dtype for x in got[0])
        errors = [
            max(relative_error(x, true), relative_error(y, true))
            for x, y, true in zip(found, moved, oracle, strict=True)
        ]
        rows.append((errors, got, oracle))
    assert len(rows) >= (1 if grad and name == MHA else SAMPLES.get(name, 6))
    scale = EPS[dtype] / EPS[torch.float32]
    for column, factor in enumerate((OUTPUT_FACTOR, GRADIENT_FACTOR)):
        unit = scale * max(errors[column] for errors, *_ in rows)
        for _, got, oracle in rows:
            check_budget(got[column], None, oracle[column], factor, unit)


@pytest.mark.parametrize("grad", [True, False], ids=["gradients", "inference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", OURS)
def test_same_numbers(name: str, dtype: torch.dtype, grad: bool) -> None:
    check(name, dtype, grad, OURS[name])


@pytest.mark.skipif(_native.module is None, reason=str(_native.why_not))
@pytest.mark.parametrize("grad", [True, False], ids=["gradients", "inference"])
@pytest.mark.parametrize("name", OURS)
def test_kernels_take_every_sample(name: str, grad: bool) -> None:
    """In fp32, with the reference forbidden."""
    with strict():
        check(name, torch.float32, grad, OURS[name])


@pytest.mark.parametrize("name", [x for x in OURS if x not in ROWS or ROWS[x].second_derivatives])
def test_second_derivatives(name: str) -> None:
    check(name, torch.float32, True, OURS[name], Differentiated)


@pytest.mark.parametrize("name", OURS)
def test_forward_mode(name: str) -> None:
    check(name, torch.float32, False, OURS[name], Tangents)


@pytest.mark.parametrize("name", OURS)
def test_fakes(name: str) -> None:
    """Every operator's fake has the shape, dtype and strides of what the operator makes."""
    for args, kwargs in samples(name, torch.float32, False)[:: 8 if name == MHA else 1]:
        with CrossRefFakeMode():
            run(OURS[name], args, kwargs, False)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", OURS)
def test_fakes_with_gradients(name: str) -> None:
    """The same of every operator of the backward."""
    for sample in samples(name, torch.float32, True)[:: 16 if name == MHA else 3]:
        with CrossRefFakeMode():
            run(OURS[name], *sample, True)


@pytest.mark.parametrize("name", ["layer_norm", "linear"])
def test_composite_compliance(name: str) -> None:
    """PyTorch's check of functions made of others: subclasses reach what they are made of."""
    for args, kwargs in samples(name, torch.float32, False):
        composite_compliance.check_with_mode(OURS[name], args, kwargs, torch.testing.assert_close)


@pytest.mark.parametrize("name", ["scaled_dot_product_attention", MHA])
def test_a_forgotten_mask_fails(name: str) -> None:
    def forgetful(*args: Any, **kwargs: Any) -> Any:
        without = {"attn_mask": None} if name == MHA else {"attn_mask": None, "is_causal": False}
        return OURS[name](*args, **{**kwargs, **without})

    with pytest.raises(AssertionError):
        check(name, torch.float32, False, forgetful)
