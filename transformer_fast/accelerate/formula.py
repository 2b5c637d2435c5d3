"""Layers that run as one call: their recipes, and the calls.

`recognise` captures a graph of a layer's call (`compile.capture`) and matches it with the matchers of the
compile backend (`compile.layer`). A trial in float64 on random tokens judges the match.

A `Formula` has names of modules, so that it also describes a copy of the layer. A layer is bound to it
(`nn.bound`) as long as it is what it was when it was captured: modules, classes, attributes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._context import are_plain_on_cpu
from ..compile import run_time
from ..compile.attention import NO_MASKS, Masks
from ..compile.capture import NotCapturedError, capture, shadow, tensors_of
from ..compile.layer import Found, NotALayerError, layer_of, names_of
from ..compile.sublayers import rotated
from ..nn import fused_layers, fusion
from ..nn.bound import Bound, bound_to
from ..nn.drop_in import original_class
from ..nn.guard import Guard, Unreadable
from ..recipe import Kind, Layer, NormKind, Place, Sublayer
from .classes import OF_ANY_MODULE, is_plain
from .parts import is_ours
from .private_names import CHECKPOINTING, NAME_OF_ATTENTION

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
    #: Mode of the layer and of all modules in it.
    training: bool = False
    #: Probabilities of dropout of each sub-layer, a list; empty: no dropout is active.
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
        """Returns the layer's result in one call of a kernel, or None if there is no such kernel.

        The caller has checked that no tracer or transform is active, and for layers of transformers
        that the layer has no hooks.

        Args:
            args: those of `fused_layers.try_run_bound` from x to ``cross``.
            key: identifies the formula among those of the layer.

        Raises:
            ChangedError: the formula no longer holds for the layer.
        """
        bound = self._bound(layer, key)
        if bound is None:
            return None
        given: dict[str, Any] = {"rotation": rotation, "dropouts": self.dropouts}
        return self._returned(fused_layers.try_run_bound(bound, *args, **given))

    def compose(
        self, layer: torch.nn.Module, x: Tensor, attention: Callable[..., Any], mask: Any,
        rotation: tuple[Tensor, ...], key: Any = None,
    ) -> Any:  # fmt: skip
        """Returns an encoder layer's result, composed of ops; None: its own forward must run.

        For calls with gradients or dropout. Arguments and exceptions as in `run`.

        Args:
            attention: the attention function in the registry of transformers.
            mask: its argument ``attention_mask``.
        """
        bound = self._bound(layer, key)
        if bound is None or not self._composes(bound, x):
            return None
        caller = layer.get_submodule(self.caller or "")

        def attend(x: Tensor, one: Sublayer[Any], dropout_p: float) -> Tensor:
            q, k, v = _heads(one, x, rotation)
            y, _ = attention(caller, q, k, v, mask, dropout=dropout_p, is_causal=False)
            return y.flatten(2)  # type: ignore[no-any-return]

        return self._returned(fusion.compose_bound(bound.layers[0], self.dropouts, x, attend))

    def _composes(self, bound: Bound, x: Tensor) -> bool:
        assert bound.parameters is not None
        tensors = bound.parameters.tensors
        if not are_plain_on_cpu(tensors):
            return False
        if torch.is_autocast_enabled("cpu"):
            # Captured without autocast; under it, these ops have the dtypes of the modules.
            return (
                not self.rotates
                and torch.get_autocast_dtype("cpu") == torch.bfloat16
                and all(
                    one.norm.kind is NormKind.LAYER and one.kind is not Kind.GATED_FEED_FORWARD
                    for one in self.found.layer.sublayers
                )
            )
        return all(tensor.dtype == x.dtype for tensor in tensors)

    def _bound(self, layer: torch.nn.Module, key: Any) -> Bound | None:
        try:
            key = Formula, key, self.training
            return bound_to(layer, key, functools.partial(self._read, layer))
        except Unreadable:
            return None

    def _returned(self, y: Tensor | None) -> Any:
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
        if any(m.training is not self.training for m in layer.modules()):
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
                if not (key in OF_ANY_MODULE or key == without or _is_checkpointing(module, key))
            ),
        )
        for name, module in layer.named_modules()
    )


def _is_checkpointing(module: torch.nn.Module, key: str) -> bool:
    """True for an attribute of transformers' layers that does not affect what they compute."""
    return key in CHECKPOINTING and original_class(module).__module__.startswith("transformers.")


class Trial(NamedTuple):
    """Result of a call of a copy of the layer."""

    output: Any
    #: The module of the copy that called attention.
    caller: torch.nn.Module


class Formulas(NamedTuple):
    """A layer's formulas in inference and in training."""

    inference: Formula
    #: None: its own forward runs, since training adds more to the graph than dropout of attention
    #: weights, of hidden units, and of outputs of sub-layers.
    training: Formula | None


#: `content` of a layer, without its number -> its formulas, which a trial in float64 has confirmed.
Judged = dict[tuple[Any, ...], Formulas]


