"""What a diagram tells about a model, read from the model itself."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch

from ..models import Decoder, Encoder, LanguageModel, TokenEmbedding, Transformer
from ..models.embedding import OutputProjection
from ..nn.fusion import activation_name


class LayerFacts(NamedTuple):
    #: Whether it attends to a memory too.
    crossed: bool
    d_model: int
    heads: int
    hidden: int
    activation: str
    norm_first: bool
    #: The class of its norms.
    norm: str
    dropout: float


class StackFacts(NamedTuple):
    #: "encoder" or "decoder".
    side: str
    #: Runs of equal layers, the first first.
    layers: list[tuple[int, LayerFacts]]
    final_norm: str | None
    #: Whether self-attention always is causal; if not, the call decides.
    causal: bool
    embedding: TokenEmbedding | None
    #: How many positions there are.
    max_len: int


class ModelFacts(NamedTuple):
    name: str
    parameters: int
    stacks: list[StackFacts]
    output: OutputProjection | None
    #: Whether the output's weight is the last stack's table.
    tied_output: bool
    #: Whether both embeddings have one table.
    shared_table: bool


_LAYERS = (torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer)
_DECODERS = (Decoder, torch.nn.TransformerDecoder, torch.nn.TransformerDecoderLayer)
_PAIRS = (Transformer, torch.nn.Transformer)
_KNOWN = (*_PAIRS, LanguageModel, Encoder, torch.nn.TransformerEncoder, *_DECODERS, *_LAYERS)


def read_model(model: Any) -> ModelFacts:
    """Read ``model``, or the one known model inside of it."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    inner: Any = model if isinstance(model, _KNOWN) else _inside(model)
    if isinstance(inner, _PAIRS):
        stacks = [_stack(inner.encoder, "encoder"), _stack(inner.decoder, "decoder")]
    elif isinstance(inner, LanguageModel):
        stacks = [_stack(inner.encoder, "decoder")._replace(causal=True)]
    else:
        stacks = [_stack(inner, "decoder" if isinstance(inner, _DECODERS) else "encoder")]
    output = getattr(inner, "output", None)
    tables = [stack.embedding and stack.embedding.table.weight for stack in stacks]
    return ModelFacts(
        type(model).__name__ + (f" (its {type(inner).__name__})" if inner is not model else ""),
        sum(p.numel() for p in model.parameters()),
        stacks,
        output,
        output is not None and output.weight is tables[-1],
        len(stacks) == 2 and tables[0] is not None and tables[0] is tables[1],
    )


def _inside(model: torch.nn.Module) -> torch.nn.Module:
    """The only outermost known model in a module that somebody wrote around it."""
    found: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, _KNOWN) and not any(name.startswith(f"{n}.") for n in found):
            found[name] = module
    if not found:
        raise TypeError(
            f"model has no Transformer that can be drawn: a {type(model).__name__} without "
            "torch.nn's layers or transformer_fast's"
        )
    if len(found) > 1:
        raise ValueError(
            f"model has several Transformers, {', '.join(found)}: pass one of them, as in "
            f'model.get_submodule("{next(iter(found))}")'
        )
    return next(iter(found.values()))


def _stack(part: Any, side: str) -> StackFacts:
    """Of a layer, of layers, or of the half of a model that has them."""
    whole = isinstance(part, (Encoder, Decoder))
    stack = part.stack if whole else part
    layers = [stack] if isinstance(stack, _LAYERS) else getattr(stack, "layers", None)
    if layers is None:
        raise TypeError(
            f"the {side} of model must have layers, and a {type(stack).__name__} has none"
        )
    runs = [(len(list(same)), facts) for facts, same in itertools.groupby(map(_layer, layers))]
    norm = getattr(stack, "norm", None)
    return StackFacts(
        side,
        runs,
        None if norm is None else type(norm).__name__,
        isinstance(part, Decoder),
        part.embedding if whole else None,
        part.max_len if whole else 0,
    )


def _layer(layer: Any) -> LayerFacts:
    if not isinstance(layer, _LAYERS):
        raise TypeError(
            "model must be built of TransformerEncoderLayer and TransformerDecoderLayer, and one "
            f"of its layers is {type(layer).__name__}"
        )
    attention, activation = layer.self_attn, layer.activation
    named = activation_name(activation) or getattr(activation, "__name__", None)
    return LayerFacts(
        isinstance(layer, torch.nn.TransformerDecoderLayer),
        attention.embed_dim,
        attention.num_heads,
        layer.linear1.out_features,
        str(named or type(activation).__name__),
        bool(layer.norm_first),
        type(layer.norm1).__name__,
        layer.dropout1.p,
    )
