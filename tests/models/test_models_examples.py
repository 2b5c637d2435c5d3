"""The pages of examples/: each runs, and its model gives the same results as the tutorial's code.

The tutorials' models are rewritten here in plain PyTorch, with the same structure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from models_checks import in_double, recomputed, small, small_language_model, tokens, varied
from module_checks import check_budget
from torch import Tensor, nn

from examples import hand_written as by_hand
from examples import translation_with_torch_nn as translation
from examples import tutorials
from transformer_fast import models


@pytest.mark.thorough
@pytest.mark.parametrize("page", [by_hand, translation, tutorials])
def test_page_runs(page: Any, capsys: pytest.CaptureFixture[str]) -> None:
    page.main()
    printed = capsys.readouterr().out
    assert printed
    assert f"python {page.__name__.replace('.', '/')}.py" in page.__doc__
    if page is tutorials:
        source, copied = re.findall(r"(?:source|copied) (.*)", printed)
        assert source == copied
        assert "right 100%" in printed


def randomised(model: nn.Module) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def check(ours: nn.Module, theirs: nn.Module, load: Any, call: Callable[[Any], Tensor]) -> None:
    """Compares the loaded model's outputs with the tutorial's; the budget is the tutorial's error.

    That error is measured against float64.
    """
    load(ours.eval(), theirs.state_dict())
    with torch.no_grad():
        expected = call(theirs)
    exact = call(in_double(theirs))
    check_budget(call(ours), expected, exact)
    with torch.no_grad():
        check_budget(call(ours), expected, exact)


# The Annotated Transformer


class Annotated(by_hand.EncoderDecoder):
    def log_probabilities(self, source: Tensor, target: Tensor) -> Tensor:
        return self.generator(self(source, target, *by_hand.masks(source, target)))


def test_the_annotated_transformer() -> None:
    theirs = randomised(Annotated(13, 11, 2, 16, 24, 2))
    ours = tutorials.annotated_transformer(13, 11, N=2, d_model=16, d_ff=24, h=2)
    source, target = tokens(13, [7, 7, 7]), tokens(11, [5, 5, 5])
    source[1, 4:], source[2, 2:], target[2, 3:] = 2, 2, 2
    check(
        ours,
        theirs,
        models.load_weights,
        lambda model: model.log_probabilities(source, target)[target != 2],
    )


@pytest.mark.parametrize("method", [models.Greedy(), models.BeamSearch(3), models.Sampling(seed=1)])
def test_generation_of_a_hand_written_model(method: Any) -> None:
    """Generates the same tokens as this library's model with the same weights."""
    ours = tutorials.annotated_transformer(23, 11, N=2, d_model=16, d_ff=24, h=2)
    theirs = randomised(Annotated(23, 11, 2, 16, 24, 2))
    models.load_weights(ours, theirs.state_dict())
    varied(ours)
    theirs.generator.proj.load_state_dict(ours.output.state_dict())
    theirs.train()
    theirs.src_embed.append(nn.Dropout())
    theirs.tgt_embed.append(nn.Dropout())
    adapter = models.HandWritten(theirs, pad_token=2, start_token=0, end_token=1)
    assert set(adapter.state_dict()) == {f"model.{name}" for name in theirs.state_dict()}
    source = tokens(23, [7, 7, 7])
    source[1, 4:] = 2
    expected = ours.generate(source, method, max_new_tokens=9)
    found = adapter.generate(source, method, max_new_tokens=9)
    assert torch.equal(found.tokens, expected.tokens)
    assert len({tuple(row.tolist()) for row in found.tokens}) > 1
    prefix = torch.tensor([[0, 5]] * 3)
    assert torch.equal(
        adapter.generate(source, method, max_new_tokens=4, prefix=prefix).tokens,
        ours.generate(source, method, max_new_tokens=4, prefix=prefix).tokens,
    )
    assert theirs.training


