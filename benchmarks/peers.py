"""Peers: other software that our kernels are compared with.

A `Peer` has some of the following methods. Each returns a function to time; or the reason why the
peer cannot run the call; or None if the peer is not for this kind of work.

    op(op, arguments)                function with the arguments and results of ``reference.<op>``
    encoder_layer(layer, arguments)  function of (x, mask, padding), equal to the torch.nn layer
    encoder(model, arguments)        the same for a torch.nn.TransformerEncoder
    transformer(model, arguments)    function of (source, target), equal to the model
    hand_written(model, adapt)       ``adapt(run)``, where ``run`` has the arguments of the model, a
                                     Transformer written by hand
    training(model, adapt)           the same for a model whose gradients are computed
    module(module, examples, precision)
                                     function with the arguments of the module, which are tensors;
                                     ``examples``: arguments of some calls; ``precision``: "float32",
                                     "bfloat16" or "int8" (products of 8 bits, results as in float32)
    search(model, inputs, beams, new, precision)
                                     function of (source,) that returns the tokens (B, new) of a
                                     model of `suites.generate`; its attribute ``label``, if it has
                                     one, is the name of its rows

Weights may be prepared (packed, converted) when the function is created, because they do not change
while it is timed. Activations may not, because they change from call to call. The results of peers
are checked; a wrong one (`measure.benchmark_case.PEER_FACTOR`) is not timed.
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import importlib.util
import io
import logging
import math
import os
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from transformer_fast import _native
from transformer_fast.measure import machine
from transformer_fast.measure.accuracy import unchecked
from transformer_fast.measure.benchmark_case import Arguments, Candidate
from transformer_fast.measure.cases import fast_path, with_fast_path
from transformer_fast.specs import OPS

from . import named_isa

#: Result of a peer's method: a function to time, or the reason why there is none, or None.
Offer = Callable[..., Any] | str | None


def missing(*packages: str) -> str | None:
    """Returns a sentence on the first package that is not installed, or None."""
    for package in packages:
        if importlib.util.find_spec(package.replace("-", "_")) is None:
            return f"{package} is not installed (pip install {package})"
    return None


#: Arguments of several calls of a module.
Examples = Sequence[tuple[Tensor, ...]]


def fastest(runs: Sequence[Callable[..., Any]], examples: Examples) -> Callable[..., Any]:
    """Returns the function with the shortest time on the examples."""

    def taken(run: Callable[..., Any]) -> float:
        names, threads = {"run": run, "examples": examples}, torch.get_num_threads()
        timer = Timer("for one in examples: run(*one)", globals=names, num_threads=threads)
        return timer.blocked_autorange(min_run_time=0.1).median

    return min(runs, key=taken)


class Peer:
    #: Name of the peer's rows in the results.
    name: str
    #: Packages that its methods import; their versions are recorded with the results.
    packages: tuple[str, ...] = ()
    #: True if an environment variable limits its instruction set (`benchmarks`).
    limitable = True

    def why_not(self) -> str | None:
        """Returns the reason why the peer is not available here, or None."""
        if not self.limitable and (isa := named_isa()) is not None:
            return f"it cannot be limited to {isa}"
        return missing(*self.packages)


def load(names: Sequence[str] | None = None) -> list[Peer]:
    """Returns the peers of these names in `PEERS`; None: all."""
    for name in names or ():
        if name not in PEERS:
            raise ValueError(f"there is no peer {name!r}; there are: {', '.join(PEERS)}")
    return [peer for name, peer in PEERS.items() if names is None or name in names]


def versions(peers: Sequence[Peer]) -> dict[str, str]:
    """Returns the versions of the peers' installed packages."""
    found = {}
    for package in sorted({name for peer in peers for name in peer.packages}):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def candidates(peers: Sequence[Any], kind: str, *arguments: Any) -> list[Candidate]:
    """Returns a candidate, or the reason for none, from each peer with the method ``kind``."""
    found = []
    for peer in peers:
        if not hasattr(peer, kind):
            continue
        offer: Offer
        try:
            offer = getattr(peer, kind)(*arguments) if (why := peer.why_not()) is None else why
        except Exception as error:
            # Other software may raise any exception; that must not end the run.
            lines = str(error).strip().splitlines() or ["no message"]
            offer = f"{type(error).__name__}: {lines[0]}"
        if isinstance(offer, str):
            found.append(Candidate(peer.name, None, offer, ours=False))
        elif offer is not None:
            found.append(Candidate(getattr(offer, "label", peer.name), offer, ours=False))
    return found


