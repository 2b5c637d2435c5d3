"""Which kernel the dispatcher selects, its explanations, and every limit of every kernel."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from harness import kernel_of, python
from torch import Tensor
from torch._subclasses import FakeTensorMode

import transformer_fast
from transformer_fast import (
    _switches,
    dispatch,
    functional,
    nn,
    proof,
    reference,
    strict,
    use_backend,
)
from transformer_fast.dispatch import (
    Call,
    Kernel,
    PreferLater,
    make_call,
    register,
    rows,
    select,
    why_not,
)
from transformer_fast.ops.arguments import (
    RECORDS,
    AttentionArguments,
    LinearArguments,
)
from transformer_fast.specs import OPS
from transformer_fast.testing import call_of, require_grad

FLOAT = frozenset({torch.float32})
X = torch.zeros(2, 3)


def linear(*tensors: Tensor | None, grad: bool = False, activation: Any = None) -> Call:
    """Returns a call of linear; tensors are its input, weight, bias and residual."""
    x, weight, bias, residual = (*tensors, None, None, None)[:4]
    return make_call(LinearArguments(x, weight, bias, activation, residual), grad)  # type: ignore[arg-type]


CALL = linear(X)


def runs_as(name):
    """Returns a kernel function that returns the name."""
    return lambda arguments: name


@pytest.fixture
def table(monkeypatch):
    """Installs an empty table of kernels; returns a function that adds a kernel for linear."""
    monkeypatch.setattr(dispatch, "registry", dispatch.Registry(kernels={"linear": ()}))

    def add(backend, op="linear", **limits):
        register(Kernel(op, backend, runs_as(backend), **limits))

    return add


# Arguments records -------------------------------------------------------------------------------


@pytest.mark.parametrize("op", RECORDS)
def test_records_have_the_parameters_of_the_reference(op):
    parameters = list(inspect.signature(getattr(reference, op)).parameters)
    if op == "attention":  # `reference.supports_query_lengths` adds some
        parameters.remove("softcap")
        parameters += ["query_lengths", "longest", "softcap", "contiguous"]
    assert list(RECORDS[op]._fields) == parameters
    assert type(RECORDS[op](*parameters)).op == op


# Selection ---------------------------------------------------------------------------------------


def test_the_table_has_every_op_and_ends_in_the_reference():
    for op in dispatch.OPS:
        backends = [kernel.backend for kernel in dispatch.kernels(op)]
        assert backends[-1] == "reference"
        assert backends == sorted(backends, key=dispatch.BACKENDS.index)
        assert len(set(backends)) == len(backends)
    assert dispatch.BACKENDS == ("cuda", "triton", "cpu", "torch", "reference")


def test_the_order_of_backends_does_not_depend_on_registration(table):
    for backend in ("reference", "cpu", "triton", "torch", "cuda"):
        table(backend)
    for backend in dispatch.BACKENDS:
        assert select(CALL).backend == backend
        table(backend, unavailable="it is not here")  # replaces the earlier kernel of the backend
    assert len(dispatch.kernels("linear")) == 5


LIMITS = [
    {},
    {"dtypes": FLOAT},
    {"dtypes": frozenset({torch.float32, torch.float64})},
    {"devices": ("cpu",)},
    {"devices": ("cuda", "meta")},
    {"gradients": True},
    {"gradients": True, "mask_gradient": True},
    {"dropout": True},
    {"activations": frozenset({None, "relu"})},
    {"refuses": lambda call: "it is causal" if getattr(call.arguments, "is_causal", 0) else None},
    {"unavailable": "it is not here"},
    {"proven": frozenset()},
]


def _calls() -> Iterator[Call]:
    some: list[tuple[Any, ...]] = [
        (X,), (X.double(), None), (X, X.double()), (X.to("meta"), X), (X.half(),),
    ]  # fmt: skip
    for tensors in some:
        for grad in (False, True):
            for activation in (None, "relu", "gelu", torch.sin):
                yield linear(*tensors, grad=grad, activation=activation)
        query, key = (*tensors, X)[:2]
        for p in (0.0, 0.5):
            for mask in (None, torch.zeros(3), torch.zeros(3, requires_grad=True)):
                for causal in (False, True):
                    arguments = AttentionArguments(query, key, key, mask, None, causal, None, p)
                    yield make_call(arguments, mask is not None and mask.requires_grad)


CALLS = list(_calls())


@pytest.mark.parametrize("one", LIMITS)
def test_selection_and_explanation_agree(table, monkeypatch, one):
    """Compares the fast checks of selection with those that build sentences."""
    # No validation record covers these calls.
    monkeypatch.setattr(dispatch.proof, "why_not", lambda *_: "not validated here")
    for other in LIMITS:
        limits = {"devices": ("cpu",), "gradients": True, **one, **other}
        for op in ("linear", "attention"):
            table("cpu", op, **limits)
            table("reference", op, gradients=True, mask_gradient=True, dropout=True)
        chosen = [select(call).backend for call in CALLS]
        message = [
            "cpu" if dispatch.explain_call(call).reasons["cpu"] == [] else "reference"
            for call in CALLS
        ]
        assert chosen == message
        assert message == [
            "cpu" if kernel.proven is None and not why_not(kernel, call) else "reference"
            for call in CALLS
            for kernel in dispatch.kernels(call.op)[:1]
        ]


FEW = PreferLater(rows, range(1, 4), "few rows are faster there", FLOAT, needs_grad=True)


def test_a_kernel_may_prefer_a_later_backend(table):
    table("cpu", gradients=True, prefers_later=(FEW,))
    table("torch", gradients=True)
    table("reference", gradients=True)
    [cpu, *_] = dispatch.kernels("linear")
    yielding = linear(X, grad=True)
    others = [
        linear(X),
        linear(X.expand(2, 2, 3), grad=True),
        linear(X.double(), grad=True),
        linear(X[:0], grad=True),
    ]
    assert select(yielding).backend == "torch"
    assert [select(call).backend for call in others] == ["cpu"] * 4
    assert [dispatch.why_prefers_later(cpu, call) for call in others] == [None] * 4
    explanation = dispatch.explain_call(yielding)
    assert explanation.backend == "torch"
    assert explanation.reasons["cpu"] == ["few rows are faster there"]
    # A named backend runs every call that it supports.
    assert select(yielding, "cpu").backend == "cpu"
    assert why_not(cpu, yielding) == []
    with strict():
        assert select(yielding).backend == "torch"


def test_the_reference_is_never_preferred(table):
    table("cpu", gradients=True, prefers_later=(FEW,))
    table("torch", gradients=True, unavailable="it is elsewhere")
    table("reference", gradients=True)
    yielding = linear(X, grad=True)
    for strictly in (False, True):
        with strict(strictly):
            assert select(yielding).backend == "cpu"
    assert dispatch.explain_call(yielding).backend == "cpu"


@pytest.mark.thorough
def test_preferences_are_ignored_while_tracing():
    """The number of rows is dynamic there."""
    kernel = kernel_of("linear")
    one = dataclasses.replace(kernel, prefers_later=(dataclasses.replace(FEW, when=None),))
    assert dispatch.why_prefers_later(one, linear(X, grad=True)) is not None

    @torch.compile(backend="eager", fullgraph=True)
    def asked(x):
        return x + (dispatch.why_prefers_later(one, linear(x, grad=True)) is None)

    assert torch.equal(asked(X), X + 1)


def test_kernels_run_only_on_gpus_they_are_validated_on(table, monkeypatch):
    table("reference")
    table("triton", proven=frozenset({90, 80}))
    with FakeTensorMode():
        call = linear(torch.empty(2, 2, device="cuda"))
    for capability, why in {(8, 0): None, (9, 0): None, (10, 3): "sm_103", (8, 9): "sm_89"}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        monkeypatch.setattr(proof, "record_of", lambda device, w=why: (None, f"no file for {w}"))
        assert select(call).backend == ("triton" if why is None else "reference")
        assert select(call, "triton").backend == "triton"
        [triton, _] = dispatch.kernels("linear")
        message = dispatch.why_unproven(triton, call)
        assert dispatch.explain_call(call).reasons["triton"] == ([] if why is None else [message])
        if why is not None:
            assert message == (
                f"not validated on this machine yet (no file for {why}), "
                "so it is used only if selected by name"
            )
    assert select(CALL).backend == "reference"
    [message] = dispatch.explain_call(CALL).reasons["triton"]
    assert (
        message
        == "validated on sm_80 and sm_90 only, so elsewhere it is used only if selected by name"
    )


def test_named_backend_never_falls_back(table):
    table("reference")
    table("cpu", dtypes=FLOAT, activations=frozenset({None}))
    call = linear(X.double(), grad=True, activation="relu")
    with pytest.raises(NotImplementedError) as error:
        select(call, "cpu")
    assert str(error.value) == (
        "backend 'cpu' does not support this call of linear: it supports float32, and the call has "
        "float64; it has no backward, and the call needs gradients; it does not support activation "
        "'relu'."
    )


def test_naming_a_backend_without_a_kernel_raises(table):
    table("reference")
    with pytest.raises(NotImplementedError, match=r"^backend 'cuda' has no kernel for linear\.$"):
        select(CALL, "cuda")


@pytest.mark.parametrize("name", ["gpu", "CPU", ""])
def test_unknown_backends_raise(name):
    message = f"backend must be one of cuda, triton, cpu, torch, reference, not {name!r}"
    for called in (
        lambda: select(CALL, name),
        lambda: functional.linear(X, X, backend=name),
        lambda: use_backend(name).__enter__(),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            called()


@pytest.mark.parametrize(("op", "backend"), [("conv", "cpu"), ("linear", "mps")])
def test_registering_unknown_ops_or_backends_raises(op, backend):
    with pytest.raises(ValueError, match="unknown op or backend"):
        register(Kernel(op, backend, runs_as("x")))


# use_backend and strict --------------------------------------------------------------------------


def test_use_backend_does_not_fall_back(table):
    table("reference")
    table("cpu", unavailable="it was not built")
    with use_backend("cpu"), pytest.raises(NotImplementedError, match="it was not built"):
        select(CALL)
    with use_backend("cpu"):  # the call's argument takes precedence
        assert select(CALL, "reference").backend == "reference"


def test_strict_refuses_the_reference_with_the_reasons(table):
    table("reference")
    table("torch", unavailable="it is elsewhere")
    table("cpu", dtypes=frozenset({torch.float64}))
    table("triton", proven=frozenset())
    with strict():
        with pytest.raises(NotImplementedError) as error:
            select(CALL)
        assert str(error.value).splitlines() == [
            "strict mode: no kernel supports this call of linear:",
            "  triton: not validated on a GPU yet, so it is used only if selected by name.",
            "  cpu: it supports float64, and the call has float32.",
            "  torch: it is elsewhere.",
        ]
        with strict(False):
            assert select(CALL).backend == "reference"
        assert select(CALL, "reference").backend == "reference"  # a named backend is exempt
        assert select(linear(X.double())).backend == "cpu"
    assert select(CALL).backend == "reference"


# explain -----------------------------------------------------------------------------------------


def test_explain_groups_backends_of_other_devices_at_the_end():
    explanation = transformer_fast.explain("linear", X, X, activation=torch.sin)  # a callable
    assert str(explanation).splitlines() == [
        "linear runs on 'reference'.",
        "  not 'cpu', 'torch': it supports named activations only, and the call has a callable.",
        "  not 'cuda', 'triton': the tensors are on the CPU.",
        f"  call: linear(input float32 {(*X.shape,)}, weight float32 {(*X.shape,)}, activation sin)",
    ]
    assert explanation.reasons["cuda"] == ["the tensors are on the CPU"]
    with strict():
        explanation = transformer_fast.explain("linear", X, X, activation=torch.sin)
        with pytest.raises(NotImplementedError) as error:
            functional.linear(X, X, activation=torch.sin)
    assert str(explanation).startswith("linear cannot run on any backend.")
    assert explanation.reasons["reference"] == ["strict mode excludes it"]
    assert str(error.value).endswith("\n  cuda, triton: the tensors are on the CPU.")


@pytest.mark.parametrize(
    ("name", "function", "arguments", "options"),
    [
        ("layer_norm", functional.layer_norm, (X, (3,)), {}),
        ("add_layer_norm", functional.add_layer_norm, (X, X, 3), {"dropout_p": 0.1}),
        (
            "attention",
            functional.scaled_dot_product_attention,
            (X, X, X),
            {"is_causal": True, "need_weights": True},
        ),
        ("linear", functional.linear, (X, X), {"activation": torch.sin}),
        ("feed_forward", functional.feed_forward, (X, X, None, X.t(), None), {}),
    ],
)
def test_explain_takes_functions_and_names(name, function, arguments, options):
    by_name = transformer_fast.explain(name, *arguments, **options)
    by_function = transformer_fast.explain(function, *arguments, **options)
    assert by_name == by_function
    assert by_name.op == name
    assert str(by_name).startswith(f"{name} runs on '{by_name.backend}'.")
    assert set(by_name.reasons) == {kernel.backend for kernel in dispatch.kernels(name)}
    named = transformer_fast.explain(name, *arguments, **options, backend="reference")
    assert named.backend == "reference"
    with use_backend("reference"):
        assert transformer_fast.explain(name, *arguments, **options).backend == "reference"


LONG = torch.randn(64, 3)


@pytest.mark.parametrize(
    ("module", "arguments", "same"),
    [
        (nn.Linear(3, 3), (LONG,), lambda m: ("linear", LONG, m.weight, m.bias)),
        (nn.LayerNorm(3), (LONG,), lambda m: ("layer_norm", LONG, (3,), m.weight, m.bias)),
        (nn.RMSNorm(3), (LONG,), lambda m: ("rms_norm", LONG, (3,), m.weight)),
        (
            nn.CrossEntropyLoss(label_smoothing=0.1),
            (LONG, torch.zeros(64).long()),
            lambda m: (
                "cross_entropy",
                LONG,
                torch.zeros(64).long(),
                None,
                None,
                -100,
                None,
                "mean",
                0.1,
            ),
        ),
        (
            nn.TransformerEncoderLayer(64, 2, 64),
            (torch.randn(1, 2, 64),),
            lambda m: ("encoder_layer", m, torch.randn(1, 2, 64)),
        ),
    ],
    ids=["linear", "layer_norm", "rms_norm", "cross_entropy", "encoder_layer"],
)
def test_explain_takes_a_module(module, arguments, same):
    assert transformer_fast.explain(module, *arguments) == transformer_fast.explain(*same(module))


class Twice(nn.Linear):
    def forward(self, input):
        return super().forward(super().forward(input))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (torch.nn.Linear(3, 3), "use transformer_fast.nn or transformer_fast.accelerate"),
        (nn.MultiheadAttention(4, 2), "explain its ops, for example explain"),
        (Twice(3, 3), "Twice is not one op"),
    ],
    ids=["torch.nn", "several ops", "subclass"],
)
def test_explain_of_unsupported_modules_says_what_to_do(module, message):
    with pytest.raises(TypeError, match=message):
        transformer_fast.explain(module, X)


@pytest.mark.parametrize("op", ["conv", torch.relu, 3])
def test_explain_of_unknown_ops_raises(op):
    with pytest.raises(ValueError, match=r"^op must be one of layer_norm, add_layer_norm, "):
        transformer_fast.explain(op, X)


def test_explain_bad_call_raises_like_the_function():
    with pytest.raises(RuntimeError, match="Given normalized_shape="):
        transformer_fast.explain("layer_norm", X, (5,))


# Environment -------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_environment_variables_apply_to_a_new_process():
    code = (
        "import torch, transformer_fast as t\n"
        "x = torch.zeros(2, 3)\n"
        "print(t.explain('layer_norm', x, 3).backend)\n"
        "with t.use_backend(None):\n"
        "    try: t.functional.linear(x, x, activation=torch.sin)\n"
        "    except NotImplementedError as error: print(str(error).splitlines()[0])\n"
    )
    done = python("-c", code, TRANSFORMER_FAST_BACKEND="torch", TRANSFORMER_FAST_STRICT="1")
    assert done.stdout.splitlines() == [
        "torch",
        "strict mode: no kernel supports this call of linear:",
    ]


@pytest.mark.parametrize("value", ["", "0", "12", "4096"])
def test_whole_numbers_in_the_environment_are_read(monkeypatch, value):
    monkeypatch.setenv("TRANSFORMER_FAST_PACKED_MB", value)
    assert _switches.count("TRANSFORMER_FAST_PACKED_MB", 5) == (int(value) if value else 5)


@pytest.mark.parametrize("value", ["4g", "-1", "1.5", " 3", "\u0663", "inf"])
def test_other_values_than_whole_numbers_raise(monkeypatch, value):
    monkeypatch.setenv("TRANSFORMER_FAST_PACKED_MB", value)
    with pytest.raises(ValueError, match=r"^TRANSFORMER_FAST_PACKED_MB must be a whole number"):
        _switches.count("TRANSFORMER_FAST_PACKED_MB", 5)


@pytest.mark.thorough
def test_commands_report_invalid_variables_in_one_line():
    """`_read_environment` is tested in test_switches.py."""
    name = "TRANSFORMER_FAST_BACKEND"
    done = python("-m", "transformer_fast", "info", status=1, **{name: "fastest"})
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{name} must be one of cuda, triton, cpu,")


# Cost --------------------------------------------------------------------------------------------


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
KERNELS = [
    pytest.param(kernel, id=f"{op}-{kernel.backend}")
    for op in dispatch.OPS
    for kernel in dispatch.kernels(op)
]


def calls_of(kernel: Kernel, requires_grad: bool = False) -> list[tuple[str, Call]]:
    """Returns the op table's calls, with tensors on a device that the kernel supports."""
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
    """Returns a call of the op table that the kernel supports, apart from the device."""
    here = dataclasses.replace(kernel, devices=(), unavailable=None)
    for _, call in calls_of(kernel, wanted.get("needs_grad", False)):
        if all(getattr(call, name) == value for name, value in wanted.items()) and not why_not(
            here, call
        ):
            return call
    raise AssertionError(f"no case of {kernel.op} is accepted by {kernel.backend} with {wanted}")


