"""Support for Hugging Face's transformers, which is not imported before the user imports it.

A whole model gets another attention function, through the registry of transformers. A layer gets
another class; see `hugging_face_layers`.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from types import CodeType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..nn.drop_in import functions_of, is_of_others
from ..nn.int8 import is_quantized_from, to_float
from . import classes, packing
from .classes import Change, ClassChange
from .hugging_face_layers import CLASSES, Attention, attention
from .parts import NAME, FusedLayer, is_model
from .private_names import NAME_OF_ATTENTION, arguments, load, sdpa_attention, sdpa_mask

#: Supported versions of transformers, [low, high); with others, models are left unchanged.
_VERSIONS = ((5, 0), (6, 0))
#: Attribute of a model that records its original attention.
_RECORD = "_attention_before_accelerate"


class _Before:
    """The original attention of a model.

    Pickling replaces this object by a call that assigns the original attention to the config, and
    that unpickles as None. A pickled model is therefore the original model, and it loads where this
    library is not installed.
    """

    def __init__(self, config: Any, attention: str) -> None:
        self.config, self.attention = config, attention

    def __reduce_ex__(self, protocol: Any) -> Any:
        set_since = getattr(self.config, NAME_OF_ATTENTION)
        attention = self.attention if set_since == NAME else set_since
        return setattr, (self.config, NAME_OF_ATTENTION, attention)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Before:
        return _Before(deepcopy(self.config, memo), self.attention)


@dataclass
class AttentionChange:
    """Makes the model's config name our attention, which both registries of transformers contain.

    `undo` keeps an attention that the user has set in the meantime.
    """

    name: str
    module: Any
    before: str
    #: Name that `apply` sets: ours. After `undo`: the name set at that time, possibly by the user.
    after: str = NAME

    @property
    def now(self) -> str:
        return described(self.module)

    def apply(self) -> None:
        register()
        setattr(self.module.config, NAME_OF_ATTENTION, self.after)
        self.module.__dict__[_RECORD] = _Before(self.module.config, self.before)

    def undo(self) -> None:
        self.after = getattr(self.module.config, NAME_OF_ATTENTION)
        if self.after == NAME:  # else the user, or another model with this config, has set it
            setattr(self.module.config, NAME_OF_ATTENTION, self.before)
        self.module.__dict__.pop(_RECORD, None)


def recorded(name: str, module: torch.nn.Module) -> AttentionChange | None:
    """Returns the change of the model's attention that `restore` has to undo."""
    before = module.__dict__.get(_RECORD)
    return None if before is None else AttentionChange(name, module, before.attention)


def is_over(change: Change) -> bool:
    """True if the user has set another attention since the change."""
    if not isinstance(change, AttentionChange):
        return False
    return bool(getattr(change.module.config, NAME_OF_ATTENTION) != NAME)


def described(model: Any) -> str:
    """Returns the name of a model with our attention, for the report."""
    return f"{type(model).__name__} with the attention of transformer_fast"


def version_reason() -> str | None:
    """Returns the reason if this version of transformers is not supported."""
    import transformers

    parts = transformers.__version__.split(".")
    version = (int(parts[0]), int(parts[1]))
    low, high = _VERSIONS
    if low <= version < high:
        return None
    return (
        f"transformers {transformers.__version__} is not supported; versions from "
        f"{low[0]}.{low[1]} to below {high[0]}.{high[1]} are"
    )


def _ours_for(module: torch.nn.Module) -> tuple[type, type[FusedLayer]] | None:
    """Returns the module's class in transformers, and our class for it; None: there is no such class."""
    for kind in type(module).__mro__:
        package, *path = kind.__module__.split(".")
        if package != "transformers":
            continue
        ours = CLASSES.get(f"{path[-1].removeprefix('modeling_')}.{kind.__name__}")
        if ours is not None:
            return kind, ours
    return None


#: id of a config -> the reason why no model with this config gets our attention.
Refused = dict[int, str]


