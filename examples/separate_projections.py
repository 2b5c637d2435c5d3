"""A from-scratch encoder-decoder with four Linears per attention, with our parts.

Many tutorials write attention as

    q, k, v = split(W_q(x)), split(W_k(x)), split(W_v(x))
    scores = q @ k.transpose(-2, -1) / sqrt(d_k)
    scores = scores.masked_fill(mask == 0, -1e9)          # mask: 0 = hidden
    output = W_o(combine(softmax(scores) @ v))

with the norm behind each sub-layer and embeddings that are not scaled. Said here:

    norm(x + dropout(sublayer(x))), no norm at the end    the default
    embeddings as they are                                embedding_scale=1.0
    mask = (source != 0), and causal for the target       pad_token=0
    fc, the last Linear                                   model.output

A mask that is 0 where hidden becomes a padding mask, True where hidden: ``mask == 0``. The masks
here hide completely, where -1e9 leaves a query that sees nothing the mean of all values.

`models.load_weights` takes a state_dict of such a model.

    python examples/separate_projections.py
"""

from __future__ import annotations

import torch

from transformer_fast import models


def make_model(
    src_vocab_size: int,
    tgt_vocab_size: int,
    d_model: int = 512,
    num_heads: int = 8,
    num_layers: int = 6,
    d_ff: int = 2048,
    max_seq_length: int = 100,
    dropout: float = 0.1,
) -> models.Transformer:
    return models.Transformer(
        src_vocab_size,
        tgt_vocab_size,
        d_model,
        num_heads,
        num_layers,
        num_layers,
        d_ff,
        dropout,
        embedding_scale=1.0,
        max_len=max_seq_length,
        pad_token=0,
    )


def main() -> None:
    torch.manual_seed(0)
    model = make_model(50, 40, d_model=64, num_heads=4, num_layers=2, d_ff=128)
    source = torch.tensor([[7, 8, 9, 10, 11], [5, 6, 7, 0, 0]])
    target = torch.tensor([[1, 4, 5, 6], [1, 9, 8, 0]])
    logits = model(source, target)
    print("logits", list(logits.shape))
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), target[:, 1:].flatten(), ignore_index=0
    )
    loss.backward()
    print("loss", round(loss.item(), 3))
    model.eval()
    with models.attention_weights(model, "decoder.*.1.multihead_attn") as weights:
        model(source, target)
    looked_at = weights["decoder.stack.layers.1.multihead_attn"][1].mean(0)
    print("what the second target looks at in its source:")
    print(looked_at.numpy().round(2))


if __name__ == "__main__":
    main()
