"""enable_sdpa: PyTorch's scaled_dot_product_attention with our forward and PyTorch's backward.

PyTorch's operators for CUDA tensors are called by their dispatch key, here with CPU tensors. The
results of the Triton kernels behind them are tested in tests/triton_kernels.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import CPU, TRITON, Backend, kernel_of
from module_checks import cast, check_budget, run
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import attention as registry
from torch.utils._pytree import tree_map_only

import transformer_fast
from transformer_fast import (
    _native,
    _sdpa_operators,
    disable_sdpa,
    dispatch,
    enable_sdpa,
    use_backend,
)
from transformer_fast._native import TORCH_VERSION
from transformer_fast.backends import triton as triton_backend
from transformer_fast.functional.attention import FUSES_3D
from transformer_fast.ops.attention import TRAINING
from transformer_fast.reference.attention import empty_output
from transformer_fast.testing import GRADIENT_FACTOR

#: PyTorch 2.10 lacks it, and `enable_sdpa` refuses.
RESTORES = hasattr(registry, "restore_flash_attention_impl")


@pytest.fixture(autouse=True)
def restores(request: pytest.FixtureRequest) -> None:
    if not RESTORES and request.function is not test_without_kernels_enable_raises:
        pytest.skip("this PyTorch cannot restore its attention kernel, so enable_sdpa refuses")


needs_native = pytest.mark.skipif(_native.why_not is not None, reason=str(_native.why_not))
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")

B, H, T, S, D = 2, 4, 7, 5, 8
CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
FLASH, EFFICIENT, CUDNN = _sdpa_operators.OPERATORS["CUDA"]


#: Triton kernels run only if they are named.
EITHER = pytest.mark.parametrize("backend", [CPU, TRITON], indirect=True, ids=str)


@pytest.fixture
def calls(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[tuple[Any, ...]]]:
    """Enables our kernels, and records every call that they accept."""
    if _native.why_not is not None:
        pytest.skip(str(_native.why_not))
    found: list[tuple[Any, ...]] = []
    named = "backend" in request.fixturenames and request.getfixturevalue("backend") == TRITON
    right = _sdpa_operators.attend

    def attend(*args: Any) -> Any:
        found.append(args)
        return right(*args)

    monkeypatch.setattr(_sdpa_operators, "attend", attend)
    enable_sdpa(backend="triton" if named else None)
    yield found
    disable_sdpa()
    assert registry.current_flash_attention_impl() is None


def _qkv(length: int = T, keys: int = S, kv_heads: int = H) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((B, H, length, D), (B, kv_heads, keys, D), (B, kv_heads, keys, D))
    q, k, v = (torch.randn(s) for s in shapes)
    return q, k, v


def _padding() -> Tensor:
    mask = torch.ones(B, 1, 1, S, dtype=torch.bool)
    mask[1, ..., 3:] = False
    return mask


def _some_rows_see_nothing() -> Tensor:
    mask = torch.rand(B, 1, T, S) > 0.3
    mask[0, 0, 2] = False
    mask[1, 0, :3] = False
    return mask


def _additive() -> Tensor:
    return torch.randn(1, H, T, S).masked_fill(torch.rand(T, S) > 0.8, -math.inf)


CASES: dict[str, Callable[[], tuple[tuple[Tensor, ...], dict[str, Any]]]] = {
    "plain": lambda: (_qkv(), {}),
    "causal": lambda: (_qkv(), {"is_causal": True}),
    "causal, more keys": lambda: (_qkv(3, 9), {"is_causal": True}),
    "padding": lambda: (_qkv(), {"attn_mask": _padding()}),
    "(T, S)": lambda: (_qkv(), {"attn_mask": torch.ones(T, S, dtype=torch.bool).tril()}),
    "rows that see nothing": lambda: (_qkv(), {"attn_mask": _some_rows_see_nothing()}),
    "additive": lambda: (_qkv(), {"attn_mask": _additive()}),
    "scale": lambda: (_qkv(), {"scale": 0.3}),
    "negative scale": lambda: (_qkv(), {"scale": -0.3}),
    "fewer key heads": lambda: (_qkv(kv_heads=2), {"enable_gqa": True}),
    "heads last": lambda: (
        tuple(torch.randn(B, n, H, D).transpose(1, 2) for n in (T, S, S)),
        {"attn_mask": _padding()},
    ),
    "one query": lambda: (_qkv(1, 1), {}),
    "one query, more keys": lambda: (_qkv(1, 23), {}),
    "more queries": lambda: (_qkv(19, 19), {"is_causal": True}),
}


def _run(args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in args]
    output = F.scaled_dot_product_attention(*leaves, **kwargs)
    weight = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view(output.shape)
    return [output.detach(), *torch.autograd.grad((output * weight).sum(), leaves)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("small_tiles")
@EITHER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_match_pytorch(
    name: str, dtype: torch.dtype, backend: Backend, calls: list[Any]
) -> None:
    device = backend.of("attention").device
    args, kwargs = tree_map_only(Tensor, lambda x: x.to(device), cast(CASES[name](), dtype))
    ours = _run(args, kwargs)
    assert len(calls) == 1
    disable_sdpa()
    theirs = _run(args, kwargs)
    oracle = _run(cast(args, torch.float64), cast(kwargs, torch.float64))
    assert len(calls) == 1
    for got, expected, true in zip(ours, theirs, oracle, strict=True):
        check_budget(got, expected, true, GRADIENT_FACTOR)
    if backend == CPU:
        with torch.no_grad():
            enable_sdpa()
            torch.testing.assert_close(F.scaled_dot_product_attention(*args, **kwargs), ours[0])


@pytest.mark.parametrize("name", [name for name in CASES if name != "fewer key heads"])
def test_log_sum_exp_and_strides_match_pytorch(name: str, calls: list[Any]) -> None:
    """The log-sum-exp, and the strides that compiled programs rely on."""
    args, kwargs = CASES[name]()
    mask = kwargs.get("attn_mask")
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    rest = {"attn_mask": mask, "scale": kwargs.get("scale")}
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    causal = kwargs.get("is_causal", False)
    output, lse = operator(*args, 0.0, causal, **rest)
    assert len(calls) == 1
    disable_sdpa()
    expected, expected_lse = operator(*args, 0.0, causal, **rest)
    torch.testing.assert_close(lse, expected_lse)
    torch.testing.assert_close(output, expected)
    assert (output.stride(), lse.stride()) == (expected.stride(), expected_lse.stride())
    meta = operator(*(x.to("meta") for x in args), 0.0, causal, **rest)
    assert [x.stride() for x in meta] == [output.stride(), lse.stride()]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (_qkv(), {"dropout_p": 0.5}),
        (tuple(x.double() for x in _qkv()), {}),
        (_qkv(), {"attn_mask": torch.zeros(T, S, requires_grad=True)}),
        ((*_qkv()[:2], torch.randn(B, H, S, 3)), {}),
    ],
    ids=["dropout", "fp64", "mask with gradient", "other value size"],
)
@EITHER
def test_unsupported_calls_run_on_pytorch(
    args: Any, kwargs: Any, backend: Backend, calls: list[Any]
) -> None:
    torch.manual_seed(0)
    ours = _run(args, kwargs)
    assert not calls
    disable_sdpa()
    torch.manual_seed(0)
    torch.testing.assert_close(ours, _run(args, kwargs), rtol=0, atol=0)


def test_calls_of_three_dimensions(calls: list[Any]) -> None:
    """From PyTorch 2.14 on they reach its fused CPU operator, which `enable_sdpa` overrides."""
    args = tuple(x[0] for x in _qkv())
    ours = _run(args, {})
    assert len(calls) == (TORCH_VERSION >= FUSES_3D)
    disable_sdpa()
    torch.testing.assert_close(ours, _run(args, {}))


def test_use_backend_and_strict_are_respected(calls: list[Any]) -> None:
    args = _qkv()
    for backend in ("reference", "torch", "triton"):
        with use_backend(backend):
            F.scaled_dot_product_attention(*args)
    with transformer_fast.strict():
        F.scaled_dot_product_attention(*(x.double() for x in args))
    assert not calls
    with use_backend("cpu"):
        F.scaled_dot_product_attention(*args)
    assert len(calls) == 1


def test_enable_and_disable_are_idempotent(calls: list[Any]) -> None:
    args = _qkv()
    enable_sdpa()
    F.scaled_dot_product_attention(*args)
    assert len(calls) == 1
    assert registry.current_flash_attention_impl() == "transformer_fast"
    disable_sdpa()
    disable_sdpa()
    before = F.scaled_dot_product_attention(*args)
    assert len(calls) == 1
    enable_sdpa()
    F.scaled_dot_product_attention(*args)
    assert len(calls) == 2
    disable_sdpa()
    assert torch.equal(F.scaled_dot_product_attention(*args), before)


@needs_native
def test_other_providers_are_restored() -> None:
    made: list[str] = []

    def make() -> SimpleNamespace:
        made.append("in use")
        at = len(made) - 1
        return SimpleNamespace(remove=lambda: made.__setitem__(at, "removed"))

    registry.register_flash_attention_impl("other", register_fn=make)
    try:
        registry.activate_flash_attention_impl("other")
        enable_sdpa()
        assert made[0] == "removed"
        disable_sdpa()
        assert registry.current_flash_attention_impl() == "other"
        enable_sdpa()
        registry.activate_flash_attention_impl("other")
        disable_sdpa()  # another provider is active, which is left alone
        assert registry.current_flash_attention_impl() == "other"
        assert made[-1] == "in use"
    finally:
        registry.restore_flash_attention_impl()
        registry._registry._FLASH_ATTENTION_IMPLS.pop("other")


def test_modules_and_compiled_code_use_our_kernel(calls: list[Any]) -> None:
    attention = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(2, 5, 16)

    def attend(x: Tensor) -> Tensor:
        return attention(x, x, x, need_weights=False)[0]

    torch.compiler.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    results = [run(call, (x.requires_grad_(),), {}, grad=True) for call in (attend, compiled)]
    assert len(calls) == 2
    torch.testing.assert_close(*results)


@needs_native
def test_without_kernels_enable_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "why_not", "no compiler was found")
    with pytest.raises(RuntimeError, match="there is no CPU kernel: no compiler was found"):
        enable_sdpa()
    monkeypatch.setattr(_native, "why_not", None)
    monkeypatch.delattr(registry, "restore_flash_attention_impl", raising=False)
    with pytest.raises(RuntimeError, match="cannot restore its attention kernel"):
        enable_sdpa()


# Operators for CUDA tensors.


def _their(name: str, calls: list[tuple[Any, ...]]) -> SimpleNamespace:
    """Placeholder for one of PyTorch's CUDA kernels, which a CPU build lacks."""

    def call_boxed(keys: Any, *args: Any, **kwargs: Any) -> Any:
        assert keys.has(torch._C.DispatchKey.CUDA)
        calls.append((args, kwargs))
        output, lse, zero = args[0].clone(), args[0].new_zeros(args[0].shape[:3]), torch.zeros(())
        if name == EFFICIENT:
            return output, lse, zero, zero
        return output, lse, None, None, 1, 1, zero, zero, None

    return SimpleNamespace(call_boxed=call_boxed)


