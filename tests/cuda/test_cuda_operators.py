"""The CUDA C++ operators: results and gradients against fp64, registration in torch, invalid calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import test_operators
import torch
from harness import DTYPES, check_trained, kernel_of

from transformer_fast import dispatch
from transformer_fast.backends import cuda
from transformer_fast.measure import device as on_device
from transformer_fast.specs import OPS
from transformer_fast.testing import (
    check_gradients,
    require_grad,
)

pytestmark = pytest.mark.sampled(30)

KERNELS = {kernel.op: kernel for kernel in cuda.kernels("cuda", None)}
#: Arguments that DTensor replicates, whatever dimension is sharded.
REPLICATED = ("weight", "bias", "seed")
SEED = torch.tensor(0x7123456789ABCDEF)
ops = torch.ops.transformer_fast


def the_kernel(op: str) -> dispatch.Kernel:
    return kernel_of(op, "cuda")


def hold(op: str, arguments: tuple[Any, ...]) -> None:
    check_trained(the_kernel(op), arguments)


def rows_of(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


# Each tile width and the first one beyond it; divisible by the vector width or not.
WIDTHS = (1, 8, 255, 256, 264, 512, 520, 2048, 2056, 8192, 8200, 8193)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_of_every_width(width, dtype, device):
    count = 37 if width <= 512 else 11  # more rows than threads run at once
    input, residual = (rows_of((count, width), dtype, device, seed) for seed in (1, 2))
    weight, bias = (rows_of((width,), dtype, device, seed) for seed in (3, 4))
    seed = SEED.to(device)
    hold("add_layer_norm", (input, residual, (width,), weight, bias, 1e-5, 0.3, seed))
    hold("layer_norm", (input, (width,), None, bias, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [1, 3, 1000, 1024, 1025, 1032, 5000, 9000])
def test_losses_of_every_width(classes, dtype, device):
    logits = 5 * rows_of((6, classes), dtype, device, 1)
    target = torch.arange(6, device=device) * 7 % classes
    target[2] = -100
    logits[2] = torch.nan
    hold("cross_entropy", (logits, target, -100, 0.1))
    hold("cross_entropy", (logits.t().contiguous().t(), target, -100, 0.0))


# A block's columns and one vector more, vectorized or not; several blocks of rows.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "units"), [(1, 128), (9, 256), (70, 264), (5, 257), (3, 1)])
@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
def test_epilogues_of_every_shape(rows, units, activation, dtype, device):
    x, residual = (rows_of((rows, n), dtype, device, 1) for n in (24, units))
    first, second = (rows_of(s, dtype, device, 2) / 4 for s in ((units, 24), (16, units)))
    bias1, bias2 = (rows_of((n,), dtype, device, 3) for n in (units, 16))
    hold("linear", (x, first, bias1, activation, residual))
    seed = SEED.to(device)
    hold("feed_forward", (x, first, bias1, second, bias2, activation, 0.3, seed))
    hold("feed_forward", (x, first, None, second, bias2, activation, 1.0, None))


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_activations_at_large_and_nan_inputs(activation, device):
    """Values and derivatives where exponentials overflow, and at NaN."""
    x = torch.tensor([-3e38, -1e5, -90.0, -87.0, -20.0, -1e-30, -0.0, 0.0, 1e-30, 20.0, 90.0, 1e5])
    x = x.to(device)[:, None]
    one = torch.ones(1, 1, device=device)
    hold("linear", (x, one, None, activation, None))
    wild = torch.tensor([torch.nan, torch.inf, -torch.inf], device=device)[:, None]
    wild.requires_grad_()
    found = []
    for run in (the_kernel("linear").run, OPS["linear"].reference):
        y = run(wild, one, None, activation, None)
        found.append(torch.stack((y.detach(), *torch.autograd.grad(y.sum(), wild))))
    mine, reference = found
    assert mine[0, 0].isnan()
    # For infinity PyTorch's own gelu returns NaN on some devices.
    torch.testing.assert_close(mine[~reference.isnan()], reference[~reference.isnan()])


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_the_second_derivative_and_nan_of_relu(dropout_p, device):
    """For ReLU the hidden units are saved instead of its inputs."""
    tensors = [
        rows_of(s, torch.float32, device, i) for i, s in enumerate(((9, 24), (40, 24), (16, 40)))
    ]
    x, w1, w2 = tensors
    arguments = (x, w1, None, w2, None, "relu", dropout_p, SEED.to(device))
    check_gradients("feed_forward", the_kernel("feed_forward").run, arguments, twice=True)
    # ReLU of NaN is NaN, and has a gradient, as in the reference.
    x[3, 5] = torch.nan
    for again in (False, True):
        found = []
        for run in (the_kernel("feed_forward").run, OPS["feed_forward"].reference):
            given = require_grad("feed_forward", arguments)
            tensors = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
            found.append(torch.autograd.grad(run(*given).sum(), tensors, create_graph=again))
        for mine, reference in zip(*found, strict=True):
            torch.testing.assert_close(mine, reference, equal_nan=True)


def test_autocast_does_not_affect_products(device):
    x, w = (rows_of((5, 24), torch.float32, device, seed) for seed in (1, 2))
    expected = the_kernel("linear").run(x, w, None, "gelu", None)
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(the_kernel("linear").run(x, w, None, "gelu", None), expected)


@pytest.mark.parametrize("far", [1.0, 1e3, 1e4])
def test_norms_far_from_zero(far, device):
    input = rows_of((5, 768), torch.float32, device, 1) + far
    hold("layer_norm", (input, (768,), None, None, 1e-5))


def test_norms_of_strided_rows(device):
    every = rows_of((4, 6, 512), torch.bfloat16, device, 1)
    weight = rows_of((1024,), torch.bfloat16, device, 2)[::2]
    for input in (every[:, ::2], every[:, 1], every.transpose(0, 1), every.flip(0)[..., 3:499]):
        width = input.shape[-1]
        hold("layer_norm", (input, (width,), weight[:width], None, 1e-5))


#: Function of a (2, 5, 24) input -> the arguments of an invalid norm, and a part of the error
#: message.
WRONG_NORMS = {
    "float64": (lambda x: (x.double(), None, None, None, 1, 1e-5, 0, 0.0, None), "dtype"),
    "dimensions": (lambda x: (x, None, None, None, 4, 1e-5, 0, 0.0, None), "the last 4 .* of 3"),
    "weight": (lambda x: (x, None, x[0, 0, :5], None, 1, 1e-5, 0, 0.0, None), "24 elements"),
    "weight's dtype": (lambda x: (x, None, x[0, 0].half(), None, 1, 1e-5, 0, 0.0, None), "weight"),
    "residual": (lambda x: (x, x[0], None, None, 1, 1e-5, 0, 0.0, None), "shape of input"),
    "no seed": (lambda x: (x, x, None, None, 1, 1e-5, 0, 0.5, None), "seed"),
    "probability": (lambda x: (x, x, None, None, 1, 1e-5, 0, 1.5, None), "dropout_p"),
}
#: The same for an invalid linear layer with a (5, 24) input.
WRONG_MAPS = {
    "float64": (lambda x: (x.double(), x.double(), None, None, 0, False), "dtype"),
    "weight's dtype": (lambda x: (x, x.half(), None, None, 0, False), "weight"),
    "columns": (lambda x: (x, x[:, 1:], None, None, 0, False), "column of input"),
    "bias": (lambda x: (x, x, x[0], None, 0, False), "each row of weight"),
    "residual": (lambda x: (x, x, None, x, 0, False), "shape of the result"),
    "activation": (lambda x: (x, x, None, None, 5, False), "no activation 5"),
    "keep": (lambda x: (x, x, None, None, 0, True), "no preactivation"),
}


@pytest.mark.parametrize("name", sorted({*WRONG_NORMS, *WRONG_MAPS}))
def test_invalid_calls_raise(name, device):
    for calls, operator, shape in (
        (WRONG_NORMS, ops.layer_norm_training, (2, 5, 24)),
        (WRONG_MAPS, ops.linear_training, (5, 24)),
    ):
        if name in calls:
            make, words = calls[name]
            with pytest.raises(RuntimeError, match=words):
                operator.cuda(*make(rows_of(shape, torch.float32, device, 1)))


@pytest.mark.parametrize("op", KERNELS)
def test_checks_on_gpus_cover_the_backend(op, device):
    """A small case passes in forward and backward, and wrong results are detected."""
    kernel, case = the_kernel(op), OPS[op].cases[0]
    for run, right in ((kernel.function, True), (doubled(kernel), False)):
        dispatch.register(replace(kernel, function=run))
        for gradients in (False, True):
            trial = on_device.Trial(case, torch.bfloat16, gradients, torch.device(device))
            _, wrong = trial.check(trial.work(the_kernel(op).run))
            assert (wrong is None) == right


def doubled(kernel: dispatch.Kernel) -> Any:
    def run(arguments: Any) -> Any:
        results = kernel.function(arguments)
        return (2 * results[0], *results[1:]) if isinstance(results, tuple) else 2 * results

    return run


NAMES = ["cross_entropy.cuda", "cross_entropy_backward.cuda"] + [
    f"{op}_{half}.cuda"
    for op in ("attention", "layer_norm", "linear", "feed_forward")
    for half in ("training", "backward")
]


@pytest.mark.parametrize("name", NAMES)
def test_operators_have_sharding_rules(name, operators):
    schema = test_operators.schemas()[name]
    test_operators.rule_names_what_there_is(name, schema)
    rule = test_operators.rule_of(name)
    assert bool(rule.products) == test_operators.multiplies_matrices(name)
    assert {token.partition(":")[0] for token in rule.arguments.split()} >= {
        argument.name
        for argument in schema.arguments
        if "Tensor" in str(argument.type) and argument.name not in REPLICATED
    }
