"""Hugging Face transformers: Marian's encoder layer, the paper's in their words."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from . import Offer

NAME = "Hugging Face"


def available() -> str | None:
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed (pip install transformers)"
    return None


def _copied(layer: torch.nn.TransformerEncoderLayer) -> torch.nn.Module:
    from transformers import MarianConfig
    from transformers.models.marian.modeling_marian import MarianEncoderLayer

    attention = layer.self_attn
    config = MarianConfig(
        d_model=attention.embed_dim,
        encoder_attention_heads=attention.num_heads,
        encoder_ffn_dim=layer.linear1.out_features,
        activation_function="relu",
        attn_implementation="sdpa",
    )
    theirs = MarianEncoderLayer(config)
    weights = attention.in_proj_weight.chunk(3)
    biases = attention.in_proj_bias.chunk(3)
    pairs = {
        theirs.self_attn.out_proj: (attention.out_proj.weight, attention.out_proj.bias),
        theirs.self_attn_layer_norm: (layer.norm1.weight, layer.norm1.bias),
        theirs.fc1: (layer.linear1.weight, layer.linear1.bias),
        theirs.fc2: (layer.linear2.weight, layer.linear2.bias),
        theirs.final_layer_norm: (layer.norm2.weight, layer.norm2.bias),
    }
    for name, weight, bias in zip(("q_proj", "k_proj", "v_proj"), weights, biases, strict=True):
        pairs[getattr(theirs.self_attn, name)] = (weight, bias)
    with torch.no_grad():
        for module, (weight, bias) in pairs.items():
            module.weight.copy_(weight)
            module.bias.copy_(bias)
    return theirs.eval().to(weights[0].device, weights[0].dtype)


def encoder_layer(layer: torch.nn.TransformerEncoderLayer, arguments: tuple[Any, ...]) -> Offer:
    theirs = _copied(layer)

    def run(x: Tensor, mask: None, padding: Tensor | None) -> Tensor:
        visible = None if padding is None else ~padding[:, None, None, :]
        result = theirs(x, attention_mask=visible)
        return result[0] if isinstance(result, tuple) else result

    return run
