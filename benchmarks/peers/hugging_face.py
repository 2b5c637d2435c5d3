"""Hugging Face transformers: Marian, the paper's model in their words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import Offer

NAME = "Hugging Face"
PACKAGES = ("transformers",)


def _attention_state(name: str, attention: torch.nn.MultiheadAttention) -> dict[str, Tensor]:
    state = {}
    for number, part in enumerate(("q_proj", "k_proj", "v_proj")):
        state[f"{name}.{part}.weight"] = attention.in_proj_weight.chunk(3)[number]
        state[f"{name}.{part}.bias"] = attention.in_proj_bias.chunk(3)[number]
    state[f"{name}.out_proj.weight"] = attention.out_proj.weight
    state[f"{name}.out_proj.bias"] = attention.out_proj.bias
    return state


def _layer_state(layer: Any) -> dict[str, Tensor]:
    """The state of an encoder or decoder layer under Marian's names."""
    crosses = hasattr(layer, "multihead_attn")
    modules = {
        "self_attn_layer_norm": layer.norm1,
        "fc1": layer.linear1,
        "fc2": layer.linear2,
        "final_layer_norm": layer.norm3 if crosses else layer.norm2,
    }
    state = _attention_state("self_attn", layer.self_attn)
    if crosses:
        modules["encoder_attn_layer_norm"] = layer.norm2
        state |= _attention_state("encoder_attn", layer.multihead_attn)
    for name, module in modules.items():
        state |= {f"{name}.{kind}": getattr(module, kind) for kind in ("weight", "bias")}
    return state


def _settings(layer: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "d_model": layer.self_attn.embed_dim,
        "activation_function": "relu",
        "attn_implementation": "sdpa",
    }
    for half in ("encoder", "decoder"):
        settings[f"{half}_attention_heads"] = layer.self_attn.num_heads
        settings[f"{half}_ffn_dim"] = layer.linear1.out_features
    return settings


def _translator(model: Any, new: int) -> Any:
    from transformers import MarianConfig, MarianMTModel

    layers, vocabulary = len(model.encoder.layers), model.embedding.num_embeddings
    config = MarianConfig(
        **_settings(model.encoder.layers[0]),
        vocab_size=vocabulary,
        max_position_embeddings=len(model.positions),
        encoder_layers=layers,
        decoder_layers=layers,
        scale_embedding=False,
        tie_word_embeddings=False,
        share_encoder_decoder_embeddings=True,
        pad_token_id=0,
        eos_token_id=2,
        forced_eos_token_id=None,
        decoder_start_token_id=1,
    )
    theirs = MarianMTModel(config)
    state = {
        "model.shared.weight": model.embedding.weight,
        "lm_head.weight": model.output.weight,
        "final_logits_bias": model.output.bias[None],
    }
    for half in ("encoder", "decoder"):
        state[f"model.{half}.embed_tokens.weight"] = model.embedding.weight
        state[f"model.{half}.embed_positions.weight"] = model.positions
        for number, layer in enumerate(getattr(model, half).layers):
            for name, value in _layer_state(layer).items():
                state[f"model.{half}.layers.{number}.{name}"] = value
    theirs.load_state_dict(state)
    return theirs.eval().to(model.output.weight)


def decode(model: Any, arguments: tuple[Any, ...], new: int) -> Offer:
    theirs = _translator(model, new)
    options = {"max_new_tokens": new, "min_new_tokens": new, "num_beams": 1, "do_sample": False}

    def run(source: Tensor) -> Tensor:
        mask = torch.ones_like(source)
        return theirs.generate(source, attention_mask=mask, **options)[:, 1:]

    return run