def refused(root: torch.nn.Module) -> Refused:
    """Returns the reasons for the models in ``root``; a shared config has one reason."""
    models: list[Any] = [module for module in root.modules() if is_model(module)]
    reasons = ((id(model.config), _why_not(model)) for model in models)
    return {config: reason for config, reason in reasons if reason is not None}


def find(name: str, module: torch.nn.Module, refused: Refused) -> Change | str | None:
    """Returns the change of a model or layer, the reason not to, or None if it is neither."""
    return _find_model(name, module, refused) if is_model(module) else _find_layer(name, module)


def _find_model(name: str, model: Any, refused: Refused) -> Change | str | None:
    """Returns the change of a model's attention, or the reason not to change it."""
    reason = version_reason()
    if reason is not None:
        return reason
    if not (model._can_set_attn_implementation() and _registries(model)):
        if any(map(_own_attention, model.modules())):
            return None
        return f"{type(model).__name__} does not look up its attention in the registry"
    before = model.config._attn_implementation
    if before != "sdpa":
        return f"its attention is {before!r}, and only 'sdpa' is replaced"
    return refused.get(id(model.config)) or AttentionChange(name, model, before)


def _find_layer(name: str, module: torch.nn.Module) -> Change | str | None:
    """Returns the change of a layer's class, the reason not to, or None if the layer is unknown."""
    found = _ours_for(module)
    if found is None:
        return None
    theirs, ours = found
    reason = version_reason() or classes.parametrised(module) or classes.sharded(module)
    reason = reason or classes.replaced_forward(module)
    if reason is not None:
        return reason
    kind: Any = type(module)
    original: Any = theirs.forward  # type: ignore[attr-defined]
    if arguments(original) != arguments(ours.forward):
        return f"{theirs.__name__}.forward takes other arguments in this transformers"
    if is_of_others(original):
        return f"forward was replaced on the class {theirs.__name__}"
    if _unwrapped(kind.forward) is not _unwrapped(original):
        return f"{kind.__name__} has its own forward"
    made = classes.subclass(kind, (ours, kind))
    return made if isinstance(made, str) else ClassChange(name, module, kind, made)


def _own_attention(module: torch.nn.Module) -> bool:
    """True for a module of `CLASSES` that computes attention without the registry."""
    found = _ours_for(module)
    return found is not None and issubclass(found[1], Attention)


def changes_of_attention(
    layers: torch.nn.Module, is_wanted: Callable[[str], bool]
) -> list[ClassChange] | str:
    """Returns the changes of modules with attention outside the registry, or why one is unchanged.

    is_wanted: False for the name of a module in the layers that the user excludes.
    """
    found = []
    for name, module in layers.named_modules():
        if not _own_attention(module):  # attention of the registry, or none
            continue
        change = _find_layer(name, module) if is_wanted(name) else "filter_fn excludes it"
        if not isinstance(change, ClassChange):
            return f"its {name} is left: {change}"
        found.append(change)
    return found


def _unwrapped(function: Any) -> Any:
    """Removes the wrappers of transformers around the forward of its layers' subclasses."""
    while getattr(function, "__globals__", {}).get("__name__") == "transformers.modeling_layers":
        function = function.__wrapped__
    return function


# Checks that a model looks up its attention in the registry and treats all names alike.


def _classes(model: torch.nn.Module) -> Iterable[type]:
    """Returns the classes of all modules in the model, and their bases.

    Excludes classes of torch, and of the core of transformers, which supports every registered
    name.
    """
    return dict.fromkeys(
        kind
        for module in model.modules()
        for kind in type(module).__mro__
        if kind.__module__.split(".")[0] not in ("builtins", "torch", "transformers")
        or kind.__module__.startswith("transformers.models.")
    )


def _registries(model: torch.nn.Module) -> list[Any]:
    """Returns the attention registries in the source modules of the model's classes."""
    found = (sys.modules.get(kind.__module__) for kind in _classes(model))
    registries = (getattr(code, "ALL_ATTENTION_FUNCTIONS", None) for code in found)
    return [registry for registry in registries if registry is not None]


