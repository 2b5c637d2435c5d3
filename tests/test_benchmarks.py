"""The suites and their peers."""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import importlib.util
import json
import os
import sys
import types
from typing import Any

import pytest
import torch
from harness import ISAS, python
from torch._dynamo.backends import registry
from torch._dynamo.utils import counters
from torch._inductor import config
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import benchmarks.hand_written
import transformer_fast
from benchmarks import peers, run, store
from benchmarks.__main__ import main
from benchmarks.peers import Remote, candidates, inductor_tuned, liger, load, onnx_runtime, zentorch
from benchmarks.peers import flex_attention as flex
from benchmarks.scope import Scope
from benchmarks.suites import (
    SCALING,
    SUITES,
    decode,
    hand_written,
    models,
    ops,
    overhead,
    scaling,
    training,
)
from transformer_fast.measure.benchmark_case import run_case
from transformer_fast.measure.calls import forced
from transformer_fast.measure.clock import Plan
from transformer_fast.measure.modules import twins, with_fast_path
from transformer_fast.measure.transformers import Size
from transformer_fast.reference import attention
from transformer_fast.specs import OPS

pytest.importorskip("matplotlib", reason="the report needs matplotlib")
pytestmark = pytest.mark.usefixtures("threads")

FAST = Plan(rounds=3, seconds=0.01, least=2, sample=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("peer", peers.load(), ids=lambda peer: peer.__name__.rpartition(".")[2])
def test_a_peer_does_the_same_work_or_says_why_not(peer, dtype):
    if peer.__name__.endswith(("torch_compile", "inductor_tuned")):
        pytest.skip("compiling takes long; torch's own tests are about it")
    if (reason := peers.why_not(peer)) is not None:
        pytest.skip(reason)
    limits = (
        {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    )
    if hasattr(peer, "op"):
        for op in ("linear", "feed_forward"):
            arguments = OPS[op].cases[0].build(dtype, "cpu", None)
            for offered in peers.candidates([peer], "op", op, arguments):
                if offered.run is not None:
                    right = OPS[op].reference(*arguments)
                    torch.testing.assert_close(offered.run(*arguments), right, **limits)
    if hasattr(peer, "encoder_layer"):
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True).eval().to(dtype)
        padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        for hidden in (None, padding):
            arguments = torch.randn(2, 5, 32).to(dtype), None, hidden
            (offered,) = peers.candidates([peer], "encoder_layer", layer, arguments)
            assert not offered.ours
            if offered.run is None:
                assert offered.reason
                continue
            with torch.no_grad():
                real = slice(None) if hidden is None else ~hidden
                got, right = offered.run(*arguments), layer(*arguments)
            torch.testing.assert_close(got[real], right[real], **limits)


def _translators() -> tuple[Any, Any]:
    size = Size(32, 4, 64, layers=2, vocabulary=40)
    return twins(lambda nn: decode.Translator(nn, size, 20), torch.float32, "cpu")


def test_everyone_decodes_alike_and_wrong_tokens_are_found():
    ours, theirs = _translators()
    source = torch.randint(3, 40, (3, 7))
    oracle = copy.deepcopy(theirs).double()
    checker = decode.GreedyJudge(oracle, forced(ours.logits, "reference"), 5)
    offered = peers.candidates(peers.load(), "decode", theirs, (source,), 5)
    runs = [decode.cached(ours, 5), decode.recomputing(theirs, 5)]
    runs += [candidate.run for candidate in offered if candidate.run is not None]
    with torch.no_grad():
        for run_one in runs:
            parity = checker(run_one(source), (source,))
            assert parity.ok, str(parity)
        right = runs[0](source)
        for place in ((0, 0), (2, 4)):
            wrong = right.clone()
            wrong[place] = (wrong[place] + 7) % 37 + 3
            assert not checker(wrong, (source,)).ok
        assert not checker(right[:, :4], (source,)).ok


def test_a_missing_or_broken_peer_is_a_row_with_its_reason():
    def broken(*arguments: Any) -> Any:
        raise RuntimeError("no licence\nsecond line")

    missing = types.SimpleNamespace(NAME="a", available=lambda: "it is not installed", op=broken)
    failing = types.SimpleNamespace(NAME="b", available=lambda: None, op=broken)
    silent = types.SimpleNamespace(NAME="c", available=lambda: None, op=lambda *a: None)
    without = types.SimpleNamespace(NAME="d", available=lambda: None)
    found = peers.candidates([missing, failing, silent, without], "op", "linear", ())
    assert [(c.name, c.run, c.reason) for c in found] == [
        ("a", None, "it is not installed"),
        ("b", None, "RuntimeError: no licence"),
    ]
    with pytest.raises(ValueError, match="there is no peer 'nobody'"):
        peers.load(["nobody"])


@pytest.mark.parametrize("name", [*SUITES, *SCALING])
def test_every_suite_has_work_with_distinct_names(name):
    if name == "third-party":
        pytest.importorskip("transformers")
    for quick in (True, False):
        work = list((SUITES | SCALING)[name](Scope(quick=quick)))
        assert work
        assert len({label for label, _ in work}) == len(work)


def test_inputs_of_a_case_share_weights_and_nothing_else():
    first, second = Scope().draw("feed_forward", OPS["feed_forward"].cases[0])
    named = [OPS["feed_forward"].named(calls[0]) for calls in (first, second)]
    assert named[0]["weight1"] is named[1]["weight1"]
    assert not torch.equal(named[0]["input"], named[1]["input"])


def test_lengths_have_the_share_that_they_say():
    for share in (0.1, 0.25, 0.5, 0.65, 0.9, 1.0):
        found = models.lengths(16, 400, share)
        assert found.float().mean().item() / 400 == pytest.approx(share, abs=0.01)
        assert 1 <= int(found.min()) <= int(found.max()) <= 400


def test_scaling_leaves_out_what_takes_too_long_and_says_so(monkeypatch):
    monkeypatch.setattr(scaling, "_MOST_SCORES", 8 * 64 * 64)
    for length in (64, 65):
        build = scaling._attention(1, length)
        benchmark_case = scaling._contest(Scope(), "attention", "x", build, None)
        (reference,) = (c for c in benchmark_case.candidates if c.name == "reference")
        assert (reference.run is None) == (length > 64)
        assert length == 64 or "computes 3.4e+04 scores" in str(reference.reason)


def test_threads_are_put_back_after_each_point(two_threads):
    def one(scope: Scope) -> Any:
        build = scaling._layer_norm(2)
        yield "one thread", lambda: scaling._contest(scope, "layer_norm", "1", build, 1)

    run.run_suite("x", one, Scope(plan=FAST, quick=True))
    assert torch.get_num_threads() == 2


def test_a_quick_run_end_to_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "QUICK", FAST)
    monkeypatch.setattr(ops, "_QUICK_FLOPS", 1e6)
    path = tmp_path / "m.json"
    options = ["--quick", "--suite", "overhead", "backward", "--op", "layer_norm", "--peer"]
    assert main([*options, "--json", str(path)]) == 0
    found = store.read(path)
    assert list(found) == ["overhead", "backward"]
    assert json.loads(path.read_text())["suites"]["overhead"]["quick"] is True
    for suite in found.values():
        timed = {one.candidate for one in suite["rows"] if one.time is not None}
        assert {"reference", "torch"} <= timed
        assert any(one.chosen and one.time for one in suite["rows"])
    assert f"written to {path}" in " ".join(capsys.readouterr().out.split())


