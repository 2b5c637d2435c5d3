"""Every limit of every kernel: a call it accepts, one it refuses, and with which sentence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from transformer_fast import _native, dispatch
from transformer_fast.dispatch import Call, Kernel, select, why_not
from transformer_fast.specs import OPS
from transformer_fast.testing import call_of, require_grad

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
KERNELS = [
    pytest.param(kernel, id=f"{op}-{kernel.backend}")
    for op in dispatch.OPS
    for kernel in dispatch.kernels(op)
]


def device_of(kernel: Kernel) -> str:
    return kernel.devices[0] if kernel.devices else "cpu"


def calls_of(kernel: Kernel, requires_grad: bool = False) -> list[tuple[str, Call]]:
    """The op table's calls, as this kernel would meet them on its own device."""
    found = []
    for dtype in DTYPES:
        if kernel.dtypes and dtype not in kernel.dtypes:
            continue
        for case in OPS[kernel.op].cases:
            arguments = case.build(dtype, "cpu", torch.Generator().manual_seed(0))
            if requires_grad:
                names = OPS[kernel.op].gradients_of
                if not kernel.mask_gradient:
                    names = tuple(name for name in names if name != "attn_mask")
                arguments = require_grad(kernel.op, arguments, names)
            found.append((case.name, call_of(kernel.op, arguments)))
        break
    return found


def accepted(kernel: Kernel, **wanted: Any) -> Call:
    """A call of the op table that nothing speaks against, apart from where it would run."""
    here = dataclasses.replace(kernel, devices=(), unavailable=None)
    for _, call in calls_of(kernel, wanted.get("needs_grad", False)):
        wished = all(getattr(call, name) == value for name, value in wanted.items())
        if wished and not why_not(here, call):
            return call
    raise AssertionError(f"no case of {kernel.op} is accepted by {kernel.backend} with {wanted}")


def check_refusal(kernel: Kernel, call: Call, sentence: str) -> None:
    """The sentence is among the reasons, and the named backend raises with it."""
    assert sentence in why_not(kernel, call)
    state = dispatch._State(kernels={kernel.op: (kernel,)})
    before, dispatch._state = dispatch._state, state
    try:
        with pytest.raises(NotImplementedError) as error:
            select(call, kernel.backend)
    finally:
        dispatch._state = before
    assert sentence in str(error.value)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("kernel", KERNELS)
def test_device(kernel):
    call = accepted(kernel)
    if kernel.devices:
        elsewhere = call._replace(
            tensors=tuple(None if t is None else t.to("meta") for t in call.tensors)
        )
        told = f"it supports {' and '.join(kernel.devices)} tensors, and these are on meta"
        check_refusal(kernel, elsewhere, told)
    else:
        assert why_not(dataclasses.replace(kernel, unavailable=None), call) == []


@pytest.mark.parametrize("kernel", KERNELS)
def test_unavailable(kernel):
    call = accepted(kernel)
    absent = dataclasses.replace(kernel, unavailable="the moon is in the wrong quarter")
    check_refusal(absent, call, "the moon is in the wrong quarter")
    if kernel.unavailable is not None:
        check_refusal(kernel, call, kernel.unavailable)


@pytest.mark.parametrize("kernel", KERNELS)
def test_dtype(kernel):
    call = accepted(kernel)
    names = ", ".join(sorted(map(name_of, kernel.dtypes)))
    for dtype in DTYPES:
        cast = in_dtype(call, dtype)
        here = dataclasses.replace(kernel, devices=(), unavailable=None)
        if not kernel.dtypes or dtype in kernel.dtypes:
            assert why_not(here, cast) == []
        else:
            check_refusal(here, cast, f"it supports {names}, and the call has {name_of(dtype)}")


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_dtype(kernel):
    call = accepted(kernel)
    mixed = list(call.tensors)
    if len(mixed) == 1:
        pytest.skip("the op has one tensor of a float type")
    place = max(i for i, t in enumerate(mixed) if t is not None)
    mixed[place] = mixed[place].to(torch.float64)
    here = dataclasses.replace(kernel, devices=(), unavailable=None)
    if kernel.dtypes:
        told = "it needs all tensors in one dtype, and the call mixes dtypes"
        check_refusal(here, call._replace(tensors=tuple(mixed)), told)
    else:
        assert why_not(here, call._replace(tensors=tuple(mixed))) == []


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients(kernel):
    if kernel.gradients:
        assert accepted(kernel, needs_grad=True).needs_grad
    else:
        told = "it has no backward, and the call needs gradients"
        check_refusal(kernel, accepted(kernel)._replace(needs_grad=True), told)


