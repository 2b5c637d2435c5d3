"""OpenVINO on the CPU, from the same ONNX graphs, in full fp32 precision."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from .. import onnx_graph
from . import Offer

NAME = "OpenVINO"
PACKAGES = ("onnx", "openvino")


def available() -> str | None:
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed (pip install {package})"
    return None


def _request(model: bytes) -> Any:
    import openvino

    settings = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        # Without this it computes in bf16 on CPUs that have it, which is other work.
        "INFERENCE_PRECISION_HINT": "f32",
    }
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(model=model), "CPU", settings)
    return compiled.create_infer_request()


def _run(request: Any, inputs: list[Any]) -> Tensor:
    results = request.infer(inputs, share_inputs=True)
    # A copy, as every contender's result is its own.
    return torch.from_numpy(results[0].copy())


def _refuses(x: Tensor) -> str | None:
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return "the graph given to it is for float32 on the CPU"
    return None


def op(op: str, arguments: tuple[Any, ...]) -> Offer:
    if op != "feed_forward":
        return None
    x, weight1, bias1, weight2, bias2, activation, dropout_p, _ = arguments
    if activation != "relu" or dropout_p:
        return "the graph given to it has relu and no dropout"
    if (reason := _refuses(x)) is not None:
        return reason
    request = _request(onnx_graph.feed_forward(list(x.shape), weight1, bias1, weight2, bias2))
    return lambda x, *rest: _run(request, [x.numpy()])


def encoder_layer(layer: torch.nn.TransformerEncoderLayer, arguments: tuple[Any, ...]) -> Offer:
    x, _, padding = arguments
    if (reason := _refuses(x)) is not None:
        return reason
    request = _request(onnx_graph.encoder_layer(layer, x.shape[0], x.shape[1], padding is not None))

    def run(x: Tensor, mask: None, padding: Tensor | None) -> Tensor:
        return _run(request, [x.numpy()] + ([] if padding is None else [padding.numpy()]))

    return run
