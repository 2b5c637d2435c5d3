"""The training loop: steps, validation, checkpoints; and evaluation."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map_only

from .._console import progress as progress_bar
from ..models.attention_weights import evaluating
from . import processes
from .checkpoint import (
    CheckpointError,
    Position,
    load_whole_state,
    read_checkpoint,
    whole_state,
    write_checkpoint,
)
from .optimizer import clip_gradients
from .processes import without_sync

__all__ = ["History", "Trainer", "evaluate"]

#: ``objective(model, batch)`` returns the sum of the losses and the number of tokens.
Objective = Callable[[torch.nn.Module, Any], tuple[Tensor, Tensor]]

#: A loader of batches, or ``validation(model)``, which returns {name: value}.
Validation = Iterable[Any] | Callable[[torch.nn.Module], dict[str, float]]

#: Reasons to stop all processes after the step: out of time (0), or a signal.
_STOPS = (0, signal.SIGINT, signal.SIGTERM)

#: Advances the bar by a step of this loss, learning rate and speed in tokens per second.
Advance = Callable[[float, float, float], None]


def on_device(batch: Any, device: torch.device) -> Any:
    """Returns the batch with its tensors on the device: tensors, or tuples, lists and dicts of them."""
    return tree_map_only(Tensor, lambda x: x.to(device, non_blocking=True), batch)


def device_of(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device


def in_dtype(model: torch.nn.Module, dtype: torch.dtype | None) -> Any:
    """Context manager: autocast to ``dtype`` on the model's device; None: no autocast."""
    return nullcontext() if dtype is None else torch.autocast(device_of(model).type, dtype)


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    objective: Objective,
    batches: Iterable[Any],
    *,
    autocast: torch.dtype | None = None,
) -> float:
    """Returns the mean loss per token over all batches (of all processes), without dropout.

    Restores the model's mode and the state of the random generator.

    Args:
        model, objective, autocast: as in `Trainer`.
        batches: iterable of batches for the objective.

    Raises:
        ValueError: there are no tokens.
    """
    was_training = model.training
    device = device_of(model)
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    # A DataLoader draws random numbers.
    with evaluating(model), torch.random.fork_rng(devices=[]):
        model.train(False)  # a model may have its own method
        try:
            for batch in batches:
                with in_dtype(model, autocast):
                    loss, tokens = objective(model, on_device(batch, device))
                sums += torch.stack((loss.double(), tokens.double()))
        finally:
            model.train(was_training)
    loss_sum, tokens_sum = processes.total(sums).tolist()
    if tokens_sum == 0:
        raise ValueError("batches has no tokens to evaluate on")
    return loss_sum / tokens_sum


@dataclass
class History:
    """Record of a training run: one entry per step in each list, and the results of validation."""

    loss: list[float] = field(default_factory=list)  #: mean per real token
    learning_rate: list[float] = field(default_factory=list)
    gradient_norm: list[float] = field(default_factory=list)  #: before clipping
    tokens: list[int] = field(default_factory=list)  #: number of real tokens, of all processes
    seconds: list[float] = field(default_factory=list)  #: duration of the step
    #: (step, {name: value})
    validation: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return len(self.loss)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, list(value))


