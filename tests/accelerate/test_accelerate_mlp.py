"""Feed-forward networks in modules of any class: which ones accelerate finds, and their results."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import logging.handlers
import pickle
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import spied
from module_checks import assert_same_numbers
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from transformer_fast import accelerate, functional, restore
from transformer_fast.accelerate import mlp

M, H = 24, 40
FEED_FORWARD = "transformer_fast.accelerate.mlp.FeedForward"


class Modules(nn.Module):
    """Dropout before and after the second linear layer."""

    def __init__(self, activation: nn.Module, p: float = 0.0) -> None:
        super().__init__()
        self.w_in, self.w_out = nn.Linear(M, H), nn.Linear(H, M, bias=False)
        self.act, self.drop, self.out = activation, nn.Dropout(p), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.w_out(self.drop(self.act(self.w_in(x)))))


class Functions(nn.Module):
    """The activation is a function stored on the instance."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc1, self.fc2, self.activation = nn.Linear(M, H), nn.Linear(H, M), activation

    def forward(self, hidden_states: Tensor) -> Tensor:
        """A forward with a docstring and assignments, which `accelerate` has to support."""
        hidden_states = self.fc1(hidden_states)
        hidden_states = self.activation(hidden_states)
        return self.fc2(hidden_states)


class Method(Modules):
    """Has a child with the name of the tensor method that forward calls."""

    def __init__(self) -> None:
        super().__init__(nn.GELU())
        self.relu = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.w_out(self.w_in(x).relu())


