"""CTranslate2: whole translation models, converted beforehand, in a process of their own."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn

from . import Offer, Remote

NAME = "CTranslate2"
PACKAGES = ("ctranslate2",)


def _array(tensor: Tensor) -> Any:
    return tensor.detach().float().numpy()


def _set(spec: Any, weight: Tensor, bias: Tensor) -> None:
    spec.weight, spec.bias = _array(weight), _array(bias)


def _norm(spec: Any, norm: nn.LayerNorm) -> None:
    spec.gamma, spec.beta = _array(norm.weight), _array(norm.bias)


def _attention(spec: Any, attention: nn.MultiheadAttention, norm: nn.LayerNorm) -> None:
    """Self-attention's projections are one matrix; of attention to the source, keys and values."""
    weight, bias = attention.in_proj_weight, attention.in_proj_bias
    if len(spec.linear) == 2:
        _set(spec.linear[0], weight, bias)
    else:
        model = attention.embed_dim
        _set(spec.linear[0], weight[:model], bias[:model])
        _set(spec.linear[1], weight[model:], bias[model:])
    _set(spec.linear[-1], attention.out_proj.weight, attention.out_proj.bias)
    _norm(spec.layer_norm, norm)


def _feed_forward(spec: Any, layer: Any, norm: nn.LayerNorm) -> None:
    _set(spec.linear_0, layer.linear1.weight, layer.linear1.bias)
    _set(spec.linear_1, layer.linear2.weight, layer.linear2.bias)
    _norm(spec.layer_norm, norm)


def _converted(model: Any) -> Any:
    from ctranslate2.specs import TransformerSpec

    layers, heads = len(model.encoder.layers), model.encoder.layers[0].self_attn.num_heads
    spec: Any = TransformerSpec.from_config(
        (layers, layers), heads, pre_norm=False, no_final_norm=True
    )
    spec.encoder.embeddings[0].weight = _array(model.embedding.weight)
    spec.decoder.embeddings.weight = _array(model.embedding.weight)
    for half in (spec.encoder, spec.decoder):
        half.scale_embeddings = False
        half.position_encodings.encodings = _array(model.positions)
    for mine, layer in zip(spec.encoder.layer, model.encoder.layers, strict=True):
        _attention(mine.self_attention, layer.self_attn, layer.norm1)
        _feed_forward(mine.ffn, layer, layer.norm2)
    for mine, layer in zip(spec.decoder.layer, model.decoder.layers, strict=True):
        _attention(mine.self_attention, layer.self_attn, layer.norm1)
        _attention(mine.attention, layer.multihead_attn, layer.norm2)
        _feed_forward(mine.ffn, layer, layer.norm3)
    _set(spec.decoder.projection, model.output.weight, model.output.bias)
    names = _names(model.embedding.num_embeddings)
    spec.register_source_vocabulary(names)
    spec.register_target_vocabulary(names)
    spec.config.add_source_bos = spec.config.add_source_eos = False
    spec.config.decoder_start_token = "<s>"
    spec.validate()
    return spec


def _names(vocabulary: int) -> list[str]:
    return ["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(3, vocabulary))]


def _translator(folder: str, threads: int, names: list[str], new: int) -> Any:
    import ctranslate2

    translator = ctranslate2.Translator(
        folder, device="cpu", compute_type="float32", inter_threads=1, intra_threads=threads
    )
    numbers = {name: number for number, name in enumerate(names)}

    def run(source: list[list[int]]) -> list[list[int]]:
        found = translator.translate_batch(
            [[names[i] for i in row] for row in source],
            beam_size=1, max_decoding_length=new, min_decoding_length=new,
        )  # fmt: skip
        return [[numbers[name] for name in one.hypotheses[0]] for one in found]

    return run


def decode(model: Any, arguments: tuple[Any, ...], new: int) -> Offer:
    (source,) = arguments
    if source.device.type != "cpu" or model.positions.dtype != torch.float32:
        return "it is given float32 models on the CPU"
    names = _names(model.embedding.num_embeddings)
    with tempfile.TemporaryDirectory() as folder:
        _converted(model).save(folder)
        translate = Remote(_translator, folder, torch.get_num_threads(), names, new)

    def run(source: Tensor) -> Tensor:
        return torch.tensor(translate(source.tolist()))

    return run
