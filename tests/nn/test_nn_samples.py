"""Runs the sample inputs of PyTorch's own tests, which its wheel contains, on this library."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_utils import CrossRefFakeMode
from torch.testing._internal import composite_compliance

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
from ops import ROWS
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db

from transformer_fast import _native, functional, nn, strict
from transformer_fast.testing import GRADIENT_FACTOR, OUTPUT_FACTOR

pytestmark = pytest.mark.sampled(0, 20)

MHA = "multi_head_attention_forward"
#: PyTorch's samples by module name. Not here: losses, which take no dtype (test_cross_entropy.py),
#: and embeddings, which take no floats (test_nn_embedding.py).
MODULES = {
    info.module_cls.__name__: info
    for info in module_db
    if info.module_cls in OURS
    and info.module_cls not in (torch.nn.CrossEntropyLoss, torch.nn.Embedding)
}
FUNCTIONS = {
    name: info
    for info in op_db
    if info.name.startswith("nn.")
    and ((name := info.name.rpartition(".")[2]) in functional.__all__ or name == MHA)
    and "cross_entropy" not in name
}
NAMES = [*MODULES, *FUNCTIONS]
#: Without Transformer: it is slow, and its parts are included.
PARTS = [name for name in NAMES if name != "Transformer"]
TAKE_MASKS = [
    name
    for name, info in MODULES.items()
    if any("mask" in x for x in inspect.signature(info.module_cls.forward).parameters)
]
#: Minimum number of samples in PyTorch, without gradients.
SAMPLES = {
    **dict.fromkeys(MODULES, 3),
    **dict.fromkeys(TAKE_MASKS, 7),
    **{"linear": 18, "scaled_dot_product_attention": 25, MHA: 192},
}


class Case(NamedTuple):
    """One sample: PyTorch's module or function, this library's with the same state, and the
    arguments."""

    theirs: Any
    ours: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: Reference implementation that the sample provides.
    reference: Callable[..., Any] | None = None


def multi_head_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, width: int, heads: int,
    in_proj_weight: Tensor | None, in_proj_bias: Tensor, bias_k: Tensor, bias_v: Tensor,
    add_zero_attn: bool, dropout_p: float, out_weight: Tensor, out_bias: Tensor, *,
    q_proj_weight: Tensor | None, k_proj_weight: Tensor | None, v_proj_weight: Tensor | None,
    attn_mask: Tensor | None, training: bool, use_separate_proj_weight: bool,
) -> Any:  # fmt: skip
    """PyTorch's function, computed by this library's module with these weights."""
    # A different kdim makes the module keep its weights separately.
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


def of_module(cls: type, sample: Any, dtype: torch.dtype, training: bool) -> Case:
    args, kwargs = sample.constructor_input.args, dict(sample.constructor_input.kwargs)
    if cls is torch.nn.TransformerEncoder:
        our_args = (to_ours(args[0]), *args[1:])
    else:
        our_args = args
        kwargs |= {"dtype": dtype}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
        theirs = cls(*args, **kwargs)
    ours = OURS[cls](*our_args, **kwargs)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    called = sample.forward_input
    modules = theirs.train(training), ours.train(training)
    return Case(*modules, called.args, dict(called.kwargs), sample.reference_fn)


def of_function(name: str, sample: Any) -> Case:
    """Disables dropout, which draws another pattern in this library."""
    args, kwargs = [sample.input, *sample.args], dict(sample.kwargs)
    if "dropout_p" in kwargs:
        kwargs["dropout_p"] = 0.0
    if name == MHA:
        args[10] = 0.0
    ours = multi_head_attention_forward if name == MHA else getattr(functional, name)
    return Case(getattr(torch.nn.functional, name), ours, tuple(args), kwargs)


def cases(name: str, dtype: torch.dtype, training: bool, grad: bool) -> list[Case]:
    torch.manual_seed(0)
    if name in FUNCTIONS:
        samples = FUNCTIONS[name].sample_inputs("cpu", dtype, requires_grad=grad)
        return [of_function(name, sample) for sample in samples]
    info = MODULES[name]
    samples = info.module_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=grad, training=training
    )
    return [of_module(info.module_cls, sample, dtype, training) for sample in samples]


def check(
    name: str,
    dtype: torch.dtype,
    training: bool,
    grad: bool,
    derive: Any = lambda called: called,
    change: Any = lambda ours: ours,
) -> None:
    """Asserts that the error is at most 2x PyTorch's on these samples (gradients: 3x), plus one
    rounding.

    The oracle is PyTorch in float64. For float64 itself, PyTorch's float32 error is scaled by the
    ratio of the two eps. ``change``: applied to this library's module or function.
    """
    # In inference, PyTorch's encoder returns zeros at padded positions; in training it does not. A
    # Transformer whose decoder may attend to them then computes other results.
    padded_inference = name == "Transformer" and not training and not grad
    rows = []
    with fast_path(not padded_inference):
        for case in cases(name, dtype, training, grad):
            theirs = case.theirs
            exact, single = theirs, theirs
            if name in MODULES:
                exact = copied(theirs).double()
                single = theirs if dtype == torch.float32 else copied(theirs).float()
            given = case.args, case.kwargs
            oracle = run(derive(exact), *cast(given, torch.float64), grad)
            errors = reference_error(derive(single), *cast(given, torch.float32), oracle)
            ours = run(derive(change(case.ours)), *given, grad)
            assert all(x.dtype == dtype for x in ours[0])
            rows.append((errors, ours, oracle))
    assert len(rows) >= (1 if grad and name == MHA else SAMPLES.get(name, 6))
    scale = EPS[dtype] / EPS[torch.float32]
    # Samples have a few dozen elements, so that PyTorch's error of one sample is a matter of chance.
    # If a softmax saturates, a gradient's rounding in float32 does not predict that in float64. So
    # the budget of gradients, and of results of functions, is the error of the worst sample.
    worst, worst_of_grads = (scale * max(row[0][column] for row in rows) for column in (0, 1))
    for errors, ours, oracle in rows:
        if derive is Tangents:  # derivatives have the budget of gradients
            check_budget(ours[0], None, oracle[0], GRADIENT_FACTOR, worst)
        else:
            unit = scale * errors[0] if name in MODULES else worst
            check_budget(ours[0], None, oracle[0], OUTPUT_FACTOR, unit)
        check_budget(ours[1], None, oracle[1], GRADIENT_FACTOR, worst_of_grads)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", NAMES)
def test_results_and_gradients(name: str, dtype: torch.dtype, training: bool) -> None:
    """Training runs with gradients; inference runs without, where PyTorch takes its fast path.

    In float32, kernels support every sample: the reference backend is forbidden.
    """
    with strict(dtype == torch.float32 and _native.module is not None):
        check(name, dtype, training, grad=training)


@pytest.mark.parametrize("name", [x for x in PARTS if x not in ROWS or ROWS[x].second_derivatives])
def test_second_derivatives(name: str) -> None:
    check(name, torch.float32, True, True, Differentiated)


@pytest.mark.parametrize("name", PARTS)
def test_forward_mode(name: str) -> None:
    check(name, torch.float32, True, False, Tangents)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", PARTS)
def test_fake_implementations(name: str, training: bool) -> None:
    """The fake of each operator, and of its backward, has the operator's shape, dtype
    and strides."""
    found = cases(name, torch.float32, training, grad=training)
    step = max(1, len(found) // 4)
    if name in FUNCTIONS:
        step = (16 if training else 8) if name == MHA else 3 if training else 1
    for case in found[::step]:
        with CrossRefFakeMode():
            run(case.ours, case.args, case.kwargs, training)


@pytest.mark.parametrize("name", ["layer_norm", "linear"])
def test_composite_compliance(name: str) -> None:
    """PyTorch's check of composite functions: tensor subclasses intercept all ops inside."""
    for case in cases(name, torch.float32, False, False):
        composite_compliance.check_with_mode(
            case.ours, case.args, case.kwargs, torch.testing.assert_close
        )


@pytest.mark.parametrize("name", MODULES)
def test_references_of_the_samples(name: str) -> None:
    """PyTorch's samples state that unbatched equals batched, and inference equals training."""
    checked = 0
    for training in (True, False):
        for case in cases(name, torch.float32, training, grad=False):
            if case.reference is not None:
                expected = case.reference(case.ours, *case.args, **case.kwargs)
                torch.testing.assert_close(case.ours(*case.args, **case.kwargs), expected)
                checked += 1
    if name in ("LayerNorm", "TransformerEncoder"):
        assert checked == 0
    else:
        assert checked >= (60 if name in TAKE_MASKS else 6)


def test_pytorch_layers_in_an_encoder_of_this_library() -> None:
    for case in cases("TransformerEncoder", torch.float32, training=False, grad=False):
        layer = case.theirs.layers[0]
        ours = nn.TransformerEncoder(layer, 2)
        ours.load_state_dict(case.theirs.state_dict())
        ours.eval()
        assert type(ours.layers[0]) is torch.nn.TransformerEncoderLayer
        torch.testing.assert_close(
            ours(*case.args, **case.kwargs), case.theirs(*case.args, **case.kwargs)
        )
