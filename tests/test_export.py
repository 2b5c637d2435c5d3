"""Exported programs: torch.export, both ONNX exporters, torch.jit.trace, AOTInductor.

They may run where this package is not installed. They therefore contain only PyTorch's operators,
and match the exported module, also for other batch sizes and sequence lengths.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim

import transformer_fast
from transformer_fast import functional as F
from transformer_fast import models, nn

pytestmark = pytest.mark.sampled(3, 35)

M, H, HIDDEN = 32, 4, 48


class Call(torch.nn.Module):
    """A module that calls a function of tensors; it owns the parameters and may have several
    results.
    """

    def __init__(self, function: Callable[..., Any], *parts: torch.nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = torch.nn.ModuleList(parts)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*self.parts, *inputs)


class Mixed(torch.nn.Module):
    """Attention with key lengths and padding, a norm with residual, and a network, as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight1 = torch.nn.Parameter(torch.randn(HIDDEN, M) / 6)
        self.weight2 = torch.nn.Parameter(torch.randn(M, HIDDEN) / 6)
        self.norm = torch.nn.LayerNorm(M)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = F.linear(x, self.weight1[:M]).view(batch, length, H, M // H).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads, key_lengths=lengths)
        y = y.transpose(1, 2).flatten(2)
        y, total = F.add_layer_norm(y, x, (M,), self.norm.weight, self.norm.bias)
        return total + F.feed_forward(y, self.weight1, None, self.weight2, None, activation="gelu")


def _x(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, M)


def _padding(batch: int, length: int) -> Tensor:
    """Returns a mask, True = ignored; the last sequence is all padding."""
    lengths = torch.arange(batch) * length // max(1, batch - 1)
    return torch.arange(length) >= lengths.flip(0)[:, None]


def _causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def _encoder_layer(**options: Any) -> torch.nn.Module:
    return nn.TransformerEncoderLayer(M, H, HIDDEN, batch_first=True, **options)


def _heads(batch: int, length: int, heads: int = H) -> Tensor:
    return torch.randn(batch, heads, length, 8)


def _accelerated() -> torch.nn.Module:
    layer = torch.nn.TransformerEncoderLayer(M, H, HIDDEN, batch_first=True)
    module = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    transformer_fast.accelerate(module)
    return module


def _model() -> torch.nn.Module:
    return models.Transformer(
        40, 30, d_model=M, nhead=H, num_encoder_layers=1, num_decoder_layers=1,
        dim_feedforward=HIDDEN, pad_token=0, start_token=1, end_token=2,
    )  # fmt: skip


def _tokens(batch: int, length: int) -> Tensor:
    return torch.randint(3, 30, (batch, length)).masked_fill(_padding(batch, length).roll(1, 0), 0)


_MASKED = lambda layer, x, mask, padding: layer(x, mask, padding)  # noqa: E731
#: name -> (a function that makes the module, a function of batch and length that makes the inputs)
CASES: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[int, int], tuple[Tensor, ...]]]] = {
    "Linear": (lambda: nn.Linear(M, HIDDEN), lambda b, n: (_x(b, n),)),
    "LayerNorm": (lambda: nn.LayerNorm(M), lambda b, n: (_x(b, n),)),
    "RMSNorm": (lambda: nn.RMSNorm(M), lambda b, n: (_x(b, n),)),
    "Embedding": (lambda: nn.Embedding(30, M), lambda b, n: (_tokens(b, n),)),
    "CrossEntropyLoss": (
        lambda: nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1),
        lambda b, n: (torch.randn(b * n, 30), _tokens(b, n).flatten()),
    ),
    "self-attention, weights": (
        lambda: Call(lambda a, x: a(x, x, x), nn.MultiheadAttention(M, H, batch_first=True)),
        lambda b, n: (_x(b, n),),
    ),
    "cross-attention, padding, float mask": (
        lambda: Call(
            lambda a, x, y, mask, padding: a(
                x, y, y, attn_mask=mask, key_padding_mask=padding, need_weights=False
            )[0],
            nn.MultiheadAttention(M, H, add_bias_kv=True, batch_first=True),
        ),
        lambda b, n: (
            _x(b, n + 1), _x(b, n), torch.randn(n + 1, n),
            torch.zeros(b, n).masked_fill(_padding(b, n), -torch.inf),
        ),
    ),
    "encoder layer": (_encoder_layer, lambda b, n: (_x(b, n),)),
    "encoder layer, mask and padding": (
        lambda: Call(_MASKED, _encoder_layer(norm_first=True, activation="gelu")),
        lambda b, n: (_x(b, n), _causal(n), _padding(b, n)),
    ),
    "decoder layer": (
        lambda: nn.TransformerDecoderLayer(M, H, HIDDEN, norm_first=True, batch_first=True),
        lambda b, n: (_x(b, n), _x(b, n + 1)),
    ),
    "encoder, padding": (
        lambda: Call(
            lambda e, x, padding: e(x, src_key_padding_mask=padding),
            nn.TransformerEncoder(_encoder_layer(), 2),
        ),
        lambda b, n: (_x(b, n), _padding(b, n)),
    ),
    "transformer, causal, padding": (
        lambda: Call(
            lambda t, x, y, mask, padding: t(
                x, y, tgt_mask=mask, src_key_padding_mask=padding, tgt_is_causal=True,
                memory_key_padding_mask=padding,
            ),
            nn.Transformer(M, H, 1, 1, HIDDEN, batch_first=True),
        ),
        lambda b, n: (_x(b, n), _x(b, n + 1), _causal(n + 1), _padding(b, n)),
    ),
    "functions, key lengths": (
        Mixed, lambda b, n: (_x(b, n), torch.arange(b) * n // b),
    ),
    "attention, causal": (
        lambda: Call(lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True)),
        lambda b, n: (_heads(b, n), _heads(b, n)),
    ),
    "attention, grouped heads": (
        lambda: Call(lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True)),
        lambda b, n: (_heads(b, n), _heads(b, n + 1, H // 2)),
    ),
    "attention, query lengths": (
        lambda: Call(
            lambda q, n: F.scaled_dot_product_attention(q, q, q, query_lengths=n, key_lengths=n)
        ),
        lambda b, n: (_heads(b, n), torch.arange(b) * n // b),
    ),
    "linear_cross_entropy": (
        lambda: Call(
            lambda head, x, target: F.linear_cross_entropy(
                x, head.weight, target, ignore_index=0, label_smoothing=0.1
            ),
            torch.nn.Linear(M, 30),
        ),
        lambda b, n: (torch.randn(b * n, M), _tokens(b, n).flatten()),
    ),
    "annotated norm": (lambda: models.AnnotatedLayerNorm(M), lambda b, n: (_x(b, n),)),
    "accelerated encoder": (_accelerated, lambda b, n: (_x(b, n),)),
    "models.Transformer": (_model, lambda b, n: (_tokens(b, n), _tokens(b, n + 1))),
    "models.LanguageModel": (
        lambda: models.LanguageModel(30, d_model=M, nhead=H, num_layers=1, pad_token=0),
        lambda b, n: (_tokens(b, n),),
    ),
}  # fmt: skip


def _made(name: str) -> tuple[torch.nn.Module, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Returns a module in evaluation mode, example inputs, and inputs with another batch and
    length.
    """
    make, inputs = CASES[name]
    return make().eval(), inputs(3, 7), inputs(4, 11)


def _dynamic(given: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> tuple[dict[int, Any], ...]:
    """Returns the dynamic dimensions: those that differ between the two examples."""
    return tuple(
        {
            place: Dim.DYNAMIC
            for place, sizes in enumerate(zip(one.shape, two.shape, strict=True))
            if sizes[0] != sizes[1]
        }
        for one, two in zip(given, other, strict=True)
    )


def _assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


def _foreign(program: torch.export.ExportedProgram) -> list[str]:
    """Returns the program's operators, also of nested graphs, that PyTorch does not have."""
    found = []
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            names = [str(n.target) for n in module.graph.nodes if n.op == "call_function"]
            found += [name for name in names if "transformer_fast" in name]
    return found


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # by PyTorch 2.10
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("name", CASES)
def test_exported_programs_have_only_pytorchs_operators(name: str, strict: bool) -> None:
    module, given, other = _made(name)
    axes = _dynamic(given, other)
    shapes: Any = (axes,) if isinstance(module, Call) else axes
    # No gradients, as at run time: outputs of encoders at padded positions depend on the grad mode.
    with torch.no_grad():
        program = torch.export.export(module, given, dynamic_shapes=shapes, strict=strict)
    assert _foreign(program) == []
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for inputs in (given, other):
        with torch.no_grad():
            _assert_same(loaded(*inputs), module(*inputs))


@pytest.mark.parametrize("name", CASES)
def test_torch_jit_trace_matches(name: str) -> None:
    module, given, other = _made(name)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        traced = torch.jit.trace(module, given, check_inputs=[other])
        assert "transformer_fast::" not in str(traced.inlined_graph)
        for inputs in (given, other):
            _assert_same(traced(*inputs), module(*inputs))


def _by_onnx_runtime(file: Path, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    # The ONNX model lacks inputs that the program does not use.
    names = [one.name for one in session.get_inputs()]
    given = {f"input{place}": x.numpy() for place, x in enumerate(inputs)}
    results = session.run(None, {name: given[name] for name in names})
    return [torch.from_numpy(one) for one in results]


@pytest.mark.sampled(0)
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_onnx_runtime_matches(name: str, dynamo: bool, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript" if dynamo else "onnx")
    if name == "RMSNorm" and not dynamo:
        pytest.skip("PyTorch's older exporter does not know its own rms_norm")
    module, given, other = _made(name)
    # The older exporter passes optional arguments by position, also those given by keyword.
    module = (
        module if isinstance(module, Call) else Call(lambda m, *inputs: m(*inputs), module).eval()
    )
    file = tmp_path / "model.onnx"
    names, axes = [f"input{place}" for place in range(len(given))], _dynamic(given, other)
    options: dict[str, Any] = {"dynamic_shapes": (axes,), "verbose": False}
    if not dynamo:
        named = {name: list(dims) for name, dims in zip(names, axes, strict=True)}
        options = {"dynamic_axes": named, "opset_version": 18}
    with torch.no_grad():
        torch.onnx.export(module, given, str(file), dynamo=dynamo, input_names=names, **options)
    for inputs in (given, other):
        with torch.no_grad():
            expected = module(*inputs)
        flat = expected if isinstance(expected, tuple) else (expected,)
        _assert_same(_by_onnx_runtime(file, inputs), [e for e in flat if e is not None])


def test_training_can_be_exported() -> None:
    layer = nn.TransformerEncoderLayer(M, H, HIDDEN, dropout=0.5, batch_first=True).train()
    program = torch.export.export(layer, (_x(2, 5),))
    assert _foreign(program) == []
    drops = [n for n in program.graph.nodes if "dropout" in str(n.target)]
    assert drops
    program.module()(_x(2, 5)).sum().backward()


def test_our_operators_are_exported_on_request() -> None:
    layer, given = _encoder_layer().eval(), (_x(2, 64),)
    expected = layer(*given)
    with transformer_fast.export_operators():
        kept = torch.export.export(layer, given)
    with transformer_fast.use_backend("cpu"):
        named = torch.export.export(layer, given)
    for program in (kept, named):
        assert any("linear_training.cpu" in name for name in _foreign(program))
        _assert_same(program.module()(*given), expected)
    assert _foreign(torch.export.export(layer, given)) == []


def test_strict_mode_allows_exports(small_calls: None) -> None:
    with transformer_fast.strict():
        program = torch.export.export(_encoder_layer().eval(), (_x(2, 5),))
    assert _foreign(program) == []


@pytest.mark.exhaustive  # half a minute of compilation
@pytest.mark.filterwarnings("ignore")
def test_aot_inductor_matches(tmp_path: Path) -> None:
    """Loads the program from a shared library, without the module."""
    module, given, other = _made("encoder layer, mask and padding")
    with torch.no_grad():
        program = torch.export.export(module, given, dynamic_shapes=(_dynamic(given, other),))
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "layer.pt2")
        )
        loaded = torch._inductor.aoti_load_package(package)
        for inputs in (given, other):
            _assert_same(loaded(*inputs), module(*inputs))
