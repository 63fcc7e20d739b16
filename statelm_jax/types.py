"""Host-side records that pass between rooms: frozen, no logic, no jax.

Reading order follows an episode: a `Task` starts it, `Message`s are its history, a `Request` asks a
policy for an `Action`, request and action together are a `Snapshot` (what the model saw and what it
said), a `TurnRecord` is what a person wants to know of one turn, and a `Trajectory` is the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]
"""One-dimensional int32 token ids. Treated as read-only once inside a record."""


class Role(StrEnum):
    """Who speaks in a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class ActionStop(StrEnum):
    """Why the policy stopped writing one reply."""

    STOP = "stop"
    """It wrote a stop token."""
    LENGTH = "length"
    """It ran into the token limit of the request; the reply is cut."""


class StopReason(StrEnum):
    """Why an episode ended. Only FINISHED is a termination; all others are truncations."""

    FINISHED = "finished"
    MAX_TURNS = "max_turns"
    CONTEXT_OVERFLOW = "context_overflow"
    """The context leaves no room for another reply."""
    INVALID_REPLIES = "invalid_replies"
    """Too many replies in a row held no call that could be run."""
    INTERRUPTED = "interrupted"
    """A person or the machine stopped the run."""
    POLICY_ERROR = "policy_error"
    """The policy failed (an endpoint that stayed down, say); the cause is in the metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A question about a document.

    Attributes:
      task_id: Unique within its file.
      question: What the model is asked; the document is never part of it.
      document: The whole text. Reached only through tools.
      answers: Accepted answers; empty means that the document does not hold one ("not found" is right).
      options: Choices of a multiple-choice question, in order; empty for an open one.
      facts: Whatever the source knows about the task (needle depth, kind, length in tokens), for
        reports only. Never shown to a policy.
    """

    task_id: str
    question: str
    document: str
    answers: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call as the model wrote it: the name on the wire (`deleteContext`) and decoded arguments."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Message:
    """One message of the append-only history, or of a rendered context.

    Attributes:
      msg_id: The id that tools use; None for the system and the first user message, which have none.
      role: Who speaks.
      text: For the assistant: the reply without its control tokens' calls (the thought). For a tool:
        the result exactly as shown.
      tool_calls: The assistant's calls.
      caller_id: For a tool result, the id of the assistant message that asked for it.
      token_ids: For an assistant message, the reply's ids exactly as sampled (never re-encoded).
    """

    msg_id: int | None
    role: Role
    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    caller_id: int | None = None
    token_ids: TokenIds | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """What a policy is asked: continue this prompt.

    Attributes:
      episode: Identifies the episode (and so the cache slot) for as long as it lives.
      turn: 1-based turn number within the episode.
      prompt: Token ids to continue, generation header included.
      messages: The same context as messages, for policies that read text (experts, endpoints). Holds
        nothing that `prompt` does not hold.
      max_new_tokens: The reply may not be longer.
      seed: Makes this request's sampling reproducible whatever else is in the batch.
    """

    episode: int
    turn: int
    prompt: TokenIds
    messages: Sequence[Message]
    max_new_tokens: int
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Action:
    """What a policy answered.

    Attributes:
      token_ids: The reply's ids exactly as sampled, the stop token included when there was one.
      logprobs: float32, one per id, under the distribution that was sampled from; None when unknown.
      stop: Why it ended.
      cached_tokens: Prompt tokens that were found in the cache.
      prefilled_tokens: Prompt tokens that had to be computed.
    """

    token_ids: TokenIds
    logprobs: NDArray[np.float32] | None = None
    stop: ActionStop = ActionStop.STOP
    cached_tokens: int = 0
    prefilled_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """What the model saw (ids as fed) and what it said (ids as sampled). The unit of training."""

    prompt: TokenIds
    action: Action


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one environment step led to. `terminated` (the task ended) and `truncated` (we stopped it) differ."""

    terminated: bool
    truncated: bool
    stop: StopReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One turn as a person wants to see it; enough, with the snapshot, to draw it.

    Attributes:
      turn: 1-based.
      prompt_tokens: Size of the context the model saw.
      tool: The tool that ran, on the wire name; None when the reply held no runnable call.
      arguments: Its arguments after checking.
      thought: The reply's text outside the call.
      result: The tool result's text, or the error observation.
      error: Whether the result is an error.
      deleted: Message ids that became deleted in this turn (the delete turn itself included).
      freed_tokens: How much shorter the deletion made the context.
      notes: (key, summary) pairs as they stand after the turn.
      tokens_left: The budget left after the turn, as checkBudget would say it.
      cached_tokens / prefilled_tokens: From the policy, for the prompt of this turn.
    """

    turn: int
    prompt_tokens: int
    tool: str | None
    arguments: Mapping[str, Any]
    thought: str
    result: str
    error: bool
    deleted: tuple[int, ...]
    freed_tokens: int
    notes: tuple[tuple[str, str], ...]
    tokens_left: int
    cached_tokens: int
    prefilled_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """A whole episode. `snapshots[t]` and `turns[t]` belong together."""

    task_id: str
    question: str
    answers: tuple[str, ...]
    snapshots: tuple[Snapshot, ...]
    turns: tuple[TurnRecord, ...]
    answer: str | None
    reward: float | None
    stop: StopReason
    metrics: Mapping[str, Any] = field(default_factory=dict)


class Policy(Protocol):
    """The one interface between the environment's half and whatever writes replies.

    Requests go in, actions come out as they complete, so that a slow episode holds back nobody.
    """

    def submit(self, request: Request) -> None:
        """Queue a request. At most one request per episode is open at a time."""
        ...

    def collect(self) -> Sequence[tuple[int, Action | Exception]]:
        """Block until at least one open request is answered; return (episode, action) pairs.

        An exception in place of an action means that this request failed for good; the others go on.
        """
        ...

    def release(self, episode: int) -> None:
        """The episode is over: its cache slot may go to another."""
        ...
