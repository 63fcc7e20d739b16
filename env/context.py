"""The context: an append-only history plus a set of deleted ids, rendered by a pure function.

Nothing that was said is ever changed. A `History` holds the messages and which ids are deleted, `render_native`
makes of it the messages that the model sees, and `ContextEncoder` turns these into token ids:

1. A turn appends two messages, the assistant's reply and the tool's result, with neighbouring ids.
2. A delete adds ids to the deleted ones, its own turn's ids always among them.
3. Rendering shows live messages as they are and each maximal run of deleted neighbours as one stub. The newest
   delete turn is always the end of the last run (its ids were the newest when it ran, and whatever is deleted
   later comes with a newer delete turn), so the last run shows the result of that turn instead of a bare stub.
4. Each rendered message is encoded when it first appears and its ids are kept for as long as it stays in the
   context, so a step encodes its new text only, however long the context is.

What deletion leaves is O(1): after everything was deleted the context is the head and one stub. (Deviates from the
paper, appendix, where each deleted message keeps a stub of its own.)

A profile decides how history is shown. Another way to show it is another `Profile`; no caller has to change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from statelm_jax.types import Message, Role, TokenIds

Runs = tuple[tuple[int, int], ...]
"""A set of ids as (first, last) pairs, both included: ascending, disjoint, never adjacent."""


def union(runs: Runs, added: Iterable[tuple[int, int]]) -> Runs:
    """The ids in either. `added` may overlap and come in any order."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted([*runs, *added]):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return tuple(merged)


def difference(runs: Runs, removed: Runs) -> Runs:
    """The ids of `runs` that are not in `removed`."""
    rest: list[tuple[int, int]] = []
    for run_first, last in runs:
        first = run_first
        for gone_first, gone_last in removed:
            if gone_last < first or gone_first > last:
                continue
            if first < gone_first:
                rest.append((first, gone_first - 1))
            first = gone_last + 1
        if first <= last:
            rest.append((first, last))
    return tuple(rest)


def format_runs(runs: Iterable[tuple[int, int]]) -> str:
    """Ids as the model reads and writes them: `7`, `7-10`, `3,7-10`."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """All that was said, and which of it is deleted.

    Attributes:
      head: The system and the first user message. They have no ids and cannot be deleted.
      messages: Everything after the head; `messages[i]` has the id `first_id + i`.
      deleted: Ids of deleted messages.
      first_id: The id of the first assistant message. 1, except where training wants to show ids that
        otherwise only long episodes reach.
    """

    head: tuple[Message, ...]
    messages: tuple[Message, ...] = ()
    deleted: Runs = ()
    first_id: int = 1

    @property
    def next_id(self) -> int:
        """The id that the next message gets."""
        return self.first_id + len(self.messages)

    def span(self, first: int, last: int) -> tuple[Message, ...]:
        """Messages with ids from `first` to `last`, both included, deleted or not."""
        return self.messages[first - self.first_id : last - self.first_id + 1]

    def append(self, message: Message) -> History:
        """The history with one more message, which must carry `next_id`."""
        if message.msg_id != self.next_id:
            raise ValueError(f"message {message.msg_id} appended where {self.next_id} is next")
        return History(self.head, (*self.messages, message), self.deleted, self.first_id)

    def delete(self, runs: Runs) -> History:
        """The history with `runs` deleted by the newest message's call.

        The turn that deletes goes with them: its call (the newest message) and the result that follows.
        """
        if not self.messages or self.messages[-1].role is not Role.ASSISTANT:
            raise ValueError("only an assistant message can delete")
        deleted = union(self.deleted, [*runs, (self.next_id - 1, self.next_id)])
        return History(self.head, self.messages, deleted, self.first_id)


def render_native(history: History) -> tuple[Message, ...]:
    """The messages that the model sees: live ones as they are, one stub for each run of deleted ones."""
    shown = list(history.head)
    position = history.first_id
    for first, last in history.deleted:
        shown += history.span(position, first - 1)
        newest_delete = (first, last) == history.deleted[-1]
        shown.append(history.span(last, last)[0] if newest_delete else _stub(first, last))
        position = last + 1
    shown += history.span(position, history.next_id - 1)
    return tuple(shown)


def _stub(first: int, last: int) -> Message:
    return Message(msg_id=None, role=Role.TOOL, text=_compact_json({"deleted": format_runs([(first, last)])}))


def native_result_text(msg_id: int, call_id: int, fields: Mapping[str, Any], body: str | None) -> str:
    """A tool result as shown: one line of JSON that begins with its ids, then the body, raw, from the next line on.

    The first line alone is the header: JSON writes no raw newline, so a body cannot reach into it. A body may hold a
    line that looks like a header; nothing but the model reads it there, and ids are given out by the environment.
    """
    header = _compact_json({"msg_id": msg_id, "call_id": call_id, **fields})
    return header if body is None else f"{header}\n{body}"


def _compact_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How history is shown to the model.

    Attributes:
      render: History -> messages of the context. A pure function.
      result_text: (msg_id, call_id, fields, body) -> text of a tool result.
    """

    render: Callable[[History], tuple[Message, ...]]
    result_text: Callable[[int, int, Mapping[str, Any], str | None], str]


PROFILES: Mapping[str, Profile] = {
    "native": Profile(render=render_native, result_text=native_result_text),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Context:
    """A rendered history and its token ids.

    Attributes:
      messages: As the model sees them.
      blocks: The ids of each message.
      tokens: Their number, the generation header not included.
    """

    messages: tuple[Message, ...]
    blocks: tuple[TokenIds, ...]
    tokens: int


class MessageEncoder(Protocol):
    """The part of `chat.ChatFormat` that is needed here."""

    header_ids: TokenIds

    def message_ids(self, message: Message) -> TokenIds:
        """The ids of the message's whole block."""
        ...


class ContextEncoder:
    """Encodes contexts, each message once for as long as it stays.

    Attributes:
      tokens_encoded: Tokens that were made from text so far (sampled ids are taken over, not encoded).
    """

    def __init__(self, chat: MessageEncoder, profile: Profile) -> None:
        self.tokens_encoded = 0
        self._chat = chat
        self._profile = profile
        self._blocks: dict[object, TokenIds] = {}
        self._last: tuple[History, Context] | None = None

    def encode(self, history: History) -> Context:
        """The context of `history`. Ids of messages that were in a context before come from the cache."""
        if self._last is None or self._last[0] is not history:
            messages = self._profile.render(history)
            blocks = tuple(self._block(message) for message in messages)
            self._last = history, Context(messages=messages, blocks=blocks, tokens=sum(map(len, blocks)))
        return self._last[1]

    def message_tokens(self, message: Message) -> int:
        """How many tokens a message takes in the context."""
        return len(self._block(message))

    def prompt(self, context: Context) -> TokenIds:
        """The ids to continue: the context and the generation header."""
        return np.concatenate([*context.blocks, self._chat.header_ids], dtype=np.int32)

    def keep(self, context: Context) -> None:
        """Forget the ids of all messages that are not in `context`."""
        self._blocks = {_key(message): ids for message, ids in zip(context.messages, context.blocks, strict=True)}

    def _block(self, message: Message) -> TokenIds:
        key = _key(message)
        ids = self._blocks.get(key)
        if ids is None:
            ids = self._blocks[key] = self._chat.message_ids(message)
            if message.token_ids is None:
                self.tokens_encoded += len(ids)
        return ids


def _key(message: Message) -> object:
    """Messages of the history are themselves; those that rendering makes anew are known by their text."""
    return message if message.msg_id is not None else (message.role, message.text)
