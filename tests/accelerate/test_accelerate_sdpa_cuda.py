"""enable_sdpa for CUDA tensors: what can be known of it without a GPU.

The operators that PyTorch has for CUDA tensors are called by their dispatch key, here with CPU
tensors; the numbers of the Triton kernels behind them are checked in tests/triton.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from harness import kernel_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import attention as registry

from transformer_fast import _native, _sdpa, _sdpa_operators, dispatch, enable_sdpa, use_backend
from transformer_fast.backends import triton as triton_backend
from transformer_fast.functional.attention import LOG_SUM_EXP, TRAINING

B, H, T, S, D = 2, 4, 7, 5, 8
CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
FLASH, EFFICIENT, CUDNN = _sdpa_operators.OPERATORS["CUDA"]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


class Theirs:
    """Stands for PyTorch's kernels, of which a build for CPUs has none."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def kernels(self) -> dict[str, Any]:
        return {name: Their(name, self) for name in (FLASH, EFFICIENT, CUDNN)}


class Their(NamedTuple):
    """One of them."""

    name: str
    all: Theirs

    def call_boxed(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        assert keys.has(torch._C.DispatchKey.CUDA)
        self.all.calls.append((args, kwargs))
        output, lse, zero = args[0].clone(), args[0].new_zeros(args[0].shape[:3]), torch.zeros(())
        if self.name == EFFICIENT:
            return output, lse, zero, zero
        return output, lse, None, None, 1, 1, zero, zero, None


@pytest.fixture
def theirs() -> Theirs:
    return Theirs()


@pytest.fixture
def interpreted() -> None:
    """The dispatcher believes that Triton takes CPU tensors, as its interpreter does."""
    for kernel in triton_backend.kernels(interpreted=True):
        dispatch.register(kernel)


def _override(named: str | None, theirs: Theirs) -> Iterator[Any]:
    override = _sdpa_operators.Override("CUDA", named, theirs.kernels())
    yield override
    override.remove()


@pytest.fixture
def unnamed(theirs: Theirs) -> Iterator[Any]:
    yield from _override(None, theirs)


@pytest.fixture
def triton(theirs: Theirs, interpreted: None) -> Iterator[Any]:
    yield from _override("triton", theirs)


def _ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Notes the calls that Triton gets, and answers them by the definition."""
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
        return scores.softmax(-1).nan_to_num() @ value, None, lse, lse.exp()

    monkeypatch.setitem(TRAINING.of, "triton", run)
    monkeypatch.setitem(LOG_SUM_EXP, "triton", lambda query, mask, scale, row_max, _: row_max)
    return found


def _call(name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(torch.ops.aten, name).default.redispatch(CUDA, *args, **kwargs)


def _qkv(length: int = T) -> tuple[Tensor, ...]:
    shapes = ((B, H, length, D), (B, H, S, D), (B, H, S, D))
    return tuple(torch.randn(shape) for shape in shapes)


def _calls() -> list[tuple[str, tuple[Any, ...]]]:
    bias = torch.randn(B, H, T, S).masked_fill(torch.rand(B, H, T, S) > 0.7, -math.inf)
    bias[0, 1, 2] = -math.inf  # sees nothing
    return [
        (FLASH, (*_qkv(S), 0.0, True, False)),
        (EFFICIENT, (*_qkv(), bias, True, 0.0, False)),
        (EFFICIENT, (*_qkv(), None, False, 0.0, False)),
        (CUDNN, (*_qkv(), bias, True, 0.0, False, False)),
        (CUDNN, (*_qkv(), None, True, 0.0, True, False)),
    ]


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What the library logs. (pytest's own plugin for it, which looks at all of PyTorch's loggers
    six times a test, is off.)"""
    messages: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("transformer_fast")
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)
    logger.setLevel(before)


def test_unproven_kernels_are_not_chosen(
    unnamed: Any, theirs: Theirs, told: list[str], interpreted: None
) -> None:
    for _ in range(2):
        for name, args in _calls():
            double = tuple(x.double() if isinstance(x, Tensor) else x for x in args)
            _call(name, *double, scale=0.5)
    assert len(theirs.calls) == 10
    assert theirs.calls[0][1] == {"scale": 0.5}
    [record] = set(told)
    assert (
        "runs on PyTorch's own kernel: triton: it supports bfloat16, float16, float32, and"
        in record
    )
    assert "not yet proven on a GPU, so it runs only when it is named" in record