def _keep(make: Callable[..., Callable[..., Any]], arguments: tuple[Any, ...]) -> None:
    _keep.run = make(*arguments)  # type: ignore[attr-defined]


def _call(*arguments: Any) -> Any:
    return _keep.run(*arguments)  # type: ignore[attr-defined]


class Remote:
    """The function that ``make(*arguments)`` returns, run in a new process; all must be picklable.

    For libraries that start threads of the same OpenMP runtime as PyTorch, which permanently slows
    down all other code in the process. With more threads than CPUs GNU's runtime no longer spins, so
    each parallel loop waits for the operating system to wake a thread.

    Exceptions of that process are raised again here.
    """

    def __init__(self, make: Callable[..., Callable[..., Any]], *arguments: Any) -> None:
        # The process ignores Ctrl-C, because the parent ends it.
        self._pool = ProcessPoolExecutor(
            1, get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_IGN)
        )
        self._pool.submit(_keep, make, arguments).result()

    def __call__(self, *arguments: Any) -> Any:
        return self._pool.submit(_call, *arguments).result()


def beyond_attention(arguments: Arguments) -> str | None:
    """Returns the reason if an attention call has more features than masks and causality, or None.

    Other software does not support them.
    """
    named = OPS["attention"].named(arguments)
    if named["dropout_p"]:
        return "it has no dropout"
    if named["need_weights"]:
        return "it returns no weights"
    if named.get("query_lengths") is not None or named.get("longest") is not None:
        return "it does not support query lengths"
    return None


class Compiler(Peer):
    """A backend of torch.compile, or inductor with other settings."""

    #: Function of a module that returns it compiled.
    compiled: Callable[..., Callable[..., Any]]

    def why_not(self) -> str | None:
        if shutil.which("g++") is None and shutil.which("c++") is None:
            return "torch.compile needs a C++ compiler, and none was found"
        return super().why_not()

    def hand_written(self, model: nn.Module, adapt: Callable[..., Any]) -> Offer:
        return adapt(self.compiled(model))

    def encoder_layer(self, layer: nn.Module, arguments: Arguments) -> Offer:
        return self.hand_written(layer, lambda run: with_fast_path(run, False))

    encoder = transformer = encoder_layer


class TorchCompile(Compiler):
    """torch.compile of the code that a user of PyTorch would write."""

    name = "torch.compile"
    training = Compiler.hand_written

    def compiled(self, run: Callable[..., Any]) -> Callable[..., Any]:
        torch._dynamo.reset()
        return torch.compile(run, dynamic=False)

    def op(self, op: str, arguments: Arguments) -> Offer:
        reason = unchecked(OPS[op].named(arguments).get("dropout_p", 0.0))
        return self.compiled(OPS[op].pytorch) if reason is None else reason


#: Inference settings: weights become constants, which can be packed. The disk cache is off, because
#: it may have the same graph as compiled by another version of a plugin.
_FROZEN = {"freezing": True, "fx_graph_cache": False}


class Frozen(Compiler):
    """torch.compile with weights as constants."""

    #: Settings of inductor, in effect for this peer only, and options of torch.compile.
    settings: ClassVar[dict[str, Any]]
    options: ClassVar[dict[str, Any]]

    def hand_written(self, model: nn.Module, adapt: Callable[..., Any]) -> Offer:
        if next(model.parameters()).device.type != "cpu":
            return "its settings are for the CPU"
        return super().hand_written(model, adapt)

    def module(self, module: nn.Module, examples: Examples, precision: str) -> Offer:
        if precision == "int8":
            return None
        module = copy.deepcopy(module).to(getattr(torch, precision))
        return with_fast_path(self.compiled(module, examples), False)

    def compiled(self, module: nn.Module, examples: Examples = ()) -> Callable[..., Any]:
        """Compiles with dynamic shapes if those of the examples differ."""
        from torch._inductor import config

        torch._dynamo.reset()
        dynamic = len({tuple(x.shape for x in one) for one in examples}) > 1
        done = False
        run = torch.compile(module, dynamic=dynamic, **self.options)

        def forward(*arguments: Any) -> Any:
            nonlocal done
            if done and not dynamic:
                return run(*arguments)
            done = True
            # Dynamo reads the setting `freezing` itself, so options of torch.compile do not suffice.
            # With dynamic shapes they are in effect for all calls, which may compile further shapes.
            with config.patch(self.settings), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch's warnings about its own code
                return run(*arguments)

        return forward