def test_hand_written_model_with_other_methods_and_masks() -> None:
    """The model has no encode, decode and generator; its masks are (B, 1, 1, S) and (1,
    1, T, T)."""
    theirs = randomised(FourLinearsTransformer(13, 11, 16, 2, 2, 24))

    def encode(source: Tensor, mask: Tensor) -> Tensor:
        assert mask.tolist() == [[[True] * 6]] * 2
        return theirs.run_encoder(source, mask[:, None])

    def decode(memory: Tensor, mask: Tensor, target: Tensor, target_mask: Tensor) -> Tensor:
        return theirs.run_decoder(target, target_mask[:, None], memory, mask[:, None])

    adapter = models.HandWritten(
        theirs, encode=encode, decode=decode, project=theirs.fc, start_token=1, end_token=-1
    )
    source, ys = torch.randint(1, 13, (2, 6)), torch.ones(2, 1, dtype=torch.int64)
    with torch.no_grad():
        # The model itself treats token 0 as padding.
        theirs.fc.weight[0], theirs.fc.bias[0] = 0, -99
    ys = recomputed(lambda ys: theirs(source, ys)[:, -1], ys, 7)
    assert torch.equal(adapter.generate(source, max_new_tokens=7).tokens, ys[:, 1:])
    adapter.pad_token, source[1] = 3, 3
    with pytest.raises(ValueError, match="source is empty: row 1 has nothing but padding"):
        adapter.generate(source, max_new_tokens=2)
    with pytest.raises(AttributeError, match="encode"):
        models.HandWritten(theirs, start_token=1, end_token=2)


def test_attention_weights_of_hand_written_modules() -> None:
    theirs = randomised(Annotated(13, 11, 2, 16, 24, 2))
    ours = tutorials.annotated_transformer(13, 11, N=2, d_model=16, d_ff=24, h=2).eval()
    models.load_weights(ours, theirs.state_dict())
    source, target = tokens(13, [7, 7]), tokens(11, [5, 5])

    def read(module: Any, output: Tensor) -> Tensor:
        assert output.shape == (2, 5, 16)
        return module.attn

    with models.attention_weights(theirs, "decoder.layers.*.src_attn", read=read) as found:
        theirs.log_probabilities(source, target)
    with models.attention_weights(ours, "decoder.*.multihead_attn") as expected:
        ours(source, target)
    assert list(found) == ["decoder.layers.0.src_attn", "decoder.layers.1.src_attn"]
    for one, right in zip(found.values(), expected.values(), strict=True):
        torch.testing.assert_close(one, right)
        assert not one.requires_grad
    theirs.log_probabilities(source[:1], target[:1])
    assert found["decoder.layers.0.src_attn"].shape[0] == 2  # hooks are removed
    attention_weights_of_all = models.attention_weights(theirs, read=read)
    with pytest.raises(ValueError, match="names must say which"), attention_weights_of_all:
        pass


# Four Linears per attention


class FourLinears(by_hand.MultiHeadedAttention):
    """Accepts masks (B, 1, 1, S) and (B, 1, T, T)."""

    def __init__(self, d_model: int, heads: int) -> None:
        nn.Module.__init__(self)
        self.heads = heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model) for _ in range(4))

    linears = property(lambda self: (self.W_q, self.W_k, self.W_v, self.W_o))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return super().forward(q, k, v, mask[:, 0])


class FourLinearsFeedForward(nn.Module):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(x)))


class FourLinearsLayer(nn.Module):
    def __init__(self, d_model: int, heads: int, d_ff: int, crossed: bool) -> None:
        super().__init__()
        self.self_attn = FourLinears(d_model, heads)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        if crossed:
            self.cross_attn, self.norm3 = FourLinears(d_model, heads), nn.LayerNorm(d_model)
        self.feed_forward = FourLinearsFeedForward(d_model, d_ff)

    def forward(self, x: Tensor, mask: Tensor, *memory: Tensor) -> Tensor:
        x = self.norm1(x + self.self_attn(x, x, x, mask))
        if not memory:
            return self.norm2(x + self.feed_forward(x))
        x = self.norm2(x + self.cross_attn(x, memory[0], memory[0], memory[1]))
        return self.norm3(x + self.feed_forward(x))