@pytest.fixture
def theirs() -> list[tuple[Any, ...]]:
    """Returns the recorded calls of PyTorch's kernels."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    return []


@pytest.fixture
def override(request: pytest.FixtureRequest, theirs: list[Any]) -> Iterator[None]:
    """Registers our CUDA override with the backend given as parameter. The dispatcher treats CPU
    tensors as supported by Triton, as with its interpreter.
    """
    for kernel in triton_backend.kernels(interpreted=True):
        dispatch.register(kernel)
    kernels = {name: _their(name, theirs) for name in (FLASH, EFFICIENT, CUDNN)}
    override = _sdpa_operators.Override("CUDA", request.param, kernels)
    yield
    override.remove()


unnamed = pytest.mark.parametrize("override", [None], indirect=True)
named_triton = pytest.mark.parametrize("override", ["triton"], indirect=True)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Records the calls that reach Triton, and computes them by definition."""
    found: list[tuple[Any, ...]] = []

    def run(
        query: Tensor, key: Tensor, value: Tensor, mask: Any, _: None, causal: bool, scale: float,
        *rest: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        found.append((mask, causal, scale))
        scores = query @ key.mT * scale
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -math.inf)
        scores = scores if mask is None else scores + mask
        lse = scores.logsumexp(-1)
        output = empty_output(query, key, value).copy_(scores.softmax(-1).nan_to_num() @ value)
        return output, None, torch.zeros_like(lse), lse.exp()

    monkeypatch.setitem(TRAINING.of, "triton", run)
    return found


