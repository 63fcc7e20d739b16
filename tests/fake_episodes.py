"""Episodes without a model: a script of tool calls, rendered as the environment renders them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from statelm_jax.env.context import History, native_result_text, render_native
from statelm_jax.tokenizer import TINY_FOLDER, Tokenizer
from statelm_jax.types import (
    Action,
    ActionStop,
    Message,
    Role,
    Snapshot,
    StopReason,
    TokenIds,
    Trajectory,
    TurnRecord,
)

KEY, VALUE = "crimson lantern", "48213"
NEEDLE = f"The secret number of the {KEY} is {VALUE}."
QUESTION = f"What is the secret number of the {KEY}?"
PROSE = (
    "A name refers to an object and is bound in the block that introduces it.\n"
    "The following statements bind names: parameters of functions, imports, targets of assignments & loops <here>."
)


def tiny_tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY_FOLDER)


class EpisodeScript:
    """Records turns of an episode. Each call of `turn` is one reply and its result."""

    def __init__(self, tokenizer: Tokenizer, question: str = QUESTION, window: int = 1024, document: int = 4096):
        head = (
            Message(msg_id=None, role=Role.SYSTEM, text="You answer questions about a document through tools."),
            Message(msg_id=None, role=Role.USER, text=question),
        )
        self.tokenizer, self.question, self.window, self.document = tokenizer, question, window, document
        self.history = History(head=head)
        self.notes: dict[str, str] = {}
        self.snapshots: list[Snapshot] = []
        self.turns: list[TurnRecord] = []
        self._encoded: dict[str, list[int]] = {}
        self._header = self._ids("im_start") + self.plain("assistant\n")
        self._last = np.zeros(0, np.int32)

    def plain(self, text: str) -> list[int]:
        if text not in self._encoded:
            self._encoded[text] = self.tokenizer.encode(text).tolist()
        return self._encoded[text]

    def turn(
        self,
        tool: str | None,
        arguments: Mapping[str, Any] | None = None,
        fields: Mapping[str, Any] | None = None,
        body: str | None = None,
        *,
        delete: tuple[int, int] | None = None,
        thought: str = "",
        reply: str | None = None,
    ) -> EpisodeScript:
        """One turn. `delete` is a (first, last) span of ids; `reply` replaces the call by raw text."""
        arguments = dict(arguments or {})
        prompt = self._prompt()
        action = self._action(tool, arguments, thought, reply)
        call_id = self.history.next_id
        self.history = self.history.append(Message(msg_id=call_id, role=Role.ASSISTANT, text=thought, token_ids=action))
        deleted: tuple[int, ...] = ()
        if delete:
            self.history = self.history.delete((delete,))
            deleted = (*range(delete[0], delete[1] + 1), call_id, call_id + 1)
            fields = {"deleted": f"{delete[0]}-{call_id + 1}", **(fields or {})}
        if tool == "note":
            self.notes[arguments["key"]] = arguments["summary"]
        if tool in ("note", "deleteContext"):
            body = "\n".join(["Notes:", *(f"- {key}: {text}" for key, text in self.notes.items())])
        result = native_result_text(call_id + 1, call_id, fields or {}, body)
        self.history = self.history.append(Message(msg_id=call_id + 1, role=Role.TOOL, text=result, caller_id=call_id))
        after = len(self._prompt())
        freed = max(len(prompt) + len(action) + len(self.plain(result)) - after, 0) if delete else 0
        self._record(prompt, action, tool, arguments, thought, result, deleted, freed, self.window - after)
        return self

    def _record(
        self,
        prompt: TokenIds,
        action: TokenIds,
        tool: str | None,
        arguments: Mapping[str, Any],
        thought: str,
        result: str,
        deleted: tuple[int, ...],
        freed: int,
        left: int,
    ) -> None:
        shorter = min(len(prompt), len(self._last))
        differs = np.flatnonzero(prompt[:shorter] != self._last[:shorter])
        cached = int(differs[0]) if len(differs) else shorter
        self._last = np.concatenate([prompt, action])
        self.snapshots.append(
            Snapshot(
                prompt=prompt,
                action=Action(
                    token_ids=action,
                    stop=ActionStop.STOP,
                    cached_tokens=cached,
                    prefilled_tokens=len(prompt) - cached,
                ),
            )
        )
        self.turns.append(
            TurnRecord(
                turn=len(self.turns) + 1,
                prompt_tokens=len(prompt),
                tool=tool,
                arguments=arguments,
                thought=thought,
                result=result,
                error='"error"' in result.partition("\n")[0],
                deleted=deleted,
                freed_tokens=freed,
                notes=tuple(self.notes.items()),
                tokens_left=left,
                cached_tokens=cached,
                prefilled_tokens=len(prompt) - cached,
            )
        )

    def end(
        self,
        answer: str | None,
        stop: StopReason = StopReason.FINISHED,
        *,
        answers: Sequence[str] = (VALUE,),
        task_id: str = "needle-4096-0001",
    ) -> Trajectory:
        right = stop is StopReason.FINISHED and answer in answers
        return Trajectory(
            task_id=task_id,
            question=self.question,
            answers=tuple(answers),
            snapshots=tuple(self.snapshots),
            turns=tuple(self.turns),
            answer=answer,
            reward=1.0 if right else -0.5 if stop is StopReason.FINISHED else -1.0,
            stop=stop,
            metrics={"context_window": self.window, "document_tokens": self.document},
        )

    def _prompt(self) -> TokenIds:
        blocks = [self._block(message) for message in render_native(self.history)]
        return np.array([*chain.from_iterable(blocks), *self._header], np.int32)

    def _block(self, message: Message) -> list[int]:
        end = [*self._ids("im_end"), *self.plain("\n")]
        if message.token_ids is not None:
            return [*self._header, *message.token_ids.tolist(), *self.plain("\n")]
        if message.role is Role.TOOL:
            inner = [*self._ids("tool_response"), *self.plain(f"\n{message.text}\n"), *self._ids("tool_response_end")]
            return [*self._ids("im_start"), *self.plain("user\n"), *inner, *end]
        return [*self._ids("im_start"), *self.plain(f"{message.role}\n{message.text}"), *end]

    def _action(self, tool: str | None, arguments: Mapping[str, Any], thought: str, reply: str | None) -> TokenIds:
        call = reply if tool is None else json.dumps({"name": tool, "arguments": arguments}, separators=(",", ":"))
        body = self.plain(call or "") if tool is None else self._call(call or "")
        return np.array([*self.plain(thought), *body, *self._ids("im_end")], np.int32)

    def _call(self, text: str) -> list[int]:
        return [*self._ids("tool_call"), *self.plain(f"\n{text}\n"), *self._ids("tool_call_end")]

    def _ids(self, name: str) -> list[int]:
        return [getattr(self.tokenizer.control, name)]


def scanning_episode(
    tokenizer: Tokenizer,
    chunks: int = 4,
    *,
    needle_at: int = 1,
    noted: str = VALUE,
    answer: str = VALUE,
    text: str = PROSE,
    question: str = QUESTION,
    document: int = 4096,
    task_id: str = "needle-4096-0001",
) -> Trajectory:
    """Reads `chunks` chunks, notes the needle, deletes as it goes, answers."""
    script = EpisodeScript(tokenizer, question, document=document)
    script.turn("analyzeText", {}, {"total_tokens": document}).turn("buildIndex", {}, {"total_chunks": chunks})
    first = 1
    for chunk in range(chunks):
        progress = {"chunk_id": chunk, "reading_progress": f"{chunk + 1}/{chunks}", "more": chunk + 1 < chunks}
        body = f"Chunk {chunk}: {text} {NEEDLE if chunk == needle_at else ''}"
        script.turn("readChunk", {"enable_scan": True}, progress, body, thought="Next part. " if chunk % 2 else "")
        if chunk == needle_at:
            script.turn("note", {"key": KEY, "summary": noted, "content": NEEDLE}, {"status": "success"})
        last = script.history.next_id - 1
        script.turn("deleteContext", {"first_id": first, "last_id": last}, {"freed_tokens": 100}, delete=(first, last))
        first = 1
    script.turn("finish", {"key": KEY, "answer": answer}, {"status": "finished"})
    return script.end(answer, task_id=task_id)
