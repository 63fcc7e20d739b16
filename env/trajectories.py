"""Trajectories on disk: JSON Lines, one whole trajectory per line, every line valid JSON in plain ASCII.

Life of a line:

1. Prompts are delta-coded against the prompt before: `keep` ids of it stay, `new` ids follow. Contexts
   grow by appending and shrink to a prefix plus a stub, so a line is about as long as what was added.
2. Actions keep their ids as sampled and their log-probs with nine significant digits, which give back
   the same float32 bit for bit.
3. JSON has no NaN and no infinity: such a number is written as null, and `nonfinite` lists where it was.
4. A line is written in one piece and flushed. A process that dies leaves at most one torn last line; the
   reader detects it, and on request (or when a writer appends) it is moved to `<file>.torn`.

Every line has its `schema_version`. A change that old readers would misread raises it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import NoneType, TracebackType
from typing import IO, Any

import numpy as np

from statelm_jax.errors import UserError
from statelm_jax.types import Action, ActionStop, Snapshot, StopReason, TokenIds, Trajectory, TurnRecord

SCHEMA_VERSION = 1
"""Newest version of the line format; lines up to it are read, all lines are written in it."""

_TURN_FIELDS = tuple(field.name for field in dataclasses.fields(TurnRecord))


# --- one trajectory <-> one line ----------------------------------------------------------------------


def encode_trajectory(trajectory: Trajectory) -> str:
    """The trajectory as one line of strict JSON, without its newline.

    Metrics and arguments must be made of JSON values (tuples become lists, numpy scalars numbers);
    anything else is a `TypeError` that names the place. Strings survive with control characters and
    lone surrogates; a high and a low surrogate side by side come back as the character they stand for.
    """
    if len(trajectory.snapshots) != len(trajectory.turns):
        raise ValueError(f"{len(trajectory.snapshots)} snapshots but {len(trajectory.turns)} turns")
    record = {
        "schema_version": SCHEMA_VERSION,
        "task_id": trajectory.task_id,
        "question": trajectory.question,
        "answers": list(trajectory.answers),
        "answer": trajectory.answer,
        "reward": _plain(trajectory.reward, "reward"),
        "stop": trajectory.stop.value,
        "metrics": _plain(trajectory.metrics, "metrics"),
        "snapshots": _encode_snapshots(trajectory.snapshots),
        "turns": [_encode_turn(turn) for turn in trajectory.turns],
    }
    try:
        return json.dumps(record, allow_nan=False, separators=(",", ":"))
    except ValueError:  # a number that JSON does not have: rare, so the walk is only done now
        nonfinite: list[list[Any]] = []
        record = _without_nonfinite(record, (), nonfinite)
        record["nonfinite"] = nonfinite
        return json.dumps(record, allow_nan=False, separators=(",", ":"))


def decode_trajectory(line: str) -> Trajectory:
    """The trajectory of one line. `ValueError` says what is wrong with it; a newer schema is a `UserError`."""
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    version = record.get("schema_version")
    if not isinstance(version, int) or version < 1:
        raise ValueError("no schema_version")
    if version > SCHEMA_VERSION:
        raise UserError(f"schema version {version} is newer than {SCHEMA_VERSION}; upgrade statelm-jax to read it")
    try:
        return _decode(record)
    except KeyError as error:
        raise ValueError(f"no field {error}") from None
    except (AttributeError, IndexError, TypeError, OverflowError) as error:
        raise ValueError(str(error)) from None


def _decode(record: dict[str, Any]) -> Trajectory:
    for path, number in record.get("nonfinite", ()):
        holder = record
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = float(number)
    trajectory = Trajectory(
        task_id=_field(record, "task_id", str),
        question=_field(record, "question", str),
        answers=tuple(_field(record, "answers", list)),
        snapshots=tuple(_decode_snapshots(_field(record, "snapshots", list))),
        turns=tuple(_decode_turn(turn) for turn in _field(record, "turns", list)),
        answer=_field(record, "answer", str, NoneType),
        reward=_field(record, "reward", float, int, NoneType),
        stop=StopReason(_field(record, "stop", str)),
        metrics=_field(record, "metrics", dict),
    )
    if len(trajectory.snapshots) != len(trajectory.turns):
        raise ValueError(f"{len(trajectory.snapshots)} snapshots but {len(trajectory.turns)} turns")
    return trajectory


def _field(record: Mapping[str, Any], name: str, *kinds: type) -> Any:
    value = record[name]
    if not isinstance(value, kinds):
        raise ValueError(f"{name} is a {type(value).__name__}")
    return value


def _encode_snapshots(snapshots: Iterable[Snapshot]) -> list[dict[str, Any]]:
    records, before = [], np.empty(0, np.int32)
    for snapshot in snapshots:
        action = snapshot.action
        keep = _common_prefix(before, snapshot.prompt)
        records.append(
            {
                "keep": keep,
                "new": snapshot.prompt[keep:].tolist(),
                "action": action.token_ids.tolist(),
                "logprobs": _encode_logprobs(action),
                "stop": action.stop.value,
                "cached_tokens": int(action.cached_tokens),
                "prefilled_tokens": int(action.prefilled_tokens),
            }
        )
        before = snapshot.prompt
    return records


def _decode_snapshots(records: Iterable[Mapping[str, Any]]) -> Iterator[Snapshot]:
    prompt = np.empty(0, np.int32)
    for record in records:
        keep = _field(record, "keep", int)
        if not 0 <= keep <= len(prompt):
            raise ValueError(f"a prompt keeps {keep} ids of the {len(prompt)} before it")
        prompt = np.concatenate([prompt[:keep], _token_ids(record["new"])])
        action = Action(
            token_ids=_token_ids(record["action"]),
            logprobs=_decode_logprobs(record["logprobs"], len(record["action"])),
            stop=ActionStop(record["stop"]),
            cached_tokens=record["cached_tokens"],
            prefilled_tokens=record["prefilled_tokens"],
        )
        yield Snapshot(prompt=prompt, action=action)


def _common_prefix(a_T: TokenIds, b_T: TokenIds) -> int:
    shorter = min(len(a_T), len(b_T))
    differs_T = a_T[:shorter] != b_T[:shorter]
    return int(differs_T.argmax()) if differs_T.any() else shorter


def _token_ids(values: list[int]) -> TokenIds:
    ids_T = np.asarray(values)
    if ids_T.ndim != 1 or (len(ids_T) and ids_T.dtype.kind != "i"):
        raise ValueError("token ids are not a list of integers")
    return np.asarray(values, np.int32)  # raises OverflowError where an id is too large


def _encode_logprobs(action: Action) -> list[float] | None:
    if action.logprobs is None:
        return None
    if len(action.logprobs) != len(action.token_ids):
        raise ValueError(f"{len(action.logprobs)} log-probs for {len(action.token_ids)} ids")
    return [float(f"{logprob:.9g}") for logprob in action.logprobs.astype(np.float32, copy=False).tolist()]


def _decode_logprobs(values: list[float] | None, count: int) -> np.ndarray | None:
    if values is None:
        return None
    if len(values) != count:
        raise ValueError(f"{len(values)} log-probs for {count} ids")
    return np.asarray(values, np.float32)


def _encode_turn(turn: TurnRecord) -> dict[str, Any]:
    record = {name: getattr(turn, name) for name in _TURN_FIELDS}
    record["arguments"] = _plain(turn.arguments, "arguments")
    return record


def _decode_turn(record: Mapping[str, Any]) -> TurnRecord:
    notes = tuple((key, summary) for key, summary in record["notes"])
    return TurnRecord(**{**record, "deleted": tuple(record["deleted"]), "notes": notes})


def _plain(value: Any, place: str) -> Any:
    """The value made of JSON's own types; `TypeError` where that would lose something without a word."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{place} has the key {key!r}; keys must be strings")
        return {key: _plain(item, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{place}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, np.generic):
        return _plain(value.item(), place)
    raise TypeError(f"{place} holds a {type(value).__name__}, which JSON cannot hold")


def _without_nonfinite(value: Any, path: tuple[str | int, ...], found: list[list[Any]]) -> Any:
    """A copy with null for each NaN or infinity; `found` gets `[path, text]` for each."""
    if isinstance(value, float) and not math.isfinite(value):
        found.append([list(path), repr(value)])
        return None
    if isinstance(value, dict):
        return {key: _without_nonfinite(item, (*path, key), found) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nonfinite(item, (*path, index), found) for index, item in enumerate(value)]
    return value


# --- files --------------------------------------------------------------------------------------------


class TrajectoryWriter:
    """Appends trajectories to a file, one flushed line each; syncs to the disk at close.

    A torn last line that an earlier run left is set aside first. Use it as a context manager.
    `UserError` when the file cannot be opened or written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: IO[bytes] | None = None
        with _file_errors("write", self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                set_aside_torn_line(self.path)
            self._file = self.path.open("ab")
            if self._file.tell() and not _ends_with_newline(self.path):
                self._file.write(b"\n")  # a whole last line that only lacks its end

    def write(self, trajectory: Trajectory) -> None:
        """Append one trajectory; it is with the operating system when this returns."""
        if self._file is None:
            raise ValueError(f"write to a closed TrajectoryWriter ({self.path})")
        line = encode_trajectory(trajectory)  # outside the guard: a record that cannot be encoded is a bug
        with _file_errors("write", self.path):
            self._file.write(line.encode("ascii") + b"\n")
            self._file.flush()

    def close(self) -> None:
        """Sync and close. A second call does nothing."""
        file, self._file = self._file, None
        if file is not None:
            with _file_errors("write", self.path), file:
                file.flush()
                os.fsync(file.fileno())

    def __enter__(self) -> TrajectoryWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_trajectories(path: str | os.PathLike[str], trajectories: Iterable[Trajectory]) -> int:
    """Write a whole file at once: it appears complete under its name, or not at all.

    An existing file is replaced only when all lines are on the disk. Returns the number of lines.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    count = 0
    with _file_errors("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)  # a leftover of a killed process with our id must not be appended to
    try:
        with TrajectoryWriter(temporary) as writer:
            for trajectory in trajectories:
                writer.write(trajectory)
                count += 1
        with _file_errors("write", path):
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return count


def read_trajectories(path: str | os.PathLike[str], *, repair: bool = False) -> Iterator[Trajectory]:
    """Read a file line by line, in order; blank lines are skipped. The file is opened at the call.

    Args:
      path: The file.
      repair: Set a torn last line aside (see `set_aside_torn_line`) before reading, instead of refusing it.

    Raises:
      UserError: The file cannot be read, or a line is bad; it is named by its 1-based number. The lines
        before it have been yielded. Nothing in the file is changed.
    """
    path = Path(path)
    with _file_errors("read", path):
        if repair:
            set_aside_torn_line(path)
        return _read_lines(path.open("rb"), path)


def _read_lines(file: IO[bytes], path: Path) -> Iterator[Trajectory]:
    with file, _file_errors("read", path):
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                yield _read_line(raw, f"{path}, line {number}")


def _read_line(raw: bytes, place: str) -> Trajectory:
    try:
        return decode_trajectory(raw.decode("utf-8"))
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    except (ValueError, RecursionError) as error:  # includes UnicodeDecodeError and JSONDecodeError
        if not raw.endswith(b"\n") and _is_torn(raw):
            raise UserError(
                f"{place} is torn (a run stopped while writing it); the lines before it are whole: remove it, or read"
                " with repair to set it aside"
            ) from None
        raise UserError(f"{place} is not a trajectory ({_one_line(error)}); remove or mend that line") from None


def set_aside_torn_line(path: str | os.PathLike[str]) -> Path | None:
    """Move a torn last line to `<file>.torn`, so that the file holds whole lines only.

    A last line is torn when it has no newline and cannot be read. Returns where it went, or None when
    there was none. The torn bytes are on the disk before the file is cut: nothing is lost.
    """
    path = Path(path)
    start = _last_line_start(path)
    with path.open("rb") as file:
        file.seek(start)
        tail = file.read()
    if not tail or not _is_torn(tail):
        return None
    aside = path.with_name(path.name + ".torn")
    with aside.open("ab") as file:
        file.write(tail + b"\n")
        file.flush()
        os.fsync(file.fileno())
    os.truncate(path, start)
    return aside


def _is_torn(tail: bytes) -> bool:
    try:
        json.loads(tail)
    except (ValueError, RecursionError):
        return True
    return False


def _last_line_start(path: Path, block: int = 1 << 16) -> int:
    """Where the bytes after the last newline begin; read from the end, as lines can be many and long."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            begin = max(0, end - block)
            file.seek(begin)
            newline = file.read(end - begin).rfind(b"\n")
            if newline >= 0:
                return begin + newline + 1
            end = begin
    return 0


def _ends_with_newline(path: Path) -> bool:
    return _last_line_start(path) == path.stat().st_size


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


@contextmanager
def _file_errors(verb: str, path: Path) -> Iterator[None]:
    """Trouble with the file itself is the user's to mend: one line, naming the file."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"cannot {verb} {path}: no such file or folder") from None
    except OSError as error:
        raise UserError(f"cannot {verb} {path}: {error.strerror or error}; check the path and the free space") from None