class InductorTuned(Frozen):
    """torch.compile with its fastest CPU settings: autotuned C++ templates for matrix products."""

    name = "inductor tuned"
    settings: ClassVar[dict[str, Any]] = {
        **_FROZEN,
        "max_autotune": True,
        "max_autotune_gemm_backends": "CPP,ATEN",
        # A cached choice may come from a run with another number of threads.
        "autotune_local_cache": False,
        # No tables on stderr.
        "autotune_num_choices_displayed": 0,
        "max_autotune_report_choices_stats": False,
    }
    # The settings are options, too: Dynamo caches compiled code by module and backend, and without
    # options this backend would be equal to that of plain torch.compile.
    options: ClassVar[dict[str, Any]] = {"options": settings}
    limitable = False


class _ZentorchLinear(nn.Module):
    """zentorch's linear layer with 8-bit products, which quantises its input in each call."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1) / 127
        weight = torch.round(linear.weight.detach() / scale[:, None]).to(torch.int8)
        pack = torch.ops.zentorch.zentorch_weight_prepack_for_dynamic_qlinear
        self.weight, self.scale, self.bias = pack(weight), scale, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        run = torch.ops.zentorch.zentorch_dynamic_qlinear
        found: Tensor = run(x, self.weight, self.scale, self.bias, is_weight_prepacked=True)
        return found


def _with_zentorch_int8(module: nn.Module) -> nn.Module:
    module = copy.deepcopy(module)
    for name, part in [*module.named_modules()]:
        if type(part) is nn.Linear:
            module.set_submodule(name, _ZentorchLinear(part))
    return module


class Zentorch(Frozen):
    """AMD's plugin for torch.compile, and its attention."""

    name, packages, limitable = "zentorch", ("zentorch",), False
    settings: ClassVar[dict[str, Any]] = {
        # Without freezing it packs weights in place, and other candidates share them.
        **_FROZEN,
        # When zentorch compiles, it installs a pass of its own globally in inductor; `config.patch`
        # resets it.
        "joint_custom_post_pass": None,
    }
    options: ClassVar[dict[str, Any]] = {"backend": "zentorch"}

    def why_not(self) -> str | None:
        if missing("zentorch") is not None:
            return "zentorch is not installed (pip install zentorch; x86-64 only)"
        version = importlib.metadata.version("zentorch")
        if version.split(".")[:2] != torch.__version__.split(".")[:2]:
            return f"zentorch {version} is not for torch {torch.__version__}"
        if not torch.cpu._is_avx512_supported():
            return "without AVX-512 it passes everything to inductor"
        importlib.import_module("zentorch")  # registers its backend and its operators
        return super().why_not()

    def module(self, module: nn.Module, examples: Examples, precision: str) -> Offer:
        if precision != "int8":
            return super().module(module, examples, precision)
        return with_fast_path(self.compiled(_with_zentorch_int8(module), examples), False)

    def op(self, op: str, arguments: Arguments) -> Offer:
        if op != "attention":
            return None
        query, _, _, mask, lengths, causal, *_, gqa, _ = arguments[:11]
        if query.device.type != "cpu" or query.dtype not in (torch.float32, torch.bfloat16):
            return "it supports float32 and bfloat16 on the CPU"
        if lengths is not None or (mask is not None and mask.dtype != query.dtype):
            return "it supports masks in the dtype of the query, no bool masks and no key lengths"
        if gqa or (causal and mask is not None):
            return "it supports no grouped heads, and no mask together with causality"
        if (reason := beyond_attention(arguments)) is not None:
            return reason
        attend = torch.ops.zentorch.zentorch_sdpa

        def run(*given: Any) -> tuple[Tensor, None]:
            query, key, value, mask, _, causal, scale, *_ = given
            return attend(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)[0], None

        return run