def _call(name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(torch.ops.aten, name).default.redispatch(CUDA, *args, **kwargs)


def _calls() -> list[tuple[str, tuple[Any, ...]]]:
    bias = torch.randn(B, H, T, S).masked_fill(torch.rand(B, H, T, S) > 0.7, -math.inf)
    bias[0, 1, 2] = -math.inf  # a fully masked row
    return [
        (FLASH, (*_qkv(S), 0.0, True, False)),
        (EFFICIENT, (*_qkv(), bias, True, 0.0, False)),
        (EFFICIENT, (*_qkv(), None, False, 0.0, False)),
        (CUDNN, (*_qkv(), bias, True, 0.0, False, False)),
        (CUDNN, (*_qkv(), None, True, 0.0, True, False)),
    ]


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """Returns the library's log messages.

    pytest's own plugin for this is switched off, because it walks all loggers of PyTorch six times
    a test.
    """
    logged: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("transformer_fast")
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield logged
    logger.removeHandler(handler)
    logger.setLevel(before)


@unnamed
def test_unvalidated_kernels_are_not_chosen(
    override: None, theirs: list[Any], messages: list[str]
) -> None:
    for _ in range(2):
        for name, args in _calls():
            double = tuple(x.double() if isinstance(x, Tensor) else x for x in args)
            _call(name, *double, scale=0.5)
    assert len(theirs) == 10
    assert theirs[0][1] == {"scale": 0.5}
    [record] = set(messages)
    assert (
        "runs on PyTorch's own kernel: triton: it supports bfloat16, float16, float32, and"
        in record
    )
    assert "so it is used only if selected by name" in record


@named_triton
def test_a_named_backend_runs(override: None, theirs: list[Any], ran: list[Any]) -> None:
    for name, args in _calls():
        _call(name, *args, scale=0.25)
    assert [(mask is not None, causal) for mask, causal, _ in ran] == [
        (False, True), (True, False), (False, False), (True, False), (False, True)
    ]  # fmt: skip
    assert {scale for *_, scale in ran} == {0.25}
    query = _qkv()
    _call(EFFICIENT, *query, None, True)
    assert ran[-1][2] == pytest.approx(D**-0.5)
    assert not theirs


@named_triton
def test_unsupported_cuda_calls_run_on_pytorch(
    override: None, theirs: list[Any], messages: list[str], ran: list[Any]
) -> None:
    q, k, v = _qkv()
    _call(EFFICIENT, q.double(), k.double(), v.double(), None, True)
    assert "triton: it supports bfloat16, float16, float32, and the call has float64" in "\n".join(
        messages
    )
    _call(FLASH, q, k, v, 0.0, False, True)  # the debug mask is requested
    _call(CUDNN, q, k, v, None, True, 0.0, False, True)
    _call(EFFICIENT, q, k, torch.randn(B, H, S, 3), None, True)
    assert "its values are of another size than its queries" in "\n".join(messages)
    with use_backend("reference"):
        _call(EFFICIENT, q, k, v, None, True)
    assert "use_backend selects 'reference'" in "\n".join(messages)
    wide = torch.randn(1, 1, 2, 300)
    _call(FLASH, wide, wide, wide)
    assert "triton: it supports head sizes up to 256, and the call has 300" in "\n".join(messages)
    for name, args in ((FLASH, (0.1,)), (EFFICIENT, (None, True, 0.1)), (CUDNN, (None, True, 0.1))):
        _call(name, q, k, v, *args)
    assert "it has dropout, which PyTorch's backward has to repeat" in "\n".join(messages)
    assert len(theirs) == 9
    assert not ran


@named_triton
@pytest.mark.parametrize("number", range(5))
def test_cuda_results_match_the_meta_functions(number: int, override: None, ran: list[Any]) -> None:
    """Shapes, strides and dtypes of PyTorch's meta functions, which compiled programs rely on."""
    name, args = _calls()[number]
    for heads_last in (False, True):
        if heads_last:
            args = tuple(
                x.transpose(1, 2).contiguous().transpose(1, 2) if isinstance(x, Tensor) else x
                for x in args
            )
        got = _call(name, *args)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in args]
            meta = getattr(torch.ops.aten, name)(*fakes)
        assert len(got) == len(meta)
        for ours, promised in zip(got, meta, strict=True):
            if isinstance(promised, Tensor) and isinstance(ours, Tensor):
                assert (ours.shape, ours.dtype) == (promised.shape, promised.dtype)
                assert ours.stride() == promised.stride()
            else:
                assert type(ours) is type(promised)


