"""Modules that accelerate leaves unchanged, and the reasons in its report."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accelerate_checks import B, F, H, M, T, decoder_layer, encoder_layer, form
from module_checks import assert_same_numbers, check_budget, fast_path
from torch import Tensor
from torch.nn.utils import parametrizations, parametrize, prune

from transformer_fast import accelerate, nn, restore
from transformer_fast.accelerate import register_converter


def _x() -> Tensor:
    return torch.randn(B, T, M)


class WithConfig(torch.nn.TransformerEncoderLayer):
    """Overrides only the constructor, and adds a method."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config["width"], H, F, dropout=0.0, batch_first=True)
        self.config = config

    def width(self) -> int:
        return self.config["width"]


def test_subclasses_without_overrides_are_replaced() -> None:
    theirs = WithConfig({"width": M})
    ours = copy.deepcopy(theirs)
    report = accelerate(ours)
    assert report[""].now == "transformer_fast.nn.TransformerEncoderLayer"
    assert isinstance(ours, WithConfig)
    assert isinstance(ours, nn.TransformerEncoderLayer)
    assert ours.width() == M
    assert repr(ours) == repr(theirs)
    assert_same_numbers(ours, theirs, (_x(),), {}, grad=True)
    other = WithConfig({"width": M})
    accelerate(other)
    assert type(other) is type(ours)
    restore(ours)
    assert type(ours) is WithConfig


def test_modules_with_replaced_methods_are_left() -> None:
    norm = torch.nn.LayerNorm(M)
    norm.forward = lambda x: x  # type: ignore[method-assign]
    assert "forward was replaced on the instance" in accelerate(norm)[""].reason
    layer = encoder_layer()
    layer._sa_block = lambda x, *args, **kwargs: x  # type: ignore[method-assign]
    assert "_sa_block was replaced on the instance" in accelerate(layer)[""].reason


