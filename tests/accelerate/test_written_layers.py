"""Hand-written encoder and decoder layers run as one call after `accelerate`."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
from collections.abc import Callable
from typing import Any

import hand_written
import pytest
import torch
import torch.nn.functional as F
from accelerate_checks import calls_of_layers
from hand_written import (
    ATTENTIONS,
    Attention,
    Block,
    FeedForward,
    M,
    Translator,
    annotated_norm,
    both,
    causal,
    divided,
    padding,
    rms_norm,
    sentences,
    with_fully_masked_rows,
)
from module_checks import assert_same_numbers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import transformer_fast.nn
from transformer_fast import _native, accelerate, restore
from transformer_fast.accelerate import written_layers
from transformer_fast.nn import fused_layers

pytestmark = [
    pytest.mark.sampled(15, 25),
    pytest.mark.skipif(_native.module is None, reason=str(_native.why_not)),
]
B, T = hand_written.B, hand_written.T


@pytest.fixture(autouse=True)
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_layers, "CALLS_BEFORE", 0)


def accelerated(model: nn.Module) -> Any:
    ours = copy.deepcopy(model).eval()
    accelerate(ours)
    return ours


def check(ours: nn.Module, theirs: nn.Module, *args: Any) -> int:
    """Asserts equal results; returns how many sub-layers ran in kernels for layers."""
    assert_same_numbers(ours, theirs.eval(), args, {}, grad=False)
    return calls_of_layers(lambda: ours(*args))


@pytest.mark.parametrize("norm", [None, annotated_norm, rms_norm])
@pytest.mark.parametrize("norm_first", [False, True])
def test_layers_are_a_call_each(norm_first: bool, norm: Any) -> None:
    model = Translator(norm_first, norm)
    ours = accelerated(model)
    assert check(ours, model, *sentences()) == 10


def test_sizes() -> None:
    """One graph serves all calls in which the same sizes are equal."""
    model = Translator()
    ours = accelerated(model)
    source, target = sentences()
    for each in ((source, target[:, :4]), (source, target[:, :3]), (source[:1], target[:1, :1])):
        assert check(ours, model, *each) == 10
    kinds = written_layers._forms[ours.decoder[0]]
    assert len(kinds) == 2


def test_the_third_call_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model, args = Block(False, False), (torch.randn(B, T, M), None, both(), None)
    ours = accelerated(model)
    assert [calls_of_layers(lambda: ours(*args)) for _ in range(4)] == [0, 0, 2, 2]


class Attending(nn.Module):
    """A pre-norm encoder layer with an attention function."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.attention, self.network = Attention(attend), FeedForward()
        self.norm1, self.norm2 = nn.LayerNorm(M), nn.LayerNorm(M)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.norm1(x)
        y = self.attention(y, y, mask)
        x = x + (y[0] if isinstance(y, tuple) else y)
        return x + self.network(self.norm2(x))


#: Attention that no kernel for layers supports: other factors, biases, other numbers of key heads,
#: several masks, and code that depends on the batch's sizes.
OTHERS = frozenset({
    "added, infinite", "baddbmm", "bmm", "einsum", "learned bias", "multiplied", "one head",
    "one key head", "repeated key heads", "rows of a matrix", "softmax by hand", "temperatures",
    "two fills", "two infinite masks", "weights before dropout",
})  # fmt: skip


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name: str) -> None:
    attend, mask = ATTENTIONS[name]
    model, x = Attending(attend()), torch.randn(B, T, M)
    ours, masks = accelerated(model), [mask()]
    if "permuted" not in name:
        masks.append(both())
    assert [check(ours, model, x, each) for each in masks][-1] == (0 if name in OTHERS else 2)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("mask", [None, padding(), causal(), both()])
def test_masks(mask: Tensor | None, norm_first: bool) -> None:
    x, memory = torch.randn(B, T, M), torch.randn(B, 5, M)
    own, crossed = Block(False, norm_first), Block(True, norm_first)
    assert check(accelerated(own), own, x, None, mask, None) == 2
    of_memory = None if mask is None else mask[..., -1:, :5]
    assert check(accelerated(crossed), crossed, x, memory, mask, of_memory) == 3


