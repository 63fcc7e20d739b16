"""Pensieve: one episode of a model that works on a document under a token budget.

The life of one step (`Pensieve.step`):

1. The reply is taken as sampled. What goes beyond the tokens it was granted is cut off, as the limit would have.
2. Its ids are appended to the history as an assistant message; together with the prompt they are the turn's snapshot.
3. The reply is parsed, its first call looked up among this run's tools, its arguments checked. A cut reply runs
   nothing, even if a whole call stands in it: what was meant to follow is unknown.
4. The tool works out a new workspace and a result, and the result is measured in the context as it would then be.
5. If it fits, both are kept. If not, both are dropped, and the model is told the numbers and what it can do. Other
   faults (`ToolError`) become error results in the same way. Nothing that a model or a document says is raised.
6. The turn is recorded. The episode ends, or the next prompt is made; it fits by what was measured.

The budget. `context_window` bounds prompt and reply together. Results that bring text in must leave
`reserve_tokens` for the notes and the delete that follow; every other result, errors included, must leave
`min_reply_tokens`, so that a reply can follow. When not even the shortest error leaves that much, the episode ends
with CONTEXT_OVERFLOW. What the first message may not leave room for ends so before the first turn.

Endings, first one first: FINISHED (a `finish` with an answer; never refused for want of room), INVALID_REPLIES
(`max_invalid_replies` in a row without a call that could be started: unreadable, cut, no such tool, wrong
arguments), MAX_TURNS, CONTEXT_OVERFLOW. A call that was started and failed counts as a valid reply.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from statelm_jax.chat import ChatFormat, ParsedReply
from statelm_jax.config import EnvConfig
from statelm_jax.env.arguments import check_arguments
from statelm_jax.env.context import PROFILES, ContextEncoder, History, difference
from statelm_jax.env.index import DocumentStore
from statelm_jax.env.metrics import episode_metrics
from statelm_jax.env.prompt import system_prompt
from statelm_jax.env.tools import Tool, find_tool, tool_schemas
from statelm_jax.env.workspace import Budget, ToolResult, Turn, Workspace
from statelm_jax.errors import ToolError
from statelm_jax.memory.notes import Notebook
from statelm_jax.types import (
    Action,
    ActionStop,
    Message,
    Role,
    Snapshot,
    StepResult,
    StopReason,
    Task,
    TokenIds,
    Trajectory,
    TurnRecord,
)

MAX_ERROR_CHARS = 300
"""No error text shown to the model is longer."""

_MAX_WARNING_CHARS = 160
_NO_ROOM = "no room; delete messages"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observation:
    """What the model is asked to continue; the parts of a `Request` that the environment knows.

    Attributes:
      turn: 1-based.
      prompt: Token ids, generation header included.
      messages: The same context as messages.
      max_new_tokens: Longest reply that is accepted; prompt and reply together stay within the window.
    """

    turn: int
    prompt: TokenIds
    messages: Sequence[Message]
    max_new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What a reply led to.

    Attributes:
      state: The workspace after the turn, its history ending in the result.
      tool: The tool that was started; None when the reply held no call that could be.
      arguments: Its arguments after checking.
      error: Whether the result is an error.
      freed_tokens: As the tool reported them.
    """

    state: Workspace
    tool: str | None = None
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    error: bool = False
    freed_tokens: int = 0


