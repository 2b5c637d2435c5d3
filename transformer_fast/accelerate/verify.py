"""``accelerate(model, verify=...)``: compares the model before and after on example inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from math import inf
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from ..nn.drop_in import warn_user
from ..testing.oracle import is_floating
from . import generation
from .classes import Change, undone
from .packing import UnpaddedLayers
from .report import Report


class Inputs(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Run(NamedTuple):
    """Outputs and gradients (of parameters and inputs; None: not computed) of one run, by name."""

    outputs: dict[str, Tensor]
    grads: dict[str, Tensor] | None


#: Name of a padding mask -> name of the argument whose positions it masks.
_PADDING = {
    "key_padding_mask": "key",
    "src_key_padding_mask": "src",
    "tgt_key_padding_mask": "tgt",
    "memory_key_padding_mask": "memory",
}


def verify_changes(
    model: torch.nn.Module, changes: Sequence[Change], example: Any, report: Report
) -> None:
    """Compares the model with and without ``changes``, which are applied; reports the result."""
    inputs = parse_inputs(example)
    inner: Any = model
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        inner = model.module  # skip DDP, which would all-reduce the gradients of the copies
    problems: list[str] = []
    with _no_trace(inner), _zeros_at_padding(inner, changes):
        calls: dict[str, tuple[torch.nn.Module, Inputs]] = {}
        for mode in ("inference", "evaluation", "training"):
            found = _compare_model(inner, changes, inputs, mode, calls, report)
            if found is not None:
                problems.append(f"in {mode}, {found}")
        for name, (module, seen) in calls.items():
            found = _compare_padded(module, changes, seen)
            if found is not None:
                problems.append(f"with padding added to a call of {name}, {found}")
    report.verified = not problems
    if problems:
        advice = _ADVICE_NOT_FINITE if all(_NOT_FINITE in p for p in problems) else _ADVICE
        report.notes += [f"Verify: {problem}." for problem in problems]
        report.notes.append(f"The model was restored. {advice}")
        warn_user(f"accelerate restored the model: {'; '.join(problems)}. {advice}")


#: Runs of the original with nudged values that a gradient's difference is compared with.
_NUDGES = 8
_NOT_FINITE = "of the original model are NaN or infinite everywhere"
_ADVICE_NOT_FINITE = "Pass inputs to verify for which the model's outputs and gradients are finite."
_ADVICE = (
    "To accelerate the rest of the model, leave modules out with filter_fn; if the difference is "
    "acceptable, call accelerate without verify."
)


def parse_inputs(example: Any, argument: str = "verify") -> Inputs:
    """Returns the inputs that a user passed as ``argument`` of `accelerate`."""
    if isinstance(example, tuple):
        return Inputs(example, {})
    if isinstance(example, dict):
        return Inputs((), example)
    if isinstance(example, Tensor):
        return Inputs((example,), {})
    raise TypeError(
        f"{argument} must be a tuple of positional arguments, a dict of keyword arguments or a tensor, "
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
    then = generation.next_step if any(map(generation.is_change, changes)) else None

    def run(exact: bool = False, nudge: int | None = None) -> Run:
        torch.manual_seed(0)
        if mode == "inference" and not exact:
            return forward_only(model, inputs, then)
        return _with_gradients(model, inputs, exact, then, nudge)

    # Layers and steps that run as one call check their attributes, also the probabilities of dropout.
    keeps_dropout = mode == "inference" and not _draws(model, inputs)
    with nullcontext() if keeps_dropout else _without_dropout(model):
        after = run()
        with undone(changes):
            with _recording(changes, calls if mode == "inference" else None):
                before = run()
            if mode == "training" and _is_random(model, inputs, before, then):
                report.notes.append(
                    "Verify: the model draws random numbers in train mode, which was therefore "
                    "not compared."
                )
                return None
            return _difference(before, after, run)


def _draws(model: torch.nn.Module, inputs: Inputs) -> bool:
    """True if a call in eval mode may draw random numbers."""
    if not all(p.is_cpu for p in model.parameters()):
        return True
    state = torch.get_rng_state()
    forward_only(model, inputs)
    return not torch.equal(state, torch.get_rng_state())


def _is_random(model: torch.nn.Module, inputs: Inputs, before: Run, then: Then | None) -> bool:
    torch.manual_seed(1)
    again = _with_gradients(model, inputs, then=then)
    pairs = zip(before.outputs.values(), again.outputs.values(), strict=True)
    return not all(torch.allclose(x, y, equal_nan=True) for x, y in pairs)


@contextmanager
def _recording(
    changes: Sequence[Change], calls: dict[str, tuple[torch.nn.Module, Inputs]] | None
) -> Iterator[None]:
    """Records the first call of one module per class that takes a padding mask."""
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

            stack.enter_context(change.module.register_forward_pre_hook(note, with_kwargs=True))
        yield


def _compare_padded(module: torch.nn.Module, changes: Sequence[Change], seen: Inputs) -> str | None:
    """Compares both models on the recorded call, with its last sequence padded at the end."""
    padded = _with_padding(module, seen)
    if padded is None:
        return None
    module.eval()
    after = _with_gradients(module, padded)
    with undone(changes):
        before = _with_gradients(module, padded)
        return _difference(before, after, partial(_with_gradients, module, padded))


def _with_padding(module: Any, seen: Inputs) -> Inputs | None:
    bound = inspect.signature(module.forward).bind(*seen.args, **seen.kwargs)
    given = bound.arguments
    for mask, about in _PADDING.items():
        if mask not in inspect.signature(module.forward).parameters or given.get(mask) is not None:
            continue
        source = given.get(about, given.get("src"))  # torch.nn.Transformer derives memory from src
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
    """Converts a bool padding mask to float next to a float mask: PyTorch warns of mixed types."""
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
def _zeros_at_padding(model: torch.nn.Module, changes: Sequence[Change]) -> Iterator[None]:
    """Zeroes padded positions of stacks' outputs, where ours differ from PyTorch's in inference.

    For stacks of transformers, zeroes padded positions of the model's outputs instead.
    """
    with ExitStack() as stack:
        stacks = (c.module for c in changes if isinstance(c.module, UnpaddedLayers))
        if any(stack._skips_padding for stack in stacks):
            stack.enter_context(model.register_forward_hook(_zeros_in_outputs, with_kwargs=True))
        for change in changes:
            for kind, mask in (
                (torch.nn.TransformerEncoder, "src_key_padding_mask"),
                (torch.nn.TransformerDecoder, "tgt_key_padding_mask"),
            ):
                if isinstance(change.module, kind):
                    hook = _zeros_by(mask)
                    handle = change.module.register_forward_hook(hook, with_kwargs=True)
                    stack.enter_context(handle)
        yield


def _zeros_in_outputs(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
    try:
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except TypeError:
        return None
    mask = {**given, **given.get("kwargs", {}), **kwargs}.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None

    def zeroed(x: Any) -> Any:
        if not is_floating(x) or x.shape[:2] != mask.shape:
            return x
        return x.masked_fill((mask == 0).view(*mask.shape, *[1] * (x.dim() - 2)), 0.0)

    return tree_map(zeroed, output)


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


# Running a model without side effects, and comparing two runs.


def _is_variable(leaf: Any) -> bool:
    """True if a gradient makes sense; False for masks, which contain infinities."""
    return is_floating(leaf) and not bool(leaf.isinf().any())


#: (model, its arguments, its outputs) -> the arguments of a second call, or None.
Then = Callable[[torch.nn.Module, Inputs, Any], "dict[str, Any] | None"]


def _run(
    call: Callable[..., Any], model: torch.nn.Module, inputs: Inputs, then: Then | None
) -> Any:
    """Returns the outputs of the call, and of the call that follows it, if any."""
    outputs = call(*inputs.args, **inputs.kwargs)
    following = None if then is None else then(model, inputs, outputs)
    return outputs if following is None else (outputs, call(**following))


def forward_only(model: torch.nn.Module, inputs: Inputs, then: Then | None = None) -> Run:
    """Runs the model as it is, without gradients."""
    with torch.no_grad():
        args, kwargs = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, tuple(inputs))
        outputs = _run(model, model, Inputs(args, kwargs), then)
    return Run({name: x.clone() for name, x in _outputs(outputs).items()}, None)


def _outputs(found: Any) -> dict[str, Tensor]:
    real = [x for x in tree_leaves(found) if is_floating(x)]
    return {f"output {i}" if len(real) > 1 else "output": x for i, x in enumerate(real)}


def _with_gradients(
    model: torch.nn.Module, inputs: Inputs, exact: bool = False, then: Then | None = None,
    nudge: int | None = None,
) -> Run:  # fmt: skip
    """Computes outputs and gradients, on copies of parameters and buffers.

    ``exact``: in float64. ``nudge``: each value changes by at most a rounding step, at random; a seed.
    """

    def own(x: Tensor) -> Tensor:
        x = x.detach().to(torch.float64 if exact and is_floating(x) else x.dtype, copy=True)
        if nudge is not None and is_floating(x):
            generator = torch.Generator(x.device).manual_seed(nudge + x.numel())
            x *= 1 + _eps(x) * torch.randint(-1, 2, x.shape, generator=generator, device=x.device)
        return x

    def leaf(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return own(x).requires_grad_(_is_variable(x))

    state: dict[str, Tensor] = {n: leaf(p) for n, p in model.named_parameters()}
    wanted = {n: t for n, t in state.items() if t.requires_grad}
    state |= {n: own(b) for n, b in model.named_buffers()}
    args, kwargs = tree_map(leaf, tuple(inputs))
    for key, value in {**dict(enumerate(args)), **kwargs}.items():
        for path, x in tree_flatten_with_path(value)[0]:
            if _is_variable(x):
                wanted[f"input {key}{keystr(path)}"] = x
    with torch.enable_grad():
        # Autograd forbids in-place operations on leaves, so the model gets products with 1.
        args, kwargs = tree_map(lambda x: x * 1 if _is_variable(x) else x, (args, kwargs))

        def call(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(model, state, args, kwargs)

        outputs = _outputs(_run(call, model, Inputs(args, kwargs), then))
        sums = (_weighted(x, i) for i, x in enumerate(outputs.values()) if x.requires_grad)
        total = sum(sums, torch.zeros(()))
    grads = None
    if total.requires_grad:
        got = torch.autograd.grad(total, [*wanted.values()], allow_unused=True)
        grads = {
            name: torch.zeros_like(x) if g is None else g
            for g, (name, x) in zip(got, wanted.items(), strict=True)
        }
    return Run({name: x.detach() for name, x in outputs.items()}, grads)


def _weighted(x: Tensor, index: int) -> Tensor:
    """Returns the sum of the output's elements with random weights.

    With weights of one sign or a smooth pattern, terms cancel in the backward pass of a norm. The
    gradients of earlier layers would then be small beside that of the norm's bias.
    """
    generator = torch.Generator(x.device).manual_seed(index)
    weight = torch.randn(x.shape, generator=generator, dtype=torch.float32, device=x.device)
    # A fully masked row is NaN, which would make all gradients NaN.
    return (torch.where(x.isfinite(), x, 0.0).float() * weight).sum().cpu()


def _difference(before: Run, after: Run, again: Callable[..., Run]) -> str | None:
    """Returns the difference that rounding does not explain, as part of a sentence, or None.

    The error of ``after`` against float64 may be at most twice that of ``before``, plus ten rounding
    steps of the largest value, which ``before`` may avoid by luck. Gradients may have twice the error of
    a run of the original with nudged values: such a step moves a unit of a ReLU to the other side of
    0. Where ``before`` is not finite, as in fully masked rows, ``after`` may have any value.

    Args:
        again: runs the original again, with ``exact`` or ``nudge`` of `_with_gradients`.
    """
    right = cache(partial(again, exact=True))
    found = _compare("outputs", before.outputs, after.outputs, again, right)
    if found is None and before.grads is not None and after.grads is not None:
        found = _compare("grads", before.grads, after.grads, again, right)
    return found


def _compare(
    kind: Literal["outputs", "grads"], before: dict[str, Tensor], after: dict[str, Tensor],
    again: Callable[..., Run], right: Callable[[], Run],
) -> str | None:  # fmt: skip
    what, prefix = ("outputs", "") if kind == "outputs" else ("gradients", "gradient of ")
    if [*before] != [*after]:
        return f"the accelerated model has {len(after)} {what} instead of {len(before)}"
    if before and not any(bool(t.isfinite().any()) for t in before.values() if t.numel()):
        return f"the {what} {_NOT_FINITE}"
    largest = max(map(_largest, before.values()), default=0.0)

    @cache  # of the errors only: eight runs' gradients would take eight times the model's memory
    def nudged(seed: int) -> dict[str, tuple[float, float] | None]:
        grads = again(nudge=seed).grads or {}
        return {name: _errors(kind, name, old, grads[name], right) for name, old in before.items()}

    worst, found = 1.0, None
    for name, old in before.items():
        new = after[name]
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            kinds = (f"{t.dtype} of shape {[*t.shape]}" for t in (new, old))
            return f"the {prefix}{name} is {' instead of '.join(kinds)}"
        error = _largest(torch.where(old.isfinite(), new - old, 0.0))
        allowed = 10 * _eps(old) * largest
        if error <= allowed:
            continue
        errors = _errors(kind, name, old, new, right)
        if errors is not None and errors[1] <= 2 * errors[0] + allowed:
            continue
        if errors is not None and kind == "grads":
            others = (nudged(seed)[name] for seed in range(_NUDGES))
            if any(errors[1] <= 2 * both[1] + allowed for both in others if both):
                continue
        ratio = error / allowed if allowed else inf
        if ratio <= worst:
            continue
        worst, found = ratio, f"the {prefix}{name} differs from the original's by {error:.2g}"
        found += f", more than the {allowed:.2g} expected from rounding"
        if errors is not None:
            found += " (errors against float64: {:.2g} originally, {:.2g} now)".format(*errors)
    return found


def _errors(
    kind: str, name: str, before: Tensor, after: Tensor, right: Callable[[], Run]
) -> tuple[float, float] | None:
    """Returns the largest errors before and after against float64; None if that run fails."""
    try:
        with torch.autocast(before.device.type, enabled=False):
            exact = getattr(right(), kind)[name]
    except Exception:  # a model may raise anything if it requires a dtype
        return None
    finite = before.isfinite()
    first, second = (_largest(torch.where(finite, x - exact, 0.0)) for x in (before, after))
    return first, second


def _largest(x: Tensor) -> float:
    """Returns the largest absolute value; inf if a value is NaN."""
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
    """Restores buffers, training flags, random state and PyTorch's fast-path setting on exit."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    flags = [(module, module.training) for module in model.modules()]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    devices = {t.device for t in model.parameters() if t.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        try:
            # In some modes PyTorch's inference path gives zeros at padded positions. The comparison
            # therefore uses the regular path.
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
    """Sets every dropout probability that a module stores as an attribute to 0 within the block."""
    with ExitStack() as stack:
        for module in model.modules():
            is_dropout = isinstance(module, torch.nn.modules.dropout._DropoutNd)
            for name, value in list(module.__dict__.items()):
                if type(value) is float and ("drop" in name or (is_dropout and name == "p")):
                    stack.callback(module.__dict__.__setitem__, name, value)
                    module.__dict__[name] = 0.0
        yield