def _why_not(model: torch.nn.Module) -> str | None:
    """Returns the reason why the model depends on the name 'sdpa' or on a registered function."""
    sdpa = sdpa_attention()
    if any(found.get("sdpa") is not sdpa for found in _registries(model)):
        return "another library has replaced transformers' own attention 'sdpa'"
    for kind in _classes(model):
        functions = (f for value in vars(kind).values() for f in functions_of(value))
        if any(_compares_with_sdpa(function.__code__) for function in functions):
            return f"{kind.__name__} checks for the attention name 'sdpa', so it cannot be renamed"
    return None


def _compares_with_sdpa(code: CodeType) -> bool:
    """True if the function, or a nested one, compares a value with the name 'sdpa'."""
    inner = any(_compares_with_sdpa(c) for c in code.co_consts if isinstance(c, CodeType))
    return inner or (any(map(_is_sdpa, code.co_consts)) and _has_comparison(code))


def _is_sdpa(constant: Any) -> bool:
    several = isinstance(constant, (tuple, frozenset))
    return "sdpa" in constant if several else constant == "sdpa"


def _has_comparison(code: CodeType) -> bool:
    is_loaded = False
    for step in dis.get_instructions(code):
        if step.opname in ("COMPARE_OP", "CONTAINS_OP") and is_loaded:
            return True
        if step.opname.startswith("LOAD_CONST"):
            is_loaded = is_loaded or _is_sdpa(step.argval)
        elif not step.opname.startswith(("LOAD_", "CACHE", "EXTENDED_ARG", "PUSH_NULL")):
            is_loaded = False  # stored, or passed as an argument
    return False


def register() -> None:
    """Adds our attention to both registries; idempotent. Runs when transformers is imported.

    The mask registry is needed too: a model whose attention alone is registered gets no mask, and
    then attends to padding without a warning.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask_function)


def save_as_float(model: torch.nn.Module) -> None:
    """Lets `save_pretrained` store float weights of models whose modules have 8-bit weights only.

    `from_pretrained` would read the 8-bit values as floats.
    """
    library = sys.modules.get("transformers.modeling_utils")
    for module in () if library is None else model.modules():
        if isinstance(module, library.PreTrainedModel) and not hasattr(module, "hf_quantizer"):  # type: ignore[union-attr]
            module.hf_quantizer = _quantizer()


def _quantizer() -> Any:
    """The state method of a quantised model, which `save_pretrained` and pickling call."""
    return _quantizer_class()()


@functools.cache
def _quantizer_class() -> Any:
    base: Any = load("transformers.quantizers.base", "HfQuantizer")

    class Int8OfTransformerFast(base):  # type: ignore[misc]
        is_trainable = False

        def __init__(self) -> None:
            method = SimpleNamespace(quant_method="int8 of transformer_fast")
            self.quantization_config = method  # type: ignore[assignment]

        def __reduce__(self) -> Any:
            return _quantizer, ()

        def is_serializable(self) -> bool:
            return True

        def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
            state = model.state_dict()
            for name, module in model.named_modules():
                to_float(module, state, f"{name}." if name else "")
            weights = dict(model.named_parameters(remove_duplicate=False))
            # `from_pretrained` ties weights only if their stored values are equal.
            for name, table in getattr(model, "all_tied_weights_keys", {}).items():
                if table in state and is_quantized_from(weights.get(name), state[table]):
                    state[name] = state[table]
            return state, {}

    return Int8OfTransformerFast


def mask_function(**given: Any) -> Tensor | None:
    """The mask function for transformers: returns the mask of 'sdpa' with a record of the padding."""
    return packing.note_padding(sdpa_mask()(**given), **given)


@contextmanager
def with_our_attention(config: Any) -> Iterator[None]:
    """Makes the config name our attention within the block."""
    register()
    before = getattr(config, NAME_OF_ATTENTION)
    setattr(config, NAME_OF_ATTENTION, NAME)
    try:
        yield
    finally:
        setattr(config, NAME_OF_ATTENTION, before)