class Pensieve:
    """One episode. Ask `observe`, answer with `step`, until `stop` is set; then `trajectory`.

    `stop` can be set from the start: a question that leaves no room for a reply ends the episode before it begins.

    Args:
      task: The question and the document. Neither answers nor facts are ever shown.
      chat: How messages become tokens.
      config: Tools and limits.
      store: Shares tokenised documents and indexes between episodes. Must use the tokenizer of `chat`.
      first_msg_id: Id of the first assistant message (odd). Training uses larger ones, so that a model meets ids
        that otherwise only long episodes reach.
      first_chunk_id: Id of the first chunk, for the same reason.
    """

    def __init__(
        self,
        task: Task,
        chat: ChatFormat,
        config: EnvConfig,
        store: DocumentStore,
        *,
        first_msg_id: int = 1,
        first_chunk_id: int = 0,
    ) -> None:
        if first_msg_id < 1 or first_msg_id % 2 == 0 or first_chunk_id < 0:
            raise ValueError("first_msg_id must be odd and positive, first_chunk_id not negative")
        self._task = task
        self._chat = chat
        self._config = config
        self._store = store
        self._first_chunk_id = first_chunk_id
        self._profile = PROFILES[config.profile]
        self._encoder = ContextEncoder(chat, self._profile)
        system = chat.system_text(system_prompt(config), tool_schemas(config))
        head = (
            Message(msg_id=None, role=Role.SYSTEM, text=system),
            Message(msg_id=None, role=Role.USER, text=task.question),
        )
        history = History(head=head, first_id=first_msg_id)
        self._state = Workspace(document=store.get(task.document), notes=Notebook(), history=history)
        self._snapshots: list[Snapshot] = []
        self._turns: list[TurnRecord] = []
        self._stop: StopReason | None = None
        self._cause = ""
        self._invalid_in_a_row = 0
        self._repeats = 0
        self._encoded_before = 0
        self._observation = self._next_observation(1)
        head_tokens = len(self._observation.prompt)
        rest = config.context_window - head_tokens - config.reserve_tokens - config.min_reply_tokens
        self._notes_tokens = max(0, min(int(config.notes_share * config.context_window), rest))
        if self._overflows():
            self._stop = StopReason.CONTEXT_OVERFLOW

    @property
    def stop(self) -> StopReason | None:
        """Why the episode ended; None while it runs."""
        return self._stop

    @property
    def turns(self) -> Sequence[TurnRecord]:
        """A record of each turn so far."""
        return tuple(self._turns)

    @property
    def render_tokens_encoded(self) -> int:
        """Tokens that the latest step made from text: its own result and what a delete changed, never old messages."""
        return self._encoder.tokens_encoded - self._encoded_before

    def observe(self) -> Observation:
        """The context to continue. The same until `step`."""
        if self._stop is not None:
            raise RuntimeError(f"the episode is over ({self._stop})")
        return self._observation

    def step(self, action: Action) -> StepResult:
        """Take one reply. Never raises for what is in it; the steps are in the module's docstring."""
        observation = self.observe()
        self._encoded_before = self._encoder.tokens_encoded
        action = _within_limit(action, observation.max_new_tokens)
        parsed = self._chat.parse(action.token_ids, action.stop)
        before = self._state
        reply = Message(
            msg_id=before.history.next_id,
            role=Role.ASSISTANT,
            text=parsed.thought,
            tool_calls=parsed.calls,
            token_ids=action.token_ids,
        )
        outcome = self._act(dataclasses.replace(before, history=before.history.append(reply)), parsed)
        self._state = outcome.state
        self._observation = self._next_observation(observation.turn + 1)
        self._invalid_in_a_row = self._invalid_in_a_row + 1 if outcome.tool is None else 0
        self._repeats += self._is_repeat(before, outcome)
        record = self._record(observation, action, parsed, before, outcome)
        self._snapshots.append(Snapshot(prompt=observation.prompt, action=action))
        self._turns.append(record)
        self._stop = self._ending()
        return StepResult(
            terminated=self._stop is StopReason.FINISHED,
            truncated=self._stop not in (None, StopReason.FINISHED),
            stop=self._stop,
        )

    def abort(self, stop: StopReason, cause: str = "") -> None:
        """End the episode from outside (INTERRUPTED, POLICY_ERROR). An episode that is over stays as it ended."""
        if self._stop is None:
            self._stop, self._cause = stop, cause

    def trajectory(self) -> Trajectory:
        """The whole episode, not yet scored. Only after it ended."""
        if self._stop is None:
            raise RuntimeError("the episode is still running; abort() ends it")
        metrics = episode_metrics(self._snapshots, self._turns)
        metrics["document_tokens"] = self._state.document.total_tokens
        metrics["render_tokens_encoded"] = self._encoder.tokens_encoded
        metrics["repeats"] = self._repeats
        if self._cause:
            metrics["cause"] = self._cause
        return Trajectory(
            task_id=self._task.task_id,
            question=self._task.question,
            answers=self._task.answers,
            snapshots=tuple(self._snapshots),
            turns=tuple(self._turns),
            answer=self._state.answer,
            reward=None,
            stop=self._stop,
            metrics=metrics,
        )

    # --- one reply -------------------------------------------------------------------------------------------

    def _act(self, state: Workspace, parsed: ParsedReply) -> _Outcome:
        """Run the first call of a reply. `state.history` ends in the reply."""
        try:
            if parsed.truncated:
                limit = self._observation.max_new_tokens
                raise ToolError(f"the reply was cut at {limit} tokens, so nothing in it was run; write less")
            if not parsed.calls:
                raise ToolError(parsed.error or "the reply holds no tool call")
            name, tool = find_tool(parsed.calls[0].name, self._config.tools)
            given = check_arguments(name, tool.arguments, parsed.calls[0].arguments)
        except ToolError as error:
            return self._failed(state, str(error))
        arguments = given.model_dump(mode="json", exclude_none=True)
        warning = _unused_calls(parsed)
        turn = self._turn(state)
        try:
            new_state, result = tool.run(turn, state, given)
            warning = "; ".join(text for text in (result.fields.get("warning"), warning) if text)
            fields = {**result.fields, "warning": warning} if warning else result.fields
            new_state = self._fitting(turn, tool, new_state, dataclasses.replace(result, fields=fields))
        except ToolError as error:
            failed = self._failed(state, str(error), warning)
            return dataclasses.replace(failed, tool=name, arguments=arguments)
        freed = result.fields.get("freed_tokens", 0)
        return _Outcome(state=new_state, tool=name, arguments=arguments, freed_tokens=freed)

    def _turn(self, state: Workspace) -> Turn:
        config = self._config
        used = self._encoder.encode(state.history).tokens + len(self._chat.header_ids)
        return Turn(
            config=config,
            store=self._store,
            budget=Budget(
                window=config.context_window,
                reserve=config.reserve_tokens,
                min_reply=config.min_reply_tokens,
                used=used,
            ),
            turns_left=config.max_turns - self._observation.turn,
            first_chunk_id=self._first_chunk_id,
            notes_tokens=self._notes_tokens,
            message_tokens=self._encoder.message_tokens,
        )

    def _fitting(self, turn: Turn, tool: Tool, state: Workspace, result: ToolResult) -> Workspace:
        """The workspace with the result at the end of its history. `ToolError` with the numbers if it does not fit."""
        budget = turn.budget
        kept = budget.reserve if tool.brings_text else budget.min_reply
        room, size = max(0, budget.window - kept - budget.used), result.body_tokens
        if size > 2 * room and tool.brings_text:
            # Too large beyond doubt, and encoding it would take long: a text has nearly as many tokens in a result as
            # it has in the document.
            raise ToolError(_does_not_fit(f"about {size}", room, kept, tool))
        state = self._append_result(state, result.fields, result.body)
        context = self._encoder.encode(state.history)
        size = len(context.blocks[-1])
        room = max(0, budget.window - kept - len(self._chat.header_ids) - (context.tokens - size))
        if size > room and state.answer is None:
            raise ToolError(_does_not_fit(str(size), room, kept, tool))
        if result.max_tokens is not None and size > result.max_tokens:
            raise ToolError(
                f"not done: the notes would take {size} tokens in all and {result.max_tokens} are allowed; "
                "shorten or remove some with updateNote"
            )
        return state

    def _failed(self, state: Workspace, error: str, warning: str = "") -> _Outcome:
        """An error result; the shortest one where the full text would leave no room for another reply."""
        fields = {"error": _clipped(error, MAX_ERROR_CHARS), **({"warning": warning} if warning else {})}
        failed = self._append_result(state, fields, None)
        tokens = self._encoder.encode(failed.history).tokens + len(self._chat.header_ids)
        if tokens + self._config.min_reply_tokens > self._config.context_window:
            failed = self._append_result(state, {"error": _NO_ROOM}, None)
        return _Outcome(state=failed, error=True)

    def _append_result(self, state: Workspace, fields: Mapping[str, Any], body: str | None) -> Workspace:
        msg_id = state.history.next_id
        text = self._profile.result_text(msg_id, msg_id - 1, fields, body)
        message = Message(msg_id=msg_id, role=Role.TOOL, text=text, caller_id=msg_id - 1)
        return dataclasses.replace(state, history=state.history.append(message))

    # --- after it --------------------------------------------------------------------------------------------

    def _next_observation(self, turn: int) -> Observation:
        context = self._encoder.encode(self._state.history)
        self._encoder.keep(context)
        prompt = self._encoder.prompt(context)
        return Observation(
            turn=turn,
            prompt=prompt,
            messages=context.messages,
            max_new_tokens=min(self._config.max_reply_tokens, self._config.context_window - len(prompt)),
        )

    def _record(
        self, observation: Observation, action: Action, parsed: ParsedReply, before: Workspace, outcome: _Outcome
    ) -> TurnRecord:
        after = outcome.state
        deleted = difference(after.history.deleted, before.history.deleted)
        left = self._config.context_window - self._config.reserve_tokens - len(self._observation.prompt)
        return TurnRecord(
            turn=observation.turn,
            prompt_tokens=len(observation.prompt),
            tool=outcome.tool,
            arguments=outcome.arguments,
            thought=parsed.thought,
            result=after.history.messages[-1].text,
            error=outcome.error,
            deleted=tuple(msg_id for first, last in deleted for msg_id in range(first, last + 1)),
            freed_tokens=outcome.freed_tokens,
            notes=after.notes.items(),
            tokens_left=max(0, left),
            cached_tokens=action.cached_tokens,
            prefilled_tokens=action.prefilled_tokens,
        )

    def _ending(self) -> StopReason | None:
        if self._state.answer is not None:
            return StopReason.FINISHED
        if self._invalid_in_a_row >= self._config.max_invalid_replies:
            return StopReason.INVALID_REPLIES
        if len(self._turns) >= self._config.max_turns:
            return StopReason.MAX_TURNS
        return StopReason.CONTEXT_OVERFLOW if self._overflows() else None

    def _overflows(self) -> bool:
        return self._config.context_window - len(self._observation.prompt) < self._config.min_reply_tokens

    def _is_repeat(self, before: Workspace, outcome: _Outcome) -> bool:
        """Whether this is the last turn's call again. Reading on in a scan is not, though the call is the same."""
        last = self._turns[-1] if self._turns else None
        if last is None or outcome.tool is None or before.cursor != outcome.state.cursor:
            return False
        return (last.tool, last.arguments) == (outcome.tool, outcome.arguments)


