"""Recorded and replayed decoding steps, tested on the CPU with an emulation of CUDA graphs.

Like a CUDA graph, the emulation keeps the operators and their exact tensors, including results. It
raises for operators that cannot be captured. Recording has no effect on values until a replay.
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
from harness import OnDevice, name_of
from models_checks import small, small_language_model, tokens, varied
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from transformer_fast import models
from transformer_fast.models.generation import cuda_graph, decoders, search

pytestmark = pytest.mark.thorough


def storage(x: Tensor) -> Any:
    return x.untyped_storage()._cdata


class Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.before: dict[Any, tuple[Tensor, Tensor]] = {}
        self.made: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = name_of(func)
        if name in OnDevice.WAIT:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        made = {storage(x) for x in self.made}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and storage(value) not in made:
                self.before.setdefault(storage(value), (value, value.clone()))
        result = func(*args, **kwargs)
        given = {storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        fresh = [
            (i, x)
            for i, x in enumerate(tree_leaves(result))
            if isinstance(x, Tensor) and storage(x) not in given
        ]
        self.made += [x for _, x in fresh]
        self.calls.append((func, args, kwargs, fresh))
        return result

    def undo(self) -> None:
        for value, old in self.before.values():
            value.copy_(old)
        for x in self.made:  # NaN reveals a read before the first replay
            if x.is_floating_point():
                x.fill_(float("nan"))

    def replay(self) -> None:
        for func, args, kwargs, fresh in self.calls:
            found = tree_leaves(func(*args, **kwargs))
            for i, x in fresh:
                x.copy_(found[i])


class Recorder:
    """Replacement of `cuda_graph.record`."""

    def __init__(self) -> None:
        self.tried = self.recorded = self.replayed = 0

    def __call__(self, run):
        self.tried += 1
        recording = Recording()
        with recording:
            result = run()
        recording.undo()
        self.recorded += 1

        def replay() -> Tensor:
            self.replayed += 1
            recording.replay()
            return result

        return replay


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    one = Recorder()
    monkeypatch.setattr(cuda_graph, "record", one)
    monkeypatch.setattr(cuda_graph, "_LEAST_POSITIONS", 4)
    return one


@contextlib.contextmanager
def capturing(monkeypatch: pytest.MonkeyPatch, looks: int = 1):
    """Within the block, CPU tensors take the decoding path of GPU tensors."""
    with monkeypatch.context() as patch:
        patch.setattr(cuda_graph, "wanted", lambda x: True)
        patch.setattr(decoders, "bind_stack", lambda *given: None)
        patch.setattr(search.Task, "looks", property(lambda task: looks))
        yield


METHODS = {
    "greedy": models.Greedy(),
    "sampling": models.Sampling(top_k=5, seed=3),
    "beams": models.BeamSearch(3),
    "beams that stop early": models.BeamSearch(4, early_stop=True, n_best=2),
}


@pytest.mark.parametrize("looks", [1, 8])
@pytest.mark.parametrize("towards_end", [-9.0, 0.5, 1.5])
@pytest.mark.parametrize("method", METHODS)
def test_encoder_decoder_generates_the_same_tokens(
    method, towards_end, looks, recorder, monkeypatch
):
    """Sources of several lengths finish one after another, or not at all."""
    torch.manual_seed(1)
    model = varied(small(norm_first=looks == 8), towards_end)
    source = tokens(23, [7, 3, 5, 1, 6])
    plain = model.generate(source, METHODS[method], max_new_tokens=20)
    with capturing(monkeypatch, looks):
        found = model.generate(source, METHODS[method], max_new_tokens=20)
    assert torch.equal(found.tokens, plain.tokens)
    assert torch.equal(found.lengths, plain.lengths)
    if towards_end < 0:
        assert plain.tokens.shape[-1] == 20
        # Graphs for 4, 8, 16 and all 21 positions; twice if beams alternate between two buffers.
        moves = isinstance(METHODS[method], models.BeamSearch)
        assert recorder.recorded == (7 if moves else 4)
        assert recorder.replayed >= 8


@pytest.mark.parametrize("lengths", [None, [9, 2, 5]])
def test_language_model_generates_the_same_tokens(lengths, recorder, monkeypatch):
    torch.manual_seed(2)
    model = varied(small_language_model())
    prompt = torch.randint(3, 19, (3, 9))
    given = None if lengths is None else torch.tensor(lengths)
    plain = model.generate(prompt, max_new_tokens=25, prompt_lengths=given, end_token=-1)
    with capturing(monkeypatch):
        found = model.generate(prompt, max_new_tokens=25, prompt_lengths=given, end_token=-1)
        again = model.generate(prompt, max_new_tokens=25, prompt_lengths=given, end_token=-1)
    assert torch.equal(found.tokens, plain.tokens)
    assert torch.equal(again.tokens, plain.tokens)
    assert recorder.replayed >= 30


class ReadsValues(torch.nn.Linear):
    """A projection that reads the values of its input, which a capture forbids."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.isfinite().all().item()
        return super().forward(x)


