"""Repeated public calls on Triton, which use cached plans, give bitwise the results of first calls."""

from __future__ import annotations

import itertools

import pytest
import torch

from transformer_fast import dispatch, functional, use_backend
from transformer_fast.backends import call_cache
from transformer_fast.backends.triton import plans

pytestmark = pytest.mark.sampled(0, 35)


def public_calls(device):
    def normal(*shape):
        return torch.randn(*shape, dtype=torch.bfloat16).to(device)

    q, w, v = (lambda: normal(2, 2, 20, 16)), (lambda: normal(16, 16)), (lambda: normal(16))
    x = lambda: normal(3, 5, 16)  # noqa: E731
    y = functional.scaled_dot_product_attention
    mask = torch.rand(2, 1, 20, 20).to(device) > 0.5
    lengths = torch.tensor([20, 3], device=device)
    yield y, (q, q, q), {}
    yield y, (q, q, q), {"is_causal": True, "key_lengths": lengths, "dropout_p": 0.3}
    yield y, (q, q, q, lambda: mask.clone()), {"need_weights": True}
    yield y, (q, q, q), {"query_lengths": lengths, "is_causal": True}
    r = lambda: normal(23, 2, 16)  # noqa: E731
    starts = torch.tensor([0, 20, 20, 23], device=device)
    yield functional.varlen_attn, (r, r, r, starts.clone, starts.clone), {"max_q": 20, "max_k": 21}
    yield functional.layer_norm, (x, lambda: (16,), v, v), {}
    yield functional.add_layer_norm, (x, x, lambda: (16,), v, v), {"dropout_p": 0.2}
    yield functional.linear, (x, w, v), {"activation": "gelu", "residual": normal(3, 5, 16)}
    yield functional.feed_forward, (x, w, v, w, v), {"dropout_p": 0.2}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("number", range(9))
@pytest.mark.parametrize("wants", [False, True])
def test_cached_calls_are_bitwise_equal(number, wants, device, monkeypatch):
    torch.manual_seed(1)
    function, makers, options = list(public_calls(device))[number]
    calls = [[make() for make in makers] for _ in range(3)]
    if wants:
        for x in itertools.chain(*calls):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                x.requires_grad_()

    def all_bits():
        found = []
        for seed, arguments in enumerate(calls):
            torch.manual_seed(seed)
            y = function(*arguments, **options)
            found += y if isinstance(y, tuple) else [y]
            assert all(one.requires_grad == wants for one in found)
            if wants:
                given = [x for x in arguments if isinstance(x, torch.Tensor) and x.requires_grad]
                found += [
                    g.clone().requires_grad_() for g in torch.autograd.grad(found[-1].sum(), given)
                ]
        return found

    with use_backend("triton"):
        wanted = all_bits()
        monkeypatch.setattr(plans, "replays_interpreted", True)
        monkeypatch.setitem(dispatch.CALL_CACHES, "cpu", call_cache.lookup)
        call_cache.forget()
        found = all_bits()
        assert [run for _, run in call_cache._calls.values()]
        plans_made = [p for store in call_cache._stores for p in store.values() if callable(p)]
        assert len(plans_made) >= 2 * wants  # forward and backward
        assert plans._NEVER not in plans_made
        call_cache.forget()
    for x, y in zip(found, wanted, strict=True):
        assert torch.equal(x, y)
