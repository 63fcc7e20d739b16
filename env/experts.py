"""Scripted policies: experts that solve needle tasks, and the replay of a recording.

An expert sees what a model sees, the rendered context of the request, and nothing else. It keeps no state
between requests: the same context always gives the same reply, so a model can learn the behaviour from
snapshots alone. The actions are chosen so that a very small model can imitate them: every argument is a
constant or a copy of something that stands in the context; nothing is computed, and whether a needle is worth
noting is never asked (all are noted, the asked key is looked up at the end).

One episode of `ScanExpert`:

1. `analyzeText`, then `buildIndex`.
2. `readChunk` in scan mode shows the next chunk and whether `more` remain.
3. `note` for each needle sentence of that chunk, key before value. (Where chunks overlap, a sentence can be shown
   twice; the second time its key is in the notes already, and it is passed over.)
4. While more chunks remain: `deleteContext` up to the newest id shown, then step 2 again. What remains in the
   context is the question and one stub, which carries the notes listing.
5. On the last chunk nothing is deleted, as the `more` flag would go with it: `finish` looks the asked key up
   in the newest notes listing.

`SearchExpert` finds its chunk with `searchEngine` and deletes before it finishes; its steps are in its docstring.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from statelm_jax.chat import ChatFormat
from statelm_jax.env.needles import find_needles, question_key
from statelm_jax.env.rewards import NOT_FOUND
from statelm_jax.types import Action, Message, Request, Role, ToolCall, Trajectory

THOUGHTS = {
    "analyzeText": "First, the size of the text.",
    "buildIndex": "It must be read in chunks.",
    "readChunk": "Read on.",
    "searchEngine": "Search for the key.",
    "note": "This must be kept.",
    "deleteContext": "These messages are used up.",
    "finish": "The notes decide the answer.",
}
"""One short thought per tool, for experts that are asked to think aloud."""


class ExpertError(Exception):
    """A script cannot go on from the context it was shown. It ends the one episode, with this as the cause."""


class InstantPolicy(ABC):
    """A policy that answers every open request at once. Subclasses say what they `reply`."""

    def __init__(self) -> None:
        self._open: dict[int, Request] = {}

    def submit(self, request: Request) -> None:
        """Queue a request; one per episode may be open."""
        if request.episode in self._open:
            raise ValueError(f"episode {request.episode} already has an open request")
        self._open[request.episode] = request

    def collect(self) -> Sequence[tuple[int, Action | Exception]]:
        """Answer all open requests, in the order in which they came."""
        requests, self._open = self._open, {}
        return [(episode, self._answer(request)) for episode, request in requests.items()]

    def release(self, episode: int) -> None:
        """Forget the episode's open request, if it has one."""
        self._open.pop(episode, None)

    def _answer(self, request: Request) -> Action | Exception:
        try:
            action = self.reply(request)
            if len(action.token_ids) > request.max_new_tokens:
                raise ExpertError(f"the reply takes {len(action.token_ids)} tokens of {request.max_new_tokens}")
        except ExpertError as error:
            return error
        return action

    @abstractmethod
    def reply(self, request: Request) -> Action:
        """The answer to one request. `ExpertError` ends its episode."""


