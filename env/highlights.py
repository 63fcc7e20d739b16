"""Excerpts of the chunks that a search found: the passages that say most, with the matched words marked.

An excerpt is at most `EXCERPT_CHARS` characters of the text, cut at words, with white space squeezed to single blanks
so that it stands on one line; runs of neighbouring matched words are marked together, `<em>so</em>`. Passages are
ranked by the summed idf of the different groups of words they show, then by the number of matched words, then by
place; the chosen ones never overlap and are given in the order of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from statelm_jax.env.postings import distinct

Ints = NDArray[np.integer]
EXCERPT_CHARS = 180


class Marked(NamedTuple):
    """The word positions (ascending, no doubles) that one group of the query matched, and what the group is worth."""

    worth: float
    positions: Ints


class Highlighter:
    """Excerpts around the marked words of one query.

    Args:
      starts_P / ends_P: Character extents of all words, chunks so far apart that no excerpt reaches two.
      marked: What the query matched in the chunks that will be asked for.
    """

    def __init__(self, starts_P: Ints, ends_P: Ints, marked: Sequence[Marked]) -> None:
        self._starts_P, self._ends_P = starts_P, ends_P
        marks_M = distinct(np.concatenate([np.zeros(0, np.int32), *(group.positions for group in marked)]))
        index_M = np.arange(len(marks_M))
        begin_M, end_M = starts_P[marks_M], ends_P[marks_M]
        # A passage begins at a mark and ends with the last mark that still fits (a huge word is cut).
        last_M = np.maximum(end_M.searchsorted(begin_M + EXCERPT_CHARS, side="right") - 1, index_M)
        worth_M = np.zeros(len(marks_M))
        for group in marked:
            begins = starts_P[group.positions]
            worth_M[begins.searchsorted(begin_M) < begins.searchsorted(begin_M[last_M], side="right")] += group.worth
        ranking = np.lexsort((index_M, index_M - last_M, -worth_M))
        self._rank_M = np.empty(len(ranking), np.int64)
        self._rank_M[ranking] = index_M
        self._marks_M, self._begin_M, self._word_end_M = marks_M, begin_M, end_M
        self._end_M = np.minimum(end_M[last_M], begin_M + EXCERPT_CHARS)

    def excerpts(self, text: str, offset: int, first: int, words: int, limit: int) -> tuple[str, ...]:
        """Up to `limit` excerpts of one chunk.

        Args:
          text: The chunk's text.
          offset: Where it begins in the count of `starts_P`.
          first: The position of its first word.
          words: How many it has.
          limit: Excerpts at most.
        """
        inside = slice(first, first + words)
        extents = _Extents(self._starts_P[inside], self._ends_P[inside], offset, len(text))
        low, high = self._marks_M.searchsorted((first, first + words)).tolist()
        begin, end, rank = self._begin_M[low:high], self._end_M[low:high], self._rank_M[low:high].copy()
        taken = len(self._rank_M)
        chosen: list[tuple[int, int]] = []
        while len(chosen) < limit and high > low:
            best = int(rank.argmin())
            if rank[best] == taken:
                break
            extent = extents.widen(int(begin[best]), int(end[best]), chosen)
            chosen.append(extent)
            rank[(begin < extent[1]) & (end > extent[0])] = taken
        return tuple(self._draw(text, offset, extent, low, high) for extent in sorted(chosen))

    def _draw(self, text: str, offset: int, extent: tuple[int, int], first: int, past: int) -> str:
        """The excerpt with its marks, which are among the marks `first` to `past`."""
        low, high = extent
        first, past = (first + self._begin_M[first:past].searchsorted(extent)).tolist()
        parts: list[str] = []
        done, previous = low, -1
        marks = (values[first:past].tolist() for values in (self._marks_M, self._begin_M, self._word_end_M))
        for mark, begin, end in zip(*marks, strict=True):
            end = min(end, high)
            if mark == previous + 1:
                parts[-1:] = text[done - offset : end - offset], "</em>"
            else:
                parts += text[done - offset : begin - offset], "<em>", text[begin - offset : end - offset], "</em>"
            done, previous = end, mark
        parts.append(text[done - offset : high - offset])
        return " ".join("".join(parts).split())


class _Extents(NamedTuple):
    """One chunk: the extents of its words, and of its text."""

    starts: Ints
    ends: Ints
    offset: int
    length: int

    def widen(self, begin: int, end: int, chosen: list[tuple[int, int]]) -> tuple[int, int]:
        """A passage with room on both sides, as long as an excerpt may be, in whole words, clear of the others."""
        left = max([self.offset, *(other_end for _, other_end in chosen if other_end <= begin)])
        right = min([self.offset + self.length, *(other_begin for other_begin, _ in chosen if other_begin >= end)])
        low = max(begin - (EXCERPT_CHARS - (end - begin)) // 2, left)
        high = min(low + EXCERPT_CHARS, right)
        low = max(high - EXCERPT_CHARS, left)
        first_whole = int(self.starts[self.starts.searchsorted(low)])
        following = int(self.ends.searchsorted(high, side="right"))  # the first word that does not fit
        if following < len(self.starts):
            high = min(high, int(self.starts[following]))  # keeps the punctuation behind the last word
        return min(first_whole, begin), max(high, end)