def test_no_relu_is_near_its_kink_when_gradients_are_compared():
    case = OPS["feed_forward"].bench_cases[2]
    arguments = ops.away_from_the_kink("feed_forward", case.build(torch.float32, "cpu", None))
    x, weight1, bias1, *_ = arguments
    before = torch.nn.functional.linear(x, weight1, bias1)
    assert before.numel() > 500_000
    assert (before.abs() < 1e-4).sum() <= 2
    assert 0.4 < (before > 0).float().mean() < 0.6
    same = OPS["layer_norm"].bench_cases[-1].build(torch.float32, "cpu", None)
    assert all(
        a is b for a, b in zip(ops.away_from_the_kink("layer_norm", same), same, strict=True)
    )


def test_a_training_step_can_be_checked_again_and_again(monkeypatch):
    monkeypatch.setattr(training, "_QUICK", (models.Case(2, 6, 50, 1),))
    for _, make in training.suite(Scope(quick=True)):
        rows = {one.candidate: one for one in run_case(make(), FAST)}
        assert rows[training.EAGER].ok
        assert rows["reference"].ok
        if training.FUSED in rows and hasattr(torch.nn.functional, "linear_cross_entropy"):
            assert rows[training.FUSED].ok
        (chosen,) = (one for one in rows.values() if one.chosen)
        assert chosen.ok, chosen.reason


