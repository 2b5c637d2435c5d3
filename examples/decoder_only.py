"""A small GPT, as tutorials build it head by head, with our parts.

Those tutorials write a block as ``x = x + attention(norm(x)); x = x + mlp(norm(x))`` with a list of
heads, each with its own bias-free Linears for key, query and value, learned positions, and a Linear
to the vocabulary. Said here:

    norms first, one at the end                        norm_first=True
    token_embedding(x) + position_embedding(places)    positions="learned", embedding_scale=1.0
    ModuleList of heads, tril filled with -inf         nhead; LanguageModel is causal by itself
    generate(), which runs the whole context again     model.generate and model.stream, with a cache

`load_weights` takes a state_dict of such a model.

    python examples/decoder_only.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_fast import models

TEXT = "to be or not to be that is the question "


def make_model(
    vocab_size: int, n_embd: int, n_head: int, n_layer: int, block_size: int, dropout: float = 0.0
) -> models.LanguageModel:
    return models.LanguageModel(
        vocab_size,
        n_embd,
        n_head,
        n_layer,
        4 * n_embd,
        dropout,
        norm_first=True,
        positions="learned",
        embedding_scale=1.0,
        max_len=block_size,
    )


def load_weights(model: models.LanguageModel, theirs: dict[str, Tensor]) -> None:
    """Load ``blocks.0.attention.heads.0.query.weight`` and the like."""
    ours = {
        "encoder.embedding.table.weight": theirs["token_embedding.weight"],
        "encoder.embedding.positions.table": theirs["position_embedding.weight"],
    }
    modules = {"encoder.stack.norm": "norm", "output": "head"}
    layers = model.encoder.stack.layers
    for i in range(len(layers)):
        layer, block = f"encoder.stack.layers.{i}", f"blocks.{i}"
        heads = range(layers[i].self_attn.num_heads)
        ours[f"{layer}.self_attn.in_proj_weight"] = torch.cat(
            [
                theirs[f"{block}.attention.heads.{h}.{part}.weight"]
                for part in ("query", "key", "value")
                for h in heads
            ]
        )
        ours[f"{layer}.self_attn.in_proj_bias"] = torch.zeros_like(layers[i].self_attn.in_proj_bias)
        modules |= {
            f"{layer}.self_attn.out_proj": f"{block}.attention.projection",
            f"{layer}.linear1": f"{block}.mlp.0",
            f"{layer}.linear2": f"{block}.mlp.2",
            f"{layer}.norm1": f"{block}.norm1",
            f"{layer}.norm2": f"{block}.norm2",
        }
    for name, from_name in modules.items():
        ours |= {f"{name}.{part}": theirs[f"{from_name}.{part}"] for part in ("weight", "bias")}
    model.load_state_dict(ours)


def main() -> None:
    torch.manual_seed(0)
    letters = sorted(set(TEXT))
    data = torch.tensor([letters.index(c) for c in TEXT * 8])
    model = make_model(len(letters), n_embd=32, n_head=4, n_layer=2, block_size=80)
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(1, 91):
        places = torch.randint(0, len(data) - 33, (16, 1)) + torch.arange(33)
        batch = data[places]
        logits = model(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 30 == 0:
            print(f"step {step:2}  loss {loss.item():.3f}")
    method = models.Sampling(temperature=0.5, top_k=5, seed=1)
    print("to", end="")
    for token in model.stream(data[None, :2], method, max_new_tokens=60, end_token=-1):
        print(letters[int(token)], end="", flush=True)
    print()


if __name__ == "__main__":
    main()