def test_queries_whose_keys_are_all_masked_run_the_layers_own_code() -> None:
    model, x = Block(False, False), torch.randn(B, T, M)
    ours = accelerated(model)
    for mask, expected in ((with_fully_masked_rows(), 0), (both(), 2)):
        assert check(ours, model, x, None, mask, None) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    model = Block(False, True).to(dtype)
    x = torch.randn(B, T, M, dtype=dtype)
    assert check(accelerated(model), model, x, None, padding(), None) == 2


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """The probabilities of dropout in each call that the entry in C++ ran."""
    seen: list[list[float]] = []
    enter = fused_layers._enter

    def spy(*given: Any) -> Any:
        found = enter(*given)
        if found is not None:
            seen.append(given[-1])
        return found

    monkeypatch.setattr(fused_layers, "_enter", spy)
    return seen


needs_entries = pytest.mark.skipif(_native.autograd is None, reason=str(_native.why_no_autograd))


@needs_entries
@pytest.mark.usefixtures("small_calls")
@pytest.mark.parametrize("mask", [None, padding(), causal(), both()])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("crossed", [False, True])
def test_small_layers_have_gradients_in_one_call(
    crossed: bool, norm_first: bool, mask: Tensor | None, entered: list[list[float]]
) -> None:
    model, x = Block(crossed, norm_first), torch.randn(B, T, M)
    args = (x, torch.randn(B, T, M) if crossed else None, mask, padding())
    ours = accelerated(model)
    for training in (False, True):
        assert_same_numbers(ours.train(training), model.train(training), args, {}, grad=True)
    assert entered == [[], []]
    ours.eval()
    assert check(ours, model.eval(), *args) == 2 + crossed