def test_what_is_written_by_hand_is_the_same_model_and_is_rewritten_whole():
    size = Size(32, 4, 64, layers=2, vocabulary=300)
    theirs, _, written = hand_written._models(Scope(), size, 0.0)
    source, target = models.batches(Scope(), 3, 9, 300, 0.65, 0)
    torch._dynamo.reset()
    transformer_fast.compile_reports(clear=True)
    for run_it in (written, hand_written.rewritten(written)):
        with torch.no_grad():
            right, got = theirs(source, target), run_it(source.tokens, target.tokens)
        torch.testing.assert_close(got[target.real], right[target.real], rtol=1e-4, atol=1e-5)
    (report,) = transformer_fast.compile_reports()
    assert report.counts["attention"] == 6
    assert report.counts["feed_forward"] == 4
    assert not report.left
    state = benchmarks.hand_written.packed(written.state_dict())
    assert {f"transformer.{name}" for name in state if "attn" in name} <= {*theirs.state_dict()}
    for name, value in state.items():
        prefix = "" if name.startswith(("embedding", "output")) else "transformer."
        assert torch.equal(value, theirs.state_dict()[prefix + name])


def test_a_training_step_by_hand_is_judged_under_the_names_of_torch_nn(monkeypatch):
    benchmark_case = hand_written._training(Scope(), models.Case(2, 6, 50, 1))
    rows = {one.candidate: one for one in run_case(benchmark_case, FAST)}
    assert all(one.ok for one in rows.values()), rows
    by_hand = next(c for c in benchmark_case.candidates if c.name == hand_written.AS_WRITTEN)
    arguments = benchmark_case.inputs[0][0]
    loss, *gradients = by_hand.run(*arguments)
    for wrong in (0, 5, len(gradients) - 1):
        spoilt = [g * 1.01 if number == wrong else g for number, g in enumerate(gradients)]
        assert not benchmark_case.checker((loss, *spoilt), arguments).ok


