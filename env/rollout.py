"""Drives many episodes over one policy, continuously: no episode ever waits for another.

The life of one turn:

1. A free place takes the next task; its episode gets the next number (0, 1, 2, ... in the order of the tasks).
2. The episode's context goes to the policy as a `Request`, with a seed that depends on the task, the attempt and
   the turn alone, so that what is sampled does not depend on what else is in the batch.
3. `collect` blocks until at least one open request is answered, in whatever order they are.
4. Each answer steps its environment, and the next request of that episode is submitted before `collect` is called
   again: the policy always has a request of every live episode.
5. An ended episode releases its number, its trajectory is handed out, and its place takes the next task.

A request that fails for good ends its own episode (`StopReason.POLICY_ERROR`, cause in the metrics). Ctrl-C ends
all live episodes as INTERRUPTED; they are handed out before the interrupt goes on (unless it strikes in the caller's
loop body, which closes the rollout). Any other exception is a bug: it goes on at once, with the task's id added.
However it ends, every episode is released.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from statelm_jax.chat import ChatFormat
from statelm_jax.config import EnvConfig
from statelm_jax.env.index import DocumentStore
from statelm_jax.env.pensieve import Pensieve
from statelm_jax.errors import UserError
from statelm_jax.types import Action, Policy, Request, StopReason, Task, Trajectory, TurnRecord

OnTurn = Callable[[Task, TurnRecord], None]
"""Called after each turn, for progress and streaming."""

FirstIds = Callable[[Task, int], tuple[int, int]]
"""(task, attempt) -> the ids of the episode's first message (odd) and of its document's first chunk."""


def rollout(
    tasks: Iterable[Task],
    policy: Policy,
    chat: ChatFormat,
    config: EnvConfig,
    *,
    max_live: int,
    seed: int,
    store: DocumentStore | None = None,
    on_turn: OnTurn | None = None,
    first_ids: FirstIds | None = None,
    max_failures: int = 32,
) -> Iterator[Trajectory]:
    """Run one episode per task and yield trajectories as they complete (not in the order of the tasks).

    To the environment's metrics are added `attempt`, `first_msg_id` and `first_chunk_id`.

    Args:
      tasks: Taken one by one, as places get free. A task that comes again is another attempt at it (0, 1, ...),
        with seeds of its own.
      policy: Writes the replies. A policy with cache slots needs at least `max_live` of them.
      chat: How messages become tokens.
      config: The environment's tools and limits.
      max_live: Episodes open at once, at most.
      seed: Same seed, same request seeds, whatever `max_live` is.
      store: Documents shared with other rollouts; a new one by default.
      on_turn: Called with the task and the record of each turn.
      first_ids: Where ids begin; (1, 0) by default. Training varies them (`varied_first_ids`), a replay repeats them
        (`recorded_first_ids`).
      max_failures: This many policy errors in a row, over all episodes, stop the run.

    Raises:
      UserError: The policy failed `max_failures` times in a row; the message gives the last cause. The live
        episodes are yielded first, as INTERRUPTED.
    """
    if max_live < 1:
        raise ValueError(f"max_live is {max_live}; at least one episode must be open")
    run = _Rollout(
        policy=policy,
        chat=chat,
        config=config,
        seed=seed,
        store=store if store is not None else DocumentStore(chat.tokenizer),
        on_turn=on_turn,
        first_ids=first_ids or (lambda task, attempt: (1, 0)),
        max_failures=max_failures,
    )
    return run.episodes(iter(tasks), max_live)


def request_seed(seed: int, task_id: str, attempt: int, turn: int) -> int:
    """The seed of one request, 0 <= seed < 2**31; the same on every machine and in every batch."""
    key = json.dumps([seed, task_id, attempt, turn]).encode("ascii")
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big") >> 1


def varied_first_ids(seed: int, *, largest_msg_id: int = 999, largest_chunk_id: int = 499) -> FirstIds:
    """Random first ids for training: a model meets ids of all sizes, not only those of short episodes.

    A third of the episodes begin at (1, 0), as real ones do; the others anywhere, with ids of one, two and three
    digits equally frequent, so that the steps from 9 to 10 and from 99 to 100 are met as often as any other.
    """

    def draw(task: Task, attempt: int) -> tuple[int, int]:
        rng = random.Random(request_seed(seed, task.task_id, attempt, 0))
        if rng.random() < 1 / 3:
            return 1, 0
        return _any_size(rng, largest_msg_id) | 1, _any_size(rng, largest_chunk_id)

    return draw


def recorded_first_ids(trajectories: Iterable[Trajectory]) -> FirstIds:
    """The first ids that recordings had, so that a replay of them shows the same ones."""
    recorded = {
        (one.task_id, one.metrics["attempt"]): (one.metrics["first_msg_id"], one.metrics["first_chunk_id"])
        for one in trajectories
    }
    return lambda task, attempt: recorded[task.task_id, attempt]


def _any_size(rng: random.Random, largest: int) -> int:
    """A number from 0 to `largest`, each number of digits equally likely."""
    digits = rng.randint(1, len(str(largest)))
    return rng.randint(0 if digits == 1 else 10 ** (digits - 1), min(largest, 10**digits - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Episode:
    """One open episode."""

    number: int
    task: Task
    attempt: int
    first_ids: tuple[int, int]
    env: Pensieve


class _PolicyDownError(UserError):
    """The policy failed too often in a row."""


@dataclass(slots=True, kw_only=True)
class _Rollout:
    """The state of one `rollout` call."""

    policy: Policy
    chat: ChatFormat
    config: EnvConfig
    seed: int
    store: DocumentStore
    on_turn: OnTurn | None
    first_ids: FirstIds
    max_failures: int
    live: dict[int, _Episode] = dataclasses.field(default_factory=dict)
    opened: int = 0
    attempts: Counter[str] = dataclasses.field(default_factory=Counter)
    failures_in_a_row: int = 0

    def episodes(self, tasks: Iterator[Task], max_live: int) -> Iterator[Trajectory]:
        """The loop of the module's docstring."""
        try:
            while True:
                while len(self.live) < max_live and (task := next(tasks, None)) is not None:
                    yield from self._ended(self._open(task))
                if not self.live:
                    return
                for number, answer in self._collect():
                    yield from self._ended(self._advance(self.live[number], answer))
        except (KeyboardInterrupt, _PolicyDownError):
            for episode in tuple(self.live.values()):
                episode.env.abort(StopReason.INTERRUPTED)
                yield from self._ended(episode)
            raise
        finally:
            while self.live:
                self.policy.release(self.live.popitem()[0])

    def _open(self, task: Task) -> _Episode:
        """Start an episode and submit its first request, if its first prompt leaves room for a reply."""
        attempt = self.attempts[task.task_id]
        self.attempts[task.task_id] += 1
        with _named(task, attempt):
            first_msg_id, first_chunk_id = self.first_ids(task, attempt)
            env = Pensieve(
                task, self.chat, self.config, self.store, first_msg_id=first_msg_id, first_chunk_id=first_chunk_id
            )
        episode = _Episode(
            number=self.opened, task=task, attempt=attempt, first_ids=(first_msg_id, first_chunk_id), env=env
        )
        self.opened += 1
        self.live[episode.number] = episode
        self._submit(episode)
        return episode

    def _submit(self, episode: _Episode) -> None:
        if episode.env.stop is not None:
            return
        observation = episode.env.observe()
        request = Request(
            episode=episode.number,
            turn=observation.turn,
            prompt=observation.prompt,
            messages=observation.messages,
            max_new_tokens=observation.max_new_tokens,
            seed=request_seed(self.seed, episode.task.task_id, episode.attempt, observation.turn),
        )
        with _named(episode.task, episode.attempt):
            self.policy.submit(request)

    def _collect(self) -> Sequence[tuple[int, Action | Exception]]:
        answers = self.policy.collect()
        if not answers:  # without this a faulty policy would make us wait for ever
            raise RuntimeError(f"the policy answered none of its {len(self.live)} open requests")
        unknown = [number for number, _ in answers if number not in self.live]
        if unknown:
            raise RuntimeError(f"the policy answered episode {unknown[0]}, which has no open request")
        return answers

    def _advance(self, episode: _Episode, answer: Action | Exception) -> _Episode:
        """Step an episode with its answer, and submit its next request unless that ended it."""
        if isinstance(answer, Exception):
            self._fail(episode, answer)
            return episode
        self.failures_in_a_row = 0
        with _named(episode.task, episode.attempt):
            episode.env.step(answer)
        if self.on_turn is not None:
            self.on_turn(episode.task, episode.env.turns[-1])
        self._submit(episode)
        return episode

    def _fail(self, episode: _Episode, error: Exception) -> None:
        cause = f"{type(error).__name__}: {error}"
        episode.env.abort(StopReason.POLICY_ERROR, cause)
        self.failures_in_a_row += 1
        if self.failures_in_a_row >= self.max_failures:
            raise _PolicyDownError(
                f"the policy failed {self.failures_in_a_row} times in a row, last with {' '.join(cause.split())}; "
                "mend it and run again"
            )

    def _ended(self, episode: _Episode) -> Iterator[Trajectory]:
        """Release an episode that is over and hand out its trajectory; nothing for one that goes on."""
        if episode.env.stop is None:
            return
        del self.live[episode.number]
        self.policy.release(episode.number)
        trajectory = episode.env.trajectory()
        metrics = {
            **trajectory.metrics,
            "attempt": episode.attempt,
            "first_msg_id": episode.first_ids[0],
            "first_chunk_id": episode.first_ids[1],
        }
        # An interrupt may fall between the two halves of a turn's record; a half turn is no turn.
        whole = min(len(trajectory.snapshots), len(trajectory.turns))
        yield dataclasses.replace(
            trajectory, snapshots=trajectory.snapshots[:whole], turns=trajectory.turns[:whole], metrics=metrics
        )


@contextmanager
def _named(task: Task, attempt: int) -> Iterator[None]:
    """An exception that passes says in which episode it arose."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in task {task.task_id!r}, attempt {attempt}")
        raise
