"""The arguments record of each op, a NamedTuple; and `LayerStack`, of kernels for whole layers.

A record's fields are the parameters of ``reference.<op>``, in order, so that ``reference.<op>(*record)``
runs the op. The check of the public function builds it, the dispatcher reads it, kernels receive it, and
only the call of an operator unpacks it. Dynamo of torch 2.10 traces fields and methods of a NamedTuple,
but no other attributes: hence ``type(record).op``, and ``tensors`` is a method.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from ..recipe import Kind, NormKind

#: Op -> class of its arguments record.
RECORDS: dict[str, Any] = {}
_Record = TypeVar("_Record", bound="type[Any]")


def _record(op: str) -> Callable[[_Record], _Record]:
    def complete(kind: _Record) -> _Record:
        kind.op = op
        setattr(kind, "__repr__", _describe)  # noqa: B010 - mypy
        RECORDS[op] = kind
        return kind

    return complete


def _describe(record: Any) -> str:
    """Shapes and dtypes of the tensors, and the other arguments that are not None, False or 0."""
    parts = []
    for name, value in zip(record._fields, record, strict=True):
        if isinstance(value, Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            parts.append(f"{name} {dtype} {tuple(value.shape)}")
        elif value is not None and value is not False and value != 0.0:
            parts.append(f"{name} {getattr(value, '__name__', value)}")
    return f"{type(record).op}({', '.join(parts)})"


@_record("layer_norm")
class LayerNormArguments(NamedTuple):
    input: Tensor
    normalized_shape: Any  # a tuple[int, ...] after the checks
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.input, self.weight, self.bias


@_record("add_layer_norm")
class AddLayerNormArguments(NamedTuple):
    input: Tensor
    residual: Tensor
    normalized_shape: Any  # a tuple[int, ...] after the checks
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    dropout_p: float = 0.0
    seed: Tensor | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.input, self.residual, self.weight, self.bias


@_record("rms_norm")
class RMSNormArguments(NamedTuple):
    input: Tensor
    normalized_shape: Any  # a tuple[int, ...] after the checks
    weight: Tensor | None
    eps: float | None  # a number after the checks

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.input, self.weight


@_record("add_rms_norm")
class AddRMSNormArguments(NamedTuple):
    input: Tensor
    residual: Tensor
    normalized_shape: Any  # a tuple[int, ...] after the checks
    weight: Tensor | None
    eps: float | None  # a number after the checks
    dropout_p: float = 0.0
    seed: Tensor | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.input, self.residual, self.weight


@_record("annotated_layer_norm")
class AnnotatedLayerNormArguments(NamedTuple):
    input: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    unbiased: bool = True

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.input, self.weight, self.bias


@_record("add_annotated_layer_norm")
class AddAnnotatedLayerNormArguments(NamedTuple):
    input: Tensor
    residual: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    unbiased: bool
    dropout_p: float = 0.0
    seed: Tensor | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.input, self.residual, self.weight, self.bias


@_record("attention")
class AttentionArguments(NamedTuple):
    """See `reference.attention` for shapes and semantics."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    key_lengths: Tensor | None = None
    is_causal: bool = False
    #: None: 1 / sqrt(head size).
    scale: float | None = None
    dropout_p: float = 0.0
    seed: Tensor | None = None
    enable_gqa: bool = False
    need_weights: bool = False
    query_lengths: Tensor | None = None
    #: Packed sequences only: the largest numbers of queries and of keys. Lengths are then offsets.
    longest: tuple[int, int] | None = None
    #: Positive; None: scores are not capped.
    softcap: float | None = None
    #: See `reference.attention.empty_output`; None: any memory order is allowed.
    contiguous: bool | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self[:3]


@_record("linear")
class LinearArguments(NamedTuple):
    input: Tensor
    weight: Tensor
    bias: Tensor | None = None
    #: Name of the activation, or the callable that the user gave; None: no activation.
    activation: Any = None
    residual: Tensor | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.input, self.weight, self.bias, self.residual


