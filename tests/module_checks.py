"""The error budget of whole modules: our error against fp64, relative to PyTorch's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from transformer_fast import nn
from transformer_fast.measure.cases import fast_path as fast_path
from transformer_fast.testing import GRADIENT_FACTOR, OUTPUT_FACTOR, parity

EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}
OURS: dict[type, type] = {
    getattr(torch.nn, name): getattr(nn, name)
    for name in nn._OURS
    if isinstance(getattr(nn, name), type)
}


def to_ours(theirs: torch.nn.Module) -> torch.nn.Module:
    """Returns a copy whose modules have our classes where they exist."""
    ours = copy.deepcopy(theirs)
    for module in ours.modules():
        module.__class__ = OURS.get(type(module), type(module))
    return ours


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """Converts the floating-point tensors of a tree to leaves of another dtype."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf.detach().to(dtype, copy=True).requires_grad_(leaf.requires_grad)
        return leaf

    return tree_map(one, tree)


def copied(module: torch.nn.Module) -> torch.nn.Module:
    """Returns a deep copy, with the same activations."""
    copy_ = copy.deepcopy(module)
    for layer in copy_.modules():
        # Copies of PyTorch's decoder layers replace an activation module by relu.
        if "activation" in layer._modules:
            layer.__dict__.pop("activation", None)
    return copy_


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _flat(tree: Any) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors(tree)])


def relative_error(got: Any, oracle: Any) -> float:
    """Returns the largest error of any tensor, relative to the largest value of all oracles."""
    assert [x.shape for x in tensors(got)] == [x.shape for x in tensors(oracle)]
    return parity.relative_error(_flat(got), _flat(oracle)) if tensors(oracle) else 0.0


def check_budget(
    got: Any, expected: Any, oracle: Any, factor: float = OUTPUT_FACTOR, unit: float = 0.0
) -> None:
    """Checks tensors against the error budget; sizes are the maximum over all of them.

    ``expected``: the reference's results in the same dtype. If None, ``unit`` is its error.
    """
    if not tensors(oracle):
        assert not tensors(got)
        return
    if expected is None:
        expected = [x.to(y.dtype) for x, y in zip(tensors(oracle), tensors(got), strict=True)]
    for one in (got, expected):
        assert [x.shape for x in tensors(one)] == [x.shape for x in tensors(oracle)]
        assert [x.dtype for x in tensors(one)] == [x.dtype for x in tensors(got)]
    results = (_flat(tree) for tree in (got, expected, oracle))
    found = parity.compare("result", *results, factor, unit)
    assert found.ok, str(found)


def gradients(output: Any, inputs: list[Tensor], create_graph: bool = False) -> list[Tensor]:
    """Returns the gradients of a fixed linear function of all outputs."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors(output):
        weight = torch.linspace(0.5, 1.5, tensor.numel(), dtype=torch.float64)
        total = total + (tensor.double() * weight.reshape(tensor.shape)).sum()
    found = torch.autograd.grad(total, inputs, allow_unused=True, create_graph=create_graph)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]


class Differentiated(torch.nn.Module):
    """Returns the gradients of a module or function in place of its outputs."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        wanted = [t for t in (*tensors((args, kwargs)), *self.parameters()) if t.requires_grad]
        with sdpa_kernel(SDPBackend.MATH):  # PyTorch's only implementation with second derivatives
            return gradients(self.function(*args, **kwargs), wanted, create_graph=True)


class Tangents(torch.nn.Module):
    """Returns the directional derivatives of a module's or function's outputs.

    There is one direction, in the space of inputs and parameters.
    """

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        def dual(leaf: Any) -> Any:
            if not (isinstance(leaf, Tensor) and leaf.is_floating_point()):
                return leaf
            along = torch.linspace(0.5, 1.5, leaf.numel(), dtype=torch.float64).to(leaf.dtype)
            return forward_ad.make_dual(leaf.detach(), along.reshape(leaf.shape))

        with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH), fast_path(False):
            given = tree_map(dual, args), tree_map(dual, kwargs)
            if isinstance(self.function, torch.nn.Module):
                own = tree_map(dual, dict(self.function.named_parameters()))
                found = torch.func.functional_call(self.function, own, *given)
            else:
                found = self.function(*given[0], **given[1])
            return [forward_ad.unpack_dual(y).tangent for y in tensors(found)]


