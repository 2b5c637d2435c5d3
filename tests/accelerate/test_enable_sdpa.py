"""enable_sdpa: PyTorch's scaled_dot_product_attention with our forward and PyTorch's backward."""

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
from harness import kernel_of, spied
from module_checks import cast, check_budget, run
from torch import Tensor
from torch.nn import attention as registry

import transformer_fast
from transformer_fast import _native, _sdpa, disable_sdpa, dispatch, enable_sdpa, use_backend
from transformer_fast._native import TORCH_VERSION
from transformer_fast.functional.attention import FUSES_3D
from transformer_fast.testing import GRADIENT_FACTOR

#: PyTorch 2.10 lacks it, and `enable_sdpa` refuses.
RESTORES = hasattr(registry, "restore_flash_attention_impl")


@pytest.fixture(autouse=True)
def restores(request: pytest.FixtureRequest) -> None:
    if not RESTORES and request.function is not test_without_kernels_enable_raises:
        pytest.skip("this PyTorch cannot restore its attention kernel, so enable_sdpa refuses")


needs_native = pytest.mark.skipif(_native.why_not is not None, reason=str(_native.why_not))

B, H, T, S, D = 2, 4, 7, 5, 8


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Enables our kernels, and records every call that they accept."""
    if _native.why_not is not None:
        pytest.skip(str(_native.why_not))
    found = spied(monkeypatch, _sdpa, "attend", lambda result, *args: args)
    enable_sdpa()
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_match_pytorch(
    name: str, dtype: torch.dtype, calls: list[Any]
) -> None:
    args, kwargs = cast(CASES[name](), dtype)
    ours = _run(args, kwargs)
    assert len(calls) == 1
    disable_sdpa()
    theirs = _run(args, kwargs)
    oracle = _run(cast(args, torch.float64), cast(kwargs, torch.float64))
    assert len(calls) == 1
    for got, expected, true in zip(ours, theirs, oracle, strict=True):
        check_budget(got, expected, true, GRADIENT_FACTOR)
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
def test_unsupported_calls_run_on_pytorch(args: Any, kwargs: Any, calls: list[Any]) -> None:
    torch.manual_seed(0)
    ours = _run(args, kwargs)
    assert not calls
    disable_sdpa()
    torch.manual_seed(0)
    torch.testing.assert_close(ours, _run(args, kwargs), rtol=0, atol=0)


def test_calls_of_three_dimensions(calls: list[Any]) -> None:
    """From PyTorch 2.14 on these run on its fused CPU operator, which `enable_sdpa` overrides."""
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


def test_the_log_has_each_reason_once(calls: list[Any], messages: list[str]) -> None:
    q, k, v = _qkv()
    for _ in range(2):
        F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)))
        with use_backend("reference"):
            F.scaled_dot_product_attention(q, k, v)
    head = "scaled_dot_product_attention runs on PyTorch's own kernel: "
    assert not calls
    wide, named = (message.removeprefix(head) for message in messages)
    assert wide.startswith("cpu: it supports bfloat16, float16, float32, and the call has float64")
    assert named == "use_backend selects 'reference'"


@needs_native
def test_a_named_backend_takes_precedence_over_the_dispatcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An unvalidated kernel runs only if its backend is named."""
    kernel = kernel_of("attention")
    waiting = dataclasses.replace(kernel, proven=frozenset())
    kernels = tuple(waiting if one is kernel else one for one in dispatch.kernels("attention"))
    monkeypatch.setitem(dispatch.registry.kernels, "attention", kernels)
    found = spied(monkeypatch, _sdpa, "attend", lambda result, *args: args)
    for named, count in ((None, 0), ("cpu", 1)):
        enable_sdpa(backend=named)
        try:
            F.scaled_dot_product_attention(*_qkv())
        finally:
            disable_sdpa()
        assert len(found) == count


def test_unknown_backend_names_raise() -> None:
    for wrong in ("reference", "torch", "cuda", "triton", "fast"):
        with pytest.raises(ValueError, match="backend must be cpu or None, not"):
            enable_sdpa(wrong)
    assert registry.current_flash_attention_impl() is None
