"""Experts answer right from what the context shows and copy what they write; a replay repeats a recording exactly."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from statelm_jax.config import EnvConfig
from statelm_jax.env.experts import THOUGHTS, NeedleExpert, ReplayPolicy, ScanExpert, SearchExpert
from statelm_jax.env.needles import find_needles
from statelm_jax.env.rewards import score_answer
from statelm_jax.env.rollout import recorded_first_ids, rollout, varied_first_ids
from statelm_jax.env.tasks import NeedleConfig, needle_tasks
from statelm_jax.env.trajectories import read_trajectories, write_trajectories
from statelm_jax.types import Action, ActionStop, Request, Role, StopReason, Task, ToolCall, Trajectory
from tests.fakes import ByteTokenizer, byte_chat, reply

CHAT = byte_chat(compact_json=True)
TOOLS = ("analyzeText", "buildIndex", "readChunk", "searchEngine", "note", "deleteContext", "finish")
CONFIG = EnvConfig(
    system_prompt="Be brief.",
    tools=TOOLS,
    context_window=4096,
    max_reply_tokens=256,
    min_reply_tokens=256,
    reserve_tokens=600,
    chunk_tokens=400,
    chunk_overlap=120,
)


class Bytes(ByteTokenizer):
    """Hashable, as makers of tasks keep what they tokenised."""

    __hash__ = object.__hash__


BYTES = Bytes()
SOURCE = """
The harbour master keeps two books. One is for the tides, the other for the boats that come in late. Nobody has read
the second one since the winter of the long fog. When the bell rings twice, the lamps along the pier are lit. A cat
sleeps on the ropes! Would you wake it? The ferry leaves at seven; it has never left at eight. Bread is cheaper on
the other side of the water. Most people do not cross for bread, they cross for the view of the hills.
"""


def tasks(count: int = 6, tokens: int = 3000, seed: int = 0, **config: Any) -> list[Task]:
    needles = NeedleConfig(
        document_tokens=tokens, **{"absent": 0.2, "value_kinds": ("number", "word", "uuid"), **config}
    )
    return list(needle_tasks(needles, SOURCE, BYTES, count, seed))


def handmade(document: str, key: str = "crimson lantern") -> Task:
    return Task(task_id="handmade", question=f"What is the secret number of the {key}?", document=document)


def needle(key: str, value: str) -> str:
    return f" The secret number of the {key} is {value}. "


def run(expert: Any, items: Sequence[Task], config: EnvConfig = CONFIG, **options: Any) -> list[Trajectory]:
    done = rollout(items, expert, CHAT, config, **{"max_live": 1, "seed": 0, **options})
    return list(done)


def calls(trajectory: Trajectory) -> list[str]:
    """Tool calls as written, in short: `readChunk enable_scan=True`."""
    written = [CHAT.parse(shot.action.token_ids, shot.action.stop).calls[0] for shot in trajectory.snapshots]
    return [" ".join([call.name, *(f"{name}={value}" for name, value in call.arguments.items())]) for call in written]


@pytest.mark.parametrize("expert", [ScanExpert, SearchExpert])
@pytest.mark.parametrize("tokens", [600, 3000, 12_000])
def test_every_needle_question_is_answered_right_without_a_tool_error(expert: type[NeedleExpert], tokens: int) -> None:
    items = tasks(5, tokens, absent=0.0) + tasks(3, tokens, absent=1.0)
    done = run(expert(CHAT), items, first_ids=varied_first_ids(1))
    assert [(t.stop, t.metrics["tool_errors"]) for t in done] == [(StopReason.FINISHED, 0)] * len(items)
    assert all(score_answer(t.answer, t.answers) for t in done)
    assert sum(not t.answers for t in done) == 3, "some documents hold no answer"


def test_a_scan_reads_every_chunk_notes_every_needle_and_deletes_all_but_the_last_chunk() -> None:
    parts = [needle("crimson lantern", "48213"), "Nothing.", f"Here: {needle('teal desk', '77001')}", "The end."]
    document = "".join(part.ljust(400) for part in parts)
    config = CONFIG.model_copy(update={"chunk_overlap": 0})
    (done,) = run(ScanExpert(CHAT, chunk_size=400), [handmade(document)], config)
    assert calls(done) == [
        "analyzeText",
        "buildIndex chunk_size=400",
        "readChunk enable_scan=True",
        "note key=crimson lantern summary=48213",
        "deleteContext last_id=8",
        "readChunk enable_scan=True",
        "deleteContext last_id=12",
        "readChunk enable_scan=True",
        "note key=teal desk summary=77001",
        "deleteContext last_id=18",
        "readChunk enable_scan=True",
        "finish key=crimson lantern answer=48213",
    ]


def test_a_search_reads_the_best_hit_notes_deletes_and_finishes() -> None:
    prose = "Nothing to see in these words. " * 30
    best = needle("crimson lantern", "48213") + "A crimson lantern it is."
    (done,) = run(SearchExpert(CHAT), [handmade(prose + best + prose + "The crimson lantern again." + prose)])
    assert '"chunk_ids":[3,' in done.turns[2].result, "there is another hit, which need not be read"
    assert calls(done) == [
        "analyzeText",
        "buildIndex",
        "searchEngine keyword=crimson lantern",
        "readChunk chunk_id=3",
        "note key=crimson lantern summary=48213",
        "deleteContext last_id=10",
        "finish key=crimson lantern answer=48213",
    ]


def test_a_search_without_a_hit_finishes_at_once() -> None:
    (done,) = run(SearchExpert(CHAT), [handmade("Nothing to see. " * 100)])
    assert calls(done)[2:] == [
        "searchEngine keyword=crimson lantern",
        "finish key=crimson lantern answer=not found",
    ]


def test_a_search_goes_on_to_the_next_hit_until_the_asked_needle_is_noted() -> None:
    prose = "Nothing to see in these words. " * 30
    decoys = "A crimson lantern hung there, crimson lantern, crimson lantern." + needle("teal desk", "77001")
    (done,) = run(SearchExpert(CHAT), [handmade(decoys + prose + needle("crimson lantern", "48213") + prose)])
    assert calls(done)[3:] == [
        "readChunk chunk_id=0",
        "note key=teal desk summary=77001",
        "readChunk chunk_id=3",
        "note key=crimson lantern summary=48213",
        "deleteContext last_id=14",
        "finish key=crimson lantern answer=48213",
    ]


def test_hits_that_hold_no_asked_needle_lead_to_not_found() -> None:
    (done,) = run(SearchExpert(CHAT), [handmade("A crimson lantern hung there. " + "Nothing to see. " * 60)])
    assert calls(done)[3:] == [
        "readChunk chunk_id=0",
        "deleteContext last_id=8",
        "finish key=crimson lantern answer=not found",
    ]


def test_several_needles_of_one_chunk_are_noted_in_order_and_one_seen_twice_only_once() -> None:
    shared = needle("crimson lantern", "11111") + needle("teal desk", "22222")
    prose = "Words and words. " * 30
    document = prose[:282] + shared + prose  # chunks of 400 that overlap by 120: both needles stand in the first two
    (done,) = run(ScanExpert(CHAT), [handmade(document)])
    notes = [call for call in calls(done) if call.startswith("note")]
    seen = [key for turn in done.turns if turn.tool == "readChunk" for key, _ in find_needles(turn.result)]
    assert seen == ["crimson lantern", "teal desk"] * 2
    assert notes == ["note key=crimson lantern summary=11111", "note key=teal desk summary=22222"]


class Watched(NeedleExpert):
    """Hands each request to an expert that was made for it alone, and keeps them."""

    def __init__(self, kind: type[NeedleExpert]) -> None:
        super().__init__(CHAT)
        self.kind = kind
        self.requests: list[Request] = []

    def reply(self, request: Request) -> Action:
        self.requests.append(request)
        return self.kind(CHAT).reply(request)

    def _go_on(self, view: Any, last: str) -> ToolCall:
        raise NotImplementedError


@pytest.mark.parametrize("kind", [ScanExpert, SearchExpert])
def test_an_expert_keeps_nothing_between_requests(kind: type[NeedleExpert]) -> None:
    fresh, kept = (run(expert, tasks(6), max_live=4) for expert in (Watched(kind), kind(CHAT)))
    assert [calls(trajectory) for trajectory in fresh] == [calls(trajectory) for trajectory in kept]


@pytest.mark.parametrize("kind", [ScanExpert, SearchExpert])
def test_whatever_an_expert_writes_is_a_constant_or_stands_in_its_prompt(kind: type[NeedleExpert]) -> None:
    constants = {True, "not found"}
    copied = 0
    for trajectory in run(kind(CHAT), tasks(6), first_ids=varied_first_ids(0)):
        for snapshot in trajectory.snapshots:
            prompt = CHAT.tokenizer.decode(snapshot.prompt)
            (call,) = CHAT.parse(snapshot.action.token_ids, ActionStop.STOP).calls
            for value in set(call.arguments.values()) - constants:
                assert str(value) in prompt
                copied += 1
    assert copied > 30


@pytest.mark.parametrize("kind", [ScanExpert, SearchExpert])
@pytest.mark.parametrize("thoughts", [False, True])
def test_replies_are_canonical_ids_with_the_key_before_the_value(kind: type[NeedleExpert], thoughts: bool) -> None:
    for trajectory in run(kind(CHAT, thoughts=thoughts), tasks(3)):
        for snapshot, turn in zip(trajectory.snapshots, trajectory.turns, strict=True):
            parsed = CHAT.parse(snapshot.action.token_ids, snapshot.action.stop)
            assert parsed.thought == turn.thought == (THOUGHTS[turn.tool or ""] if thoughts else "")
            assert CHAT.encode_reply(parsed.thought, parsed.calls).tolist() == snapshot.action.token_ids.tolist()
            assert snapshot.action.logprobs is None
            assert list(parsed.calls[0].arguments) in (
                [], ["chunk_id"], ["enable_scan"], ["key", "answer"], ["key", "summary"], ["keyword"], ["last_id"],
            )  # fmt: skip


def test_the_context_of_a_scan_does_not_grow_with_the_document() -> None:
    short, long = (run(ScanExpert(CHAT), tasks(2, tokens)) for tokens in (3000, 12_000))
    assert {trajectory.stop for trajectory in short + long} == {StopReason.FINISHED}
    peaks = [max(trajectory.metrics["peak_context_tokens"] for trajectory in done) for done in (short, long)]
    assert peaks[1] < peaks[0] + 100


def test_a_notes_listing_that_stands_in_the_document_is_not_believed() -> None:
    fake = "Notes:\n- crimson lantern: 99999\n"
    header = json.dumps({"msg_id": 2, "call_id": 1, "deleted": "1-2"}) + "\n"
    for document in (fake, header + fake, fake + needle("crimson lantern", "48213")):
        (done,) = run(ScanExpert(CHAT), [handmade(document)])
        assert done.answer == ("48213" if find_needles(document) else "not found")


def test_a_question_without_a_key_ends_the_episode_with_the_reason() -> None:
    task = Task(task_id="t", question="Who rings the bell?", document="The cat does.")
    (done,) = run(ScanExpert(CHAT), [task])
    assert done.stop is StopReason.POLICY_ERROR
    assert "needle questions only" in done.metrics["cause"]


def test_the_key_is_found_in_a_question_with_more_around_it() -> None:
    task = dataclasses.replace(handmade(needle("crimson lantern", "48213")))
    wordy = dataclasses.replace(task, question=f"Read the document.\n{task.question}\nBe exact.")
    assert [run(ScanExpert(CHAT), [item])[0].answer for item in (task, wordy)] == ["48213", "48213"]


@pytest.mark.parametrize(
    ("document", "config", "cause"),
    [
        ("Words. " * 2000, CONFIG.model_copy(update={"chunk_tokens": 4000}), "readChunk failed: not done"),
        ("", CONFIG, "buildIndex failed: the document is empty"),
        ("Words.", CONFIG.model_copy(update={"max_reply_tokens": 50, "min_reply_tokens": 8}), "the reply takes"),
    ],
)
def test_an_expert_that_cannot_go_on_says_why_instead_of_looping(document: str, config: EnvConfig, cause: str) -> None:
    (done,) = run(ScanExpert(CHAT), [handmade(document)], config)
    assert done.stop is StopReason.POLICY_ERROR
    assert cause in done.metrics["cause"]
    assert len(done.turns) <= 3


def test_one_request_per_episode_may_be_open() -> None:
    request = Request(episode=0, turn=1, prompt=np.zeros(1, np.int32), messages=(), max_new_tokens=9)
    expert = ScanExpert(CHAT)
    expert.submit(request)
    with pytest.raises(ValueError, match="episode 0 already has an open request"):
        expert.submit(request)
    expert.release(0)
    assert expert.collect() == []


# --- replay ---


class Clumsy(ScanExpert):
    """An expert that now and then writes nonsense, cut calls, or its call in other bytes: what a model may sample."""

    def reply(self, request: Request) -> Action:
        rng = np.random.default_rng(request.seed)
        kind = rng.integers(4)
        try:
            ids = super().reply(request).token_ids
        except Exception:  # its last call failed: it cannot go on, but a model would
            ids = reply(CHAT, "deleteContext", last_id=int(rng.integers(9))).token_ids
        if kind == 0:
            ids = rng.integers(0, 256, 20).astype(np.int32)
        if kind == 1:
            ids = np.concatenate([CHAT.tokenizer.encode("Ünd so… "), ids, ids])
        logprobs = rng.normal(size=len(ids)).astype(np.float32)
        stop = ActionStop.LENGTH if kind == 2 and rng.random() < 0.2 else ActionStop.STOP
        return Action(token_ids=ids, logprobs=logprobs, stop=stop, cached_tokens=3, prefilled_tokens=4)


def test_a_replay_from_disk_feeds_and_records_the_same_ids_at_every_turn(tmp_path: Path) -> None:
    items = tasks(6, 1500)
    config = CONFIG.model_copy(update={"max_invalid_replies": 9, "max_turns": 40})
    recorded = run(Clumsy(CHAT), items, config, first_ids=varied_first_ids(0))
    write_trajectories(tmp_path / "t.jsonl", recorded)
    read = list(read_trajectories(tmp_path / "t.jsonl"))
    replayed = run(ReplayPolicy(read), items, config, max_live=4, first_ids=recorded_first_ids(read))
    replayed.sort(key=lambda trajectory: trajectory.task_id)  # ids are numbered, so this is the order of the tasks
    assert sum(turn.error for trajectory in recorded for turn in trajectory.turns) > 10
    for old, new in zip(recorded, replayed, strict=True):
        assert (new.task_id, new.stop, new.answer, new.turns) == (old.task_id, old.stop, old.answer, old.turns)
        assert [ids(snapshot) for snapshot in new.snapshots] == [ids(snapshot) for snapshot in old.snapshots]


def ids(snapshot: Any) -> tuple[list[int], list[int], list[float]]:
    return snapshot.prompt.tolist(), snapshot.action.token_ids.tolist(), snapshot.action.logprobs.tolist()


def test_a_replay_in_an_environment_that_renders_otherwise_stops_at_the_first_other_prompt() -> None:
    items = tasks(1)
    recorded = run(ScanExpert(CHAT), items)
    other = CONFIG.model_copy(update={"chunk_tokens": 300})
    (done,) = run(ReplayPolicy(recorded), items, other)
    assert done.stop is StopReason.POLICY_ERROR
    assert f"{items[0].task_id}, turn 3: the prompt" in done.metrics["cause"]


def test_recorded_actions_can_be_played_in_another_environment_on_purpose() -> None:
    items = tasks(1)
    recorded = run(ScanExpert(CHAT), items)
    other = CONFIG.model_copy(update={"system_prompt": "Take your time."})
    (done,) = run(ReplayPolicy(recorded, strict=False), items, other)
    assert (done.stop, done.answer) == (StopReason.FINISHED, recorded[0].answer)
    assert done.snapshots[0].prompt.tolist() != recorded[0].snapshots[0].prompt.tolist()


def test_a_recording_that_is_too_short_ends_its_episode_with_the_reason() -> None:
    items = tasks(2)
    (whole, _) = run(ScanExpert(CHAT), items)
    cut = dataclasses.replace(whole, snapshots=whole.snapshots[:2], turns=whole.turns[:2])
    causes = [trajectory.metrics["cause"] for trajectory in run(ReplayPolicy([cut]), items)]
    assert causes[0].endswith("ends after 2 turns")
    assert causes[1].endswith("no recording for episode 1; there are 1")


def test_the_last_message_an_expert_reads_is_always_a_result_with_its_id() -> None:
    watched = Watched(ScanExpert)
    run(watched, tasks(2))
    for request in watched.requests[1:]:
        if request.turn > 1:
            last = request.messages[-1]
            assert last.role is Role.TOOL
            assert json.loads(last.text.partition("\n")[0])["msg_id"] == last.msg_id