def run(module: Any, args: Any, kwargs: Any, grad: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Returns outputs of a module or function and, if requested, gradients of inputs and
    parameters.
    """
    if not grad:
        with torch.no_grad():
            return tensors(module(*args, **kwargs)), []
    output = module(*args, **kwargs)
    parameters = module.parameters() if isinstance(module, torch.nn.Module) else ()
    wanted = [t for t in (*tensors((args, kwargs)), *parameters) if t.requires_grad]
    assert wanted
    return [t.detach() for t in tensors(output)], gradients(output, wanted)


def _jitter(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Moves each element at random by one rounding step up or down, or not at all."""
    sign = torch.randint(-1, 2, tensor.shape, generator=generator)
    moved = tensor.detach() * (1 + sign * torch.finfo(tensor.dtype).eps).to(tensor.dtype)
    return moved.requires_grad_(tensor.requires_grad)


def reference_error(
    theirs: Any, args: Any, kwargs: Any, oracle: tuple[list[Tensor], list[Tensor]]
) -> tuple[float, float]:
    """Returns PyTorch's error in outputs and in gradients (if the oracle has any).

    On tensors of a few dozen elements, some of them ill-conditioned, the error of one call is a
    matter of luck. The result is therefore the worst of several calls: one with the given values,
    others with inputs and parameters that are off by one rounding.
    """
    generator = torch.Generator().manual_seed(0)
    outputs = grads = 0.0
    own = theirs.parameters() if isinstance(theirs, torch.nn.Module) else ()
    kept = [(parameter, parameter.detach().clone()) for parameter in own]
    try:
        for draw in range(4):
            given = args
            if draw:
                _write((parameter, _jitter(values, generator)) for parameter, values in kept)
                moved = {
                    id(x): _jitter(x, generator) for x in tensors(args) if x.is_floating_point()
                }
                given = tree_map(lambda x: moved.get(id(x), x), args)  # noqa: B023
            found, found_grads = run(theirs, given, kwargs, grad=bool(oracle[1]))
            outputs = max(outputs, relative_error(found, oracle[0]))
            grads = max(grads, relative_error(found_grads, oracle[1]))
    finally:
        _write(kept)
    return outputs, grads


@torch.no_grad()
def _write(values: Iterable[tuple[Tensor, Tensor]]) -> None:
    for parameter, value in values:
        parameter.copy_(value)


def assert_close(ours: torch.nn.Module, theirs: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """Checks that results in inference match those of PyTorch's module."""
    exact = cast(args, torch.float64), cast(kwargs, torch.float64)
    oracle = run(copied(theirs).double(), *exact, grad=False)
    allowed, _ = reference_error(theirs, args, kwargs, oracle)
    got, _ = run(ours, args, kwargs, grad=False)
    assert all(x.dtype == args[0].dtype for x in got)
    check_budget(got, None, oracle[0], unit=allowed)


def assert_same_numbers(ours: Any, theirs: Any, args: Any, kwargs: Any, grad: bool) -> None:
    """Checks that results and, if requested, gradients match those of PyTorch's module or function."""
    exact = cast(args, torch.float64), cast(kwargs, torch.float64)
    in_double = copied(theirs).double() if isinstance(theirs, torch.nn.Module) else theirs
    oracle = run(in_double, *exact, grad)
    expected, got = run(theirs, args, kwargs, grad), run(ours, args, kwargs, grad)
    check_budget(got, expected, oracle, GRADIENT_FACTOR)


def error_of(call: Callable[[], Any]) -> tuple[type, str]:
    """Returns the type and the message of the exception that the call raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - compared with the other call's
        call()
    return caught.type, str(caught.value)


def attention_pair(
    width: int, heads: int, **kwargs: Any
) -> tuple[torch.nn.MultiheadAttention, torch.nn.MultiheadAttention]:
    """Returns PyTorch's module and ours, with equal parameters, none of them zero."""
    theirs = torch.nn.MultiheadAttention(width, heads, **kwargs)
    with torch.no_grad():
        # biases are initialised to zero, which would hide errors
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.5)
    ours = to_ours(theirs)
    assert isinstance(ours, nn.MultiheadAttention)
    return theirs, ours
