"""Stacks of transformers' layers that run on the real tokens only, without padding.

The stack is a ModuleList that its owner's ``forward`` iterates over. Within that loop, the first layer's
input (B, T, M) is gathered to rows (1, N, M), one per real token, and the last layer's output is put
back, with zeros at padded positions. Batches whose padded positions may be read run as they are; see
`padded_positions`. The layers are called as they are, with `Rows` in place of the mask: only our
attention function reads it. No state outlives the loop, so that threads, exceptions and activation
checkpointing need no care. In inference, with or without padding, an encoder layer with a
`formula.Formula` runs as one kernel call.

Decoders run on real tokens in inference if their cache is empty: that is the prefill of a batch of
prompts of several lengths. `_Cache` puts keys and values back into the cache's padded layout.

`accelerate` establishes two facts beforehand: how the loop passes the hidden states on, from its source;
and that layers combine tokens only in the registered attention, by running a layer of each kind on three
tokens; see `_mixes_tokens`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook as has_global_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from .. import functional
from .._context import are_plain_on_cpu, in_torch_func, is_recorded, is_traced
from ..compile.capture import NotCapturedError
from ..compile.layer import NotALayerError
from ..functional.attention import attend
from ..models.attention_weights import evaluating
from ..nn.drop_in import DropIn, is_patched, note_methods, original_class
from ..nn.fusion import DROPOUT, LAYER_NORM, LINEAR
from ..nn.ragged import RealPositions
from ..ops.arguments import AttentionArguments
from . import classes, formula, padded_positions
from .classes import ClassChange
from .parts import NAME, is_ours
from .private_names import (
    CACHES,
    CHECKPOINTING,
    MASK,
    NAME_OF_ATTENTION,
    OF_POSITIONS,
    ROTATION,
    attention_functions,
)

#: A bias (B or 1, H, T, T) of the scores, or a function of a sequence's rows and positions that returns
#: its part.
Bias = Tensor | Callable[[slice, slice], Tensor]
#: Mask (B, 1, T, T) -> the `Padding` from which it was made.
_paddings: WeakIdKeyDictionary = WeakIdKeyDictionary()


def version(x: Tensor) -> int | None:
    """Returns the version counter of x; None for inference tensors, which have none."""
    return None if x.is_inference() else x._version


class Padding(RealPositions):
    """The padding from which a mask was made."""

    def __init__(self, real: Tensor, scope: _Scope, mask: Tensor) -> None:
        super().__init__(real)
        #: A token attends to all real tokens of its sequence (is_full), or up to itself (is_causal).
        self.is_full, self.is_causal, self._windows = scope
        self._version = version(mask)

    def is_stale(self, mask: Tensor) -> bool:
        """True if the mask was changed after this object was made."""
        return self._version is not None and mask._version != self._version

    @property
    def has_only_real(self) -> bool:
        return len(self.indices) == self.real.numel()

    @functools.cached_property
    def longest(self) -> int:
        """Returns the length of the longest sequence."""
        return int(self.starts.diff().max())

    @functools.cached_property
    def band(self) -> Tensor | None:
        """Returns the mask (1, 1, T, T) of a sequence in which tokens attend to a window.

        T: length of the longest sequence. None: no window (all tokens, causal, other rules).
        """
        if not self._windows or not self.runs:
            return None
        at = torch.arange(self.longest, device=self.real.device)
        seen = [torch.as_tensor(part(0, 0, at[:, None], at)) for part in self._windows]
        return functools.reduce(torch.logical_and, seen)[None, None]

    @functools.cached_property
    def runs(self) -> list[tuple[int, int]]:
        """Returns first position and length of each sequence; empty if padding is between tokens."""
        real = self.real.int()
        lengths, first = real.sum(1), real.argmax(1)
        end = real.shape[1] - real.flip(1).argmax(1)
        if ((end - first != lengths) & (lengths > 0)).any():
            return []
        return [*zip(first.tolist(), lengths.tolist(), strict=True)]


def note_padding(mask: Tensor | None, **given: Any) -> Tensor | None:
    """Records the `Padding` from which the mask was made, and returns the mask.

    given: the arguments of the mask function. Nothing is recorded unless queries and keys are the
    same tokens: equally many, with an empty cache.
    """
    real = given.get("attention_mask")
    if mask is None or real is None or is_traced() or not mask.is_cpu:
        return mask
    if real.dim() != 2 or real.dtype != torch.bool:
        return mask
    batch, _, queries, keys = mask.shape
    offsets = given.get("q_offset", 0), given.get("kv_offset", 0)
    if real.shape == (batch, keys) and queries == keys > 0 and offsets == (0, 0):
        _paddings[mask] = Padding(real, _scope(given.get("mask_function"), keys), mask)
    return mask


def _note_padding_of(mask: Any, visible: Callable[[Tensor], Tensor | None]) -> Tensor | None:
    """Records the `Padding` of a mask (B, 1, T, T) of attention outside the registry.

    visible: returns True where a token may attend, or None if the mask has other meanings. Returns
    the mask, or None unless each real token attends to exactly the real tokens of its sequence.
    """
    if not isinstance(mask, Tensor) or not mask.is_cpu or mask.dim() != 4:
        return None
    if mask.shape[1] != 1 or mask.shape[2] != mask.shape[3] or 0 in mask.shape:
        return None
    seen = visible(mask)
    if seen is None:
        return None
    real = seen.diagonal(dim1=2, dim2=3)  # (B, 1, T)
    if not torch.equal(seen & real[..., None], real[..., None] & real[:, :, None]):
        return None
    _paddings[mask] = Padding(real[:, 0], _Scope(True, False), mask)
    return mask


class _Scope(NamedTuple):
    """The real tokens that a token attends to: all of them, those up to itself, or a window."""

    is_full: bool
    is_causal: bool
    #: Mask functions that restrict a token to a window around it; empty: none, or unknown ones.
    windows: tuple[Callable[..., Any], ...] = ()


def _scope(function: Any, length: int) -> _Scope:
    """Returns the scope of a mask function for sequences of this length."""
    functions = [function]
    if _name(function) == "and_masks":
        (functions,) = (cell.cell_contents for cell in function.__closure__)
    names = {_name(part) for part in functions}
    is_causal = "causal_mask_function" in names
    windows = "sliding_window_overlay" if is_causal else "sliding_window_bidirectional_overlay"
    if not names <= {"causal_mask_function", "bidirectional_mask_function", windows}:
        return _Scope(False, is_causal)
    # The first and the last token are the furthest apart.
    furthest = (length - 1, 0) if is_causal else (0, length - 1)
    is_full = all(part(0, 0, *furthest) for part in functions)
    return _Scope(is_full, is_causal, () if is_full or is_causal else (*functions,))


def _name(function: Any) -> str:
    """Returns the name of a function, or of the function that made it."""
    return getattr(function, "__qualname__", "").partition(".")[0]


class Rows:
    """The packed batch; stands in for the mask in the arguments of layers and of attention."""

    def __init__(self, mask: Tensor, padding: Padding) -> None:
        self.mask, self.padding = mask, padding
        self.batch, self.length = padding.real.shape

    def has_positions_of(self, other: Any) -> bool:
        """True if the rows of ``other`` are at the same positions of the batch."""
        mine, theirs = self.padding.indices, other.padding.indices
        return mine is theirs or torch.equal(mine, theirs)

    def has_tokens_of(self, x: Any) -> bool:
        """True if x is a tensor (B, T, ...) or (1, T, ...)."""
        if not isinstance(x, Tensor) or x.dim() < 2:
            return False
        return x.shape[0] in (1, self.batch) and x.shape[1] == self.length

    def gather(self, x: Tensor) -> Tensor:
        """Returns the rows (1, N, ...) of x (B, T, ...); (1, T, ...) holds for each sequence."""
        return self.padding.gather(x.expand(self.batch, *x.shape[1:]))[None]

    def put_back(self, rows: Tensor, trial: padded_positions.Trial | None = None) -> Tensor:
        """Returns (B, T, ...) with zeros, or the random numbers of ``trial``, at padded positions."""
        padded = self.padding.put_back(rows[0])
        return padded if trial is None else trial.fill(padded, self.padding.real)

    def attend(
        self, function: Callable[..., Any], module: torch.nn.Module, query: Tensor, key: Tensor,
        value: Tensor, position_bias: Bias | None, is_known: bool, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Returns the attention (1, N, H, D) of queries, keys and values (1, heads, N, D).

        Each sequence attends to itself. If `_one_by_one` does not support the call, attention alone runs
        on padded sequences, by ``function``.
        """
        is_plain = position_bias is None and kwargs.get("softcap") is None
        if self.padding.is_full and is_plain and is_known:
            if self.batch == 1:
                own = {**kwargs, "is_causal": self.padding.is_causal}
                return function(module, query, key, value, None, **own)  # type: ignore[no-any-return]
            q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
            starts, longest = self.padding.starts, self.padding.longest
            output = functional.varlen_attn(
                q, k, v, starts, starts, longest, longest, scale=kwargs.get("scaling"),
                dropout_p=kwargs.get("dropout", 0.0), enable_gqa=k.shape[1] < q.shape[1],
                is_causal=self.padding.is_causal,
            )  # fmt: skip
            return output[None], None
        if is_known:
            found = self._one_by_one(query, key, value, position_bias, **kwargs)
            if found is not None:
                return found, None
        padded = (self.put_back(x.transpose(1, 2)).transpose(1, 2) for x in (query, key, value))
        output, _ = function(module, *padded, self.mask, position_bias=position_bias, **kwargs)
        return self.gather(output), None

    def runs_one_by_one(self) -> bool:
        """True in inference if no sequence has padding between its tokens."""
        return not torch.is_grad_enabled() and bool(self.padding.runs)

    def _one_by_one(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Bias | None,
        dropout: float = 0.0, scaling: float | None = None, softcap: float | None = None, **kwargs: Any,
    ) -> Tensor | None:  # fmt: skip
        """Computes attention one sequence at a time, each with its part of the bias or mask.

        bias: see `Bias`. Returns None if `runs_one_by_one` is false, with dropout, and for a bias
        together with a mask that hides more than the padding.
        """
        hides_more = not self.padding.is_full or self.padding.is_causal
        if dropout or not self.runs_one_by_one() or (bias is not None and hides_more):
            return None
        table = self.mask if bias is None else bias
        if isinstance(table, Tensor) and not (
            table.dtype in (torch.bool, query.dtype) and table.shape[2:] == (self.length,) * 2
        ):
            return None
        found, start = [], 0
        for index, (first, length) in enumerate(self.padding.runs):
            if length == 0:
                continue
            rows, positions = slice(start, start + length), slice(first, first + length)
            if isinstance(table, Tensor):
                of_sequence = index if table.shape[0] > 1 else 0
                part = table[of_sequence : of_sequence + 1, :, positions, positions]
            else:
                part = table(rows, positions)
            q, k, v = (x[:, :, rows] for x in (query, key, value))
            given = AttentionArguments(
                q, k, v, part, scale=scaling, enable_gqa=k.shape[1] < q.shape[1], softcap=softcap
            )
            found.append(attend(given)[0].transpose(1, 2))
            start += length
        return torch.cat(found, 1) if found else None


