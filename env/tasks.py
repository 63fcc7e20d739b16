"""Task sources: needle tasks made from any text, and tasks kept as JSON lines.

The life of one needle task:

1. A random generator of its own is seeded from the configuration, the seed and the task's number, so a task
   depends neither on how many are made nor on Python's hash randomisation.
2. Keys and values are drawn: one asked needle and `distractors` others of the same form.
3. Sentences of the source region are taken from a random one on (round and round when the text is short) until
   they and the needles fill the document; the last sentence is cut to what is left, so the length in tokens is exact.
4. The distractors go to random sentence borders, the asked needle to the border nearest to its depth.
5. The whole text is encoded once and counted. Token counts of pieces add up for the usual pre-tokenizers, so this
   is nearly always a check; where they do not, the difference goes back into step 3.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from statelm_jax.config import Config
from statelm_jax.env.haystack import Haystack, Piece, TextEncoder, default_source_text, haystack_of, load_source_text
from statelm_jax.env.needles import Needle, Split, ValueKind, draw_keys, draw_value, find_needles, question_key
from statelm_jax.errors import UserError
from statelm_jax.types import Task

__all__ = [
    "NeedleConfig",
    "TextEncoder",
    "default_source_text",
    "find_needles",
    "load_source_text",
    "needle_tasks",
    "question_key",
    "read_tasks",
    "write_tasks",
]

MAX_DISTRACTORS = 500
_STARTS = 32
"""Places of the source text that are tried before a document is given up."""
_ROUNDS = 8
"""Corrections of one document's length before another place is tried."""


class NeedleConfig(Config):
    """One family of needle tasks: all its tasks have documents of the same length."""

    document_tokens: int = Field(ge=16)
    """Exact length of every document in tokens of the tokenizer given to `needle_tasks`."""
    distractors: int = Field(default=3, ge=0, le=MAX_DISTRACTORS)
    """Needles with other keys beside the asked one, whatever the length."""
    value_kinds: tuple[ValueKind, ...] = Field(default=("number",), min_length=1)
    """Kinds to draw from, one per task; all needles of a document are of one kind."""
    number_digits: int = Field(default=5, ge=2, le=18)
    depth: float | None = Field(default=None, ge=0.0, le=1.0)
    """Where the asked needle goes, as a share of the other tokens; None draws it uniformly."""
    region: tuple[float, float] = (0.0, 1.0)
    """The part of the source text that haystacks are made of, as shares of its length."""
    split: Split = "train"
    """Which side of the key words and values to use; the two sides share none."""
    made_up: float = Field(default=0.0, ge=0.0, le=1.0)
    """Probability that a word of a key, or a value that is a word, is made up (see `needles.draw_word`)."""
    absent: float = Field(default=0.0, ge=0.0, le=1.0)
    """Probability that the asked key is not in the document; a needle with another key takes its place, so that
    the number of needles does not tell."""

    @model_validator(mode="after")
    def _check(self) -> NeedleConfig:
        start, stop = self.region
        if not 0.0 <= start < stop <= 1.0:
            raise ValueError("region must be two shares, 0 <= start < stop <= 1")
        return self


def needle_tasks(config: NeedleConfig, source_text: str, tokenizer: TextEncoder, n: int, seed: int) -> Iterator[Task]:
    """`n` needle tasks; the same arguments give the same bytes, and a larger `n` only adds tasks at the end.

    `Task.facts` holds `kind`, `key`, `value` (None when absent), `depth` (the one reached: tokens before the needle
    as a share of all other tokens; None when absent), `document_tokens`, `distractors` (needles that were not asked
    for) and `split`.

    Raises:
      UserError: The source region holds no text, or the needles do not fit into `document_tokens`.
    """
    haystack = haystack_of(source_text, config.region, tokenizer)
    source = hashlib.sha256(source_text.encode("utf-8", "surrogatepass")).hexdigest()
    identity = hashlib.sha256(f"{config.model_dump_json()}|{source}|{seed}".encode()).hexdigest()
    return (_needle_task(config, haystack, identity, index) for index in range(n))


def _needle_task(config: NeedleConfig, haystack: Haystack, identity: str, index: int) -> Task:
    rng = random.Random(int(hashlib.sha256(f"{identity}|{index}".encode()).hexdigest(), 16))
    asked, spare, *others = _draw_needles(rng, config)
    depth = rng.random() if config.depth is None else config.depth
    absent = rng.random() < config.absent
    document, reached = _document(rng, config.document_tokens, haystack, spare if absent else asked, others, depth)
    return Task(
        task_id=f"needle-{config.document_tokens}-{identity[:8]}-{index:04d}",
        question=asked.question,
        document=document,
        answers=() if absent else (asked.value,),
        facts={
            "kind": asked.kind,
            "key": asked.key,
            "value": None if absent else asked.value,
            "depth": None if absent else reached,
            "document_tokens": config.document_tokens,
            "distractors": len(others) + int(absent),
            "split": config.split,
        },
    )


