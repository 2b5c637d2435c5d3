"""Hand-written encoder and decoder layers, which run as one call.

Only a call shows which of a layer's arguments are masks. A call is captured with symbols in place of its
sizes (`compile.capture`) and matched with the matchers of the compile backend (`compile.layer`). A trial
in float64 on its arguments, without dropout, judges the match (`formula.judge`). With gradients or
dropout the entry for small layers runs the call (`fused_layers`). The layer's own forward runs where the
match fails, with gradients in large layers, and after a change of the layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor
from torch.fx import GraphModule

from .._context import are_plain_on_cpu, in_torch_func, is_recorded, may_be_recomputed
from ..compile.capture import NotCapturedError, capture
from ..compile.layer import layer_of, masks_of
from ..compile.sublayers import mask_of
from ..nn import fused_layers
from ..nn.drop_in import is_of_others, original_class, runs_torch_forward
from . import classes, formula
from .classes import OF_ANY_MODULE, ClassChange, State, is_plain
from .formula import ChangedError, Formula
from .parts import FusedLayer, is_model

#: Numbers of linear layers in a module that may be an encoder or a decoder layer.
_LINEAR = range(4, 12)
#: Number of calls with arguments of one `_kind` that run unchanged. The next one is captured, which
#: takes up to a second.
CALLS_BEFORE = 2
NOTE = (
    "one call, with gradients if it is small, if its third call shows that it is an encoder or decoder"
    " layer"
)


class _Masks:
    """Computes the masks of a form's calls. The layers of one forward share the last result.

    Masks are compared by value. That takes less time than to compute a small mask, and also detects
    writes through NumPy.
    """

    def __init__(self, function: GraphModule, x: int) -> None:
        self._function = function
        inputs = function.graph.find_nodes(op="placeholder")
        self._used = [index for index, node in enumerate(inputs) if node.users]
        self._is_shared = x not in self._used
        #: Whether inference mode was on, copies of the tensors in use, and the result.
        self._last: tuple[bool, list[Tensor], Any] | None = None

    def __call__(self, *tensors: Tensor) -> Any:
        """Returns the hidden and the added mask of self-attention, then of attention to the memory."""
        used, last = [tensors[index] for index in self._used], self._last
        mode = torch.is_inference_mode_enabled()
        if last is not None and last[0] is mode and all(map(torch.equal, used, last[1])):
            return last[2]
        found = self._function(*tensors)
        if self._is_shared and not any(x.requires_grad for x in used):
            self._last = mode, [x.clone() for x in used], found
        return found


#: Layer -> kind of its arguments -> formula, the reason why it has none, or the number of calls so far.
_forms: WeakKeyDictionary[torch.nn.Module, dict[Any, Formula | str | int]] = WeakKeyDictionary()
#: Content of a layer and kind of its arguments -> its formula. Weak, because both refer to users'
#: classes: an entry lives as long as a layer uses the formula.
_judged: WeakValueDictionary[Any, Formula] = WeakValueDictionary()


class WrittenLayer(FusedLayer):
    """A hand-written layer; its own forward runs where one kernel call cannot."""

    _theirs: type[torch.nn.Module]
    _names: tuple[str, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        y = self._in_one_call(args, kwargs)
        return super().forward(*args, **kwargs) if y is None else y

    def _in_one_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
        if (
            len(args) > len(self._names)
            or not are_plain_on_cpu(tensors.values())
            or is_recorded()
            or in_torch_func()
            or runs_torch_forward(args[0] if args else None, self._theirs)
        ):
            return None
        kind = _kind(given, self.training)
        if kind is None:
            return None
        forms = _forms.setdefault(self, {})
        form = forms.get(kind, 0)
        if isinstance(form, int):
            if torch.is_autocast_enabled("cpu") or may_be_recomputed():
                return None
            shape = next(iter(tensors.values())).shape
            if torch.is_grad_enabled() and not fused_layers.is_small(shape, True):
                return None
            if form < CALLS_BEFORE:
                forms[kind] = form + 1
                return None
            form = forms[kind] = _recognised(self, self._theirs, given, tensors, kind)
        if isinstance(form, str):
            return None
        found, masks = form.found, form.masks
        x, *_ = tensors.values()
        assert masks is not None
        hidden, added, of_memory, added_to = masks(*tensors.values())
        own = mask_of(x, hidden, added, found.own.is_causal)
        cross = mask_of(x, of_memory, added_to, found.cross.is_causal)
        if own is None or cross is None:
            return None
        memory = None if found.memory is None else tensors[found.memory]
        try:
            return form.run(self, x, None, own, memory, cross, key=kind)
        except ChangedError:
            forms[kind] = CALLS_BEFORE
            return None

    def _in_parts(self) -> dict[str, str]:
        reasons = [form for form in _forms.get(self, {}).values() if isinstance(form, str)]
        return {"the layer": reasons[-1]} if reasons else {}


def _kind(given: dict[str, Any], training: bool) -> tuple[Any, ...] | None:
    """Returns the key of a form: names, which tensors and which sizes are the same, dtypes, and other
    plain values.
    """
    found: list[Any] = [training]
    width, seen = None, {0: 0, 1: 1}
    for name, value in given.items():
        if isinstance(value, Tensor):
            sizes = [*value.shape]
            if width is None:
                if value.dim() != 3 or not (value.is_floating_point() and value.is_contiguous()):
                    return None
                width = sizes[-1]
            # `capture` keeps such last dimensions as numbers, too.
            last = sizes.pop() if value.is_floating_point() and sizes[-1:] == [width] else None
            places = [seen.setdefault(size, len(seen)) for size in sizes]
            # In a capture, arguments that are the same tensor are indistinguishable.
            same = next(other for other, x in given.items() if x is value)
            found.append((name, same, value.dtype, last, *places))
        elif type(value) in (bool, int, float, str, type(None)) and width is not None:
            found.append((name, value))
        else:
            return None
    return tuple(found)


def _recognised(
    layer: torch.nn.Module, theirs: Any, given: dict[str, Any], tensors: dict[str, Tensor], kind: Any
) -> Formula | str:  # fmt: skip
    states = [State.of(module) for module in layer.modules()]
    reason = next(filter(None, (state.why_not for state in states)), None) or _unseen(layer)
    if reason is not None:
        return reason
    content = formula.content(layer)
    shared, *_ = content
    if shared:  # a recipe names only one of them, and would miss a later separation
        return f"{' and '.join(shared[0])} are the same tensor"
    judged = _judged.get((content, kind))
    if judged is not None:
        return judged
    x, others = next(iter(tensors)), {n: v for n, v in given.items() if n not in tensors}

    def call(copied: Any, **tensors: Tensor) -> Any:
        return theirs.forward(copied, **others, **tensors)

    try:
        width = tensors[x].shape[2]
        dense = {name: t.contiguous() for name, t in tensors.items()}
        captured = capture(layer, call, dense, original_class, layer.training, width=width)
        # The layer changes no mode, so its results are the same with and without gradients.
        modes = captured.modes._replace(grad=False)
        found = layer_of(captured._replace(modes=modes), x)
        masks = masks_of(captured, found, [*tensors])
        wide = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
        hidden, added, of_memory, added_to = masks(*wide.values())
        with torch.no_grad():
            formula.judge(
                layer, found, lambda copied: call(copied, **wide), wide[x],
                memory=None if found.memory is None else wide[found.memory],
                own=found.own._replace(hidden=hidden, added=added),
                cross=found.cross._replace(hidden=of_memory, added=added_to),
            )  # fmt: skip
    except NotCapturedError as error:
        return str(error)
    except Exception as error:  # the layer refuses float64, say
        return f"a trial call failed ({type(error).__name__}: {error})"
    constants = tuple(constant for state in states for constant in state.constants)
    judged = _judged[content, kind] = Formula(
        found, content, masks=_Masks(masks, [*tensors].index(x)), constants=constants,
        training=layer.training, dropouts=[*found.dropouts] if any(found.dropouts) else [],
    )  # fmt: skip
    return judged


def _unseen(layer: torch.nn.Module) -> str | None:
    """Returns the reason if an attribute may change without an assignment, or during a capture."""
    for module in layer.modules():
        for name, value in vars(module).items():
            if not (is_plain(value) or name in OF_ANY_MODULE):
                return (
                    f"changes of its attribute {name}, a {type(value).__name__}, would not be seen"
                )
    return None


def find(name: str, module: torch.nn.Module) -> ClassChange | str | None:
    """Returns the change of a hand-written layer, the reason not to, or None if it cannot be one."""
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule) or not is_of_others(kind.forward):
        return None
    if not _may_be_layer(module):
        return None
    parameters = [*inspect.signature(kind.forward).parameters.values()][1:]  # without self
    if {p.kind for p in parameters} != {inspect.Parameter.POSITIONAL_OR_KEYWORD}:
        return None
    reason = classes.sharded(module) or classes.parametrised(module)
    reason = reason or classes.replaced_forward(module)
    if reason is not None:
        return reason
    made = classes.subclass(
        kind, (WrittenLayer, kind), _theirs=kind, _names=tuple(p.name for p in parameters),
        __signature__=inspect.signature(kind),
    )  # fmt: skip
    return made if isinstance(made, str) else ClassChange(name, module, kind, made, NOTE)


def _may_be_layer(module: torch.nn.Module) -> bool:
    """True if the module has the linear layers and norms of one layer, and is not a list of layers."""
    if sum(isinstance(inner, torch.nn.Linear) for inner in module.modules()) not in _LINEAR:
        return False
    if not any(map(_is_norm, module.modules())):
        return False
    return not any(
        isinstance(inner, torch.nn.Embedding) or is_model(inner) or _has_layers(inner)
        for inner in module.modules()
    )


def _has_layers(module: torch.nn.Module) -> bool:
    return isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) and any(
        any(map(_is_norm, child.modules()))
        and any(isinstance(inner, torch.nn.Linear) for inner in child.modules())
        for child in module.children()
    )


def _is_norm(module: torch.nn.Module) -> bool:
    """True if the module has parameters, all of one dimension."""
    parameters: Iterator[Any] = iter(module.parameters(recurse=True))
    return {parameter.dim() for parameter in parameters} == {1}
