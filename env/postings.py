"""Where words occur: an inverted index with positions over the chunks of one document, in flat arrays.

Words are numbered through all chunks with `MAX_SLOP + 1` empty numbers before, between and after the chunks (the axis
`P` of positions), so a position is one integer. `order_W` lists the positions of term 0, then those of term 1 and so
on (a CSR table).

Occurrences of a phrase t_0 .. t_{n-1}: give each word t_i a position p_i, no position twice. The width of the choice
is max(p_i - i) - min(p_i - i): 0 for the exact phrase, 1 with one word between, 2 for a swap of neighbours. Each range
of p_i - i that allows a choice, while no smaller range inside it does, is one occurrence. Neighbours t_i, t_{i+1} of an
occurrence are at most width + 1 positions apart, so none reaches over the empty numbers into another chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from statelm_jax.env.words import find_words, fold

Ints = NDArray[np.integer]
MAX_SLOP = 2
"""The widest occurrence that `Postings.match` can be asked for."""
_BLOCK_CHARS = 1_000_000  # texts are analysed, and phrases looked up, in blocks: bounds the scratch memory
_BLOCK_PLACES = 1 << 18
_FILTERS = 3  # so many words besides the rarest thin out the places of a phrase before all are looked at
_SHOWN_PER_CHUNK = 64


class Occurrences(NamedTuple):
    """Every occurrence of a group of words.

    Attributes:
      terms: The group's G term ids.
      slop: The widest occurrence allowed.
      starts_M: The left end of each of the M occurrences: min(p_i - i), ascending.
      frequency_C: Per chunk, the sum of 1 / (1 + width) over its occurrences.
    """

    terms: Ints
    slop: int
    starts_M: Ints
    frequency_C: NDArray[np.float64]


class Postings:
    """The words of `texts` (one per chunk).

    Attributes:
      terms: Folded word -> term id.
      term_at_P / chunk_at_P: The term and the chunk at each position; term -1 where there is none.
      starts_P / ends_P: Where each word lies, in characters from the start of the first text, texts `gap` apart. Empty
        positions lie before the chunk that follows them.
      offsets_C: Where each text begins, in the same count.
      words_C / first_C: How many words each text has, and the position of the first one.
    """

    def __init__(self, texts: Sequence[str], gap: int) -> None:
        lengths_C = np.array([len(text) for text in texts], np.int64)
        self.offsets_C = np.concatenate(([0], np.cumsum(lengths_C + gap)))[:-1]
        self.terms, term_W, starts_W, ends_W, self.words_C = _analyse(texts)
        chunk_W = np.repeat(np.arange(len(texts), dtype=np.int32), self.words_C)
        pad = MAX_SLOP + 1
        self.first_C = np.cumsum(np.append(0, self.words_C[:-1]) + pad)[: len(texts)]
        position_W = np.arange(len(term_W), dtype=np.int32) + pad * (chunk_W + 1)
        size = len(term_W) + pad * (len(texts) + 1)
        self.term_at_P = np.full(size, -1, np.int32)
        self.term_at_P[position_W] = term_W
        after = np.concatenate((self.offsets_C, np.cumsum(lengths_C + gap)[-1:]))  # what follows each run of pads
        self.chunk_at_P = np.repeat(np.arange(len(after), dtype=np.int32), np.append(self.words_C, 0) + pad)
        self.starts_P, self.ends_P = after[self.chunk_at_P] - 1, after[self.chunk_at_P] - 1
        self.starts_P[position_W] = starts_W + self.offsets_C[chunk_W]
        self.ends_P[position_W] = ends_W + self.offsets_C[chunk_W]
        by_term_W = np.argsort(term_W, kind="stable")
        self.order_W = position_W[by_term_W]
        self.first_V1 = np.concatenate(([0], np.cumsum(np.bincount(term_W, minlength=len(self.terms)))))
        self._count(term_W[by_term_W], chunk_W[by_term_W])

    def match(self, words: Sequence[str], slop: int) -> Occurrences | None:
        """All occurrences of the folded `words` together, each at most `slop` wide; None when there is none."""
        ids = np.array([self.terms.get(word, -1) for word in words], np.int32)
        if ids.min() < 0:
            return None
        if len(ids) == 1:
            return Occurrences(ids, slop, self._positions(int(ids[0])), self._counts(int(ids[0])))
        starts_M, width_M = self._phrase(ids, slop)
        if not len(starts_M):
            return None
        frequency_C = np.bincount(self.chunk_at_P[starts_M], 1.0 / (1.0 + width_M), minlength=len(self.words_C))
        return Occurrences(ids, slop, starts_M, frequency_C.astype(np.float64, copy=False))

    def matched_words(self, found: Occurrences, chunks: Ints) -> Ints:
        """The positions of the matched words in some chunks (ascending), ascending and without doubles.

        Of a phrase, the first `_SHOWN_PER_CHUNK` occurrences of each chunk are looked at.
        """
        first = found.starts_M.searchsorted(self.first_C[chunks] - MAX_SLOP)  # a swap begins before its first word
        past = found.starts_M.searchsorted(self.first_C[chunks] + self.words_C[chunks])
        if len(found.terms) > 1:
            past = np.minimum(past, first + _SHOWN_PER_CHUNK)
        rows = [found.starts_M[i:j] for i, j in zip(first.tolist(), past.tolist(), strict=True)]
        starts = np.concatenate([np.zeros(0, np.int32), *rows])
        if len(found.terms) == 1:
            return starts
        moves_GM = _first_moves(self._standing(starts, found.terms, range(found.slop + 1)), found.terms)
        return distinct((_places(starts, len(found.terms)) + moves_GM).ravel())

    def chunks_with(self, term: int) -> int:
        """In how many chunks a term occurs."""
        return int(self._pairs_V1[term + 1] - self._pairs_V1[term])

    def _counts(self, term: int) -> NDArray[np.float64]:
        """How often a term occurs in each chunk."""
        pairs = slice(self._pairs_V1[term], self._pairs_V1[term + 1])
        counts_C = np.zeros(len(self.words_C))
        counts_C[self._pair_chunk[pairs]] = self._pair_count[pairs]
        return counts_C

    def _count(self, term_W: Ints, chunk_W: Ints) -> None:
        """Tabulate the (term, chunk) pairs that occur, from words sorted by term and then by chunk."""
        new_W = np.ones(len(term_W), bool)
        new_W[1:] = (term_W[1:] != term_W[:-1]) | (chunk_W[1:] != chunk_W[:-1])
        first = np.flatnonzero(new_W)
        self._pair_chunk = chunk_W[first]
        self._pair_count = np.diff(first, append=len(term_W)).astype(np.int32)
        self._pairs_V1 = np.concatenate(([0], np.cumsum(np.bincount(term_W[first], minlength=len(self.terms)))))

    def _positions(self, term: int) -> Ints:
        return self.order_W[self.first_V1[term] : self.first_V1[term + 1]]

    def _phrase(self, ids: Ints, slop: int) -> tuple[Ints, Ints]:
        """(left end, width) of every occurrence.

        1. Begin at the rarest word: its positions say where the phrase would start if it were exact.
        2. Keep those that have the next rarest words near their places.
        3. For each left end that such a start allows, move every word to its first position: that gives the width.
        4. Drop ranges that contain a smaller one: the next left end reaches no further to the right.
        """
        rarest, *others = np.argsort(np.diff(self.first_V1)[ids], kind="stable").tolist()
        starts = self._positions(int(ids[rarest])) - np.int32(rarest)
        for i in others[:_FILTERS]:
            standing = self._standing(starts + np.int32(i), ids[i : i + 1], range(-slop, slop + 1))
            starts = starts[np.logical_or.reduce(standing)[0]]
        lefts, widths = [], []
        step = max(1, _BLOCK_PLACES // len(ids))
        for low in range(0, len(starts), step):
            block = starts[low : low + step]
            standing = self._standing(block, ids, range(-slop, slop + 1))
            for first in range(slop + 1):
                width = _first_moves(standing[first : first + slop + 1], ids).max(axis=0)
                lefts.append(block[width <= slop] - np.int32(slop - first))
                widths.append(width[width <= slop])
        return _smallest(_join(lefts, np.int32), _join(widths, np.int8))

    def _standing(self, starts: Ints, ids: Ints, moves: range) -> list[NDArray[np.bool_]]:
        """For each move (G, M): whether the words stand that far from their places. Beyond the ends nothing does."""
        window = _places(starts + np.int32(moves.start), len(ids) + len(moves) - 1)
        terms = self.term_at_P.take(window, mode="clip")
        return [terms[k : k + len(ids)] == ids[:, None] for k in range(len(moves))]


def _places(starts: Ints, words: int) -> Ints:
    """(G, M): where each word of a phrase stands when it is exact."""
    return starts + np.arange(words, dtype=np.int32)[:, None]


def _first_moves(standing: list[NDArray[np.bool_]], ids: Ints) -> NDArray[np.int8]:
    """(G, M): the first move, of those tabulated in `standing`, at which each word is found; their number if none.

    A word that occurs twice in the phrase takes positions in order (swapping two of them gains nothing).
    """
    none = len(standing)
    moves_GM = np.full(standing[0].shape, none, np.int8)
    for move in range(none - 1, -1, -1):
        np.copyto(moves_GM, np.int8(move), where=standing[move])
    last: dict[int, int] = {}
    for i, term in enumerate(ids.tolist()):
        if term in last:
            apart = i - last[term]
            moves_GM[i] = none
            for move in range(none - 1, -1, -1):
                free = moves_GM[last[term]] < move + apart
                np.copyto(moves_GM[i], np.int8(move), where=standing[move][i] & free)
        last[term] = i
    return moves_GM


def _smallest(lefts: Ints, widths: Ints) -> tuple[Ints, Ints]:
    """The ranges (left end, width), sorted, without doubles and without those that contain another."""
    order = np.argsort(lefts, kind="stable")
    lefts, widths = lefts[order], widths[order]
    keep = np.ones(len(lefts), bool)
    keep[1:] = lefts[1:] != lefts[:-1]
    lefts, widths = lefts[keep], widths[keep]
    smallest = np.ones(len(lefts), bool)
    smallest[:-1] = (np.diff(lefts) > 1) | (widths[1:] >= widths[:-1])
    return lefts[smallest], widths[smallest]


def distinct(values: Ints) -> Ints:
    """Sorted, without doubles (`np.unique` hashes, which is far slower on nearly sorted values)."""
    values = np.sort(values)
    return values[np.concatenate(([True], values[1:] != values[:-1]))] if len(values) else values


class _TermIds(dict[str, int]):
    """Word as written -> term id, given out on first sight of its folded form."""

    def __init__(self) -> None:
        super().__init__()
        self.terms: dict[str, int] = {}
        self.blocks: list[NDArray[np.int32]] = []

    def __missing__(self, word: str) -> int:
        self[word] = term = self.terms.setdefault(fold(word), len(self.terms))
        return term

    def add(self, text: str, starts: Ints, ends: Ints) -> None:
        written = (text[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True))
        self.blocks.append(np.fromiter(map(self.__getitem__, written), np.int32, len(starts)))


def _analyse(texts: Sequence[str]) -> tuple[dict[str, int], Ints, Ints, Ints, Ints]:
    """(term ids by name, term, start and end of each word within its text, words per text), block by block."""
    ids = _TermIds()
    starts, ends, counts = [], [], []
    for block in _blocks(texts):
        joined = "\n".join(block)
        words = find_words(joined)
        ids.add(joined, words.starts, words.ends)
        begin_K = np.cumsum([0] + [len(text) + 1 for text in block[:-1]])
        text_W = np.searchsorted(begin_K, words.starts, side="right") - 1
        starts.append(words.starts - begin_K[text_W])
        ends.append(words.ends - begin_K[text_W])
        counts.append(np.bincount(text_W, minlength=len(block)))
    return ids.terms, _join(ids.blocks, np.int32), _join(starts), _join(ends), _join(counts)


def _blocks(texts: Sequence[str]) -> Iterator[list[str]]:
    block: list[str] = []
    size = 0
    for text in texts:
        if block and size + len(text) > _BLOCK_CHARS:
            yield block
            block, size = [], 0
        block.append(text)
        size += len(text)
    if block:
        yield block


def _join(parts: Sequence[Ints], dtype: type = np.int64) -> Ints:
    return np.concatenate([*parts, np.zeros(0, dtype)])
