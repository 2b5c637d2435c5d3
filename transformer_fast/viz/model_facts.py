"""What a diagram tells about a model, read from the model itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..models import Decoder, Encoder, LanguageModel, TokenEmbedding, Transformer
from ..models.embedding import OutputProjection
from ..nn.fusion import activation_name


@dataclass(frozen=True)
class LayerFacts:
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


@dataclass(frozen=True)
class StackFacts:
    #: "encoder" or "decoder".
    side: str
    #: Runs of equal layers, the first first.
    layers: tuple[tuple[int, LayerFacts], ...]
    final_norm: str | None
    #: Whether self-attention always is causal; None: the call decides.
    causal: bool | None = None
    embedding: TokenEmbedding | None = None
    #: How many positions there are.
    max_len: int = 0


@dataclass(frozen=True)
class ModelFacts:
    name: str
    parameters: int
    stacks: tuple[StackFacts, ...]
    output: OutputProjection | None = None
    #: Whether the output's weight is the last stack's table.
    tied_output: bool = False
    #: Whether both embeddings have one table.
    shared_table: bool = False


_HALVES = (torch.nn.TransformerEncoder, torch.nn.TransformerDecoder)
_LAYERS = (torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer)
_KNOWN = (Transformer, LanguageModel, Encoder, Decoder, torch.nn.Transformer, *_HALVES, *_LAYERS)


def read_model(model: Any) -> ModelFacts:
    """Read ``model``, or the one known model inside of it."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    name = type(model).__name__
    inner = model if isinstance(model, _KNOWN) else _inside(model)
    if inner is not model:
        name += f" (its {type(inner).__name__})"
    parameters = sum(p.numel() for p in model.parameters())
    if isinstance(inner, Transformer):
        encoder, decoder = inner.encoder, inner.decoder
        return ModelFacts(
            name,
            parameters,
            (_half(encoder, "encoder", False), _half(decoder, "decoder", True)),
            inner.output,
            inner.output.weight is decoder.embedding.table.weight,
            encoder.embedding.table.weight is decoder.embedding.table.weight,
        )
    if isinstance(inner, LanguageModel):
        return ModelFacts(
            name,
            parameters,
            (_half(inner.encoder, "decoder", True),),
            inner.output,
            inner.output.weight is inner.encoder.embedding.table.weight,
        )
    if isinstance(inner, Encoder):
        stacks: tuple[StackFacts, ...] = (_half(inner, "encoder", None),)
    elif isinstance(inner, Decoder):
        stacks = (_half(inner, "decoder", True),)
    elif isinstance(inner, torch.nn.Transformer):
        stacks = (_stack(inner.encoder, "encoder"), _stack(inner.decoder, "decoder"))
    elif isinstance(inner, _LAYERS):
        stacks = (StackFacts(_side(inner), ((1, _layer(inner)),), None),)
    else:
        stacks = (_stack(inner, _side(inner)),)
    return ModelFacts(name, parameters, stacks)


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


def _side(module: torch.nn.Module) -> str:
    crossed = (torch.nn.TransformerDecoder, torch.nn.TransformerDecoderLayer)
    return "decoder" if isinstance(module, crossed) else "encoder"


def _half(half: Encoder | Decoder, side: str, causal: bool | None) -> StackFacts:
    return replace(
        _stack(half.stack, side), causal=causal, embedding=half.embedding, max_len=half.max_len
    )


def _stack(stack: Any, side: str) -> StackFacts:
    runs: list[tuple[int, LayerFacts]] = []
    if not hasattr(stack, "layers"):
        raise TypeError(
            f"the {side} of model must have layers, and a {type(stack).__name__} has none"
        )
    for layer in stack.layers:
        facts = _layer(layer)
        if runs and runs[-1][1] == facts:
            runs[-1] = (runs[-1][0] + 1, facts)
        else:
            runs.append((1, facts))
    norm = getattr(stack, "norm", None)
    return StackFacts(side, tuple(runs), None if norm is None else type(norm).__name__)


def _layer(layer: Any) -> LayerFacts:
    if not isinstance(layer, _LAYERS):
        raise TypeError(
            "model must be built of TransformerEncoderLayer and TransformerDecoderLayer, and one "
            f"of its layers is {type(layer).__name__}"
        )
    attention, activation = layer.self_attn, layer.activation
    return LayerFacts(
        isinstance(layer, torch.nn.TransformerDecoderLayer),
        attention.embed_dim,
        attention.num_heads,
        layer.linear1.out_features,
        str(
            activation_name(activation)
            or getattr(activation, "__name__", type(activation).__name__)
        ),
        bool(layer.norm_first),
        type(layer.norm1).__name__,
        layer.dropout1.p,
    )
