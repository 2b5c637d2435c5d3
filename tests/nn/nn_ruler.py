"""The error budget of whole modules: ours against fp64, measured by torch's own error there."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from transformer_fast import nn

OURS: dict[type, type] = {
    getattr(torch.nn, name): getattr(nn, name)
    for name in (
        "LayerNorm",
        "MultiheadAttention",
        "TransformerEncoderLayer",
        "TransformerDecoderLayer",
        "TransformerEncoder",
        "TransformerDecoder",
        "Transformer",
    )
}


def to_ours(theirs: torch.nn.Module) -> torch.nn.Module:
    """A copy whose modules are ours wherever we have the class."""
    ours = copy.deepcopy(theirs)
    for module in ours.modules():
        module.__class__ = OURS.get(type(module), type(module))
    return ours


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """The floating-point tensors of a tree as leaves of another dtype."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf.detach().to(dtype, copy=True).requires_grad_(leaf.requires_grad)
        return leaf

    return tree_map(one, tree)


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def relative_error(got: list[Tensor], oracle: list[Tensor]) -> float:
    """The largest error of any tensor, against the largest value of all oracles."""
    assert len(got) == len(oracle)
    error = size = 0.0
    for one, true in zip(got, oracle, strict=True):
        assert one.shape == true.shape, f"{list(one.shape)} instead of {list(true.shape)}"
        assert torch.isfinite(true).all()
        assert torch.isfinite(one).all()
        if true.numel():
            error = max(error, (one.double() - true).abs().max().item())
            size = max(size, true.abs().max().item())
    return error / size if error else 0.0


def gradients(output: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Gradients of a fixed linear function of all outputs."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors(output):
        weight = torch.linspace(0.5, 1.5, tensor.numel(), dtype=torch.float64)
        total = total + (tensor.double() * weight.reshape(tensor.shape)).sum()
    found = torch.autograd.grad(total, inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]


def run(
    module: torch.nn.Module, args: Any, kwargs: Any, grad: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients of inputs and parameters (if wanted)."""
    if not grad:
        with torch.no_grad():
            return tensors(module(*args, **kwargs)), []
    output = module(*args, **kwargs)
    wanted = [t for t in (*tensors((args, kwargs)), *module.parameters()) if t.requires_grad]
    return [t.detach() for t in tensors(output)], gradients(output, wanted)


def assert_close(ours: torch.nn.Module, theirs: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """Same numbers as torch's module: at most twice its error against fp64, plus one rounding.

    On tensors of a few dozen elements one call's error is a matter of luck, so both are measured as
    the worst of several calls whose inputs differ by a factor, and so in how they round.
    """
    exact = copy.deepcopy(theirs).double()
    allowed = error = 0.0
    for factor in (1.0, 0.9, 1.1, 1.2):
        scaled = _scaled(args, factor)
        oracle, _ = run(exact, cast(scaled, torch.float64), cast(kwargs, torch.float64), grad=False)
        expected, _ = run(theirs, scaled, kwargs, grad=False)
        got, _ = run(ours, scaled, kwargs, grad=False)
        assert [x.dtype for x in got] == [x.dtype for x in expected]
        allowed = max(allowed, relative_error(expected, oracle))
        error = max(error, relative_error(got, oracle))
    assert error <= 2 * allowed + torch.finfo(got[0].dtype).eps


def _scaled(args: tuple[Tensor, ...], factor: float) -> tuple[Tensor, ...]:
    """The tensors times ``factor``; what was one tensor stays one."""
    made = {id(x): x * factor for x in args}
    return tuple(made[id(x)] for x in args)
