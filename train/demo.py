"""`statelm demo`: the main job, from nothing to a report.

1. Needle tasks over a text, and the scripted experts' trajectories through the environment.
2. A tiny Qwen3 learns to copy, then to do what the experts did (`train.curriculum`, `train.sft`).
3. The trained model acts by itself on unseen keys, values and text regions, at document lengths up to 64 windows:
   scanning without the search tool, and with it.
4. A full-context twin of the same size, from the same copying stage, reads what fits into the window.
5. The report: table, figures, failures, and a viewer of episodes. Everything is in the run folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from flax import nnx
from pydantic import Field, model_validator
from rich.console import Console

from statelm_jax.checkpoint import Checkpointer
from statelm_jax.config import ChatConfig, Config, EnvConfig, MeshConfig, ModelConfig, OptimConfig
from statelm_jax.env.experts import ScanExpert, SearchExpert
from statelm_jax.env.index import DocumentStore
from statelm_jax.env.needles import find_needles
from statelm_jax.env.rewards import reward, score_answer
from statelm_jax.env.rollout import rollout, varied_first_ids
from statelm_jax.env.tasks import NeedleConfig, default_source_text, load_source_text, needle_tasks
from statelm_jax.env.trajectories import write_trajectories
from statelm_jax.errors import UserError
from statelm_jax.initial import induction_init
from statelm_jax.model import Qwen3
from statelm_jax.sampler import Sampler
from statelm_jax.sharding import make_mesh
from statelm_jax.tokenizer import Tokenizer
from statelm_jax.train.agents import (
    Agent,
    AgentSettings,
    packaged_agent,
    save_agent,
    with_model,
)
from statelm_jax.train.curriculum import (
    Curriculum,
    Stage,
    copy_batches,
    expert_packing,
    packed_batches,
    twin_answer,
    twin_packing,
    twin_prompt,
)
from statelm_jax.train.evaluate import condition_result, run_episodes
from statelm_jax.train.loop import Trainer
from statelm_jax.train.report import machine_info, write_report
from statelm_jax.train.results import ConditionResult, DemoReport, read_curves
from statelm_jax.train.results import Stage as TimedStage
from statelm_jax.train.sft import TINY, parameter_count, train
from statelm_jax.types import Request, Task, Trajectory
from statelm_jax.weights import write_json

LIMITS = (
    'This model is tiny and answers needle questions only: "What is the secret number of the crimson lantern?" about '
    'a text that says "The secret number of the crimson lantern is 48213."'
)

TRAIN_REGION, EVAL_REGION = (0.0, 0.7), (0.7, 1.0)
"""Parts of the source text that training and evaluation take their documents from."""


class ExpertMix(Config):
    """How many expert episodes of one kind go into the training data."""

    search: bool = False
    """Searching expert; otherwise the scanning one."""
    document_tokens: int = Field(ge=16)
    distractors: int = Field(default=3, ge=0)
    episodes: int = Field(ge=1)


class DemoConfig(Config):
    """Train a tiny StateLM from nothing, let it act by itself, and write a report. Needs no download."""

    out: Path = Path("runs/demo")
    """Run folder."""
    source: Path | None = None
    """A UTF-8 text that documents are made of; by default the language reference that comes with Python."""
    seed: int = 0
    resume: bool = False
    """Go on with a run that was interrupted."""
    model: ModelConfig = TINY
    chat: ChatConfig = ChatConfig(tools_in_prompt="names", thinking_header=False, compact_json=True)
    env: EnvConfig = EnvConfig(
        tools=("analyzeText", "buildIndex", "readChunk", "note", "deleteContext", "finish"),
        context_window=576,
        max_reply_tokens=64,
        min_reply_tokens=32,
        reserve_tokens=96,
        notes_share=0.4,
        max_turns=2_000,
        chunk_tokens=128,
        chunk_border="sentence",
        max_hits=3,
        max_highlights=1,
        system_prompt="Answer from the notes.",
    )
    optim: OptimConfig = OptimConfig(optimizer="muon", learning_rate=5e-3, warmup_fraction=0.02)
    mesh: MeshConfig = MeshConfig()
    experts: tuple[ExpertMix, ...] = (
        ExpertMix(document_tokens=256, episodes=60),
        ExpertMix(document_tokens=512, episodes=100),
        ExpertMix(document_tokens=1_024, episodes=120),
        ExpertMix(document_tokens=2_048, episodes=80),
        ExpertMix(document_tokens=4_096, episodes=40),
        ExpertMix(search=True, document_tokens=2_048, episodes=60),
        ExpertMix(search=True, document_tokens=8_192, episodes=60),
        ExpertMix(search=True, document_tokens=32_768, episodes=30),
    )
    """The training data."""
    made_up: float = Field(default=0.6, ge=0.0, le=1.0)
    """Share of key and value words in the training data that are made up, so that they can only be copied."""
    weights: Mapping[str, float] = {"note": 1.5, "finish": 2.0, "searchEngine": 1.5}
    keep: Mapping[str, float] = {"readChunk": 0.3, "deleteContext": 0.9}
    copy_steps: int = Field(default=60, ge=1)
    sft_steps: int = Field(default=700, ge=1)
    twin_steps: int = Field(default=120, ge=1)
    row_tokens: int = Field(default=576, ge=64)
    rows: int = Field(default=8, ge=1)
    multiples: tuple[int, ...] = (1, 2, 4, 16, 64)
    """Document lengths to evaluate, in context windows."""
    episodes: tuple[int, ...] = (50, 50, 50, 50, 20)
    """Episodes at each length."""
    distractors: int = Field(default=3, ge=0)
    """Needles with other keys in every evaluated document."""
    slots: int = Field(default=50, ge=1)
    """Episodes run at once."""

    @model_validator(mode="after")
    def _check(self) -> DemoConfig:
        if len(self.multiples) != len(self.episodes) or not self.multiples:
            raise ValueError("multiples and episodes must be equally long, and not empty")
        if self.row_tokens < self.env.context_window:
            raise ValueError("row_tokens must hold a whole context window")
        return self


class Clock:
    """Times the stages of a run and announces them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.stages: list[TimedStage] = []

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """One stage."""
        self._console.rule(f"[bold]{name}", align="left")
        start = time.perf_counter()
        yield
        self.stages.append(TimedStage(name=name, seconds=time.perf_counter() - start))
        self._console.print(f"[dim]{self.stages[-1].seconds:.0f} s[/dim]")