@needs_entries
@pytest.mark.usefixtures("small_calls")
@pytest.mark.parametrize("norm_first", [False, True])
def test_dropout_of_small_layers_is_that_of_nn(
    norm_first: bool, entered: list[list[float]]
) -> None:
    model, x = Block(False, norm_first), torch.randn(B, T, M, requires_grad=True)
    model.attentions[0].p, model.feed_forward.dropout.p, model.dropout.p = 0.1, 0.2, 0.3
    ours = accelerated(model).train()
    theirs = transformer_fast.nn.TransformerEncoderLayer(
        M, hand_written.H, 2 * M, 0.3, batch_first=True, norm_first=norm_first
    )
    theirs.self_attn.dropout, theirs.dropout.p = 0.1, 0.2
    own = model.attentions[0]
    maps = own.query, own.key, own.value
    with torch.no_grad():
        theirs.self_attn.in_proj_weight.copy_(torch.cat([each.weight for each in maps]))
        theirs.self_attn.in_proj_bias.copy_(torch.cat([each.bias for each in maps]))
    for one, other in (
        (theirs.self_attn.out_proj, own.out),
        (theirs.linear1, model.feed_forward.w_1),
        (theirs.linear2, model.feed_forward.w_2),
    ):
        one.load_state_dict(other.state_dict())

    def run(layer: Any, *args: Any) -> list[Tensor]:
        torch.manual_seed(3)
        y = layer(x, *args)
        return [y, *torch.autograd.grad(y.square().sum(), x)]

    for one, other in zip(run(ours, None, None, None), run(theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert entered == [[0.1, 0.3, 0.2, 0.3]] * 2
    with torch.no_grad():  # training mode has dropout without gradients, too
        run = functools.partial(ours, x, None, None, None)
        assert not torch.equal(run(), run())
    ours.dropout.p = 0.4
    for _ in range(2):  # the first call detects the change, the next one is captured
        run()
    assert entered[-1] == [0.1, 0.4, 0.2, 0.4]
    count = len(entered)
    ours.eval()
    ours.dropout.train()  # dropout in a part of the layer only
    assert not torch.equal(run(), run())
    assert len(entered) == count


@needs_entries
@pytest.mark.usefixtures("small_calls")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("before", range(4))
def test_checkpoints_run_the_same_code_twice(
    reentrant: bool, before: int, monkeypatch: pytest.MonkeyPatch, entered: list[list[float]]
) -> None:
    monkeypatch.setattr(written_layers, "CALLS_BEFORE", 2)
    ours = accelerated(Block(False, False, p=0.3)).train()
    x = torch.randn(B, T, M, requires_grad=True)
    for _ in range(before):
        ours(x, None, None, None)
    for _ in range(4):
        entered.clear()
        with set_checkpoint_early_stop(False):
            y = checkpoint(ours, x, None, None, None, use_reentrant=reentrant)
            first = len(entered)
            y.square().sum().backward()
        assert len(entered) == 2 * first
    assert first == (1 if reentrant or before > 2 else 0)


def test_the_same_tensor_as_two_arguments() -> None:
    model, x, mask = Block(True, False), torch.randn(B, T, M), causal()
    ours = accelerated(model)
    for memory, memory_mask in ((x, mask), (x, None), (torch.randn(B, T, M), padding())):
        check(ours, model, x, memory, mask, memory_mask)
    for hidden in (mask, padding(), None):
        check(ours, model, x, torch.randn(B, T, M), mask, hidden)


def test_parameters_that_are_the_same_tensor() -> None:
    """Layers of one class have separate formulas if one of them shares a parameter."""
    tied, x = Block(False, False), torch.randn(B, T, M)
    plain = copy.deepcopy(tied)
    attention = tied.attentions[0]
    attention.key.weight = attention.query.weight
    for model, expected in ((tied, 0), (plain, 2)):
        ours = accelerated(model)
        assert check(ours, model, x, None, None, None) == expected
        attention = ours.attentions[0]
        attention.key.weight = nn.Parameter(torch.randn(M, M))  # separates them
        changed = copy.deepcopy(ours)
        restore(changed)
        assert check(ours, changed, x, None, None, None) == expected
        attention.key.weight = attention.query.weight
        changed = copy.deepcopy(ours)
        restore(changed)
        assert check(ours, changed, x, None, None, None) == 0


def test_large_layers_with_gradients_run_their_own_code(entered: list[list[float]]) -> None:
    model, args = Block(True, False), (torch.randn(32, 64, M), torch.randn(32, 64, M), None, None)
    ours = accelerated(model)
    assert_same_numbers(ours.train(), model.train(), args, {}, grad=True)
    assert not entered
    assert check(ours.eval(), model, *args) == 3


def test_layers_share_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks are prepared once per forward, and again after a write to one of them."""
    model, (source, target) = Translator(), sentences()
    ours, runs = accelerated(model), []
    assert check(ours, model, source, target) == 10
    layers = [*ours.encoder, *ours.decoder]
    forms = [form for layer in layers for form in written_layers._forms[layer].values()]
    for form in {id(form): form for form in forms}.values():
        function = form.masks._function
        monkeypatch.setattr(
            form.masks, "_function", lambda *given, f=function: (runs.append(f), f(*given))[1]
        )
    check(ours, model, source, target)
    assert not runs
    source[0, -1] = 0 if source[0, -1] else 1
    check(ours, model, source, target)
    assert len(runs) == 2
    layer, x, mask = ours.encoder[0], torch.randn(B, T, M), padding().clone()
    with torch.no_grad():
        before = layer(x, None, mask, None)
        mask.numpy()[..., 0] ^= True
        assert not torch.equal(before, layer(x, None, mask, None))


def _assign(name: str, value: Any) -> Callable[[nn.Module], None]:
    def change(model: Any) -> None:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, value)

    return change


def _doubled(q: Tensor, k: Tensor, v: Tensor, mask: Any, drop: Any) -> Any:
    y, weights = divided(q, k, v, mask, drop)
    return 2.0 * y, weights


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_assign("norm_first", True), 2),
        (_assign("feed_forward.activation", F.silu), 2),
        (_assign("feed_forward.activation", torch.tanh), 0),
        (_assign("attentions.0.attend", _doubled), 0),
        (_assign("feed_forward", nn.Identity()), 0),
        (lambda model: model.norms[0].weight.data.mul_(3.0), 2),
        (lambda model: model.attentions[0].query.weight.data.mul_(3.0), 2),
        (_assign("feed_forward.w_1", nn.Linear(M, 2 * M)), 2),
        (lambda model: model.norms[1].register_forward_hook(lambda *_: torch.zeros(B, T, M)), 0),
        (lambda model: model.register_forward_pre_hook(lambda _, given: (given[0] + 1, *given[1:])), 2),
    ],
)  # fmt: skip
def test_changes_of_a_layer_are_seen(change: Callable[[nn.Module], Any], expected: int) -> None:
    torch.manual_seed(1)
    model, args = Block(False, False), (torch.randn(B, T, M), None, both(), None)
    ours = accelerated(model)
    assert check(ours, model, *args) == 2
    for each in (model, ours):
        torch.manual_seed(2)
        change(each)
    assert check(ours, model, *args) == expected


def test_dropout_that_is_trained_alone_is_applied() -> None:
    model, x = Block(False, False, p=0.5), torch.randn(B, T, M)
    ours = accelerated(model)
    assert calls_of_layers(lambda: ours(x, None, None, None)) == 2
    ours.dropout.train()
    assert calls_of_layers(lambda: ours(x, None, None, None)) == 0
    ours.dropout.eval()
    assert calls_of_layers(lambda: ours(x, None, None, None)) == 2


def test_formulas_live_as_long_as_a_layer_that_uses_them() -> None:
    gc.collect()
    before = set(written_layers._judged)
    ours: Any = accelerated(Block(False, False))
    run = functools.partial(ours, torch.randn(B, 9, M), None, None, None)
    assert calls_of_layers(run) == 2
    assert len(set(written_layers._judged) - before) == 1
    del ours, run
    gc.collect()
    assert set(written_layers._judged) <= before


def test_changes_of_code_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, args = Block(False, False), (torch.randn(B, T, M), None, both(), None)
    ours = accelerated(model)
    assert check(ours, model, *args) == 2
    monkeypatch.setattr(hand_written.Attention, "forward", lambda self, x, *_: (x, None))
    assert check(ours, model, *args) == 0


class Odd(nn.Module):
    """A layer that computes more than a recipe can express."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block, self.kind = Block(False, False), kind
        self.seen: Any = 0
        if kind == "list":
            self.seen = []

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        if self.kind == "values" and bool((x > 100.0).any()):
            return x
        if self.kind == "sizes" and x.shape[1] > T:
            return x
        if self.kind == "float64" and x.dtype == torch.float64:
            raise TypeError("not in float64")
        if self.kind == "random":
            x = x + torch.randn(()) * 0.0
        if self.kind == "counts":
            self.seen += 1
        y = self.block(x, None, mask, None)
        return (y, mask) if self.kind == "mask" else y * 0.5 if self.kind == "halved" else y


class Printing(Odd):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        print(end="")
        return super().forward(x, mask)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("values", "values of tensors decide"),
        ("sizes", "sizes of its arguments decide"),
        ("random", "not attention and a network"),
        ("float64", "a trial call failed (TypeError: not in float64)"),
        ("counts", "assigns attributes"),
        ("prints", "may do more than compute"),
        ("list", "changes of its attribute seen, a list"),
        ("mask", "returns more than its hidden states"),
        ("halved", "not attention and a network"),
    ],
)
def test_other_layers_run_their_own_code(kind: str, reason: str) -> None:
    model = Printing(kind) if kind == "prints" else Odd(kind)
    ours = copy.deepcopy(model).eval()
    accelerate(ours, filter_fn=lambda _, name: name == "")
    for length in (T, T + 2):
        mask = torch.ones(B, 1, 1, length, dtype=torch.bool)
        x = torch.randn(B, length, M)
        state = torch.get_rng_state()
        with torch.no_grad():
            found = ours(x, mask)
            torch.set_rng_state(state)
            torch.testing.assert_close(found, model.eval()(x, mask))
        assert calls_of_layers(functools.partial(ours, x, mask)) == 0
    (entry,) = [each for each in accelerate(ours).entries if each.name == ""]
    assert reason in entry.in_parts["the layer"]


