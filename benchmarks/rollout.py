"""What prefix reuse saves in a rollout: the same episodes with and without the keys and values of the turn before.

    python -m benchmarks.rollout [--json]

The episodes are the scanning expert's in the native environment: it reads, notes, deletes and goes on, so that its
context is a saw-tooth (the geometry of `benchmarks.token_tree`, in fewer turns). They are recorded once and played
again over a real sampler: it prefills every prompt and decodes as many tokens as the recorded action has, which is
what the environment then gets. The two sides:

* reuse: the longest common prefix of a prompt and what its slot holds is kept;
* anew: all slots are dropped before each turn, so every prompt is computed from its first token.

Both run in one process with one sampler, alternating; times are medians of the rounds and include the environment,
which is the same on both sides. What the sampler decodes is not what the environment gets, so here the tokens of a
reply are computed again in the next turn; with a model that acts by itself they are in the cache, and reuse saves more.
The last line is one JSON object:

* `prefill_token_ratio`: prompt tokens computed anew, in multiples of those computed with reuse;
* `prefill_wall_ratio`: time of the prefill calls, likewise;
* `wall_ratio`: time of the whole rollout, likewise (decoding and environment included);
* `compiles_after_warmup`: programs compiled after the sampler's warm-up; 0, or the bucket table has a hole.
"""

from __future__ import annotations

import dataclasses
import json as json_module
import statistics
import time
from collections.abc import Sequence
from typing import Any

import tyro
from flax import nnx
from rich.console import Console
from rich.table import Table

from benchmarks.token_tree import CHUNK_TOKENS, ENV, MODEL
from statelm_jax.chat import ChatFormat
from statelm_jax.config import ChatConfig
from statelm_jax.env.experts import ReplayPolicy, ScanExpert
from statelm_jax.env.haystack import default_source_text
from statelm_jax.env.rollout import rollout
from statelm_jax.env.tasks import NeedleConfig, needle_tasks
from statelm_jax.model import Qwen3
from statelm_jax.sampler import Sampler
from statelm_jax.tokenizer import TINY_FOLDER, Tokenizer
from statelm_jax.train.agents import sampler_config
from statelm_jax.types import Action, Request, Task, Trajectory

CHUNKS, NOTES = 4, 8
SIDES = ("anew", "reuse")


class PlayedSampler:
    """A policy: the sampler does the work of every turn, the recording says what was written.

    Args:
      sampler: Without stop ids, so that every reply has the length that is asked for.
      recordings: Episode e plays `recordings[e]`.
      keep: Keep cached prefixes between turns.

    Attributes:
      prefilled_tokens, prompt_tokens: Over all turns so far.
    """

    def __init__(self, sampler: Sampler, recordings: Sequence[Trajectory], *, keep: bool) -> None:
        self._sampler = sampler
        self._recordings = ReplayPolicy(recordings)
        self._open: dict[int, Action] = {}
        self._keep = keep
        self.prefilled_tokens = 0
        self.prompt_tokens = 0

    def submit(self, request: Request) -> None:
        """Ask the sampler for as many tokens as the recorded action has."""
        action = self._recordings.reply(request)
        self._open[request.episode] = action
        self._sampler.submit(dataclasses.replace(request, max_new_tokens=len(action.token_ids)))

    def collect(self) -> list[tuple[int, Action | Exception]]:
        """The recorded actions of the requests that the sampler has finished."""
        if not self._keep:
            self._sampler.forget()
        return [(episode, self._played(episode, answer)) for episode, answer in self._sampler.collect()]

    def release(self, episode: int) -> None:
        """Free the sampler's slot."""
        self._sampler.release(episode)

    def _played(self, episode: int, answer: Action | Exception) -> Action | Exception:
        if isinstance(answer, Exception):
            return answer
        self.prefilled_tokens += answer.prefilled_tokens
        self.prompt_tokens += answer.prefilled_tokens + answer.cached_tokens
        action = self._open.pop(episode)
        return dataclasses.replace(action, cached_tokens=answer.cached_tokens, prefilled_tokens=answer.prefilled_tokens)


def measure(episodes: int, rounds: int) -> dict[str, Any]:
    """All figures, as described at the head of this module."""
    tokenizer = Tokenizer.load(TINY_FOLDER)
    chat = ChatFormat(tokenizer, ChatConfig(tools_in_prompt="names", compact_json=True))
    needles = NeedleConfig(document_tokens=CHUNKS * CHUNK_TOKENS, distractors=NOTES - 1)
    tasks = list(needle_tasks(needles, default_source_text(), tokenizer, episodes, seed=0))
    recordings = recorded(tasks, chat)
    sampler = Sampler(Qwen3(MODEL, rngs=nnx.Rngs(0)), sampler_config(ENV, episodes), stop_ids=())
    compiled = sampler.warm_up()

    wall: dict[str, list[float]] = {side: [] for side in SIDES}
    prefill: dict[str, list[float]] = {side: [] for side in SIDES}
    prefilled = dict.fromkeys(SIDES, 0)
    prompts = 0
    for _ in range(rounds):
        for side in SIDES:
            sampler.forget()
            policy = PlayedSampler(sampler, recordings, keep=side == "reuse")
            prefill_before, start = sampler.seconds["prefill"], time.perf_counter()
            played = list(rollout(tasks, policy, chat, ENV, max_live=episodes, seed=0))
            wall[side].append(time.perf_counter() - start)
            prefill[side].append(sampler.seconds["prefill"] - prefill_before)
            prefilled[side], prompts = policy.prefilled_tokens, policy.prompt_tokens
            if sum(len(one.turns) for one in played) != sum(len(one.turns) for one in recordings):
                raise RuntimeError("the replay took another number of turns than the recording")
    median = {side: statistics.median(wall[side]) for side in SIDES}
    median_prefill = {side: statistics.median(prefill[side]) for side in SIDES}
    return {
        "prefill_token_ratio": prefilled["anew"] / prefilled["reuse"],
        "prefill_wall_ratio": median_prefill["anew"] / median_prefill["reuse"],
        "wall_ratio": median["anew"] / median["reuse"],
        "compiles_after_warmup": sampler.compiled - compiled,
        "episodes": episodes,
        "rounds": rounds,
        "turns": statistics.mean(len(one.turns) for one in recordings),
        "prompt_tokens": prompts,
        **{f"prefilled_tokens_{side}": prefilled[side] for side in SIDES},
        **{f"prefill_s_{side}": median_prefill[side] for side in SIDES},
        **{f"wall_s_{side}": median[side] for side in SIDES},
    }


def recorded(tasks: Sequence[Task], chat: ChatFormat) -> list[Trajectory]:
    """The expert's episodes, in the order of the tasks."""
    done = rollout(tasks, ScanExpert(chat), chat, ENV, max_live=len(tasks), seed=0)
    by_id = {trajectory.task_id: trajectory for trajectory in done}
    return [by_id[task.task_id] for task in tasks]


def main(json: bool = False, episodes: int = 4, rounds: int = 3) -> None:
    """Compare a rollout that reuses cached prefixes with one that prefills every prompt anew.

    Args:
      json: Print the JSON line only.
      episodes: Episodes, all live at once.
      rounds: Times each side is run; medians are reported.
    """
    figures = measure(episodes, rounds)
    if not json:
        table = Table("figure", "value", title="Prefix reuse against prefilling every prompt anew")
        for name, value in figures.items():
            table.add_row(name, f"{value:,.3g}" if isinstance(value, float) else f"{value:,}")
        Console().print(table)
    print(json_module.dumps(figures))


if __name__ == "__main__":
    tyro.cli(main, prog="python -m benchmarks.rollout")
