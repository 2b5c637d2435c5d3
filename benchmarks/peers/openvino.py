"""OpenVINO on the CPU, on ONNX Runtime's graphs: in full fp32 precision, or in bf16 for bf16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import Offer, onnx_runtime

NAME = "OpenVINO"
PACKAGES = ("onnx", "onnxscript", "openvino")

_HINTS = {torch.float32: "f32", torch.bfloat16: "bf16"}


class _Request:
    """A compiled graph. Its first input and its output are of ``dtype``, as our tensors are."""

    def __init__(self, graph: bytes, dtype: torch.dtype) -> None:
        import openvino
        from openvino.preprocess import PrePostProcessor

        settings = {
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            # Without this it computes in bf16 on CPUs that have it, whatever the graph says.
            "INFERENCE_PRECISION_HINT": _HINTS[dtype],
        }
        core = openvino.Core()
        model = core.read_model(model=graph)
        self.half = dtype != torch.float32
        if self.half:
            ends = PrePostProcessor(model)
            ends.input(0).tensor().set_element_type(openvino.Type.bf16)
            ends.output(0).tensor().set_element_type(openvino.Type.bf16)
            model = ends.build()
        self.tensor, self.bf16 = openvino.Tensor, openvino.Type.bf16
        self.request = core.compile_model(model, "CPU", settings).create_infer_request()

    def __call__(self, x: Tensor, *others: Tensor) -> Tensor:
        # NumPy has no bf16: bits go in and come out.
        if self.half:
            bits = x.view(torch.int16).numpy()
            first = self.tensor(bits, list(x.shape), self.bf16)
        else:
            first = x.numpy()
        inputs = {0: first, **{i: other.numpy() for i, other in enumerate(others, start=1)}}
        result = self.request.infer(inputs, share_inputs=True, share_outputs=True)[0]
        # A copy, as every candidate's result is its own.
        found = torch.from_numpy(result.view("int16" if self.half else "float32").copy())
        return found.view(torch.bfloat16) if self.half else found


def op(op: str, arguments: tuple[Any, ...]) -> Offer:
    return onnx_runtime.op_offer(op, arguments, _HINTS, _Request)


def encoder_layer(layer: torch.nn.TransformerEncoderLayer, arguments: tuple[Any, ...]) -> Offer:
    return onnx_runtime.layer_offer(layer, arguments, _HINTS, _Request)
