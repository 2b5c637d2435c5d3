"""The models of four kinds of tutorials, built from `transformer_fast.models`.

`models.load_weights` loads a state_dict that was trained with a tutorial's own classes.

The Annotated Transformer (Rush 2018; Huang et al. 2022) builds the paper's encoder-decoder from
scratch. Its choices and the arguments here (`annotated_transformer`):

    norm before each sub-layer, one more after the last layer     norm_first=True
    its own LayerNorm: unbiased std, eps = 1e-6 outside the root  norm="annotated"
    embeddings times sqrt(d_model), sinusoids, dropout            the default
    src_mask, tgt_mask: True = visible, else filled with -1e9     pad_token; always causal
    Generator: log_softmax of a Linear                            model.log_probabilities
    greedy_decode, which recomputes all tokens at each step       model.generate, with a cache

Encoder-decoders with four Linears per attention write it as

    q, k, v = split(W_q(x)), split(W_k(x)), split(W_v(x))
    scores = q @ k.transpose(-2, -1) / sqrt(d_k)
    scores = scores.masked_fill(mask == 0, -1e9)          # mask: 0 = hidden
    output = W_o(combine(softmax(scores) @ v))

with the norm after each sub-layer and unscaled embeddings (`separate_projections`):

    norm(x + dropout(sublayer(x))), no norm at the end            the default
    unscaled embeddings                                           embedding_scale=1.0
    mask = (source != 0), and causal for the target               pad_token=0
    fc, the last Linear                                           model.output

Convert such a mask (0 = hidden) to a padding mask (True = hidden) by ``mask == 0``. A fully masked
query gets 0 here; with -1e9 it gets the mean of all values.

Encoders with one packed projection and einsum project to query, key and value at once, in the order
of the heads. A classifier on the mean of the vectors follows (`PackedClassifier`):

    qkv = qkv_proj(x).view(batch, length, heads, 3 * d_head)
    q, k, v = qkv.chunk(3, dim=-1)
    scores = einsum("bqhd,bkhd->bhqk", q, k) / sqrt(d_head)
    values = einsum("bhqk,bkhd->bqhd", softmax(scores), v)

The packed weight here has the order of torch.nn.MultiheadAttention: the queries of all heads, then
the keys, then the values. ``models.load_weights(model, theirs, packed_by_head=True)`` reorders the
rows of a trained weight.

A small GPT has blocks ``x = x + attention(norm(x)); x = x + mlp(norm(x))``, a list of heads, each with
its own bias-free Linears for key, query and value, learned positions, and a Linear to the vocabulary
(`decoder_only`):

    norms before the sub-layers, one at the end                   norm_first=True
    token_embedding(x) + position_embedding(positions)            positions="learned", embedding_scale=1.0
    ModuleList of heads, tril filled with -inf                    nhead; always causal
    generate(), which recomputes the whole context                model.generate and model.stream

    python examples/tutorials.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_fast import models

START, END, BLANK = 0, 1, 2  # the Annotated Transformer's <s>, </s> and <blank>
TEXT = "to be or not to be that is the question "


def annotated_transformer(
    src_vocab: int,
    tgt_vocab: int,
    N: int = 6,  # noqa: N803 - the tutorial's names
    d_model: int = 512,
    d_ff: int = 2048,
    h: int = 8,
    dropout: float = 0.1,
) -> models.Transformer:
    return models.Transformer(
        src_vocab, tgt_vocab, d_model, h, N, N, d_ff, dropout, layer_norm_eps=1e-6,
        norm_first=True, norm="annotated", pad_token=BLANK, start_token=START, end_token=END,
    )  # fmt: skip


def separate_projections(
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
        src_vocab_size, tgt_vocab_size, d_model, num_heads, num_layers, num_layers, d_ff, dropout,
        embedding_scale=1.0, max_len=max_seq_length, pad_token=0,
    )  # fmt: skip


class PackedClassifier(torch.nn.Module):
    """Classifies a sequence of tokens."""

    def __init__(
        self, vocab_size: int, classes: int, d_model: int, heads: int, layers: int, d_ff: int
    ) -> None:
        super().__init__()
        self.encoder = models.Encoder(
            vocab_size, d_model, heads, layers, d_ff, dropout=0.0, activation="gelu", pad_token=0
        )
        self.head = torch.nn.Linear(d_model, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        real = (tokens != 0).unsqueeze(-1)
        vectors = self.encoder(tokens).masked_fill(~real, 0.0)
        return self.head(vectors.sum(1) / real.sum(1))


def decoder_only(
    vocab_size: int, n_embd: int, n_head: int, n_layer: int, block_size: int, dropout: float = 0.0
) -> models.LanguageModel:
    return models.LanguageModel(
        vocab_size, n_embd, n_head, n_layer, 4 * n_embd, dropout, norm_first=True,
        positions="learned", embedding_scale=1.0, max_len=block_size,
    )  # fmt: skip


def train(model: torch.nn.Module, steps: int, loss_of_a_batch: Callable[[], Tensor]) -> None:
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(1, steps + 1):
        loss = loss_of_a_batch()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % (steps // 3) == 0:
            print(f"step {step:3}  loss {loss.item():.3f}")


def learn_to_copy() -> None:
    """Runs The Annotated Transformer's first example."""
    model = annotated_transformer(11, 11, N=2, d_model=64, d_ff=128, h=4, dropout=0.0)

    def loss() -> Tensor:
        source = torch.randint(3, 11, (24, 8))
        target = torch.cat((torch.full((24, 1), START), source[:, :-1]), 1)
        log_p = model.log_probabilities(source, target)
        return F.nll_loss(log_p.flatten(0, 1), source.flatten())

    train(model, 150, loss)
    source = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10]])
    found = model.generate(source, max_new_tokens=8, end_token=-1)
    print("source", source[0].tolist())
    print("copied", found.tokens[0].tolist())