class TorchAo(Peer):
    """torchao's dynamic int8, compiled with inductor's fastest settings."""

    name, packages = "torchao", ("torchao",)

    def why_not(self) -> str | None:
        return super().why_not() or PEERS["inductor_tuned"].why_not()

    def module(self, module: nn.Module, examples: Examples, precision: str) -> Offer:
        if precision != "int8":
            return None
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        module = copy.deepcopy(module)
        quantize_(module, Int8DynamicActivationInt8WeightConfig())
        inductor: Any = PEERS["inductor_tuned"]
        return with_fast_path(inductor.compiled(module, examples), False)


class QuantizeDynamic(Peer):
    """PyTorch's own dynamic int8, not compiled."""

    name, limitable = "quantize_dynamic", False  # FBGEMM

    def module(self, module: nn.Module, examples: Examples, precision: str) -> Offer:
        if precision != "int8":
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated in favour of torchao
            quantise = torch.ao.quantization.quantize_dynamic
            return with_fast_path(quantise(copy.deepcopy(module), {nn.Linear}), False)


class OneDnnPrepacked(Peer):
    """oneDNN's linear with prepacked weights, which torch.compile uses for frozen models."""

    name = "oneDNN prepacked"
    #: Activation -> the operator's arguments for it.
    _post_ops: ClassVar[dict[str | None, tuple[str, list[Any], str]]] = {
        None: ("none", [], ""),
        "relu": ("relu", [], ""),
        "gelu": ("gelu", [], "none"),
        "gelu_tanh": ("gelu", [], "tanh"),
        "silu": ("swish", [], ""),
    }

    def why_not(self) -> str | None:
        if not torch.backends.mkldnn.is_available():
            return "this torch was built without oneDNN"
        return None

    def op(self, op: str, arguments: Arguments) -> Offer:
        if op not in ("linear", "feed_forward"):
            return None
        x = arguments[0]
        if x.device.type != "cpu":
            return "it runs on cpu tensors"

        def linear(weight: Tensor, bias: Any, activation: Any) -> Callable[[Tensor], Tensor]:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, x.numel() // x.shape[-1])
            run = torch.ops.mkldnn._linear_pointwise
            return lambda x: run(x, packed, bias, *self._post_ops[activation])

        if op == "linear":
            _, weight, bias, activation, residual = arguments
            first = linear(weight, bias, activation)
            return lambda x, *rest: first(x) if residual is None else first(x) + rest[-1]
        _, weight1, bias1, weight2, bias2, activation, dropout_p, _ = arguments
        if dropout_p:
            return "it has no dropout"
        first, second = linear(weight1, bias1, activation), linear(weight2, bias2, None)
        return lambda x, *rest: second(first(x))


@contextmanager
def _converting() -> Iterator[None]:
    """Context manager for converters: disables torch.nn's fast path, whose ops they lack."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # no warning: no torchvision
    with fast_path(False), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's warnings about its own code
        yield


def maskless(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adapts a function of x, and optionally its padding, to the arguments (x, None, padding)."""
    return lambda x, mask, padding: run(x) if padding is None else run(x, padding)


