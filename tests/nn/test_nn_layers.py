"""Transformer layers and stacks: results, options, dropout and errors equal those of torch.nn."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from harness import spied
from module_checks import OURS, assert_close, assert_same_numbers, fast_path, to_ours
from torch import Tensor

from transformer_fast import dispatch, functional, nn
from transformer_fast.nn import masks, multihead_attention
from transformer_fast.ops.arguments import LayerStack
from transformer_fast.recipe import Kind

B, T, S, M, H, HIDDEN = 2, 5, 4, 8, 2, 12
LAYERS = ("TransformerEncoderLayer", "TransformerDecoderLayer")


def pair(name: str, **options: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    options = {"dropout": 0.0, "batch_first": True, **options}
    theirs = getattr(torch.nn, name)(M, H, HIDDEN, **options)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    ours = getattr(nn, name)(M, H, HIDDEN, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(name: str) -> tuple[Tensor, ...]:
    x = torch.randn(B, T, M)
    return (x,) if name == "TransformerEncoderLayer" else (x, torch.randn(B, S, M))


def mask_names(name: str) -> tuple[str, str]:
    prefix = "src" if name == "TransformerEncoderLayer" else "tgt"
    return f"{prefix}_mask", f"{prefix}_key_padding_mask"


class Square(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


ACTIVATIONS: dict[str, tuple[Any, str | None]] = {
    "'relu'": ("relu", "relu"),
    "'gelu'": ("gelu", "gelu"),
    "F.relu": (F.relu, "relu"),
    "torch.relu": (torch.relu, "relu"),
    "F.gelu": (F.gelu, "gelu"),
    "F.silu": (F.silu, "silu"),
    "ReLU": (torch.nn.ReLU(), "relu"),
    "GELU": (torch.nn.GELU(), "gelu"),
    "GELU tanh": (torch.nn.GELU(approximate="tanh"), "gelu_tanh"),
    "partial": (functools.partial(F.gelu, approximate="tanh"), "gelu_tanh"),
    "SiLU": (torch.nn.SiLU(), "silu"),
    "torch.tanh": (torch.tanh, None),
    "lambda": (lambda x: x.clamp(-1, 2), None),
    "other partial": (functools.partial(F.leaky_relu, negative_slope=0.3), None),
    "PReLU": (torch.nn.PReLU(), None),
    "Square": (Square(), None),
}


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Records the activations that the fused feed-forward kernels are called with.

    These kernels run the network alone, or together with its norm and residual sum.
    """
    calls = spied(monkeypatch, functional, "feed_forward", lambda *_, activation, **__: activation)

    def watch(kernel: dispatch.Kernel) -> dispatch.Kernel:
        def run(stack: LayerStack, *args: Any) -> Tensor:
            calls.extend(stack.activation for kind in stack.kinds if kind == Kind.FEED_FORWARD)
            return kernel.run(stack, *args)

        return replace(kernel, function=run)

    kernels = [*dispatch.kernels("encoder_layer"), *dispatch.kernels("decoder_layer")]
    for kernel in kernels:
        dispatch.register(watch(kernel))
    yield calls
    for kernel in kernels:
        dispatch.register(kernel)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, name: str, norm_first: bool, fused: list[Any]) -> None:
    given, known_as = ACTIVATIONS[activation]
    theirs, ours = pair(name, activation=given, norm_first=norm_first)
    assert_close(ours, theirs, *inputs(name))
    assert set(fused) == ({known_as} if known_as else set())


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_hooks_on_inner_modules_fire(name: str, norm_first: bool) -> None:
    _, ours = pair(name, norm_first=norm_first)
    given = inputs(name)
    inner = [key for key, _ in ours.named_modules() if key and key not in _WITHIN_ATTENTION]
    assert len(inner) >= 8
    with torch.no_grad():
        plain = ours(*given)
    for key in inner:
        module = ours.get_submodule(key)
        for register in ("register_forward_hook", "register_forward_pre_hook"):
            fired: list[str] = []
            handle = getattr(module, register)(lambda *args: fired.append("x"))  # noqa: B023
            with torch.no_grad():
                torch.testing.assert_close(ours(*given), plain)
            assert fired == ["x"], f"{register} of {key}"
            handle.remove()
        fired = []
        handle = module.register_full_backward_hook(lambda *args: fired.append("x"))  # noqa: B023
        ours(*(x.requires_grad_() for x in given)).sum().backward()
        assert fired == ["x"], f"backward hook of {key}"
        handle.remove()


