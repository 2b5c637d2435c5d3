"""Bad input: the type and the words of torch's own exceptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from module_checks import to_ours

from transformer_fast import nn

M, H, B, T, S = 8, 2, 2, 3, 4


def x(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def no(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bool)


Q, K = x(T, B, M), x(S, B, M)

CALLS: dict[str, tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]] = {
    "query is a list": ({}, ([1.0], K, K), {}),
    "query 1-D": ({}, (x(M), K, K), {}),
    "query 4-D": ({}, (x(T, B, M, 1), K, K), {}),
    "batched query, unbatched key": ({}, (Q, x(S, M), x(S, M)), {}),
    "unbatched query, batched key": ({}, (x(T, M), K, K), {}),
    "embedding": ({}, (x(T, B, M + 1), K, K), {}),
    "key and value lengths": ({}, (Q, K, x(S + 1, B, M)), {}),
    "key and value lengths, batch first": (
        {"batch_first": True},
        (x(B, T, M), x(B, S, M), x(B, S + 1, M)),
        {},
    ),
    "key and value lengths, kdim": ({"kdim": 5}, (Q, x(S, B, 5), x(S + 1, B, M)), {}),
    "kdim": ({"kdim": 5}, (Q, K, K), {}),
    "vdim": ({"vdim": 5}, (Q, K, K), {}),
    "key features": ({}, (Q, x(S, B, 5), x(S, B, 5)), {}),
    "shared key features": ({}, (Q, *(2 * [x(S, B, 5)])), {}),
    "batch sizes": ({}, (Q, x(S, B + 1, M), x(S, B + 1, M)), {}),
    "batch sizes, batch first": ({"batch_first": True}, (x(B, T, M), x(3, S, M), x(3, S, M)), {}),
    "integer padding": ({}, (Q, K, K), {"key_padding_mask": no(B, S).int()}),
    "integer mask": ({}, (Q, K, K), {"attn_mask": no(T, S).int()}),
    "padding is a list": ({}, (Q, K, K), {"key_padding_mask": [True]}),
    "mask is a list": ({}, (Q, K, K), {"attn_mask": [True]}),
    "padding 3-D": ({}, (Q, K, K), {"key_padding_mask": no(B, S, 1)}),
    "unbatched, padding 2-D": ({}, (x(T, M), x(S, M), x(S, M)), {"key_padding_mask": no(1, S)}),
    "mask 4-D": ({}, (Q, K, K), {"attn_mask": no(B, H, T, S)}),
    "unbatched, mask 4-D": ({}, (x(T, M), x(S, M), x(S, M)), {"attn_mask": no(1, H, T, S)}),
    "unbatched, mask 3-D": ({}, (x(T, M), x(S, M), x(S, M)), {"attn_mask": no(H, T, S + 1)}),
    "mask 2-D": ({}, (Q, K, K), {"attn_mask": no(S, T)}),
    "mask 3-D": ({}, (Q, K, K), {"attn_mask": no(B, T, S)}),
    "padding batch": ({}, (Q, K, K), {"key_padding_mask": no(B + 1, S)}),
    "padding length": ({}, (Q, K, K), {"key_padding_mask": no(B, S + 1)}),
    "padding length, zero key": (
        {"add_zero_attn": True, "add_bias_kv": True},
        (Q, K, K),
        {"key_padding_mask": no(B, S + 1)},
    ),
    "hint without mask": ({}, (Q, Q, Q), {"is_causal": True}),
    "hint without mask, weights": ({}, (Q, Q, Q), {"is_causal": True, "need_weights": True}),
    "dropout": ({"dropout": 1.5}, (Q, K, K), {"need_weights": True}),
    "missing argument": ({}, (Q, K), {}),
    "unknown argument": ({}, (Q, K, K), {"mask": None}),
}


def told(call: Callable[[], Any]) -> tuple[type, str]:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the other side says which
        call()
    return caught.type, str(caught.value)


@pytest.mark.parametrize("name", CALLS)
def test_attention(name: str) -> None:
    options, args, kwargs = CALLS[name]
    theirs = torch.nn.MultiheadAttention(M, H, **options)
    ours = to_ours(theirs)
    kwargs = {"need_weights": False, **kwargs}
    expected = told(lambda: theirs(*args, **kwargs))
    found = told(lambda: ours(*args, **kwargs))
    assert found == expected


def test_attention_dtypes() -> None:
    """The type is torch's; the words name both dtypes."""
    theirs = torch.nn.MultiheadAttention(M, H)
    ours = to_ours(theirs)
    double = Q.double()
    for args, kwargs in (
        ((double, double, double), {}),
        ((Q, Q, Q), {"attn_mask": torch.zeros(T, T, dtype=torch.float64)}),
    ):
        expected, _ = told(lambda: theirs(*args, **kwargs, need_weights=False))  # noqa: B023
        found, text = told(lambda: ours(*args, **kwargs, need_weights=False))  # noqa: B023
        assert found is expected is RuntimeError
        assert "dtype" in text