def check_refusal(kernel: Kernel, call: Call, sentence: str) -> None:
    """Checks that the sentence is a reason, and that the named backend raises with it."""
    assert sentence in why_not(kernel, call)
    state = dispatch.Registry(kernels={kernel.op: (kernel,)})
    before, dispatch.registry = dispatch.registry, state
    try:
        with pytest.raises(NotImplementedError) as error:
            select(call, kernel.backend)
    finally:
        dispatch.registry = before
    assert sentence in str(error.value)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def with_tensors(call: Call, change: Callable[[Tensor], Tensor], count: int = 99) -> Call:
    """Returns the call with ``change`` applied to its first ``count`` tensors."""
    before = [tensor for tensor in call.tensors[:count] if tensor is not None]
    changed = {id(tensor): change(tensor) for tensor in before}
    return with_arguments(call, [changed.get(id(value), value) for value in call.arguments])


def with_arguments(call: Call, values: Iterable[Any]) -> Call:
    return make_call(call.arguments._make(values), call.needs_grad)


def changed(call: Call, needs_grad: bool | None = None, **arguments: Any) -> Call:
    """Returns the call with other arguments."""
    grad = call.needs_grad if needs_grad is None else needs_grad
    return make_call(call.arguments._replace(**arguments), grad)


def in_dtype(call: Call, dtype: torch.dtype) -> Call:
    return with_tensors(call, lambda tensor: tensor.to(dtype))


