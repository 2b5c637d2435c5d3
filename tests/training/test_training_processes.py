"""Training and inference in two gloo processes on one machine equal those of one process.

Tested are data parallelism (DDP, FSDP), DTensor in training and inference, and FSDP2.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import simt_build
import torch
import torch.distributed as dist
from torch import Tensor
from training_case import make_loader, make_model, make_pairs, make_trainer, torchrun

from transformer_fast import _native, dispatch, functional, nn, testing, training
from transformer_fast.backends import cuda
from transformer_fast.specs import OPS
from transformer_fast.testing import call_of, require_grad

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()),
        reason="needs torch.distributed with gloo",
    ),
]
STEPS = 6
#: Number of cases of the op table that run for each op.
CASES = 2


def train(strategy: str, folder: Path) -> None:
    """Runs in each process, like a user's script."""
    model = make_model(0.0)
    if strategy == "fsdp":
        training.checkpoint_activations(model)  # has no effect on results
    model = training.parallelise(model, strategy)
    trainer = make_trainer(model, folder / "run.pt")
    trainer.fit(make_loader(make_pairs()), steps=STEPS // 2)
    trainer = make_trainer(
        training.parallelise(make_model(0.0, seed=7), strategy), folder / "run.pt"
    )
    assert trainer.resume()
    valid = make_loader(make_pairs(20, seed=1))
    history = trainer.fit(make_loader(make_pairs()), steps=STEPS, validation=valid)
    (folder / f"history{dist.get_rank()}.json").write_text(json.dumps(history.state_dict()))
    unequal = make_loader(make_pairs(), 60 if dist.get_rank() else 120)
    trainer.position.epoch, trainer.position.batch = 9, 0
    with pytest.raises(ValueError, match="as many in each process"):
        trainer.fit(unequal, steps=STEPS + 1)


class BothRanks:
    """Yields the batches of both processes, those of each step in succession."""

    def __init__(self) -> None:
        self.loaders = [make_loader(make_pairs(), rank=r, world_size=2) for r in range(2)]

    def set_epoch(self, epoch: int) -> None:
        for loader in self.loaders:
            loader.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]

    def __iter__(self) -> Any:
        for pair in zip(*self.loaders, strict=True):
            yield from pair


def test_data_parallel_training_equals_one_process(tmp_path: Path) -> None:
    torchrun(Path(__file__), ["ddp", "fsdp", str(tmp_path)])
    alone = make_trainer(make_model(0.0), accumulate=2)
    expected = alone.fit(BothRanks(), steps=STEPS)
    valid = training.evaluate(alone.model, alone.objective, make_loader(make_pairs(20, seed=1)))
    for folder in (tmp_path / "ddp", tmp_path / "fsdp"):
        histories = [json.loads((folder / f"history{r}.json").read_text()) for r in range(2)]
        for found in histories:
            assert found["tokens"] == expected.tokens
            assert found["loss"] == pytest.approx(expected.loss, rel=1e-5)
            assert found["gradient_norm"] == pytest.approx(expected.gradient_norm, rel=1e-4)
        assert histories[0]["validation"][-1][1]["loss"] == pytest.approx(valid, rel=1e-4)
        # The checkpoint of two processes has a plain model, with the weights of one process.
        saved = training.read_checkpoint(folder / "run.pt")
        assert len(saved["random"]) == 2
        for name, value in alone.model.state_dict().items():
            if name.endswith("in_proj_bias"):
                # The key bias has zero gradient, and Adam's steps depend on its rounding errors.
                continue
            torch.testing.assert_close(saved["model"][name], value, rtol=1e-3, atol=1e-4)


def mesh() -> Any:
    return dist.device_mesh.init_device_mesh("cpu", (2,))