class _Padded(nn.Module):
    """An encoder layer on tensors only: x, and optionally its padding."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        found: Tensor = self.layer(x, src_key_padding_mask=padding)
        return found


class Converter(Peer):
    """Base of peers that convert a module to a graph of their own, for the CPU."""

    #: The method ``module`` of a peer.
    module: Callable[..., Offer]

    def _run(self, module: nn.Module, *inputs: Tensor) -> Any:
        if inputs[0].device.type != "cpu":
            return "its graph is for the CPU"
        return self.module(module, [inputs], str(inputs[0].dtype).removeprefix("torch."))

    def op(self, op: str, arguments: Arguments) -> Offer:
        if op != "feed_forward":
            return None
        x, *weights, activation, dropout_p, _ = arguments
        if activation != "relu" or dropout_p:
            return "the converted module has relu and no dropout"
        hidden, size = weights[0].shape
        network = nn.Sequential(nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, size))
        for parameter, value in zip(network.parameters(), weights, strict=True):
            parameter.data = value
        run = self._run(network, x)
        return run if isinstance(run, str) else lambda x, *rest: run(x)

    def encoder_layer(self, layer: nn.Module, arguments: Arguments) -> Offer:
        x, _, padding = arguments
        run = self._run(_Padded(layer), *((x,) if padding is None else (x, padding)))
        return run if isinstance(run, str) else maskless(run)


def _exported(module: nn.Module, inputs: tuple[Any, ...], **options: Any) -> bytes:
    """Returns the module as an ONNX graph with its weights."""
    file = io.BytesIO()
    with _converting():
        torch.onnx.export(
            copy.deepcopy(module), inputs, file, dynamo=True, external_data=False, verbose=False,
            **options,
        )  # fmt: skip
    return file.getvalue()


class _Session:
    """Runs an ONNX graph; its inputs are the arguments that are not None."""

    def __init__(self, graph: bytes) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.inter_op_num_threads = 1
        # Idle threads of its pool must not spin while other candidates are timed.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        providers = ["CPUExecutionProvider"]
        self.session = onnxruntime.InferenceSession(graph, options, providers=providers)
        self.names = [one.name for one in self.session.get_inputs()]

    def __call__(self, *inputs: Tensor | None) -> Tensor:
        arrays = (x.numpy() for x in inputs if x is not None)
        feeds = dict(zip(self.names, arrays, strict=True))
        return torch.from_numpy(self.session.run(None, feeds)[0])


def saturates() -> bool:
    """True if this CPU has no 8-bit dot products.

    Other software then adds pairs of products in 16 bits, which saturate, unless the weights have 7
    bits. ONNX Runtime and NNCF have an option for that.
    """
    return _native.module is None or "int8" not in _native.module.dot_types()


def _quantised(graph: bytes) -> bytes:
    """Quantises an ONNX graph: its weights now, its activations when it runs."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder, "before.onnx"), Path(folder, "after.onnx")
        before.write_bytes(graph)
        logging.disable(logging.WARNING)  # no advice to preprocess the graph
        try:
            quantize_dynamic(
                before, after, per_channel=True, weight_type=QuantType.QInt8,
                reduce_range=saturates(),
            )  # fmt: skip
        finally:
            logging.disable(logging.NOTSET)
        return after.read_bytes()


class _Attention(nn.Module):
    """ONNX Runtime's MultiHeadAttention, to be exported; for the arguments of `_of_onnx`."""

    def __init__(self, heads: int, causal: bool, scale: float | None) -> None:
        super().__init__()
        self.options = {"num_heads": heads, "unidirectional": int(causal)}
        self.options |= {} if scale is None else {"scale": float(scale)}

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, bias: Tensor | None
    ) -> Any:
        # The fourth input is a bias of the projections.
        inputs = query, key, value, None, lengths, bias
        return torch.onnx.ops.symbolic(
            "com.microsoft::MultiHeadAttention", inputs, self.options, dtype=query.dtype,
            shape=(*query.shape[:2], value.shape[1] * value.shape[3]), version=1,
        )  # fmt: skip