class Tanh(Modules):
    def __init__(self) -> None:
        super().__init__(nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return self.w_out(self.drop(torch.nn.functional.gelu(self.w_in(x), approximate="tanh")))


class Lean(Modules):
    """Dropout and an Identity between the linear layers, as in timm."""

    def __init__(self) -> None:
        super().__init__(nn.GELU())
        self.norm = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.w_out(self.norm(self.drop(self.act(self.w_in(x)))))


def sequential(p: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(M), nn.Linear(M, H), nn.GELU(approximate="tanh"), nn.Dropout(p),
        nn.Linear(H, M), nn.Dropout(p),
    )  # fmt: skip


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: Modules(nn.ReLU(inplace=True)),
    "silu": lambda: Modules(nn.SiLU()),
    "gelu function": lambda: Functions(F.gelu),
    "gelu with an option": Tanh,
    "method": Method,
    "two in one place": Lean,
    "sequential": sequential,
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Returns the keyword arguments of each call of `functional.feed_forward`."""
    found: list[dict[str, Any]] = []
    feed_forward = functional.feed_forward

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        found.append(kwargs)
        return feed_forward(*args, **kwargs)

    monkeypatch.setattr(functional, "feed_forward", noted)
    return found


def _pair(make: Callable[[], nn.Module], *args: Any) -> tuple[Any, nn.Module]:
    theirs = make(*args)
    ours = copy.deepcopy(theirs)
    entry = accelerate(ours)[""]
    assert entry.now == FEED_FORWARD, str(entry)
    return ours, theirs


def _x(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, 5, M, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_and_gradients_match_pytorch(
    name: str, dtype: torch.dtype, calls: list[Any]
) -> None:
    ours, theirs = _pair(lambda: NETWORKS[name]().to(dtype))
    x = _x(dtype)
    for grad in (False, True):
        assert_same_numbers(ours, theirs, (x.requires_grad_(grad),), {}, grad)
    argument = (
        "input" if name == "sequential" else next(iter(inspect.signature(ours.forward).parameters))
    )
    assert_same_numbers(ours, theirs, (), {argument: _x(dtype)}, grad=False)
    assert len(calls) == 3
    with pytest.raises(TypeError):
        ours(nothing=x)
    with pytest.raises(TypeError):
        ours()


def test_the_report_names_the_fused_op() -> None:
    model = nn.ModuleList([Modules(nn.GELU(), 0.2), Modules(nn.GELU(), 0.2)])
    report = accelerate(model)
    assert set(report["0"].inference) == set(report["0"].training) == {"feed_forward"}
    assert "0 and 1 more: Modules replaced by" in str(report)
    assert not report.notes
    model[1].w_out.register_forward_hook(lambda *_: None)
    again = accelerate(model)
    assert again["1"].in_parts == {"feed_forward": "its w_out has hooks"}
    assert again["0"].outcome == "already"


def test_dropout_has_the_same_distribution(calls: list[Any]) -> None:
    ours, theirs = _pair(sequential, 0.5)
    x = torch.randn(400, M)
    with torch.no_grad():
        outputs = [torch.stack([m(x) for _ in range(64)]) for m in (ours, theirs)]
    assert calls[0] == {"activation": "gelu_tanh", "dropout_p": 0.5}
    assert [(y == 0).float().mean().item() for y in outputs] == pytest.approx([0.5, 0.5], abs=0.01)
    spread = (outputs[1].std(0) / 8).mean()
    assert (outputs[0].mean(0) - outputs[1].mean(0)).abs().mean() < 2 * spread
    assert_same_numbers(ours.eval(), theirs.eval(), (x,), {}, grad=False)
    assert calls[-1]["dropout_p"] == 0.0


def test_two_active_dropouts_are_not_fused(calls: list[Any]) -> None:
    network = nn.Sequential(
        nn.Linear(M, H), nn.ReLU(), nn.Dropout(0.5), nn.Dropout(0.5), nn.Linear(H, M)
    )
    ours, _ = _pair(lambda: network)
    ours(_x())
    assert not calls
    ours.eval()(_x())
    assert len(calls) == 1


def test_restore_copy_and_pickle_give_the_original_class() -> None:
    for make in NETWORKS.values():
        model = make()
        kind, state, shown = type(model), list(model.state_dict()), repr(model)
        names, parameters = set(model.__dict__), list(model.parameters())
        accelerate(model)
        assert isinstance(model, kind)
        assert repr(model) == shown
        assert list(model.state_dict()) == state
        assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
        copied = copy.deepcopy(model)
        assert type(copied) is type(model)
        assert accelerate(model)[""].outcome == "already"
        if not (kind is Functions and getattr(model.activation, "__name__", "") == "<lambda>"):
            assert type(pickle.loads(pickle.dumps(model))) is kind
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            assert type(torch.load(file, weights_only=False)) is kind
        for one in (model, copied):
            assert "" in restore(one)
            assert type(one) is kind
        assert set(model.__dict__) == names


def _other_map(ours: Any) -> None:
    torch.manual_seed(0)
    ours.w_in = nn.Sequential(nn.Linear(M, H), nn.Tanh())


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook": lambda m: m.w_in.register_forward_hook(lambda _, args, output: output * 2),
    "hooked activation": lambda m: m.act.register_forward_pre_hook(lambda _, args: (args[0] + 1,)),
    "hooked dropout": lambda m: m.drop.register_forward_hook(lambda _, args, output: output - 1),
    "parametrised": lambda m: parametrizations.weight_norm(m.w_in),
    "other activation": lambda m: setattr(m, "act", nn.Tanh()),
    "other map": _other_map,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_children_are_called(change: str, calls: list[Any]) -> None:
    ours, theirs = _pair(Modules, nn.GELU())
    for one in (ours, theirs):
        CHANGES[change](one)
    for grad in (False, True):
        assert_same_numbers(ours, theirs, (_x(),), {}, grad)
    assert not calls


def test_a_changed_activation_attribute_takes_effect(calls: list[Any]) -> None:
    ours, theirs = _pair(Functions, F.relu)
    for value, count in ((F.silu, 1), (torch.tanh, 0), (nn.Identity(), 0)):
        for one in (ours, theirs):
            one.activation = value
        assert_same_numbers(ours, theirs, (_x(),), {}, grad=False)
        assert bool(calls) == bool(count)
        calls.clear()


def test_removed_children_raise_or_take_effect(calls: list[Any]) -> None:
    ours, _ = _pair(Modules, nn.GELU())
    for name in ("drop", "out", "act"):
        kept = getattr(ours, name)
        setattr(ours, name, None)
        with pytest.raises(TypeError, match="'NoneType' object is not callable"):
            ours(_x())
        setattr(ours, name, kept)
    with pytest.raises(TypeError, match="linear"):
        ours((_x(), None))
    ours, theirs = _pair(sequential)
    for one in (ours, theirs):
        del one[3]
        one.append(nn.Dropout(0.0))
    assert_same_numbers(ours, theirs, (_x(),), {}, grad=False)
    assert not calls


def test_changed_sequentials_match(calls: list[Any]) -> None:
    ours, theirs = _pair(sequential)
    x = torch.randn(4, H)
    assert_same_numbers(ours[3:], theirs[3:], (x,), {}, grad=True)
    for one in (ours, theirs):
        one.insert(1, nn.Tanh())
    assert_same_numbers(ours, theirs, (_x(),), {}, grad=False)
    assert not calls


def test_autocast_is_fused_and_matches(calls: list[Any]) -> None:
    ours, theirs = _pair(Modules, nn.GELU())
    for x in (_x(), _x(torch.bfloat16)):
        with torch.autocast("cpu", torch.bfloat16):
            got, expected = ours(x), theirs(x)
        assert got.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    assert len(calls) == 2


def test_mixed_dtypes_raise_as_in_pytorch(calls: list[Any]) -> None:
    ours, theirs = _pair(Modules, nn.GELU())
    for one in (ours, theirs):
        with pytest.raises(RuntimeError, match="dtype"):
            one(_x(torch.bfloat16))
        one.w_out.bfloat16()
        with pytest.raises(RuntimeError, match="dtype"):
            one(_x())
    assert not calls


def test_export_compile_and_fx_match() -> None:
    ours, theirs = _pair(Modules, nn.GELU())
    x = _x()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), theirs(x))
    program = torch.export.export(ours.eval(), (x,))
    called = {str(n.target) for n in program.graph.nodes if n.op == "call_function"}
    assert not [name for name in called if "transformer_fast" in name]
    torch.testing.assert_close(program.module()(x), theirs.eval()(x))
    for whole in (ours, nn.Sequential(ours)):
        torch.testing.assert_close(torch.fx.symbolic_trace(whole)(x), theirs(x))


#: Bodies of forwards that do not compute the network alone, or may later do more.
MORE = {
    "residual": "return x + self.w_out(self.act(self.w_in(x)))",
    "scaled": "return self.w_out(self.act(2 * self.w_in(x)))",
    "hidden twice": """
        hidden = self.w_in(x)
        self.w_out(hidden)
        return self.w_out(self.act(hidden))
    """,
    "reads its input": """
        if x.sum() > 0:
            return self.w_out(self.act(self.w_in(x)))
        return x
    """,
    "by mode": """
        x = self.w_in(x)
        return self.w_out(self.act(x) if self.training else x)
    """,
    "remembers": """
        self.hidden = self.act(self.w_in(x))
        return self.w_out(self.hidden)
    """,
    "lists": """
        self.__dict__.setdefault("seen", []).append(x)
        return self.w_out(self.act(self.w_in(x)))
    """,
    "without gradients": """
        with torch.no_grad():
            x = self.w_in(x)
        return self.w_out(self.act(x))
    """,
    "without autocast": """
        with torch.autocast("cpu", enabled=False):
            return self.w_out(self.act(self.w_in(x)))
    """,
    "lists outside": """
        seen.append(x)
        return self.w_out(self.act(self.w_in(x)))
    """,
    "prints": """
        print(x.shape)
        return self.w_out(self.act(self.w_in(x)))
    """,
    "reads an item": """
        scale = x.sum().item()
        return self.w_out(self.act(self.w_in(x)))
    """,
    "a buffer in place": """
        self.out.step.add_(1)
        return self.w_out(self.act(self.w_in(x)))
    """,
    "random": "return self.w_out(self.act(self.w_in(x))) + 0 * torch.rand(1)",
    "gated": "return self.w_out(self.act(self.w_in(x)) * self.up(x))",
    "a condition that may change": """
        x = self.act(self.w_in(x))
        if self.drop.p > 0:
            x = self.drop(x)
        return self.w_out(x)
    """,
    "unused": """
        hidden = self.act(self.w_in(x))
        other = self.out(x)
        return self.w_out(hidden)
    """,
    "a function of another module": "return self.w_out(self.act(twice(self.w_in(x))))",
    "further argument": "return self.w_out(self.act(self.w_in(x)))",
    "decorated": "return self.w_out(self.act(self.w_in(x)))",
    "property": "return self.w_out(self.act(self.w_in(x)))",
}


def _written(body: str, head: str = "def forward(self, x):") -> type:
    """Returns a class with this forward; its source cannot be read."""
    source = f"{head}\n{textwrap.indent(textwrap.dedent(body), '    ')}"
    names: dict[str, Any] = {
        "torch": torch, "F": F, "twice": lambda x: 2 * x, "seen": [], "own_relu": lambda x: F.relu(x),
        "WITH_RELU": True,
    }  # fmt: skip
    exec(source, names)
    return type("Written", (Modules,), {"forward": names["forward"]})


#: Bodies of forwards that compute the network and nothing else.
PLAIN = {
    "plain": "return self.w_out(self.act(self.w_in(x)))",
    "by an attribute": """
        x = self.w_in(x)
        if self.with_act:
            x = self.act(x)
        return self.w_out(x)
    """,
    "by a constant": """
        x = self.w_in(x)
        return self.w_out(self.act(x) if WITH_RELU else x)
    """,
    "by a property of the input": """
        assert x.shape[-1] == self.w_in.in_features and x.is_floating_point()
        return self.w_out(self.act(self.w_in(x)))
    """,
    "a function of another module": "return self.w_out(own_relu(self.w_in(x)))",
    "named children": "return self.w_out(getattr(self, 'act')(self.w_in(x)))",
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_networks_are_replaced(name: str, calls: list[Any]) -> None:
    """The positive control for the next test. Attributes that the forward reads may change later."""
    kind = _written(PLAIN[name])
    theirs = kind(nn.ReLU())
    theirs.with_act = name == "by an attribute"
    ours = copy.deepcopy(theirs)
    assert accelerate(ours)[""].now == FEED_FORWARD
    for grad in (False, True):
        assert_same_numbers(ours, theirs, (_x(),), {}, grad)
    assert len(calls) == 2
    ours.with_act = theirs.with_act = False
    kind.forward.__globals__["WITH_RELU"] = False
    assert_same_numbers(ours, theirs, (_x(),), {}, grad=False)
    assert len(calls) == 2 + (name not in ("by an attribute", "by a constant"))


def test_captures_have_no_side_effects() -> None:
    seen: list[Any] = []
    model = _written(PLAIN["plain"])(nn.GELU())
    model.out.register_buffer("step", torch.zeros(()))
    for module in model.modules():
        module.register_forward_hook(lambda *given: seen.append(given))
        module.register_forward_pre_hook(lambda *given: seen.append(given))
    model.drop.p = model.out.p = 0.5
    before, state = [dict(vars(module)) for module in model.modules()], torch.get_rng_state()
    versions = [x._version for x in (*model.parameters(), *model.buffers())]
    assert mlp._steps(model) == ["w_in", "act", "w_out"]
    assert not seen
    assert torch.equal(torch.get_rng_state(), state)
    assert [dict(vars(module)) for module in model.modules()] == before
    assert [x._version for x in (*model.parameters(), *model.buffers())] == versions


def test_calls_that_fail_in_a_capture_are_not_logged() -> None:
    class Turned(Modules):
        def forward(self, x: Tensor) -> Tensor:
            return self.w_out(self.act(self.w_in(x.mT)))  # fails: the captured x is not square

    log, handler = (
        logging.getLogger("torch._subclasses.fake_tensor"),
        logging.handlers.BufferingHandler(9),
    )
    log.addHandler(handler)
    accelerate(Turned(nn.GELU()))
    log.removeHandler(handler)
    assert not handler.buffer


@pytest.mark.parametrize("name", MORE)
def test_forwards_that_do_more_are_left(name: str) -> None:
    head = {
        "further argument": "def forward(self, x, mask=None):",
        "decorated": "@torch.enable_grad()\ndef forward(self, x):",
    }.get(name, "def forward(self, x):")
    kind = _written(MORE[name], head)
    theirs = kind(nn.GELU())
    if name == "gated":
        theirs.up = nn.Linear(M, H)
    if name == "a buffer in place":
        theirs.out.register_buffer("step", torch.zeros(()))
    if name == "property":
        kind.act = property(lambda self: nn.Tanh())
    before, state = set(theirs.__dict__), torch.get_rng_state()
    ours = copy.deepcopy(theirs)
    report = accelerate(ours)
    assert type(ours) is kind
    assert "w_in" in {entry.name for entry in report.swapped}
    assert set(ours.__dict__) == before
    assert torch.equal(torch.get_rng_state(), state)
    for grad in (False, True):
        assert_same_numbers(ours, theirs, (_x(),), {}, grad)


def _silu(x: Tensor) -> Tensor:
    return F.silu(x)


_READ = "return self.w_out(F.relu(self.w_in(x)))"


def _wrapped(kind: type) -> None:
    inner = kind.forward

    @functools.wraps(inner)
    def forward(self: Any, x: Tensor) -> Tensor:
        return 2 * inner(self, x)

    kind.forward = forward


#: Changes of a class's code after which its modules have other results.
STALE = {
    "wrapped": _wrapped,
    "other code": lambda kind: setattr(kind.forward, "__code__", Functions.forward.__code__),
    "other method": lambda kind: setattr(kind, "forward", lambda self, x: self.w_in(x)),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", STALE)
def test_changed_classes(name: str, first: bool) -> None:
    """Results are right whether the class changes before or after `accelerate`."""
    kind = _written(_READ)
    theirs = kind(nn.GELU())
    theirs.fc1, theirs.fc2, theirs.activation = theirs.w_in, nn.Linear(H, M), _silu
    ours = copy.deepcopy(theirs)
    if first:
        STALE[name](kind)
        accelerate(ours)
        # The code of `Functions.forward` is a network, too, so that change is replaced.
        assert (type(ours) is kind) is (name != "other code")
    else:
        assert accelerate(ours)[""].now == FEED_FORWARD
        STALE[name](kind)
    assert_same_numbers(ours, theirs, (_x(),), {}, grad=True)


def test_closure_variables_are_not_read_as_globals() -> None:
    relu = F.gelu

    class Local(Modules):
        def forward(self, x: Tensor) -> Tensor:
            return self.w_out(relu(self.w_in(x)))

    Local.forward.__globals__["relu"] = F.relu
    try:
        ours = copy.deepcopy(theirs := Local(nn.Identity()))
        accelerate(ours)
    finally:
        del Local.forward.__globals__["relu"]
    assert_same_numbers(ours, theirs, (_x(),), {}, grad=False)


def test_slices_of_a_sequential_match_and_restore() -> None:
    ours, theirs = _pair(sequential)
    for cut in (slice(3), slice(1, 5), slice(4, None)):
        part = ours[cut]
        again = pickle.loads(pickle.dumps(part))
        assert type(again) is nn.Sequential
        assert_same_numbers(
            again, theirs[cut], (torch.randn(4, part[0].weight.shape[-1]),), {}, True
        )
        copied = copy.deepcopy(part)
        for one in (part, copied):
            assert "" in restore(one)
            assert type(one) is nn.Sequential
            assert restore(one) == []
    assert type(ours) is not nn.Sequential


# Norms, and residual connections with a norm.


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.eps = nn.Parameter(torch.rand(M) + 0.5), 1e-2

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return y.to(x.dtype) * self.gain


class Annotated(nn.Module):
    """The norm of The Annotated Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.rand(M) + 0.5), nn.Parameter(torch.randn(M))

    def forward(self, x: Tensor) -> Tensor:
        spread = x.std(-1, keepdim=True) + 1e-6
        return self.a * (x - x.mean(-1, keepdim=True)) / spread + self.b


