"""Trajectories -> what the episode viewer draws: one table of texts, one of message blocks, and turns by reference.

The life of one turn:
  1. its prompt ids are split at `<|im_start|>` into segments, one per message as the model saw it;
  2. a segment is decoded once, control ids kept apart from text (a document may *spell* `<|im_end|>`; only the
     id is the mark), and cut into wrapper, body, wrapper. Joined they are the decoded prompt again, exactly;
  3. the blocks go into the shared table, and the turn keeps how many leading blocks it shares with the turn
     before plus the indices of the rest, so that hundreds of turns cost little more than their new text.

A text is a string, or, when it holds control tokens, a list [plain, control, plain, control, ...].
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np

from statelm_jax.tokenizer import CONTROL_TEXTS, Tokenizer
from statelm_jax.types import ActionStop, TokenIds, Trajectory, TurnRecord

Runs = tuple[str, ...]
"""Plain and control text in turns: even places plain (possibly empty), odd places one control token each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One message of one prompt as the model saw it; `before + body + after` is its whole text.

    Attributes:
      role: `system`, `user`, `assistant`, `tool`, or `text` for ids outside any message.
      kind: `message`; `stub` for what deletion leaves; `error` for an error observation; `header` for the
        open generation header at the end of a prompt.
      label: Its message id, or the ids that a stub stands for ("1-10"); empty when it has none.
      before, body, after: Wrapper, content, wrapper. An assistant's end mark is its own choice, so it is body.
      tokens: Its size.
    """

    role: str
    kind: str
    label: str
    before: Runs
    body: Runs
    after: Runs
    tokens: int


MARK = SimpleNamespace(**CONTROL_TEXTS)
"""The control tokens' texts by name: patterns can only match dotted names by value."""


