"""Notes: what the model keeps of a text before it deletes the text (paper, section 3).

A memory is a value: every change gives a new one and leaves the old one as it was. So the environment can
work out what a call would lead to, find that its result does not fit, and drop both together: what the
model is told has always happened, and what it is not told never has.

Keys are compared after one rule, `plain_line`: 7, "7" and " 7 " are one key, upper and lower case are two. A key is
written once by `note`; a second `note` on it is refused and points to `update`, so nothing is overwritten by accident.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol, Self

from statelm_jax.errors import ToolError

MAX_KEY_CHARS = 80
MAX_SUMMARY_CHARS = 400
MAX_CONTENT_CHARS = 40_000
"""Bounds of one note, in characters. The listing as a whole is bounded in tokens by the environment."""

_KEYS_IN_ERROR = 6
_ERROR_KEY_CHARS = 24


class UpdateMode(StrEnum):
    """What `update` does with the content."""

    APPEND = "append"
    OVERWRITE = "overwrite"
    DELETE = "delete"


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One note: a line for the listing, and what stands behind it.

    Attributes:
      key: Its name; one line.
      summary: Shown in every listing; one line.
      content: Shown on request; may be empty when the summary says it all.
    """

    key: str
    summary: str
    content: str = ""


class Notes(Protocol):
    """What the tools need of a memory. Methods that change it return the changed memory.

    All raise `ToolError` for what the model can mend: an unknown or a taken key, something too long.
    """

    def note(self, key: str, summary: str, content: str = "") -> Self:
        """The memory with a new note."""
        ...

    def read(self, key: str) -> Note:
        """The whole note."""
        ...

    def update(self, key: str, mode: UpdateMode, content: str | None = None, summary: str | None = None) -> Self:
        """The memory with a note changed."""
        ...

    def delete(self, key: str) -> Self:
        """The memory without a note."""
        ...

    def items(self) -> tuple[tuple[str, str], ...]:
        """(key, summary) of every note, oldest first."""
        ...

    def listing(self) -> str:
        """The notes as the model sees them: one line each, no newline at the end."""
        ...


def plain_line(text: str) -> str:
    """`text` in Unicode form NFC, on one line: every run of whitespace is one blank, none at the ends."""
    return " ".join(unicodedata.normalize("NFC", text).split())


@dataclass(frozen=True, slots=True)
class Notebook:
    """The paper's notes: key -> summary and content, in the order of writing. See `Notes`."""

    _notes: Mapping[str, Note] = field(default_factory=dict)

    def note(self, key: str, summary: str, content: str = "") -> Self:
        """The notebook with one more note. `ToolError` for a taken or empty key and for what is too long."""
        key = _checked_key(key)
        if key in self._notes:
            raise ToolError(f"note {_shown_key(key)} exists already: change it with updateNote, or choose another key")
        return self._with(Note(key=key, summary=_checked_summary(summary), content=_checked_content(content)))

    def read(self, key: str) -> Note:
        """The note called `key`. `ToolError` lists the keys that exist when it does not."""
        key = plain_line(key)
        if key in self._notes:
            return self._notes[key]
        if not self._notes:
            raise ToolError("there are no notes yet: write one with note")
        known = ", ".join(_shown_key(name) for name in list(self._notes)[-_KEYS_IN_ERROR:])
        more = "the newest are " if len(self._notes) > _KEYS_IN_ERROR else "there are "
        raise ToolError(f"no note is called {_shown_key(key)}; {more}{known}")

    def update(self, key: str, mode: UpdateMode, content: str | None = None, summary: str | None = None) -> Self:
        """The notebook with the note changed; a refused update changes nothing.

        Append puts the content on a new line below the old one (nothing, when it is empty); overwrite puts
        it in place of the old one. A content or summary that is not given stays as it is.
        """
        note = self.read(key)
        if mode is UpdateMode.DELETE:
            return self.delete(key)
        if content is None and summary is None:
            raise ToolError(f"mode {mode.value} needs new_content, new_summary or both")
        if content is not None:
            appended = "\n".join(part for part in (note.content, content) if part)
            content = appended if mode is UpdateMode.APPEND else content
            note = replace(note, content=_checked_content(content))
        if summary is not None:
            note = replace(note, summary=_checked_summary(summary))
        return self._with(note)

    def delete(self, key: str) -> Self:
        """The notebook without the note. `ToolError` when there is none of that name."""
        gone = self.read(key).key
        return type(self)({name: note for name, note in self._notes.items() if name != gone})

    def items(self) -> tuple[tuple[str, str], ...]:
        """(key, summary) of every note, oldest first."""
        return tuple((note.key, note.summary) for note in self._notes.values())

    def listing(self) -> str:
        """`Notes: none`, or `Notes:` and one line `- key: summary` for each note."""
        if not self._notes:
            return "Notes: none"
        return "\n".join(["Notes:", *(f"- {note.key}: {note.summary}" for note in self._notes.values())])

    def _with(self, note: Note) -> Self:
        return type(self)({**self._notes, note.key: note})


def _shown_key(key: str) -> str:
    return repr(key[:_ERROR_KEY_CHARS]) + "…" * (len(key) > _ERROR_KEY_CHARS)


def _checked_key(key: str) -> str:
    key = plain_line(key)
    if not key:
        raise ToolError("the key is empty")
    return _bounded("key", key, MAX_KEY_CHARS)


def _checked_summary(summary: str) -> str:
    summary = plain_line(summary)
    if not summary:
        raise ToolError("the summary is empty: say in one line what the note holds")
    return _bounded("summary", summary, MAX_SUMMARY_CHARS)


def _checked_content(content: str) -> str:
    return _bounded("content", content, MAX_CONTENT_CHARS)


def _bounded(what: str, text: str, limit: int) -> str:
    if len(text) > limit:
        raise ToolError(f"the {what} has {len(text)} characters; at most {limit} are allowed")
    return text
