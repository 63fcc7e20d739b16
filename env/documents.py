"""Documents and their chunks: the text a task is about, counted and cut by tokens.

A `Document` is tokenised once and never changes. `chunk_document` cuts it into windows of tokens whose borders lie
between characters, so that the chunks, joined at overlap 0, are the document.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from statelm_jax.errors import ToolError
from statelm_jax.types import TokenIds

TAIL_SHARE = 8
"""A last chunk that would add fewer than chunk_size / TAIL_SHARE new tokens is balanced with the one before it."""
SENTENCE_SHARE = 0.4
"""How much shorter than its size a chunk may be so that it ends with a sentence."""
MAX_TABLE_TOKENS = 16_000_000
"""Chunks that overlap by more than half may hold this many tokens together: a model cannot ask for all memory."""


Border = Literal["token", "sentence"]
"""Where chunks may end."""

_SENTENCE_END = re.compile(r"""[.!?…]["'”’)\]]*(?=\s)|[。！？]|\n""")


class OffsetTokenizer(Protocol):
    """What a document needs of a tokenizer."""

    def encode_with_offsets(self, text: str) -> tuple[TokenIds, NDArray[np.int64]]:
        """Token ids, and for each token the first character it holds a part of (never decreasing)."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """A text with its tokens. Immutable: the arrays cannot be written to.

    Attributes:
      text: The whole text.
      token_ids: int32 (T,).
      starts: int64 (T,), the first character that each token holds a part of. Tokens of a byte-level vocabulary may
        hold a part of a character only; then several tokens share one start.
      digest: SHA-256 of the text, as hex.
    """

    text: str
    token_ids: TokenIds
    starts: NDArray[np.int64]
    digest: str

    @classmethod
    def from_text(cls, text: str, tokenizer: OffsetTokenizer) -> Document:
        """Tokenise `text`. Costs as much as the tokenizer; use a `DocumentStore` to pay once per text."""
        token_ids, starts = tokenizer.encode_with_offsets(text)
        token_ids, starts = np.array(token_ids, np.int32), np.array(starts, np.int64)
        if token_ids.shape != starts.shape or np.any(np.diff(starts) < 0) or (text and not len(token_ids)):
            raise ValueError("the tokenizer must give every text tokens, one start for each, in order")
        token_ids.setflags(write=False)
        starts.setflags(write=False)
        return cls(text, token_ids, starts, text_digest(text))

    @property
    def total_tokens(self) -> int:
        """Length in tokens."""
        return len(self.token_ids)

    def slice(self, start: int, end: int) -> str:
        """The text of the tokens start (inclusive) to end (exclusive), cut between characters.

        A character belongs to the first token that has it as its start, so neighbouring slices neither share nor
        lose one.
        """
        return self.text[self._char_of(start) : self._char_of(end)]

    def align(self, token: int) -> int:
        """The last token at or before `token` that begins a character (0 and the end of the text always do)."""
        while 0 < token < self.total_tokens and self.starts[token] == self.starts[token - 1]:
            token -= 1
        return token

    def sentence_end(self, low: int, high: int) -> int | None:
        """The last token border in (low, high] where a sentence or a line ends; None when there is none."""
        base = self._char_of(low)
        for match in reversed(list(_SENTENCE_END.finditer(self.text, base, self._char_of(high)))):
            char = match.end()
            token = int(np.searchsorted(self.starts, char))
            if low < token <= high and self._char_of(token) == char:
                return token
        return None

    def _char_of(self, token: int) -> int:
        if token <= 0:
            return 0
        return len(self.text) if token >= self.total_tokens else int(self.starts[token])


@dataclass(frozen=True, slots=True)
class Chunk:
    """A window of a document.

    Attributes:
      chunk_id: 0-based, in the order of the document.
      text: The text of the window, never empty.
      start: First token.
      end: One past the last token.
    """

    chunk_id: int
    text: str
    start: int
    end: int


def text_digest(text: str) -> str:
    """SHA-256 of a text, as hex. Lone surrogates, which no file holds but a string can, are allowed."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def chunk_document(
    document: Document, chunk_size: int, overlap: int = 0, border: Border = "token"
) -> tuple[Chunk, ...]:
    """Cut a document into windows of at most `chunk_size` tokens, each starting `overlap` tokens before the last end.

    With `border` = "sentence" a window ends after the last sentence (or line) that ends in its last part
    (`SENTENCE_SHARE`), where there is one, so that few sentences are cut in two.

    * Every border lies between two characters: it moves back to the start of the character it would split. (Only a
      single character of more than `chunk_size` tokens makes a longer chunk.)
    * Cutting stops where the end is reached: no chunk lies wholly inside the one before it.
    * A last chunk with few new tokens (`TAIL_SHARE`) shares evenly with the one before it: 8,001 tokens by 4,000 give
      4,000 + 2,001 + 2,000. With token borders the number of chunks stays what the size says.
    * Joined at overlap 0 the chunks are the document. A document that fits is one chunk, an empty one has none.

    Raises:
      ToolError: The sizes make no sense.
    """
    check_chunk_sizes(chunk_size, overlap)
    copies = min(chunk_size, document.total_tokens) / (chunk_size - overlap)
    if copies > 2 and copies * document.total_tokens > MAX_TABLE_TOKENS:
        raise ToolError(
            f"overlap {overlap} is too near chunk_size {chunk_size} for a document of this length; halve it"
        )
    windows = _windows(document, chunk_size, overlap, border)
    windows = _balance_tail(document, windows, chunk_size, overlap)
    return tuple(Chunk(i, document.slice(start, end), start, end) for i, (start, end) in enumerate(windows))


def check_chunk_sizes(chunk_size: int, overlap: int) -> None:
    """Refuse sizes with which cutting would never get ahead. `ToolError` says what is allowed."""
    if chunk_size < 1:
        raise ToolError(f"chunk_size must be at least 1 token, got {chunk_size}")
    if not 0 <= overlap < chunk_size:
        raise ToolError(f"overlap must be at least 0 and below chunk_size ({chunk_size}), got {overlap}")


def _windows(document: Document, chunk_size: int, overlap: int, border: Border) -> list[tuple[int, int]]:
    """Windows that reach further each time; where a wide character stands in the way, overlap gives way first."""
    total = document.total_tokens
    windows: list[tuple[int, int]] = []
    start = end = 0
    while end < total:
        reach = document.align(min(start + chunk_size, total))
        if reach <= end and start < end:
            start = _next_border(document, start)
            continue
        if border == "sentence" and reach < total:
            low = max(end, start + overlap, reach - int(chunk_size * SENTENCE_SHARE))
            reach = document.sentence_end(low, reach) or reach
        end = reach if reach > end else _next_border(document, end)
        windows.append((start, end))
        start = max(document.align(end - overlap), _next_border(document, start))
    return windows


def _next_border(document: Document, token: int) -> int:
    token += 1
    while document.align(token) != token:
        token += 1
    return token


def _balance_tail(
    document: Document, windows: list[tuple[int, int]], chunk_size: int, overlap: int
) -> list[tuple[int, int]]:
    """Share the last two windows' tokens evenly where the last one has few of its own."""
    if len(windows) < 2:
        return windows
    (start, end), (_, total) = windows[-2:]
    if (total - end) * TAIL_SHARE >= chunk_size:
        return windows
    middle = document.align((start + total + overlap + 1) // 2)
    second = document.align(middle - overlap)
    fits = start < second <= middle < total and middle - start <= chunk_size and total - second <= chunk_size
    return [*windows[:-2], (start, middle), (second, total)] if fits else windows
