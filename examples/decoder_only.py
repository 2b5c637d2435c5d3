"""A small GPT, as tutorials build it head by head, with our parts.

Those tutorials write a block as ``x = x + attention(norm(x)); x = x + mlp(norm(x))`` with a list of
heads, each with its own bias-free Linears for key, query and value, learned positions, and a Linear
to the vocabulary. Said here:

    norms first, one at the end                        norm_first=True
    token_embedding(x) + position_embedding(places)    positions="learned", embedding_scale=1.0
    ModuleList of heads, tril filled with -inf         nhead; LanguageModel is causal by itself
    generate(), which runs the whole context again     model.generate and model.stream, with a cache

`models.load_weights` takes a state_dict of such a model.

    python examples/decoder_only.py
"""

from __future__ import annotations

import torch

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
