"""Layers that run as one call: their recipes, and the calls.

`recognise` captures a graph of a layer's call (`compile.capture`) and matches it with the matchers of the
compile backend (`compile.layer`). A trial in float64 on random tokens judges the match.

A `Formula` has names of modules, so that it also describes a copy of the layer. A layer is bound to it
(`nn.bound`) as long as it is what it was when it was captured: modules, classes, attributes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from .._context import are_plain_on_cpu
from ..compile import run_time
from ..compile.attention import NO_MASKS, Masks
from ..compile.capture import NotCapturedError, capture, shadow, tensors_of
from ..compile.layer import Found, NotALayerError, layer_of, names_of
from ..compile.sublayers import rotated
from ..nn import fused_layers
from ..nn.bound import bound_to
from ..nn.drop_in import original_class
from ..nn.guard import Guard, Unreadable
from ..recipe import Kind, Layer, NormKind, Place, Sublayer
from .classes import OF_ANY_MODULE, is_plain
from .parts import is_ours
from .private_names import NAME_OF_ATTENTION

#: Not float16, in which some layers clamp their result.
_DTYPES = (torch.float32, torch.bfloat16)
#: Number of tokens in a trial.
TOKENS = 5


class ChangedError(Exception):
    """Raised if a formula no longer holds for its layer."""


@dataclass(frozen=True, eq=False)
class Formula:
    """The recipe of a layer, and the state of the layer for which the recipe is valid."""

    found: Found
    #: See `content`.
    content: tuple[Any, ...]
    #: Name of the module that calls the registered attention; None: no layer of transformers.
    caller: str | None = None
    #: Names of arguments that do not change the result.
    ignored: frozenset[str] = frozenset()
    #: Function of a hand-written layer's tensor arguments that returns the hidden and the added mask of
    #: self-attention, then of attention to the memory.
    masks: Callable[..., tuple[Any, Any, Any, Any]] | None = None
    #: Constants that the code reads; see `State.constants`.
    constants: tuple[tuple[Any, str, Any], ...] = ()
    #: Probabilities of dropout of a hand-written layer, a list; empty: no dropout is active.
    dropouts: Sequence[float] = ()

    @property
    def rotates(self) -> bool:
        """True if queries and keys are rotated by the layer's position embeddings."""
        return self.found.layer.sublayers[0].is_rotated

    def accepts(self, x: Any, rotation: Any) -> bool:
        """True if kernels accept hidden states (B, T, M) and these position embeddings."""
        if not isinstance(x, Tensor) or x.dtype not in _DTYPES or x.dim() != 3:
            return False
        if self.rotates and not _is_rotation(rotation, self.found.layer.sublayers[0].heads, x):
            return False
        return are_plain_on_cpu((x, *rotation))

    def run(
        self, layer: torch.nn.Module, *args: Any, rotation: tuple[Tensor, ...] = (), key: Any = None
    ) -> Any:  # fmt: skip
        """Returns the layer's result, or None if the layer must be called.

        The caller has checked that no tracer or transform is active, and for layers of transformers
        that the layer has no hooks.

        Args:
            args: those of `fused_layers.try_run_bound` from x on, without the last two.
            key: identifies the formula among those of the layer.

        Raises:
            ChangedError: the formula no longer holds for the layer.
        """
        try:
            bound = bound_to(layer, (Formula, key), functools.partial(self._read, layer))
        except Unreadable:
            return None
        given: dict[str, Any] = {"rotation": rotation, "dropouts": self.dropouts}
        y = fused_layers.try_run_bound(bound, *args, **given)
        if y is None or not self.found.returned:
            return y
        return (y, *[None] * (self.found.returned - 1))

    def _read(self, layer: torch.nn.Module, guard: Guard) -> list[Layer[Place]]:
        if self.caller is None:
            for path, module in layer.named_modules():
                if module is not layer:
                    guard.unhooked(module, path)
        guard.whole(layer)
        if content(layer) != self.content:
            raise ChangedError
        training = self.caller is None and layer.training
        if any(m.training is not training for m in layer.modules()):
            raise Unreadable("only a part of the layer is in training")
        for function, name, value in self.constants:
            if guard.value(function.__globals__, name) is not value:
                raise Unreadable("code reads a variable that was changed")
        if self.caller is not None:
            config = layer.get_submodule(self.caller).config
            guard.value(vars(config), NAME_OF_ATTENTION)
            if not is_ours(config):
                raise Unreadable("attention is not ours")
        return [self.found.layer]