def _within_limit(action: Action, max_new_tokens: int) -> Action:
    """The action, cut to the tokens it was granted (a policy that counts loosely must not break the window)."""
    token_ids = np.asarray(action.token_ids, np.int32)
    if len(token_ids) <= max_new_tokens:
        return dataclasses.replace(action, token_ids=token_ids)
    logprobs = None if action.logprobs is None else action.logprobs[:max_new_tokens]
    token_ids = token_ids[:max_new_tokens]
    return dataclasses.replace(action, token_ids=token_ids, logprobs=logprobs, stop=ActionStop.LENGTH)


def _unused_calls(parsed: ParsedReply) -> str:
    """A warning about whatever follows the first call of a reply; empty when nothing does."""
    unused = len(parsed.calls) - 1
    if parsed.error is None and not unused:
        return ""
    more = f"; {unused} more {'was' if unused == 1 else 'were'} not" if unused else ""
    fault = f"; {parsed.error}" if parsed.error else ""
    return _clipped(f"one call per reply is run{more}{fault}", _MAX_WARNING_CHARS)


def _does_not_fit(size: str, room: int, kept: int, tool: Tool) -> str:
    return f"not done: the result takes {size} tokens; {room} are left for it ({kept} are kept free); {tool.hint}"


def _clipped(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