class PromptSplitter:
    """Cuts prompts into blocks. A segment that was seen before is not decoded again."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._control_ids = np.array(sorted(tokenizer.added_ids), np.int32)
        self._seen: dict[bytes, Block] = {}

    def split(self, prompt: TokenIds) -> tuple[Block, ...]:
        """The messages of a prompt in order, the generation header last."""
        control = self._tokenizer.control
        starts = np.flatnonzero(prompt == control.im_start)
        segments = [segment for segment in np.split(prompt, starts) if len(segment)]
        is_open = bool(segments) and segments[-1][0] == control.im_start and control.im_end not in segments[-1]
        header = segments.pop() if is_open else np.zeros(0, np.int32)
        blocks = _label_assistants([self._block(segment, header) for segment in segments])
        return (*blocks, _header_block(self.runs(header), len(header))) if is_open else tuple(blocks)

    def runs(self, ids: TokenIds) -> Runs:
        """`ids` decoded, the control tokens kept apart from the text around them."""
        runs: list[str] = []
        start = 0
        for position in np.flatnonzero(np.isin(ids, self._control_ids)).tolist():
            runs += [self._tokenizer.decode(ids[start:position]), self._tokenizer.decode(ids[position : position + 1])]
            start = position + 1
        return (*runs, self._tokenizer.decode(ids[start:]))

    def _block(self, segment: TokenIds, header: TokenIds) -> Block:
        key = header.tobytes() + b"|" + segment.tobytes()
        if key not in self._seen:
            opening = header if len(header) and np.array_equal(segment[: len(header)], header) else header[:0]
            self._seen[key] = _decode(self.runs(segment), self.runs(opening), len(segment))
        return self._seen[key]


def _decode(runs: Runs, header: Runs, tokens: int) -> Block:
    """One closed segment. `header` is the generation header that it begins with, `("",)` if it does not."""
    kind, label = "message", ""
    match runs:
        case ("", MARK.im_start, *_, MARK.im_end, tail) if len(header) > 1:
            role, start = "assistant", len(header) - 1
            before, body, after = header, (runs[start][len(header[-1]) :], *runs[start + 1 : -1], ""), (tail,)
        case ("", MARK.im_start, opening, MARK.tool_response, text, MARK.tool_response_end, gap, MARK.im_end, tail):
            lead, text, trail = _strip_newlines(text)
            role, (kind, label) = "tool", _result_facts(text)
            before, body = ("", MARK.im_start, opening, MARK.tool_response, lead), (text,)
            after = (trail, MARK.tool_response_end, gap, MARK.im_end, tail)
        case ("", MARK.im_start, opening, *rest, MARK.im_end, tail):
            role, newline, first = opening.partition("\n")
            before, body, after = ("", MARK.im_start, role + newline), (first, *rest), ("", MARK.im_end, tail)
        case _:
            role, before, body, after = "text", ("",), runs, ("",)
    return Block(role=role, kind=kind, label=label, before=before, body=body, after=after, tokens=tokens)


def _header_block(runs: Runs, tokens: int) -> Block:
    return Block(role="assistant", kind="header", label="", before=runs, body=("",), after=("",), tokens=tokens)


def _strip_newlines(text: str) -> tuple[str, str, str]:
    """(leading newline or "", the rest, trailing newline or "")."""
    lead = "\n" if text.startswith("\n") else ""
    trail = "\n" if text.endswith("\n") and len(text) > len(lead) else ""
    return lead, text[len(lead) : len(text) - len(trail)], trail


def _result_facts(text: str) -> tuple[str, str]:
    """(kind, label) of a tool result, from the JSON header in its first line."""
    try:
        header = json.loads(text.partition("\n")[0])
    except (ValueError, RecursionError):
        return "message", ""
    if not isinstance(header, dict):
        return "message", ""
    if "deleted" in header:
        return "stub", str(header["deleted"])
    return "error" if "error" in header else "message", str(header.get("msg_id", ""))


def _label_assistants(blocks: Sequence[Block]) -> list[Block]:
    """Assistant messages do not show their id; ids are consecutive, so the message after gives it away."""
    labelled = list(blocks)
    for i, (block, following) in enumerate(pairwise(blocks)):
        first = re.match(r"\d{1,9}", following.label.rpartition(",")[2].strip())  # a stub's own run is named last
        if block.role == "assistant" and first:
            labelled[i] = dataclasses.replace(block, label=str(int(first.group()) - 1))
    return labelled


def viewer_data(
    groups: Iterable[tuple[str, Sequence[Trajectory]]], tokenizer: Tokenizer, context_window: int | None = None
) -> dict[str, Any]:
    """All that the viewer's script reads, as JSON values.

    Args:
      tokenizer: The one that the ids come from.
      groups: (name, trajectories) pairs; the name ("scan, 4x") stands with each episode and may be empty.
      context_window: In tokens, for trajectories that do not say it themselves (`metrics["context_window"]`).
    """
    tables = _Tables(PromptSplitter(tokenizer))
    episodes = [
        _episode(trajectory, name, tables, context_window)
        for name, trajectories in groups
        for trajectory in trajectories
    ]
    return {"texts": list(tables.texts), "blocks": list(tables.blocks), "episodes": episodes}


class _Tables:
    """Texts and blocks, each once; dicts keep the order, so a value's place is its number."""

    def __init__(self, splitter: PromptSplitter):
        self.splitter = splitter
        self.texts: dict[str | Runs, int] = {}
        self.blocks: dict[tuple[Any, ...], int] = {}

    def text(self, value: str | Runs) -> int:
        if isinstance(value, tuple) and len(value) == 1:
            value = value[0]
        return self.texts.setdefault(value, len(self.texts))

    def block(self, block: Block) -> int:
        wrapped = tuple(self.text(part) for part in (block.before, block.body, block.after))
        row = (block.role, block.kind, block.label, *wrapped, block.tokens)
        return self.blocks.setdefault(row, len(self.blocks))


