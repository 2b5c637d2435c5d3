"""Weights of models that were written by hand: what tutorials call the parts of a Transformer."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["load_weights"]

#: What others call a part, as a regular expression, and what it is called here. Every row is
#: applied to every name, in this order; upper and lower case are one.
NAMES: dict[str, str] = {
    r"^(?:_orig_mod|module|model|transformer)\.": "",
    # Buffers, which are made anew: positions and masks.
    r"^(?:.*\.)?(?:pe|tril|mask)$": "",
    # Stacks.
    r"^(encoder|decoder)[._](?:enc_|dec_)?layers\.": r"\1.stack.layers.",
    r"^(?:blocks|layers|h)\.": "encoder.stack.layers.",
    r"^(encoder|decoder)\.(?:norm|layer_?norm|ln_f)\.": r"\1.stack.norm.",
    r"^(?:norm|layer_?norm|ln_f)\.": "encoder.stack.norm.",
    # Sub-layers.
    r"\.(?:self_attention(?:_block)?|attention|attn(?:_1)?|mha1?|sa)\.": ".self_attn.",
    r"\.(?:src_attn|cross_(?:attn|attention(?:_block)?)|attn_2|mha2)\.": ".multihead_attn.",
    r"\.(?:feed_forward(?:_block)?|ffn?|ffwd|mlp|linear_net)\.(?:net\.)?": ".ffn.",
    # Projections; q0, q1, ... where each head has its own.
    r"_attn\.(?:heads\.(\d+)\.)?(?:q|q_linear|w_?q|q_proj|query|linears\.0)\.": r"_attn.q\1.",
    r"_attn\.(?:heads\.(\d+)\.)?(?:k|k_linear|w_?k|k_proj|key|linears\.1)\.": r"_attn.k\1.",
    r"_attn\.(?:heads\.(\d+)\.)?(?:v|v_linear|w_?v|v_proj|value|linears\.2)\.": r"_attn.v\1.",
    r"_attn\.(?:in_proj|qkv|qkv_proj|qkv_layer|to_qkv|c_attn)\.": "_attn.in_proj_",
    r"_attn\.(?:out|dense|w_?o|o_proj|c_proj|proj|projection|fc|fc_out|linears\.3)\.": (
        "_attn.out_proj."
    ),
    r"^.*_attn\.bias$": "",  # GPT's causal mask
    r"\.ffn\.(?:0|w_?1|fc_?1|linear_?1|c_fc)\.": ".linear1.",
    r"\.ffn\.(?:2|3|w_?2|fc_?2|linear_?2|c_proj)\.": ".linear2.",
    # Norms.
    r"\.(?:norm|ln|layer_?norm)_?(\d)\.": r".norm\1.",
    r"\.(?:sublayer|residual_connections)\.0\.norm\.": ".norm1.",
    r"\.(?:sublayer|residual_connections)\.1\.norm\.": ".norm2.",
    r"\.(?:sublayer|residual_connections)\.2\.norm\.": ".norm3.",
    r"\.(?:a_2|alpha|gamma)$": ".weight",
    r"\.(?:b_2|beta)$": ".bias",
    # Embeddings and the last Linear.
    r"^(?:src|encoder)[._]embed(?:ding)?\.(?:0\.)?(?:(?:lut|embed|embedding)\.)?weight$": (
        "encoder.embedding.table.weight"
    ),
    r"^(?:tgt|trg|decoder)[._]embed(?:ding)?\.(?:0\.)?(?:(?:lut|embed|embedding)\.)?weight$": (
        "decoder.embedding.table.weight"
    ),
    r"^(?:(?:token_)?embedding(?:_table)?|tok_emb|wte)\.": "encoder.embedding.table.",
    r"^(?:position_embedding(?:_table)?|pos_emb|wpe)\.weight$": "encoder.embedding.positions.table",
    r"^(?:generator|projection_layer)\.(?:proj\.)?": "output.",
    r"^(?:fc|fc_out|final_layer|out|head|lm_head)\.": "output.",
}


def _renamed(name: str, own: Mapping[str, str]) -> str:
    for table in (own, NAMES):
        for theirs, ours in table.items():
            name = re.sub(theirs, ours, name, flags=re.IGNORECASE)
    return name


def load_weights(
    model: torch.nn.Module,
    state_dict: Mapping[str, Tensor],
    *,
    names: Mapping[str, str] | None = None,
    packed_by_head: bool = False,
) -> None:
    """Load the state_dict of a Transformer that was written by hand, whatever its parts are called.

        model = models.Transformer(..., norm_first=True, norm="annotated", layer_norm_eps=1e-6)
        models.load_weights(model, torch.load("annotated_transformer.pt"))

    Known are the names of the common tutorials: q_linear, wq, W_q, w_q, query, linears.0; packed
    projections (qkv_proj, c_attn), or one Linear for each head; src_attn, cross_attn, attn_2; w_1,
    fc1, c_fc; sublayer.0.norm, a_2, alpha; and so on (``models.weights.NAMES``). A bias that the
    state_dict lacks is zero, a parameter of one number serves all places, buffers are left out.

    What a state_dict does not tell is for the model's options to say: norm_first, norm
    ("annotated" for the tutorials' own norm with a_2 or alpha), embedding_scale, activation.

    Args:
        model: `Transformer`, `LanguageModel`, or a module that has an `Encoder` as ``encoder``.
        state_dict: tensors by their names.
        names: more names, as regular expressions and what stands in their place; they are applied
            before the others.
        packed_by_head: whether packed projections have each head's query, key and value side by
            side, (H, 3, D) rows, and not all queries first, (3, H, D).

    Raises:
        ValueError: names that are not known, two for one parameter, two values of a shared one.
        RuntimeError: parameters that are missing or of another shape, as of ``load_state_dict``.
    """
    wanted = model.state_dict(keep_vars=True)
    # The values of each parameter of ours by their order in it: (0, 1, 2 for q, k, v; head).
    parts: dict[str, dict[tuple[int, int], Tensor]] = {}
    unknown: list[str] = []
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
                raise ValueError(f"{name!r} is not the only one for {found!r}")
            parts[found][place] = value
        elif found:
            unknown.append(name)
    if unknown:
        raise ValueError(
            f"a {type(model).__name__} has no part that is known as {', '.join(unknown)}; say what "
            "it is called by names={...}"
        )
    ours = {
        name: torch.cat([of[k] for k in sorted(of)]) if len(of) > 1 else next(iter(of.values()))
        for name, of in parts.items()
    }
    shared = {id(wanted[name]): value for name, value in ours.items()}
    for name, parameter in wanted.items():
        if id(parameter) in shared:
            value = shared[id(parameter)]
            if not torch.equal(ours.get(name, value), value):
                raise ValueError(f"{name!r} is one parameter with another, whose values differ")
            ours[name] = value.expand(parameter.shape) if value.numel() == 1 else value
        elif name.endswith("bias") and f"{name[:-4]}weight" in ours:
            ours[name] = torch.zeros_like(parameter)
    model.load_state_dict(ours)
