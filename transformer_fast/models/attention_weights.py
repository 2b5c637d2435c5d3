"""Context managers around a whole model: attention weights on request, evaluation mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor

__all__ = ["attention_weights"]

#: Arguments of MultiheadAttention.forward that may be positional, from the fifth on.
_OPTIONS = ("need_weights", "attn_mask", "average_attn_weights", "is_causal")


class _Recorder:
    """Makes one attention compute the weights of each head, without changing what its caller gets."""

    def __init__(self, name: str, found: dict[str, Tensor]) -> None:
        self.name, self.found = name, found
        self.need = self.average = True

    def before(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kwargs = {**kwargs, **dict(zip(_OPTIONS, args[4:], strict=False))}
        self.need = kwargs.get("need_weights", True)
        self.average = kwargs.get("average_attn_weights", True)
        return args[:4], {**kwargs, "need_weights": True, "average_attn_weights": False}

    def after(self, module: torch.nn.Module, args: Any, result: Any) -> tuple[Tensor, Any]:
        output, weights = result
        self.found[self.name] = weights.detach()
        if not self.need:
            return output, None
        return output, weights.mean(dim=-3) if self.average else weights


def _keep(found: Any, name: str, read: Any, module: Any, args: Any, result: Any) -> None:
    found[name] = read(module, result).detach()


@contextmanager
def attention_weights(
    model: torch.nn.Module,
    *names: str,
    read: Callable[[torch.nn.Module, Any], Tensor] | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Context manager that collects the attention weights of ``model``: {name: (B, H, T, S)}.

        with attention_weights(model, "decoder.*.multihead_attn") as weights:
            model(source, target)
        weights["decoder.stack.layers.0.multihead_attn"]

    Each name maps to the weights of the last call, after dropout, detached. Other attentions run as
    usual. Works for every model with torch.nn.MultiheadAttention or this package's. Generation inside
    the block recomputes all tokens at each step, so that the weights cover the whole sequence.

    Hand-written modules compute their weights anyway; ``read`` returns them:

        with attention_weights(model, "*.src_attn", read=lambda module, output: module.attn) as weights:
            model(source, target, source_mask, target_mask)

    Args:
        names: names of attentions as in ``model.named_modules()``, where "*" matches anything; no
            names: all attentions.
        read: function of a module and its output that returns the weights (B, H, T, S). The names may
            then be of any modules. None: the modules are torch.nn.MultiheadAttention or subclasses.

    Raises:
        ValueError: a name matches no attention of the model, or ``read`` is given without names.
    """
    attentions = {
        name: module
        for name, module in model.named_modules()
        if read is not None or isinstance(module, torch.nn.MultiheadAttention)
    }
    if read is not None and not names:
        raise ValueError("names must say which modules to read")
    chosen: dict[str, torch.nn.Module] = {}
    for pattern in names or ("*",):
        fitting = {n: m for n, m in attentions.items() if fnmatchcase(n, pattern)}
        if not fitting:
            raise ValueError(
                f"no attention of the model fits {pattern!r}; it has {', '.join(attentions) or '-'}"
            )
        chosen |= fitting
    found: dict[str, Tensor] = {}

    with ExitStack() as hooks:
        for name, module in chosen.items():
            if read is not None:
                keep = partial(_keep, found, name, read)
                hooks.enter_context(module.register_forward_hook(keep))
                continue
            recorder = _Recorder(name, found)
            before = module.register_forward_pre_hook(recorder.before, with_kwargs=True)
            hooks.enter_context(before)
            hooks.enter_context(module.register_forward_hook(recorder.after))
        yield found


@contextmanager
def evaluating(*modules: object) -> Iterator[None]:
    """Context manager: puts the modules in evaluation mode, then restores the mode of each."""
    modes = [
        (part, part.training)
        for module in modules
        if isinstance(module, torch.nn.Module)
        for part in module.modules()
    ]
    try:
        for part, training in modes:
            if training:
                part.training = False
        yield
    finally:
        for part, training in modes:
            if part.training != training:
                part.training = training
