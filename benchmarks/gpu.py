"""``python -m benchmarks.gpu STAGE... --seconds S --json FILE``: checks and times all GPU kernels.

Stages, always in this order, within ``--seconds`` in total:

    env      records GPU, driver, torch, Triton, nvcc
    warm     compiles the Triton kernels, in one process per CPU
    bench    checks all `gpu_cases` of `specs` against fp64, forward and gradients, and times our
             kernels, PyTorch's and others', on the device and on the host
    tune     times other tiles than those of `backends.triton.config`, case by case

The file is replaced after every result, so that a killed run keeps its results. Work for which the
time did not suffice is listed as skipped. All GPU work runs in subprocesses.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import collect_env

from transformer_fast import _native, dispatch, proof
from transformer_fast._console import bullets, output, progress, until_interrupted
from transformer_fast.measure import device as on_device
from transformer_fast.measure import machine
from transformer_fast.measure.accuracy import unchecked
from transformer_fast.measure.benchmark_case import PEER_FACTOR, problem_of
from transformer_fast.measure.clock import Call, Clock, DeviceClock, Times, in_turn, medians
from transformer_fast.measure.device import OUT_OF_TIME, lines_of
from transformer_fast.specs import OPS, Case
from transformer_fast.testing import call_of

from . import peers
from .peers import PEERS

FORMAT = 1
#: Backends that have GPU kernels.
BACKENDS = ("cuda", "triton", "torch")
#: A job, or a job with its result; JSON-serialisable.
Item = dict[str, Any]

_CASES: dict[tuple[str, str], Case] = {
    (one.op, one.name): one
    for spec in OPS.values()
    for one in (*spec.gpu_bench_cases, *spec.gpu_cases)
}


class Session:
    """One run: its time budget, its result file, and its worker processes."""

    def __init__(self, seconds: float, path: Path) -> None:
        self.until = time.monotonic() + seconds
        self.path = path
        self.stages: dict[str, dict[str, Any]] = {}
        self._content = {
            "format": FORMAT,
            "commit": machine.commit(),
            "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "seconds": seconds,
            "stages": self.stages,
        }
        self._lock = threading.Lock()
        self._stopped = False
        self._planned = 0
        #: Called with the numbers of finished and planned jobs of a stage.
        self.changed: Callable[[int, int], object] = lambda done, planned: None

    def _write(self, stage: str, kind: str, entries: Iterable[Item]) -> None:
        with self._lock:
            self.stages[stage][kind] += entries
            proof.write_whole(self.path, self._content)
            self.changed(sum(map(len, self.stages[stage].values())), self._planned)

    def begin(self, stage: str) -> None:
        self.stages[stage] = {"results": [], "skipped": []}
        self._planned = 0
        self._write(stage, "results", [])

    def do(
        self, stage: str, groups: Sequence[Sequence[Item]], jobs: int, until: float | None = None
    ) -> list[Item]:
        """Runs each group of jobs in a process, ``jobs`` processes at once; returns the outcomes.

        If a process ends early, its current job fails, and a new process continues with the next job.
        """
        until = self.until if until is None else until
        self._planned += sum(map(len, groups))
        found: list[Item] = []

        def finish(group: Sequence[Item]) -> None:
            rest = deque(group)

            def take(line: Item) -> None:
                entry = {**rest.popleft(), **line}
                found.append(entry)
                self._write(stage, "results", [entry])

            while rest and not self._stopped:
                problem = OUT_OF_TIME
                if time.monotonic() < until:
                    problem = lines_of(
                        _command(stage, list(rest)), take, STAGES[stage].limit, until
                    )
                if problem == OUT_OF_TIME:
                    self._write(stage, "skipped", rest)
                    return
                if rest:
                    take({"problem": problem or "its process ended before it was done"})

        with ThreadPoolExecutor(jobs) as pool:
            try:
                list(pool.map(finish, groups))
            except BaseException:
                self._stopped = True
                raise
        return found


def _command(stage: str, items: Sequence[Item]) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu", "--alone", stage, json.dumps(items)]


# Jobs of the stages.


def _dealt(items: Sequence[Item], hands: int) -> list[Sequence[Item]]:
    """Deals the items round-robin to ``hands`` groups, so that the first items are run first."""
    return [group for i in range(hands) if (group := items[i::hands])]


def rank(case: Case) -> int:
    """Returns the rank of a case. Low ranks run first, so that a short run has the main cases."""
    if case.op != "attention":
        places = {"add_layer_norm": 2, "layer_norm": 2, "feed_forward": 4, "linear": 4}
        return places.get(case.op, 5)
    call = call_of(case.op, case.build(torch.bfloat16, "meta", None))
    *_, queries, size = call.tensors[0].shape  # type: ignore[union-attr]
    given = call.arguments
    masked = given.attn_mask is not None or given.key_lengths is not None
    return 6 if queries <= 4 else 3 if size > 64 else int(masked)


def bench_items() -> list[Item]:
    cases = sorted(_CASES.values(), key=rank)
    return [
        {"op": case.op, "case": case.name, "dtype": str(dtype)[6:], "gradients": gradients}
        for dtype in on_device.DTYPES
        for case in cases
        for gradients in ((False, True) if case.gradients else (False,))
    ]


_FORWARD, _BACKWARD = ("attention_forward",), ("attention_backward_query", "attention_backward_key")
_LONG = "(4,16,4096,4096,{}), {}"
#: Cases to tune: (op, case, functions of `config` that return its tiles forward, and backward).
TUNED: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("attention", _LONG.format(64, "no mask"), _FORWARD, _BACKWARD),
    ("attention", _LONG.format(64, "causal"), _FORWARD, _BACKWARD),
    ("attention", _LONG.format(64, "documents"), _FORWARD, _BACKWARD),
    ("attention", _LONG.format(64, "key lengths"), _FORWARD, _BACKWARD),
    ("add_layer_norm", "65536x1024, dropout 0.1", ("layer_norm_forward",), ("layer_norm_backward",)),
    ("attention", _LONG.format(128, "no mask"), _FORWARD, _BACKWARD),
    ("attention", _LONG.format(128, "causal"), _FORWARD, _BACKWARD),
    ("feed_forward", "16384x1024x4096, relu", ("matmul",), ("matmul",)),
    ("cross_entropy", "8192x32000", ("cross_entropy",), ("cross_entropy",)),
    ("attention", "(32,16,1,4096,64), key lengths", ("attention_decode",), ()),
    ("attention", "(1,16,1,4096,64), key lengths", ("attention_decode",), ()),
)  # fmt: skip


def tune_items() -> list[Item]:
    """Returns the jobs for all candidate tiles, in bfloat16; tile None, the current one, is first."""
    from transformer_fast.backends.triton import config

    items = []
    for op, name, forward, backward in TUNED:
        first = _CASES[op, name].build(torch.bfloat16, "meta", None)[0]
        for function, gradients in (*((f, False) for f in forward), *((f, True) for f in backward)):
            known: Item = {"op": op, "case": name, "dtype": "bfloat16", "gradients": gradients}
            known["function"] = function
            tiles = config.alternatives(function, True, first.shape[-1])
            items += [{**known, "tile": tile} for tile in (None, *tiles)]
    return items


def _warm(session: Session) -> None:
    if importlib.util.find_spec("triton") is not None:
        from transformer_fast.backends.triton import compile_ahead

        items = [{"compiled": case.name} for case in compile_ahead.cases()]
        jobs = on_device.most_processes(on_device.CONTEXT_BYTES)
        session.do("warm", _dealt(items, jobs), jobs)


def _tune(session: Session) -> None:
    """Compiles and checks all tiles in many processes, then times the correct ones in one process."""
    now = time.monotonic()
    half = now + 0.5 * (session.until - now)
    items = tune_items()
    jobs = on_device.most_processes(on_device.CHECK_BYTES)
    tried = session.do("tune", _dealt(items, jobs), jobs, half)
    right = [item for item in tried if item.get("result") == "right"]
    timed: dict[str, Item] = {}
    for item in items:
        mine = {k: v for k, v in item.items() if k != "tile"}
        tiles = timed.setdefault(json.dumps(mine), {**mine, "tiles": []})["tiles"]
        if any(all(one[k] == v for k, v in item.items()) for one in right):
            tiles.append(item["tile"])
    session.do("tune", [[item for item in timed.values() if len(item["tiles"]) > 1]], 1)


# Work of a subprocess.


def environment(item: Item, device: torch.device, clock: Clock) -> Item:
    found: Item = machine.describe(device)
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        found |= proof.machine_of(device)._asdict()
        found |= {"multiprocessors": gpu.multi_processor_count, "memory": gpu.total_memory}
        found["l2"] = gpu.L2_cache_size
    found["cuda library"] = _native.cuda_why_not or "loaded"
    found["system"] = collect_env.get_env_info()._asdict()
    return found | {"peers": peers.versions([PEERS["flex_attention"], PEERS["liger"]])}


def compile_share(item: Item, device: torch.device, clock: Clock) -> Any:
    from transformer_fast.backends.triton import compile_ahead, config

    case = next(one for one in compile_ahead.cases() if one.name == item["compiled"])
    return f"{compile_ahead.warm(case, config.architecture(device))} kernels"


def _trial(item: Item, gradients: bool, device: torch.device) -> on_device.Trial:
    case, dtype = _CASES[item["op"], item["case"]], getattr(torch, item["dtype"])
    return on_device.Trial(case, dtype, gradients, device)


_SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def candidates(trial: on_device.Trial) -> Item:
    """Returns name -> function, or the reason why the candidate cannot run; ours first."""
    op, arguments, call = trial.op, trial.inputs[0], trial.call
    found: Item = {}
    for kernel in dispatch.kernels(op):
        if kernel.backend in BACKENDS:
            found[kernel.backend] = "; ".join(dispatch.why_not(kernel, call)) or kernel.run
    found |= trial.torchs()
    if op == "attention":
        found |= {name: sdpa_kernel(one)(OPS[op].pytorch) for name, one in _SDPA.items()}
    others: dict[str, tuple[Any, ...]] = {"Liger": ("liger",)} if op == "layer_norm" else {}
    # In bfloat16 only: it takes long to compile, and float16 has the same speed.
    if op == "attention" and arguments[0].dtype == torch.bfloat16:
        others["FlexAttention, mask known"] = "flex_attention", True
        others["FlexAttention, mask new"] = "flex_attention", False
    for name, (peer, *options) in others.items():
        for offered in peers.candidates([PEERS[peer]], "op", op, arguments, *options):
            found[name] = offered.run or offered.reason
    return found


def bench(item: Item, device: torch.device, clock: Clock) -> Item:
    """Times each candidate; returns device and host samples in seconds, or why it has none."""
    torch.compiler.reset()  # each case is compiled anew, and Dynamo has a recompilation limit
    trial = _trial(item, item["gradients"], device)
    with torch.set_grad_enabled(trial.gradients):
        rivals = candidates(trial)
    found: Item = {}
    calls: dict[str, Call] = {}
    for name, run in rivals.items():
        if isinstance(run, str):
            found[name] = {"why_not": run}
            continue
        work = trial.work(run)
        try:
            with torch.no_grad():
                work(0)
            # With dropout PyTorch's result cannot be checked, because it drops other elements.
            dropped = getattr(trial.call.arguments, "dropout_p", 0.0)
            if name in ("cuda", "triton") or not unchecked(dropped):
                parity = trial.parity(work)
                if not parity.ok and (name in BACKENDS or parity.ratio > PEER_FACTOR):
                    found[name] = {"why_not": f"wrong: {parity}", "wrong": name in BACKENDS}
                    continue
        except Exception as error:
            found[name] = {"why_not": problem_of(error)}
            continue
        calls[name] = work
    with torch.no_grad():
        for name, samples in in_turn(calls, len(trial.inputs), clock).items():
            columns = zip(Times._fields, zip(*samples, strict=True), strict=True)
            found[name] = {field: [float(f"{x:.5g}") for x in column] for field, column in columns}
    return found


def tune(item: Item, device: torch.device, clock: Clock) -> Any:
    """Checks one tile ("tile"), or times several ("tiles"): tile -> device seconds, fastest first."""
    from transformer_fast.backends.triton import config

    trial = _trial(item, item["gradients"], device)
    (kernel,) = (one for one in dispatch.kernels(trial.op) if one.backend == "triton")
    work = trial.work(kernel.run)

    def using(tile: Sequence[int] | None) -> Call:
        def call(number: int) -> Any:
            with config.use_tile(item["function"], tile) if tile else nullcontext():
                return work(number)

        return call

    if "tiles" not in item:
        wrong = trial.check(using(item["tile"]))[1]
        return "right" if wrong is None else f"wrong: {wrong}"
    calls = {json.dumps(tile): using(tile) for tile in item["tiles"]}
    with torch.no_grad():
        samples = in_turn(calls, len(trial.inputs), clock)
    times = {tile: medians(taken).device for tile, taken in samples.items()}
    return dict(sorted(times.items(), key=lambda entry: entry[1]))


class Stage(NamedTuple):
    #: Time limit of one job in seconds, the start of its process included.
    limit: float
    plan: Callable[[Session], object]
    #: Runs one job in the subprocess.
    work: Callable[[Item, torch.device, Clock], Any]


STAGES = {
    "env": Stage(60.0, lambda session: session.do("env", [[{}]], 1), environment),
    "warm": Stage(180.0, _warm, compile_share),
    "bench": Stage(150.0, lambda session: session.do("bench", [bench_items()], 1), bench),
    "tune": Stage(60.0, _tune, tune),
}


def alone(stage: str, items: Sequence[Item], device: torch.device) -> int:
    """Runs the jobs in this process; prints a line of JSON for each, and nothing else, to stdout."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    clock = DeviceClock(device)
    warnings.simplefilter("ignore")
    for item in items:
        broken = False
        try:
            line = {"result": STAGES[stage].work(item, device, clock)}
        except Exception as error:
            line = {"problem": problem_of(error)}
        try:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as error:  # After an illegal access the CUDA context is unusable.
            line, broken = {"problem": problem_of(error)}, True
        print(json.dumps(line), file=lines, flush=True)
        if broken:
            return 1
    return 0