# --- experts ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One tool result as it stands in the context.

    Attributes:
      tool: The tool that gave it, on its wire name.
      header: The JSON object of the first line.
      body: The lines below it.
    """

    tool: str
    header: Mapping[str, Any]
    body: str


@dataclass(frozen=True, slots=True)
class View:
    """What an expert reads out of a rendered context: the asked key and the results shown, oldest first."""

    key: str
    shown: tuple[Shown, ...]

    @classmethod
    def of(cls, messages: Sequence[Message]) -> View:
        """Read a context. `ExpertError` when it asks no needle question or its last result is an error."""
        tools = {message.msg_id: message.tool_calls[0].name for message in messages if message.tool_calls}
        shown = tuple(_read_result(message.text, tools) for message in messages if message.role is Role.TOOL)
        if shown and "error" in shown[-1].header:
            raise ExpertError(f"{shown[-1].tool} failed: {shown[-1].header['error']}")
        return cls(_asked_key(messages), shown)

    @property
    def newest_id(self) -> int:
        """The largest message id shown."""
        return self.shown[-1].header["msg_id"]

    @property
    def notes(self) -> dict[str, str]:
        """The newest notes listing; empty when none is shown."""
        for result in reversed(self.shown):
            if result.tool in ("note", "deleteContext"):
                return _read_listing(result.body)
        return {}

    def newest(self, tool: str) -> Shown:
        """The newest result of a tool."""
        return next(result for result in reversed(self.shown) if result.tool == tool)


class NeedleExpert(InstantPolicy):
    """What the needle experts share: opening, noting and the look-up at the end.

    Args:
      chat: Writes the replies (canonical ids, end-of-turn token included; no log-probs).
      chunk_size: Passed to `buildIndex`; None leaves it out (the environment's default holds).
      thoughts: Put a short thought (`THOUGHTS`) before each call.
    """

    def __init__(self, chat: ChatFormat, *, chunk_size: int | None = None, thoughts: bool = False) -> None:
        super().__init__()
        self._chat = chat
        self._chunk_size = chunk_size
        self._thoughts = thoughts

    def reply(self, request: Request) -> Action:
        """The next call, from the rendered context alone."""
        call = self.decide(request.messages)
        thought = THOUGHTS[call.name] if self._thoughts else ""
        return Action(token_ids=self._chat.encode_reply(thought, (call,)))

    def decide(self, messages: Sequence[Message]) -> ToolCall:
        """The next call for a context: a pure function of it."""
        view = View.of(messages)
        if not view.shown:
            return _call("analyzeText")
        if view.shown[-1].tool == "analyzeText":
            return _call("buildIndex", **({} if self._chunk_size is None else {"chunk_size": self._chunk_size}))
        return self._go_on(view, view.shown[-1].tool)

    @abstractmethod
    def _go_on(self, view: View, last: str) -> ToolCall:
        """The next call, once the index is built; `last` is the tool whose result came last."""


class ScanExpert(NeedleExpert):
    """Reads chunk after chunk, notes every needle, deletes what it has read (module docstring)."""

    def _go_on(self, view: View, last: str) -> ToolCall:
        if last in ("buildIndex", "deleteContext"):
            return _call("readChunk", enable_scan=True)
        more = view.newest("readChunk").header["more"]
        return _next_note(view) or (_delete(view) if more else _finish(view))


class SearchExpert(NeedleExpert):
    """Searches for the asked key, reads the best hit, notes its needles, deletes, and finishes.

    A hit without the asked needle (the words stand there in another sentence, or the needle is cut by the
    chunk's end) is followed by the next hit. No hit at all is answered "not found" at once.
    """

    def _go_on(self, view: View, last: str) -> ToolCall:
        if last == "buildIndex":
            return _call("searchEngine", keyword=view.key)
        if last == "deleteContext":
            return _finish(view)
        hits = view.newest("searchEngine").header["chunk_ids"]
        if last == "searchEngine":
            return _call("readChunk", chunk_id=hits[0]) if hits else _finish(view)
        note = _next_note(view)
        unread = hits[hits.index(view.newest("readChunk").header["chunk_id"]) + 1 :]
        if note is None and view.key not in view.notes and unread:
            return _call("readChunk", chunk_id=unread[0])
        return note or _delete(view)


def _next_note(view: View) -> ToolCall | None:
    """A note of the first needle of the newest chunk that is not in the notes; None when all of them are."""
    notes = view.notes
    for key, value in find_needles(view.newest("readChunk").body):
        if key not in notes:
            return _call("note", key=key, summary=value)
    return None


def _delete(view: View) -> ToolCall:
    return _call("deleteContext", last_id=view.newest_id)


def _finish(view: View) -> ToolCall:
    return _call("finish", key=view.key, answer=view.notes.get(view.key, NOT_FOUND))


def _call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def _asked_key(messages: Sequence[Message]) -> str:
    asked = next((message.text for message in messages if message.role is Role.USER), "")
    for text in (asked, *asked.splitlines()):
        key = question_key(text)
        if key is not None:
            return key
    raise ExpertError("the question asks for no key; this expert answers needle questions only")


def _read_result(text: str, tools: Mapping[int | None, str]) -> Shown:
    first, _, body = text.partition("\n")
    header = json.loads(first)
    # A stub stands for a whole run of messages, calls included: it is what a delete leaves behind.
    tool = tools.get(header.get("call_id"), "deleteContext")
    return Shown(tool=tool, header=header, body=body)


def _read_listing(body: str) -> dict[str, str]:
    """The notes listing under a header: "Notes:", then a line "- key: summary" each."""
    lines = body.splitlines()
    pairs = (line.removeprefix("- ").partition(": ") for line in lines[1:] if line.startswith("- "))
    return {key: summary for key, _, summary in pairs} if lines[:1] == ["Notes:"] else {}


# --- replay -------------------------------------------------------------------------------------------


class ReplayPolicy(InstantPolicy):
    """Plays recorded actions again, id for id: episode e answers as trajectory e did.

    `rollout` numbers episodes in the order of its tasks, so tasks and trajectories go in the same order. As
    each prompt must equal the recorded one id for id (`strict`), a replay also proves that the environment
    still renders what the recording saw. With `strict=False` the actions are played whatever the prompt, to
    record them anew under another chat format or configuration.
    """

    def __init__(self, trajectories: Iterable[Trajectory], *, strict: bool = True) -> None:
        super().__init__()
        self._trajectories = tuple(trajectories)
        self._strict = strict

    def reply(self, request: Request) -> Action:
        """The recorded action of this turn; `ExpertError` where the recording ends or the prompt differs."""
        if request.episode >= len(self._trajectories):
            raise ExpertError(f"no recording for episode {request.episode}; there are {len(self._trajectories)}")
        recording = self._trajectories[request.episode]
        if request.turn > len(recording.snapshots):
            raise ExpertError(f"the recording of {recording.task_id} ends after {len(recording.snapshots)} turns")
        snapshot = recording.snapshots[request.turn - 1]
        if self._strict and snapshot.prompt.tolist() != request.prompt.tolist():
            raise ExpertError(
                f"{recording.task_id}, turn {request.turn}: the prompt ({len(request.prompt)} ids) is not the recorded"
                f" one ({len(snapshot.prompt)} ids)"
            )
        return snapshot.action
