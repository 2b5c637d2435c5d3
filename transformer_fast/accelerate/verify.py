"""The check behind ``accelerate(model, verify=...)``: the model before and after, on examples."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .classes import Change, undone
from .report import Report


class Inputs(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Run(NamedTuple):
    """What a run gave: outputs, and the gradients of inputs and parameters (None: not computed)."""

    outputs: list[Tensor]
    grads: list[Tensor] | None


#: A layer's padding mask, and the argument whose keys it is about.
_PADDING = {
    "key_padding_mask": "key",
    "src_key_padding_mask": "src",
    "tgt_key_padding_mask": "tgt",
    "memory_key_padding_mask": "memory",
}


def verify_changes(
    model: torch.nn.Module, changes: Sequence[Change], example: Any, report: Report
) -> None:
    """Compare the model with ``changes`` (which are applied) and without; tell the report."""
    inputs = _inputs(example)
    inner: Any = model
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        inner = model.module  # gradients of copies are no business of the other processes
    problems: list[str] = []
    with _no_trace(inner), _zeros_at_padding(changes):
        calls: dict[str, tuple[torch.nn.Module, Inputs]] = {}
        for mode in ("inference", "evaluation", "training"):
            told = _compare_model(inner, changes, inputs, mode, calls, report)
            if told is not None:
                problems.append(f"{mode}: {told}")
        for name, (module, seen) in calls.items():
            told = _compare_padded(module, changes, seen)
            if told is not None:
                problems.append(f"{name} with padding: {told}")
    report.verified = not problems
    for problem in problems:
        report.notes.append(f"Verify, {problem}.")
    if problems:
        told = "; ".join(problems)
        warnings.warn(
            f"accelerate changed the model's numbers and was taken back ({told})", stacklevel=4
        )


def _inputs(example: Any) -> Inputs:
    if isinstance(example, tuple):
        return Inputs(example, {})
    if isinstance(example, dict):
        return Inputs((), example)
    if isinstance(example, Tensor):
        return Inputs((example,), {})
    raise TypeError(
        "verify must be a tuple of positional arguments, a dict of keyword arguments or a tensor, "
        f"not {type(example).__name__}"
    )


def _compare_model(
    model: torch.nn.Module,
    changes: Sequence[Change],
    inputs: Inputs,
    mode: str,
    calls: dict[str, tuple[torch.nn.Module, Inputs]],
    report: Report,
) -> str | None:
    model.train(mode == "training")
    generator = torch.Generator().manual_seed(0)

    def run(jitter: torch.Generator | None = None) -> Run:
        torch.manual_seed(0)
        if mode == "inference" and jitter is None:
            return _forward_only(model, inputs)
        return _with_gradients(model, inputs, jitter)

    with _without_dropout(model):
        after = run()
        with undone(changes):
            with _recording(changes, calls if mode == "inference" else None):
                before = run()
            if mode == "training" and _is_random(model, inputs, before):
                report.notes.append(
                    "Verify: the model draws random numbers in train mode, which was therefore "
                    "not compared."
                )
                return None
            moved = [run(generator) for _ in range(2)]
    return _difference(before, after, moved)


def _is_random(model: torch.nn.Module, inputs: Inputs, before: Run) -> bool:
    torch.manual_seed(1)
    again = _with_gradients(model, inputs)
    pairs = zip(before.outputs, again.outputs, strict=True)
    return not all(torch.allclose(x, y, equal_nan=True) for x, y in pairs)


@contextmanager
def _recording(
    changes: Sequence[Change], calls: dict[str, tuple[torch.nn.Module, Inputs]] | None
) -> Iterator[None]:
    """The first call of one module of each class that takes a padding mask."""
    with ExitStack() as stack:
        kinds: set[type] = set()
        for change in changes:
            kind = type(change.module)
            takes = set(_PADDING) & set(inspect.signature(kind.forward).parameters)
            if calls is None or kind in kinds or not takes:
                continue
            kinds.add(kind)

            def note(
                module: Any, args: Any, kwargs: Any, name: str = change.name, kind: type = kind
            ) -> None:
                calls.setdefault(name or kind.__name__, (module, Inputs(args, kwargs)))

            stack.callback(change.module.register_forward_pre_hook(note, with_kwargs=True).remove)
        yield


def _compare_padded(module: torch.nn.Module, changes: Sequence[Change], seen: Inputs) -> str | None:
    """The recorded call once more, with the end of the last sequence hidden."""
    padded = _with_padding(module, seen)
    if padded is None:
        return None
    module.eval()
    after = _with_gradients(module, padded)
    with undone(changes):
        before = _with_gradients(module, padded)
        generator = torch.Generator().manual_seed(0)
        moved = [_with_gradients(module, padded, generator) for _ in range(2)]
    return _difference(before, after, moved)


def _with_padding(module: Any, seen: Inputs) -> Inputs | None:
    bound = inspect.signature(module.forward).bind(*seen.args, **seen.kwargs)
    given = bound.arguments
    for mask, about in _PADDING.items():
        if mask not in inspect.signature(module.forward).parameters or given.get(mask) is not None:
            continue
        source = given.get(about, given.get("src"))  # the memory of a whole Transformer is its src
        if not isinstance(source, Tensor) or source.dim() != 3 or source.is_nested:
            return None
        batch_first = _batch_first(module)
        batch, length = source.shape[:2] if batch_first else source.shape[1::-1]
        if batch == 0 or length < 2:
            return None
        hidden = torch.zeros(batch, length, dtype=torch.bool, device=source.device)
        hidden[-1, length - max(1, length // 3) :] = True
        given[mask] = hidden
    arguments = {name: _one_kind(name, value, given) for name, value in given.items()}
    return Inputs((), arguments)


def _one_kind(name: str, value: Any, given: dict[str, Any]) -> Any:
    """A padding mask in the form of a float attention mask next to it: torch warns of mixtures."""
    if name not in _PADDING or value is None or value.dtype != torch.bool:
        return value
    prefix = name.removesuffix("key_padding_mask")
    for other in (f"{prefix}mask", "attn_mask", "mask"):
        mask = given.get(other)
        if isinstance(mask, Tensor) and mask.is_floating_point():
            return torch.zeros_like(value, dtype=mask.dtype).masked_fill(value, -torch.inf)
    return value


def _batch_first(module: Any) -> bool:
    for inner in module.modules():
        if isinstance(inner, torch.nn.MultiheadAttention):
            return bool(inner.batch_first)
    return True


@contextmanager
def _zeros_at_padding(changes: Sequence[Change]) -> Iterator[None]:
    """Stacks give zeros at padded places, which ours and torch's fill differently in inference."""
    with ExitStack() as stack:
        for change in changes:
            for kind, mask in (
                (torch.nn.TransformerEncoder, "src_key_padding_mask"),
                (torch.nn.TransformerDecoder, "tgt_key_padding_mask"),
            ):
                if isinstance(change.module, kind):
                    hook = _zeros_by(mask)
                    handle = change.module.register_forward_hook(hook, with_kwargs=True)
                    stack.callback(handle.remove)
        yield


