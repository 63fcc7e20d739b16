"""The train loop: one jitted step for every objective that is a weighted sum over targets of token trees.

The life of one step:

1. `batch_at(step)` builds the step's batch on the host: a function of the step alone, so that a resumed run sees
   exactly the batches that the uninterrupted one would have seen;
2. the batch goes to the mesh, rows split over `data` and `fsdp` (the explicit host-to-device transfer);
3. the step computes loss and gradient, updates the parameters (`statelm_jax.optim`) and returns metrics;
4. metrics are written as one JSON line, the progress bar moves, hooks run;
5. SIGINT and SIGTERM are looked at between steps: the state is saved, and the loop says so by raising `Interrupted`.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from statelm_jax.batch import TreeBatch
from statelm_jax.config import OptimConfig
from statelm_jax.losses import sft_loss, target_scores
from statelm_jax.model import Qwen3
from statelm_jax.optim import Optimizer, learning_rate_at, make_optimizer
from statelm_jax.sharding import batch_shardings, shardings


class Interrupted(Exception):
    """A signal stopped the loop after `step` updates; `state` is what they led to."""

    def __init__(self, state: TrainState, step: int) -> None:
        super().__init__(f"interrupted after {step} steps")
        self.state = state
        self.step = step


class TrainState(NamedTuple):
    """All that a step changes: number of steps taken, parameters, optimiser state."""

    step: jax.Array
    params: Any
    opt_state: Any


class Trainer:
    """A model, an optimiser and a mesh, ready to take steps.

    Args:
      model: The initial model; its structure is kept, its values become the initial parameters.
      optim: The optimiser and schedule.
      total_steps: Where the schedule ends.
      mesh: Devices.
    """

    def __init__(self, model: Qwen3, optim: OptimConfig, total_steps: int, mesh: Mesh) -> None:
        graphdef, params = nnx.split(model)
        self.graphdef = graphdef
        self.mesh = mesh
        self.optim = optim
        self.total_steps = total_steps
        self.optimizer: Optimizer = make_optimizer(optim, params, total_steps)
        state = TrainState(jnp.zeros((), jnp.int32), params, jax.eval_shape(self.optimizer.init, params))
        self.state_shardings = TrainState(
            shardings(mesh, state.step, strict=False),
            shardings(mesh, params),
            shardings(mesh, state.opt_state, strict=False),
        )
        self._step = jax.jit(
            partial(_train_step, graphdef, self.optimizer),
            donate_argnums=(0,),
            out_shardings=(self.state_shardings, None),
        )
        self._score = jax.jit(partial(_score, graphdef))

    def init(self, model: Qwen3) -> TrainState:
        """The state before the first step, placed on the mesh. The model's own arrays stay untouched."""
        _, params = nnx.split(model)
        # A real copy: the step donates its state, and the caller may go on using the model.
        params = jax.device_put(jax.tree.map(jnp.copy, params), self.state_shardings.params)
        opt_state = jax.jit(self.optimizer.init, out_shardings=self.state_shardings.opt_state)(params)
        step = jax.device_put(jnp.zeros((), jnp.int32), self.state_shardings.step)
        return TrainState(step, params, opt_state)

    def step(self, state: TrainState, batch: TreeBatch) -> tuple[TrainState, Mapping[str, jax.Array]]:
        """One update. `state` is given away."""
        return self._step(state, jax.device_put(batch, batch_shardings(self.mesh, batch)))

    def score(self, params: Any, batch: TreeBatch) -> tuple[np.ndarray, np.ndarray]:
        """(logp_BR, correct_BR) of every target on the host; no update."""
        scores = self._score(params, jax.device_put(batch, batch_shardings(self.mesh, batch)))
        return jax.device_get(scores)

    def model(self, state: TrainState) -> Qwen3:
        """The model with a copy of the state's parameters."""
        return nnx.merge(self.graphdef, jax.tree.map(jnp.copy, state.params))


