"""Search in one document: BM25 over its chunks, with phrases, in process and deterministic.

What a query means (upstream's engine, restated): keywords are OR-ed and their scores add. A keyword with a blank in
it is a phrase whose words may be up to `PHRASE_SLOP` moves from their places, so that two neighbours may swap; any
other keyword asks for all its words anywhere in the chunk (`well-known` needs both). Text written without blanks
counts as one word, matched as an exact substring. Of a long quotation the first `MAX_PHRASE_WORDS` words are looked
for. What a word is and when two are the same says `words`.

Life of a query:

1. `parse_query` turns each keyword into groups of words: one group for a phrase, one per word otherwise.
2. `Postings.match` finds where a group occurs: positions per occurrence, frequency per chunk.
3. `SearchIndex._score` gives each chunk that matches a keyword its BM25 score; no other chunk is ever a hit.
4. The best chunks, ties by chunk id, get highlights (`highlights`).

An occurrence of a phrase that is w moves wide counts 1 / (1 + w) towards its frequency, and a phrase's idf is the sum
of its words' (both as in Lucene; `postings` defines width).

Why not tantivy, which was tried first (0.27, the same words handed over ready-made): it counts a swapped or gapped
phrase as much as an exact one, lets one `ha` match the phrase `ha ha` (63 chunks of two million tokens of novels
instead of 24), and rounds chunk lengths to one byte, so neither hits nor scores are the ones defined here. It builds
as fast (2.0 s of CPU for 1.5 million words, both) and answers 3 to 10 times faster, a tenth of a millisecond for a
word; the milliseconds here are nothing beside a model's turn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from statelm_jax.env.documents import Chunk
from statelm_jax.env.highlights import EXCERPT_CHARS, Highlighter, Marked
from statelm_jax.env.postings import MAX_SLOP, Occurrences, Postings
from statelm_jax.env.words import find_words, fold
from statelm_jax.errors import ToolError

K1 = 1.2
B = 0.75
PHRASE_SLOP = MAX_SLOP
MAX_PHRASE_WORDS = 64
MAX_HIGHLIGHTS = 3


@dataclass(frozen=True, slots=True)
class Hit:
    """A chunk that matches.

    Attributes:
      chunk_id: Which chunk.
      score: BM25, always above 0. Comparable within one query of one document only.
      highlights: Short excerpts, in the order of the text, with the matched words between <em> and </em>.
    """

    chunk_id: int
    score: float
    highlights: tuple[str, ...]


class SearchResult(NamedTuple):
    """The best hits, best first, and how many chunks matched in all."""

    hits: tuple[Hit, ...]
    total: int


class SearchBackend(Protocol):
    """Searches the chunks of one document. `SearchIndex` is the built-in one; an outside engine can be another."""

    def search(self, keywords: Sequence[str], limit: int, max_highlights: int = MAX_HIGHLIGHTS) -> SearchResult:
        """See `SearchIndex.search`."""
        ...


class Group(NamedTuple):
    """Folded words that must occur together, each at most `slop` moves from its place in the phrase."""

    terms: tuple[str, ...]
    slop: int


def split_keywords(value: str | Sequence[str]) -> tuple[str, ...]:
    """The keywords of a tool argument: a list, a list written as JSON, or text with commas between keywords.

    Blanks around a keyword and empty keywords are dropped. In the comma form a comma always separates; a keyword with
    a comma in it needs the list form.
    """
    parts: Iterable[object] = (_json_list(value) or value.split(",")) if isinstance(value, str) else value
    return tuple(keyword for keyword in (" ".join(str(part).split()) for part in parts) if keyword)


def parse_query(keywords: Sequence[str]) -> tuple[tuple[Group, ...], ...]:
    """Each keyword as the groups that must all occur in a chunk; keywords without a word are left out."""
    parsed = (_parse_keyword(keyword) for keyword in keywords)
    return tuple(groups for groups in parsed if groups)


class SearchIndex:
    """A private index of one document's chunks. Immutable after construction, safe to share between threads.

    Takes about 35 bytes per word besides the chunks. The length of a chunk is its number of words; all statistics are
    those of this document alone.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = tuple(chunks)
        self._postings = Postings([chunk.text for chunk in self._chunks], gap=EXCERPT_CHARS + 1)
        self._chunk_ids_C = np.array([chunk.chunk_id for chunk in self._chunks], np.int64)
        words_C = self._postings.words_C.astype(np.float64)
        mean = (float(words_C.sum()) or 1.0) / max(len(words_C), 1)
        self._norm_C = K1 * (1.0 - B + B * (words_C / mean))

    def search(self, keywords: Sequence[str], limit: int, max_highlights: int = MAX_HIGHLIGHTS) -> SearchResult:
        """The chunks that match any keyword, by score, ties by chunk id.

        Args:
          keywords: See the head of this module for what one means.
          limit: Hits returned at most; more than there are chunks is no error.
          max_highlights: Excerpts per hit at most.

        Raises:
          ToolError: No keyword holds a word.
        """
        query = parse_query(keywords)
        if not query:
            raise ToolError("keyword is empty: give at least one word to search for")
        score_C, matches = self._score(query)
        matched = np.flatnonzero(score_C)
        best = matched[np.lexsort((self._chunk_ids_C[matched], -score_C[matched]))][: max(limit, 0)]
        excerpts = self._excerpts(best, matches, max_highlights)
        hits = (
            Hit(int(self._chunk_ids_C[chunk]), float(score_C[chunk]), lines)
            for chunk, lines in zip(best, excerpts, strict=True)
        )
        return SearchResult(tuple(hits), len(matched))

    def _score(self, query: Iterable[tuple[Group, ...]]) -> tuple[NDArray[np.float64], list[_Match]]:
        """BM25 of every chunk (0 where nothing matches), and the matches that made it."""
        total_C = np.zeros(len(self._chunks))
        matches: list[_Match] = []
        for groups in query:
            found = [self._postings.match(*group) for group in groups]
            whole = [occurrences for occurrences in found if occurrences is not None]
            if len(whole) < len(found):
                continue
            all_C = np.logical_and.reduce([occurrences.frequency_C > 0 for occurrences in whole])
            for occurrences in whole:
                idf = sum(self._idf(term) for term in occurrences.terms.tolist())
                frequency_C = np.where(all_C, occurrences.frequency_C, 0.0)
                total_C += idf * (frequency_C * (K1 + 1.0) / (frequency_C + self._norm_C))
                matches.append(_Match(occurrences, idf, all_C))
        return total_C, matches

    def _idf(self, term: int) -> float:
        """Lucene's idf, positive however common the term is."""
        holding = self._postings.chunks_with(term)
        return math.log(1.0 + (len(self._chunks) - holding + 0.5) / (holding + 0.5))

    def _excerpts(self, best: NDArray[np.integer], matches: list[_Match], limit: int) -> list[tuple[str, ...]]:
        if limit < 1:
            return [()] * len(best)
        postings = self._postings
        marked: list[Marked] = []
        for match in matches:
            chunks = np.sort(best[match.where_C[best]])
            marked.append(Marked(match.idf, postings.matched_words(match.found, chunks)))
        highlighter = Highlighter(postings.starts_P, postings.ends_P, marked)
        places = (postings.offsets_C[best], postings.first_C[best], postings.words_C[best])
        return [
            highlighter.excerpts(self._chunks[chunk].text, offset, first, words, limit)
            for chunk, offset, first, words in zip(best.tolist(), *(place.tolist() for place in places), strict=True)
        ]


class _Match(NamedTuple):
    """Where one group of a keyword occurs, its idf, and the chunks in which the whole keyword matches."""

    found: Occurrences
    idf: float
    where_C: NDArray[np.bool_]


def _parse_keyword(keyword: str) -> tuple[Group, ...]:
    words = find_words(keyword)
    terms = [fold(keyword[start:end]) for start, end in zip(words.starts, words.ends, strict=True)]
    if not terms:
        return ()
    if len(keyword.split()) > 1:
        return (Group(tuple(terms[:MAX_PHRASE_WORDS]), PHRASE_SLOP),)
    # Characters of one unspaced run stay together: each that touches the one before it joins its group.
    runs: list[list[str]] = []
    for i, term in enumerate(terms):
        if i and words.spaceless[i] and words.spaceless[i - 1] and words.starts[i] == words.ends[i - 1]:
            runs[-1].append(term)
        else:
            runs.append([term])
    return tuple(Group(tuple(run[:MAX_PHRASE_WORDS]), 0) for run in runs)


def _json_list(text: str) -> list[object] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, list) else None
