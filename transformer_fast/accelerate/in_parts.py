"""Which parts of a swapped layer are called one by one instead of as one op, and why."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.module import _has_any_global_hook

from .. import nn
from ..nn import bypass
from .hugging_face import layers
from .torch_nn import a_kind

_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def in_parts(module: torch.nn.Module) -> dict[str, str]:
    """For each op that the module would run as one if it were what it seems: why it does not."""
    found: dict[str, str] = {}
    for op, parts, activation in _ops(module):
        reason = next((r for name, part, kinds in parts if (r := _told(name, part, kinds))), None)
        if reason is None and activation is not None:
            reason = _about_activation(*activation)
        if reason is not None:
            found.setdefault(op, reason)
    return found


_Part = tuple[str, Any, tuple[type, ...]]
_Op = tuple[str, list[_Part], "tuple[str, Any, Any] | None"]


def _ops(module: Any) -> list[_Op]:
    """(op, the modules it stands for, name and value of the activation and what knows its name)."""

    def parts(names: str, kinds: tuple[type, ...]) -> list[_Part]:
        return [(name, getattr(module, name), kinds) for name in names.split()]

    if isinstance(module, _LAYERS):
        norms = "norm1 norm2 norm3" if isinstance(module, _LAYERS[1]) else "norm1 norm2"
        linears = parts("linear1 linear2", bypass.LINEAR)
        known = ("activation", module.activation, bypass.activation_name)
        return [
            ("add_layer_norm", parts(norms, bypass.LAYER_NORM), None),
            ("feed_forward", linears + parts("dropout", bypass.DROPOUT), known),
        ]
    if isinstance(module, layers._PostNorm):
        norms = "self_attn_layer_norm final_layer_norm"
        if isinstance(module, layers.DecoderLayer):
            norms += " encoder_attn_layer_norm"
        known = ("activation_fn", module.activation_fn, layers.activation_name)
        return [
            ("add_layer_norm", parts(norms, bypass.LAYER_NORM), None),
            ("feed_forward", parts("fc1 fc2", bypass.LINEAR), known),
        ]
    if isinstance(module, layers.Output):
        norm = parts("LayerNorm", bypass.LAYER_NORM) + parts("dropout", bypass.DROPOUT)
        return [("add_layer_norm", norm, None)]
    if isinstance(module, layers.BertLayer):
        return [("feed_forward", *_of_bert(module))]
    if isinstance(module, layers.T5DenseActDense):
        inner = parts("wi wo", bypass.LINEAR) + parts("dropout", bypass.DROPOUT)
        return [("feed_forward", inner, ("act", module.act, layers.activation_name))]
    return []


def _of_bert(module: Any) -> tuple[list[_Part], tuple[str, Any, Any] | None]:
    inner, output = module.intermediate, module.output
    found: list[_Part] = []
    for name, part, kind in (("intermediate", inner, "BertIntermediate"), ("output", output, "")):
        theirs = type(part)
        plain = theirs.__name__ == kind if kind else isinstance(part, layers.Output)
        found.append((name, part, (theirs,) if plain else ()))
    if not all(kinds for *_, kinds in found):
        return found, None
    found += [(f"{name}.dense", part.dense, bypass.LINEAR) for name, part, _ in found[:2]]
    activation = inner.intermediate_act_fn
    return found, ("intermediate.intermediate_act_fn", activation, layers.activation_name)


def _about_activation(name: str, activation: Any, known: Any) -> str | None:
    if known(activation) is not None:
        return None
    if isinstance(activation, torch.nn.Module):
        return f"its {name} is {a_kind(activation)}, which no kernel has"
    return f"its {name} is {getattr(activation, '__name__', repr(activation))}, which no kernel has"


def _told(name: str, module: Any, kinds: tuple[type, ...]) -> str | None:
    """Why `bypass` calls the module instead of reading it, as a sentence."""
    if bypass.is_plain(module, kinds):
        return None
    if type(module) not in kinds:
        return f"its {name} is {a_kind(module)}"
    if _has_any_global_hook():
        return "there are hooks on all modules of this process"
    if "forward" in module.__dict__:
        return f"the forward of its {name} was replaced on the instance"
    if module._compiled_call_impl is not None:
        return f"its {name} is compiled on its own"
    return f"its {name} has hooks"