def test_the_report_and_restore() -> None:
    model = Translator()
    ours = copy.deepcopy(model).eval()
    assert "if its third call shows that" in str(accelerate(ours))
    entry = next(e for e in accelerate(ours).entries if e.name == "encoder.0")
    assert entry.now.endswith("WrittenLayer")
    assert not entry.in_parts
    assert check(copy.deepcopy(ours), model, *sentences()) == 10
    pickled = pickle.loads(pickle.dumps(ours))  # a pickle has the original classes
    assert check(pickled, model, *sentences()) == 0
    restore(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in model.modules()]


def test_the_capture_has_no_side_effects() -> None:
    model = Translator().eval()
    ours = accelerated(model)
    state, names = torch.get_rng_state(), [{*vars(module)} for module in ours.modules()]
    args = sentences()
    torch.set_rng_state(state)
    assert calls_of_layers(lambda: ours(*args)) == 10
    assert torch.equal(torch.get_rng_state(), state)
    assert [{*vars(module)} for module in ours.modules()] == names


def test_networks_and_attention_alone_are_not_layers() -> None:
    model = nn.Sequential(
        nn.Linear(M, M), nn.LayerNorm(M), nn.Linear(M, M), nn.Linear(M, M), nn.Linear(M, M)
    )
    assert "WrittenLayer" not in str(accelerate(model))
    assert "WrittenLayer" not in str(accelerate(hand_written.Attention(divided)))