@named_triton
@pytest.mark.parametrize("number", [1, 3])
def test_fully_masked_rows_have_zero_weights_in_backward(
    number: int, override: None, ran: list[Any]
) -> None:
    name, args = _calls()[number]
    q, k, _, bias = args[:4]
    output, lse = _call(name, *args)[:2]
    scores = q @ k.mT / math.sqrt(D) + bias
    weights = (scores - lse.reshape(B, H, -1)[:, :, :T, None]).exp()
    assert weights.isfinite().all()
    sums = weights.sum(-1)
    assert (sums == 0).sum() >= 1
    torch.testing.assert_close(sums[sums != 0], torch.ones_like(sums[sums != 0]))
    torch.testing.assert_close(output, weights @ args[2])
    assert lse.reshape(B, H, -1)[:, :, T:].isinf().all()


@without_gpu
def test_unknown_backend_names_raise() -> None:
    for wrong in ("reference", "torch", "cuda", "fast"):
        with pytest.raises(ValueError, match="backend must be one of cpu, triton, or None, not"):
            enable_sdpa(wrong)
    assert registry.current_flash_attention_impl() is None


@without_gpu
def test_without_a_gpu_naming_triton_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(
        RuntimeError, match=r"backend 'triton' runs on cuda tensors, and torch \S+ has no CUDA"
    ):
        enable_sdpa(backend="triton")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(RuntimeError, match="PyTorch finds no GPU here"):
        enable_sdpa(backend="triton")
    kernel = kernel_of("attention", "triton")
    missing = dataclasses.replace(kernel, unavailable="Triton is not installed")
    monkeypatch.setitem(dispatch.registry.kernels, "attention", (missing,))
    with pytest.raises(RuntimeError, match="cannot run here: Triton is not installed"):
        enable_sdpa(backend="triton")
    assert registry.current_flash_attention_impl() is None