def look_at_attention() -> None:
    model = separate_projections(50, 40, d_model=64, num_heads=4, num_layers=2, d_ff=128)
    source = torch.tensor([[7, 8, 9, 10, 11], [5, 6, 7, 0, 0]])
    target = torch.tensor([[1, 4, 5, 6], [1, 9, 8, 0]])
    logits = model(source, target)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten(), ignore_index=0)
    loss.backward()
    print("loss", round(loss.item(), 3))
    model.eval()
    with models.attention_weights(model, "decoder.*.1.multihead_attn") as weights:
        model(source, target)
    looked_at = weights["decoder.stack.layers.1.multihead_attn"][1].mean(0)
    print("attention of the second target to its source:")
    print(looked_at.numpy().round(2))


def classify() -> None:
    """Trains a classifier to tell whether a sequence contains a 7."""
    model = PackedClassifier(10, 2, d_model=32, heads=4, layers=1, d_ff=64)

    def batch() -> tuple[Tensor, Tensor]:
        lengths = torch.randint(1, 11, (64, 1))
        tokens = torch.randint(1, 10, (64, 10)).masked_fill(torch.arange(10) >= lengths, 0)
        return tokens, (tokens == 7).any(1).long()

    def loss() -> Tensor:
        tokens, wanted = batch()
        return F.cross_entropy(model(tokens), wanted)

    train(model, 90, loss)
    tokens, wanted = batch()
    print(f"right {(model(tokens).argmax(1) == wanted).float().mean():.0%}")


def write_text() -> None:
    letters = sorted(set(TEXT))
    data = torch.tensor([letters.index(c) for c in TEXT * 8])
    model = decoder_only(len(letters), n_embd=32, n_head=4, n_layer=2, block_size=80)

    def loss() -> Tensor:
        positions = torch.randint(0, len(data) - 33, (16, 1)) + torch.arange(33)
        batch = data[positions]
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    train(model, 90, loss)
    method = models.Sampling(temperature=0.5, top_k=5, seed=1)
    print("to", end="")
    for token in model.stream(data[None, :2], method, max_new_tokens=60, end_token=-1):
        print(letters[int(token)], end="", flush=True)
    print()


def main() -> None:
    for show in (learn_to_copy, look_at_attention, classify, write_text):
        print(f"--- {show.__name__}")
        torch.manual_seed(0)
        show()


if __name__ == "__main__":
    main()