class _Cache:
    """Stands in for an empty cache of keys and values in the arguments of a decoder's layer.

    Layers may call ``update`` only: a trial call in `_mixes_tokens` shows that they do.
    """

    def __init__(self, cache: Any, rows: Rows | None) -> None:
        self._cache, self._rows = cache, rows

    def update(
        self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes (1, H, N, D) as (B, H, T, D) with zeros at padded positions; returns both unchanged."""
        if self._rows is not None:
            padded = (self._rows.put_back(x.transpose(1, 2)).transpose(1, 2) for x in (key, value))
            self._cache.update(*padded, *args, **kwargs)
        return key, value


def _is_growing(cache: Any) -> bool:
    """True for the default cache; others may store something else than keys and values."""
    kind = type(cache)
    return kind.__name__ == "DynamicCache" and kind.__module__ == "transformers.cache_utils"


class _Loop:
    """One run of the owner's loop over its layers."""

    def __init__(self, stack: UnpaddedLayers, layers: list[torch.nn.Module]) -> None:
        self.stack, self.layers = stack, layers
        #: The last call's output, if the loop received it as rows, and the `Rows` that describe it.
        self.hidden: Tensor | None = None
        self.rows: Rows | None = None
        #: False: a call inside the layers is recorded, transformed or observed.
        self.is_plain: bool | None = None
        #: (id(position ids), id(padding)) -> (the ids, to keep them alive; the ids of the rows).
        self.gathered: dict[tuple[int, int], tuple[Any, Any]] = {}
        #: id(padding) -> True if padded positions are computed. The mask's entry keeps the padding alive.
        self.computed: dict[int, bool] = {}
        #: The reason why a layer ran on a padded batch instead of rows; that of the last such layer.
        self.why_padded = ""
        self.trial = padded_positions.trial()

    def __iter__(self) -> Iterator[_Layer]:
        formulas = self.stack._formulas
        run = range(len(self.layers)) if self.trial is None else self.stack._kinds_first
        return (
            _Layer(
                self, self.layers[index], formulas[index] if index < len(formulas) else None,
                index == run[-1],
            )
            for index in run
        )  # fmt: skip

    def call(
        self, layer: torch.nn.Module, found: Any, is_last: bool, args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # fmt: skip
        """Calls the layer, on rows if possible; ``found``: its formulas, or why it has none."""
        values = (*args, *kwargs.values())
        mask = next((x for x in values if isinstance(x, Tensor) and x in _paddings), None)
        names = self.stack._parameters_of_layers
        given = dict(zip(names, args, strict=False)) | kwargs
        own = self.stack._own_attention
        if mask is None and own is not None and self._is_plain():
            mask = _note_padding_of(given.get(MASK), own.visible)
        if mask is None and self.hidden is None:
            output = self._fused(layer, found, given)
            return layer(*args, **kwargs) if output is None else output
        hidden = given[names[0]]
        old = self.rows if hidden is self.hidden else None
        rows = None if mask is None else self._rows_of(mask, hidden, old)
        packed = None if rows is None else self._packed(layer, given, rows)
        if self.trial is not None and mask is not None:
            why_padded = self.why_padded if packed is None else ""
            self.trial.note(self.layers[0], _paddings[mask].real, why_padded)
        is_packed = old is not None and packed is not None and old.has_positions_of(rows)
        if old is not None and not is_packed:
            hidden = old.put_back(hidden)
        if packed is None:
            rows, self.hidden, packed = None, None, {**given, names[0]: hidden}
        elif rows is not None:
            packed[names[0]] = hidden if is_packed else rows.gather(hidden)
        output = self._fused(layer, found, packed, mask if rows is None else rows)
        if output is None:
            positional = [packed.pop(name) for name in names[: len(args)]]
            output = layer(*positional, **packed)
        if rows is None:
            return output
        first, *others = output if isinstance(output, tuple) else (output,)
        self.hidden, self.rows = first, rows
        if is_last or not self.stack._is_chain:
            self.hidden, first = None, rows.put_back(first, self.trial)
        return (first, *others) if isinstance(output, tuple) else first

    def _fused(
        self, layer: torch.nn.Module, found: Any, given: dict[str, Any],
        mask: Tensor | Rows | None = None,
    ) -> Any:  # fmt: skip
        """Returns the layer's result by its formula; None: its own forward must run.

        mask: the rows, or the mask argument if it was made from padding.
        """
        if not (isinstance(found, formula.Formulas) and self._is_plain()):
            return None
        one = found.training if layer.training else found.inference
        if one is None:
            return None
        name = self.stack._parameters_of_layers[0]
        for other, value in given.items():
            if not (
                value is None
                or value is False
                or other in (name, MASK)
                or other in one.ignored
                or (other == ROTATION and one.rotates)
            ):
                return None
        x: Any = given.get(name)
        rotation: Any = given.get(ROTATION)
        rotation = () if rotation is None else rotation
        if not one.accepts(x, rotation):
            return None
        is_checkpoint = (
            layer.training and torch.is_grad_enabled() and getattr(layer, CHECKPOINTING[0], False)
        )
        run = functools.partial(self._by_formula, layer, one, given.get(MASK), mask, rotation)
        try:
            return getattr(layer, CHECKPOINTING[1])(run, x) if is_checkpoint else run(x)
        except formula.ChangedError:
            return None

    def _by_formula(
        self, layer: torch.nn.Module, one: formula.Formula, given: Any, mask: Tensor | Rows | None,
        rotation: tuple[Tensor, ...], x: Tensor,
    ) -> Any:  # fmt: skip
        """Returns the layer's result, in one call or composed of ops; None: neither supports it.

        given: the layer's argument for the mask; ``mask``: as in `_fused`.
        """
        padding = band = starts = None
        is_plain = given is None
        if mask is not None:
            padding = mask.padding if isinstance(mask, Rows) else _paddings[mask]
            band = None if padding.is_full else padding.band
            is_plain = not padding.is_causal and (padding.is_full or band is not None)
            if isinstance(mask, Rows):
                starts = padding.starts
            else:
                is_plain = is_plain and padding.has_only_real and not padding.is_stale(mask)
        y = one.run(layer, x, starts, (band, False), rotation=rotation) if is_plain else None
        if y is None and (torch.is_grad_enabled() or one.dropouts):
            y = one.compose(layer, x, attention_functions()[NAME], given, rotation)
        return y

    def _is_plain(self) -> bool:
        if self.is_plain is None:
            kinds = self.stack._kinds
            self.is_plain = not (
                is_recorded()
                or in_torch_func()
                or is_patched(*kinds)
                or any(
                    _is_changed(
                        layer, kinds, self.stack._methods, self.stack._own_attention is not None
                    )
                    for layer in self.layers
                )
            )
        return self.is_plain

    def _rows_of(self, mask: Tensor, hidden: Any, old: Rows | None) -> Rows | None:
        """Returns the rows that the mask describes; None if the call is not packed."""
        padding: Padding = _paddings[mask]
        if not self._is_plain() or padding.is_stale(mask):
            self.why_padded = "calls in its layers are observed or replaced"
            return None
        if self.stack._is_decoder and torch.is_grad_enabled():
            return None
        is_padded = len(padding.indices) > 0 and not padding.has_only_real
        fits = old is not None or (are_plain_on_cpu((hidden,)) and hidden.dim() == 3)
        shape = hidden.shape if old is None else old.padding.real.shape
        if not (is_padded and fits and shape[:2] == padding.real.shape):
            self.why_padded = "its hidden states and its mask have other shapes"
            return None
        return None if self._computes(padding) else Rows(mask, padding)

    def _computes(self, padding: Padding) -> bool:
        """True if padded positions are computed, because they may be read or the user wants them."""
        key = id(padding)
        if key not in self.computed:
            stack = self.stack
            self.computed[key] = not stack._skips_padding or padded_positions.are_read(
                padding.real, stack._is_decoder
            )
        return self.computed[key]

    def _packed(
        self, layer: torch.nn.Module, given: dict[str, Any], rows: Rows
    ) -> dict[str, Any] | None:
        """Returns arguments for rows, with the given hidden states; None if one has no such form."""
        names = self.stack._parameters_of_layers
        packed: dict[str, Any] = {}
        for name, value in given.items():
            if value is rows.mask:
                packed[name] = rows
            elif value is not None and name in (ROTATION, "position_ids"):
                if not all(
                    map(rows.has_tokens_of, value if isinstance(value, tuple) else (value,))
                ):
                    self.why_padded = f"its layers get {name} of another shape"
                    return None
                packed[name] = self._gathered(value, rows)
            elif self.stack._is_decoder and name in CACHES and _is_growing(value):
                packed[name] = _Cache(value, rows)
            elif name in (names[0], *OF_POSITIONS) or isinstance(value, _PLAIN_VALUES):
                packed[name] = value
            else:
                kind = type(value).__name__
                self.why_padded = f"its layers get {name}={kind}, which has no form for rows"
                return None
        if "position_bias" in names and packed.get("position_bias") is None:
            if (bias := bias_of(layer)) is None:
                self.why_padded = "its layers have no bias of relative positions"
                return None
            packed["position_bias"] = bias.compute_bias(rows.length, rows.length)
        self.why_padded = "it returns attention weights"
        return None if packed.get("output_attentions") else packed

    def _gathered(self, value: Any, rows: Rows) -> Any:
        """Returns the rows of position ids or embeddings: one tensor, or several, (1 or B, T, ...)."""
        key = id(value), id(rows.padding)
        if key not in self.gathered:
            several = isinstance(value, tuple)
            found = [rows.gather(x) for x in (value if several else (value,))]
            self.gathered[key] = value, tuple(found) if several else found[0]
        return self.gathered[key][1]


#: Types of arguments that do not depend on the token.
_PLAIN_VALUES = (bool, int, float, str, type(None))


class _Layer:
    """A layer within its owner's loop."""

    def __init__(self, loop: _Loop, layer: torch.nn.Module, found: Any, is_last: bool) -> None:
        self._loop, self._layer, self._found, self._is_last = loop, layer, found, is_last

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._loop.call(self._layer, self._found, self._is_last, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _is_changed(
    module: torch.nn.Module, kinds: frozenset[type], methods: frozenset[str], is_own: bool
) -> bool:
    """True if a call in the layer is observed, or runs other code or attention than `find` tested.

    The observer, or the other code, gets padded batches. kinds: the tested classes. methods: the names
    of their methods. is_own: attention is one of ``kinds``, so its config may name any function.
    """
    if module._forward_hooks and any(map(_is_active, module._forward_hooks.values())):
        return True
    kind = type(module)
    return bool(
        module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or module._compiled_call_impl is not None
        or not module.__dict__.keys().isdisjoint(methods)
        or (not is_own and getattr(module.__dict__.get("config"), NAME_OF_ATTENTION, NAME) != NAME)
        or not (kind in kinds or original_class(module) in kinds or _is_of_peft(kind))
        or any(
            _is_changed(child, kinds, methods, is_own)
            for child in module._modules.values()
            if child is not None
        )
    )


def _is_of_peft(kind: type) -> bool:
    """True for a class of peft, whose modules wrap linear layers."""
    return kind.__module__.partition(".")[0] == "peft"


def _is_active(hook: Any) -> bool:
    """False for a hook of transformers that records nothing in this call."""
    if getattr(hook, "__module__", None) != "transformers.utils.output_capturing":
        return True
    return bool(sys.modules[hook.__module__]._active_collector.get())  # type: ignore[attr-defined]


class UnpaddedLayers(DropIn, torch.nn.ModuleList):
    """A stack of layers that runs on real tokens within its owner's loop."""

    #: The code that runs the loop. Other code that iterates over the stack gets the layers.
    _code: CodeType
    #: True if the loop only passes each layer's output on to the next layer.
    _is_chain: bool
    #: True if the layers are a decoder's: with gradients they run on padded batches, because users may
    #: compute the loss at padded positions, too.
    _is_decoder: bool
    #: The class of the layers' attention if it is not in the registry. Our mask function then does not
    #: record the padding; `_note_padding_of` does, with the class's ``visible``.
    _own_attention: Any
    _parameters_of_layers: tuple[str, ...]
    #: Classes that modules in the layers may have: those before `accelerate`, and `_TOKENWISE`.
    #: ``_methods``: the names of their methods.
    _kinds: frozenset[type]
    _methods: frozenset[str]
    #: Each layer's formulas, or the reason why it has none.
    _formulas: tuple[formula.Formulas | str, ...]
    #: Indices of the first layer of each kind, which a trial of the model runs.
    _kinds_first: tuple[int, ...]
    #: False: padded positions are computed.
    _skips_padding: bool

    def __iter__(self) -> Iterator[Any]:
        layers = super().__iter__()
        if is_traced() or has_global_hook():
            return layers
        # Only the loop that `find` read may get rows: any other iteration over the stack must get the
        # layers. Hooks on the first and the last layer do not see which code calls a layer and reads
        # its output. The padding is noted on the mask for a similar reason: the mask is the only
        # object that reaches the layers from our mask function.
        code = sys._getframe(1).f_code
        if code is not self._code and code != self._code:  # code of a copied class is equal
            return layers
        return iter(_Loop(self, list(layers)))


_SEVERAL = inspect.Parameter.VAR_POSITIONAL
#: Classes of PyTorch that treat each token alike, which layers may get after `accelerate`.
_TOKENWISE = frozenset({
    *LINEAR, *LAYER_NORM, *DROPOUT, torch.nn.Identity, torch.nn.GELU, torch.nn.ReLU, torch.nn.SiLU,
    torch.nn.Tanh, torch.nn.ModuleDict, torch.nn.ParameterDict, torch.nn.Sequential,
})  # fmt: skip


def find(
    name: str,
    stack: torch.nn.Module,
    owner: torch.nn.Module,
    config: Any,
    with_our_attention: Callable[[Any], AbstractContextManager[None]] | None,
    own: Sequence[ClassChange],
    is_wanted: Callable[[str], bool],
    skip_padding: bool,
) -> ClassChange | str | None:
    """Returns the change of a stack of layers, the reason not to, or None if it is no such stack.

    with_our_attention: makes the config name our attention; None: the model does not use it.
    own: the changes of the layers' attention if it is not looked up in the registry.
    is_wanted: False for the name of a module in the stack that the user excludes.
    """
    layers: list[Any] = [*stack.children()]
    if not isinstance(stack, torch.nn.ModuleList) or not layers:
        return None
    try:
        signatures = [inspect.signature(layer.forward).parameters for layer in layers]
    except (TypeError, ValueError):  # compiled code
        return None
    parameters = tuple(signatures[0])
    if MASK not in parameters[1:]:
        return None
    is_decoder = _is_causal(layers[0])
    if getattr(config, "is_decoder", False):
        return None
    if is_decoder and (config.is_encoder_decoder or getattr(config, "add_cross_attention", False)):
        return None
    loop = _read_loop(owner, name.rpartition(".")[2])
    if loop is None:
        return None
    if with_our_attention is None:
        return "its attention is not looked up in the registry of transformers, or is not 'sdpa'"
    kinds = {parameter.kind for parameter in signatures[0].values()}
    if any(tuple(found) != parameters for found in signatures) or _SEVERAL in kinds:
        return "its layers take different arguments"
    # Attention that is not ours would not read the rows.
    changed = {change.module: change.after for change in own}
    tested = _TOKENWISE.union(
        changed.get(module) or original_class(module)
        for layer in layers
        for module in layer.modules()
    )
    methods = frozenset(name for kind in tested for _, name, _ in note_methods(kind))
    with with_our_attention(config):
        reason = classes.sharded(stack) or _why_not(layers, config, tested, methods, bool(own))
    kinds_first = _kinds_first(layers)
    reason = (
        reason
        or _mixing(layers, kinds_first, parameters, config, with_our_attention)
        or next(filter(None, map(classes.code_of_others, layers)), None)
    )
    if reason is not None:
        return reason
    judged: formula.Judged = {}
    formulas = tuple(
        "its attention is not in the registry, and may have terms that no kernel for layers supports"
        if own
        else _formula_of(layer, config, with_our_attention, judged)
        if all(is_wanted(f"{index}.{inner}".rstrip(".")) for inner, _ in layer.named_modules())
        else "filter_fn excludes a part of it"
        for index, layer in enumerate([] if is_decoder else layers)
    )
    why_not = next((found for found in formulas if isinstance(found, str)), None)
    note = "" if is_decoder else "in inference each layer is one call"
    if why_not is not None:
        note = f"layers run module by module: {why_not}"
    kind = type(stack)
    code, is_chain = loop
    made = classes.subclass(
        kind, (UnpaddedLayers, kind), _code=code, _is_chain=is_chain,
        _is_decoder=is_decoder, _own_attention=own[0].after if own else None,
        _parameters_of_layers=parameters, _kinds=tested, _methods=methods, _formulas=formulas,
        _kinds_first=kinds_first, _skips_padding=skip_padding,
    )  # fmt: skip
    return made if isinstance(made, str) else ClassChange(name, stack, kind, made, note)


def policy(name: str, stack: torch.nn.Module, skip_padding: bool) -> ClassChange | None:
    """Returns the change to ``skip_padding`` of a replaced stack, or None if it is not needed."""
    if not isinstance(stack, UnpaddedLayers) or stack._skips_padding == skip_padding:
        return None
    made, original = type(stack), original_class(stack)
    own = {key: x for key, x in vars(made).items() if key in UnpaddedLayers.__annotations__}
    after = classes.subclass(
        original, (UnpaddedLayers, original), **{**own, "_skips_padding": skip_padding}
    )
    if isinstance(after, str):
        return None
    return ClassChange(name, stack, made, after, original=original)


def applied(changes: Sequence[ClassChange]) -> Callable[[Any], AbstractContextManager[None]]:
    """Returns a substitute for `hugging_face.with_our_attention` that applies the changes."""

    @contextmanager
    def with_ours(config: Any) -> Iterator[None]:
        classes.apply_all(changes)
        try:
            yield
        finally:
            classes.undo_all(changes)

    return with_ours


def _is_causal(layer: torch.nn.Module) -> bool:
    return any(getattr(module, "is_causal", False) for module in layer.modules())


def _why_not(
    layers: list[Any], config: Any, kinds: frozenset[type], methods: frozenset[str], is_own: bool
) -> str | None:
    if getattr(config, "chunk_size_feed_forward", 0):
        return "its layers split sequences into chunks (chunk_size_feed_forward)"
    if has_global_hook() or any(_is_changed(layer, kinds, methods, is_own) for layer in layers):
        return "its layers have hooks, which expect padded batches, or the config of another model"
    for parameter in (p for layer in layers for p in layer.parameters()):
        if is_lazy(parameter) or not are_plain_on_cpu((parameter.data,)):
            return "its weights are not all plain tensors in CPU memory"
    norms = torch.nn.modules.batchnorm._NormBase
    if any(isinstance(module, norms) for layer in layers for module in layer.modules()):
        return "its layers normalise over tokens"
    return None


# The loop, read from the source of the owner's forward.


def _read_loop(owner: torch.nn.Module, attribute: str) -> tuple[CodeType, bool] | None:
    """Returns the code that iterates over ``self.<attribute>``, and whether the layers are a chain."""
    function = inspect.unwrap(type(owner).forward)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and any(_is_self(x, attribute) for x in ast.walk(node.iter)):
            return function.__code__, _is_chain(node)
    return None


def _is_self(node: ast.AST, attribute: str) -> bool:
    if not isinstance(node, ast.Attribute) or node.attr != attribute:
        return False
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def _is_chain(loop: ast.For) -> bool:
    """True if each iteration is ``x = layer(x, ...)``, unconditionally, and nothing else reads x."""
    target = loop.target
    layer = target.elts[-1] if isinstance(target, ast.Tuple) else target
    inside = [node for statement in loop.body for node in ast.walk(statement)]
    if any(isinstance(node, (ast.Break, ast.Continue, ast.Return)) for node in inside):
        return False
    for statement in loop.body:
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
            continue
        call, (to, *more) = statement.value, statement.targets
        to = to.elts[0] if isinstance(to, ast.Tuple) else to
        if more or not call.args or ast.dump(call.func) != ast.dump(layer).replace("Store", "Load"):
            continue
        x = call.args[0]
        if not isinstance(x, ast.Name) or not isinstance(to, ast.Name) or x.id != to.id:
            return False
        return [node.id for node in inside if isinstance(node, ast.Name)].count(x.id) == 2
    return False


# Trial runs of the layers on three tokens.


class _Probe(Rows):
    """Takes the place of the mask in a trial run: attention then returns its values."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.bias: Bias | None = None
        self.module: torch.nn.Module | None = None
        #: Arguments of attention, and whether our kernels support them.
        self.options: dict[str, Any] = {}
        self.is_known = True

    def runs_one_by_one(self) -> bool:
        return True

    def attend(  # type: ignore[override]
        self, function: Any, module: Any, query: Tensor, key: Tensor, value: Tensor,
        position_bias: Bias | None, is_known: bool, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        self.seen += [query, key, value]
        self.bias, self.module, self.options = position_bias, module, kwargs
        self.is_known = self.is_known and is_known
        return self._attended(query, key, value).transpose(1, 2).contiguous(), None

    def _attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1)


class _Attending(_Probe):
    """Attends without a mask, by PyTorch's function."""

    def _attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.options.get("dropout", 0.0),
            scale=self.options.get("scaling"), enable_gqa=key.shape[1] < query.shape[1],
        )  # fmt: skip


def _kinds_first(layers: list[Any]) -> tuple[int, ...]:
    """Returns the first index of each kind of layer; equal classes and attributes are one kind."""
    first: dict[tuple[Any, ...], int] = {}
    for index, layer in enumerate(layers):
        first.setdefault(formula.content(layer, without="layer_idx"), index)
    return tuple(first.values())


@contextmanager
def _trial(layer: torch.nn.Module) -> Iterator[None]:
    """Context manager for calls of a layer in inference, whatever modes the caller is in."""
    with evaluating(layer), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def _mixing(
    layers: list[Any], tested: Sequence[int], parameters: tuple[str, ...], config: Any,
    with_our_attention: Callable[[Any], AbstractContextManager[None]],
) -> str | None:  # fmt: skip
    """Returns the reason if a layer mixes tokens outside of attention from the registry, or None.

    tested: the indices of the layers to test.
    """
    for layer in (layers[index] for index in tested):
        with with_our_attention(config), _trial(layer):
            try:
                reason = _mixes_tokens(layer, _arguments(layers[0], parameters, config))
            except Exception as error:  # the layer requires other arguments
                reason = f"a trial call failed ({type(error).__name__}: {error})"
        if reason is not None:
            return f"{type(layer).__name__}: {reason}"
    return None


def _arguments(first: Any, parameters: tuple[str, ...], config: Any) -> dict[str, Any]:
    """Returns a layer's arguments for three equal tokens at one position, without the mask."""
    weight = next(p for p in first.parameters() if p.is_floating_point())
    generator = torch.Generator().manual_seed(0)
    token = torch.randn(config.hidden_size, generator=generator).to(weight.dtype)
    given: dict[str, Any] = {parameters[0]: token.repeat(1, 3, 1)}
    if ROTATION in parameters:
        angles = torch.ones(1, 3, rotated_channels(config), dtype=weight.dtype)
        given[ROTATION] = angles, torch.zeros_like(angles)
    if "relative_pos" in parameters:
        given["relative_pos"] = torch.zeros(1, 3, 3, dtype=torch.long)
        given["rel_embeddings"] = token[None]
    bias = bias_of(first)
    if "position_bias" in parameters and bias is not None:
        given["position_bias"] = bias.compute_bias(3, 3)
    if _is_causal(first):
        given |= {name: _Cache(None, None) for name in CACHES if name in parameters}
    return given


def rotated_channels(config: Any) -> int:
    """Returns how many channels of each head rotary position embeddings rotate."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    rotary = getattr(config, "rope_parameters", None) or {}
    return int(size * (rotary.get("partial_rotary_factor") or 1.0))  # Phi rotates only a part


def _mixes_tokens(layer: Any, given: dict[str, Any]) -> str | None:
    """Returns the reason if a token's result depends on its position, or on other tokens.

    Attention returns its values instead of mixing them. Equal tokens must then have equal queries,
    keys and results. A token that is NaN must not reach another one, whatever the weights.
    """
    equal, *others = given.values()
    tainted = equal.clone()
    tainted[:, 1] = torch.nan
    found = []
    for x in (equal, tainted):
        probe = _Probe()
        output = layer(x, **dict(zip([*given][1:], others, strict=True)), attention_mask=probe)
        output = output[0] if isinstance(output, tuple) else output
        if not probe.seen:
            return "its attention is not looked up in the registry of transformers"
        if output.shape != x.shape or len(probe.seen) != 3:
            return "it is not one attention followed by operations on each token"
        if isinstance(probe.bias, Tensor) and probe.bias is not given.get("position_bias"):
            return "its attention computes a bias from the number of tokens"
        found.append([x.transpose(1, 2) for x in probe.seen] + [output])
    for x in found[0]:
        error = (x - x[:, :1]).abs().max()
        if not error <= 64 * torch.finfo(x.dtype).eps * x.abs().max():
            return "its results depend on the position of a token"
    for x in found[1]:
        if x[:, ::2].isnan().any():
            return "it has operations between tokens besides attention"
    return None


def _formula_of(
    layer: Any, config: Any, with_our_attention: Callable[[Any], AbstractContextManager[None]],
    judged: formula.Judged,
) -> formula.Formulas | str:  # fmt: skip
    """Returns the layer's formulas, or the reason why it has none, such as a position bias."""
    parameters = inspect.signature(layer.forward).parameters
    rotation: tuple[Tensor, ...] = ()
    if ROTATION in parameters:
        generator = torch.Generator().manual_seed(2)
        shape = 2, 1, formula.TOKENS, rotated_channels(config)
        rotation = (*torch.randn(shape, generator=generator, dtype=torch.float64),)

    def call(copied: Any, x: Tensor, rotation: tuple[Tensor, ...], **others: Any) -> formula.Trial:
        probe = _Attending()
        if rotation:
            others[ROTATION] = rotation
        output = copied(x, attention_mask=probe, **others)
        module, options = probe.module, probe.options
        if module is None or len(probe.seen) != 3 or probe.bias is not None or not probe.is_known:
            raise NotALayerError(
                "its attention has a bias, or arguments that no kernel for layers supports"
            )
        if options.get("softcap") is not None:
            raise NotALayerError("its scores are capped, which no kernel for layers supports")
        is_causal = options.get("is_causal")
        if getattr(module, "is_causal", True) if is_causal is None else is_causal:
            raise NotALayerError("its attention is causal without a mask")
        if not is_ours(getattr(module, "config", None)):
            raise NotALayerError("its attention module has no config")
        return formula.Trial(output, module)

    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    # Arguments that many layers take and ignore.
    found_in_many = {"use_cache": True, "position_ids": 7 + torch.arange(formula.TOKENS)[None]}
    others = {name: x for name, x in found_in_many.items() if takes_all or name in parameters}
    with with_our_attention(config), _trial(layer):
        try:
            found = formula.recognise(layer, config.hidden_size, call, others, rotation, judged)
            # One token: for more, weights would be packed.
            x = torch.zeros(1, 1, config.hidden_size, dtype=next(layer.parameters()).dtype)
            one_row = tuple(table[:, :1].to(x.dtype) for table in rotation)
            y = found.inference.run(layer, x, rotation=one_row)
        except NotCapturedError as reason:  # or `NotALayerError`
            return str(reason)
        except Exception as error:  # the layer requires other arguments, or refuses float64
            return f"a trial call failed ({type(error).__name__}: {error})"
    return "no kernel for layers supports its sizes" if y is None else found


def bias_of(layer: torch.nn.Module) -> Any:
    """Returns the module that computes the layer's bias of relative positions, as in T5, or None."""
    for module in layer.modules():
        if getattr(module, "has_relative_attention_bias", False):
            return module if hasattr(module, "compute_bias") else None
    return None