def _of_onnx(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, lengths: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    """Returns query (B, T, H * D), key, value, int32 lengths, bias (B or 1, H or 1, T, S)."""
    rows = query.transpose(1, 2).flatten(2)
    bias = None if mask is None else mask.expand(*mask.shape[:2], query.shape[2], key.shape[2])
    return rows, key, value, None if lengths is None else lengths.int(), bias


class OnnxRuntime(Converter):
    """ONNX Runtime with all graph optimisations; for attention its MultiHeadAttention."""

    name, packages = "ONNX Runtime", ("onnx", "onnxscript", "onnxruntime")
    limitable = False

    def module(self, module: nn.Module, examples: Examples, precision: str) -> Offer:
        if precision not in ("float32", "int8"):
            return "it computes in float32 or in 8 bits"
        calls = torch.export.AdditionalInputs()
        for one in examples:
            calls.add(one)
        shapes = calls.dynamic_shapes(module, examples[0])
        graph = _exported(module, examples[0], dynamic_shapes=shapes)
        return _Session(_quantised(graph) if precision == "int8" else graph)

    def op(self, op: str, arguments: Arguments) -> Offer:
        if op != "attention":
            return super().op(op, arguments)
        query, key, _, mask, _, causal, scale, _, _, gqa, _ = arguments[:11]
        if query.device.type != "cpu" or query.dtype != torch.float32:
            return "the graph is for float32 on the CPU"
        if mask is not None and mask.dtype == torch.bool:
            return "it supports float masks and key lengths, no bool masks"
        if gqa or (causal and query.shape[2] != key.shape[2]):
            return "it supports no grouped heads, and aligns causality at the last key"
        if (reason := beyond_attention(arguments)) is not None:
            return reason
        heads = query.shape[1]
        session = _Session(_exported(_Attention(heads, causal, scale), _of_onnx(*arguments)))

        def run(*given: Any) -> tuple[Tensor, None]:
            return session(*_of_onnx(*given)).unflatten(2, (heads, -1)).transpose(1, 2), None

        return run


class _ByShape:
    """An OpenVINO graph, compiled for each shape, which is faster than once for all.

    NumPy has no bfloat16, so its bits are passed; OpenVINO returns them as float16.
    """

    def __init__(self, model: Any, hint: str) -> None:
        self.model, self.hint, self.threads = model, hint, torch.get_num_threads()
        self.requests: dict[tuple[torch.Size, ...], Any] = {}

    def _compiled(self, shapes: Sequence[torch.Size]) -> Any:
        import openvino

        model = self.model.clone()
        model.reshape({i: list(shape) for i, shape in enumerate(shapes)})
        settings = {
            "INFERENCE_NUM_THREADS": self.threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "ENABLE_CPU_PINNING": False,
            # Without this it computes in bf16 on CPUs that support it, whatever the graph's dtype.
            "INFERENCE_PRECISION_HINT": self.hint,
        }
        return openvino.Core().compile_model(model, "CPU", settings).create_infer_request()

    def _input(self, x: Tensor) -> Any:
        import openvino

        if x.dtype != torch.bfloat16:
            return x.numpy()
        return openvino.Tensor(x.view(torch.int16).numpy(), list(x.shape), openvino.Type.bf16)

    def __call__(self, *inputs: Tensor) -> Tensor:
        shapes = tuple(x.shape for x in inputs)
        if shapes not in self.requests:
            self.requests[shapes] = self._compiled(shapes)
        given = {i: self._input(x) for i, x in enumerate(inputs)}
        found = self.requests[shapes].infer(given, share_inputs=True, share_outputs=True)[0]
        # A copy, because the results of all candidates are tensors of their own.
        result = torch.from_numpy(found.copy())
        return result.view(torch.bfloat16) if result.dtype == torch.float16 else result


class OpenVino(Converter):
    """OpenVINO by its own conversion, which fuses attention; int8 is calibrated by NNCF."""

    name, packages = "OpenVINO", ("openvino",)
    limitable = False  # its float32 products exceed the peak of AVX2 if limited to it

    def module(self, module: nn.Module, examples: Examples, precision: str) -> Offer:
        """For int8, both precision hints are tried, and the faster is returned."""
        import openvino

        hints = {"float32": "f32", "bfloat16": "bf16", "int8": ""}
        if precision not in hints:
            return f"it is measured in {', '.join(hints)}"
        with _converting():
            model = openvino.convert_model(copy.deepcopy(module), example_input=examples[0])
        if precision != "int8":
            return _ByShape(model, hints[precision])
        if (reason := missing("nncf")) is not None:
            return reason
        import nncf

        nncf.set_log_level(logging.ERROR)
        data = nncf.Dataset([tuple(x.numpy() for x in one) for one in examples])
        fix = nncf.OverflowFix.ENABLE if saturates() else None
        model = nncf.quantize(
            model, data, model_type=nncf.ModelType.TRANSFORMER,
            advanced_parameters=nncf.AdvancedQuantizationParameters(overflow_fix=fix),
        )  # fmt: skip
        return fastest([_ByShape(model, hint) for hint in ("f32", "bf16")], examples)


def _named(model: Any) -> list[str]:
    """Returns names of a model's tokens; CTranslate2 looks special tokens up by name."""
    config = model.config
    names = [f"t{i}" for i in range(config.vocab_size)]
    if config.model_type == "whisper":
        special = (
            "endoftext", "startoftranscript", "en", "translate", "transcribe", "startofprev",
            "nospeech", "notimestamps",
        )  # fmt: skip
        ids = 50257, 50258, 50259, 50358, 50359, 50361, 50362, 50363
        for i, name in zip(ids, special, strict=True):
            names[i] = f"<|{name}|>"
    else:
        names[:4] = "<pad>", "<s>", "</s>", "<unk>"
    return names


def _converted(model: Any, names: list[str]) -> Any:
    """Converts a model of transformers by CTranslate2's own loader."""
    from ctranslate2.converters import transformers

    kind = model.config.model_type
    loaders = {"t5": "T5", "whisper": "Whisper", "gpt2": "GPT2", "llama": "Llama"}
    model.config.normalize_before, model.config.normalize_embedding = False, kind == "bart"
    loader = getattr(transformers, f"{loaders.get(kind, 'Bart')}Loader")()
    spec: Any = loader.get_model_spec(model)
    if kind in ("marian", "bart", "t5"):
        spec.register_source_vocabulary(names)
        spec.register_target_vocabulary(names)
        spec.config.add_source_bos = spec.config.add_source_eos = False
        spec.config.decoder_start_token = "<s>"
    else:
        spec.register_vocabulary(names)
    if kind == "whisper":
        spec.config.suppress_ids, spec.config.suppress_ids_begin = model.config.suppress_tokens, []
        spec.config.lang_ids, spec.config.alignment_heads = [50259], [(1, 0)]
    else:
        spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = names[1:4]
    spec.validate()
    return spec


def _searcher(
    folder: str, kind: str, precision: str, threads: int, names: list[str], beams: int, new: int,
    settings: dict[str, str],
) -> Any:  # fmt: skip
    os.environ.update(settings)  # read when the package is imported
    import ctranslate2

    options: dict[str, Any] = {
        "compute_type": precision,
        "inter_threads": 1,
        "intra_threads": threads,
    }
    numbers = {name: number for number, name in enumerate(names)}
    if kind == "whisper":
        whisper = ctranslate2.models.Whisper(folder, **options)
        prompt = [50258, 50259, 50359, 50363]

        def listen(sound: Any) -> Any:
            found = whisper.generate(
                ctranslate2.StorageView.from_array(sound), [prompt] * len(sound), beam_size=beams,
                max_length=2 * new, suppress_blank=False,  # it decodes half of max_length
            )  # fmt: skip
            return [one.sequences_ids[0] for one in found]

        return listen
    is_decoder = kind in ("gpt2", "llama")
    model = (ctranslate2.Generator if is_decoder else ctranslate2.Translator)(folder, **options)

    def run(source: Any) -> list[list[int]]:
        rows = [[names[i] for i in row] for row in source]
        if is_decoder:
            found = model.generate_batch(
                rows, max_length=new, beam_size=beams, include_prompt_in_result=False
            )
            return [one.sequences_ids[0] for one in found]
        found = model.translate_batch(rows, beam_size=beams, max_decoding_length=new)
        return [[numbers[name] for name in one.hypotheses[0]] for one in found]

    return run


class CTranslate2(Peer):
    """CTranslate2: whole models, converted beforehand, in a process of their own.

    The fastest of `_settings_of_ctranslate2` are used, and are a part of the row's name.
    """

    name, packages = "CTranslate2", ("ctranslate2", "transformers")

    def search(
        self, model: Any, inputs: Sequence[Examples], beams: int, new: int, precision: str
    ) -> Offer:
        names, kind = _named(model), model.config.model_type
        found = {}
        with tempfile.TemporaryDirectory() as folder:
            _converted(copy.deepcopy(model), names).save(folder)
            for settings in _settings_of_ctranslate2():
                threads = torch.get_num_threads()
                given = folder, kind, precision, threads, names, beams, new, settings
                remote = Remote(_searcher, *given)

                def run(source: Tensor, remote: Remote = remote) -> Tensor:
                    is_sound = source.is_floating_point()
                    return torch.tensor(remote(source.numpy() if is_sound else source.tolist()))

                found[run] = ", ".join(("CTranslate2", *map("=".join, settings.items())))
        best = fastest([*found], inputs[0])
        best.label = found[best]  # type: ignore[attr-defined]
        return best


def _settings_of_ctranslate2() -> list[dict[str, str]]:
    if named_isa() is not None:
        return [{}]
    found: list[dict[str, str]] = [{}]
    if _native.module is not None and "avx512" in _native.module.supported_isas():
        found.append({"CT2_FORCE_CPU_ISA": "AVX512"})
    if "Intel" in machine.describe(torch.device("cpu"))["cpu"]:
        found = [{**one, "CT2_USE_MKL": use} for one in found for use in "01"]
    return found


def visible_keys(
    mask: Tensor | None, lengths: Tensor | None, causal: bool
) -> Callable[..., Tensor] | None:
    """Returns FlexAttention's ``mask_mod`` for the keys that a query may attend to; None: all."""
    from torch.nn.attention.flex_attention import and_masks

    parts: list[Callable[..., Tensor]] = [lambda b, h, t, s: s <= t] if causal else []
    if lengths is not None:
        parts.append(lambda b, h, t, s: s < lengths[b])
    if mask is not None and mask.dtype == torch.bool:
        parts.append(lambda b, h, t, s: mask[b, h, t, s])
    return and_masks(*parts) if parts else None


def attend(attention: Callable[..., Tensor], mask_of: Callable[..., Any], *given: Any) -> Tensor:
    """Returns FlexAttention's output for the arguments of ``reference.attention``.

    The block mask is created in each call, because our kernels, too, evaluate the mask in each call.
    """
    query, key, value, mask, lengths, causal, scale, _, _, gqa, *_ = given
    shape = (*query.shape[:3], key.shape[2])
    mask = None if mask is None else mask.expand(shape)
    visible, blocks, added = visible_keys(mask, lengths, causal), None, None
    if mask is not None and mask.dtype != torch.bool:

        def added(score: Tensor, b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
            return score + mask[b, h, t, s]

    if visible is not None:
        heads = None if mask is None else shape[1]
        blocks = mask_of(visible, shape[0], heads, *shape[2:], device=query.device)
    return attention(
        query, key, value, score_mod=added, block_mask=blocks, scale=scale, enable_gqa=gqa
    )


class FlexAttention(Peer):
    """PyTorch's FlexAttention, compiled, on GPUs."""

    name = "FlexAttention"

    def op(self, op: str, arguments: Arguments, known: bool = False) -> Offer:
        """``known``: the block mask is created once, instead of in every call."""
        if op != "attention":
            return None
        if arguments[0].device.type != "cuda":
            return "it is measured on cuda tensors"
        if (reason := beyond_attention(arguments)) is not None:
            return reason
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        compiled = torch.compile(flex_attention, dynamic=False)
        if not known:
            return lambda *given: (attend(compiled, create_block_mask, *given), None)
        # The cache keeps the tensors alive, so that their ids stay unique.
        masks: dict[tuple[int, int], tuple[Any, ...]] = {}

        def run(*given: Any) -> tuple[Tensor, None]:
            def kept(*arguments: Any, **where: Any) -> Any:
                key = id(given[3]), id(given[4])
                if key not in masks:
                    masks[key] = create_block_mask(*arguments, **where), given
                return masks[key][0]

            return attend(compiled, kept, *given), None

        return run


class Liger(Peer):
    """Liger Kernel's LayerNorm, on GPUs."""

    name, packages = "Liger", ("liger-kernel",)

    def op(self, op: str, arguments: Arguments) -> Offer:
        if op != "layer_norm":
            return None
        input, shape, weight, bias, _ = arguments
        if input.device.type != "cuda":
            return "it runs on cuda tensors"
        if weight is None or bias is None:
            return "it requires weight and bias"
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        size, normalize = math.prod(shape), LigerLayerNormFunction.apply

        def run(input: Tensor, _: Any, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
            rows = input.reshape(-1, size)
            return normalize(rows, weight.flatten(), bias.flatten(), eps).view_as(input)

        return run


#: Name for ``--peer`` -> peer; rows are in this order.
PEERS: dict[str, Peer] = {
    "ctranslate2": CTranslate2(),
    "flex_attention": FlexAttention(),
    "inductor_tuned": InductorTuned(),
    "liger": Liger(),
    "onednn_prepacked": OneDnnPrepacked(),
    "onnx_runtime": OnnxRuntime(),
    "openvino": OpenVino(),
    "quantize_dynamic": QuantizeDynamic(),
    "torch_compile": TorchCompile(),
    "torchao": TorchAo(),
    "zentorch": Zentorch(),
}
