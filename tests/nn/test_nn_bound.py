"""Layers are bound to their tensors once, and read again after any change."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_fast import _native, nn

pytestmark = [
    pytest.mark.usefixtures("small_calls_on_kernels"),
    pytest.mark.skipif(_native.module is None, reason=str(_native.why_not)),
]

M = 32


def make(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(M, 4, 64, dropout=0.0, batch_first=True, **options)


class Doubled(torch.nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def double(module: Any, given: Any, output: Tensor) -> Tensor:
    return 2 * output


class Adapted(torch.nn.Module):
    """A low-rank adapter around a linear layer, as fine-tuning libraries insert."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = parameter(2, base.in_features)
        self.b = parameter(base.out_features, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T.to(x.dtype) @ self.b.T.to(x.dtype)


def parametrise(layer: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(layer.linear1)
    layer.linear1.parametrizations.weight.original0.data.mul_(2)


def set_hooks(layer: Any) -> None:
    layer.linear2._forward_hooks = OrderedDict()
    layer.linear2.register_forward_hook(double)


def change_class(layer: Any) -> None:
    layer.linear1.__class__ = Doubled


def drop(layer: Any) -> None:
    layer.dropout1.p = 1.0
    layer.dropout1.train()


def forward_on_instance(layer: Any) -> None:
    theirs = layer.norm1.forward
    layer.norm1.forward = lambda x: 2 * theirs(x)


def block_on_instance(layer: Any) -> None:
    layer._ff_block = lambda x: 2 * x


def two_heads(layer: Any) -> None:
    layer.self_attn.num_heads, layer.self_attn.head_dim = 2, M // 2


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape))


#: Changes of a layer between two calls.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "weight": lambda layer: setattr(layer.linear1, "weight", parameter(64, M)),
    "bias": lambda layer: setattr(layer.self_attn.out_proj, "bias", parameter(M)),
    "no bias": lambda layer: layer.linear2.register_parameter("bias", None),
    "data": lambda layer: setattr(layer.norm2.weight, "data", torch.randn(M)),
    "in place": lambda layer: layer.self_attn.in_proj_weight.data.mul_(2),
    "module": lambda layer: setattr(layer, "linear1", torch.nn.Linear(M, 64)),
    "adapter": lambda layer: setattr(layer, "linear2", Adapted(layer.linear2)),
    "parametrisation": parametrise,
    "norm": lambda layer: setattr(layer, "norm1", torch.nn.RMSNorm(M)),
    "no norm": lambda layer: setattr(layer, "norm1", torch.nn.Identity()),
    "eps": lambda layer: setattr(layer.norm1, "eps", 1.0),
    "activation": lambda layer: setattr(layer, "activation", torch.nn.functional.silu),
    "norm_first": lambda layer: setattr(layer, "norm_first", not layer.norm_first),
    "heads": two_heads,
    "batch_first": lambda layer: setattr(layer.self_attn, "batch_first", False),
    "dropout": drop,
    "hook": lambda layer: layer.linear1.register_forward_hook(double),
    "hooks": set_hooks,
    "hook of attention": lambda layer: layer.self_attn.out_proj.register_forward_hook(double),
    "class": change_class,
    "forward": forward_on_instance,
    "block": block_on_instance,
    "bfloat16": lambda layer: layer.bfloat16(),
}


def call(module: Any, grad: bool) -> Tensor:
    x = torch.randn(3, 5, M, generator=torch.Generator().manual_seed(1))
    with torch.set_grad_enabled(grad):
        return module(x.to(next(module.parameters()).dtype)).detach()  # type: ignore[no-any-return]


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_layer_after_calls(change: str, norm_first: bool, grad: bool) -> None:
    torch.manual_seed(0)
    layer = make(norm_first=norm_first).train(grad)
    stack = nn.TransformerEncoder(make(norm_first=norm_first), 2, enable_nested_tensor=False)
    for module, changed in ((layer, layer), (stack, stack.layers[1])):
        before = [call(module.train(grad), grad) for _ in range(2)]
        assert torch.equal(*before)
        # A change of dtype applies to the whole stack.
        CHANGES[change](module if change == "bfloat16" else changed)
        after = call(module, grad)
        # A copy has nothing cached.
        assert torch.equal(after, call(copy.deepcopy(module), grad))
        assert not torch.equal(after.float(), before[0])


@torch.no_grad()
def test_changes_of_a_stack_after_calls() -> None:
    stack = nn.TransformerEncoder(make(), 3, enable_nested_tensor=False).eval()
    for layer in stack.layers:
        torch.nn.init.normal_(layer.linear1.weight)
    results = [call(stack, False)]
    for change in (
        lambda: stack.layers.append(make().eval()),
        lambda: stack.layers.pop(0),
        lambda: stack.layers.insert(0, make().eval()),
        lambda: stack.layers.__setitem__(1, make().eval()),
        lambda: stack.layers._modules.__setitem__("2", make().eval()),
        lambda: setattr(stack, "layers", torch.nn.ModuleList([make().eval()])),
    ):
        change()
        results.append(call(stack, False))
        assert torch.equal(results[-1], call(copy.deepcopy(stack), False))
        assert not torch.equal(*results[-2:])


@torch.no_grad()
def test_replaced_methods_of_classes_run(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make().eval()
    before = call(layer, False)
    theirs = torch.nn.Linear.forward
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: 2 * theirs(self, x))
    after = call(layer, False)
    assert not torch.equal(after, before)
    assert torch.equal(after, call(copy.deepcopy(layer), False))
    monkeypatch.undo()
    assert torch.equal(call(layer, False), before)
