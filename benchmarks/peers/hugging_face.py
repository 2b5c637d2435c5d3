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
    settings: dict[str, Any] = {
        "d_model": attention.embed_dim,
        "encoder_attention_heads": attention.num_heads,
        "encoder_ffn_dim": layer.linear1.out_features,
        "activation_function": "relu",
        "attn_implementation": "sdpa",
    }
    theirs = MarianEncoderLayer(MarianConfig(**settings))
    pairs: dict[str, Any] = {
        "self_attn.out_proj": attention.out_proj,
        "self_attn_layer_norm": layer.norm1,
        "fc1": layer.linear1,
        "fc2": layer.linear2,
        "final_layer_norm": layer.norm2,
    }
    state = {
        f"{name}.{kind}": getattr(module, kind)
        for name, module in pairs.items()
        for kind in ("weight", "bias")
    }
    for number, name in enumerate(("q_proj", "k_proj", "v_proj")):
        state[f"self_attn.{name}.weight"] = attention.in_proj_weight.chunk(3)[number]
        state[f"self_attn.{name}.bias"] = attention.in_proj_bias.chunk(3)[number]
    theirs.load_state_dict(state)
    weight = attention.in_proj_weight
    return theirs.eval().to(weight.device, weight.dtype)


def encoder_layer(layer: torch.nn.TransformerEncoderLayer, arguments: tuple[Any, ...]) -> Offer:
    theirs = _copied(layer)

    def run(x: Tensor, mask: None, padding: Tensor | None) -> Tensor:
        visible = None if padding is None else ~padding[:, None, None, :]
        result: Any = theirs(x, attention_mask=visible)
        return result[0] if isinstance(result, tuple) else result

    return run