def test_the_named_one_runs(triton: Any, theirs: Theirs, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = _ran(monkeypatch)
    for name, args in _calls():
        _call(name, *args, scale=0.25)
    assert [(mask is not None, causal) for mask, causal, _ in ran] == [
        (False, True), (True, False), (False, False), (True, False), (False, True)
    ]  # fmt: skip
    assert {scale for *_, scale in ran} == {0.25}
    query = _qkv()
    _call(EFFICIENT, *query, None, True)
    assert ran[-1][2] == pytest.approx(D**-0.5)
    assert not theirs.calls


def test_what_it_does_not_take_is_pytorchs(
    triton: Any, theirs: Theirs, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = _ran(monkeypatch)
    q, k, v = _qkv()
    _call(EFFICIENT, q.double(), k.double(), v.double(), None, True)
    assert "triton: it supports bfloat16, float16, float32, and the call has float64" in "\n".join(
        told
    )
    _call(FLASH, q, k, v, 0.0, False, True)  # the debug mask is wanted
    _call(CUDNN, q, k, v, None, True, 0.0, False, True)
    _call(EFFICIENT, q, k, torch.randn(B, H, S, 3), None, True)
    assert "its values are of another size than its queries" in "\n".join(told)
    with use_backend("reference"):
        _call(EFFICIENT, q, k, v, None, True)
    assert "'reference' is named" in "\n".join(told)
    wide = torch.randn(1, 1, 2, 300)
    _call(FLASH, wide, wide, wide)
    assert "triton: it takes head sizes up to 256 and the call has 300" in "\n".join(told)
    assert len(theirs.calls) == 6
    assert not ran


def test_dropout_is_pytorchs(
    triton: Any, theirs: Theirs, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    """Its backward would not know which elements another kernel dropped."""
    ran = _ran(monkeypatch)
    q, k, v = _qkv()
    for name, args in (
        (FLASH, (q, k, v, 0.1)),
        (EFFICIENT, (q, k, v, None, True, 0.1)),
        (CUDNN, (q, k, v, None, True, 0.1)),
    ):
        _call(name, *args)
    assert len(theirs.calls) == 3
    assert "it has dropout, which PyTorch's backward has to repeat" in "\n".join(told)
    assert not ran


def test_use_backend_comes_first(
    unnamed: Any, theirs: Theirs, interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = _ran(monkeypatch)
    with use_backend("triton"):
        _call(EFFICIENT, *_qkv(), None, True)
    assert len(ran) == 1
    assert not theirs.calls


@pytest.mark.parametrize("number", range(5))
def test_what_pytorch_is_promised(
    number: int, triton: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes, layouts and dtypes of PyTorch's meta functions, on which compiled programs rely."""
    _ran(monkeypatch)
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


@pytest.mark.parametrize("number", [1, 3])
def test_rows_that_see_nothing_have_no_weights_in_pytorchs_backward(
    number: int, triton: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _ran(monkeypatch)
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


def test_names_that_make_no_sense() -> None:
    for wrong in ("reference", "torch", "cuda", "fast"):
        with pytest.raises(ValueError, match="backend must be one of cpu, triton, or None, not"):
            enable_sdpa(wrong)
    assert registry.current_flash_attention_impl() is None


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        RuntimeError, match=r"backend 'triton' runs on cuda tensors, and torch \S+ "
    ):
        enable_sdpa(backend="triton")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(RuntimeError, match="PyTorch finds no GPU here"):
        enable_sdpa(backend="triton")
    kernel = kernel_of("attention", "triton")
    missing = kernel.__class__(**{**kernel.__dict__, "unavailable": "Triton is not installed"})
    monkeypatch.setitem(dispatch._state.kernels, "attention", (missing,))
    with pytest.raises(RuntimeError, match="cannot run here: Triton is not installed"):
        enable_sdpa(backend="triton")
    assert registry.current_flash_attention_impl() is None


def test_with_a_gpu(monkeypatch: pytest.MonkeyPatch, theirs: Theirs) -> None:
    """Both devices are registered, and without CPU kernels the message says what to name."""
    right = torch.library.get_kernel

    def get_kernel(op: str, key: Any, *args: Any) -> Any:
        return Their(op, theirs) if key == "CUDA" else right(op, key, *args)

    monkeypatch.setattr(torch.library, "get_kernel", get_kernel)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    name = f"aten::{EFFICIENT}"
    enable_sdpa(backend="triton")
    try:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
        parts = registry._registry._FLASH_ATTENTION_ACTIVE[1].parts
        assert [(part.device, part.named) for part in parts] == [
            ("CPU", "triton"), ("CUDA", "triton")
        ]  # fmt: skip
        if _native.why_not is None:
            enable_sdpa()  # another choice replaces the first
            parts = registry._registry._FLASH_ATTENTION_ACTIVE[1].parts
            assert [part.named for part in parts] == [None, None]
    finally:
        _sdpa.disable_sdpa()
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
    monkeypatch.setattr(_native, "why_not", "no compiler was found")
    with pytest.raises(RuntimeError, match='for CUDA tensors name one, enable_sdpa\\(backend="tri'):
        enable_sdpa()


def test_nothing_stays_half_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose kernels PyTorch does not have takes the other back too."""
    if _native.why_not is not None:
        pytest.skip(str(_native.why_not))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="no kernel for CUDA"):
        enable_sdpa()
    assert registry.current_flash_attention_impl() is None
    x = torch.randn(1, 1, 2, 4)
    monkeypatch.setattr(_sdpa_operators, "attend", None)
    torch.nn.functional.scaled_dot_product_attention(x, x, x)