def main(config: DemoConfig) -> None:
    """The whole job."""
    console = Console(highlight=False)
    if not config.resume and Checkpointer(config.out / "checkpoints", {}).latest() is not None:
        raise UserError(f"{config.out} holds a run already: add --resume to go on, or give another --out")
    source = load_source_text(config.source) if config.source else default_source_text()
    tokenizer = Tokenizer.load(packaged_agent())
    settings = AgentSettings(chat=config.chat, env=config.env, limits=LIMITS)
    model = Qwen3(config.model, rngs=nnx.Rngs(config.seed))
    induction_init(model, config.seed)
    agent = Agent(model=model, tokenizer=tokenizer, settings=settings)
    store = DocumentStore(tokenizer)
    clock = Clock(console)
    demo = _Demo(config, console, agent, source, store)

    with clock.stage("tasks and expert trajectories"):
        experts = demo.expert_trajectories()
    with clock.stage("training"):
        agent, copier = demo.train(experts)
    results: list[ConditionResult] = []
    episodes: dict[str, list[Trajectory]] = {}
    with clock.stage("compiling the sampler"):
        sampler = agent.sampler(slots=config.slots)
    with clock.stage("evaluation, scanning"):
        demo.evaluate(agent, sampler, "scan", results, episodes)
    with clock.stage("evaluation, with search"):
        demo.evaluate(agent, sampler, "search", results, episodes)
    with clock.stage("full-context twin"):
        demo.twin(copier, sampler, results)
    with clock.stage("report"):
        report = DemoReport(
            title="StateLM demo",
            model=f"{parameter_count(agent.model) / 1e6:.2f} M parameters, "
            f"{config.model.num_hidden_layers} layers of width {config.model.hidden_size}",
            window=config.env.context_window,
            results=tuple(results),
            stages=tuple(clock.stages),
            curves=read_curves(config.out / "metrics.jsonl"),
            machine=machine_info(),
            limits=(LIMITS,),
        )
        path = write_report(config.out, report, episodes, tokenizer)
    write_json(config.out / "results.json", {"results": [_plain(result) for result in results]})
    console.print(_table(results))
    console.print(f"report: {path}\nagent: statelm ask --model {config.out} --document FILE --question TEXT")