class FourLinearsTransformer(nn.Module):
    def __init__(self, src: int, tgt: int, d_model: int, heads: int, layers: int, d_ff: int):
        super().__init__()
        self.encoder_embedding = nn.Embedding(src, d_model)
        self.decoder_embedding = nn.Embedding(tgt, d_model)
        self.positional_encoding = by_hand.PositionalEncoding(d_model)
        shape = (d_model, heads, d_ff)
        self.encoder_layers = nn.ModuleList(FourLinearsLayer(*shape, False) for _ in range(layers))
        self.decoder_layers = nn.ModuleList(FourLinearsLayer(*shape, True) for _ in range(layers))
        self.fc = nn.Linear(d_model, tgt)

    def run_encoder(self, source: Tensor, mask: Tensor) -> Tensor:
        x = self.positional_encoding(self.encoder_embedding(source))
        for layer in self.encoder_layers:
            x = layer(x, mask)
        return x

    def run_decoder(self, target: Tensor, mask: Tensor, *memory: Tensor) -> Tensor:
        y = self.positional_encoding(self.decoder_embedding(target))
        for layer in self.decoder_layers:
            y = layer(y, mask, *memory)
        return y

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        source_mask = (source != 0)[:, None, None, :]
        length = target.shape[1]
        causal = (1 - torch.triu(torch.ones(1, length, length), diagonal=1)).bool()
        target_mask = (target != 0)[:, None, None, :] & causal
        memory = self.run_encoder(source, source_mask)
        return self.fc(self.run_decoder(target, target_mask, memory, source_mask))


def test_separate_projections() -> None:
    theirs = randomised(FourLinearsTransformer(13, 11, 16, 2, 2, 24))
    ours = tutorials.separate_projections(13, 11, 16, 2, 2, 24)
    source, target = tokens(13, [7, 4, 2]), tokens(11, [5, 5, 3])
    check(ours, theirs, models.load_weights, lambda model: model(source, target)[target != 0])


# One packed projection and einsum


class Packed(nn.Module):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv_proj, self.o_proj = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv_proj(x).reshape(batch, length, self.heads, 3 * width // self.heads)
        q, k, v = qkv.chunk(3, dim=-1)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(width // self.heads)
        weights = scores.masked_fill(mask == 0, -1e9).softmax(-1)
        return self.o_proj(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))


class PackedLayer(nn.Module):
    def __init__(self, d_model: int, heads: int, d_ff: int) -> None:
        super().__init__()
        self.attention = Packed(d_model, heads)
        self.ffn = nn.Sequential(nn.Linear(d_model, d_ff), nn.GELU(), nn.Linear(d_ff, d_model))
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.ffn(x))


class PackedClassifier(nn.Module):
    def __init__(self, vocab: int, classes: int, d_model: int, heads: int, layers: int, d_ff: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab, d_model)
        self.positions = by_hand.PositionalEncoding(d_model)
        self.layers = nn.ModuleList(PackedLayer(d_model, heads, d_ff) for _ in range(layers))
        self.head = nn.Linear(d_model, classes)

    def forward(self, ids: Tensor) -> Tensor:
        real = ids != 0
        x = self.positions(self.embedding(ids) * math.sqrt(self.embedding.embedding_dim))
        for layer in self.layers:
            x = layer(x, real[:, None, None, :])
        rows = [self.head(vectors[there].mean(0)) for vectors, there in zip(x, real, strict=True)]
        return torch.stack(rows)


def test_packed_projection() -> None:
    theirs = randomised(PackedClassifier(13, 4, 16, 2, 2, 24))
    ours = tutorials.PackedClassifier(13, 4, 16, 2, 2, 24)
    ids = tokens(13, [7, 4, 2])
    check(
        ours,
        theirs,
        partial(models.load_weights, packed_by_head=True),
        lambda model: model(ids),
    )


