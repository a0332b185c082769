"""The training loop: steps until the time is up, and always leaves a checkpoint.

The schedule follows elapsed time, so a run finishes its decay on any device. A run that is
interrupted (Ctrl-C, or a termination signal) stops after the step in flight and is saved and
evaluated like one that finished.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import torch

from oled_sim.errors import OledSimError
from oled_sim.model.training.balance import imbalance
from oled_sim.model.training.data import Batch, Sampler
from oled_sim.model.training.layout import Layout, lay_out
from oled_sim.model.training.noise import corrupt
from oled_sim.model.training.objective import Runner
from oled_sim.model.training.optimizer import Trainable, rate_factor
from oled_sim.model.training.recipe import Recipe

LOG_EVERY_S = 2.0
SAVE_EVERY_S = 150.0


class TrainingError(OledSimError):
    """Training cannot go on: the loss is not a number."""


@dataclass(slots=True)
class TrainingLog:
    """What happened: one record every few seconds, and totals.

    Attributes:
        records: ``step``, ``seconds`` since the start, ``tokens`` seen (clean ones, noisy
            copies not counted), ``loss`` in nats (mean since the last record), ``rate`` factor,
            gradient ``norm`` and ``imbalance`` (largest over mean expert load of one step, mean
            over layers).
        warmup_seconds: first step, not trained on: compilation.
        interrupted: whether the run was stopped before its time.
    """

    records: list[dict[str, float]] = field(default_factory=list)
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    warmup_seconds: float = 0.0
    interrupted: bool = False
    epochs: dict[str, float] = field(default_factory=dict)


class Trainer:
    """One training run of a model on its device."""

    def __init__(self, recipe: Recipe, runner: Runner, sampler: Sampler) -> None:
        self.recipe = recipe
        self.runner = runner
        self.sampler = sampler
        self.trainable = Trainable(runner.model, recipe.optimizer)
        self.log = TrainingLog()
        self._losses: list[torch.Tensor] = []
        self._norm = self._imbalance = torch.zeros(())
        self._factor = 0.0
        self._order = np.random.default_rng(recipe.seed)
        self._noise = torch.Generator(runner.model.device).manual_seed(recipe.seed)
        lengths, shares = zip(*recipe.noise.block_lengths, strict=True)
        self._lengths = np.array(lengths)
        self._length_shares = np.array(shares) / sum(shares)

    def run(
        self,
        seconds: float,
        report: Callable[[dict[str, float]], None] = lambda record: None,
        save: Callable[[], None] = lambda: None,
    ) -> TrainingLog:
        """Train for ``seconds``; ``report`` gets each record, ``save`` runs now and then."""
        self._warm_up()
        with _stop_signal() as stopped:
            watch = _Watch(seconds)
            while watch.progress() < 1.0 and not stopped.is_set():
                self._step(watch.progress())
                if watch.due("log", LOG_EVERY_S):
                    report(self._record(watch))
                if watch.due("save", SAVE_EVERY_S):
                    save()
            self.log.interrupted = stopped.is_set()
        if self._losses:
            report(self._record(watch))
        self.log.seconds = watch.elapsed()
        self.log.epochs = self.sampler.epochs()
        return self.log

    def _warm_up(self) -> None:
        """Run one step without an update, so that compilation does not take training time."""
        start = time.monotonic()
        self._backward(0.0).item()
        self.trainable.zero_grad()
        self.runner.loads.zero_()
        self.log.tokens = 0
        self.log.warmup_seconds = time.monotonic() - start

    def _step(self, progress: float) -> None:
        factor = rate_factor(progress, self.recipe.optimizer)
        self._losses.append(self._backward(progress))
        self._norm = self.trainable.step(factor)
        self.trainable.zero_grad()
        self._imbalance = imbalance(self.runner.loads).mean()
        self.runner.balance(self.recipe.optimizer.bias_rate)
        self._factor = factor
        self.log.steps += 1

    def _backward(self, progress: float) -> torch.Tensor:
        batch, layout = self._draw(progress)
        noisy = corrupt(
            batch.tokens, layout, self.recipe.noise, self.recipe.model.mask_token_id, self._noise
        )
        counted = noisy.counted & batch.used.unsqueeze(1)
        loss = self.runner.loss(noisy.tokens, counted, batch.tokens, layout)
        loss.backward()
        self.log.tokens += batch.tokens.numel()
        return loss.detach()

    def _draw(self, progress: float) -> tuple[Batch, Layout]:
        batch = self.sampler.draw(self.recipe.batch_windows, progress, self._order)
        lengths = self._order.choice(self._lengths, len(batch.tokens), p=self._length_shares)
        lengths = torch.from_numpy(lengths).to(batch.tokens.device, non_blocking=True)
        return batch, lay_out(batch.starts, lengths)

    def _record(self, watch: _Watch) -> dict[str, float]:
        """Sum up the steps since the last record; waits for the device."""
        record: dict[str, float] = {
            "step": self.log.steps,
            "tokens": self.log.tokens,
            "loss": torch.stack(self._losses).mean().item(),
            "norm": self._norm.item(),
            "imbalance": self._imbalance.item(),
            "rate": self._factor,
            "seconds": watch.elapsed(),
        }
        self._losses.clear()
        if not np.isfinite(record["loss"]):
            raise TrainingError(
                f"the loss is not a number at step {self.log.steps}: lower the learning rates"
            )
        self.log.records.append({key: round(value, 5) for key, value in record.items()})
        return record


class _Watch:
    """Elapsed wall-clock time, and what is due."""

    def __init__(self, seconds: float) -> None:
        self._start = time.monotonic()
        self._seconds = seconds
        self._last: dict[str, float] = {}

    def elapsed(self) -> float:
        return time.monotonic() - self._start

    def progress(self) -> float:
        return self.elapsed() / self._seconds

    def due(self, what: str, every: float) -> bool:
        now = self.elapsed()
        is_due = now - self._last.get(what, 0.0) >= every
        if is_due:
            self._last[what] = now
        return is_due


@contextmanager
def _stop_signal() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C or SIGTERM sets; a second signal acts as usual."""
    event = threading.Event()
    previous: dict[signal.Signals, Any] = {}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def stop(number: int, frame: FrameType | None) -> None:
        event.set()
        restore()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, stop)
    try:
        yield event
    finally:
        restore()