def learned_mask(call: Call) -> Call:
    mask = torch.zeros(1, 1, 1, 1, dtype=call.tensors[0].dtype, requires_grad=True)
    return changed(call, True, attn_mask=mask, is_causal=False, key_lengths=None)


def accepts(kernel: Kernel, call: Call) -> bool:
    return why_not(dataclasses.replace(kernel, devices=(), unavailable=None), call) == []


@pytest.mark.parametrize("kernel", KERNELS)
def test_calls_on_other_devices_are_refused(kernel):
    call = accepted(kernel)
    elsewhere = with_tensors(call, lambda tensor: tensor.to("meta"))
    assert accepts(kernel, elsewhere)
    if kernel.devices:
        message = f"it supports {' and '.join(kernel.devices)} tensors, and these are on meta"
        check_refusal(kernel, elsewhere, message)
    for why in {"the moon is in the wrong quarter", kernel.unavailable} - {None}:
        check_refusal(dataclasses.replace(kernel, unavailable=why), call, why)


@pytest.mark.parametrize("kernel", KERNELS)
def test_calls_in_other_dtypes_are_refused(kernel):
    call = accepted(kernel)
    names = ", ".join(sorted(map(name_of, kernel.dtypes)))
    for dtype in DTYPES:
        if not kernel.dtypes or dtype in kernel.dtypes:
            assert accepts(kernel, in_dtype(call, dtype))
        else:
            message = f"it supports {names}, and the call has {name_of(dtype)}"
            check_refusal(kernel, in_dtype(call, dtype), message)
    tensors = [tensor for tensor in call.tensors if tensor is not None]
    if len(tensors) > 1:
        last = tensors[-1]
        other = with_tensors(call, lambda x: x.double() if x is last else x)
        message = "it needs all tensors in one dtype, and the call mixes dtypes"
        if not kernel.dtypes:
            assert accepts(kernel, other)
        elif kernel.same_dtype is None:
            check_refusal(kernel, other, message)
        else:
            message = message.replace(", and", ", or weight and bias in float32, and")
            check_refusal(kernel, other, message)
            check_float_weights(kernel, in_dtype(call, torch.bfloat16), message)