def fit(
    trainer: Trainer,
    state: TrainState,
    batch_at: Callable[[int], TreeBatch],
    *,
    stop_step: int,
    metrics_path: Path,
    label_at: Callable[[int], str] = lambda step: "sft",
    on_step: Callable[[int, TrainState], None] | None = None,
    progress: Progress | None = None,
    log_every: int = 10,
) -> TrainState:
    """Take steps until `stop_step`.

    Args:
      trainer: The compiled step.
      state: Where to go on from.
      batch_at: Batch of each step (0-based).
      stop_step: Total number of steps taken when the loop ends.
      metrics_path: One JSON line is appended for every `log_every` steps.
      label_at: Name of the stage that a step belongs to, for bar and metrics.
      on_step: Called with (steps taken, state) after every step.
      progress: A running bar to join; None makes one.
      log_every: Steps whose metrics are averaged into one line.

    Raises:
      Interrupted: SIGINT or SIGTERM arrived. The state in it is whole; the caller saves it.
    """
    start = int(state.step)
    with contextlib.ExitStack() as stack:
        stopped = stack.enter_context(_stop_flag())
        lines = stack.enter_context(metrics_path.open("a", encoding="utf-8"))
        progress = progress or stack.enter_context(training_progress())
        bar = progress.add_task(label_at(start), total=stop_step, completed=start, rate="", loss="")
        window: list[tuple[Mapping[str, jax.Array], int, int]] = []
        since = time.perf_counter()
        for step in range(start, stop_step):
            batch = batch_at(step)
            state, metrics = trainer.step(state, batch)
            window.append((metrics, int((batch.end_BT > 0).sum()), int((batch.weight_BR > 0).sum())))
            if len(window) == log_every or step + 1 == stop_step:
                record = _record(trainer, window, step, label_at(step), since)
                lines.write(json.dumps(record) + "\n")
                lines.flush()
                loss, rate = f"loss {record['loss']:.3f}", f"{record['tokens_per_s']:,.0f} tok/s"
                progress.update(bar, completed=step + 1, description=record["phase"], loss=loss, rate=rate)
                window, since = [], time.perf_counter()
            if on_step is not None:
                on_step(step + 1, state)
            if stopped():
                raise Interrupted(state, step + 1)
        progress.remove_task(bar)
    return state


def training_progress() -> Progress:
    """The bar of a training run: stage, steps, loss, tokens per second, time left."""
    return Progress(
        TextColumn("{task.description:>10}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )


def _train_step(graphdef, optimizer: Optimizer, state: TrainState, batch: TreeBatch):
    def loss_of(params):
        scores = target_scores(nnx.merge(graphdef, params), batch)
        return sft_loss(scores.logp_BR, batch.weight_BR, batch.denominator), scores

    (loss, scores), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    counted_BR = batch.weight_BR > 0
    update = optimizer.update(grads, state.opt_state, state.params, jnp.any(counted_BR))
    metrics = {
        "loss": loss,
        "accuracy": jnp.sum(scores.correct_BR * batch.weight_BR) / batch.denominator,
        "grad_norm": update.grad_norm,
        "applied": update.applied,
    }
    return TrainState(state.step + 1, update.params, update.opt_state), metrics


def _score(graphdef, params, batch: TreeBatch):
    scores = target_scores(nnx.merge(graphdef, params), batch)
    return scores.logp_BR, scores.correct_BR


def _record(trainer: Trainer, window, step: int, stage: str, since: float) -> dict[str, Any]:
    """Averages of the steps since `since`; one transfer for all of them, which also waits until they are done."""
    metrics = jax.device_get([m for m, _, _ in window])
    seconds = time.perf_counter() - since
    mean = {name: float(np.mean([m[name] for m in metrics])) for name in ("loss", "accuracy", "grad_norm")}
    return {
        "step": step + 1,
        "phase": stage,
        **mean,
        "skipped_steps": sum(not m["applied"] for m in metrics),
        "learning_rate": float(learning_rate_at(trainer.optim, trainer.total_steps, step)),
        "tokens_per_s": sum(tokens for _, tokens, _ in window) / seconds,
        "trained_tokens_per_s": sum(targets for _, _, targets in window) / seconds,
    }


@contextlib.contextmanager
def _stop_flag() -> Iterator[Callable[[], bool]]:
    """SIGINT and SIGTERM set a flag while this is open; a second SIGINT interrupts at once."""
    seen: list[int] = []

    def note(signum, frame):
        if seen and signum == signal.SIGINT:
            raise KeyboardInterrupt
        seen.append(signum)

    try:
        before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals are somebody else's business
        yield lambda: False
        return
    try:
        yield lambda: bool(seen)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