def _is_rotation(found: Any, heads: int, x: Tensor) -> bool:
    """True if kernels accept ``found`` as the cosines and sines for x with this number of heads."""
    if not isinstance(found, tuple) or len(found) != 2:
        return False
    return all(
        isinstance(table, Tensor)
        and table.dtype in (torch.float32, x.dtype)
        and table.dtype == found[0].dtype
        and table.shape == found[0].shape
        and table.dim() == 3
        and table.shape[0] in (1, x.shape[0])
        and table.shape[1] == x.shape[1]
        and table.shape[2] % 2 == 0
        and table.shape[2] * heads <= x.shape[2]
        for table in found
    )


def content(layer: torch.nn.Module, without: str = "training") -> tuple[Any, ...]:
    """Returns each module's name, its class before `accelerate`, and its attributes; and which
    parameters are the same tensor.

    An attribute that is neither a plain value nor a function is represented by its type, so that
    copies are equal.
    without: name of an attribute that may differ.
    """
    first: dict[int, str] = {}
    names = layer.named_parameters(remove_duplicate=False)
    firsts = [(name, first.setdefault(id(parameter), name)) for name, parameter in names]
    shared = tuple(pair for pair in firsts if pair[0] != pair[1])
    return shared, *(
        (
            name,
            original_class(module),
            frozenset(
                (key, value if is_plain(value) else type(value))
                for key, value in vars(module).items()
                if key not in OF_ANY_MODULE and key != without
            ),
        )
        for name, module in layer.named_modules()
    )


class Trial(NamedTuple):
    """Result of a call of a copy of the layer."""

    output: Any
    #: The module of the copy that called attention.
    caller: torch.nn.Module


#: `content` of a layer, without its number -> its formula, which a trial in float64 has confirmed.
Judged = dict[tuple[Any, ...], Formula]


def recognise(
    layer: torch.nn.Module, width: int, call: Callable[..., Trial], others: dict[str, Any],
    rotation: tuple[Tensor, ...], judged: Judged,
) -> Formula:  # fmt: skip
    """Returns the formula of a layer.

    The caller has checked `classes.code_of_others`: a trial on a few tokens cannot validate that.

    Args:
        call: takes a copy of the layer, hidden states (1, `TOKENS`, width) and other arguments, and
            calls the copy.
        others: other arguments, which may change the result or not.
        rotation: the position embeddings (1, `TOKENS`, channels); empty: none.
        judged: earlier results. Layers that differ only in number and weights share a trial.

    Raises:
        NotCapturedError, NotALayerError: the layer has no formula; the message is the reason.
    """
    dtypes = {parameter.dtype for parameter in layer.parameters()}
    if len(dtypes) != 1 or not dtypes <= {*_DTYPES}:
        raise NotALayerError("its weights are not all float32, or all bfloat16")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, TOKENS, width, generator=generator, dtype=torch.float64)
    found, caller = _captured(layer, call, x, {}, rotation)
    if any(found.own):
        raise NotALayerError("its attention has a mask of its own")
    used, given = names_of(found.layer), tensors_of(layer)
    if {id(tensor) for tensor in given.values()} != {id(given[name]) for name in used}:
        # The recipe would ignore a later change of these tensors.
        raise NotALayerError(
            "it has parameters or buffers besides those of its linear maps and norms"
        )
    key = content(layer, without="layer_idx")
    before = judged.get(key)
    if before is not None and (before.found, before.caller) == (found, caller):
        return replace(before, content=content(layer))
    judge(layer, found, lambda wide: call(wide, x, rotation).output, x, rotation=rotation)
    ignored = []
    for name, value in others.items():
        try:
            if _captured(layer, call, x, {name: value}, rotation) == (found, caller):
                ignored.append(name)
        except (NotCapturedError, NotALayerError):  # the layer reads the argument
            pass
    judged[key] = Formula(found, content(layer), caller, frozenset(ignored))
    return judged[key]


def _captured(
    layer: torch.nn.Module, call: Callable[..., Trial], x: Tensor, others: dict[str, Any],
    rotation: tuple[Tensor, ...],
) -> tuple[Found, str]:  # fmt: skip
    """Returns the recipe of the layer's graph, and the name of the module that calls attention."""
    caller = ""
    tables = {f"rotation.{index}": table for index, table in enumerate(rotation)}
    plain = {name: value for name, value in others.items() if not isinstance(value, Tensor)}
    given = {name: value for name, value in others.items() if isinstance(value, Tensor)}

    def run(copied: torch.nn.Module, x: Tensor, **more: Tensor) -> Any:
        nonlocal caller
        turned = tuple(more.pop(name) for name in tables)
        trial = call(copied, x, turned, **plain, **more)
        names = {module: name for name, module in copied.named_modules()}
        caller = names[trial.caller]
        return trial.output

    # In bfloat16, casts would round the values that the matchers compare.
    captured = capture(layer, run, {"x": x, **tables, **given}, original_class, dtype=torch.float32)
    return layer_of(captured, "x", tuple(tables)), caller