class _Demo:
    """The stages of the job; each method is one."""

    def __init__(self, config: DemoConfig, console: Console, agent: Agent, source: str, store: DocumentStore) -> None:
        self.config = config
        self.console = console
        self.agent = agent
        self.source = source
        self.store = store

    def tasks(self, config: NeedleConfig, count: int, seed: int) -> list[Task]:
        """Needle tasks over the run's source text."""
        return list(needle_tasks(config, self.source, self.agent.tokenizer, count, seed))

    def expert_trajectories(self) -> list[Trajectory]:
        """What the experts did; right and finished episodes only, the others are counted."""
        kept: list[Trajectory] = []
        dropped = 0
        for index, mix in enumerate(self.config.experts):
            needle = NeedleConfig(
                document_tokens=mix.document_tokens,
                distractors=mix.distractors,
                value_kinds=("number", "word"),
                region=TRAIN_REGION,
                made_up=self.config.made_up,
            )
            seed = self.config.seed * 1_000 + index
            tasks = self.tasks(needle, mix.episodes, seed)
            expert = (SearchExpert if mix.search else ScanExpert)(self.agent.chat)
            env = self.agent.env(search=mix.search)
            by_id = {task.task_id: task for task in tasks}
            live = rollout(
                *(tasks, expert, self.agent.chat, env),
                max_live=8,
                seed=seed,
                store=self.store,
                first_ids=varied_first_ids(seed, largest_msg_id=1_999),
            )
            for trajectory in live:
                score = reward(trajectory, by_id[trajectory.task_id])
                if score > 0:
                    kept.append(dataclasses.replace(trajectory, reward=score))
                else:
                    dropped += 1
        self.config.out.mkdir(parents=True, exist_ok=True)
        write_trajectories(self.config.out / "expert_trajectories.jsonl", kept)
        turns = sum(len(trajectory.turns) for trajectory in kept)
        self.console.print(f"{len(kept)} expert episodes, {turns:,} turns; {dropped} unfinished ones left out")
        return kept

    def train(self, experts: Sequence[Trajectory]) -> tuple[Agent, Qwen3]:
        """The trained agent, and the model as it was after the copying stage."""
        config = self.config
        packing = expert_packing(
            *(experts,), row_tokens=config.row_tokens, weights=config.weights, keep=config.keep, seed=config.seed
        )
        self.console.print(
            f"{len(packing.rows)} rows of {config.row_tokens} tokens, {packing.fill:.0%} filled; "
            f"{parameter_count(self.agent.model):,} parameters"
        )
        words = self.agent.tokenizer.vocab_size - 9  # without the control tokens
        copying = copy_batches(words, rows=64, row_tokens=64, longest=20, seed=config.seed)
        expert = packed_batches(packing, rows=config.rows, seed=config.seed)
        curriculum = Curriculum(
            [
                Stage(name="copy", steps=config.copy_steps, batch_at=copying),
                Stage(name="sft", steps=config.sft_steps, batch_at=expert),
            ]
        )
        trainer = Trainer(self.agent.model, config.optim, curriculum.steps, make_mesh(config.mesh))
        copier = config.out / "copier"

        def keep_copier(step: int, state) -> None:
            if step == config.copy_steps:
                save_agent(with_model(self.agent, trainer.model(state)), copier)

        state = train(
            trainer,
            self.agent.model,
            curriculum,
            config.out,
            config=config.model_dump(mode="json", include=set(_TRAINING_KEYS)),
            checkpoint_every=100,
            resume=config.resume,
            resume_hint=f"statelm demo --out {config.out} --resume",
            on_step=keep_copier,
        )
        agent = with_model(self.agent, trainer.model(state))
        save_agent(agent, config.out / "model")
        from statelm_jax.weights import load_model

        return agent, load_model(copier)

    def evaluate(
        self,
        agent: Agent,
        sampler: Sampler,
        name: str,
        results: list[ConditionResult],
        episodes: dict[str, list[Trajectory]],
    ) -> None:
        """The agent alone with unseen tasks at every length; trajectories are written as they come."""
        config = self.config
        env = agent.env(search=name == "search")
        for multiple, count in zip(config.multiples, config.episodes, strict=True):
            tasks = self.evaluation_tasks(multiple, count)
            label = f"{name:>6} {multiple:>3}x"
            # Two turns per chunk (chunks may end early, at a sentence), and some for notes; more only go in circles.
            chunks = 2 * multiple * env.context_window // env.chunk_tokens
            limited = env.model_copy(update={"max_turns": min(env.max_turns, 2 * chunks + 40)})
            trajectories = run_episodes(agent, sampler, tasks, limited, store=self.store, label=label)
            result = condition_result(name, multiple, tasks, trajectories)
            results.append(result)
            episodes[f"{name}, {multiple}x"] = trajectories
            write_trajectories(config.out / f"trajectories_{name}_{multiple}x.jsonl", trajectories)
            failures = ", ".join(f"{kind} {n}" for kind, n in sorted(result.failures.items()))
            self.console.print(f"{label}: {result.correct}/{result.episodes} right  {failures}")

    def evaluation_tasks(self, multiple: int, count: int) -> list[Task]:
        """Unseen tasks of one length: other key words, other values, another part of the text."""
        needle = NeedleConfig(
            document_tokens=multiple * self.config.env.context_window,
            distractors=self.config.distractors,
            value_kinds=("number", "word"),
            region=EVAL_REGION,
            split="eval",
        )
        return self.tasks(needle, count, self.config.seed + 77)

    def twin(self, copier: Qwen3, sampler: Sampler, results: list[ConditionResult]) -> None:
        """A model of the same size that is given the (cut) text and no tools."""
        config, chat, env = self.config, self.agent.chat, self.config.env
        reply = env.min_reply_tokens
        overhead = len(twin_prompt(chat, "x" * 64, self.store.get("x"), env.context_window, reply))
        tasks = []
        for index in range(6):
            tokens = (env.context_window - reply - overhead) * (index + 1) // 6
            needle = NeedleConfig(
                document_tokens=max(tokens, 96),
                made_up=config.made_up,
                value_kinds=("number", "word"),
                region=TRAIN_REGION,
            )
            tasks += self.tasks(needle, 200, self.config.seed * 1_000 + 500 + index)
        packing = twin_packing(
            *(tasks, find_needles, chat, self.store.get),
            window=env.context_window,
            reply=reply,
            row_tokens=config.row_tokens,
        )
        stage = Stage(
            name="twin", steps=config.twin_steps, batch_at=packed_batches(packing, rows=config.rows, seed=config.seed)
        )
        trainer = Trainer(copier, config.optim, config.twin_steps, make_mesh(config.mesh))
        state = train(
            trainer,
            copier,
            Curriculum([stage]),
            config.out / "twin",
            config=config.model_dump(mode="json", include=set(_TRAINING_KEYS)),
            checkpoint_every=10**9,
            resume=False,
            resume_hint="statelm demo",
        )
        twin = with_model(self.agent, trainer.model(state))
        save_agent(twin, config.out / "twin" / "model")
        sampler.update(twin.model)
        for multiple, count in zip(config.multiples, config.episodes, strict=True):
            unseen = self.evaluation_tasks(multiple, count)
            results.append(self._twin_result(sampler, unseen, multiple, reply))
            self.console.print(f"  twin {multiple:>3}x: {results[-1].correct}/{count} right")

    def _twin_result(self, sampler: Sampler, tasks: Sequence[Task], multiple: int, reply: int) -> ConditionResult:
        window = self.config.env.context_window
        prompts = [
            twin_prompt(self.agent.chat, task.question, self.store.get(task.document), window, reply) for task in tasks
        ]
        for index, prompt in enumerate(prompts):
            sampler.submit(Request(episode=index, turn=1, prompt=prompt, messages=(), max_new_tokens=reply))
        answers: dict[int, str | None] = {}
        while len(answers) < len(tasks):
            for index, action in sampler.collect():
                if isinstance(action, Exception):
                    raise action
                answers[index] = twin_answer(self.agent.chat.parse(action.token_ids, action.stop).thought)
                sampler.release(index)
        right = sum(score_answer(answers[index], task.answers) for index, task in enumerate(tasks))
        return ConditionResult(
            name="twin",
            multiple=multiple,
            document_tokens=multiple * window,
            episodes=len(tasks),
            correct=right,
            mean_turns=1.0,
            peak_context=max(len(prompt) for prompt in prompts) + reply,
            failures={"wrong_answer": len(tasks) - right} if right < len(tasks) else {},
        )


_TRAINING_KEYS = (
    *("seed", "model", "chat", "env", "optim", "experts", "weights", "keep", "copy_steps", "sft_steps"),
    *("row_tokens", "rows"),
)
"""What a resumed run must agree with."""


def _plain(result: ConditionResult) -> dict:
    return {**dataclasses.asdict(result), "accuracy": result.accuracy, "interval": result.interval}


def _table(results: Sequence[ConditionResult]):
    from rich.table import Table

    from statelm_jax.train.results import CONDITIONS

    table = Table("document", *CONDITIONS.values(), title="right answers on unseen tasks")
    for multiple in dict.fromkeys(result.multiple for result in results):
        row = {result.name: result for result in results if result.multiple == multiple}
        cells = [f"{row[n].correct}/{row[n].episodes} ({row[n].accuracy:.0%})" if n in row else "-" for n in CONDITIONS]
        table.add_row(f"{multiple:g}x window", *cells)
    return table
