"""Many episodes over one policy: nobody waits, nobody falls with another, nothing is left behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statelm_jax.config import EnvConfig
from statelm_jax.env.pensieve import Pensieve
from statelm_jax.env.rollout import request_seed, rollout, varied_first_ids
from statelm_jax.errors import UserError
from statelm_jax.types import Action, ActionStop, Policy, Request, StopReason, Task, Trajectory
from tests.fakes import ScriptedPolicy, byte_chat, reply

CHAT = byte_chat()
CONFIG = EnvConfig(system_prompt="Be brief.", max_turns=40, tools=("analyzeText", "buildIndex", "readChunk", "finish"))
ANALYZE, FINISH = reply(CHAT, "analyzeText"), reply(CHAT, "finish", answer="four")


def tasks(count: int, question: str = "Which pier?") -> list[Task]:
    return [Task(task_id=f"t{i}", question=question, document=f"Document {i}.") for i in range(count)]


def run(policy: Policy, items: Sequence[Task], max_live: int = 3, **options: Any) -> list[Trajectory]:
    return list(rollout(items, policy, CHAT, CONFIG, max_live=max_live, **{"seed": 0, **options}))


class LivePolicy:
    """Answers by a function of the request, one or all at a time, and checks that it is used as promised."""

    def __init__(
        self,
        answer: Callable[[Request], Action | Exception],
        choose: Callable[[list[Request]], list[Request]] = lambda requests: list(requests),
    ) -> None:
        self.answer, self.choose = answer, choose
        self.open: dict[int, Request] = {}
        self.requests: list[Request] = []
        self.released: Counter[int] = Counter()
        self.most_live = 0

    def submit(self, request: Request) -> None:
        assert request.episode not in self.open
        assert not self.released[request.episode]
        self.open[request.episode] = request
        self.requests.append(request)

    def collect(self) -> Sequence[tuple[int, Action | Exception]]:
        live = {request.episode for request in self.requests} - set(self.released)
        assert live == set(self.open), "every live episode has a request with the policy"
        self.most_live = max(self.most_live, len(live))
        chosen = self.choose(list(self.open.values()))
        return [(request.episode, self.answer(self.open.pop(request.episode))) for request in chosen]

    def release(self, episode: int) -> None:
        self.released[episode] += 1
        self.open.pop(episode, None)


def of_length(turns: Callable[[int], int]) -> Callable[[Request], Action]:
    """Episode e finishes in its turn `turns(e)`."""
    return lambda request: FINISH if request.turn >= turns(request.episode) else ANALYZE


def test_a_slow_episode_holds_back_nobody() -> None:
    def all_but_the_first(requests: list[Request]) -> list[Request]:
        return [request for request in requests if request.episode != 0] or requests

    done = run(LivePolicy(of_length(lambda episode: 2), all_but_the_first), tasks(9), max_live=2)
    assert [trajectory.task_id for trajectory in done] == [f"t{i}" for i in range(1, 9)] + ["t0"]


def test_a_trajectory_is_handed_out_as_soon_as_its_episode_ends() -> None:
    policy = LivePolicy(of_length(lambda episode: 1 if episode == 0 else 30))
    first = next(rollout(tasks(3), policy, CHAT, CONFIG, max_live=3, seed=0))
    assert first.task_id == "t0"
    assert max(request.turn for request in policy.requests) == 1


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 6), max_size=8), st.integers(1, 4), st.randoms(use_true_random=False))
def test_every_task_ends_once_and_every_episode_is_released_once(lengths: list[int], max_live: int, rng: Any) -> None:
    policy = LivePolicy(
        of_length(lambda episode: lengths[episode]),
        lambda requests: rng.sample(requests, rng.randint(1, len(requests))),
    )
    done = run(policy, tasks(len(lengths)), max_live=max_live)
    assert Counter({f"t{i}": length for i, length in enumerate(lengths)}) == Counter(
        {trajectory.task_id: len(trajectory.turns) for trajectory in done}
    )
    assert policy.released == Counter(range(len(lengths)))
    assert policy.most_live == min(max_live, len(lengths))


def test_tasks_are_taken_only_when_a_place_is_free() -> None:
    taken: list[str] = []

    def source() -> Iterator[Task]:
        for task in tasks(100):
            taken.append(task.task_id)
            yield task

    next(rollout(source(), LivePolicy(of_length(lambda episode: 1)), CHAT, CONFIG, max_live=4, seed=0))
    assert len(taken) == 4


def sampled_replies(request: Request) -> Action:
    """A reply with log-probs that no encoder would write: random bytes, or a good call among them."""
    rng = np.random.default_rng(request.seed)
    ids = rng.integers(0, 256, rng.integers(0, 30)).astype(np.int32)
    if rng.random() < 0.7:
        call = [ANALYZE, FINISH, reply(CHAT, "buildIndex", chunk_size=4), reply(CHAT, "readChunk", enable_scan=True)]
        ids = np.concatenate([ids, call[rng.integers(len(call))].token_ids])
    stop = ActionStop.STOP if rng.random() < 0.8 else ActionStop.LENGTH
    return Action(token_ids=ids, logprobs=rng.normal(size=len(ids)).astype(np.float32), stop=stop)


@pytest.mark.parametrize("seed", range(5))
def test_recorded_ids_and_log_probs_are_the_sampled_ones_at_every_turn(seed: int) -> None:
    sampled: dict[tuple[int, int], Action] = {}

    def answer(request: Request) -> Action:
        action = sampled[request.episode, request.turn] = sampled_replies(request)
        return action

    policy = LivePolicy(answer)
    done = {int(trajectory.task_id[1:]): trajectory for trajectory in run(policy, tasks(6), seed=seed)}
    fed = {(request.episode, request.turn): request.prompt for request in policy.requests}
    recorded = {
        (episode, turn): snapshot
        for episode, trajectory in done.items()
        for turn, snapshot in enumerate(trajectory.snapshots, start=1)
    }
    assert recorded.keys() == sampled.keys() == fed.keys()
    assert len(recorded) > 10
    for place, snapshot in recorded.items():
        action = sampled[place]
        assert action.logprobs is not None
        assert snapshot.prompt.tolist() == fed[place].tolist()
        assert snapshot.action.token_ids.tolist() == action.token_ids.tolist()
        assert snapshot.action.logprobs is not None
        assert snapshot.action.logprobs.tolist() == action.logprobs.tolist()
        assert snapshot.action.stop is action.stop


def test_the_same_seed_gives_the_same_trajectories_whatever_the_batch_is() -> None:
    def record(max_live: int, choose: Callable[[list[Request]], list[Request]]) -> dict[str, Any]:
        done = run(LivePolicy(sampled_replies, choose), tasks(8), max_live=max_live, seed=7)
        return {t.task_id: [(s.prompt.tolist(), s.action.token_ids.tolist()) for s in t.snapshots] for t in done}

    one_by_one = record(1, lambda requests: requests)
    assert record(8, lambda requests: requests) == one_by_one
    assert record(3, lambda requests: requests[-1:]) == one_by_one


def test_request_seeds_differ_by_run_task_attempt_and_turn_and_never_change() -> None:
    places = [
        (seed, f"t{task}", attempt, turn) for seed in (0, 1) for task in (0, 1) for attempt in (0, 1) for turn in (1, 2)
    ]
    seeds = [request_seed(*place) for place in places]
    assert len(set(seeds)) == len(places)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert request_seed(0, "t0", 0, 1) == 1246119986
    assert request_seed(3, "\ud800 ü", 1, 2) == 1727833761


def test_attempts_at_one_task_are_numbered_and_sampled_apart() -> None:
    policy = LivePolicy(of_length(lambda episode: 2))
    done = run(policy, tasks(1) * 3)
    assert sorted(trajectory.metrics["attempt"] for trajectory in done) == [0, 1, 2]
    assert len({request.seed for request in policy.requests}) == 6


def test_a_failed_request_ends_its_own_episode_and_no_other() -> None:
    def answer(request: Request) -> Action | Exception:
        if (request.episode, request.turn) == (1, 2):
            return ConnectionError("endpoint stayed down")
        return of_length(lambda episode: 3)(request)

    policy = LivePolicy(answer)
    done = {trajectory.task_id: trajectory for trajectory in run(policy, tasks(4))}
    assert {task_id: trajectory.stop for task_id, trajectory in done.items()} == {
        "t0": StopReason.FINISHED,
        "t1": StopReason.POLICY_ERROR,
        "t2": StopReason.FINISHED,
        "t3": StopReason.FINISHED,
    }
    assert done["t1"].metrics["cause"] == "ConnectionError: endpoint stayed down"
    assert done["t1"].answer is None
    assert len(done["t1"].snapshots) == len(done["t1"].turns) == 1
    assert policy.released == Counter(range(4))


def test_a_policy_that_is_down_for_good_stops_the_run_with_its_cause() -> None:
    policy = LivePolicy(lambda request: ConnectionError("no\nroute"))
    episodes = rollout(tasks(100), policy, CHAT, CONFIG, max_live=4, seed=0, max_failures=6)
    done: list[Trajectory] = []
    with pytest.raises(UserError, match="failed 6 times in a row, last with ConnectionError: no route") as caught:
        done.extend(episodes)
    assert len(str(caught.value).splitlines()) == 1
    assert [trajectory.stop for trajectory in done].count(StopReason.POLICY_ERROR) == 6
    assert {trajectory.stop for trajectory in done[6:]} == {StopReason.INTERRUPTED}
    assert set(policy.released) == {request.episode for request in policy.requests}


def test_failures_that_are_not_in_a_row_stop_nothing() -> None:
    policy = LivePolicy(lambda request: ConnectionError("x") if request.episode % 2 else FINISH)
    done = run(policy, tasks(20), max_live=1, max_failures=2)
    assert Counter(t.stop for t in done) == {StopReason.FINISHED: 10, StopReason.POLICY_ERROR: 10}


def test_ctrl_c_hands_out_the_live_episodes_as_interrupted_and_goes_on() -> None:
    def answer(request: Request) -> Action:
        if request.turn == 3:
            raise KeyboardInterrupt
        return of_length(lambda episode: 1 if episode == 0 else 9)(request)

    policy = LivePolicy(answer)
    done: list[Trajectory] = []
    with pytest.raises(KeyboardInterrupt):
        done.extend(rollout(tasks(10), policy, CHAT, CONFIG, max_live=3, seed=0))
    assert [(trajectory.task_id, trajectory.stop) for trajectory in done] == [
        ("t0", StopReason.FINISHED),
        ("t1", StopReason.INTERRUPTED),
        ("t2", StopReason.INTERRUPTED),
        ("t3", StopReason.INTERRUPTED),
    ]
    assert [len(trajectory.snapshots) for trajectory in done] == [len(trajectory.turns) for trajectory in done]
    assert policy.released == Counter(range(4))


def test_ctrl_c_inside_a_step_leaves_whole_turns_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Records(list):
        def append(self, record: Any) -> None:
            if record.turn == 2:  # the snapshot of this turn is already kept
                raise KeyboardInterrupt
            super().append(record)

    start = Pensieve.__init__

    def patched(self: Pensieve, *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        self._turns = Records()

    monkeypatch.setattr(Pensieve, "__init__", patched)
    done: list[Trajectory] = []
    with pytest.raises(KeyboardInterrupt):
        done.extend(rollout(tasks(1), LivePolicy(lambda _: ANALYZE), CHAT, CONFIG, max_live=1, seed=0))
    assert [(len(trajectory.snapshots), len(trajectory.turns)) for trajectory in done] == [(1, 1)]


def test_leaving_the_loop_early_releases_every_episode() -> None:
    policy = LivePolicy(of_length(lambda episode: 1 if episode == 0 else 9))
    episodes = rollout(tasks(10), policy, CHAT, CONFIG, max_live=3, seed=0)
    next(episodes)
    episodes.close()  # type: ignore[attr-defined]
    assert policy.released == Counter(range(3))


def test_a_bug_in_the_environment_stops_the_run_and_names_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Pensieve, action: Action) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Pensieve, "step", broken)
    policy = LivePolicy(lambda request: ANALYZE)
    with pytest.raises(ZeroDivisionError, match="a bug") as caught:
        run(policy, tasks(2))
    assert caught.value.__notes__ == ["in task 't0', attempt 0"]
    assert policy.released == Counter(range(2))


@pytest.mark.parametrize(("answers", "problem"), [([], "answered none of its 2"), ([(5, ANALYZE)], "episode 5")])
def test_a_policy_that_breaks_its_contract_is_found_out_instead_of_waited_for(answers: list, problem: str) -> None:
    class Broken(ScriptedPolicy):
        def collect(self) -> Sequence[tuple[int, Action | Exception]]:
            return answers

    with pytest.raises(RuntimeError, match=problem):
        run(Broken([]), tasks(2))


def test_an_episode_whose_question_leaves_no_room_ends_without_asking_the_policy() -> None:
    policy = LivePolicy(of_length(lambda episode: 1))
    long = Task(task_id="long", question="why " * 10_000, document="x")
    done = run(policy, [*tasks(1), long, *tasks(1)], max_live=2)
    assert {t.task_id: t.stop for t in done} == {"long": StopReason.CONTEXT_OVERFLOW, "t0": StopReason.FINISHED}
    assert len(done) == 3
    assert all("why" not in request.messages[1].text for request in policy.requests)


def test_every_turn_is_reported_as_it_happens() -> None:
    seen: list[tuple[str, int]] = []
    done = run(
        LivePolicy(of_length(lambda episode: 2 + episode)),
        tasks(3),
        on_turn=lambda task, record: seen.append((task.task_id, record.turn)),
    )
    assert sorted(seen) == [(t.task_id, turn.turn) for t in sorted(done, key=lambda t: t.task_id) for turn in t.turns]
    assert [turn for task_id, turn in seen if task_id == "t2"] == [1, 2, 3, 4]


def test_first_ids_are_what_the_episode_shows_and_are_recorded() -> None:
    policy = LivePolicy(of_length(lambda episode: 2))
    done = run(policy, tasks(1), first_ids=lambda task, attempt: (95, 7))
    assert '{"msg_id":96,"call_id":95,' in policy.requests[-1].messages[-1].text
    assert (done[0].metrics["first_msg_id"], done[0].metrics["first_chunk_id"]) == (95, 7)


def test_varied_first_ids_are_valid_of_every_size_and_often_real() -> None:
    draw = varied_first_ids(0)
    ids = [draw(task, attempt) for task in tasks(100) for attempt in (0, 1)]
    assert ids == [varied_first_ids(0)(task, attempt) for task in tasks(100) for attempt in (0, 1)]
    assert all(message % 2 == 1 and 1 <= message <= 999 and 0 <= chunk <= 499 for message, chunk in ids)
    assert 40 < ids.count((1, 0)) < 100
    for place in (0, 1):
        digits = Counter(len(str(pair[place])) for pair in ids if pair != (1, 0))
        assert sorted(digits) == [1, 2, 3]
        assert min(digits.values()) > 25


def test_without_a_place_nothing_can_run() -> None:
    with pytest.raises(ValueError, match="max_live is 0"):
        run(LivePolicy(lambda request: FINISH), tasks(1), max_live=0)
