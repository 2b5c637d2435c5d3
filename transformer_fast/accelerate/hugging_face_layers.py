"""Our attention for the registry of transformers, and our classes for its layers.

Our class sits between a class of transformers and its methods, as `transformer_fast.nn` does for
torch.nn. Inner modules that are hooked, replaced or parametrised are called as usual.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional
from .._context import is_plain_eager
from ..fast_path import LINEAR
from ..functional.attention import general_attention
from ..nn import fusion
from ..nn.drop_in import is_patched
from ..nn.int8 import INT8, run_feed_forward, run_linear
from ..ops.arguments import AttentionArguments
from . import packing
from .parts import Example, FusedLayer, Op, dropout_p, example_of, parts
from .private_names import CACHES, sdpa_attention
from .report import BATCH, LENGTH

#: Arguments that the 'sdpa' function of transformers ignores, and output_attentions.
_KNOWN = frozenset({
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "logits_to_keep",
    "max_length_k", "max_length_q", "num_items_in_batch", "output_attentions",
    "output_hidden_states", "output_router_logits", "position_ids", "return_dict", "seq_idx",
    "sliding_window", "use_cache",
})  # fmt: skip


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | packing.Rows | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function for transformers; returns output (B, T, H, D), and weights or None.

    query: (B, H, T, D); key and value: (B, H or fewer, S, D). attention_mask: as `sdpa_mask`
    returns it, bool (True = may attend) or float (added). Weights are returned if output_attentions
    is true. If any other argument is set, transformers' own 'sdpa' function computes the result.
    """
    is_known = all(found is None or name in _KNOWN for name, found in kwargs.items())
    if isinstance(attention_mask, packing.Rows):
        return attention_mask.attend(
            attention, module, query, key, value, position_bias, is_known,
            dropout=dropout, scaling=scaling, is_causal=is_causal, softcap=softcap, **kwargs,
        )  # fmt: skip
    if not is_known:
        return sdpa_attention()(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout, scaling, is_causal,
            position_bias=position_bias, softcap=softcap, **kwargs,
        )  # fmt: skip
    length, keys = query.shape[2], key.shape[2]
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal = bool(is_causal) and attention_mask is None and length > 1
    if causal and keys > length:  # a cache of fixed size: later keys are not written yet
        key, value = key[:, :, :length], value[:, :, :length]
        position_bias = None if position_bias is None else position_bias[..., :length]
    mask = _mask(attention_mask, position_bias, causal, query, key)
    causal = causal and position_bias is None
    gqa = key.shape[1] < query.shape[1]
    weights = bool(kwargs.get("output_attentions"))
    # With dropout the public function's result is contiguous, and merging its heads would copy it.
    if dropout:
        arguments = AttentionArguments(
            query, key, value, mask, None, causal, scaling, dropout, None, gqa, weights,
            softcap=softcap,
        )  # fmt: skip
        found = general_attention(arguments, like_query=True)
    else:
        found = functional.scaled_dot_product_attention(
            query, key, value, mask, dropout, causal, scaling, gqa, need_weights=weights,
            softcap=softcap,
        )  # fmt: skip
    output, weights = found if isinstance(found, tuple) else (found, None)
    return output.transpose(1, 2).contiguous(), weights


def _mask(
    mask: Tensor | None, bias: Tensor | None, causal: bool, query: Tensor, key: Tensor
) -> Tensor | None:
    """Merges the mask and the learned bias into one mask for our function."""
    if mask is not None and mask.dim() == 4 and mask.shape[2] > 1 and mask.stride(2) == 0:
        mask = mask[:, :, :1]  # only padding, expanded to all queries
    if bias is None:
        return mask
    # A finite value, as in transformers: a fully masked row does not give zeros here.
    lowest = torch.finfo(query.dtype).min
    if causal:
        shape = (query.shape[2], key.shape[2])
        mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
    if mask is None:
        return bias
    return torch.where(mask, bias, lowest) if mask.dtype == torch.bool else bias + mask


