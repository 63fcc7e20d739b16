"""Haystacks: source texts, their sentences with token counts, and excerpts of an exact number of tokens."""

from __future__ import annotations

import functools
import pydoc_data.topics
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Protocol

from statelm_jax.env.needles import without_needles
from statelm_jax.errors import UserError
from statelm_jax.types import TokenIds

_PIECE_CHARS = 240
"""A longer sentence is taken in parts."""
_CUT_WINDOW = 16
"""How many characters a cut may stay below the longest beginning that fits."""
_FILLERS = ("", ".", " .", ". .", "..")
"""Put behind a cut that cannot meet its count otherwise."""
_SENTENCE_END = re.compile(r"(?<=[.!?。！？])\s+|(?<=[.!?][\"'”’)\]])\s+")
_EMPHASIS = re.compile(r"(\*{1,2})(\w[^*]*)\1")
_CODE = re.compile(r">>>|::=|\*{4}|={4}|-{4}|~{4}")


class TextEncoder(Protocol):
    """The part of `Tokenizer` that is needed here."""

    def encode(self, text: str) -> TokenIds:
        """Token ids of a text."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> Sequence[TokenIds]:
        """Token ids of several texts."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """A sentence (or a part of a very long one) and its token count behind a blank."""

    text: str
    tokens: int


@dataclass(frozen=True, eq=False)
class Haystack:
    """The pieces of one source region, counted once."""

    pieces: tuple[Piece, ...]
    encoder: TextEncoder

    def piece(self, text: str) -> Piece:
        """`text` counted as it counts inside a document."""
        return Piece(text, len(self.encoder.encode(" " + text)))

    def blank_tokens(self, piece: Piece) -> int:
        """What `piece` saves when it is the document's first and has no blank before it."""
        return piece.tokens - len(self.encoder.encode(piece.text))

    def take(self, start: int, tokens: int) -> list[Piece]:
        """Pieces from `start` on, round and round, of `tokens` tokens in all; empty when that cannot be met."""
        taken: list[Piece] = []
        index = start
        while tokens >= self.pieces[index].tokens:
            taken.append(self.pieces[index])
            tokens -= taken[-1].tokens
            index = (index + 1) % len(self.pieces)
        if tokens <= 0:
            return taken if tokens == 0 else []
        cut = self._cut(self.pieces[index].text, tokens, ("",))
        if cut is None:  # too little room, or several tokens a character: the last piece gives up some of its own
            last = taken.pop() if taken else Piece("", 0)
            cut = self._cut(f"{last.text} {self.pieces[index].text}".lstrip(), last.tokens + tokens, _FILLERS)
        return [*taken, cut] if cut else []

    def _cut(self, text: str, tokens: int, fillers: Sequence[str]) -> Piece | None:
        """A beginning of `text`, with a filler behind it, of exactly `tokens` tokens; rather one of whole words."""
        low, high = 0, len(text)  # text[:low] is known to be short enough
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.piece(text[:middle]).tokens <= tokens else (low, middle - 1)
        ends = [end for end in range(low, max(0, low - _CUT_WINDOW), -1) if text[end - 1] != " "]
        ends.sort(key=lambda end: text[end : end + 1] not in ("", " "))
        cuts = (self.piece(text[:end] + filler) for filler in fillers for end in ends)
        return next((cut for cut in cuts if cut.tokens == tokens), None)


@functools.lru_cache(maxsize=8)
def haystack_of(source_text: str, region: tuple[float, float], encoder: TextEncoder) -> Haystack:
    """The pieces that begin inside `region` (two shares of the text); regions that do not overlap share no piece."""
    texts = list(_split(" ".join(without_needles(source_text).split())))
    offsets = list(accumulate((len(text) + 1 for text in texts), initial=0))
    low, high = (share * offsets[-1] for share in region)
    pieces = [text for text, offset in zip(texts, offsets, strict=False) if low <= offset < high]
    if not pieces:
        raise UserError(f"no sentence of the source text begins in its part {region[0]:g} to {region[1]:g}; widen it")
    counts = [len(ids) for ids in encoder.encode_batch([" " + text for text in pieces])]
    return Haystack(tuple(Piece(text, count) for text, count in zip(pieces, counts, strict=True)), encoder)


def _split(squeezed: str) -> Iterator[str]:
    """Sentences of a text with single blanks; long ones come in parts, so that any text has many borders."""
    for sentence in _SENTENCE_END.split(squeezed):
        if len(sentence) > _PIECE_CHARS:
            yield from textwrap.wrap(sentence, _PIECE_CHARS, break_on_hyphens=False)
        elif sentence:
            yield sentence


@functools.cache
def default_source_text() -> str:
    """English prose that every Python installation carries: the paragraphs of the language reference.

    Grammar rules, code, headings and paragraphs that were already seen are left out, emphasis marks are removed.
    About 260,000 characters; they differ between Python versions.
    """
    paragraphs: dict[str, None] = {}
    for _, topic in sorted(pydoc_data.topics.topics.items()):
        for block in re.split(r"\n\s*\n", topic):
            paragraph = _EMPHASIS.sub(r"\2", " ".join(block.split()).removeprefix("* "))
            if _is_prose(paragraph):
                paragraphs[paragraph] = None
    return "\n\n".join(paragraphs)


def _is_prose(paragraph: str) -> bool:
    return paragraph.endswith((".", ":", "!", "?")) and len(paragraph.split()) >= 6 and not _CODE.search(paragraph)


def load_source_text(path: Path | str) -> str:
    """A UTF-8 text file as it stands (only a byte order mark is dropped).

    Raises:
      UserError: The file is missing, unreadable, empty, binary or not UTF-8.
    """
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise UserError(f"file not found: {path}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if b"\0" in content:
        raise UserError(f"{path} is binary (a NUL byte at position {content.index(0)}); give a UTF-8 text file")
    try:
        text = content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        problem = f"byte {error.start}: {error.reason}"
        raise UserError(f"{path} is not UTF-8 ({problem}); convert it to UTF-8 first") from None
    if not text.strip():
        raise UserError(f"{path} is empty; give a file with text in it")
    return text
