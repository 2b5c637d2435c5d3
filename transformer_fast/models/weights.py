"""Weights of hand-written models: the names that tutorials give to the parts of a Transformer."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from difflib import get_close_matches

import torch
from torch import Tensor

__all__ = ["load_weights"]


def _projection(letter: str, word: str, number: int, split: str) -> str:
    """A regular expression of the names of one projection: W_q, query, q_proj, fc_q, linears.0, ..."""
    return (
        rf"_attn\.{split}(?:(?:(?:w|fc|linear|proj|to)_?)?(?:{letter}s?|{word})"
        rf"(?:_(?:linear|layer|proj|projection))?|linears\.{number})\."
    )


_HEADS = r"(?:heads\.(\d+)\.)?"
_ENCODER = r"^(?:(?:src|source|enc|encoder|input)[._])+"
_DECODER = r"^(?:(?:tgt|trg|target|dec|decoder|output)[._])+"
_TABLE = (
    r"(?:(?:tok|token|word|vocab)_)?emb(?:ed(?:ding)?s?)?(?:_layer)?\.(?:0\.)?"
    r"(?:(?:lut|embed|embedding|(?:tok|token)_emb(?:edding)?)\.)?weight$"
)
_LAYER = r"^(encoder|decoder)\.stack\.layers\.(\d+)\."

#: Regular expressions of the names in tutorials, and the names here. Each row is applied to each
#: name, in this order; case is ignored.
NAMES: dict[str, str] = {
    r"^(?:_orig_mod|module|model|transformer)\.": "",
    # Buffers, which the model computes itself: positions and masks.
    r"^(?:.*\.)?(?:pe|pos_table|tril|mask|causal_mask)$": "",
    # Stacks.
    r"^(enc|dec)(?:oder)?[._](?:(?:enc|dec)(?:oder)?_)?(?:layers|blocks)\.": r"\1oder.stack.layers.",
    r"^(?:blocks|layers|h)\.": "encoder.stack.layers.",
    r"^(encoder|decoder)\.(?:(?:final_)?(?:layer_?)?norm|ln_f)\.": r"\1.stack.norm.",
    r"^(?:norm|layer_?norm|ln_f)\.": "encoder.stack.norm.",
    # Sub-layers.
    r"\.(?:masked_)?(?:self_)?(?:attention|attn)(?:_block|_layer|_1)?\.": ".self_attn.",
    r"\.(?:mha1?|sa|(?:masked_|self_)+(?:mha|multi_?head_att(?:ention|n)))\.": ".self_attn.",
    r"^(encoder\..*)\.multi_?head_att(?:ention|n)\.": r"\1.self_attn.",
    r"\.(?:src_attn|attn_2|mha2|cross_mha|multi_?head_attention)\.": ".multihead_attn.",
    r"\.(?:cross|encoder|memory|enc(?:oder)?_dec(?:oder)?|dec(?:oder)?_enc(?:oder)?)"
    r"_(?:attention|attn)(?:_block|_layer)?\.": ".multihead_attn.",
    r"\.(?:(?:position_?wise_)?feed_?forward(?:_block|_layer|_network)?|(?:pos_)?ffn?|ffwd|mlp"
    r"|linear_net)\.(?:net(?:work)?\.)?": ".ffn.",
    # Projections; q0, q1, ... if each head has its own.
    _projection("q", "quer(?:y|ies)", 0, _HEADS): r"_attn.q\1.",
    _projection("k", "keys?", 1, _HEADS): r"_attn.k\1.",
    _projection("v", "values?", 2, _HEADS): r"_attn.v\1.",
    r"_attn\.(?:in_proj|qkv|qkv_proj|qkv_layer|to_qkv|c_attn)\.": "_attn.in_proj_",
    r"_attn\.(?:dense|w_?o|fc_?o|w_concat|[oc]_proj|proj|projection|fc|linears\.3"
    r"|(?:(?:w|fc|to|linear)_)?out(?:put)?(?:_(?:linear|layer|proj|projection))?(?:\.0)?)\.": (
        "_attn.out_proj."
    ),
    r"^.*_attn\.bias$": "",  # GPT's causal mask
    r"\.ffn\.(?:0|w_?1|fc_?1|linear_?1|layer_?1|dense_?1|c_fc)\.": ".linear1.",
    r"\.ffn\.(?:2|3|w_?2|fc_?2|linear_?2|layer_?2|dense_?2|c_proj)\.": ".linear2.",
    # Norms.
    r"\.(?:norm|ln|layer_?norm)_?(\d)\.": r".norm\1.",
    r"\.(?:sublayer|residual_connections)\.0\.norm\.": ".norm1.",
    r"\.(?:sublayer|residual_connections)\.1\.norm\.": ".norm2.",
    r"\.(?:sublayer|residual_connections)\.2\.norm\.": ".norm3.",
    rf"{_LAYER}(?:masked_)?(?:self_)?(?:attention|attn)_(?:layer_?)?norm\.": (
        r"\1.stack.layers.\2.norm1."
    ),
    rf"{_LAYER}(?:cross|enc|encoder)_(?:attention|attn)_(?:layer_?)?norm\.": (
        r"\1.stack.layers.\2.norm2."
    ),
    rf"{_LAYER.replace('|decoder', '')}(?:ffn?|feed_?forward|mlp|final)_(?:layer_?)?norm\.": (
        r"\1.stack.layers.\2.norm2."
    ),
    rf"{_LAYER}(?:ffn?|feed_?forward|mlp|final)_(?:layer_?)?norm\.": r"\1.stack.layers.\2.norm3.",
    r"\.(?:a_2|alpha|gamma)$": ".weight",
    r"\.(?:b_2|beta)$": ".bias",
    # Embeddings and the last Linear.
    _ENCODER + _TABLE: "encoder.embedding.table.weight",
    _DECODER + _TABLE: "decoder.embedding.table.weight",
    r"^(encoder|decoder)\.pos(?:ition(?:al)?)?_emb(?:ed(?:ding)?s?)?\.weight$": (
        r"\1.embedding.positions.table"
    ),
    r"^(?:(?:token_)?embedding(?:_table)?|tok_emb|wte)\.": "encoder.embedding.table.",
    r"^(?:position_embedding(?:_table)?|pos_emb|wpe)\.weight$": "encoder.embedding.positions.table",
    r"^(?:generator|projection_layer)\.(?:proj\.)?": "output.",
    r"^(?:decoder\.)?(?:fc|linear|head|lm_head"
    r"|(?:(?:final|fc|linear)_)?(?:out(?:put)?|layer|linear)(?:_(?:linear|layer|proj|projection))?)\.": (
        "output."
    ),
}


def _renamed(name: str, own: Mapping[str, str]) -> str:
    for table in (own, NAMES):
        for theirs, ours in table.items():
            name = re.sub(theirs, ours, name, flags=re.IGNORECASE)
    return name


#: Names that `NAMES` recognises. The error proposes them for similar unknown names.
_PROPOSED = (
    "layers self_attention cross_attention query key value w_q w_k w_v w_o output_projection "
    "feed_forward linear1 linear2 norm1 norm2 norm3 norm embedding output_layer"
)


def _unknown(unknown: Mapping[str, str], wanted: Iterable[str], filled: Container[str]) -> str:
    """Returns the error message. ``unknown``: name -> what `NAMES` made of it, not recognised."""
    known = {part for name in wanted for part in name.split(".")} | {"weight", "bias", "ffn"}
    parts = {
        part: get_close_matches(part.lower(), _PROPOSED.split(), 1, 0.5)
        for found in unknown.values()
        for part in found.split(".")
        if part not in known and not re.fullmatch(r"[qkv]?\d*|in_proj_", part)
    }
    lines = [
        f"{len(unknown)} parameters were not recognised, for example {', '.join([*unknown][:3])}"
    ]
    if parts:
        pairs = ", ".join(f'r"\\b{p}\\b": "{(ours or ["..."])[0]}"' for p, ours in parts.items())
        lines += [f"unknown parts: {', '.join(parts)}", f"rename them, e.g. names={{{pairs}}}"]
    # The numbers of layers are replaced by "*".
    empty = (re.sub(r"\.\d+\.", ".*.", name) for name in wanted if name not in filled)
    modules = [*dict.fromkeys(re.sub(r"[._](?:weight|bias)$", "", name) for name in empty)]
    if modules:
        more = ", ..." if len(modules) > 12 else ""
        lines.append(f"parts of the model without values: {', '.join(modules[:12])}{more}")
    return "\n".join(lines)


def load_weights(
    model: torch.nn.Module,
    state_dict: Mapping[str, Tensor],
    *,
    names: Mapping[str, str] | None = None,
    packed_by_head: bool = False,
) -> None:
    r"""Load the state_dict of a hand-written Transformer, by the names that tutorials use.

        model = models.Transformer(..., norm_first=True, norm="annotated", layer_norm_eps=1e-6)
        models.load_weights(model, torch.load("annotated_transformer.pt"))

    The names of the common tutorials are recognised: q_linear, wq, W_q, W_query, fc_q, linears.0;
    packed projections (qkv_proj, c_attn), or one Linear for each head; masked_self_attention,
    src_attn, cross_attn, attn_2; w_1, fc1, c_fc; sublayer.0.norm, a_2, alpha; encoder_layers,
    output_projection; and so on (``models.weights.NAMES``). A missing bias becomes zero, a parameter
    of one number fills all places, buffers are skipped.

    The model's options must say what a state_dict does not: norm_first, norm ("annotated" for the
    tutorials' own norm with a_2 or alpha), embedding_scale, activation.

    Args:
        model: `Transformer`, `LanguageModel`, or a module with an `Encoder` as ``encoder``.
        state_dict: tensors by name.
        names: further names, as regular expressions and their replacements. They are applied before
            the built-in ones, whose names may be used: ``{r"\bWa\b": "w_q"}``.
        packed_by_head: True if packed projections hold each head's query, key and value side by side,
            (H, 3, D) rows; False if they hold all queries first, (3, H, D) rows.

    Raises:
        ValueError: a name is not recognised, two names belong to one parameter, or a shared parameter
            has two values. TypeError: state_dict is no dict. RuntimeError: a parameter is missing or has
            another shape, as in ``load_state_dict``.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"state_dict must be a dict of tensors, not {type(state_dict).__name__}: call "
            "torch.load(path) or module.state_dict() first"
        )
    wanted = model.state_dict(keep_vars=True)
    # Parameter -> (0, 1 or 2 for q, k or v, head) -> part. Parts are joined in this order.
    parts: dict[str, dict[tuple[int, int], Tensor]] = {}
    unknown: dict[str, str] = {}
    for name, value in state_dict.items():
        found = name if name in wanted else _renamed(name, names or {})
        place = (0, 0)
        if part := re.fullmatch(r"(.*)\.([qkv])(\d*)\.(weight|bias)", found):
            found, place = f"{part[1]}.in_proj_{part[4]}", ("qkv".index(part[2]), int(part[3] or 0))
        elif packed_by_head and found in wanted and ".in_proj_" in found and found != name:
            heads = model.get_submodule(found.rpartition(".")[0]).num_heads
            value = value.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)  # type: ignore[arg-type]
        if found in wanted:
            if place in parts.setdefault(found, {}):
                raise ValueError(
                    f"{name!r} is the second entry that maps to {found!r}: distinguish them by names="
                )
            parts[found][place] = value
        elif found:
            unknown[name] = found
    if unknown:
        raise ValueError(_unknown(unknown, wanted, parts))
    ours = {
        name: torch.cat([of[k] for k in sorted(of)]) if len(of) > 1 else next(iter(of.values()))
        for name, of in parts.items()
    }
    shared = {id(wanted[name]): value for name, value in ours.items()}
    for name, parameter in wanted.items():
        if id(parameter) in shared:
            value = shared[id(parameter)]
            if not torch.equal(ours.get(name, value), value):
                raise ValueError(
                    f"{name!r} shares a parameter with another name, but the values differ"
                )
            ours[name] = value.expand(parameter.shape) if value.numel() == 1 else value
        elif name.endswith("bias") and f"{name[:-4]}weight" in ours:
            ours[name] = torch.zeros_like(parameter)
    model.load_state_dict(ours)
