"""enable_sdpa: PyTorch's own function on our kernel, and PyTorch's backward on what it returns."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import CPU, TRITON, Backend
from module_checks import cast, check_budget, run
from torch import Tensor
from torch.nn import attention as registry
from torch.utils._pytree import tree_map_only

import transformer_fast
from transformer_fast import _native, _sdpa_operators, disable_sdpa, enable_sdpa, use_backend
from transformer_fast.testing import GRADIENT_FACTOR

pytestmark = pytest.mark.skipif(_native.why_not is not None, reason=str(_native.why_not))

B, H, T, S, D = 2, 4, 7, 5, 8


#: Triton's kernels are enabled by name.
EITHER = pytest.mark.parametrize("backend", [CPU, TRITON], indirect=True, ids=str)


@pytest.fixture
def calls(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[tuple[Any, ...]]]:
    """Enabled, with a note of every call that ours took."""
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
def test_the_same_numbers_and_gradients(
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
def test_what_pytorch_is_promised(name: str, calls: list[Any]) -> None:
    """Log-sum-exp, and the layouts that compiled programs rely on."""
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
        (tuple(x[0] for x in _qkv()), {}),
        (_qkv(), {"attn_mask": torch.zeros(T, S, requires_grad=True)}),
        ((*_qkv()[:2], torch.randn(B, H, S, 3)), {}),
    ],
    ids=["dropout", "fp64", "3-D", "mask with gradient", "other value size"],
)
@EITHER
def test_the_rest_stays_pytorchs(
    args: Any, kwargs: Any, backend: Backend, calls: list[Any]
) -> None:
    torch.manual_seed(0)
    ours = _run(args, kwargs)
    assert not calls
    disable_sdpa()
    torch.manual_seed(0)
    torch.testing.assert_close(ours, _run(args, kwargs), rtol=0, atol=0)


def test_a_forced_backend_counts(calls: list[Any]) -> None:
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


def test_on_and_off(calls: list[Any]) -> None:
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


class _Other:
    """Another provider of attention."""

    def __init__(self) -> None:
        self.removed = False

    def remove(self) -> None:
        self.removed = True


def test_other_providers() -> None:
    made: list[_Other] = []

    def make() -> _Other:
        made.append(_Other())
        return made[-1]

    registry.register_flash_attention_impl("other", register_fn=make)
    try:
        registry.activate_flash_attention_impl("other")
        enable_sdpa()
        assert made[0].removed
        disable_sdpa()
        assert registry.current_flash_attention_impl() == "other"
        enable_sdpa()
        registry.activate_flash_attention_impl("other")
        disable_sdpa()  # not ours to switch off
        assert registry.current_flash_attention_impl() == "other"
        assert not made[-1].removed
    finally:
        registry.restore_flash_attention_impl()
        registry._registry._FLASH_ATTENTION_IMPLS.pop("other")


def test_modules_and_compiled_code(calls: list[Any]) -> None:
    attention = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(2, 5, 16)

    def attend(x: Tensor) -> Tensor:
        return attention(x, x, x, need_weights=False)[0]

    torch.compiler.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    results = [run(call, (x.requires_grad_(),), {}, grad=True) for call in (attend, compiled)]
    assert len(calls) == 2
    torch.testing.assert_close(*results)


def test_never_on_import() -> None:
    code = (
        "import torch, transformer_fast\n"
        "from torch.nn import attention as a\n"
        "assert a.current_flash_attention_impl() is None\n"
        "assert 'transformer_fast' not in a.list_flash_attention_impls()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "why_not", "no compiler was found")
    with pytest.raises(RuntimeError, match="there is no CPU kernel: no compiler was found"):
        enable_sdpa()
    monkeypatch.setattr(_native, "why_not", None)
    monkeypatch.delattr(registry, "restore_flash_attention_impl")
    with pytest.raises(RuntimeError, match="cannot restore its attention kernel"):
        enable_sdpa()