def distributed(tensor: Tensor, on: Any, dim: int | None) -> Tensor:
    """Converts a tensor that is equal in all processes to a DTensor, differentiably.

    ``dim``: the dimension to shard; None: replicated.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    full = DTensor.from_local(tensor, on, [Replicate()], run_check=False)
    return full if dim is None else full.redistribute(on, [Shard(dim)])


def shardings(arguments: tuple[Any, ...]) -> Iterator[dict[int, int]]:
    """Yields mappings from argument numbers to sharded dimensions.

    Each argument alone is sharded in each dimension; then all arguments in their first or last one.
    """
    tensors = {
        number: value
        for number, value in enumerate(arguments)
        if isinstance(value, Tensor) and value.dim() > 0
    }

    def fits(number: int, dim: int) -> bool:
        return tensors[number].dim() > dim and tensors[number].shape[dim] >= 2

    yield {}
    for number, tensor in tensors.items():
        yield from ({number: dim} for dim in range(tensor.dim()) if fits(number, dim))
    yield {number: 0 for number in tensors if fits(number, 0)}
    yield {n: t.dim() - 1 for n, t in tensors.items() if fits(n, t.dim() - 1)}


def ops(folder: Path) -> None:
    """Checks results and gradients of every op on DTensors against the error budget."""
    kernels = (kernel for op in OPS for kernel in dispatch.kernels(op))
    check_kernels({kernel.op: kernel for kernel in kernels if kernel.backend == "cpu"})


def cuda_ops(folder: Path) -> None:
    """Checks the CUDA C++ operators in the same way, on the emulator of tests/cuda."""
    torch.ops.load_library(str(simt_build.library()))
    cuda.define_operators()
    check_kernels({kernel.op: kernel for kernel in cuda.kernels("cpu", None)})


def check_kernels(kernels: dict[str, dispatch.Kernel]) -> None:
    on = mesh()
    for op, kernel in kernels.items():
        spec, run = OPS[op], kernel.run
        small = [case for case in spec.cases if "dropout" not in case.name][:CASES]
        dropped = [case for case in spec.cases if "dropout" in case.name][:1]
        for case in (*small, *dropped):
            arguments = case.build(
                torch.float32, torch.device("cpu"), torch.Generator().manual_seed(1)
            )
            if dispatch.why_not(kernel, call_of(op, require_grad(op, arguments))):
                continue
            for sharding in shardings(arguments):

                def sharded(
                    *given: Any, sharding: dict[int, int] = sharding, run: Callable[..., Any] = run
                ) -> Any:
                    found = run(
                        *(
                            distributed(value, on, sharding.get(number))
                            if isinstance(value, Tensor) and value.dim() > 0
                            else value
                            for number, value in enumerate(given)
                        )
                    )
                    if isinstance(found, Tensor):
                        return found.full_tensor()
                    return tuple(None if x is None else x.full_tensor() for x in found)

                try:
                    with torch.no_grad():
                        testing.check(op, sharded(*arguments), arguments)
                    if spec.gradients_of:
                        testing.check_gradients(op, sharded, arguments)
                except Exception as error:
                    raise AssertionError(f"{op}, {case.name}, {sharding}: {error}") from error


class Layer(torch.nn.Module):
    """Attention with separate projections and a network, as written for tensor parallelism."""

    def __init__(self, names: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = names.LayerNorm(32), names.LayerNorm(32)
        self.q, self.k, self.v = names.Linear(32, 32), names.Linear(32, 32), names.Linear(32, 32)
        self.out = names.Linear(32, 32)
        self.up, self.down = names.Linear(32, 64), names.Linear(64, 32)
        self.attend = (
            functional if names is nn else torch.nn.functional
        ).scaled_dot_product_attention

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (m(y).unflatten(-1, (-1, 8)).transpose(1, 2) for m in (self.q, self.k, self.v))
        x = x + self.out(self.attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


def plan(local: bool) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    cut = {"input_layouts": Shard(1), "use_local_output": local}
    return {
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
        "norm1": SequenceParallel(),
        "norm2": SequenceParallel(),
        **{name: ColwiseParallel(**cut) for name in ("q", "k", "v", "up")},
        "out": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }


def trained(layer: torch.nn.Module, rates: float = 0.1) -> tuple[list[float], Tensor]:
    optimizer, losses = torch.optim.SGD(layer.parameters(), lr=rates), []
    generator = torch.Generator().manual_seed(3)
    for _ in range(4):
        x = torch.randn(2, 6, 32, generator=generator)
        y = full(layer(x))
        loss = (y - x.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, full(layer(torch.randn(2, 6, 32, generator=generator)))


def full(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def layers(folder: Path) -> None:
    """Checks column-, row- and sequence-parallel modules, with heads sharded as DTensors and
    locally."""
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import parallelize_module

    def exchanges(layer: torch.nn.Module) -> dict[Any, int]:
        with CommDebugMode() as exchanged, torch.no_grad():
            layer(torch.randn(2, 6, 32))
        return dict(exchanged.get_comm_counts())

    theirs = parallelize_module(Layer(torch.nn), mesh(), plan(local=True))
    for local in (False, True):
        torch.manual_seed(0)
        alone = Layer(nn)
        cut = parallelize_module(copy.deepcopy(alone), mesh(), plan(local))
        losses, result = trained(cut)
        expected, true = trained(alone)
        assert losses == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(result, true)
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(full(cut.get_parameter(name)), parameter)
        # As many collectives as torch.nn modules need: sharded tensors are not gathered.
        assert exchanges(cut) == exchanges(theirs), local


def fully_sharded(folder: Path) -> None:
    """With FSDP2, the weights after some steps equal those of one process, up to rounding."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
    alone = torch.nn.Sequential(
        nn.Linear(32, 32), nn.TransformerEncoder(layer, 2), nn.LayerNorm(32)
    )
    cut = copy.deepcopy(alone)
    for part in cut[1].layers:
        fully_shard(part, mesh=mesh())
    fully_shard(cut, mesh=mesh())
    losses, _ = trained(cut)
    expected, _ = trained(alone)
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(full(cut.get_parameter(name)), parameter, rtol=1e-5, atol=1e-6)


CHECKS = {function.__name__: function for function in (ops, cuda_ops, layers, fully_sharded)}


@pytest.mark.skipif(_native.module is None, reason=str(_native.why_not))
def test_distributed_results_equal_one_process(tmp_path: Path) -> None:
    torchrun(Path(__file__), ["ops", "layers", "fully_sharded", str(tmp_path)])


@pytest.mark.exhaustive  # it has the sharding rules of `ops`
@pytest.mark.skipif(simt_build.WHY_NOT is not None, reason=str(simt_build.WHY_NOT))
@pytest.mark.skipif(_native.cuda_why_not is None, reason="the operators of the GPU are loaded")
def test_distributed_results_of_cuda_operators(tmp_path: Path) -> None:
    simt_build.library()  # built here, since the two processes would wait for each other
    torchrun(Path(__file__), ["cuda_ops", str(tmp_path)])


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    *names, root = sys.argv[1:]
    with training.process_group("cpu"):
        for name in names:
            folder = Path(root) / name
            folder.mkdir(exist_ok=True)
            CHECKS[name](folder) if name in CHECKS else train(name, folder)