# Names of other tutorials


class Written(NamedTuple):
    """A tutorial's names for the parts of an encoder-decoder, and of each layer."""

    encoder_layers: str
    decoder_layers: str
    attentions: str
    projections: str
    network: str
    norms: str
    #: Names of the final norms, the embeddings and the last Linear.
    others: str
    norm: str
    buffer: str

    def names(self) -> dict[str, str]:
        found = dict(zip(OTHERS, self.others.split(), strict=True))
        own, own_in_decoder, cross = self.attentions.split()
        for half, layers, attentions in (
            ("encoder", self.encoder_layers, {"self_attn": own}),
            (
                "decoder",
                self.decoder_layers,
                {"self_attn": own_in_decoder, "multihead_attn": cross},
            ),
        ):
            for i in range(2):
                layer, from_layer = f"{half}.stack.layers.{i}", f"{layers}.{i}"
                for ours, theirs in attentions.items():
                    for part, called in zip(
                        ("q", "k", "v", "out_proj"), self.projections.split(), strict=True
                    ):
                        found[f"{layer}.{ours}.{part}"] = f"{from_layer}.{theirs}.{called}"
                for kind, called in (("linear", self.network), ("norm", self.norms)):
                    for n, one in enumerate(called.split()[: len(attentions) + 1], 1):
                        found[f"{layer}.{kind}{n}"] = f"{from_layer}.{one}"
        return found


OTHERS = (
    "encoder.stack.norm", "decoder.stack.norm", "encoder.embedding.table",
    "decoder.embedding.table", "output",
)  # fmt: skip
WRITTEN = {
    "q_linear": Written(
        "encoder.layers", "decoder.layers", "attn attn_1 attn_2",
        "q_linear k_linear v_linear out", "ff.linear_1 ff.linear_2", "norm_1 norm_2 norm_3",
        "encoder.norm decoder.norm encoder.embed.embed decoder.embed.embed out",
        "alpha bias", "encoder.pe.pe",
    ),
    "wq and dense": Written(
        "encoder.enc_layers", "decoder.dec_layers", "mha mha1 mha2",
        "wq wk wv dense", "ffn.0 ffn.2", "layernorm1 layernorm2 layernorm3",
        "encoder.layernorm decoder.layernorm encoder.embedding decoder.embedding final_layer",
        "gamma beta", "decoder.mask",
    ),
    "w_q and w_o": Written(
        "encoder.layers", "decoder.layers",
        "self_attention_block self_attention_block cross_attention_block",
        "w_q w_k w_v w_o", "feed_forward_block.linear_1 feed_forward_block.linear_2",
        "residual_connections.0.norm residual_connections.1.norm residual_connections.2.norm",
        "encoder.norm decoder.norm src_embed.embedding tgt_embed.embedding projection_layer.proj",
        "alpha bias", "src_pos.pe",
    ),
    "W_query and output_projection": Written(
        "encoder.encoder_layers", "decoder.decoder_layers",
        "self_attention masked_self_attention cross_attention",
        "W_query W_key W_value output_projection", "feed_forward.linear1 feed_forward.linear2",
        "layer_norm1 layer_norm2 layer_norm3",
        "encoder.final_norm decoder.final_norm encoder.token_embedding decoder.token_embedding "
        "output_projection",
        "gamma beta", "causal_mask",
    ),
    "fc_q and fc_o": Written(
        "encoder.blocks", "decoder.blocks",
        "multi_head_attention masked_multi_head_attention encoder_attention",
        "fc_q fc_k fc_v fc_o", "positionwise_feedforward.fc_1 positionwise_feedforward.fc_2",
        "norm1 norm2 norm3",
        "encoder.layer_norm decoder.layer_norm source_embedding target_embedding decoder.fc_out",
        "weight bias", "encoder.pos_table",
    ),
    "w_qs and w_concat": Written(
        "encoder_layers", "decoder_layers", "self_mha masked_attention enc_dec_attention",
        "w_qs w_ks w_vs w_concat", "pos_ffn.w_1 pos_ffn.w_2",
        "ln1 ln2 ln3",
        "encoder.norm decoder.norm encoder.emb.tok_emb output_embeddings final_linear",
        "weight bias", "decoder.tril",
    ),
}  # fmt: skip
GPT = {
    "encoder.stack.norm": "transformer.ln_f",
    "encoder.embedding.table": "transformer.wte",
    "encoder.embedding.positions.table": "transformer.wpe.weight",
    "output": "lm_head",
} | {
    f"encoder.stack.layers.{i}.{ours}": f"transformer.h.{i}.{theirs}"
    for i in range(2)
    for ours, theirs in {
        "self_attn.in_proj": "attn.c_attn", "self_attn.out_proj": "attn.c_proj",
        "linear1": "mlp.c_fc", "linear2": "mlp.c_proj", "norm1": "ln_1", "norm2": "ln_2",
    }.items()
}  # fmt: skip


