"""Recipes of Transformer layers: what a layer computes, and where its parameters are.

A recipe names modules and parameters by their path in the layer, so that it also describes a copy of
the layer. Recognisers return recipes; `nn.bound.Bound` runs them.

The records are generic in `Of`, the form of a parameter: a `Place`, the node of a graph that reads the
parameter, or the tensor itself. `Layer.each` converts one form to another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Generic, TypeVar


class Kind(IntEnum):
    """Kind of a sub-layer: the codes of ``SublayerKind`` in csrc/cpu/layers.

    Two kinds occur only in calls of the kernel, which takes two linear maps of each sub-layer: they
    hold the further maps of the sub-layer after them (`Sublayer.in_pairs`).
    """

    SELF_ATTENTION = 0
    CROSS_ATTENTION = 1
    FEED_FORWARD = 2
    #: The maps of queries and of keys. The first map of the attention after it is that of values.
    QUERIES_AND_KEYS = 3
    #: ``second(activation(gate(x)) * up(x))``
    GATED_FEED_FORWARD = 4
    #: Both maps are the gate. The first map of the network after it is ``up``.
    GATE = 5

    @property
    def is_attention(self) -> bool:
        return self in (Kind.SELF_ATTENTION, Kind.CROSS_ATTENTION)

    @property
    def is_part(self) -> bool:
        """True if it holds maps of the sub-layer after it."""
        return self in (Kind.QUERIES_AND_KEYS, Kind.GATE)


class NormKind(IntEnum):
    """Kind of a norm: the codes of ``NormKind`` in csrc/cpu/ops/layer_norm."""

    LAYER = 0  #: ``(x - mean) / sqrt(var + eps)``
    RMS = 1  #: ``x / sqrt(mean(x^2) + eps)``
    ANNOTATED = 2  #: ``(x - mean) / (std + eps)``, with the unbiased standard deviation
    ANNOTATED_BIASED = 3  #: the same with the biased one
    NONE = -1  #: There is no norm.


#: A parameter.
Of = TypeVar("Of")
Other = TypeVar("Other")


@dataclass(frozen=True)
class Place:
    """A parameter of a layer."""

    #: Path of its module in the layer, as in `torch.nn.Module.get_submodule`; "": the layer itself.
    module: str
    #: Its name in the module.
    name: str
    #: First row, and last row + 1, if the place is a part of a parameter; None: all rows.
    rows: tuple[int, int] | None = None
    #: True if the parameter is (in_features, out_features), as in transformers' Conv1D. ``rows`` then
    #: are those of the transposed parameter.
    transposed: bool = False


@dataclass(frozen=True)
class Linear(Generic[Of]):
    """A linear map, ``x @ weight.T + bias``."""

    weight: Of  #: (out_features, in_features)
    bias: Of | None  #: (out_features,)

    def each(self, function: Callable[[Of], Other]) -> Linear[Other]:
        return Linear(function(self.weight), _of(function, self.bias))


@dataclass(frozen=True)
class Norm(Generic[Of]):
    """A norm over the last dimension, M."""

    kind: NormKind
    weight: Of | None  #: (M,)
    bias: Of | None  #: (M,)
    eps: float
    #: A module that must be called, because it is none of these norms; kind is then `NONE`. Its `Place`
    #: has the name "".
    module: Of | None = None

    def each(self, function: Callable[[Of], Other]) -> Norm[Other]:
        weight, bias = _of(function, self.weight), _of(function, self.bias)
        return Norm(self.kind, weight, bias, self.eps, _of(function, self.module))


#: Placeholder for a missing norm, such as that of a first layer whose input is already normalised.
NO_NORM: Norm[Any] = Norm(NormKind.NONE, None, None, 0.0)


@dataclass(frozen=True)
class Sublayer(Generic[Of]):
    """A sub-layer with its residual sum and norm: ``norm(x + f(x))``, or pre-norm ``x + f(norm(x))``."""

    #: Never a kind that is a part of another sub-layer.
    kind: Kind
    #: Attention: of queries, keys and values, (M, M) unless heads have other sizes, or one joined map,
    #: (3 M, M); then the output's.
    #: Feed-forward: first (F, M) and second (M, F). Gated: gate and up (F, M), or one joined map
    #: (2 F, M); then second. The rows of a joined map are those of its parts in this order.
    maps: tuple[Linear[Of], ...]
    norm: Norm[Of]
    #: The fields from here on describe attention only. Number of heads.
    heads: int = 0
    #: True: the input is (B, T, M); False: (T, B, M).
    batch_first: bool = True
    #: Factor of the scores; None: 1 / sqrt(D).
    scale: float | None = None
    #: Number of heads of keys and values; 0: ``heads``.
    key_heads: int = 0
    #: Channels of a head, D; 0: M / heads.
    head_size: int = 0
    #: True if queries and keys are rotated by rotary position embeddings, cosines and sines that the
    #: layer's caller passes.
    is_rotated: bool = False

    @property
    def is_for_steps(self) -> bool:
        """True if only decoding steps have a kernel for it."""
        return self.scale is not None or self.key_heads > 0 or self.head_size > 0

    def each(self, function: Callable[[Of], Other]) -> Sublayer[Other]:
        maps = tuple(one.each(function) for one in self.maps)
        return replace(self, maps=maps, norm=self.norm.each(function))  # type: ignore[arg-type,return-value]

    def in_pairs(self) -> Iterator[tuple[Kind, Linear[Of], Linear[Of], Norm[Of]]]:
        """Yields the parts of the sub-layer in the order in which kernels run them, two maps each.

        Separate maps of queries and keys are a part of their own, without a norm, and so is a gate.
        """
        *first, last = self.maps
        if len(first) == 3:
            yield Kind.QUERIES_AND_KEYS, first[0], first[1], NO_NORM
        elif len(first) == 2:
            yield Kind.GATE, first[0], first[0], NO_NORM
        yield self.kind, first[-1], last, self.norm


@dataclass(frozen=True)
class Layer(Generic[Of]):
    """An encoder or a decoder layer: sub-layers in order, each applied to the last output."""

    sublayers: tuple[Sublayer[Of], ...]
    #: Pre-norm; see `Sublayer`.
    norm_first: bool
    #: Activation of the networks: a name that the kernels support, or a callable; None: no network.
    activation: Any
    #: Paths of the modules with dropout, which the formula omits. The probability is the module's
    #: ``p``, or ``dropout`` of attention.
    dropouts: tuple[str, ...] = ()

    def each(self, function: Callable[[Of], Other]) -> Layer[Other]:
        """Returns the recipe with the function's result in place of each parameter."""
        sublayers = tuple(one.each(function) for one in self.sublayers)
        return replace(self, sublayers=sublayers)  # type: ignore[arg-type,return-value]


def _of(function: Callable[[Of], Other], value: Of | None) -> Other | None:
    return None if value is None else function(value)