# Layer classes.

#: Class of transformers, with its family or module, as in "bart.BartDecoderLayer" -> our class.
#: Encoder layers with a `formula.Formula` and modules that `mlp` finds need no class here. Modules
#: with caches or biased scores do, because neither describes these.
CLASSES: dict[str, type[FusedLayer]] = {}


def _replaces(*names: str) -> Callable[[type[FusedLayer]], type[FusedLayer]]:
    """Registers a class; its forward calls the original one if that is patched."""

    def register(ours: type[FusedLayer]) -> type[FusedLayer]:
        CLASSES.update(dict.fromkeys(names, ours))
        forward: Any = ours.forward

        @functools.wraps(forward)
        def unless_patched(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_patched(type(self)):
                return super(ours, self).forward(*args, **kwargs)
            return forward(self, *args, **kwargs)

        ours.forward = unless_patched
        return ours

    return register


#: Name of an activation class of transformers -> our kernels' name of the same function.
_ACTIVATIONS = {
    "GELUActivation": "gelu",
    "AccurateGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "SiLUActivation": "silu",
}


def activation_name(activation: Any) -> str | None:
    """Returns our kernels' name of an activation of transformers or PyTorch, or None."""
    kind = type(activation)
    if kind.__module__ == "transformers.activations" and fusion.is_unhooked(activation, (kind,)):
        return _ACTIVATIONS.get(kind.__name__)
    return fusion.activation_name(activation)


class Attention(FusedLayer):
    """Base of attention that is not looked up in the registry of transformers."""

    @staticmethod
    def visible(mask: Tensor) -> Tensor | None:
        """Returns True where the mask lets a token attend; None if it has other values."""
        if not mask.is_floating_point():
            return None
        hidden = mask == torch.finfo(mask.dtype).min
        return ~hidden if bool((hidden | (mask == 0)).all()) else None


@_replaces("mpnet.MPNetSelfAttention")
class MPNetSelfAttention(Attention):
    """Projections, attention with a bias of relative positions, output projection."""

    q: Any
    k: Any
    v: Any
    o: Any
    dropout: Any
    attention_head_size: int

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | packing.Rows | None = None,
        position_bias: Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor | None, ...]:
        if isinstance(attention_mask, Tensor) and not attention_mask.is_floating_point():
            raise TypeError(
                "attention_mask must be (B, T) with 0 at padding, or a float mask that is added to the "
                f"scores, not {attention_mask.dtype} of shape {tuple(attention_mask.shape)}: MPNet adds "
                "it to the scores as well, so that it would hide nothing"
            )
        if not fusion.is_unhooked(self.dropout, fusion.DROPOUT):
            return super().forward(  # type: ignore[misc, no-any-return]
                hidden_states, attention_mask, position_bias, output_attentions, **kwargs
            )
        shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        query, key, value = (
            fusion.linear(part, hidden_states).view(shape).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        attended, weights = attention(
            self, query, key, value, attention_mask, self.dropout.p if self.training else 0.0,
            is_causal=False, position_bias=position_bias, output_attentions=output_attentions,
        )  # fmt: skip
        output = fusion.linear(self.o, attended.flatten(2))
        return (output, weights) if output_attentions else (output,)

    def _examples(self, x: Callable[..., Tensor], training: bool) -> list[Example]:
        size, p = self.attention_head_size, dropout_p(self.dropout)
        heads = x(BATCH, self.q.out_features // size, LENGTH, size)
        return [("attention", (heads,) * 3, {"dropout_p": p if training else 0.0})]


class _Disentangled:
    """The terms of DeBERTa's scores with a relative position, as a `packing.Bias`.

    Row t of a matrix (N, 2 T - 1) holds the products of query t with the positions from T - 1 to
    1 - T. Its term with key s is in column T - 1 - (t - s): one column further left than for query
    t - 1. So the terms of a sequence are a view of this matrix, with rows 2 T - 2 elements apart.
    """

    def __init__(
        self, layer: Any, query: Tensor, key: Tensor, relative: Tensor, embeddings: Tensor, factor: float
    ) -> None:  # fmt: skip
        self.layer, self.query, self.key, self.factor = layer, query, key, factor
        self.relative, self.embeddings, self.length = relative, embeddings, relative.shape[-1]

    @functools.cached_property
    def products(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns the products (queries with keys of positions, keys with queries of positions)."""
        span = self.layer.pos_ebd_size
        positions = torch.cat([self.relative[0, :, 0].flip(0), self.relative[0, 0, 1:]])
        return (
            self._product("c2p", self.query, "key", positions + span),
            self._product("p2c", self.key, "query", span - positions),
        )

    def _product(self, kind: str, rows: Tensor, other: str, positions: Tensor) -> Tensor | None:
        layer, last = self.layer, 2 * self.layer.pos_ebd_size - 1
        if kind not in layer.pos_att_type:
            return None
        part = getattr(layer, f"{other}_proj" if layer.share_att_key else f"pos_{other}_proj")
        of_positions = self.embeddings.index_select(0, positions.clamp(0, last))
        heads = (fusion.linear(part, of_positions) * self.factor).unflatten(1, (rows.shape[1], -1))
        return rows @ heads.permute(1, 2, 0)

    def _terms(self, product: Tensor, rows: slice) -> Tensor:
        part = product[:, :, rows]
        batch, heads, length, _ = part.shape
        outer, inner, row, _ = part.stride()
        start = part.storage_offset() + self.length - 1
        return part.as_strided((batch, heads, length, length), (outer, inner, row - 1, 1), start)

    def __call__(self, rows: slice, positions: slice) -> Tensor:
        of_queries, of_keys = self.products
        if of_keys is None:
            return self._terms(of_queries, rows)  # type: ignore[arg-type]
        transposed = self._terms(of_keys, rows).transpose(2, 3)
        return transposed if of_queries is None else self._terms(of_queries, rows) + transposed


@_replaces("deberta_v2.DisentangledSelfAttention")
class DisentangledSelfAttention(Attention):
    """DeBERTa's attention, in inference; in training its own code runs, on padded sequences."""

    query_proj: Any
    key_proj: Any
    value_proj: Any
    dropout: Any
    num_attention_heads: int
    attention_head_size: int
    pos_att_type: list[str]
    relative_attention: bool
    share_att_key: bool

    @staticmethod
    def visible(mask: Tensor) -> Tensor | None:
        return mask.bool()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | packing.Rows,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        rel_embeddings: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        rows = attention_mask if isinstance(attention_mask, packing.Rows) else None
        runs = not torch.is_grad_enabled() if rows is None else rows.runs_one_by_one()
        kinds = {"c2p", "p2c"} & {*self.pos_att_type} if self.relative_attention else {}
        if (
            not runs
            or self.training
            or output_attentions
            or query_states is not None
            or (kinds and not _has_differences(relative_pos, rel_embeddings))
            or not fusion.is_unhooked(self.dropout, fusion.DROPOUT)
            or not all(fusion.is_unhooked(part, (type(part),)) for part in self._of_positions())
        ):
            given = output_attentions, query_states, relative_pos, rel_embeddings
            if rows is None:
                return super().forward(hidden_states, attention_mask, *given)  # type: ignore[misc, no-any-return]
            padded, weights = super().forward(rows.put_back(hidden_states), rows.mask, *given)  # type: ignore[misc]
            return rows.gather(padded), weights
        shape = (*hidden_states.shape[:-1], self.num_attention_heads, -1)
        query, key, value = (
            fusion.linear(part, hidden_states).view(shape).transpose(1, 2)
            for part in (self.query_proj, self.key_proj, self.value_proj)
        )
        factor = (query.shape[-1] * (1 + len({"c2p", "p2c"} & {*self.pos_att_type}))) ** -0.5
        bias: Any = None
        if kinds:
            bias = _Disentangled(self, query, key, relative_pos, rel_embeddings, factor)  # type: ignore[arg-type]
        mask: Any = attention_mask
        if rows is None:
            bias = None if bias is None else bias(slice(None), slice(None))
            mask = None if mask.all() else mask.bool()
        output, _ = attention(
            self, query, key, value, mask, scaling=factor, is_causal=False, position_bias=bias
        )
        return output.flatten(2), None

    def _of_positions(self) -> list[torch.nn.Module]:
        """Returns the modules that get fewer positions here than in transformers (2 * span)."""
        names = ["pos_dropout", "pos_key_proj", "pos_query_proj"]
        names += ["query_proj", "key_proj"] if self.share_att_key else []
        return [self._modules[name] for name in names if name in self._modules]  # type: ignore[misc]

    def _examples(self, x: Callable[..., Tensor], training: bool) -> list[Example]:
        heads = x(BATCH, self.num_attention_heads, LENGTH, self.attention_head_size)
        return [] if training else [("attention", (heads,) * 3, {})]


def _has_differences(relative: Tensor | None, embeddings: Tensor | None) -> bool:
    """True if relative positions (1, T, T) depend only on the difference of two positions."""
    if relative is None or embeddings is None or relative.dim() != 3 or len(relative) != 1:
        return False
    return torch.equal(relative[:, 1:, 1:], relative[:, :-1, :-1])


class _PostNorm(FusedLayer):
    """Shared parts of the encoder and decoder layers of BART and Marian."""

    self_attn: Any
    encoder_attn: Any
    fc1: Any
    fc2: Any
    activation_fn: Any
    dropout: float
    activation_dropout: float
    _norms = "self_attn_layer_norm final_layer_norm"

    def _p(self, name: str) -> float:
        return float(getattr(self, name)) if self.training else 0.0

    def _residual(self, x: Tensor, residual: Tensor, norm: str) -> Tensor:
        dropout_p, module = self._p("dropout"), getattr(self, norm)
        if fusion.is_unhooked(module, fusion.LAYER_NORM) and x.shape == residual.shape:
            return functional.add_layer_norm(
                x, residual, module.normalized_shape, module.weight, module.bias, module.eps,
                dropout_p=dropout_p,
            )[0]  # fmt: skip
        return module(residual + F.dropout(x, dropout_p))

    def _whole_feed_forward(self, x: Tensor) -> Tensor:
        p, name = self._p("activation_dropout"), activation_name(self.activation_fn)
        linears = self.fc1, self.fc2
        if name is not None and all(fusion.is_unhooked(m, fusion.LINEAR) for m in linears):
            y = run_feed_forward(x, *fusion.affine(self.fc1), *fusion.affine(self.fc2), name, p)
        else:
            y = self.fc2(F.dropout(self.activation_fn(self.fc1(x)), p))
        return self._residual(y, x, "final_layer_norm")

    def _fused(self) -> list[Op]:
        activation = "activation_fn", self.activation_fn, activation_name
        linears = parts(self, "fc1 fc2", fusion.LINEAR)
        return [
            Op("add_layer_norm", parts(self, self._norms, fusion.LAYER_NORM), self.dropout),
            Op("feed_forward", linears, self.activation_dropout, activation),
        ]


@_replaces("bart.BartEncoderLayer", "marian.MarianEncoderLayer")
class EncoderLayer(_PostNorm):
    """Self-attention, then FFN, each followed by a norm."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, **kwargs: Any) -> Tensor:
        attended, _ = self.self_attn(hidden_states, attention_mask=attention_mask, **kwargs)
        x = self._residual(attended, hidden_states, "self_attn_layer_norm")
        x = self._whole_feed_forward(x)
        if x.dtype == torch.float16 and not torch.isfinite(x).all():
            most = torch.finfo(x.dtype).max - 1000
            x = torch.clamp(x, min=-most, max=most)
        return x


@functools.cache
def _name_of_cache(kind: Any) -> str:
    return next(name for name in CACHES if name in inspect.signature(kind.forward).parameters)


@_replaces("bart.BartDecoderLayer", "marian.MarianDecoderLayer")
class DecoderLayer(_PostNorm):
    """Self-attention, attention to the encoder, FFN, each followed by a norm."""

    _norms = f"{_PostNorm._norms} encoder_attn_layer_norm"

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = True,
        **kwargs: Any,
    ) -> Tensor:
        if past_key_values is not None:
            kwargs[_name_of_cache(type(self.self_attn))] = past_key_values  # type: ignore[arg-type]
        attended, _ = self.self_attn(hidden_states, attention_mask=attention_mask, **kwargs)
        x = self._residual(attended, hidden_states, "self_attn_layer_norm")
        if encoder_hidden_states is not None:
            attended, _ = self.encoder_attn(
                x,
                key_value_states=encoder_hidden_states,
                attention_mask=encoder_attention_mask,
                **kwargs,
            )
            x = self._residual(attended, x, "encoder_attn_layer_norm")
        return self._whole_feed_forward(x)


def _residual_norm(layer: Any) -> Op:
    norm = parts(layer, "LayerNorm", fusion.LAYER_NORM) + parts(layer, "dropout", fusion.DROPOUT)
    return Op("add_layer_norm", norm, dropout_p(layer.dropout))


@_replaces("mpnet.MPNetAttention")
class MPNetAttention(FusedLayer):
    """Attention, then dropout, residual connection and norm."""

    attn: Any
    dropout: Any
    LayerNorm: Any

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, ...]:
        attended, *others = self.attn(
            hidden_states, attention_mask, position_bias, output_attentions=output_attentions
        )
        return (fusion.add_norm(attended, self.dropout, hidden_states, self.LayerNorm)[0], *others)

    def _fused(self) -> list[Op]:
        return [_residual_norm(self)]


@_replaces(
    "activations.AccurateGELUActivation",
    "activations.FastGELUActivation",
    "activations.NewGELUActivation",
)
class GELUTanh(FusedLayer):
    """Computes in one op what transformers' formula does in eight."""

    def forward(self, input: Tensor) -> Tensor:
        if not input.is_floating_point():
            return super().forward(input)  # type: ignore[misc, no-any-return]
        return F.gelu(input, approximate="tanh")


@_replaces("pytorch_utils.Conv1D")
class Conv1D(FusedLayer):
    """GPT-2's linear layer, whose weight is (in_features, out_features)."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if INT8 in self.__dict__:
            return run_linear(x, *fusion.affine(self))
        if is_faster_transposed(self, x):
            return functional.linear(x, self.weight.t(), self.bias)
        return super().forward(x)

    def _examples(self, x: Callable[..., Tensor], training: bool) -> list[Example]:
        if training:
            return []
        weight, bias = fusion.affine(self)
        weight = weight if INT8 in self.__dict__ else weight.t()
        return [example_of("linear", x, {}, (weight, bias))]


def is_conv1d(module: Any) -> bool:
    """True for transformers' Conv1D, replaced or not; False for a user's subclass."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def is_faster_transposed(module: Any, x: Any) -> bool:
    """True if `functional.linear` with the transposed weight of a Conv1D is faster.

    It is faster in inference, where a packed copy of the weight exists. In float32, PyTorch's own
    product was measured to be faster for small weights and for a single row.
    """
    if x.dtype is torch.float32 and x.numel() <= x.shape[-1]:  # first: cheap in decoding
        return False
    weight, bias = module.weight, module.bias
    if is_plain_eager(x, weight, bias) is not False or torch.is_autocast_enabled("cpu"):
        return False
    if x.dtype != weight.dtype or weight.dim() != 2:
        return False
    many = weight.numel() > LINEAR.weights and x.numel() > weight.shape[0]
    return many or x.dtype != torch.float32