def _draw_needles(rng: random.Random, config: NeedleConfig) -> list[Needle]:
    """The asked needle, a spare one that takes its place when it is to be absent, and the distractors."""
    kind = rng.choice(config.value_kinds)
    needles: list[Needle] = []
    for key in draw_keys(rng, config.distractors + 2, config.split, config.made_up):
        value = draw_value(rng, kind, config.number_digits, config.split, config.made_up)
        while needles and value == needles[0].value:  # a wrong key must not lead to the right answer
            value = draw_value(rng, kind, config.number_digits, config.split, config.made_up)
        needles.append(Needle(kind=kind, key=key, value=value))
    return needles


def _document(
    rng: random.Random, tokens: int, haystack: Haystack, needle: Needle, others: Sequence[Needle], depth: float
) -> tuple[str, float]:
    """A document of exactly `tokens` tokens with every needle in it, and the depth that `needle` got."""
    placed = [(haystack.piece(other.sentence), rng.random()) for other in others]
    placed.append((haystack.piece(needle.sentence), depth))  # last, so that nothing shifts it any more
    room = tokens - sum(piece.tokens for piece, _ in placed)
    if room < 1:
        raise UserError(
            f"{len(placed)} needles of {tokens - room} tokens do not fit into a document of {tokens}; "
            "use fewer distractors or a longer document"
        )
    for _ in range(_STARTS):
        start = rng.randrange(len(haystack.pieces))
        found = _fill(haystack, start, tokens, room, placed)
        if found is not None:
            return found
    raise UserError(f"no document of exactly {tokens} tokens can be made from this source text; try another length")


def _fill(
    haystack: Haystack, start: int, tokens: int, room: int, placed: Sequence[tuple[Piece, float]]
) -> tuple[str, float] | None:
    """The document whose haystack begins at piece `start`; None when its end cannot be cut to fit."""
    surplus: int | None = None  # by how much the pieces' counts, added up, exceed the count of the whole
    for _ in range(_ROUNDS):
        pieces = haystack.take(start, room + (surplus or 0))
        if not pieces:
            return None
        border = [_insert(pieces, piece, depth) for piece, depth in placed][-1]
        if surplus is None:
            surplus = haystack.blank_tokens(pieces[0])
            if surplus:
                continue
        document = " ".join(piece.text for piece in pieces)
        missing = tokens - len(haystack.encoder.encode(document))
        if missing == 0:
            before = sum(piece.tokens for piece in pieces[:border]) - (surplus if border else 0)
            return document, round(before / (tokens - placed[-1][0].tokens), 4)
        surplus += missing
    return None


def _insert(pieces: list[Piece], piece: Piece, depth: float) -> int:
    """Insert at the border nearest to `depth` (a share of the tokens that are there); returns the index."""
    borders = np.cumsum([0, *(other.tokens for other in pieces)])
    index = int(np.abs(borders - depth * borders[-1]).argmin())
    pieces.insert(index, piece)
    return index


class TaskLine(BaseModel):
    """One line of a task file."""

    model_config = ConfigDict(strict=True, extra="forbid")

    schema_version: Literal[1]
    task_id: str = Field(min_length=1)
    question: str
    document: str
    answers: tuple[str, ...]
    options: tuple[str, ...]
    facts: dict[str, Any]

    def task(self) -> Task:
        """The line as a task."""
        return Task(**self.model_dump(exclude={"schema_version"}))


def write_tasks(path: Path | str, tasks: Iterable[Task]) -> int:
    """Write tasks as JSON lines, whole or not at all: `path` never names a half-written file. Returns how many."""
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    count = 0
    try:
        with partial.open("w", encoding="utf-8", newline="\n") as stream:
            for task in tasks:
                stream.write(_line(task).model_dump_json() + "\n")
                count += 1
        os.replace(partial, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)
    return count


def _line(task: Task) -> TaskLine:
    return TaskLine(
        schema_version=1,
        task_id=task.task_id,
        question=task.question,
        document=task.document,
        answers=task.answers,
        options=task.options,
        facts=dict(task.facts),
    )


def read_tasks(path: Path | str) -> tuple[Task, ...]:
    """The tasks of a file that `write_tasks` wrote.

    Raises:
      UserError: The file is missing, or a line (named by number) is malformed or repeats a task_id.
    """
    tasks: dict[str, Task] = {}
    lines = load_source_text(path).split("\n")  # not splitlines(): a document may hold other line ends
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, start=1):
        try:
            task = TaskLine.model_validate_json(line).task()
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            problem = f"{where}: {first['msg']}" if where else first["msg"]
            raise UserError(f"{path}, line {number}: {problem}; repair or remove the line") from None
        if task.task_id in tasks:
            raise UserError(f"{path}, line {number}: task_id {task.task_id!r} was used before; make it unique")
        tasks[task.task_id] = task
    return tuple(tasks.values())