@_record("feed_forward")
class FeedForwardArguments(NamedTuple):
    input: Tensor
    weight1: Tensor
    bias1: Tensor | None
    weight2: Tensor
    bias2: Tensor | None
    #: Name of the activation, or the callable that the user gave.
    activation: Any
    dropout_p: float = 0.0
    seed: Tensor | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self[:5]


@_record("cross_entropy")
class CrossEntropyArguments(NamedTuple):
    input: Tensor
    target: Tensor
    ignore_index: int
    label_smoothing: float

    def tensors(self) -> tuple[Tensor | None, ...]:
        return (self.input,)


@_record("linear_cross_entropy")
class LinearCrossEntropyArguments(NamedTuple):
    input: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    ignore_index: int
    label_smoothing: float
    summed: bool = False

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self[:3]


@_record("int8_linear")
class Int8LinearArguments(NamedTuple):
    input: Tensor
    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    #: Name of the activation, or the callable that the user gave; None: no activation.
    activation: Any
    residual: Tensor | None
    factors: Tensor | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.input, self.bias, self.residual


@_record("int8_feed_forward")
class Int8FeedForwardArguments(NamedTuple):
    input: Tensor
    weight1: Tensor
    scale1: Tensor
    bias1: Tensor | None
    weight2: Tensor
    scale2: Tensor
    bias2: Tensor | None
    #: Name of the activation, or the callable that the user gave.
    activation: Any
    factors1: Tensor | None = None
    factors2: Tensor | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.input, self.bias1, self.bias2


class LayerArguments(NamedTuple):
    """The arguments of a layer-level op that limits depend on; the kernel defines the others."""

    dropout_p: float = 0.0
    activation: Any = None
    #: Values and scales of int8 weights, which the call's tensors leave out.
    quantized: Sequence[Tensor] = ()
    #: Rows of the first weight of a gated network; 0: there is none.
    gated: int = 0
    #: True if only decoding steps have a kernel; see `recipe.Sublayer.is_for_steps`.
    is_for_steps: bool = False


@dataclass
class LayerStack:
    """The sub-layers of one or several equal layers, in the form that kernels for layers take."""

    #: The `recipe.Kind` of each sub-layer of one layer.
    kinds: list[int]
    norm_first: bool
    #: The `recipe.NormKind` of each sub-layer of one layer.
    norms: list[int]
    heads: int
    batch_first: bool
    #: Activation of the networks.
    activation: Any
    #: For each sub-layer of all layers: weight and bias of two linear maps and of the norm. An int8
    #: weight is represented by its values.
    parameters: list[Tensor | None]
    #: For each sub-layer: the scales of its two weights, (rows of the weight,), and of their inputs,
    #: (columns of the weight,). None: the weight or input has no scales. Empty list: no weight is int8.
    scales: list[Tensor | None]
    #: For each sub-layer: eps of its norm.
    eps: list[float]
    #: Factor of the scores; None: 1 / sqrt(D).
    scale: float | None = None
    #: A backend's packed copies of the weights.
    packed: Any = None

    @functools.cached_property
    def for_entry(self) -> tuple[Any, ...] | None:
        """Returns the arguments of the entry in C++; None for other norms and int8 weights."""
        norms = zip(self.kinds, self.norms, strict=True)
        if self.scales or any(n != NormKind.LAYER and not Kind(kind).is_part for kind, n in norms):
            return None
        return (
            self.kinds, self.parameters, self.eps, self.heads, self.norm_first, self.batch_first,
            self.activation,
        )  # fmt: skip

    def weights(self) -> list[Any]:
        """Returns the two weights of each sub-layer."""
        weights: list[Any] = [None] * (len(self.parameters) // 3)
        weights[0::2], weights[1::2] = self.parameters[0::6], self.parameters[2::6]
        return weights