def recognise(
    layer: torch.nn.Module, width: int, call: Callable[..., Trial], others: dict[str, Any],
    rotation: tuple[Tensor, ...], judged: Judged,
) -> Formulas:  # fmt: skip
    """Returns the formulas of a layer.

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
    require_one_dtype(layer)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, TOKENS, width, generator=generator, dtype=torch.float64)
    found, caller = _captured(layer, call, x, {}, rotation)
    if any(found.own):
        raise NotALayerError("its attention has a mask of its own")
    require_all_used(layer, found.layer)
    key = content(layer, without="layer_idx")
    before = judged.get(key)
    if before is not None and (before.inference.found, before.inference.caller) == (found, caller):
        inference, training = before
        own = content(layer)
        return Formulas(
            replace(inference, content=own), training and replace(training, content=own)
        )
    judge(layer, found, lambda wide: call(wide, x, rotation).output, x, rotation=rotation)
    ignored = []
    for name, value in others.items():
        try:
            if _captured(layer, call, x, {name: value}, rotation) == (found, caller):
                ignored.append(name)
        except (NotCapturedError, NotALayerError):  # the layer reads the argument
            pass
    one = Formula(found, content(layer), caller, frozenset(ignored))
    judged[key] = Formulas(one, _in_training(layer, call, x, rotation, one))
    return judged[key]


def _in_training(
    layer: torch.nn.Module, call: Callable[..., Trial], x: Tensor, rotation: tuple[Tensor, ...],
    one: Formula,
) -> Formula | None:  # fmt: skip
    """Returns the formula of a layer in training, or None; one: its formula in inference."""
    try:
        found, _ = _captured(layer, call, x, {}, rotation, True)
    except NotCapturedError:
        return None
    if found._replace(dropouts=one.found.dropouts) != one.found:
        return None
    dropouts = [*found.dropouts] if any(found.dropouts) else []
    return replace(one, found=found, training=True, dropouts=dropouts)


def _captured(
    layer: torch.nn.Module, call: Callable[..., Trial], x: Tensor, others: dict[str, Any],
    rotation: tuple[Tensor, ...], training: bool = False,
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
    captured = capture(
        layer, run, {"x": x, **tables, **given}, original_class, training, dtype=torch.float32
    )
    return layer_of(captured, "x", tuple(tables)), caller


def require_one_dtype(layer: torch.nn.Module) -> None:
    """Raises `NotALayerError` if kernels cannot read the layer's weights."""
    dtypes = {parameter.dtype for parameter in layer.parameters()}
    if len(dtypes) != 1 or not dtypes <= {*_DTYPES}:
        raise NotALayerError("its weights are not all float32, or all bfloat16")


def require_all_used(
    layer: torch.nn.Module, recipe: Layer[Place], others: Iterable[Tensor] = ()
) -> None:
    """Raises `NotALayerError` if tensors of the layer are neither in its recipe nor in ``others``."""
    given = tensors_of(layer)
    used = {id(x) for x in (*(given[name] for name in names_of(recipe)), *others)}
    if {id(tensor) for tensor in given.values()} != used:
        # The recipe would ignore a later change of these tensors.
        raise NotALayerError(
            "it has parameters or buffers besides those of its linear maps and norms"
        )


def in_float64(module: Any) -> Any:
    """Returns a copy of the module, with its original classes, that computes in float64."""

    def wide(x: Tensor) -> Tensor:
        return x.detach().double() if x.is_floating_point() else x

    return shadow(module, wide, original_class, False)


def judge(
    layer: torch.nn.Module, found: Found, call: Callable[[Any], Any], x: Tensor, **inputs: Any
) -> None:
    """Raises `NotALayerError` if ``call`` of the layer in float64 has other results than its recipe.

    inputs: as in `compute`, in float64.
    """
    wide = in_float64(layer)
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
    """Returns the output of a recipe for x (B, T, M) and memory (B, S, M), in float64.

    own, cross: masks of self-attention and of attention to the memory, as tensors, not nodes.
    """

    def attend(x: Tensor, one: Sublayer[Any], _: float) -> Tensor:
        is_cross = one.kind is Kind.CROSS_ATTENTION
        q, k, v = _heads(one, x, rotation, memory if is_cross else None)
        if one.scale is not None:
            q = q * (one.scale * q.shape[-1] ** 0.5)
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        return _attended(q, k, v, *(cross if is_cross else own))

    return fusion.compose_bound(layer, (), x, attend)


def _heads(
    one: Sublayer[Any], x: Tensor, rotation: tuple[Tensor, ...], memory: Tensor | None = None
) -> list[Tensor]:
    """Returns queries, keys and values (B, heads, T, D), queries and keys rotated."""
    tables = [table[:, None] for table in rotation]
    q, k, v = fusion.projections(one, x, memory)
    return [rotated(q, *tables), rotated(k, *tables), v]


def _attended(q: Tensor, k: Tensor, v: Tensor, hidden: Any, added: Any, is_causal: bool) -> Tensor:
    if is_causal or (hidden is None and isinstance(added, Tensor)):
        y = F.scaled_dot_product_attention(q, k, v, added, is_causal=is_causal)
    else:
        y, _ = run_time.attention(q, k, v, hidden, added, q.shape[-1] ** -0.5, 0.0, False, False)
    return y.transpose(1, 2).flatten(2)
