"""`statelm sft`: supervised training on trajectories that went through the environment.

1. Trajectories are read; unfinished and wrong ones are left out and counted.
2. Their snapshots become token trees, packed into rows (`statelm_jax.batch`); only action tokens carry weight.
3. The train loop runs; a checkpoint is written every `checkpoint_every` steps, at the end, and when a signal stops it.
4. The trained agent is written as a model folder that `statelm ask` and `statelm evaluate` take.

`--resume` goes on from the newest checkpoint: the batch of a step is a function of the step, so the run ends with
the same parameters as one that was never stopped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from pydantic import Field
from rich.console import Console

from statelm_jax.checkpoint import Checkpointer
from statelm_jax.config import ChatConfig, Config, EnvConfig, MeshConfig, ModelConfig, OptimConfig
from statelm_jax.env.trajectories import read_trajectories
from statelm_jax.errors import UserError
from statelm_jax.model import Qwen3
from statelm_jax.sharding import make_mesh
from statelm_jax.tokenizer import Tokenizer
from statelm_jax.train.agents import Agent, AgentSettings, load_agent, packaged_agent, save_agent
from statelm_jax.train.curriculum import Curriculum, Stage, expert_packing, packed_batches
from statelm_jax.train.loop import Interrupted, Trainer, TrainState, fit
from statelm_jax.types import StopReason

TINY = ModelConfig(
    vocab_size=1_024,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    rope_theta=10_000.0,
    tie_word_embeddings=True,
)
"""The demo's model: 0.9 M parameters."""


class SftConfig(Config):
    """Train on what an expert (or a filtered policy) did in the environment."""

    trajectories: tuple[Path, ...] = ()
    """Trajectory files (JSON lines)."""
    out: Path = Path("runs/sft")
    """Run folder: checkpoints/, metrics.jsonl, config.json, model/."""
    init: Path | None = None
    """Agent folder to start from; without it the model of [model] is trained from nothing."""
    model: ModelConfig = TINY
    """Shape of a new model (ignored with `init`)."""
    tokenizer: Path | None = None
    """Folder of the tokenizer of a new model; the packaged tiny one by default."""
    chat: ChatConfig = ChatConfig()
    """Chat format that the trajectories were made with (ignored with `init`)."""
    env: EnvConfig = EnvConfig()
    """Environment that the trajectories were made in (ignored with `init`)."""
    optim: OptimConfig = OptimConfig()
    mesh: MeshConfig = MeshConfig()
    steps: int = Field(default=1_000, ge=1)
    """Optimiser updates."""
    row_tokens: int = Field(default=512, ge=8)
    rows: int = Field(default=8, ge=1)
    """Rows of a batch, over all devices."""
    weights: dict[str, float] = {}
    """Tool -> weight of its action tokens; 1 where not listed."""
    keep: dict[str, float] = {}
    """Tool -> share of its snapshots that are trained on; 1 where not listed."""
    checkpoint_every: int = Field(default=200, ge=1)
    seed: int = 0
    resume: bool = False
    """Go on from the newest checkpoint in `out`."""


def main(config: SftConfig) -> None:
    """Train and write the run folder."""
    console = Console(highlight=False)
    if not config.trajectories:
        raise UserError("no trajectories: give --trajectories FILE (statelm demo writes some)")
    agent = _start(config)
    kept, read = [], 0
    for path in config.trajectories:
        for trajectory in read_trajectories(path):
            read += 1
            if trajectory.stop is StopReason.FINISHED and (trajectory.reward is None or trajectory.reward > 0):
                kept.append(trajectory)
    if not kept:
        raise UserError(f"none of the {read} trajectories ended with a right answer; nothing to train on")
    packing = expert_packing(
        kept, row_tokens=config.row_tokens, weights=config.weights, keep=config.keep, seed=config.seed
    )
    console.print(
        f"{len(kept)} of {read} trajectories, {len(packing.rows)} rows of {config.row_tokens} tokens, "
        f"{packing.fill:.0%} filled"
    )
    stage = Stage(name="sft", steps=config.steps, batch_at=packed_batches(packing, rows=config.rows, seed=config.seed))
    trainer = Trainer(agent.model, config.optim, config.steps, make_mesh(config.mesh))
    state = train(
        trainer,
        agent.model,
        Curriculum([stage]),
        config.out,
        config=config.model_dump(mode="json", exclude={"out", "resume", "checkpoint_every"}),
        checkpoint_every=config.checkpoint_every,
        resume=config.resume,
        resume_hint=f"statelm sft ... --out {config.out} --resume",
    )
    trained = Agent(model=trainer.model(state), tokenizer=agent.tokenizer, settings=agent.settings)
    save_agent(trained, config.out / "model")
    console.print(f"wrote {config.out / 'model'}; try: statelm evaluate --model {config.out} --tasks FILE")


def train(
    trainer: Trainer,
    model: Qwen3,
    curriculum: Curriculum,
    out: Path,
    *,
    config: Mapping[str, Any],
    checkpoint_every: int,
    resume: bool,
    resume_hint: str,
    on_step: Any = None,
) -> TrainState:
    """Run a curriculum to its end with checkpoints in `out/checkpoints`.

    Args:
      trainer: Compiled for `curriculum.steps` steps.
      model: Where a new run starts.
      curriculum: What is trained on.
      out: The run folder.
      config: What a resumed run must agree with.
      checkpoint_every: Steps between checkpoints.
      resume: Go on from the newest checkpoint; without it a folder that has checkpoints is refused.
      resume_hint: The command that goes on, for the message after a signal.
      on_step: Called with (steps taken, state).

    Raises:
      KeyboardInterrupt: A signal came; the state is saved and the message says how to go on.
    """
    saver = Checkpointer(out / "checkpoints", config)
    state = trainer.init(model)
    if resume:
        state, step = saver.restore(state)
        _cut_metrics(out / "metrics.jsonl", step)
    elif saver.latest() is not None:
        raise UserError(f"{out} holds a run already: add --resume to go on, or give another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}") from None

    def after(step: int, state: TrainState) -> None:
        if step % checkpoint_every == 0 and step < curriculum.steps:
            saver.save(step, state)
        if on_step is not None:
            on_step(step, state)

    try:
        state = fit(
            trainer,
            state,
            curriculum.batch_at,
            stop_step=curriculum.steps,
            metrics_path=out / "metrics.jsonl",
            label_at=curriculum.label_at,
            on_step=after,
        )
    except Interrupted as interrupt:
        saver.save(interrupt.step, interrupt.state)
        raise KeyboardInterrupt(
            f"saved step {interrupt.step} of {curriculum.steps}; go on with: {resume_hint}"
        ) from None
    if saver.latest() != curriculum.steps:
        saver.save(curriculum.steps, state)
    return state


def _start(config: SftConfig) -> Agent:
    """The agent before training: loaded, or new."""
    if config.init is not None:
        return load_agent(config.init)
    tokenizer = Tokenizer.load(config.tokenizer or packaged_agent())
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(f"model.vocab_size is {config.model.vocab_size}, the tokenizer has {tokenizer.vocab_size} ids")
    model = Qwen3(config.model, rngs=nnx.Rngs(config.seed))
    return Agent(model=model, tokenizer=tokenizer, settings=AgentSettings(chat=config.chat, env=config.env))


def _cut_metrics(path: Path, step: int) -> None:
    """Drop metrics of steps that a resumed run takes again."""
    if not path.exists():
        return
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")


def parameter_count(model: Qwen3) -> int:
    """Parameters, each counted once."""
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.split(model)[1]))