@pytest.mark.parametrize("kernel", KERNELS)
def test_mask_gradient(kernel):
    if kernel.op != "attention" or not kernel.gradients:
        return
    call = accepted(kernel, needs_grad=True)
    query = call.tensors[0]
    mask = torch.zeros(1, 1, 1, 1, dtype=query.dtype, requires_grad=True)
    masked = call._replace(mask=mask, is_causal=False, key_lengths=None)
    told = "its backward does not compute the gradient of attn_mask"
    if kernel.mask_gradient:
        assert told not in why_not(kernel, masked)
    else:
        check_refusal(kernel, masked, told)
        assert told not in why_not(kernel, masked._replace(mask=mask.detach()))


@pytest.mark.parametrize("kernel", KERNELS)
def test_query_lengths(kernel):
    if kernel.op != "attention":
        return
    told = "it does not support query_lengths"
    call = accepted(kernel)._replace(query_lengths=torch.tensor([1]))
    if kernel.query_lengths:
        assert told not in why_not(kernel, call)
    check_refusal(dataclasses.replace(kernel, query_lengths=False), call, told)
    assert told not in why_not(kernel, call._replace(query_lengths=None))


@pytest.mark.parametrize("kernel", KERNELS)
def test_dropout(kernel):
    call = accepted(kernel)
    told = "it does not support dropout"
    for p in (0.1, 1.0):
        if kernel.dropout:
            assert told not in why_not(kernel, call._replace(dropout_p=p))
        else:
            check_refusal(kernel, call._replace(dropout_p=p), told)
    assert told not in why_not(kernel, call._replace(dropout_p=0.0))


@pytest.mark.parametrize("kernel", KERNELS)
def test_activation(kernel):
    call = accepted(kernel)
    theirs = "it supports named activations only, and the call has a callable"
    if kernel.activations is None:
        assert theirs not in why_not(kernel, call._replace(activation=torch.sin))
        return
    check_refusal(kernel, call._replace(activation=torch.sin), theirs)
    check_refusal(kernel, call._replace(activation="mish"), "it does not support activation 'mish'")
    for name in kernel.activations:
        reasons = why_not(kernel, call._replace(activation=name))
        assert not any("activation" in reason for reason in reasons)


# What Kernel.refuses says: for each sentence, what brings it about -------------------------------

Change = Callable[[Call], Call]
MASK = torch.ones(1, 1, 1, 1, dtype=torch.bool)
MASKED = (
    "PyTorch lets NaN at hidden places through, and what a row with nothing to attend to gives "
    "depends on its path, so on CPU tensors it takes unmasked calls only"
)
ROUNDED = "PyTorch's CPU backward keeps half types' statistics in the half type"


MASK_DTYPES = "it reads masks that are bool, float32 or of query's dtype and this one is {}"


def in_dtype(call: Call, dtype: torch.dtype) -> Call:
    return call._replace(tensors=tuple(None if t is None else t.to(dtype) for t in call.tensors))


def training_in(dtype: torch.dtype) -> Change:
    return lambda call: in_dtype(call, dtype)._replace(needs_grad=True)


REFUSED: dict[tuple[str, str], list[tuple[str, Change]]] = {
    ("layer_norm", "torch"): [
        (ROUNDED, training_in(torch.bfloat16)),
        (ROUNDED, training_in(torch.float16)),
    ],
    ("add_layer_norm", "torch"): [(ROUNDED, training_in(torch.bfloat16))],
    ("attention", "cpu"): [
        (MASK_DTYPES.format("float64"), lambda call: call._replace(mask=MASK.double())),
        (MASK_DTYPES.format("float16"), lambda call: call._replace(mask=MASK.half())),
        (MASK_DTYPES.format("bfloat16"), lambda call: call._replace(mask=MASK.bfloat16())),
        (
            MASK_DTYPES.format("float16"),
            lambda call: in_dtype(call, torch.bfloat16)._replace(mask=MASK.half()),
        ),
    ],
    ("attention", "torch"): [
        (MASKED, lambda call: call._replace(mask=MASK)),
        (MASKED, lambda call: call._replace(is_causal=True)),
        (MASKED, lambda call: call._replace(key_lengths=torch.tensor([1]))),
        (
            "PyTorch's fused attention returns no weights",
            lambda call: call._replace(need_weights=True),
        ),
        (
            "PyTorch's attention drops other weights than all backends do on CPU tensors",
            lambda call: call._replace(dropout_p=0.1),
        ),
    ],
}