def outcome(call: Callable[[], Any]) -> Any:
    """The first result, or the type and the words of the exception."""
    try:
        result = call()
    except Exception as error:
        return type(error), str(error)
    return result[0] if isinstance(result, tuple) else result


def assert_same_outcome(theirs: Callable[[], Any], ours: Callable[[], Any]) -> None:
    expected, found = outcome(theirs), outcome(ours)
    if not isinstance(expected, torch.Tensor) or expected.is_meta:
        assert str(found) == str(expected)
    else:
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", ["in_proj_bias", "in_proj_weight"])
@pytest.mark.parametrize("other", [torch.float16, torch.float32])
def test_attention_with_a_parameter_of_another_dtype(
    name: str, other: torch.dtype, batch_first: bool
) -> None:
    theirs = torch.nn.MultiheadAttention(M, H, batch_first=batch_first, dtype=torch.float64)
    setattr(theirs, name, torch.nn.Parameter(torch.randn(getattr(theirs, name).shape).to(other)))
    ours = to_ours(theirs)
    q, k = (torch.randn(T, length, M, dtype=torch.float64) for length in (2, 5))
    if not batch_first:
        q, k = q.transpose(0, 1), k.transpose(0, 1)
    assert_same_outcome(lambda: theirs(q, q, q), lambda: ours(q, q, q))
    assert_same_outcome(lambda: theirs(q, k, k), lambda: ours(q, k, k))


@pytest.mark.filterwarnings("ignore:Converting mask without torch.bool dtype")
@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("kind", [torch.complex64, torch.int64])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mask", [None, no(T, T), x(T, T)], ids=["none", "bool", "float"])
def test_attention_of_what_is_no_real_number(
    kind: torch.dtype, training: bool, mask: torch.Tensor | None
) -> None:
    given = torch.ones(B, T, M, dtype=kind)
    dtype = kind if kind.is_complex else torch.float32
    attention = torch.nn.MultiheadAttention(M, H, batch_first=True, dtype=dtype).train(training)
    layer = torch.nn.TransformerEncoderLayer(M, H, 16, batch_first=True, dtype=dtype)
    layer.train(training)
    for theirs, call in (
        (attention, lambda m: m(given, given, given, attn_mask=mask, need_weights=False)),
        (attention, lambda m: m(given, given, given, attn_mask=mask)),
        (layer, lambda m: m(given, src_mask=mask)),
    ):
        ours = to_ours(theirs)
        with torch.set_grad_enabled(training):
            assert told(lambda: call(ours)) == told(lambda: call(theirs))  # noqa: B023


ON_META: dict[str, tuple[torch.nn.Module, int]] = {
    "attention": (torch.nn.MultiheadAttention(M, H), 3),
    "attention, batch first": (torch.nn.MultiheadAttention(M, H, batch_first=True), 3),
    "attention without biases": (torch.nn.MultiheadAttention(M, H, bias=False), 3),
    "linear": (torch.nn.Linear(M, 4), 1),
    "linear without bias": (torch.nn.Linear(M, 4, bias=False), 1),
    "layer norm": (torch.nn.LayerNorm(M), 1),
    "layer norm without bias": (torch.nn.LayerNorm(M, bias=False), 1),
    "encoder layer": (torch.nn.TransformerEncoderLayer(M, H, 16), 1),
    "encoder layer, norm first": (torch.nn.TransformerEncoderLayer(M, H, 16, norm_first=True), 1),
    "decoder layer": (torch.nn.TransformerDecoderLayer(M, H, 16), 2),
}


@pytest.mark.parametrize("name", ON_META)
@pytest.mark.parametrize("training", [True, False])
def test_an_input_on_meta_and_weights_elsewhere(name: str, training: bool) -> None:
    theirs, inputs = ON_META[name]
    ours = to_ours(theirs.train(training))
    given = [torch.empty(T, B, M, device="meta")] * inputs
    with torch.set_grad_enabled(training):
        assert_same_outcome(lambda: theirs(*given), lambda: ours(*given))