def judge(
    layer: torch.nn.Module, found: Found, call: Callable[[Any], Any], x: Tensor, **inputs: Any
) -> None:
    """Raises `NotALayerError` if ``call`` of the layer in float64 has other results than its recipe.

    inputs: as in `compute`, in float64.
    """
    wide = shadow(
        layer, lambda x: x.detach().double() if x.is_floating_point() else x, original_class, False
    )
    output = call(wide)
    expected = output[0] if isinstance(output, tuple) else output
    given = tensors_of(wide)

    def tensor(place: Place) -> Tensor:
        x = given[f"{place.module}.{place.name}".removeprefix(".")]
        return x.t() if place.transposed else x

    parameters = found.layer.each(tensor)
    y = compute(parameters, x, **inputs)
    # Models rotate in float32.
    if y.shape != expected.shape or not (y - expected).abs().max() <= 1e-6 * expected.abs().max():
        raise NotALayerError("it computes something else than its graph")


def compute(
    layer: Layer[Tensor], x: Tensor, rotation: tuple[Tensor, ...] = (), memory: Tensor | None = None,
    own: Masks = NO_MASKS, cross: Masks = NO_MASKS,
) -> Tensor:  # fmt: skip
    """Returns what a recipe computes of x (B, T, M) and memory (B, S, M), by reference formulas.

    own, cross: masks of self-attention and of attention to the memory, with tensors for nodes.
    """
    activation = reference.ACTIVATIONS.get(layer.activation or "", lambda x: x)
    tables = [table[:, None] for table in rotation]
    for one in layer.sublayers:
        inside = _normed(one, x) if layer.norm_first else x
        *firsts, second = one.maps
        # Concatenated, so that one joined map and separate maps are the same.
        weights = torch.cat([each.weight for each in firsts])
        biases = [
            each.weight.new_zeros(len(each.weight)) if each.bias is None else each.bias
            for each in firsts
        ]
        maps = weights, torch.cat(biases)
        if one.kind.is_attention:
            of_query = one.heads * (one.head_size or x.shape[-1] // one.heads)
            own_maps, of_memory = zip(*(part.tensor_split([of_query]) for part in maps))  # noqa: B905
            source = memory if one.kind is Kind.CROSS_ATTENTION else inside
            assert source is not None
            keys, values = F.linear(source, *of_memory).chunk(2, -1)
            q, k, v = (
                part.unflatten(-1, (-1, of_query // one.heads)).transpose(1, 2)
                for part in (F.linear(inside, *own_maps), keys, values)
            )
            q, k = rotated(q, *tables), rotated(k, *tables)
            hidden, added, is_causal = cross if one.kind is Kind.CROSS_ATTENTION else own
            if one.scale is not None:
                q = q * (one.scale * q.shape[-1] ** 0.5)
            k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
            y = _attended(q, k, v, hidden, added, is_causal)
        elif one.kind is Kind.GATED_FEED_FORWARD:
            gate, up = F.linear(inside, *maps).chunk(2, -1)
            y = activation(gate) * up
        else:
            y = activation(F.linear(inside, *maps))
        x = x + F.linear(y, second.weight, second.bias)
        x = x if layer.norm_first else _normed(one, x)
    return x


def _attended(q: Tensor, k: Tensor, v: Tensor, hidden: Any, added: Any, is_causal: bool) -> Tensor:
    if is_causal:
        y = F.scaled_dot_product_attention(q, k, v, added, is_causal=True)
    elif hidden is None and isinstance(added, Tensor):
        y = F.scaled_dot_product_attention(q, k, v, added)
    else:
        y, _ = run_time.attention(q, k, v, hidden, added, q.shape[-1] ** -0.5, 0.0, False, False)
    return y.transpose(1, 2).flatten(2)


def _normed(one: Sublayer[Tensor], x: Tensor) -> Tensor:
    kind, norm, shape = one.norm.kind, one.norm, x.shape[-1:]
    if kind is NormKind.NONE:
        return x
    if kind is NormKind.LAYER:
        return F.layer_norm(x, shape, norm.weight, norm.bias, norm.eps)
    if kind is NormKind.RMS:
        return F.rms_norm(x, shape, norm.weight, norm.eps)
    unbiased = kind is NormKind.ANNOTATED
    return reference.annotated_layer_norm(x, norm.weight, norm.bias, norm.eps, unbiased)