def test_with_a_gpu_both_devices_are_registered(
    monkeypatch: pytest.MonkeyPatch, theirs: list[Any]
) -> None:
    """Registers both devices; without CPU kernels, the message recommends naming a backend."""
    right = torch.library.get_kernel

    def get_kernel(op: str, key: Any, *args: Any) -> Any:
        return _their(op, theirs) if key == "CUDA" else right(op, key, *args)

    monkeypatch.setattr(torch.library, "get_kernel", get_kernel)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    name = f"aten::{EFFICIENT}"
    before = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")  # PyTorch's own
    enable_sdpa(backend="triton")
    try:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
        parts = registry._registry._FLASH_ATTENTION_ACTIVE[1].parts
        assert [(part.device, part.named) for part in parts] == [
            ("CPU", "triton"), ("CUDA", "triton")
        ]  # fmt: skip
        if _native.why_not is None:
            enable_sdpa()  # replaces the first choice
            parts = registry._registry._FLASH_ATTENTION_ACTIVE[1].parts
            assert [part.named for part in parts] == [None, None]
    finally:
        disable_sdpa()
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA") == before
    monkeypatch.setattr(_native, "why_not", "no compiler was found")
    with pytest.raises(RuntimeError, match='for CUDA tensors name one, enable_sdpa\\(backend="tri'):
        enable_sdpa()


@needs_native
@without_gpu
def test_a_failed_enable_leaves_nothing_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """If PyTorch lacks the kernels of one device, the other device is disabled again."""
    right = torch.library.get_kernel

    def get_kernel(op: str, key: Any, *args: Any) -> Any:
        if key == "CUDA":
            raise RuntimeError(f"no kernel for CUDA of {op}")
        return right(op, key, *args)

    monkeypatch.setattr(torch.library, "get_kernel", get_kernel)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="no kernel for CUDA"):
        enable_sdpa()
    assert registry.current_flash_attention_impl() is None
    x = torch.randn(1, 1, 2, 4)
    monkeypatch.setattr(_sdpa_operators, "attend", None)
    F.scaled_dot_product_attention(x, x, x)