@pytest.mark.usefixtures("small_calls")
def test_weights_on_meta() -> None:
    for theirs, given in (
        (torch.nn.LayerNorm(512, device="meta"), [torch.randn(1000, 512)]),
        (
            torch.nn.MultiheadAttention(M, H, batch_first=True, device="meta").eval(),
            [x(B, T, M)] * 3,
        ),
    ):
        with torch.no_grad():
            ours = to_ours(theirs)
            assert told(lambda: ours(*given)) == told(lambda: theirs(*given))  # noqa: B023


CONSTRUCTORS = {
    "MultiheadAttention": [(0, 2), (8, 0), (8, 3), (-8, 2), (8,)],
    "LayerNorm": [(), (-1,), ("8",), (8, 1e-5, True, True, "nowhere")],
    "Linear": [(), (8,), (8, -1), ("8", 8), (8, 8, True, "nowhere")],
    "TransformerEncoderLayer": [(8,), (8, 3), (8, 2, 16, 2.0), (8, 2, 16, 0.1, "tanh")],
    "TransformerDecoderLayer": [(8,), (8, 3), (8, 2, 16, -1.0), (8, 2, 16, 0.1, "tanh")],
    "TransformerEncoder": [(), (torch.nn.Identity(), "2")],
    "TransformerDecoder": [(), (torch.nn.Identity(), "2")],
    "Transformer": [(8, 3), (8, 2, 1, 1, 16, 0.1, "tanh")],
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_constructors(name: str) -> None:
    for args in CONSTRUCTORS[name]:
        expected = told(lambda: getattr(torch.nn, name)(*args))  # noqa: B023
        found = told(lambda: getattr(nn, name)(*args))  # noqa: B023
        assert found == expected


LAYER_NORM = {
    "width": ((8,), x(2, 7)),
    "rank": (((2, 8),), x(8)),
    "shape": (((2, 8),), x(3, 8)),
    "list": ((8,), [1.0]),
}


@pytest.mark.parametrize("name", LAYER_NORM)
def test_layer_norm(name: str) -> None:
    args, given = LAYER_NORM[name]
    theirs = torch.nn.LayerNorm(*args)
    assert told(lambda: to_ours(theirs)(given)) == told(lambda: theirs(given))


@pytest.mark.parametrize(
    "given", [x(2, 7), torch.randn(()), [1.0], x(2, 8).double(), x(2, 8).long()]
)
def test_linear(given: object) -> None:
    theirs = torch.nn.Linear(8, 4)
    assert told(lambda: to_ours(theirs)(given)) == told(lambda: theirs(given))


SOURCE, TARGET = x(S, B, M), x(T, B, M)
MODELS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "batches": ("model", (SOURCE, x(T, B + 1, M)), {}),
    "features": ("model", (SOURCE, x(T, B, M + 1)), {}),
    "integer source mask": ("model", (SOURCE, TARGET), {"src_mask": no(S, S).int()}),
    "integer target mask": (
        "model",
        (SOURCE, TARGET),
        # Left to find out by itself, torch stumbles over the integers before it can name them.
        {"tgt_mask": no(T, T).int(), "tgt_is_causal": False},
    ),
    "integer padding": ("model", (SOURCE, TARGET), {"src_key_padding_mask": no(B, S).int()}),
    "source mask": ("model", (SOURCE, TARGET), {"src_mask": no(S, T)}),
    "memory mask": ("model", (SOURCE, TARGET), {"memory_mask": no(S, T)}),
    "hint": ("model", (SOURCE, TARGET), {"tgt_is_causal": True}),
    "encoder: integer mask": ("encoder", (SOURCE,), {"mask": no(S, S).int()}),
    "encoder: hint": ("encoder", (SOURCE,), {"is_causal": True}),
    "layer: integer mask": ("encoder.layers.0", (SOURCE,), {"src_mask": no(S, S).int()}),
    "layer: integer padding": (
        "encoder.layers.0",
        (SOURCE,),
        {"src_key_padding_mask": no(B, S).int()},
    ),
    "layer: 4-D": ("encoder.layers.0", (x(S, B, M, 1),), {}),
    "decoder layer: memory": ("decoder.layers.0", (TARGET, x(S, B, M + 1)), {}),
    "decoder layer: no memory": ("decoder.layers.0", (TARGET,), {}),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    path, args, kwargs = MODELS[name]
    model = torch.nn.Transformer(M, H, 1, 1, 16)
    theirs, ours = (
        m.get_submodule(path if path != "model" else "") for m in (model, to_ours(model))
    )
    assert told(lambda: ours(*args, **kwargs)) == told(lambda: theirs(*args, **kwargs))