class Double(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_parametrised_modules_are_left() -> None:
    theirs = encoder_layer(dropout=0.0)
    parametrize.register_parametrization(theirs.self_attn, "in_proj_weight", Double())
    parametrize.register_parametrization(theirs.norm1, "weight", Double())
    parametrizations.weight_norm(theirs.linear1)
    ours = copy.deepcopy(theirs)
    report = accelerate(ours)
    assert "its in_proj_weight is parametrised" in report["self_attn"].reason
    assert "its weight is parametrised" in report["norm1"].reason
    assert {e.name for e in report.swapped} == {"", "norm2"}
    assert_same_numbers(ours, theirs, (_x(),), {}, grad=True)
    restore(ours)
    parametrize.remove_parametrizations(ours.norm1, "weight")
    assert type(ours.norm1) is torch.nn.LayerNorm


def test_parametrising_afterwards_blocks_restore() -> None:
    theirs = torch.nn.LayerNorm(M)
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    for norm in (theirs, ours):
        parametrize.register_parametrization(norm, "weight", Double())
    assert_same_numbers(ours, theirs, (_x(),), {}, grad=True)
    both = torch.nn.Sequential(ours, torch.nn.LayerNorm(M))
    accelerate(both)
    with pytest.raises(RuntimeError, match="0 cannot be restored: after accelerate its class"):
        restore(both)
    assert type(both[1]) is nn.LayerNorm  # no module was restored
    parametrize.remove_parametrizations(ours, "weight")
    assert restore(both) == ["0", "1"]


def test_pruned_modules_are_replaced() -> None:
    model = encoder_layer(dropout=0.0)
    prune.l1_unstructured(model.linear1, "weight", 0.5)
    prune.l1_unstructured(model.self_attn, "in_proj_weight", 0.5)
    assert accelerate(model, verify=_x()).verified
    assert type(model) is nn.TransformerEncoderLayer
    assert (model.linear1.weight == 0).sum() >= model.linear1.weight.numel() // 2


class Lora(torch.nn.Module):
    """A low-rank update around a linear layer, as adapter libraries wrap it."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, 2, bias=False)
        self.up = torch.nn.Linear(2, base.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("make", [encoder_layer, decoder_layer])
def test_layers_with_adapters_keep_their_results(make: Any) -> None:
    theirs = make(dropout=0.0)
    theirs.linear1, theirs.linear2 = Lora(theirs.linear1), Lora(theirs.linear2)
    theirs.self_attn.out_proj = Lora(theirs.self_attn.out_proj)
    ours = copy.deepcopy(theirs)
    report = accelerate(ours)
    assert "out_proj is a Lora; PyTorch never calls it" in report["self_attn"].reason
    if make is encoder_layer:
        # PyTorch's inference path reads linear1.weight and skips the adapter.
        assert "never calls its linear1 (a Lora), and the replacement would" in report[""].reason
    else:
        assert report[""].in_parts == {"feed_forward": "its linear1 is a Lora"}
    args = (_x(),) if make is encoder_layer else (_x(), _x())
    assert_same_numbers(ours, theirs, args, {}, grad=True)
    assert_same_numbers(ours.eval(), theirs.eval(), args, {}, grad=False)


def test_attention_with_a_hooked_output_projection_is_left() -> None:
    attention = torch.nn.MultiheadAttention(M, H)
    attention.out_proj.register_forward_hook(lambda module, args, output: output * 2)
    assert "out_proj has hooks" in accelerate(attention)[""].reason


class Quantised(torch.Tensor):
    """Placeholder for a tensor subclass with its own memory format."""


def test_weights_of_tensor_subclasses_are_left() -> None:
    layer = encoder_layer()
    layer.linear2.weight = torch.nn.Parameter(layer.linear2.weight.data.as_subclass(Quantised))
    report = accelerate(layer)
    assert report[""].reason == "its linear2.weight is a Quantised, which no kernel supports"
    assert report["norm1"].outcome == "swapped"


def _quantisable() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(M, F), torch.nn.ReLU(), torch.nn.Linear(F, M), torch.nn.LayerNorm(M)
    ).eval()


def _statically(model: torch.nn.Module) -> torch.nn.Module:
    stubs = torch.ao.quantization.QuantStub(), torch.ao.quantization.DeQuantStub()
    whole = torch.nn.Sequential(stubs[0], model[:3], stubs[1], model[3])
    whole.qconfig, whole[3].qconfig = torch.ao.quantization.get_default_qconfig("x86"), None
    torch.ao.quantization.prepare(whole, inplace=True)(_x())
    return torch.ao.quantization.convert(whole)


def _by_fx(model: torch.nn.Module) -> torch.nn.Module:
    from torch.ao.quantization import quantize_fx

    mapping = torch.ao.quantization.get_default_qconfig_mapping("x86")
    prepared = quantize_fx.prepare_fx(model, mapping, (_x(),))
    prepared(_x())
    return quantize_fx.convert_fx(prepared)


def _in_training(model: torch.nn.Module) -> torch.nn.Module:
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
    return torch.ao.quantization.prepare_qat(model.train())


#: name -> (a function that quantises a model, the number of modules that are then left unchanged)
QUANTISE: dict[str, tuple[Any, int]] = {
    "dynamic": (
        lambda model: torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}), 2
    ),
    "static": (_statically, 2),
    "fx": (_by_fx, 3),
    "in training": (_in_training, 4),
}  # fmt: skip

quantising = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore:torch.quantize_per_tensor",
    "ignore:Please use quant_min",
    "ignore:must run observer",
)


@pytest.fixture
def engine() -> str:
    if torch.backends.quantized.engine == "none":
        pytest.skip("this build of torch has no quantised kernels")
    return torch.backends.quantized.engine


@quantising
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("name", QUANTISE)
def test_quantised_modules_are_left(name: str) -> None:
    """Quantised modules stay; the others are replaced, unless they still wait for conversion."""
    quantise, count = QUANTISE[name]
    theirs = quantise(_quantisable()).eval()
    ours = copy.deepcopy(theirs)
    report = accelerate(ours)
    reasons = [e.reason for e in report.left]
    assert reasons == count * [reasons[0]], str(report)
    assert reasons[0].startswith("it is quantised" if name != "in training" else "it is prepared")
    assert "hand-written" not in str(report)
    assert [e.kind for e in report.swapped] == ["LayerNorm"] * (name in ("dynamic", "static"))
    x = _x()
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x))


@quantising
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("name", QUANTISE)
def test_quantising_replaced_modules_warns(name: str) -> None:
    """PyTorch would silently convert none of them; our modules warn."""
    model = _quantisable()
    accelerate(model)
    quantise, count = QUANTISE[name]
    with pytest.warns(UserWarning, match=r"call transformer_fast.restore\(model\)") as warned:
        quantise(model)
    (place,) = {w.filename for w in warned if "restore" in str(w.message)}
    assert place == __file__
    restore(model)
    model.__dict__.pop("qconfig", None)
    for module in model:
        module.__dict__.pop("qconfig", None)
    assert len(accelerate(quantise(model)).left) == count


@quantising
@pytest.mark.usefixtures("engine")
def test_layers_of_dynamically_quantised_linears_match() -> None:
    theirs = encoder_layer(dropout=0.0).eval()
    torch.ao.quantization.quantize_dynamic(theirs, {torch.nn.Linear}, inplace=True)
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    x = _x()
    # PyTorch's inference path does not support quantised layers either.
    with torch.no_grad(), fast_path(False):
        torch.testing.assert_close(ours(x), theirs(x), rtol=0.02, atol=0.02)


class HandWritten(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(M)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + 1


class FastHandWritten(HandWritten):
    def forward(self, x: Tensor) -> Tensor:
        return 1 + nn.functional.layer_norm(x, (M,), self.norm.weight, self.norm.bias)


class Further(HandWritten):
    pass


def test_registered_converters_are_used() -> None:
    theirs = torch.nn.Sequential(HandWritten(), Further(), HandWritten())
    ours = copy.deepcopy(theirs)
    register_converter(HandWritten, FastHandWritten)
    report = accelerate(ours)
    assert [type(m) for m in ours] == [FastHandWritten, Further, FastHandWritten]
    assert report["0"].now.endswith("FastHandWritten")
    assert report["1"].reason == (
        "a converter is registered for HandWritten, and not for its subclass Further"
    )
    assert_same_numbers(ours, theirs, (_x(),), {}, grad=True)
    assert "0" in restore(ours)
    assert [type(m) for m in ours] == [HandWritten, Further, HandWritten]

    register_converter(HandWritten, lambda module: "not on a Sunday")
    assert accelerate(ours)["2"].reason == "not on a Sunday"
    accelerate.register_converter(HandWritten, None)  # the name on the API page
    assert not accelerate(ours).left


def test_failing_converters_leave_the_model_unchanged() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(M), HandWritten(), encoder_layer())
    before = form(model)

    def fails(module: torch.nn.Module) -> str:
        raise ZeroDivisionError

    class Elsewhere(HandWritten):
        __slots__ = ("place",)  # another memory layout: Python refuses the class assignment

    class Unrelated(torch.nn.Module):
        pass

    for converter, error in (
        (fails, ZeroDivisionError),
        (Elsewhere, TypeError),
        (lambda module: Unrelated, TypeError),
        (lambda module: None, TypeError),
    ):
        register_converter(HandWritten, converter)  # type: ignore[arg-type]
        with pytest.raises(error):
            accelerate(model)
        assert form(model) == before


def _of_two_dtypes(name: str) -> torch.nn.Module:
    layer = encoder_layer(dropout=0.0)
    layer.get_submodule(name).bfloat16()
    return layer


def _without_weight() -> torch.nn.Module:
    layer = torch.nn.Linear(M, M)
    del layer.weight
    return layer


#: name -> (a module that cannot be called yet, a part of its report)
NOT_YET: dict[str, tuple[Any, str]] = {
    "lazy": (lambda: torch.nn.LazyLinear(M), "its weight is not initialised; call the model once"),
    "lazy network": (
        lambda: torch.nn.Sequential(torch.nn.LazyLinear(F), torch.nn.ReLU(), torch.nn.Linear(F, M)),
        "its weight is not initialised; call the model once before accelerate",
    ),
    "mixed dtypes": (
        lambda: _of_two_dtypes("linear1"),
        "feed_forward: this call raises ValueError",
    ),
    "no weight": (_without_weight, "No details of the model (AttributeError"),
}


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("name", NOT_YET)
def test_the_report_of_uncallable_modules_does_not_raise(name: str) -> None:
    make, expected = NOT_YET[name]
    model = make()
    before = form(model)
    assert expected in str(accelerate(model))
    restore(model)
    assert form(model) == before


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_networks_are_fused_after_the_first_call() -> None:
    ours = NOT_YET["lazy network"][0]()
    accelerate(ours)
    ours(_x())
    again = accelerate(ours)
    assert again[""].in_parts == {}
    assert [entry.name for entry in again.swapped] == ["", "0"]
    theirs = copy.deepcopy(ours)
    assert restore(theirs) == ["", "0", "2"]
    assert_same_numbers(ours, theirs, (_x(),), {}, grad=True)


@pytest.mark.parametrize("name", ["linear1", "self_attn"])
def test_mixed_dtypes_under_autocast_match(name: str) -> None:
    theirs, x = _of_two_dtypes(name), _x()
    ours = copy.deepcopy(theirs)
    exact = copy.deepcopy(theirs).double()(x.double())
    with torch.autocast("cpu", torch.bfloat16):
        accelerate(ours)
        check_budget(ours(x), theirs(x), exact)


def test_wrong_registrations_raise() -> None:
    with pytest.raises(TypeError, match=r"cls must be a subclass of torch\.nn\.Module"):
        register_converter(int, lambda module: "")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must return a subclass of it or a reason"):
        register_converter(HandWritten, torch.nn.LayerNorm)
    with pytest.raises(TypeError, match="must be a subclass of HandWritten or a function"):
        register_converter(HandWritten, 3)  # type: ignore[arg-type]


def _own(base: Any, method: str = "forward", name: str = "Own") -> Any:
    """Returns a subclass whose method doubles the (first) result of the base class."""

    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = getattr(super(own, self), method)(*args, **kwargs)
        return (found[0] * 2, *found[1:]) if isinstance(found, tuple) else found * 2

    own = type(name, (base,), {method: doubled})
    return own


class OwnMix(torch.nn.Module):
    """A mixin before PyTorch's class in the MRO, which counts as an override."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs) * 2


class MixedNorm(OwnMix, torch.nn.LayerNorm):
    pass


class Sealed(torch.nn.LayerNorm):
    def __init_subclass__(cls) -> None:
        raise RuntimeError("sealed")


class OwnMasks(torch.nn.MultiheadAttention):
    def merge_masks(self, *args: Any) -> Any:
        return super().merge_masks(*args)


class OwnProject(torch.nn.MultiheadAttention):
    """Has a method with the name of one of ours, for another purpose."""

    def _project(self, x: Tensor) -> Tensor:
        return x


OwnLayer = _own(torch.nn.TransformerEncoderLayer)
OwnAttention = _own(torch.nn.MultiheadAttention)


def _layer_with_own_attention() -> torch.nn.Module:
    layer = encoder_layer(dropout=0.0)
    layer.self_attn.__class__ = OwnAttention
    return layer


#: (a module, its number of inputs, the name of the submodule that is left, the reason)
SUBCLASSES: list[tuple[Any, int, str, str]] = [
    (lambda: MixedNorm(M), 1, "", "MixedNorm has its own forward"),
    (lambda: Sealed(M), 1, "", "cannot be subclassed: sealed"),
    (lambda: OwnLayer(M, H, F, 0.0), 1, "", "Own has its own forward"),
    *(
        (lambda base=base, method=method: _own(base, method)(M, H, F, 0.0), inputs, "",
         f"Own has its own {method}")
        for base, inputs, method in (
            (torch.nn.TransformerEncoderLayer, 1, "_sa_block"),
            (torch.nn.TransformerDecoderLayer, 2, "_ff_block"),
            (torch.nn.TransformerDecoderLayer, 2, "_mha_block"),
        )
    ),
    (lambda: OwnMasks(M, H), 3, "", "OwnMasks has its own merge_masks"),
    (lambda: OwnProject(M, H), 3, "", "its attribute _project has the name of a method"),
    (_layer_with_own_attention, 1, "self_attn", "Own has its own forward"),
    (
        lambda: _own(torch.nn.TransformerEncoder)(
            encoder_layer(dropout=0.0), 2, enable_nested_tensor=False
        ), 1, "", "Own has its own forward",
    ),
    (
        lambda: _own(torch.nn.TransformerDecoder)(decoder_layer(dropout=0.0), 2), 2, "",
        "Own has its own forward",
    ),
    (
        lambda: _own(torch.nn.Transformer)(M, H, 1, 1, F, 0.0, batch_first=True), 2, "",
        "Own has its own forward",
    ),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize(("make", "inputs", "place", "reason"), SUBCLASSES)
def test_subclasses_keep_what_they_override(
    make: Any, inputs: int, place: str, reason: str
) -> None:
    theirs = make()
    ours = copy.deepcopy(theirs)
    kind = type(ours.get_submodule(place))
    report = accelerate(ours)
    assert report[place].outcome == "left"
    assert reason in report[place].reason
    assert type(ours.get_submodule(place)) is kind
    if kind is OwnLayer:  # its submodules are replaced
        inside = {"self_attn", "norm1", "norm2", "linear1", "linear2"}
        assert {e.name for e in report.swapped} == inside
    args = tuple(_x() for _ in range(inputs))
    assert_same_numbers(ours.train(), theirs.train(), args, {}, grad=True)
    assert_same_numbers(ours.eval(), theirs.eval(), args, {}, grad=False)


def test_overrides_of_our_classes_are_reported() -> None:
    model = torch.nn.Sequential(_own(nn.LayerNorm)(M), nn.LayerNorm(M), nn.LayerNorm(M))
    model[1].forward = lambda x: x
    report = accelerate(model)
    assert report["0"].reason == "Own has its own forward"
    assert report["1"].reason == "its forward was replaced on the instance"
    assert report["2"].outcome == "already"


class Low(torch.nn.Linear):
    pass


#: name -> (a change of the layer or arguments of its constructor, the op that is then not fused,
#: the reason)
PARTS: dict[str, tuple[Any, str, str]] = {
    "subclass": (
        lambda m: setattr(m.linear2, "__class__", Low), "feed_forward", "its linear2 is a Low"
    ),
    "hook": (
        lambda m: m.linear1.register_forward_hook(lambda *_: None), "feed_forward",
        "its linear1 has hooks",
    ),
    "forward": (
        lambda m: setattr(m.dropout, "forward", lambda x: x), "feed_forward",
        "its dropout has a forward that was replaced on the instance",
    ),
    "compiled": (
        lambda m: m.linear1.compile(backend="eager"), "feed_forward",
        "its linear1 is compiled on its own",
    ),
    "function": (
        {"activation": torch.tanh}, "feed_forward",
        "its activation is tanh, which no kernel supports",
    ),
    "module": (
        {"activation": torch.nn.Tanh()}, "feed_forward",
        "its activation is a Tanh, which no kernel supports",
    ),
    "norm": (
        lambda m: setattr(m, "norm2", torch.nn.Identity()), "add_layer_norm",
        "its norm2 is an Identity",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", PARTS)
@pytest.mark.parametrize("make", [encoder_layer, decoder_layer])
def test_the_report_says_why_an_op_is_not_fused(make: Any, what: str) -> None:
    change, op, reason = PARTS[what]
    layer = make(dropout=0.0, **(change if isinstance(change, dict) else {}))
    if callable(change):
        change(layer)
    entry = accelerate(layer)[""]
    assert entry.outcome == "swapped"
    assert entry.in_parts == {op: reason}
    assert f"{op} is not fused: {reason}" in str(entry)


@pytest.mark.parametrize("name", ["linear1", "norm2", "self_attn", "activation", "forward"])
def test_layers_with_parts_that_inference_skips_are_left(name: str) -> None:
    """In PyTorch, inference then ignores the change, and training does not; both must stay so."""
    theirs = encoder_layer(dropout=0.0)
    if name == "linear1":
        theirs.linear1.__class__ = _own(torch.nn.Linear)
    elif name == "norm2":
        theirs.norm2.__class__ = MixedNorm
    elif name == "self_attn":
        theirs.self_attn.__class__ = OwnAttention
    elif name == "activation":
        theirs.activation = torch.nn.functional.gelu
    else:
        name, forward = "linear2", theirs.linear2.forward
        theirs.linear2.forward = lambda x: 2 * forward(x)
    theirs.eval()
    x = _x()
    with torch.no_grad():
        fast = theirs(x)
        with fast_path(False):
            assert not torch.allclose(theirs(x), fast, atol=1e-2)
        ours = copy.deepcopy(theirs) if name != "linear2" else theirs
        report = accelerate(ours)
        torch.testing.assert_close(ours(x), fast)
    assert f"never calls its {name}" in report[""].reason
    assert "and the replacement would, which changes results" in report[""].reason
    assert report["norm1"].outcome == "swapped"


def test_global_hooks_prevent_fusion() -> None:
    layer = encoder_layer()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        reasons = accelerate(layer)[""].in_parts
    finally:
        handle.remove()
    assert set(reasons.values()) == {"its modules have global hooks"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_submodules_are_reported() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(M), torch.jit.script(torch.nn.LayerNorm(M)))
    report = accelerate(model)
    assert [e.name for e in report.swapped] == ["0"]
    assert "A TorchScript module (1) cannot be replaced" in str(report)