def check_float_weights(kernel: Kernel, call: Call, message: str) -> None:
    """Checks float32 parameters with low-precision rows: weight and bias together, never bias
    alone."""
    count = kernel.same_dtype
    assert count is not None
    rows, (weight, *bias) = call.tensors[:count], call.tensors[count:]
    wide = {id(one): one.float() for one in (weight, *bias) if one is not None}
    values = [wide.get(id(value), value) for value in call.arguments]
    assert accepts(kernel, with_arguments(call, values))
    if bias and bias[0] is not None and weight is not None:
        for wrong in (
            {"weight": weight.float()},
            {"bias": bias[0].float()},
            {"weight": None, "bias": bias[0].float()},
        ):
            check_refusal(kernel, changed(call, **wrong), message)
    if len(rows) == 2:
        check_refusal(kernel, changed(call, residual=rows[1].float()), message)


CALLABLE = "it supports named activations only, and the call has a callable"
#: Limit -> (the reason that the kernel gives, a function that changes a call to exceed the limit).
ABLE: dict[str, tuple[str, Callable[[Call], Call]]] = {
    "gradients": (
        "it has no backward, and the call needs gradients",
        lambda call: changed(call, needs_grad=True),
    ),
    "mask_gradient": ("its backward does not compute the gradient of attn_mask", learned_mask),
    "query_lengths": (
        "it does not support query_lengths",
        lambda call: changed(call, query_lengths=torch.tensor([1])),
    ),
    "dropout": ("it does not support dropout", lambda call: changed(call, dropout_p=0.1)),
    "activations": (CALLABLE, lambda call: changed(call, activation=torch.sin)),
}