_WITHIN_ATTENTION = ("self_attn.out_proj", "multihead_attn.out_proj")


def test_global_hooks_run_for_every_module() -> None:
    _, ours = pair(LAYERS[0])
    seen: list[torch.nn.Module] = []
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: seen.append(module)
    )
    try:
        ours(*inputs(LAYERS[0]))
    finally:
        handle.remove()
    assert {*seen} >= {ours.linear1, ours.dropout, ours.linear2, ours.norm1, ours.dropout2}


@pytest.mark.parametrize(
    ("name", "block"),
    [
        (name, block)
        for name in LAYERS
        for block in ("_sa_block", "_mha_block", "_ff_block")
        if hasattr(getattr(torch.nn, name), block)
    ],
)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("on_instance", [True, False])
def test_overridden_blocks_run(name: str, block: str, norm_first: bool, on_instance: bool) -> None:
    theirs, ours = pair(name, norm_first=norm_first)

    def wrapped(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: right(*args, **kwargs) * 3 + 1

    for layer in (theirs, ours):
        if on_instance:
            setattr(layer, block, wrapped(getattr(layer, block)))
        else:
            changed = {block: wrapped(getattr(type(layer), block))}
            layer.__class__ = type("Own", (type(layer),), changed)
    attn, padding = mask_names(name)
    hidden = torch.zeros(B, T, dtype=torch.bool)
    hidden[0, 2:] = True
    kwargs = {attn: torch.ones(T, T, dtype=torch.bool).triu(1), padding: hidden}
    theirs.train()  # PyTorch's inference path ignores overridden blocks
    given = inputs(name)
    for training in (True, False):
        ours.train(training)
        with torch.set_grad_enabled(training):
            torch.testing.assert_close(ours(*given, **kwargs), theirs(*given, **kwargs))


CAUSAL = nn.Transformer.generate_square_subsequent_mask


def models(**options: Any) -> tuple[torch.nn.Transformer, nn.Transformer]:
    """Returns a model of torch.nn and one of this library, constructed with the same seed."""
    options = {"batch_first": True, **options}
    made = []
    for namespace in (torch.nn, nn):
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
            made.append(namespace.Transformer(M, H, 2, 2, HIDDEN, 0.0, **options))
    theirs, ours = made
    expected, found = theirs.state_dict(), ours.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], expected[key]) for key in found)
    return theirs, ours


def padding(length: int) -> Tensor:
    hidden = torch.zeros(B, length, dtype=torch.bool)
    hidden[1, 2:] = True
    return hidden


