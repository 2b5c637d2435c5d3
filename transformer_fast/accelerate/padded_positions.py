"""Decides for each batch whether a model's own code may read its layers' outputs at padded positions.

Only then does a stack of `packing` compute them. Each model of transformers around such a stack gets
a class whose ``forward`` notes the call, so that the stack finds the arguments of the outermost
model: labels may count at padded positions. What else the model's code reads follows from a trial.
`accelerate` runs the model twice on a few tokens with padding, with different random numbers at the
padded positions of the stack's output. Results that differ were computed from them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .. import memory
from .._context import is_traced
from ..models.attention_weights import evaluating
from ..nn.drop_in import KNOWN_PACKAGES, DropIn, subclass
from .classes import ClassChange
from .parts import is_model
from .private_names import IGNORED_LABEL, MASK, NO_LABELS


class Findings(NamedTuple):
    """A trial's result about the model's own code around its stacks of layers."""

    #: Why padded positions are always computed in calls of this model; empty: they are not.
    reason: str = ""
    #: Sides at which padding is computed because the model's code reads it: "left", "right".
    sides: tuple[str, ...] = ()
    #: True if an output belongs to a whole sequence, such as a classifier's.
    pools: bool = False
    #: (name of a stack, reason why its layers computed the padded positions or "") in the trial.
    stacks: tuple[tuple[str, str], ...] = ()


class PaddedModel(DropIn):
    """Base of the classes that `accelerate` gives to models whose layers skip padding."""


class Call:
    """A call of a model's ``forward``."""

    def __init__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs

    @functools.cached_property
    def arguments(self) -> dict[str, Any]:
        """Returns all arguments by name."""
        signature = inspect.signature(self.model.forward)
        given = signature.bind(*self.args, **self.kwargs).arguments
        for name, parameter in signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                given |= given.pop(name, {})
        return given

    def reads(self, real: Tensor, is_decoder: bool) -> bool:
        """True if the model's code may read an output of the layers at a padded position."""
        found: Findings = self.model._findings
        if found.reason:
            return True
        if any(not real[:, _EDGES[side]].all() for side in found.sides):
            return True
        if is_decoder and found.pools and not self._has_pad_tokens(real):
            return True
        # `generate` requests the logits of the last position.
        last = self.arguments.get("logits_to_keep")
        if isinstance(last, int) and last > 0 and not real[:, -last:].all():
            return True
        return not _is_seq2seq(self.model) and any(
            _has_labels_at_padding(value, real, is_decoder)
            for name, value in self.arguments.items()
            if name not in NO_LABELS
        )

    def _has_pad_tokens(self, real: Tensor) -> bool:
        """True if masked positions hold the padding token, which decoders' classifiers search for."""
        config = self.model.config.get_text_config()
        tokens, pad = self.arguments.get("input_ids"), getattr(config, "pad_token_id", None)
        if not isinstance(tokens, Tensor) or tokens.shape != real.shape or pad is None:
            return False
        return bool((tokens == pad)[~real].all())


#: Side of a sequence -> index of its outermost position.
_EDGES = {"left": 0, "right": -1}


def _has_labels_at_padding(labels: Any, real: Tensor, is_decoder: bool) -> bool:
    """True if an argument may be labels (B, T, ...) or (..., T), one of which counts at padding."""
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return False
    if labels.numel() == real.numel() and labels.shape[-1] == real.shape[1]:
        labels = labels.reshape(real.shape)
    elif labels.shape[:2] != real.shape:
        return False
    counted = (labels != IGNORED_LABEL).view(*real.shape, -1).any(2)
    if is_decoder:  # the logits of a position predict the next position's label
        counted = counted | torch.nn.functional.pad(counted[:, 1:], (0, 1))
    return bool((counted & ~real).any())