class OfDimensionTwo(RMSNorm):
    """A norm over the last dimension for inputs of rank 3 only."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(2, keepdim=True) + self.eps) * self.gain


class Mean(nn.Module):
    """Not a norm: only the mean is subtracted."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.rand(M) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.a * (x - x.mean(-1, keepdim=True))


class Output(nn.Module):
    """Projection, dropout, residual sum, norm; ``first``: the residual is the first argument."""

    def __init__(self, first: bool = False, p: float = 0.0, sign: int = 1) -> None:
        super().__init__()
        self.dense, self.drop, self.norm = nn.Linear(H, M), nn.Dropout(p), nn.LayerNorm(M)
        self.first, self.sign = first, sign

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        x, residual = (other, one) if self.first else (one, other)
        x = self.drop(self.dense(x))
        return self.norm(x + residual if self.sign > 0 else x - residual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [RMSNorm, Annotated])
def test_norms_written_by_hand_are_one_op(kind: Any, dtype: torch.dtype) -> None:
    theirs = kind().to(dtype)
    ours = copy.deepcopy(theirs)
    assert accelerate(ours)[""].now.endswith("mlp.Norm")
    for grad in (False, True):
        assert_same_numbers(ours, theirs, (_x(dtype).requires_grad_(grad),), {}, grad)
    if kind is RMSNorm:
        for model in (ours, theirs):
            model.eps = 3.0  # another norm: its own forward runs
        assert torch.equal(ours(x := _x(dtype)), theirs(x))
    for other in (Mean, OfDimensionTwo):
        assert not accelerate(other()).swapped