def _episode(trajectory: Trajectory, group: str, tables: _Tables, window: int | None) -> dict[str, Any]:
    metrics = trajectory.metrics
    turns: list[dict[str, Any]] = []
    blocks: list[int] = []
    notes: list[list[int]] = []
    for snapshot, record in zip(trajectory.snapshots, trajectory.turns, strict=False):
        new_blocks = [tables.block(block) for block in tables.splitter.split(snapshot.prompt)]
        new_notes = [[tables.text(key), tables.text(summary)] for key, summary in record.notes]
        kept, kept_notes = _common(blocks, new_blocks), _common(notes, new_notes)
        turns.append(
            {
                "keep": kept,
                "new": new_blocks[kept:],
                "notes_keep": kept_notes,
                "notes_new": new_notes[kept_notes:],
                "action": tables.text(tables.splitter.runs(snapshot.action.token_ids)),
                "cut": snapshot.action.stop is ActionStop.LENGTH,
                "reply": len(snapshot.action.token_ids),
                **_turn_facts(record, tables),
            }
        )
        blocks, notes = new_blocks, new_notes
    return {
        "id": trajectory.task_id,
        "group": group,
        "question": trajectory.question,
        "answers": list(trajectory.answers),
        "answer": trajectory.answer,
        "right": is_right(trajectory),
        "stop": str(trajectory.stop),
        "window": metrics.get("context_window", window),
        "document": metrics.get("document_tokens"),
        "peak": peak_context(trajectory),
        "turns": turns,
    }


def _turn_facts(record: TurnRecord, tables: _Tables) -> dict[str, Any]:
    return {
        "prompt": record.prompt_tokens,
        "cached": record.cached_tokens,
        "prefilled": record.prefilled_tokens,
        "left": record.tokens_left,
        "tool": record.tool,
        "arguments": tables.text(json.dumps(dict(record.arguments), ensure_ascii=False, default=str)),
        "result": tables.text(record.result),
        "error": record.error,
        "deleted": ranges(record.deleted),
        "freed": record.freed_tokens,
    }


def is_right(trajectory: Trajectory) -> bool | None:
    """Whether the episode earned its reward; None when nobody scored it."""
    if trajectory.reward is None or math.isnan(trajectory.reward):
        return None
    return trajectory.reward > 0


def peak_context(trajectory: Trajectory) -> int:
    """The most tokens that prompt and reply together took in any turn."""
    sizes = (len(snapshot.prompt) + len(snapshot.action.token_ids) for snapshot in trajectory.snapshots)
    return max(sizes, default=0)


def ranges(ids: Sequence[int]) -> str:
    """Ids as short text: (1, 2, 3, 7) -> "1-3, 7"."""
    spans: list[list[int]] = []
    for id_ in sorted(set(ids)):
        if spans and id_ == spans[-1][1] + 1:
            spans[-1][1] = id_
        else:
            spans.append([id_, id_])
    return ", ".join(f"{first}-{last}" if first != last else str(first) for first, last in spans)


def _common(old: Sequence[Any], new: Sequence[Any]) -> int:
    """Length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))


class Choice:
    """Picks at most `limit` of a stream of trajectories, right and others in equal parts as far as there are.

    Holds at most twice `limit` of them at a time. `seen` counts all.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._right: list[tuple[int, Trajectory]] = []
        self._other: list[tuple[int, Trajectory]] = []
        self.seen = 0

    def add(self, trajectory: Trajectory) -> None:
        """Offer the next trajectory."""
        pile = self._right if is_right(trajectory) else self._other
        if len(pile) < self._limit:
            pile.append((self.seen, trajectory))
        self.seen += 1

    def chosen(self) -> list[Trajectory]:
        """What was picked, in the order of the stream."""
        half = self._limit // 2
        others = min(len(self._other), max(half, self._limit - len(self._right)))
        picked = self._other[:others] + self._right[: self._limit - others]
        return [trajectory for _, trajectory in sorted(picked, key=lambda pair: pair[0])]