class Trial:
    """A call of a model that records what the model's code reads and what its stacks do."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        #: First layer of a stack -> why its layers did not run on real tokens alone, or "".
        self.stacks: dict[torch.nn.Module, str] = {}
        #: (B, T) bool, True at the real tokens of the first stack's batch.
        self.real: Tensor | None = None

    def note(self, first: torch.nn.Module, real: Tensor, reason: str) -> None:
        self.real = real if self.real is None else self.real
        self.stacks[first] = self.stacks.get(first) or reason

    def fill(self, padded: Tensor, real: Tensor) -> Tensor:
        """Returns the output (B, T, M) of a stack with random numbers at padded positions."""
        x = torch.randn(padded.shape, generator=self._generator) * padded[real].float().std()
        return torch.where(real[..., None], padded, x.to(padded.dtype))


#: The outermost call, or the trial, that runs in this context.
_running: ContextVar[Call | Trial | None] = ContextVar("_running", default=None)


def trial() -> Trial | None:
    running = _running.get()
    return running if isinstance(running, Trial) else None


def are_read(real: Tensor, is_decoder: bool) -> bool:
    """True if the layers' outputs at a padded position of the batch may be read.

    real: (B, T) bool. Padding in front may be read: most classifiers of encoders read the first position.
    """
    running = _running.get()
    if isinstance(running, Trial):
        return False
    if not is_decoder and not real[:, 0].all():
        return True
    return running is not None and running.reads(real, is_decoder)


@functools.cache
def _forward_of(kind: Any) -> Any:
    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_traced() or _running.get() is not None:
            return kind.forward(self, *args, **kwargs)
        token = _running.set(Call(self, args, kwargs))
        try:
            return kind.forward(self, *args, **kwargs)
        finally:
            _running.reset(token)

    return forward


class Plan(NamedTuple):
    changes: list[ClassChange]
    #: Name of a stack that must compute padded positions -> remark for the report.
    computed: dict[str, str]


def make_plan(root: torch.nn.Module, stacks: list[tuple[str, Any]]) -> Plan:
    """Returns the changes of the models around the stacks (by name), which are already replaced."""
    plan = Plan([], {})
    for name, model in root.named_modules():
        prefix = f"{name}." if name else ""
        inner = [(path, stack) for path, stack in stacks if path.startswith(prefix)]
        if not inner or not is_model(model) or isinstance(model, PaddedModel):
            continue
        kind = type(model)
        findings = examine(model, [(path[len(prefix) :], stack) for path, stack in inner])
        forward = _forward_of(kind)  # type: ignore[arg-type]
        made = subclass(kind, (PaddedModel, kind), forward=forward, _findings=findings)
        if isinstance(made, str):
            note = f"padded positions are computed: {made}"
            plan.computed.update((path, note) for path, _ in inner)
        else:
            plan.changes.append(ClassChange(name, model, kind, made))
    return plan


def is_change(change: Any) -> bool:
    """True for the change of a model's class; the report has no entry for it."""
    return isinstance(change, ClassChange) and issubclass(change.after, PaddedModel)


#: Beginning of the report's remarks on stacks that skip padding.
SKIPPED = "padding is skipped"
#: Remark for a model with such a stack.
ZEROS = (
    "Outputs at padded positions are zeros where padding is skipped; "
    "accelerate(model, skip_padding=False) computes them."
)


def describe(
    root: torch.nn.Module, stacks: list[tuple[str, Any]], changes: list[ClassChange]
) -> dict[str, str]:
    """Returns stack name -> remark on the padded positions in calls of the outermost model."""
    made: dict[torch.nn.Module, Any] = {change.module: change.after for change in changes}
    notes: dict[str, str] = {}
    for name, model in root.named_modules():
        kind = made.get(model, type(model))
        if not issubclass(kind, PaddedModel):
            continue
        prefix = f"{name}." if name else ""
        found: Findings = kind._findings  # type: ignore[attr-defined]
        noted = dict(found.stacks)
        for path, stack in stacks:
            if path.startswith(prefix) and path not in notes and stack._skips_padding:
                inner = noted.get(path[len(prefix) :])
                notes[path] = _described(kind.__name__, stack, found, inner)
    for path, stack in stacks:
        if not stack._skips_padding:
            notes[path] = "padded positions are computed (skip_padding=False)"
    return {path: note for path, note in notes.items() if note}


def _described(kind: str, stack: Any, found: Findings, why_padded: str | None) -> str:
    """Returns a stack's remark; why_padded: the trial's reason, None if it had no padding there."""
    if found.reason or why_padded:
        reason = f"{kind}: {found.reason}" if found.reason else why_padded
        return f"padded positions are computed: {reason}"
    if why_padded is None:
        return ""
    when = " in inference with an empty cache" if stack._is_decoder else ""
    read = (
        f", not that at the {' and '.join(found.sides)}, which {kind} reads" if found.sides else ""
    )
    return f"{SKIPPED}{when}{read}"


# The trial.


def examine(model: Any, stacks: list[tuple[str, Any]]) -> Findings:
    """Runs the model on a few tokens with padding; stacks: its stacks by name."""
    reason = "no trial call is known for it"
    with undisturbed(model):
        for inputs in _inputs(model):
            try:
                found = _compare(model, inputs, stacks)
            except Exception as error:  # the model requires other arguments
                reason = f"a trial call failed ({type(error).__name__}: {error})"
                continue
            memory.forget_packed(model)
            return found
    memory.forget_packed(model)
    return Findings(reason)


