"""What tools work on: the episode's workspace, what they may look at besides, and what they give back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from statelm_jax.config import EnvConfig
from statelm_jax.env.context import History
from statelm_jax.env.index import Chunk, Document, DocumentStore
from statelm_jax.memory.notes import Notes
from statelm_jax.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTable:
    """The chunks of the last `buildIndex`, and what finds its search index in the store."""

    chunks: tuple[Chunk, ...]
    chunk_size: int
    overlap: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """All that tools can change. A new one is made for every change.

    Attributes:
      document: What the task is about.
      notes: The memory.
      history: The conversation, this turn's call its newest message.
      table: None before `buildIndex`.
      cursor: Index of the chunk that was read last; -1 before the first.
      scanning: Whether `readChunk` goes on by itself.
      answer: Set by `finish`.
    """

    document: Document
    notes: Notes
    history: History
    table: ChunkTable | None = None
    cursor: int = -1
    scanning: bool = False
    answer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The token budget as it is enforced, and so as it is reported. All numbers are tokens.

    Attributes:
      window: Prompt and reply together may take so many.
      reserve: Kept free by results that bring text in.
      min_reply: Kept free by every result.
      used: The next prompt, if the result of the present call took nothing.
    """

    window: int
    reserve: int
    min_reply: int
    used: int

    @property
    def tokens_left(self) -> int:
        """A result that brings text in may take so many; a larger one is refused."""
        return max(0, self.window - self.reserve - self.used)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a tool may look at besides the workspace.

    Attributes:
      config: The run's configuration.
      store: Makes and keeps chunk tables and search indexes.
      budget: As it stands after this turn's call.
      turns_left: Turns after this one.
      first_chunk_id: The id of the document's first chunk.
      notes_tokens: A result with the notes listing may take so many.
      message_tokens: The size of a message in the context.
    """

    config: EnvConfig
    store: DocumentStore
    budget: Budget
    turns_left: int
    first_chunk_id: int
    notes_tokens: int
    message_tokens: Callable[[Message], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What the model is to see.

    Attributes:
      fields: Go into the JSON header line, small by construction.
      body: Raw text below the header.
      body_tokens: About the size of the body, where it is known without encoding it.
      max_tokens: A limit of this result's own, besides the room in the context.
    """

    fields: Mapping[str, Any]
    body: str | None = None
    body_tokens: int = 0
    max_tokens: int | None = None