class Trainer:
    """Trains a model; resumes with identical results; runs unchanged under ``torchrun``.

    The loss of a step is the mean over the tokens of all processes and of all ``accumulate`` batches,
    so the gradients are those of one process with one large batch.

        trainer = Trainer(model, adamw(model), NextTokenLoss(pad_token), schedule=...)
        trainer.fit(loader, steps=1000)

    Args:
        model: a module, also from `parallelise` or torch.compile.
        optimizer: the optimiser of that model.
        objective: ``objective(model, batch)`` returns the sum of the losses and the number of tokens,
            two scalar tensors.
        schedule: stepped after each step of the optimiser.
        clip_norm: maximum 2-norm of all gradients; None: no limit.
        accumulate: batches per step.
        autocast: torch.bfloat16 for `torch.autocast` in the forward pass; None: no autocast.
        checkpoint: file to save to; None: do not save.
        checkpoint_every: steps between two saves. The end of `fit`, Ctrl-C and SIGTERM always save.

    ``history`` is the record of the run (`History`).

    Raises:
        ValueError: accumulate, checkpoint_every or clip_norm is out of range, or autocast is float16.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        objective: Objective,
        *,
        schedule: LRScheduler | None = None,
        clip_norm: float | None = 1.0,
        accumulate: int = 1,
        autocast: torch.dtype | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 1000,
    ) -> None:
        for name, value in (("accumulate", accumulate), ("checkpoint_every", checkpoint_every)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if clip_norm is not None and not clip_norm > 0.0:
            raise ValueError(f"clip_norm must be above 0, or None, not {clip_norm}")
        if autocast == torch.float16:
            raise ValueError(
                "autocast must be torch.bfloat16 or None: float16 needs its losses scaled, which "
                "Trainer does not do"
            )
        self.model, self.optimizer, self.objective = model, optimizer, objective
        self.schedule, self.clip_norm, self.accumulate = schedule, clip_norm, accumulate
        self.autocast = autocast
        self.checkpoint, self.checkpoint_every = checkpoint, checkpoint_every
        self.history = History()
        self.position = Position()

    @property
    def step(self) -> int:
        """The number of steps so far, including those before a resume."""
        return self.history.steps

    def fit(
        self,
        batches: Iterable[Any],
        *,
        steps: int | None = None,
        epochs: int | None = None,
        minutes: float | None = None,
        validation: Validation | None = None,
        validate_every: int | None = None,
        progress: bool = True,
    ) -> History:
        """Train until the first limit is reached.

        Args:
            batches: iterated once per epoch, in an order that depends only on the epoch: a DataLoader
                with `TokenBatches`, or any iterable. ``set_epoch`` of its sampler is called if it
                exists.
            steps, epochs: total numbers, including those before a resume.
            minutes: time limit of this call.
            validation: a loader, whose mean loss is computed, or a function of the model. Every
                process calls it.
            validate_every: steps between two validations; None: validate at the end of each epoch and
                of fit.
            progress: show a progress bar on a terminal.

        Raises:
            ValueError: there is no limit, one is below 1, or there are no batches.
            FloatingPointError: a gradient is NaN or infinite; model and optimiser are as before the
                step.
            KeyboardInterrupt, SystemExit: at a signal, after the step is complete and saved.
        """
        limits = _Limits(steps, epochs, minutes)
        shown = progress and processes.rank() == 0
        due_at_epoch = validation is not None and validate_every is None
        validated = self.step  # there is nothing new to validate yet
        signals: list[int] = []
        self.model.train()
        with _interrupts() as received, _progress(steps, self.step, shown) as advance:
            while not signals and not limits.reached(self.step, self.position.epoch):
                for group in self.position.groups(batches, self.accumulate):
                    late, signals = self._step(group, limits, received, advance)
                    done = late or bool(signals) or limits.reached(self.step, self.position.epoch)
                    if validate_every is not None and self.step % validate_every == 0:
                        validated = self._validate(validation)
                    if not done and self.step % self.checkpoint_every == 0:
                        self.save()
                    if done:
                        limits.stop = True
                        break
                else:
                    if due_at_epoch:
                        validated = self._validate(validation)
            if validated != self.step and not signals:
                self._validate(validation)
            self.save()
        signals = signals or received  # during the last validation
        if signal.SIGINT in signals:
            raise KeyboardInterrupt
        if signals:
            raise SystemExit(128 + signals[0])
        return self.history

    def _step(
        self, group: list[Any], limits: _Limits, received: list[int], advance: Advance
    ) -> tuple[bool, list[int]]:
        """Runs one step; returns whether any process is out of time, and the signals received by any."""
        began = time.perf_counter()
        device = device_of(self.model)
        self.optimizer.zero_grad(set_to_none=True)
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        for place, batch in enumerate(group):
            with without_sync(self.model, place == len(group) - 1):
                with in_dtype(self.model, self.autocast):
                    loss, tokens = self.objective(self.model, on_device(batch, device))
                loss.backward()
            sums += torch.stack((loss.detach().double(), tokens.double()))
        stop = [limits.late(), *(number in received for number in _STOPS[1:])]
        flags = torch.tensor(stop, dtype=torch.float64, device=device)
        loss_sum, count, *stops = processes.total(torch.cat((sums, flags))).tolist()
        # The gradients are means over the processes; scale them to means over the tokens.
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, processes.world_size() / max(count, 1.0))
        norm = clip_gradients(self.model.parameters(), self.clip_norm).item()
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(
                f"the gradient of step {self.step + 1} has norm {norm}; its loss is "
                f"{loss_sum / max(count, 1.0):.6g}"
            )
        rate = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        history = self.history
        history.loss.append(loss_sum / max(count, 1.0))
        history.learning_rate.append(float(rate))
        history.gradient_norm.append(norm)
        history.tokens.append(int(count))
        history.seconds.append(time.perf_counter() - began)
        advance(history.loss[-1], float(rate), count / max(history.seconds[-1], 1e-9))
        signals = [int(n) for n, stopped in zip(_STOPS[1:], stops[1:], strict=True) if stopped]
        return bool(stops[0]), signals

    def _validate(self, validation: Validation | None) -> int:
        """Validates, if there is a validation; returns the current step."""
        if validation is not None:
            if callable(validation):
                was_training = self.model.training
                found = validation(self.model)
                self.model.train(was_training)
            else:
                found = {
                    "loss": evaluate(self.model, self.objective, validation, autocast=self.autocast)
                }
            self.history.validation.append((self.step, found))
        return self.step

    def save(self, path: str | os.PathLike[str] | None = None) -> None:
        """Save the run to ``path``, or to ``checkpoint``; without either do nothing.

        All processes must call it; the first process writes.
        """
        path = self.checkpoint if path is None else path
        if path is None:
            return
        model, optimizer = whole_state(self.model, self.optimizer)
        random_states = processes.gathered(self.position.random_states())
        if processes.rank() == 0:
            state = {
                "model": model,
                "optimizer": optimizer,
                "schedule": None if self.schedule is None else self.schedule.state_dict(),
                "position": self.position.state_dict(),
                "random": random_states,
                "history": self.history.state_dict(),
            }
            write_checkpoint(path, state)
        processes.gathered(None)  # a barrier: no process continues before the file exists

    def load(self, path: str | os.PathLike[str]) -> None:
        """Restore the state of `save`; `fit` continues from there with identical results.

        This requires the same data, number of processes, versions and threads.

        Raises:
            FileNotFoundError: the file does not exist.
            CheckpointError: the file is damaged, or was saved by another number of processes or without
                a schedule.
            RuntimeError: the file belongs to another model.
        """
        state = read_checkpoint(path)
        world = processes.world_size()
        if len(state["random"]) != world:
            raise CheckpointError(
                f"{os.fspath(path)!r} was saved by {len(state['random'])} process(es) and cannot "
                f"go on to the same numbers with {world}; its weights are under 'model'"
            )
        if (self.schedule is None) != (state["schedule"] is None):
            raise CheckpointError(
                f"{os.fspath(path)!r} was saved with{'out' if self.schedule else ''} a schedule"
            )
        load_whole_state(self.model, self.optimizer, state["model"], state["optimizer"])
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        self.history.load_state_dict(state["history"])
        self.position.load_state_dict(state["position"], state["random"][processes.rank()])

    def resume(self) -> bool:
        """`load` the file ``checkpoint`` if it exists; returns True if it does."""
        if self.checkpoint is None or not os.path.exists(self.checkpoint):
            return False
        self.load(self.checkpoint)
        return True


class _Limits:
    """The limits of `Trainer.fit`."""

    def __init__(self, steps: int | None, epochs: int | None, minutes: float | None) -> None:
        limits = {"steps": steps, "epochs": epochs, "minutes": minutes}
        if all(value is None for value in limits.values()):
            raise ValueError("one of steps, epochs and minutes must be given")
        for name, value in limits.items():
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, not {value}")
        self.steps, self.epochs = steps, epochs
        self.deadline = None if minutes is None else time.monotonic() + 60.0 * minutes
        self.stop = False

    def late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def reached(self, step: int, epoch: int) -> bool:
        return (
            self.stop
            or (self.steps is not None and step >= self.steps)
            or (self.epochs is not None and epoch >= self.epochs)
        )


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Context manager that records the first SIGINT or SIGTERM in a list; a second one acts."""
    received: list[int] = []
    before: dict[int, Any] = {}

    def restore() -> None:
        while before:
            signal.signal(*before.popitem())

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        restore()

    # Only the main thread may set handlers.
    if threading.current_thread() is threading.main_thread():
        for number in _STOPS[1:]:
            handler = signal.getsignal(number)
            if handler not in (None, signal.SIG_IGN):
                before[number] = signal.signal(number, handle)
    try:
        yield received
    finally:
        restore()


@contextmanager
def _progress(total: int | None, done: int, shown: bool) -> Iterator[Advance]:
    """Shows steps, loss, learning rate, speed and remaining time; nothing if not ``shown``."""
    smooth: float | None = None

    def advance(loss: float, learning_rate: float, speed: float) -> None:
        nonlocal smooth
        smooth = loss if smooth is None else 0.95 * smooth + 0.05 * loss
        text = f"loss {smooth:.3f}  lr {learning_rate:.1e}  {speed:,.0f} tokens/s"
        bar.update(task, advance=1, description=f"[bold]training[/]  {text}")

    with progress_bar(shown, transient=False) as bar:
        task = bar.add_task("[bold]training", total=total, completed=done)
        yield advance