@pytest.mark.skipif("avx2" not in ISAS, reason="there is no avx2 here")
@pytest.mark.parametrize("name", ["avx2", None])
def test_others_are_held_to_the_same_instruction_set(name, monkeypatch):
    """In a process of its own: they read their variables when they are loaded."""
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    program = (
        "import benchmarks, os, torch\n"
        "from benchmarks.peers import onnx_runtime\n"
        "print(torch.backends.cpu.get_cpu_capability(), os.environ.get('ONEDNN_MAX_CPU_ISA'),\n"
        "      'cannot be held' in str(onnx_runtime.available()))\n"
    )
    shown = python("-c", program, TRANSFORMER_FAST_CPU_ISA=name or "")
    capability, onednn, refused = shown.stdout.split()
    if name is None:
        assert (onednn, refused) == ("None", "False")
    else:
        assert (capability.lower(), onednn) == ("avx2", "AVX2")
        assert refused == str(all(map(importlib.util.find_spec, onnx_runtime.PACKAGES)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--suite", "nothing"], "invalid choice: 'nothing'"),
        (["--peer", "nobody"], "there is no peer 'nobody'"),
        (["--threads", "0"], "argument --threads: must be at least 1, not 0"),
        (["--quick", "--thorough"], "not allowed with argument"),
        (["--device", "warp"], "warp"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_options(capsys, options, message):
    with pytest.raises(SystemExit) as stopped:
        main(options)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("op", OPS)
def test_the_cost_of_a_call_can_be_taken_of_every_op(op):
    rows = list(run_case(overhead._contest(Scope(quick=True), op), FAST))
    (chosen,) = (row for row in rows if row.chosen)
    assert chosen.ok, chosen.reason


B, H, T, S, D = 2, 3, 40, 50, 16


def given(mask=None, lengths=None, causal=False, size=S):
    torch.manual_seed(0)
    qkv = torch.randn(B, H, T, D), torch.randn(B, H, size, D), torch.randn(B, H, size, D)
    return (*qkv, mask, lengths, causal, 0.3, 0.0, None, False, False)


CASES = {
    "plain": {},
    "causal": {"causal": True},
    "lengths": {"lengths": torch.tensor([S, 7])},
    "bool mask": {"mask": (torch.arange(T)[:, None] >= torch.arange(S) - 9)[None, None]},
    "float mask": {"mask": torch.linspace(-1, 1, T * S).view(1, 1, T, S)},
    "causal, lengths": {"causal": True, "lengths": torch.tensor([S, 7])},
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", CASES)
def test_flex_attention_means_the_same(name: str) -> None:
    arguments = given(**CASES[name])
    expected = attention(*arguments)[0]
    torch.testing.assert_close(flex.attend(flex_attention, create_block_mask, *arguments), expected)


def test_on_the_cpu_they_say_why_not() -> None:
    peers = load(["flex_attention", "liger"])
    assert peers == [flex, liger]
    for found in candidates(peers, "op", "attention", given()):
        assert found.run is None
        assert found.reason


def test_a_candidate_in_a_process_of_its_own():
    elsewhere = Remote(functools.partial, os.getpid)
    assert elsewhere() not in (os.getpid(), None)
    power = Remote(functools.partial, pow, 2)
    assert [power(exponent) for exponent in (5, 6)] == [32, 64]
    with pytest.raises(TypeError):
        power("five")
    assert power(7) == 128
    with pytest.raises(ValueError, match="invalid literal"):
        Remote(int, "nothing to call")


def _layer() -> tuple[torch.nn.Module, tuple[torch.Tensor, None, torch.Tensor]]:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    return layer, (torch.randn(2, 9, 64), None, torch.arange(9) >= torch.tensor([[9], [4]]))


@pytest.fixture
def settings():
    """Inductor's, which must be the same afterwards."""
    before = config.freezing, config.max_autotune, config.joint_custom_post_pass
    yield
    after = config.freezing, config.max_autotune, config.joint_custom_post_pass
    assert after == before


@pytest.mark.parametrize("peer", [inductor_tuned, zentorch], ids=lambda peer: peer.NAME)
@torch.no_grad()
def test_a_compiler_with_frozen_weights_leaves_them_and_others_alone(peer, settings) -> None:
    if (reason := peer.available()) is not None:
        pytest.skip(reason)
    layer, arguments = _layer()
    seen = ~arguments[2]
    expected = layer(*arguments)[seen]
    weights = {name: weight.clone() for name, weight in layer.state_dict().items()}
    run = peer.encoder_layer(layer, arguments)
    autotuned = counters["inductor"]["select_algorithm_autotune"]
    torch.testing.assert_close(run(*arguments)[seen], expected)
    if peer is inductor_tuned:
        assert counters["inductor"]["select_algorithm_autotune"] > autotuned
    torch.testing.assert_close(layer.state_dict(), weights, rtol=0, atol=0)
    layer.linear1.weight.mul_(2)
    torch.testing.assert_close(run(*arguments)[seen], expected)
    # Plain torch.compile is not given what was compiled for it.
    plain = with_fast_path(torch.compile(layer, dynamic=False), False)
    torch.testing.assert_close(plain(*arguments)[seen], layer(*arguments)[seen])


@torch.no_grad()
def test_what_zentorch_sets_when_it_compiles_is_taken_back(monkeypatch, settings) -> None:
    seen = []

    def backend(graph, inputs):
        seen.append((config.freezing, config.fx_graph_cache))
        config.joint_custom_post_pass = lambda graph: None
        return graph

    monkeypatch.setitem(sys.modules, "zentorch", types.ModuleType("zentorch"))
    monkeypatch.setitem(registry._BACKENDS, "zentorch", None)
    monkeypatch.setitem(registry._COMPILER_FNS, "zentorch", backend)
    layer, arguments = _layer()
    run, kept = zentorch.encoder_layer(layer, arguments), ~arguments[2]
    for _ in range(2):
        torch.testing.assert_close(run(*arguments)[kept], layer(*arguments)[kept])
    assert seen == [(True, False)]
