"""`transformer_fast.nn` as a drop-in for torch.nn: names, module state, types and messages of
errors."""

from __future__ import annotations

import copy
import functools
import importlib
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Functions
from module_cases import CASES
from module_checks import OURS, error_of, to_ours

import transformer_fast
from transformer_fast import functional, nn

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")


@pytest.mark.parametrize("name", CASES)
def test_same_seed_gives_the_same_parameters_and_attributes(name: str) -> None:
    torch.manual_seed(0)
    theirs = CASES[name].make(torch.nn)
    torch.manual_seed(0)
    ours = CASES[name].make(nn)
    assert type(ours) is OURS[type(theirs)]
    expected, found = theirs.state_dict(), ours.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert [n for n, _ in ours.named_modules()] == [n for n, _ in theirs.named_modules()]
    assert repr(ours) == repr(theirs)
    changed = {"use_nested_tensor"}  # an option without effect in this library
    assert ours.__dict__.keys() == theirs.__dict__.keys()
    for key, value in theirs.__dict__.items():
        if not key.startswith("_") and key not in changed:
            assert ours.__dict__[key] == value, key


@pytest.mark.parametrize("name", CASES)
def test_state_dicts_load_in_both_directions(name: str) -> None:
    theirs, ours = CASES[name].make(torch.nn), CASES[name].make(nn)
    for source, target in ((theirs, ours), (ours, theirs)):
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.normal_()
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        file.seek(0)
        target.load_state_dict(torch.load(file, weights_only=True), strict=True)
        for one, other in zip(source.parameters(), target.parameters(), strict=True):
            assert torch.equal(one, other)
    if theirs.state_dict():
        with pytest.raises(RuntimeError, match="Missing key"):
            ours.load_state_dict({}, strict=True)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copied_and_pickled_modules_keep_their_state(name: str, how: str) -> None:
    ours = CASES[name].make(nn).eval()
    ours.note = "kept"  # type: ignore[assignment]
    if how == "deepcopy":
        again = copy.deepcopy(ours)
    elif how == "pickle":
        again = pickle.loads(pickle.dumps(ours))
    else:
        file = io.BytesIO()
        torch.save(ours, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
    assert [type(m) for m in again.modules()] == [type(m) for m in ours.modules()]
    assert again.note == "kept"
    assert not again.training
    for one, other in zip(ours.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one is not other


@pytest.mark.parametrize("how", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrised_modules_can_be_copied(how):
    linear = getattr(torch.nn.utils.parametrizations, how)(nn.Linear(8, 8))
    copied = copy.deepcopy(linear)
    x = torch.randn(3, 8)
    assert type(copied).__name__ == "ParametrizedLinear"
    assert torch.equal(copied.eval()(x), linear.eval()(x))
    with torch.no_grad():
        next(copied.parameters()).add_(1.0)
    assert not torch.equal(next(copied.parameters()), next(linear.parameters()))
    averaged = torch.optim.swa_utils.AveragedModel(torch.nn.Sequential(linear))
    assert torch.equal(averaged(x), linear(x))


def test_stacks_copy_parametrised_layers():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    torch.nn.utils.parametrizations.weight_norm(layer.linear1)
    torch.nn.utils.parametrizations.weight_norm(layer.self_attn.out_proj)
    encoder = nn.TransformerEncoder(layer, 2)
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(encoder(x), layer(layer(x)))
    assert encoder.layers[0].linear1 is not encoder.layers[1].linear1


def test_every_torch_nn_name_exists() -> None:
    names = [name for name in dir(torch.nn) if not name.startswith("_")]
    assert len(names) > 150
    replaced = {cls.__name__ for cls in OURS} | {"functional"}
    for name in names:
        same = getattr(nn, name) is getattr(torch.nn, name)
        assert same is (name not in replaced), name
    assert {*names} <= {*dir(nn)}


def test_classes_are_subclasses_of_torch_nn() -> None:
    assert len(OURS) >= 11
    for theirs, ours in OURS.items():
        assert issubclass(ours, theirs)
        assert ours.__name__ == theirs.__name__
        assert ours.__module__.startswith("transformer_fast.nn.")
    assert isinstance(nn.LayerNorm(3), torch.nn.LayerNorm)
    assert nn.functional is functional


def test_import_forms() -> None:
    scope: dict[str, object] = {}
    exec("from transformer_fast.nn import *", scope)
    assert scope["Linear"] is nn.Linear
    assert scope["Bilinear"] is torch.nn.Bilinear
    exec("import transformer_fast.nn.functional as F", scope)
    assert scope["F"] is functional
    with pytest.raises(ImportError, match="cannot import name 'Transfomer'"):
        exec("from transformer_fast.nn import Transfomer", scope)


@pytest.mark.parametrize(
    "name",
    ["init", "utils", "utils.rnn", "utils.parametrizations", "parallel", "modules.linear",
     "attention", "attention.flex_attention", "parameter"],
)  # fmt: skip
def test_torch_nn_submodules_are_the_same_objects(name: str) -> None:
    second = importlib.import_module(f"transformer_fast.nn.{name}")
    first = importlib.import_module(f"torch.nn.{name}")
    assert second is first
    assert first.__name__ == f"torch.nn.{name}"
    assert first.__spec__ is not None
    assert first.__spec__.name == f"torch.nn.{name}"
    assert first.__spec__.loader is first.__loader__


def test_unknown_names_raise() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("transformer_fast.nn.no_such_module")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("transformer_fast.nn.utils.no_such_module")


def test_torch_nn_is_unchanged_by_the_import() -> None:
    assert torch.nn.LayerNorm.__module__ == "torch.nn.modules.normalization"
    assert torch.nn.functional is not functional
    assert type(torch.nn.TransformerEncoderLayer(4, 1).norm1) is torch.nn.LayerNorm


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


def test_mixed_attention_dtypes_raise() -> None:
    """The exception type is PyTorch's; the message names both dtypes."""
    theirs = torch.nn.MultiheadAttention(M, H)
    ours = to_ours(theirs)
    double = Q.double()
    for args, kwargs in (
        ((double, double, double), {}),
        ((Q, Q, Q), {"attn_mask": torch.zeros(T, T, dtype=torch.float64)}),
    ):
        expected, _ = error_of(lambda: theirs(*args, **kwargs, need_weights=False))  # noqa: B023
        found, text = error_of(lambda: ours(*args, **kwargs, need_weights=False))  # noqa: B023
        assert found is expected is RuntimeError
        assert "dtype" in text


def outcome(call: Callable[[], Any]) -> Any:
    """Returns the first result, or the type and the message of the exception."""
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
def test_attention_of_integer_and_complex_inputs(
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
            assert error_of(lambda: call(ours)) == error_of(lambda: call(theirs))  # noqa: B023


ON_META = (
    *("Linear", "Linear, no bias", "LayerNorm", "LayerNorm, two dimensions", "attention"),
    *("attention, length first", "attention, no bias", "encoder layer, length first"),
    *("decoder layer", "decoder layer, pre-norm"),
)


@pytest.mark.parametrize("name", ON_META)
@pytest.mark.parametrize("training", [True, False])
def test_meta_input_with_weights_on_another_device(name: str, training: bool) -> None:
    theirs = CASES[name].make(torch.nn).train(training)
    ours = to_ours(theirs)
    given = [x.to("meta") for x in CASES[name].inputs()]
    with torch.set_grad_enabled(training):
        assert_same_outcome(lambda: theirs(*given), lambda: ours(*given))


@pytest.mark.usefixtures("small_calls")
def test_meta_weights_with_inputs_on_another_device() -> None:
    for theirs, given in (
        (torch.nn.LayerNorm(512, device="meta"), [torch.randn(1000, 512)]),
        (
            torch.nn.MultiheadAttention(M, H, batch_first=True, device="meta").eval(),
            [x(B, T, M)] * 3,
        ),
    ):
        with torch.no_grad():
            ours = to_ours(theirs)
            assert error_of(lambda: ours(*given)) == error_of(lambda: theirs(*given))  # noqa: B023


#: Of the classes with constructors of their own.
CONSTRUCTORS = {
    "TransformerEncoder": [(), (torch.nn.Identity(), "2")],
    "Transformer": [(8, 3), (8, 2, 1, 1, 16, 0.1, "tanh")],
}


@pytest.mark.parametrize(
    ("name", "args"), [(n, a) for n, all_ in CONSTRUCTORS.items() for a in all_]
)
def test_wrong_constructor_arguments_raise_pytorchs_errors(
    name: str, args: tuple[Any, ...]
) -> None:
    assert error_of(lambda: getattr(nn, name)(*args)) == error_of(
        lambda: getattr(torch.nn, name)(*args)
    )


SOURCE, TARGET = x(S, B, M), x(T, B, M)
#: Wrong calls of torch.nn.Transformer: (submodule, arguments, keyword arguments).
MODELS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "batches": ("", (SOURCE, x(T, B + 1, M)), {}),
    "features": ("", (SOURCE, x(T, B, M + 1)), {}),
    "integer source mask": ("", (SOURCE, TARGET), {"src_mask": no(S, S).int()}),
    # With tgt_is_causal=None, PyTorch fails on integers before it names the dtype.
    "integer target mask": (
        "", (SOURCE, TARGET), {"tgt_mask": no(T, T).int(), "tgt_is_causal": False},
    ),
    "integer padding": ("", (SOURCE, TARGET), {"src_key_padding_mask": no(B, S).int()}),
    "source mask": ("", (SOURCE, TARGET), {"src_mask": no(S, T)}),
    "memory mask": ("", (SOURCE, TARGET), {"memory_mask": no(S, T)}),
    "hint": ("", (SOURCE, TARGET), {"tgt_is_causal": True}),
    "encoder: integer mask": ("encoder", (SOURCE,), {"mask": no(S, S).int()}),
    "encoder: hint": ("encoder", (SOURCE,), {"is_causal": True}),
    "layer: integer mask": ("encoder.layers.0", (SOURCE,), {"src_mask": no(S, S).int()}),
    "layer: integer padding": (
        "encoder.layers.0", (SOURCE,), {"src_key_padding_mask": no(B, S).int()},
    ),
    "layer: 4-D": ("encoder.layers.0", (x(S, B, M, 1),), {}),
    "decoder layer: memory": ("decoder.layers.0", (TARGET, x(S, B, M + 1)), {}),
    "decoder layer: no memory": ("decoder.layers.0", (TARGET,), {}),
}  # fmt: skip
WRONG: dict[str, tuple[Callable[[], torch.nn.Module], str, tuple[Any, ...], dict[str, Any]]] = {
    **{
        f"attention: {name}": (
            lambda options=options: torch.nn.MultiheadAttention(M, H, **options),  # type: ignore[misc]
            "", args, {"need_weights": False, **kwargs},
        )
        for name, (options, args, kwargs) in CALLS.items()
    },
    **{
        f"norm: {name}": (lambda shape=shape: torch.nn.LayerNorm(shape), "", (given,), {})  # type: ignore[misc]
        for name, (shape, given) in {
            "width": ((8,), x(2, 7)), "rank": ((2, 8), x(8)), "shape": ((2, 8), x(3, 8)),
            "list": ((8,), [1.0]),
        }.items()
    },
    **{
        f"linear: {i}": (lambda: torch.nn.Linear(8, 4), "", (given,), {})
        for i, given in enumerate(
            (x(2, 7), torch.randn(()), [1.0], x(2, 8).double(), x(2, 8).long())
        )
    },
    **{
        name: (lambda: torch.nn.Transformer(M, H, 1, 1, 16), *call) for name, call in MODELS.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_raise_pytorchs_errors(name: str) -> None:
    make, path, args, kwargs = WRONG[name]
    model = make()
    theirs, ours = (m.get_submodule(path) for m in (model, to_ours(model)))
    assert error_of(lambda: ours(*args, **kwargs)) == error_of(lambda: theirs(*args, **kwargs))


#: Classes of torch.nn whose ``forward`` other libraries replace, to change every instance.
PATCHED = (
    "Linear", "LayerNorm", "RMSNorm", "Embedding", "CrossEntropyLoss", "Dropout", "ReLU", "GELU",
    "MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer", "TransformerEncoder",
    "TransformerDecoder", "Transformer",
)  # fmt: skip


def patched_models(library: Any) -> list[tuple[torch.nn.Module, tuple[torch.Tensor, ...]]]:
    """Returns small models that together contain every class of `PATCHED`.

    Some layers have activation modules.
    """
    x, tokens = torch.randn(2, 5, 32), torch.tensor([[1, 2]])
    layers = [
        library.TransformerEncoderLayer(32, 4, 48, activation=kind(), batch_first=True)
        for kind in (torch.nn.ReLU, torch.nn.GELU)
    ]
    return [
        (library.Embedding(5, 8), (tokens,)),
        (library.RMSNorm(32), (x,)),
        (library.CrossEntropyLoss(), (torch.randn(4, 7), torch.arange(4))),
        *((layer, (x,)) for layer in layers),
        (library.Transformer(32, 4, 1, 1, 48, batch_first=True), (x, x)),
    ]


@pytest.mark.parametrize("name", PATCHED)
def test_forward_replaced_on_a_torch_nn_class_runs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replacement has the original's name and signature.

    Unlike PyTorch, this library may call it for out_proj as well.
    """
    kind, calls = getattr(torch.nn, name), 0
    original = kind.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    models = {library: patched_models(library) for library in (torch.nn, nn)}
    monkeypatch.setattr(kind, "forward", forward)
    counts = []
    for library in (torch.nn, nn):
        calls = 0
        for model, inputs in models[library]:
            model(*inputs)
            model(*(torch.cat([x] * 40) for x in inputs))
        counts.append(calls)
    assert 0 < counts[0] <= counts[1]
    layer = models[nn][3][0].eval()
    if name in ("Linear", "LayerNorm"):
        with torch.no_grad():
            assert "replaced" in str(transformer_fast.explain(layer, torch.randn(2, 5, 32)))


@pytest.mark.parametrize("rows", [1, 300])
def test_a_function_mode_sees_the_functions_that_torch_calls(rows: int) -> None:
    for (ours, inputs), (theirs, _) in zip(
        patched_models(nn), patched_models(torch.nn), strict=True
    ):
        for training in (True, False):
            found = []
            for model in (ours, theirs):
                with Functions() as mode:
                    model.train(training)(*(torch.cat([x] * rows) for x in inputs))
                found.append([x for x in mode.seen if x not in ("__get__", "dim", "size")])
            assert found[0] == found[1], type(theirs)
