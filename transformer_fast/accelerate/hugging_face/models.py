"""Which models of transformers are known, and how they are changed."""

from __future__ import annotations

import sys
from copy import deepcopy
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch

from .. import torch_nn
from ..change import Change, ClassChange
from .registry import registries, why_not

#: Tested with these; others are left as they are.
_VERSIONS = ((5, 0), (6, 0))
#: Those whose layers are known.
MODELS = ("bart", "bert", "llama", "marian", "t5")
#: The attribute that remembers what a model's attention was.
_RECORD = "_attention_before_accelerate"
#: The attribute of a config that names the attention.
_NAME_OF_ATTENTION = "_attn_implementation_internal"


def is_loaded() -> bool:
    return "transformers.modeling_utils" in sys.modules


def is_model(module: torch.nn.Module) -> bool:
    """Whether it is a whole model of transformers (or one of the models inside another)."""
    if not is_loaded():
        return False
    return isinstance(module, sys.modules["transformers.modeling_utils"].PreTrainedModel)


class _Before:
    """What a model remembers. Loading a pickle of it puts that back, and leaves None in its place.

    So a pickle of a model holds the model as it was, and loads where this library is not installed.
    """

    def __init__(self, config: Any, attention: str) -> None:
        self.config, self.attention = config, attention

    def __reduce_ex__(self, protocol: Any) -> Any:
        return setattr, (self.config, _NAME_OF_ATTENTION, self.attention)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Before:
        return _Before(deepcopy(self.config, memo), self.attention)


@dataclass
class AttentionChange:
    """The model's attention goes through our name in the registries."""

    name: str
    module: Any
    before: str

    @property
    def now(self) -> str:
        return f"{type(self.module).__name__} with the attention of transformer_fast"

    def apply(self) -> None:
        from .attention import NAME, register

        register()
        setattr(self.module.config, _NAME_OF_ATTENTION, NAME)
        self.module.__dict__[_RECORD] = _Before(self.module.config, self.before)

    def undo(self) -> None:
        setattr(self.module.config, _NAME_OF_ATTENTION, self.before)
        self.module.__dict__.pop(_RECORD, None)


def recorded(name: str, module: torch.nn.Module) -> AttentionChange | None:
    before = module.__dict__.get(_RECORD)
    return None if before is None else AttentionChange(name, module, before.attention)


def _version_reason() -> str | None:
    import transformers

    parts = transformers.__version__.split(".")
    version = (int(parts[0]), int(parts[1]))
    low, high = _VERSIONS
    if low <= version < high:
        return None
    return (
        f"transformers {transformers.__version__} is not known here; versions {low[0]}.{low[1]} up "
        f"to {high[0]}.{high[1]} are"
    )


def class_of_theirs(module: torch.nn.Module) -> type | None:
    """The class of transformers that the module is of, if it is one of a known model or of all."""
    for kind in type(module).__mro__:
        path = kind.__module__.split(".")
        if path in (["transformers", "pytorch_utils"], ["transformers", "activations"]):
            return kind
        if path[:2] == ["transformers", "models"] and path[2:3] and path[2] in MODELS:
            return kind
    return None


#: Why no model with this config gets another attention, by the config's id.
Refused = dict[int, str]


def refused(root: torch.nn.Module) -> Refused:
    """For the models in ``root``: some share their config, which names the attention."""
    models: list[Any] = [module for module in root.modules() if is_model(module)]
    reasons = ((id(model.config), why_not(model)) for model in models)
    return {config: reason for config, reason in reasons if reason is not None}


def find(name: str, module: torch.nn.Module, refused: Refused) -> Change | str | None:
    """The change of a model or a layer, why it stays, or None: it is neither."""
    return _find_model(name, module, refused) if is_model(module) else _find_layer(name, module)


def _find_model(name: str, model: Any, refused: Refused) -> Change | str | None:
    """The change of a model's attention, or why it stays."""
    reason = _version_reason()
    if reason is not None:
        return reason
    if not (model._can_set_attn_implementation() and registries(model)):
        return f"{type(model).__name__} does not look its attention up in the registry"
    before = model.config._attn_implementation
    if before != "sdpa":
        return f"its attention is {before!r}, and only 'sdpa' is replaced"
    return refused.get(id(model.config)) or AttentionChange(name, model, before)


def _find_layer(name: str, module: torch.nn.Module) -> Change | str | None:
    """The change of a layer's class, or why it stays; None if it is no layer that is known."""
    theirs = class_of_theirs(module)
    if theirs is None:
        return None
    from .layers import CLASSES

    ours = CLASSES.get(theirs.__name__)
    if ours is None:
        return None
    reason = _version_reason() or torch_nn.parametrised(module) or torch_nn.sharded(module)
    if reason is not None:
        return reason
    kind = type(module)
    for method in {"forward", "feed_forward_chunk"} & vars(ours).keys():
        known = getattr(theirs, method, None)
        if known is None or [*signature(known).parameters] != [
            *signature(getattr(ours, method)).parameters
        ]:
            return f"{theirs.__name__}.{method} of this transformers takes other arguments"
        if method in module.__dict__:
            return f"its {method} was replaced on the instance"
        if _unwrapped(getattr(kind, method)) is not _unwrapped(known):
            return f"{kind.__name__} has its own {method}"
    made = torch_nn.subclass(kind, (ours, kind))
    return made if isinstance(made, str) else ClassChange(name, module, kind, made)


def _unwrapped(function: Any) -> Any:
    """Without what transformers itself puts around the forward of each subclass of its layers."""
    while getattr(function, "__globals__", {}).get("__name__") == "transformers.modeling_layers":
        function = function.__wrapped__
    return function