@pytest.mark.parametrize("limit", ABLE)
@pytest.mark.parametrize("kernel", KERNELS)
def test_optional_features_are_supported_or_refused(kernel, limit):
    field = {"mask_gradient": "attn_mask", "dropout": "dropout_p", "activations": "activation"}
    if field.get(limit, limit) not in (*RECORDS[kernel.op]._fields, "gradients"):
        return
    learns = limit == "gradients" and kernel.gradients
    call = accepted(kernel, needs_grad=True) if learns else accepted(kernel)
    message, change = ABLE[limit]
    assert message not in why_not(kernel, call)
    kernel = dataclasses.replace(kernel, gradients=kernel.gradients or limit == "mask_gradient")
    has = getattr(kernel, limit)
    if has is None or has is True:
        assert message not in why_not(kernel, change(call))
    none = frozenset() if limit == "activations" else False
    check_refusal(dataclasses.replace(kernel, **{limit: none}), change(call), message)
    for name in has if isinstance(has, frozenset) else ():
        assert not any("activation" in r for r in why_not(kernel, changed(call, activation=name)))
    if isinstance(has, frozenset):
        message = "it does not support activation 'mish'"
        check_refusal(kernel, changed(call, activation="mish"), message)


# Kernel.refuses: each sentence, and the call that causes it --------------------------------------

