"""Trajectories survive the disk exactly; damage is named by line; nothing is half-written or lost."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from statelm_jax.env.trajectories import (
    SCHEMA_VERSION,
    TrajectoryWriter,
    decode_trajectory,
    encode_trajectory,
    read_trajectories,
    write_trajectories,
)
from statelm_jax.errors import UserError
from statelm_jax.types import Action, ActionStop, Snapshot, StopReason, Trajectory, TurnRecord

in_a_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20, deadline=None)

# A high and a low surrogate side by side are one character in JSON; alone, each of them is kept.
texts = st.text(st.characters(), max_size=12).map(
    lambda text: text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
)
numbers = st.floats() | st.integers(-(2**70), 2**70)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
json_objects = st.dictionaries(texts, json_values, max_size=3)
counts = st.integers(0, 2**31 - 1)
token_lists = st.lists(st.integers(0, 5) | counts, max_size=9).map(lambda ids: np.asarray(ids, np.int32))


@st.composite
def actions(draw: st.DrawFn) -> Action:
    token_ids = draw(token_lists)
    logprobs = st.lists(st.floats(width=32), min_size=len(token_ids), max_size=len(token_ids))
    return Action(
        token_ids=token_ids,
        logprobs=draw(st.none() | logprobs.map(lambda values: np.asarray(values, np.float32))),
        stop=draw(st.sampled_from(ActionStop)),
        cached_tokens=draw(counts),
        prefilled_tokens=draw(counts),
    )


turns = st.builds(
    TurnRecord,
    turn=counts,
    prompt_tokens=counts,
    tool=st.none() | texts,
    arguments=json_objects,
    thought=texts,
    result=texts,
    error=st.booleans(),
    deleted=st.lists(counts, max_size=3).map(tuple),
    freed_tokens=counts,
    notes=st.lists(st.tuples(texts, texts), max_size=3).map(tuple),
    tokens_left=counts,
    cached_tokens=counts,
    prefilled_tokens=counts,
)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    steps = draw(st.integers(0, 4))
    snapshots = [Snapshot(prompt=draw(token_lists), action=draw(actions())) for _ in range(steps)]
    return Trajectory(
        task_id=draw(texts),
        question=draw(texts),
        answers=tuple(draw(st.lists(texts, max_size=2))),
        snapshots=tuple(snapshots),
        turns=tuple(draw(turns) for _ in range(steps)),
        answer=draw(st.none() | texts),
        reward=draw(st.none() | st.floats()),
        stop=draw(st.sampled_from(StopReason)),
        metrics=draw(json_objects),
    )


def comparable(trajectory: Trajectory) -> Any:
    """Every bit of a trajectory in a form that `==` compares exactly (NaN equals NaN)."""

    def walk(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return type(value).__name__, [(f.name, walk(getattr(value, f.name))) for f in dataclasses.fields(value)]
        if isinstance(value, np.ndarray):
            # A NaN has one meaning but many bit patterns; all other values are compared bit by bit.
            return value.dtype.str, np.where(np.isnan(value), np.nan, value).astype(value.dtype).tobytes()
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value).__name__, [walk(item) for item in value]
        return type(value).__name__, repr(value)

    return walk(trajectory)


def sample(task_id: str = "t", steps: int = 3, **changes: Any) -> Trajectory:
    """A small trajectory that grows, shrinks to a prefix, and grows again."""
    prompts = ([1, 2, 3], [1, 2, 3, 9, 4], [1, 2, 7], [1, 2, 7, 8, 8])[:steps]
    action = Action(token_ids=np.asarray([9, 4], np.int32), logprobs=np.asarray([-0.1, -2.5], np.float32))
    snapshots = tuple(Snapshot(prompt=np.asarray(ids, np.int32), action=action) for ids in prompts)
    record = TurnRecord(
        turn=1,
        prompt_tokens=3,
        tool="readChunk",
        arguments={"enable_scan": True},
        thought="",
        result="{}",
        error=False,
        deleted=(),
        freed_tokens=0,
        notes=(("k", "v"),),
        tokens_left=5,
        cached_tokens=0,
        prefilled_tokens=3,
    )
    fields: dict[str, Any] = {
        "task_id": task_id,
        "question": "?",
        "answers": ("v",),
        "snapshots": snapshots,
        "turns": tuple(dataclasses.replace(record, turn=turn) for turn in range(1, steps + 1)),
        "answer": "v",
        "reward": 1.0,
        "stop": StopReason.FINISHED,
        "metrics": {"turns": steps},
    }
    return Trajectory(**{**fields, **changes})


@settings(max_examples=60, deadline=None)
@given(trajectories())
def test_a_line_gives_back_every_bit_of_any_trajectory(trajectory: Trajectory) -> None:
    line = encode_trajectory(trajectory)
    assert comparable(decode_trajectory(line)) == comparable(trajectory)


@settings(max_examples=40, deadline=None)
@given(trajectories())
def test_a_line_is_strict_json_in_ascii_without_line_breaks(trajectory: Trajectory) -> None:
    line = encode_trajectory(trajectory)

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is no JSON")

    json.loads(line, parse_constant=refuse)
    assert line.isascii()
    assert len(line.splitlines()) == 1


@given(st.floats(width=32, allow_nan=False))
@example(np.float32(0.1).item())
@example(np.finfo(np.float32).max.item())
@example(np.float32(1e-45).item())
def test_a_log_prob_comes_back_as_the_same_float32_from_nine_digits(value: float) -> None:
    action = Action(token_ids=np.asarray([1], np.int32), logprobs=np.asarray([value], np.float32))
    line = encode_trajectory(sample(steps=1, snapshots=(Snapshot(prompt=np.asarray([1], np.int32), action=action),)))
    written = json.loads(line)["snapshots"][0]["logprobs"] if np.isfinite(value) else None
    if written is not None:
        assert len(str(abs(written[0])).split("e")[0].replace(".", "").strip("0")) <= 9
    logprobs = decode_trajectory(line).snapshots[0].action.logprobs
    assert logprobs is not None
    assert logprobs.tobytes() == np.asarray([value], np.float32).tobytes()


def test_prompts_are_stored_as_what_was_added_to_the_one_before() -> None:
    snapshots = json.loads(encode_trajectory(sample(steps=4)))["snapshots"]
    assert [(snapshot["keep"], snapshot["new"]) for snapshot in snapshots] == [
        (0, [1, 2, 3]),
        (3, [9, 4]),
        (2, [7]),
        (3, [8, 8]),
    ]


@pytest.mark.parametrize("text", ["\ud800", "\udc80 a", "\x00\x1b\r\n\x85\u2028", "👩‍🚀", "\\ud800", "<|im_end|>"])
def test_awkward_text_survives_in_every_field(tmp_path: Path, text: str) -> None:
    trajectory = sample(text, question=text, answers=(text,), answer=text, metrics={text: [text]})
    write_trajectories(tmp_path / "t.jsonl", [trajectory])
    assert comparable(next(read_trajectories(tmp_path / "t.jsonl"))) == comparable(trajectory)


@in_a_folder
@given(st.lists(trajectories(), max_size=3), st.integers(0, 3))
def test_writing_at_once_and_appending_in_parts_make_the_same_file(
    tmp_path: Path, items: list[Trajectory], cut: int
) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    parts.unlink(missing_ok=True)
    assert write_trajectories(whole, items) == len(items)
    for part in (items[:cut], items[cut:]):
        with TrajectoryWriter(parts) as writer:
            for item in part:
                writer.write(item)
    assert whole.read_bytes() == parts.read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["parts.jsonl", "whole.jsonl"]
    assert [comparable(item) for item in read_trajectories(parts)] == [comparable(item) for item in items]


def test_each_line_is_in_the_file_before_the_next_is_written(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with TrajectoryWriter(path) as writer:
        for count in (1, 2):
            writer.write(sample(str(count)))
            assert path.read_bytes().count(b"\n") == count


def test_a_failure_while_writing_at_once_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trajectories(path, [sample("old")])

    def stopped():
        yield sample("new")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_trajectories(path, stopped())
    assert [item.task_id for item in read_trajectories(path)] == ["old"]
    assert os.listdir(tmp_path) == ["t.jsonl"]


@pytest.mark.parametrize("cut", [1, 40, -2])
def test_a_torn_last_line_is_named_and_nothing_is_touched(tmp_path: Path, cut: int) -> None:
    path = _torn(tmp_path, cut)
    before = path.read_bytes()
    reader = read_trajectories(path)
    assert next(reader).task_id == "a"
    with pytest.raises(UserError, match=r"t\.jsonl, line 2 is torn"):
        next(reader)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["t.jsonl"]


@pytest.mark.parametrize("cut", [1, 40, -2])
def test_repair_sets_the_torn_bytes_aside_and_keeps_the_whole_lines(tmp_path: Path, cut: int) -> None:
    path = _torn(tmp_path, cut)
    tail = path.read_bytes().split(b"\n")[1]
    assert [item.task_id for item in read_trajectories(path, repair=True)] == ["a"]
    assert (tmp_path / "t.jsonl.torn").read_bytes() == tail + b"\n"
    assert [item.task_id for item in read_trajectories(path)] == ["a"]


def test_appending_after_a_torn_line_sets_it_aside_first(tmp_path: Path) -> None:
    path = _torn(tmp_path, 40)
    with TrajectoryWriter(path) as writer:
        writer.write(sample("c"))
    assert [item.task_id for item in read_trajectories(path)] == ["a", "c"]
    assert (tmp_path / "t.jsonl.torn").exists()


def test_a_whole_last_line_without_its_newline_is_read_and_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(encode_trajectory(sample("a")))
    assert [item.task_id for item in read_trajectories(path, repair=True)] == ["a"]
    with TrajectoryWriter(path) as writer:
        writer.write(sample("b"))
    assert [item.task_id for item in read_trajectories(path)] == ["a", "b"]


def test_a_torn_line_longer_than_a_read_block_is_found_whole(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    long = encode_trajectory(sample("b", question="x" * 200_000))
    path.write_text(encode_trajectory(sample("a")) + "\n" + long[:-1])
    assert [item.task_id for item in read_trajectories(path, repair=True)] == ["a"]
    assert (tmp_path / "t.jsonl.torn").stat().st_size == len(long)


def _torn(folder: Path, cut: int) -> Path:
    path = folder / "t.jsonl"
    path.write_text(encode_trajectory(sample("a")) + "\n" + encode_trajectory(sample("b"))[:cut])
    return path


def _damage(**changes: Any) -> str:
    return json.dumps({**json.loads(encode_trajectory(sample())), **changes})


def _damaged_snapshot(**changes: Any) -> str:
    record = json.loads(encode_trajectory(sample()))
    record["snapshots"][1].update(changes)
    return json.dumps(record)


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[]",
        "{}",
        '{"schema_version":"1"}',
        '{"schema_version":1}',
        "[" * 5000,
        _damage(answers="abc"),
        _damage(stop="tired"),
        _damage(task_id=3),
        _damage(turns=[]),
        _damage(nonfinite=[[["metrics", "no", "such"], "nan"]]),
        _damaged_snapshot(keep=4),
        _damaged_snapshot(keep=-1),
        _damaged_snapshot(new=[1.5]),
        _damaged_snapshot(new=[2**40]),
        _damaged_snapshot(new=[[1], [2]]),
        _damaged_snapshot(logprobs=[0.0]),
        _damaged_snapshot(stop="because"),
    ],
)
def test_a_bad_line_is_named_by_its_number_and_the_good_ones_before_it_load(tmp_path: Path, line: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join([encode_trajectory(sample("a")), "", line, encode_trajectory(sample("b"))]) + "\n")
    reader = read_trajectories(path)
    assert next(reader).task_id == "a"
    with pytest.raises(UserError, match=r"t\.jsonl, line 3 is not a trajectory") as caught:
        next(reader)
    assert len(str(caught.value).splitlines()) == 1


def test_bytes_that_are_no_utf8_are_named_by_line(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(UserError, match="line 1 is not a trajectory"):
        next(read_trajectories(tmp_path / "t.jsonl"))


def test_a_newer_schema_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(_damage(schema_version=SCHEMA_VERSION + 1) + "\n")
    with pytest.raises(UserError, match="line 1: schema version 2 is newer than 1; upgrade"):
        next(read_trajectories(tmp_path / "t.jsonl"))


def test_a_missing_file_is_the_users_to_mend_at_the_call(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*gone\.jsonl: no such file"):
        read_trajectories(tmp_path / "gone.jsonl")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for write in (lambda path: write_trajectories(path, [sample()]), TrajectoryWriter):
        with pytest.raises(UserError, match="cannot write"):
            write(tmp_path / "file" / "t.jsonl")


@pytest.mark.parametrize("value", [{1: "x"}, {"a": {1, 2}}, {"a": b"x"}, {"a": [object()]}])
def test_metrics_that_json_would_change_are_refused_by_place(value: Any) -> None:
    with pytest.raises(TypeError, match="metrics"):
        encode_trajectory(sample(metrics=value))


def test_numpy_scalars_in_metrics_are_written_as_numbers() -> None:
    metrics = {"loss": np.float32(0.5), "count": np.int64(3), "nan": np.float32("nan")}
    read = decode_trajectory(encode_trajectory(sample(metrics=metrics))).metrics
    assert (read["loss"], read["count"]) == (0.5, 3)
    assert np.isnan(read["nan"])
