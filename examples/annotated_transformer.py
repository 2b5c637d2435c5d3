"""The Annotated Transformer's model with our parts.

That tutorial (Rush 2018; Huang et al. 2022) builds the paper's encoder-decoder from scratch. Its
choices, and how they are said here:

    norm before each sub-layer, one more after the last layer     norm_first=True
    its own LayerNorm: unbiased std, eps = 1e-6 outside the root  norm="annotated"
    embeddings times sqrt(d_model), sinusoids, dropout            the default
    src_mask, tgt_mask: True = may be seen, filled with -1e9      pad_token; causal by itself
    Generator: log_softmax of a Linear                            model.log_probabilities
    greedy_decode, which computes everything again at each step   model.generate, with a cache

`models.load_weights` takes a state_dict that was trained with the tutorial's own classes.

    python examples/annotated_transformer.py
"""

from __future__ import annotations

import torch

from transformer_fast import models

START, END, BLANK = 0, 1, 2  # the tutorial's <s>, </s> and <blank>


def make_model(
    src_vocab: int,
    tgt_vocab: int,
    N: int = 6,  # noqa: N803 - the tutorial's names
    d_model: int = 512,
    d_ff: int = 2048,
    h: int = 8,
    dropout: float = 0.1,
) -> models.Transformer:
    return models.Transformer(
        src_vocab,
        tgt_vocab,
        d_model,
        h,
        N,
        N,
        d_ff,
        dropout,
        layer_norm_eps=1e-6,
        norm_first=True,
        norm="annotated",
        pad_token=BLANK,
        start_token=START,
        end_token=END,
    )


def main() -> None:
    torch.manual_seed(0)
    # The tutorial's first example: learn to copy numbers.
    model = make_model(11, 11, N=2, d_model=64, d_ff=128, h=4, dropout=0.0)
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(1, 151):
        source = torch.randint(3, 11, (24, 8))
        start = torch.full((24, 1), START)
        log_p = model.log_probabilities(source, torch.cat((start, source[:, :-1]), 1))
        loss = torch.nn.functional.nll_loss(log_p.flatten(0, 1), source.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 50 == 0:
            print(f"step {step:3}  loss {loss.item():.3f}")
    source = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10]])
    found = model.generate(source, max_new_tokens=8, end_token=-1)
    print("source", source[0].tolist())
    print("copied", found.tokens[0].tolist())


if __name__ == "__main__":
    main()