#: Additive masks, which PyTorch's inference path converts to bool: (module, inputs, masks).
ADDED: dict[str, tuple[Callable[[], Any], tuple[Tensor, ...], dict[str, Tensor]]] = {
    "encoder layer": (
        lambda: pair(LAYERS[0]), inputs(LAYERS[0]), {"src_mask": torch.randn(T, T)}
    ),
    "decoder layer": (
        lambda: pair(LAYERS[1]), inputs(LAYERS[1]), {"tgt_mask": torch.randn(T, T)}
    ),
    "Transformer": (
        models, (torch.randn(B, S, M), torch.randn(B, T, M)),
        {"src_mask": torch.randn(S, S), "memory_mask": torch.randn(T, S)},
    ),
    "Transformer, padding": (
        lambda: models(norm_first=True), (torch.randn(B, S, M), torch.randn(B, T, M)),
        {
            "tgt_mask": CAUSAL(T), "tgt_key_padding_mask": padding(T).float(),
            "src_key_padding_mask": padding(S), "memory_key_padding_mask": padding(S),
        },
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*float mask that holds only 0 and 1")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ADDED)
def test_additive_masks(name: str, training: bool) -> None:
    """Not covered by PyTorch's samples (test_nn_samples.py), which have bool masks only."""
    make, given, masks_of = ADDED[name]
    theirs, ours = (module.train(training) for module in make())
    with fast_path(False):
        assert_close(ours, theirs, *given, **masks_of)
        assert_same_numbers(ours, theirs, given, masks_of, grad=True)


def test_no_warning_about_nested_tensors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = nn.Transformer(M, H, 1, 1, HIDDEN)
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(M, 1), 1)
    assert encoder.enable_nested_tensor
    assert not encoder.use_nested_tensor
    assert model.encoder.layers[0].self_attn.batch_first is False


def test_custom_encoder_and_decoder_are_kept() -> None:
    encoder, decoder = torch.nn.Identity(), torch.nn.Identity()
    model = nn.Transformer(M, H, custom_encoder=encoder, custom_decoder=decoder)
    assert model.encoder is encoder
    assert model.decoder is decoder
    half = nn.Transformer(M, H, 1, 1, custom_encoder=encoder)
    assert type(half.decoder) is nn.TransformerDecoder


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_skips_padding_keeps_results_at_real_tokens(batch_first: bool, norm_first: bool) -> None:
    torch.manual_seed(3)
    ours = nn.Transformer(
        M, H, 2, 2, HIDDEN, 0.0, norm_first=norm_first, batch_first=batch_first
    ).eval()
    src, tgt = torch.randn(B, S, M), torch.randn(B, T, M)
    hidden = torch.zeros(B, S, dtype=torch.bool)
    hidden[0, 1], hidden[0, -2:], hidden[1, 0] = True, True, True  # padding not only at the end
    late = torch.zeros(B, T, dtype=torch.bool)
    late[-1, -1] = True
    causal = torch.ones(T, T).triu(1).bool()
    if not batch_first:
        src, tgt = src.transpose(0, 1), tgt.transpose(0, 1)
    masks = {
        "tgt_mask": causal,
        "src_key_padding_mask": hidden,
        "memory_key_padding_mask": hidden,
        "tgt_key_padding_mask": late,
        "tgt_is_causal": True,
    }
    outputs = []
    for skips in (False, True):
        ours.encoder.skips_padding = ours.decoder.skips_padding = skips
        with torch.no_grad():
            output = ours(src, tgt, **masks)
        outputs.append(output if batch_first else output.transpose(0, 1))
    torch.testing.assert_close(outputs[1][~late], outputs[0][~late])
    # Skipped rows are zero, and the decoder's norm returns its bias for them, which is 0.
    assert not outputs[1][late].any()
    assert outputs[0][late].any()


@pytest.mark.parametrize("suffix", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_skips_padding_keeps_gradients_in_training(
    batch_first: bool, norm_first: bool, suffix: bool
) -> None:
    torch.manual_seed(4)
    layer = nn.TransformerEncoderLayer(
        M, H, HIDDEN, 0.0, batch_first=batch_first, norm_first=norm_first
    )
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(M)).train()
    hidden = torch.zeros(B, S, dtype=torch.bool)
    hidden[0, -2:] = True
    if not suffix:
        hidden[1, 0] = True
    src = torch.randn(B, S, M)
    found = []
    for skips in (False, True):
        encoder.skips_padding = skips
        encoder.zero_grad()
        x = (src if batch_first else src.transpose(0, 1)).clone().requires_grad_()
        output = encoder(x, src_key_padding_mask=hidden)
        output = output if batch_first else output.transpose(0, 1)
        output[~hidden].square().sum().backward()
        found.append([output[~hidden].detach(), x.grad, *(p.grad for p in encoder.parameters())])
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


#: name: (change of a layer, whether training still computes real tokens only)
SKIPPING: dict[str, tuple[Any, bool]] = {
    "nothing": (lambda layer: None, True),
    "no dropout": (lambda layer: setattr(layer, "dropout1", torch.nn.Identity()), True),
    "hook": (lambda layer: layer.register_forward_hook(lambda *_: None), False),
    "hooked part": (
        lambda layer: layer.self_attn.out_proj.register_forward_hook(lambda *_: None), False,
    ),
    "other norm": (lambda layer: setattr(layer, "norm2", torch.nn.Identity()), False),
    "method": (lambda layer: setattr(layer, "_ff_block", layer._ff_block), False),
    "own keys": (
        lambda layer: setattr(layer, "self_attn", nn.MultiheadAttention(
            M, H, add_zero_attn=True, batch_first=True
        )),
        False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SKIPPING)
def test_training_skips_padding_unless_submodules_are_changed(case: str) -> None:
    change, skips = SKIPPING[case]
    seen: list[Any] = []

    def activation(x: Tensor) -> Tensor:
        seen.append(x.shape)
        return x.relu()

    layer = nn.TransformerEncoderLayer(M, H, HIDDEN, activation=activation, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1)
    change(encoder.layers[0])
    encoder.skips_padding = True
    hidden = torch.zeros(B, S, dtype=torch.bool)
    hidden[0, -2:] = True
    encoder(torch.randn(B, S, M), src_key_padding_mask=hidden)
    assert seen == [(B * S - 2, HIDDEN) if skips else (B, S, HIDDEN)]


def test_without_skips_padding_padded_rows_are_computed() -> None:
    """With skips_padding=False, inference returns at padded positions what training does."""
    theirs = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(M, H, HIDDEN, 0.0, batch_first=True), 2
    )
    ours = to_ours(theirs)
    ours.skips_padding = False
    x, hidden = torch.randn(B, S, M), padding(S)
    trained = theirs.train()(x, src_key_padding_mask=hidden)
    theirs.eval()
    for training in (True, False):
        ours.train(training)
        with torch.set_grad_enabled(training):
            torch.testing.assert_close(ours(x, src_key_padding_mask=hidden), trained)


class Custom(torch.nn.Module):
    """A layer that has only the call signature in common with PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = torch.nn.Identity()
        self.self_attn.batch_first = True
        self.seen: list[dict[str, Any]] = []

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.seen.append(kwargs)
        return x + 1


def test_custom_layers_receive_pytorchs_arguments() -> None:
    x, hidden = torch.randn(B, S, M), padding(S)
    mask = CAUSAL(S).isinf()
    seen = []
    for namespace in (torch.nn, nn):
        encoder = namespace.TransformerEncoder(Custom(), 2, enable_nested_tensor=False)
        decoder = namespace.TransformerDecoder(Custom(), 2)
        encoder(x, mask, hidden)
        decoder(x, x, tgt_mask=mask, tgt_key_padding_mask=hidden)
        seen.append([*encoder.layers[1].seen, *decoder.layers[1].seen])
    theirs, ours = seen
    assert len(theirs) == len(ours) == 2
    for expected, found in zip(theirs, ours, strict=True):
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            if isinstance(value, Tensor):
                assert value.dtype == found[key].dtype
                assert torch.equal(value, found[key])
            else:
                assert value is found[key]


def test_mismatched_masks_warn_once() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(M, H, HIDDEN), 3)
    x = torch.randn(S, B, M)
    with pytest.warns(UserWarning, match="mismatched src_key_padding_mask and mask ") as warned:
        encoder(x, CAUSAL(S), padding(S))
    assert len(warned) == 1


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 17])
def test_causal_mask_detection(dtype: torch.dtype, size: int) -> None:
    hidden = torch.ones(size, size).triu(1).bool()
    causal = hidden if dtype == torch.bool else CAUSAL(size, dtype=dtype)
    theirs = torch.nn.modules.transformer._detect_is_causal_mask
    candidates = [causal, causal.T.contiguous().T, causal[None], causal.expand(2, size, size)]
    for row in range(size):
        for column in range(size):
            changed = causal.clone()
            changed[row, column] = not changed[row, column]
            candidates.append(changed)
    for mask in candidates:
        assert masks.is_causal_mask(mask, None, size) is theirs(mask, None, size)
        assert masks.is_causal_mask(mask, None, size + 1) is theirs(mask, None, size + 1)
        assert masks.is_causal_mask(mask, True, size) is True
        assert masks.is_causal_mask(mask, False, size) is False
    assert masks.is_causal_mask(causal, None, size) is True
    assert masks.is_causal_mask(None, None, size) is False
    assert masks.is_causal_mask(causal.to("meta"), None, size) is False


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_inputs_run_in_pytorch() -> None:
    layer = nn.TransformerEncoderLayer(M, H, HIDDEN, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x = torch.nested.nested_tensor([torch.randn(3, M), torch.randn(2, M)])
    with torch.no_grad():
        output = encoder(x)
        torch.testing.assert_close(output[0], encoder(x[0]))


@pytest.mark.parametrize("cls", OURS, ids=lambda cls: cls.__name__)
def test_signatures(cls: type) -> None:
    for method in ("__init__", "forward"):
        ours, theirs = (
            [
                (p.name, p.default, p.kind)
                for p in inspect.signature(getattr(space, method)).parameters.values()
            ]
            for space in (OURS[cls], cls)
        )
        assert ours == theirs


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize("late", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_padded_positions_equal_pytorchs(training, fast, nested, late):
    """PyTorch returns zeros in inference with nested tensors, and computed values otherwise."""
    make = {"num_layers": 2, "enable_nested_tensor": nested, "mask_check": True}
    theirs, ours = (
        names.TransformerEncoder(
            names.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True), **make
        )
        for names in (torch.nn, nn)
    )
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 7, 32)
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 4:], padding[2, 2:] = True, True
    if not late:
        padding = padding.flip(1)
    with torch.no_grad(), fast_path(fast):
        one, other = (e.train(training)(x, src_key_padding_mask=padding) for e in (ours, theirs))
    assert bool((other[padding] == 0).all()) is (fast and nested and late and not training)
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.fixture
def probabilities(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """Records each op that applies dropout, and its probability, in order."""
    calls: list[tuple[str, float]] = []
    spy = functools.partial(spied, monkeypatch, into=calls)
    spy(functional, "feed_forward", lambda *_, dropout_p, **__: ("feed_forward", dropout_p))
    spy(functional, "add_layer_norm", lambda *_, dropout_p, **__: ("add_layer_norm", dropout_p))
    spy(multihead_attention, "attend", lambda _, given: ("attend", given.dropout_p))
    return calls


# Dropout has PyTorch's probabilities and positions in the layer, but another random pattern.


def test_training_applies_every_dropout(probabilities: list[tuple[str, float]]) -> None:
    layer = nn.TransformerDecoderLayer(M, H, HIDDEN, 0.1, batch_first=True)
    layer.dropout.p, layer.dropout1.p, layer.dropout2.p, layer.dropout3.p = 0.2, 0.3, 0.4, 0.5
    x, memory = torch.randn(2, 3, M), torch.randn(2, 4, M)
    layer(x, memory)
    assert probabilities == [
        ("attend", 0.1),
        ("add_layer_norm", 0.3),
        ("attend", 0.1),
        ("add_layer_norm", 0.4),
        ("feed_forward", 0.2),
        ("add_layer_norm", 0.5),
    ]
    probabilities.clear()
    layer.eval()
    layer(x, memory)
    assert {p for _, p in probabilities} == {0.0}


def test_each_dropout_module_has_its_own_training_flag(
    probabilities: list[tuple[str, float]],
) -> None:
    """Monte Carlo dropout sets the training flags of dropout modules only."""
    layer = nn.TransformerEncoderLayer(M, H, HIDDEN, 0.5, batch_first=True).eval()
    layer.dropout.train()
    x = torch.randn(2, 3, M)
    with torch.no_grad():
        assert not torch.equal(layer(x), layer(x))
    assert probabilities[-3:] == [("add_layer_norm", 0.0), ("feed_forward", 0.5),
                                  ("add_layer_norm", 0.0)]  # fmt: skip


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("where", ["dropout", "dropout1", "dropout2", "self_attn"])
def test_dropout_has_pytorchs_distribution(where: str, norm_first: bool) -> None:
    """Compares mean and variance of the output over many draws, for one dropout at a time."""
    torch.manual_seed(0)
    draws = 4000
    x = torch.randn(1, 3, M).expand(draws, -1, -1)
    moments = []
    for layer in pair(LAYERS[0], norm_first=norm_first):
        module = getattr(layer, where)
        setattr(module, "dropout" if where == "self_attn" else "p", 0.4)
        with torch.no_grad():
            output: Tensor = layer(x)
        moments.append((output.mean(0), output.var(0)))
    (mean, variance), (our_mean, our_variance) = moments
    assert (variance > 0).any()
    # 24 means: one of them is five standard deviations off in one of 70,000 runs.
    deviation = ((variance + our_variance) / draws).sqrt()
    assert ((our_mean - mean).abs() <= 5 * deviation + 1e-6).all()
    # The relative deviation of a variance of 4000 draws is about 2%.
    torch.testing.assert_close(our_variance, variance, rtol=0.2, atol=1e-6)


def test_dropout_with_p_1_drops_everything() -> None:
    layer = nn.TransformerEncoderLayer(M, H, HIDDEN, 1.0, norm_first=True)
    x = torch.randn(3, 2, M)
    torch.testing.assert_close(layer(x), x)