def _zeros_by(mask: str) -> Any:
    def hook(module: Any, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:
        hidden = inspect.signature(module.forward).bind(*args, **kwargs).arguments.get(mask)
        if hidden is None or output.dim() != 3 or output.is_nested:
            return None
        hidden = hidden if hidden.dtype == torch.bool else hidden == -torch.inf
        if not _batch_first(module):
            hidden = hidden.transpose(0, 1)
        return output.masked_fill(hidden.unsqueeze(-1), 0.0)

    return hook


# Running a model without leaving a trace, and comparing two runs.


def _is_real(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _is_variable(leaf: Any) -> bool:
    """Whether a gradient makes sense: not of masks with their infinities."""
    return _is_real(leaf) and not bool(leaf.isinf().any())


def _forward_only(model: torch.nn.Module, inputs: Inputs) -> Run:
    """The outputs without gradients, of the model as it stands."""
    with torch.no_grad():
        args, kwargs = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, tuple(inputs))
        outputs = model(*args, **kwargs)
    return Run([x.clone() for x in tree_leaves(outputs) if _is_real(x)], None)


def _with_gradients(
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


def _difference(before: Run, after: Run, moved: list[Run]) -> str | None:
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
def _no_trace(model: torch.nn.Module) -> Iterator[None]:
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
def _without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Every probability of dropping something that a module keeps as an attribute is 0."""
    with ExitStack() as stack:
        for module in model.modules():
            is_dropout = isinstance(module, torch.nn.modules.dropout._DropoutNd)
            for name, value in list(module.__dict__.items()):
                if type(value) is float and ("drop" in name or (is_dropout and name == "p")):
                    stack.callback(module.__dict__.__setitem__, name, value)
                    module.__dict__[name] = 0.0
        yield