Change = Callable[[Call], Call]
MASK = torch.ones(1, 1, 1, 1, dtype=torch.bool)
MASKED = (
    "used only for calls without a mask, because PyTorch lets NaNs through masked positions and "
    "treats fully masked rows inconsistently"
)
ROUNDED = "PyTorch's backward keeps the statistics in low precision on the CPU"


MASK_DTYPES = "it supports masks in bool, float32 or query's dtype, and this one is {}"


def training_in(dtype: torch.dtype) -> Change:
    return lambda call: changed(in_dtype(call, dtype), needs_grad=True)


DEEP_WEIGHT = torch.zeros(1, 65537, dtype=torch.int8)
DEEP = "it supports int8 weights of at most 65536 columns, and one has 65537"
REFUSED: dict[tuple[str, str], list[tuple[str, Change]]] = {
    ("layer_norm", "torch"): [
        (ROUNDED, training_in(torch.bfloat16)),
        (ROUNDED, training_in(torch.float16)),
    ],
    ("add_layer_norm", "torch"): [(ROUNDED, training_in(torch.bfloat16))],
    ("attention", "cpu"): [
        (MASK_DTYPES.format("float64"), lambda call: changed(call, attn_mask=MASK.double())),
        (MASK_DTYPES.format("float16"), lambda call: changed(call, attn_mask=MASK.half())),
        (MASK_DTYPES.format("bfloat16"), lambda call: changed(call, attn_mask=MASK.bfloat16())),
        (
            MASK_DTYPES.format("float16"),
            lambda call: changed(in_dtype(call, torch.bfloat16), attn_mask=MASK.half()),
        ),
    ],
    ("attention", "torch"): [
        (MASKED, lambda call: changed(call, attn_mask=MASK)),
        (MASKED, lambda call: changed(call, is_causal=True)),
        (MASKED, lambda call: changed(call, key_lengths=torch.tensor([1]))),
        (
            "PyTorch's fused attention returns no weights",
            lambda call: changed(call, need_weights=True),
        ),
        (
            "PyTorch's attention draws another dropout pattern than this package's backends",
            lambda call: changed(call, dropout_p=0.1),
        ),
    ],
    ("int8_linear", "cpu"): [(DEEP, lambda call: changed(call, weight=DEEP_WEIGHT))],
    ("int8_feed_forward", "cpu"): [
        (DEEP, lambda call: changed(call, weight1=DEEP_WEIGHT)),
        (DEEP, lambda call: changed(call, weight2=DEEP_WEIGHT)),
    ],
}


