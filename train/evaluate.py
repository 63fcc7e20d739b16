"""`statelm evaluate`: let a trained model act by itself on tasks, and score what it answers.

The model is alone with the environment: what it reads, notes, deletes and answers is its own doing. Answers are
scored strictly (`env.rewards`), and a wrong episode is traced to the step where it went wrong (`train.failures`).
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from pydantic import Field
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from statelm_jax.config import Config, EnvConfig, SamplingConfig
from statelm_jax.env.index import DocumentStore
from statelm_jax.env.rewards import reward
from statelm_jax.env.rollout import rollout
from statelm_jax.env.tasks import read_tasks
from statelm_jax.env.trajectories import write_trajectories
from statelm_jax.errors import UserError
from statelm_jax.sampler import Sampler
from statelm_jax.train.agents import Agent, load_agent, packaged_agent
from statelm_jax.train.failures import RIGHT, failure_kind
from statelm_jax.train.results import ConditionResult
from statelm_jax.types import Task, Trajectory, TurnRecord


class EvaluateConfig(Config):
    """Let a checkpoint act by itself on a file of tasks and score its answers."""

    tasks: Path
    """Tasks as JSON lines (`statelm tasks` writes needle tasks)."""
    model: Path | None = None
    """Agent folder or run; the packaged tiny agent by default."""
    out: Path = Path("runs/evaluate")
    """Receives trajectories.jsonl and results.json."""
    search: bool = False
    """Give the model the search tool; without it, it scans."""
    slots: int = Field(default=16, ge=1)
    """Episodes run at once."""
    sampling: SamplingConfig = SamplingConfig()
    seed: int = 0


def main(config: EvaluateConfig) -> None:
    """Run the episodes, write the files, print the result."""
    console = Console()
    tasks = read_tasks(config.tasks)
    if not tasks:
        raise UserError(f"{config.tasks} holds no tasks")
    agent = load_agent(config.model or packaged_agent())
    try:
        config.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {config.out}: {error.strerror}") from None
    with console.status("compiling"):
        sampler = agent.sampler(slots=min(config.slots, len(tasks)), sampling=config.sampling)
    trajectories = run_episodes(agent, sampler, tasks, agent.env(search=config.search), seed=config.seed)
    name = "search" if config.search else "scan"
    result = condition_result(name, 0.0, tasks, trajectories)
    write_trajectories(config.out / "trajectories.jsonl", trajectories)
    summary = {**dataclasses.asdict(result), "accuracy": result.accuracy, "interval": result.interval}
    (config.out / "results.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    table = Table("episodes", "right", "accuracy", "95 %", "turns", "peak context", "failures")
    low, high = result.interval
    failures = ", ".join(f"{kind} {count}" for kind, count in sorted(result.failures.items())) or "-"
    table.add_row(
        *(str(result.episodes), str(result.correct), f"{result.accuracy:.1%}", f"{low:.0%} to {high:.0%}"),
        *(f"{result.mean_turns:.1f}", str(result.peak_context), failures),
    )
    console.print(table)
    console.print(f"wrote {config.out}/trajectories.jsonl and results.json")


def run_episodes(
    agent: Agent,
    sampler: Sampler,
    tasks: Sequence[Task],
    env: EnvConfig,
    *,
    seed: int = 0,
    store: DocumentStore | None = None,
    label: str = "episodes",
    on_turn: Callable[[Task, TurnRecord], None] | None = None,
) -> list[Trajectory]:
    """One scored trajectory per task, in the order of the tasks; shows a progress bar."""
    by_id = {task.task_id: task for task in tasks}
    if len(by_id) != len(tasks):
        raise UserError("two tasks have the same task_id")
    done: dict[str, Trajectory] = {}
    turns = 0

    def count(task: Task, record: TurnRecord) -> None:
        nonlocal turns
        turns += 1
        progress.update(bar, turns=turns)
        if on_turn is not None:
            on_turn(task, record)

    with episode_progress() as progress:
        bar = progress.add_task(label, total=len(tasks), turns=0)
        live = rollout(tasks, sampler, agent.chat, env, max_live=sampler.slots, seed=seed, store=store, on_turn=count)
        for trajectory in live:
            score = reward(trajectory, by_id[trajectory.task_id])
            done[trajectory.task_id] = dataclasses.replace(trajectory, reward=score)
            progress.advance(bar)
    return [done[task.task_id] for task in tasks]


def episode_progress() -> Progress:
    """The bar of a rollout: episodes done, turns taken, time."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[turns]:,} turns"),
        TimeElapsedColumn(),
    )


def condition_result(
    name: str, multiple: float, tasks: Sequence[Task], trajectories: Sequence[Trajectory]
) -> ConditionResult:
    """What the episodes of one condition add up to."""
    kinds = Counter(failure_kind(trajectory, task) for task, trajectory in zip(tasks, trajectories, strict=True))
    correct = kinds.pop(RIGHT, 0)
    return ConditionResult(
        name=name,
        multiple=multiple,
        document_tokens=max(int(trajectory.metrics["document_tokens"]) for trajectory in trajectories),
        episodes=len(trajectories),
        correct=correct,
        mean_turns=float(np.mean([len(trajectory.turns) for trajectory in trajectories])),
        peak_context=max(int(trajectory.metrics["peak_context_tokens"]) for trajectory in trajectories),
        failures=dict(kinds),
    )