@pytest.mark.parametrize("first", [False, True])
def test_residual_connections_with_a_norm_are_one_op(
    first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = Output(first)
    ours = copy.deepcopy(theirs)
    assert accelerate(ours)[""].now.endswith("mlp.ResidualNorm")
    found = spied(monkeypatch, functional, "add_layer_norm", lambda *_, dropout_p, **__: dropout_p)
    given = torch.randn(2, 3, H, requires_grad=True), torch.randn(2, 3, M, requires_grad=True)
    given = given[::-1] if first else given
    assert_same_numbers(ours, theirs, given, {}, grad=True)
    assert_same_numbers(ours, theirs, (), dict(zip(("one", "other"), given, strict=True)), False)
    assert found == [0.0, 0.0]
    ours.drop.p = theirs.drop.p = 1.0
    assert_same_numbers(ours, theirs, given, {}, grad=True)
    assert found[2:] == [1.0]
    for model in (ours, theirs):
        model.norm.register_forward_hook(lambda module, args, output: 2 * output)
    assert_same_numbers(ours, theirs, given, {}, grad=True)
    assert len(found) == 3
    assert accelerate(Output(sign=-1)).entries[0].name == "dense"  # a difference is no residual sum


def test_a_linear_map_and_its_activation_are_one_op(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = nn.Sequential(nn.Linear(M, H), nn.GELU(), nn.Dropout(0.0))
    ours = copy.deepcopy(theirs)
    assert accelerate(ours)[""].now == FEED_FORWARD
    found = spied(monkeypatch, functional, "linear", lambda *_, activation=None, **__: activation)
    assert_same_numbers(ours, theirs, (_x().requires_grad_(),), {}, grad=True)
    assert found == ["gelu"]
    assert not any(
        e.name == "" for e in accelerate(nn.Sequential(nn.Linear(M, H), nn.Tanh())).entries
    )