def test_steps_that_cannot_be_captured_run_eagerly(recorder, monkeypatch):
    torch.manual_seed(3)
    decoder = torch.nn.TransformerDecoder(
        torch.nn.TransformerDecoderLayer(16, 2, 24, batch_first=True), 2
    ).eval()
    embedding, project, memory = (
        torch.nn.Embedding(19, 16),
        ReadsValues(16, 19),
        torch.randn(3, 5, 16),
    )

    def run() -> models.Generated:
        return models.generate(
            decoder, memory, embed=lambda tokens, start: embedding(tokens), project=project,
            prefix=1, end_token=-1, max_new_tokens=12,
        )  # fmt: skip

    with torch.no_grad():
        plain = run()
        with capturing(monkeypatch):
            assert torch.equal(run().tokens, plain.tokens)
    assert (recorder.tried, recorder.recorded) == (1, 0)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("crossed", [False, True])
def test_device_steps_do_not_synchronise(crossed, norm_first, monkeypatch):
    """Meta tensors have no values, and the backends of a GPU without validated kernels."""
    monkeypatch.setattr(cuda_graph, "wanted", lambda x: True)
    with torch.device("meta"), torch.no_grad():
        if crossed:
            model: Any = small(norm_first=norm_first)
            half, memory = model.decoder, torch.empty(2, 7, 16)
        else:
            model = small_language_model(norm_first=norm_first)
            half, memory = model.encoder, None
        weights = decoders.read_stack(half.stack, crossed)
        decoder = decoders.CachedDecoder(
            weights, half.embedding.vectors, model.output, memory, None, 40
        )
        decoder.start(torch.empty(2, 3, dtype=torch.int64))
        decoder.spread(2)
        with OnDevice():
            for _ in range(3):
                decoder.reorder(torch.empty(4, dtype=torch.int64))
                logits = decoder.step(torch.empty(4, dtype=torch.int64))
    assert decoder.steps is not None
    assert logits.shape == (4, 19)


@pytest.mark.parametrize("fails", [False, True])
def test_record_always_ends_the_capture(fails, monkeypatch):
    """Checks the order of calls to torch.cuda, also if the recorded function raises."""
    seen = mock.Mock()
    seen.run.side_effect = RuntimeError("operation not permitted") if fails else None
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: seen.graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: seen.side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: seen.current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    begun = [
        mock.call.side.wait_stream(seen.current),
        mock.call.graph.capture_begin(capture_error_mode="thread_local"),
        mock.call.run(),
        mock.call.graph.capture_end(),
    ]
    if fails:
        with pytest.raises(RuntimeError, match="not permitted"):
            cuda_graph.record(seen.run)
        assert seen.mock_calls == begun
        return
    replay = cuda_graph.record(seen.run)
    assert seen.mock_calls == [*begun, mock.call.current.wait_stream(seen.side)]
    assert replay() is replay() is seen.run.return_value
    assert seen.mock_calls[5:] == [mock.call.graph.replay()] * 2


class FakeCudaTensor(torch.Tensor):
    is_cuda = True  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl


def test_cuda_graphs_are_used_only_if_switched_on(monkeypatch):
    there = torch.zeros(2, 3).as_subclass(FakeCudaTensor)
    assert not cuda_graph.wanted(there)
    monkeypatch.setattr(cuda_graph, "_switched_on", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert cuda_graph.wanted(there)
    assert not cuda_graph.wanted(torch.zeros(2, 3))
