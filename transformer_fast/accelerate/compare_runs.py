"""Running a model without leaving a trace, and comparing two runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


class Inputs(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Run(NamedTuple):
    """What a run gave: outputs, and the gradients of inputs and parameters (None: not computed)."""

    outputs: list[Tensor]
    grads: list[Tensor] | None


def _is_real(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _is_variable(leaf: Any) -> bool:
    """Whether a gradient makes sense: not of masks with their infinities."""
    return _is_real(leaf) and not bool(leaf.isinf().any())


def forward_only(model: torch.nn.Module, inputs: Inputs) -> Run:
    """The outputs without gradients, of the model as it stands."""
    with torch.no_grad():
        args, kwargs = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, tuple(inputs))
        outputs = model(*args, **kwargs)
    return Run([x.clone() for x in tree_leaves(outputs) if _is_real(x)], None)


def with_gradients(
    model: torch.nn.Module, inputs: Inputs, jitter: torch.Generator | None = None
) -> Run:
    """Outputs and gradients, on copies of parameters and buffers.

    ``jitter``: every parameter and input moves by at most one rounding, up or down, at random.
    """

    def leaf(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if not _is_variable(x):
            return x.detach().clone()
        moved = x.detach().clone()
        if jitter is not None:
            sign = torch.randint(-1, 2, x.shape, generator=jitter).to(x.device)
            moved *= (1 + sign * torch.finfo(x.dtype).eps).to(x.dtype)
        return moved.requires_grad_()

    state: dict[str, Tensor] = {n: leaf(p) for n, p in model.named_parameters()}
    wanted = [t for t in state.values() if t.requires_grad]
    state |= {n: b.detach().clone() for n, b in model.named_buffers()}
    args, kwargs = tree_map(leaf, tuple(inputs))
    wanted += [x for x in tree_leaves((args, kwargs)) if _is_variable(x)]
    with torch.enable_grad():
        # In-place operations on inputs are allowed on copies of leaves only.
        args, kwargs = tree_map(lambda x: x * 1 if _is_variable(x) else x, (args, kwargs))
        found = torch.func.functional_call(model, state, args, kwargs)
        outputs = [x for x in tree_leaves(found) if _is_real(x)]
        total = sum((_weighted(x) for x in outputs if x.requires_grad), torch.zeros(()))
    grads = None
    if isinstance(total, Tensor) and total.requires_grad:
        got = torch.autograd.grad(total, wanted, allow_unused=True)
        grads = [torch.zeros_like(w) if g is None else g for g, w in zip(got, wanted, strict=True)]
    return Run([x.detach() for x in outputs], grads)


def _weighted(x: Tensor) -> Tensor:
    """A sum in which every element counts differently, so that no two gradients cancel."""
    weight = torch.linspace(0.5, 1.5, x.numel(), dtype=torch.float32, device=x.device)
    # A NaN of a row that sees nothing would make all gradients NaN.
    return (torch.where(x.isfinite(), x, 0.0).float() * weight.view(x.shape)).sum().cpu()


def difference(before: Run, after: Run, moved: list[Run]) -> str | None:
    """In what ``after`` differs from ``before`` by more than rounding explains, or None.

    Rounding is what moves ``before`` itself if its inputs are in doubt by one rounding (``moved``);
    ten times that is allowed. Where ``before`` has NaN, anything goes: rows that see nothing.
    """
    told = _compare("outputs", before.outputs, after.outputs, [m.outputs for m in moved])
    if told is None and before.grads is not None and after.grads is not None:
        grads = [m.grads for m in moved if m.grads is not None]
        told = _compare("gradients", before.grads, after.grads, grads)
    return told


def _compare(
    what: str, before: list[Tensor], after: list[Tensor], moved: list[list[Tensor]]
) -> str | None:
    shapes = [[(tuple(t.shape), t.dtype) for t in side] for side in (before, after)]
    if shapes[0] != shapes[1]:
        return f"{what} have other shapes or dtypes"
    sizes = [_largest(t) for t in before]
    if before and not any(bool(t.isfinite().any()) for t in before if t.numel()):
        return f"{what} of the model as it was are all NaN or infinite"
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        known = old.isfinite()
        error = _largest(torch.where(known, new - old, 0.0))
        noise = max((_largest(torch.where(known, m[index] - old, 0.0)) for m in moved), default=0.0)
        allowed = 10 * noise + 10 * _eps(old) * max(sizes)
        if not error <= allowed:
            return f"{what} differ by {error:.2g}, and rounding explains {allowed:.2g}"
    return None


def _largest(x: Tensor) -> float:
    """The largest absolute value; inf if something that should be finite is not."""
    if not x.numel():
        return 0.0
    largest = x.detach().abs().nan_to_num(nan=float("inf")).max().item()
    return float(largest)


def _eps(x: Tensor) -> float:
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    return max(torch.finfo(dtype).eps, torch.finfo(x.dtype).eps)


@contextmanager
def no_trace(model: torch.nn.Module) -> Iterator[None]:
    """Afterwards buffers, training flags, random numbers and torch's fast path are as they were."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    flags = [(module, module.training) for module in model.modules()]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    devices = {t.device for t in model.parameters() if t.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        try:
            # Torch's inference path gives zeros at padded places in some modes; its other one is
            # the one to compare with.
            torch.backends.mha.set_fastpath_enabled(False)
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            for module, training in flags:
                module.training = training
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    if name in buffers and not torch.equal(buffer, buffers[name]):
                        buffer.copy_(buffers[name])


@contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Every probability of dropping something that a module keeps as an attribute is 0."""
    with ExitStack() as stack:
        for module in model.modules():
            is_dropout = isinstance(module, torch.nn.modules.dropout._DropoutNd)
            for name, value in list(module.__dict__.items()):
                if type(value) is float and ("drop" in name or (is_dropout and name == "p")):
                    stack.callback(module.__dict__.__setitem__, name, value)
                    module.__dict__[name] = 0.0
        yield
