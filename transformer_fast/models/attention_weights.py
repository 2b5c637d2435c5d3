"""Attention weights on request: only the layers asked for compute them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor

__all__ = ["attention_weights"]

#: Those of MultiheadAttention.forward's arguments that may come by position, from the fifth on.
_OPTIONS = ("need_weights", "attn_mask", "average_attn_weights", "is_causal")


class _Recorder:
    """Makes one attention compute each head's weights, and hides that from its caller."""

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


@contextmanager
def attention_weights(
    model: torch.nn.Module,
    *names: str,
    read: Callable[[torch.nn.Module, Any], Tensor] | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Within the block, the attention weights that ``model`` computes: {name: (B, H, T, S)}.

        with attention_weights(model, "decoder.*.multihead_attn") as weights:
            model(source, target)
        weights["decoder.stack.layers.0.multihead_attn"]

    Each name gives the last call's weights, after dropout, detached. Attentions that are not asked
    for run as ever. Works for every model built of torch.nn.MultiheadAttention or ours. Generation
    within the block recomputes all tokens at each step, so that the weights are those of the whole
    sequence.

    Modules that were written by hand compute their weights anyway; ``read`` says where they are:

        with attention_weights(model, "*.src_attn", read=lambda module, output: module.attn) as weights:
            model(source, target, source_mask, target_mask)

    Args:
        names: which attentions, as in ``model.named_modules()``, "*" standing for anything; none
            means all.
        read: function of a module and what it returned, to its weights (B, H, T, S). The names then
            are those of any modules. None: the modules are torch.nn.MultiheadAttention or ours.

    Raises:
        ValueError: no attention of the model fits a name; ``read`` without a name.
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

    def keep(name: str, module: torch.nn.Module, args: Any, result: Any) -> None:
        assert read is not None
        found[name] = read(module, result).detach()

    handles = []
    try:
        for name, module in chosen.items():
            if read is not None:
                handles.append(module.register_forward_hook(partial(keep, name)))
                continue
            recorder = _Recorder(name, found)
            handles.append(module.register_forward_pre_hook(recorder.before, with_kwargs=True))
            handles.append(module.register_forward_hook(recorder.after))
        yield found
    finally:
        for handle in handles:
            handle.remove()