@pytest.mark.parametrize(
    ("key", "sentence", "change"),
    [(key, *entry) for key, entries in REFUSED.items() for entry in entries],
)
def test_refuses(key, sentence, change):
    op, backend = key
    (kernel,) = (k for k in dispatch.kernels(op) if k.backend == backend)
    call = accepted(kernel)
    assert sentence not in why_not(kernel, call)
    check_refusal(kernel, change(call), sentence)


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_masks_that_the_cpu_reads(dtype):
    """Beside those it refuses above: bool, float32, and float masks of query's dtype."""
    (kernel,) = (k for k in dispatch.kernels("attention") if k.backend == "cpu")
    here = dataclasses.replace(kernel, unavailable=None)
    call = in_dtype(accepted(kernel), dtype)
    for readable in (torch.bool, torch.float32, dtype):
        assert why_not(here, call._replace(mask=MASK.to(readable))) == []


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_that_refuses_is_listed(kernel):
    """A kernel with limits of its own needs their sentences in REFUSED (those of a GPU backend are
    tested beside it)."""
    if kernel.refuses is not None and kernel.backend in ("cpu", "torch"):
        assert (kernel.op, kernel.backend) in REFUSED


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_accept_most_of_what_they_claim(kernel):
    """Limits that refused everything would make every other test of a kernel pass."""
    if kernel.backend == "torch" and kernel.op == "attention":
        return
    here = dataclasses.replace(kernel, devices=(), unavailable=None)
    calls = calls_of(kernel)
    assert sum(not why_not(here, call) for _, call in calls) >= len(calls) / 2


def test_all_reasons_are_told_at_once():
    (kernel,) = (k for k in dispatch.kernels("linear") if k.backend == "cpu")
    x = torch.zeros(2, 2, dtype=torch.float64, device="meta")
    call = Call("linear", (x, x, None, None), False, activation=torch.sin)
    reasons = why_not(dataclasses.replace(kernel, unavailable=None), call)
    assert len(reasons) == 3


def linear_call(op: str, count: int, rows: int, dtype: torch.dtype, grad: bool = True) -> Call:
    """With two matrices of `count` weights, none of which is in memory."""
    x = torch.zeros(rows, 64, dtype=dtype)
    weight = torch.zeros(1, 1, dtype=dtype).expand(count // 64, 64)
    tensors = (x, weight, None, None) if op == "linear" else (x, weight, None, weight.t(), None)
    return Call(op, tensors, grad, activation=None if op == "linear" else "relu")


@pytest.mark.parametrize("op", ["linear", "feed_forward"])
def test_where_the_cpu_leaves_products_to_pytorch(op, isa):
    """On each side of every limit, for the instruction set that it was measured with."""
    (kernel,) = (k for k in dispatch.kernels(op) if k.backend == "cpu")
    least, few, most = {
        ("linear", "avx512_bf16"): (2**22, 256, 256),
        ("feed_forward", "avx512_bf16"): (2**22, 256, 256),
        ("linear", "amx"): (2**18, 23, 23),
        ("feed_forward", "amx"): (2**18, 31, 31),
    }.get((op, isa), (2**18, 0, 0))

    def chosen(count: int, rows: int, dtype: torch.dtype = torch.bfloat16, **how: bool) -> str:
        return select(linear_call(op, count, rows, dtype, **how)).backend

    for count, limit in ((least, few), (2**22, most), (least - 64, 0)):
        for rows in (1, limit, limit + 1, 300):
            expected = "torch" if 1 <= rows <= limit else "cpu"
            assert chosen(count, rows) == expected, (count, rows)
            told = dispatch.why_yields(kernel, linear_call(op, count, rows, torch.bfloat16))
            assert (told is not None) == (expected == "torch")
    if (op, isa) == ("feed_forward", "avx512_bf16"):
        found = [
            chosen(count, rows) for count in (2**20 - 64, 2**20) for rows in (31, 32, 256, 257)
        ]
        assert found == ["cpu"] * 5 + ["torch"] * 2 + ["cpu"]
    assert chosen(2**22, 1, grad=False) == "cpu"
    assert chosen(2**22, 1, torch.float16) == "cpu"
    assert _native.module is not None
    floats = "torch" if _native.module.is_intel() else "cpu"
    assert [chosen(2**12, rows, torch.float32) for rows in (15, 16, 128, 129)] == [
        "cpu", floats, floats, "cpu",
    ]  # fmt: skip


def test_what_follows_a_product_keeps_it(isa):
    """An activation or a residual is added in the kernel's epilogue."""
    call = linear_call("linear", 2**22, 1, torch.bfloat16)
    x = call.tensors[0]
    assert select(call._replace(activation="relu")).backend == "cpu"
    assert select(call._replace(tensors=(*call.tensors[:3], x))).backend == "cpu"