@pytest.mark.parametrize(
    ("key", "sentence", "change"),
    [(key, *entry) for key, entries in REFUSED.items() for entry in entries],
)
def test_own_limits_are_refused_with_their_sentence(key, sentence, change):
    op, backend = key
    kernel = kernel_of(op, backend)
    call = accepted(kernel)
    assert sentence not in why_not(kernel, call)
    check_refusal(kernel, change(call), sentence)


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_supported_mask_dtypes_on_the_cpu(dtype):
    """In addition to those refused above: bool, float32, and float masks of query's dtype."""
    kernel = kernel_of("attention")
    here = dataclasses.replace(kernel, unavailable=None)
    call = in_dtype(accepted(kernel), dtype)
    for readable in (torch.bool, torch.float32, dtype):
        assert why_not(here, changed(call, attn_mask=MASK.to(readable))) == []


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_that_refuses_is_listed(kernel):
    """The sentences of a kernel's own limits have to be in REFUSED.

    Those of the GPU backends are tested in their folders.
    """
    if kernel.refuses is not None and kernel.backend in ("cpu", "torch"):
        assert (kernel.op, kernel.backend) in REFUSED


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_accept_calls_within_their_limits(kernel):
    """If the limits refused everything, every other test of a kernel would pass."""
    if kernel.backend == "torch" and kernel.op == "attention":
        return
    here = dataclasses.replace(kernel, devices=(), unavailable=None)
    calls = calls_of(kernel)
    assert sum(not why_not(here, call) for _, call in calls) >= len(calls) / 2