# The command.


def _problems(stage: str, entries: Iterable[Item]) -> list[str]:
    """Returns a sentence for each failure of ours. A wrong tile is none, because it is not used."""
    found = []
    for entry in entries:
        job = ", ".join(str(v) for k, v in entry.items() if k not in ("result", "problem", "tiles"))
        problems = [entry["problem"]] if "problem" in entry else []
        if stage == "bench" and not problems:
            problems = [v["why_not"] for v in entry["result"].values() if v.get("wrong")]
        found += [f"{stage}, {job}: {one}" for one in problems]
    return found


def run(options: argparse.Namespace) -> int:
    """Returns 0 if all that ran is right, 1 if not, 2 without a GPU."""
    if (why := on_device.why_no_gpu("benchmarks.gpu")) is not None:
        print(why, file=sys.stderr)
        return 2
    if options.alone:
        stage, items = options.alone
        return alone(stage, json.loads(items), torch.device("cuda", torch.cuda.current_device()))
    session = Session(options.seconds, options.json)
    console = output()
    problems: list[str] = []
    with progress() as bar:
        for stage in STAGES:
            if stage not in (options.stages or STAGES):
                continue
            task = bar.add_task(stage, total=0)
            # Refresh at once, because the bar is removed right after the stage's last result.
            session.changed = lambda done, planned, task=task: bar.update(
                task, completed=done, total=planned, refresh=True
            )
            start = time.monotonic()
            session.begin(stage)
            STAGES[stage].plan(session)
            bar.remove_task(task)
            found = session.stages[stage]
            problems += _problems(stage, found["results"])
            console.print(
                f"{stage}: {len(found['results'])} results, {len(found['skipped'])} skipped, "
                f"{time.monotonic() - start:.0f} seconds",
            )
    if problems:
        console.print("\n[bold]Wrong or not finished[/]")
        bullets(console, problems)
    console.print(f"\nResults are in {options.json}")
    return 1 if problems else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="stages to run (default: all)")
    parser.add_argument("--seconds", type=float, default=1500.0, help="time limit (1500)")
    parser.add_argument("--json", type=Path, default="gpu.json", help="result file (gpu.json)")
    # Internal option of the subprocesses.
    parser.add_argument("--alone", nargs=2, metavar=("STAGE", "ITEMS"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := [stage for stage in options.stages if stage not in STAGES]:
        parser.error(f"there is no stage {unknown[0]!r}; there are: {', '.join(STAGES)}")
    if options.seconds <= 0:
        parser.error("--seconds must be above 0")
    return until_interrupted(run, options)


if __name__ == "__main__":
    sys.exit(main())