def as_written(state: dict[str, Tensor], tutorial: str) -> dict[str, Tensor]:
    """Renames this library's state_dict to the names of a tutorial."""
    written = WRITTEN[tutorial]
    names, norm = written.names(), dict(zip(("weight", "bias"), written.norm.split(), strict=True))
    found = {written.buffer: torch.ones(1)}
    for name, value in state.items():
        part, _, kind = name.rpartition(".")
        if kind.startswith("in_proj_"):
            for one, chunk in zip("qkv", value.chunk(3), strict=True):
                found[f"{names[f'{part}.{one}']}.{kind.removeprefix('in_proj_')}"] = chunk
        else:
            found[f"{names[part]}.{norm[kind] if 'norm' in part else kind}"] = value
    return found


@pytest.mark.parametrize("tutorial", WRITTEN)
def test_tutorial_state_dicts_load(tutorial: str) -> None:
    saved, model = (small(norm_first=True, norm="annotated") for _ in range(2))
    theirs = as_written(saved.state_dict(), tutorial)
    assert not set(theirs) & set(saved.state_dict())
    models.load_weights(model, theirs)
    for name, value in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_gpt_state_dicts_load() -> None:
    saved, model = (small_language_model(norm_first=True, positions="learned") for _ in range(2))
    theirs = {"transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64)}
    for name, value in saved.state_dict().items():
        ours = next(part for part in GPT if name.startswith(part))
        kind = name.removeprefix(ours)
        theirs[GPT[ours] + (f".{kind[1:]}" if kind else "")] = value
    models.load_weights(model, theirs)
    for name, value in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_shared_and_missing_weights_load() -> None:
    """One embedding table, norms with scalar weights, Linears without biases."""
    saved = small(target_vocab_size=None, norm_first=True)
    theirs = as_written(saved.state_dict(), "w_q and w_o")
    del theirs["tgt_embed.embedding.weight"], theirs["projection_layer.proj.bias"]
    del theirs["encoder.layers.1.feed_forward_block.linear_1.bias"]
    for part in "qkv":
        del theirs[f"decoder.layers.0.cross_attention_block.w_{part}.bias"]
    theirs["decoder.norm.alpha"] = torch.tensor([0.7])
    model = small(target_vocab_size=None, norm_first=True)
    models.load_weights(model, theirs)
    assert torch.equal(model.decoder.embedding.table.weight, theirs["src_embed.embedding.weight"])
    assert not model.output.bias.any()
    assert not model.encoder.stack.layers[1].linear1.bias.any()
    assert not model.decoder.stack.layers[0].multihead_attn.in_proj_bias.any()
    assert model.decoder.stack.norm.weight.tolist() == [pytest.approx(0.7)] * 16


def test_unknown_names_raise_a_short_error() -> None:
    """The message names only the unknown parts, and suggests a ``names`` argument that works."""
    saved, model = small(norm_first=True), small(norm_first=True)
    theirs = as_written(saved.state_dict(), "wq and dense")
    renamed = {
        name.replace("enc_layers", "encodr_layrs").replace("mha.wq", "mha.W_qu"): value
        for name, value in theirs.items()
    }
    with pytest.raises(ValueError, match="unknown parts: encodr_layrs, W_qu\n") as error:
        models.load_weights(model, renamed)
    first, _, line, lacking = str(error.value).splitlines()
    assert first == (
        "32 parameters were not recognised, for example encoder.encodr_layrs.0.mha.W_qu.weight, "
        "encoder.encodr_layrs.0.mha.wk.weight, encoder.encodr_layrs.0.mha.wv.weight"
    )
    assert line == r'rename them, e.g. names={r"\bencodr_layrs\b": "layers", r"\bW_qu\b": "w_q"}'
    assert "encoder.stack.layers.*.self_attn.in_proj, " in lacking
    models.load_weights(model, renamed, names=eval(line.partition("names=")[2]))
    for name, value in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_wrong_state_dicts_raise_and_change_nothing() -> None:
    model = small(norm_first=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    theirs = as_written(before, "wq and dense")
    gate = torch.zeros(16, 16)
    with pytest.raises(
        ValueError, match=r"^1 parameters.*encoder\.gate\.weight\nunknown parts: gate\n"
    ):
        models.load_weights(model, theirs | {"encoder.gate.weight": gate})
    with pytest.raises(
        ValueError, match=r"'lm_head\.weight' is the second entry that maps to 'output\."
    ):
        models.load_weights(model, theirs | {"lm_head.weight": gate})
    with pytest.raises(
        ValueError, match=r"w_q\.weight' is the second entry that maps to .*in_proj_weight"
    ):
        models.load_weights(model, theirs | {"encoder.enc_layers.0.mha.w_q.weight": gate})
    with pytest.raises(
        ValueError, match=r"embedding\.table\.weight' shares a parameter with another"
    ):
        models.load_weights(
            small(target_vocab_size=None, norm_first=True),
            as_written(small(target_vocab_size=23).state_dict(), "wq and dense"),
        )
    del theirs["final_layer.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"output\.weight"'):
        models.load_weights(model, theirs)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    theirs["logits.weight"] = before["output.weight"] + 1
    models.load_weights(model, theirs, names={r"^logits\.": "output."})
    assert torch.equal(model.output.weight, before["output.weight"] + 1)


# Decoder-only


class Head(nn.Module):
    def __init__(self, n_embd: int, head_size: int) -> None:
        super().__init__()
        self.key, self.query, self.value = (
            nn.Linear(n_embd, head_size, bias=False) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        k, q = self.key(x), self.query(x)
        scores = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        hidden = torch.tril(torch.ones(length, length)) == 0
        return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ self.value(x)


class Heads(nn.Module):
    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(n_embd, n_embd // n_head) for _ in range(n_head))
        self.projection = nn.Linear(n_embd, n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(torch.cat([head(x) for head in self.heads], dim=-1))


class Block(nn.Module):
    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.attention = Heads(n_embd, n_head)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.ReLU(), nn.Linear(4 * n_embd, n_embd)
        )
        self.norm1, self.norm2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class SmallGPT(nn.Module):
    def __init__(self, vocab: int, n_embd: int, n_head: int, n_layer: int, block_size: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocab, n_embd)
        self.position_embedding = nn.Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(*[Block(n_embd, n_head) for _ in range(n_layer)])
        self.norm, self.head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token_embedding(ids) + self.position_embedding(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def test_decoder_only() -> None:
    theirs = randomised(SmallGPT(19, 16, 2, 2, 40))
    ours = tutorials.decoder_only(19, 16, 2, 2, 40)
    ids = tokens(19, [12, 12])
    check(ours, theirs, models.load_weights, lambda model: model(ids))
    so_far = recomputed(lambda ids: theirs(ids)[:, -1], ids[:, :3], 10)
    found = ours.generate(ids[:, :3], models.Greedy(), max_new_tokens=10, end_token=-1)
    assert torch.equal(found.tokens, so_far[:, 3:])