def _compare(model: Any, inputs: dict[str, Tensor], stacks: list[tuple[str, Any]]) -> Findings:
    sides: list[str] = []
    pools = False
    noted: dict[torch.nn.Module, str] = {}
    # Encoders compute all positions of a batch with padding at the left.
    is_decoder = any(stack._is_decoder for _, stack in stacks)
    for side in _EDGES if is_decoder else ("right",):
        given = inputs if side == "right" else {name: x.flip(-1) for name, x in inputs.items()}
        trials, outputs = [Trial(seed) for seed in (0, 1)], []
        for each in trials:
            token = _running.set(each)
            try:
                outputs.append([x for x in tree_leaves(model.forward(**given)) if _is_real(x)])
            finally:
                _running.reset(token)
        real = trials[0].real
        for first, reason in trials[0].stacks.items():
            noted[first] = noted.get(first) or reason
        if real is None:
            continue
        is_head = model.base_model is not model
        for one, other in zip(*outputs, strict=True):
            if one.shape[:2] == real.shape:
                if one.dim() == 2:
                    return Findings("its outputs at all positions are compared with each other")
                if is_head and given[MASK].shape != real.shape:
                    return Findings("its callers have no mask of the positions of its output")
                one, other = one[real], other[real]
            elif one.dim() <= 2:
                pools = True
            if not (one - other).abs().max() <= 1e-4 * one.abs().max():
                sides.append(side)
                break
    return Findings(
        sides=tuple(sides),
        pools=pools,
        stacks=tuple((name, noted[x[0]]) for name, x in stacks if x[0] in noted),
    )


def _is_real(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel() > 0


@contextmanager
def undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """Runs the block in inference, without users' hooks; restores random state and flags."""
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.no_grad())
        stack.enter_context(evaluating(model))
        stack.enter_context(torch.autocast("cpu", enabled=False))
        for module in model.modules():
            for name in ("_forward_hooks", "_forward_pre_hooks"):
                hooks = getattr(module, name)
                others = {key: hook for key, hook in hooks.items() if _is_of_user(hook)}
                if others:
                    stack.callback(_put_back, hooks, others)
                for key in others:
                    del hooks[key]
        yield


def is_hooked(model: torch.nn.Module) -> bool:
    """True if a module, or all modules, have a forward hook of a user."""
    every: Any = torch.nn.modules.module
    found = [every._global_forward_hooks, every._global_forward_pre_hooks]
    found += [x for m in model.modules() for x in (m._forward_hooks, m._forward_pre_hooks)]
    return any(_is_of_user(hook) for hooks in found for hook in hooks.values())


def _is_of_user(hook: Any) -> bool:
    path = getattr(hook, "__module__", None) or type(hook).__module__
    return path.partition(".")[0] not in KNOWN_PACKAGES


def _put_back(hooks: dict[int, Any], others: dict[int, Any]) -> None:
    """Adds the hooks again, in the order of their ids: newer hooks have larger ids."""
    found = sorted({**hooks, **others}.items())
    hooks.clear()
    hooks.update(found)


def _is_seq2seq(model: Any) -> bool:
    """True if the labels belong to a decoder with tokens of its own."""
    return "decoder_input_ids" in inspect.signature(model.forward).parameters


def _inputs(model: Any) -> Iterator[dict[str, Tensor]]:
    """Yields possible arguments for one sequence with padding at the right."""
    names = inspect.signature(model.forward).parameters
    config = model.config
    if model.main_input_name == "input_values" and hasattr(
        model, "_get_feat_extract_output_lengths"
    ):
        samples, frames = 64, 0
        while frames < 8:
            samples *= 2
            frames = int(model._get_feat_extract_output_lengths(torch.tensor(samples)))
        mask = (torch.arange(samples) < samples * 5 // 8).long()[None]
        yield {"input_values": torch.randn(1, samples) * mask, MASK: mask}
        return
    if "input_ids" not in names or MASK not in names:
        return
    tokens = [3, 4, 5, 0, 0] if getattr(config, "num_labels", 0) != 5 else [3, 4, 5, 0, 0, 0]
    mask = torch.tensor([[int(token != 0) for token in tokens]])
    ids = torch.tensor([tokens])
    text = config.get_text_config()
    size = getattr(text, "vocab_size", None) or 1 << 31
    for name, at in (("eos_token_id", (0, 2)), ("pad_token_id", mask == 0)):
        token = getattr(text, name, None)
        # A default of the config may be no token: ModernBERT's with a small vocabulary.
        if isinstance(token, int) and 0 <= token < size:
            ids[at] = token
    given = {"input_ids": ids, MASK: mask}
    vision = getattr(config, "vision_config", None)
    if "pixel_values" in names and vision is not None:
        size = vision.image_size
        given["pixel_values"] = torch.zeros(1, vision.num_channels, size, size)
    if _is_seq2seq(model):
        yield {**given, "decoder_input_ids": ids[:, :2]}
    yield given
    yield {**given, "input_ids": ids[None], MASK: mask[None]}  # for multiple choice
