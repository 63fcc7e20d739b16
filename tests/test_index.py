"""Documents, chunks, words and search. The oracle of search is `reference_search`, slow and obvious."""

from __future__ import annotations

import itertools
import json
import math
import os
import threading
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from statelm_jax.env import documents, highlights, postings, search, words
from statelm_jax.env.index import (
    Chunk,
    Document,
    DocumentStore,
    SearchIndex,
    SearchResult,
    chunk_document,
    split_keywords,
)
from statelm_jax.errors import ToolError

BYTE_STEPS = st.lists(st.integers(1, 6), min_size=1, max_size=5)


class ByteTokenizer:
    """Cuts the UTF-8 bytes into tokens of the given lengths, in turn: tokens may hold parts of characters."""

    def __init__(self, lengths: Sequence[int] = (1,)) -> None:
        self.lengths = lengths
        self.calls = 0

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        self.calls += 1
        char_of_byte = [i for i, char in enumerate(text) for _ in char.encode("utf-8", "surrogatepass")]
        starts, at = [], 0
        for length in itertools.cycle(self.lengths):
            if at >= len(char_of_byte):
                break
            starts.append(char_of_byte[at])
            at += length
        return np.arange(len(starts), dtype=np.int32), np.array(starts, np.int64)


def make_document(text: str, lengths: Sequence[int] = (1,)) -> Document:
    return Document.from_text(text, ByteTokenizer(lengths))


def make_index(*texts: str) -> SearchIndex:
    return SearchIndex([Chunk(i, text, i, i + 1) for i, text in enumerate(texts)])


def found_ids(index: SearchIndex, *keywords: str) -> list[int]:
    return [hit.chunk_id for hit in index.search(keywords, 100).hits]


def word_list(text: str) -> list[str]:
    found = words.find_words(text)
    return [words.fold(text[start:end]) for start, end in zip(found.starts, found.ends, strict=True)]


# --- documents and chunks ---------------------------------------------------------------------------------


TEXTS = st.text(st.sampled_from("ab. \né🪸海ก"), max_size=60)
BORDERS = st.sampled_from(["token", "sentence"])


@given(TEXTS, BYTE_STEPS, st.integers(1, 20), BORDERS)
def test_chunks_joined_at_overlap_0_are_the_document(
    text: str, lengths: list[int], size: int, border: documents.Border
) -> None:
    chunks = chunk_document(make_document(text, lengths), size, border=border)
    assert "".join(chunk.text for chunk in chunks) == text
    assert all(chunk.text for chunk in chunks)


@given(TEXTS, BYTE_STEPS, st.integers(1, 20), st.integers(0, 19), BORDERS)
@example("ab🪸", [1], 4, 3, "token")  # the overlap leaves no room for a wide character
def test_windows_get_ahead_cover_everything_and_never_split_a_character(
    text: str, lengths: list[int], size: int, overlap: int, border: documents.Border
) -> None:
    document = make_document(text, lengths)
    chunks = chunk_document(document, size, min(overlap, size - 1), border)
    assert [chunk.chunk_id for chunk in chunks] == list(range(len(chunks)))
    borders = {0, document.total_tokens, *(np.flatnonzero(np.diff(document.starts)) + 1).tolist()}
    for chunk in chunks:
        assert {chunk.start, chunk.end} <= borders
        assert chunk.text == document.slice(chunk.start, chunk.end) != ""
        one_character = not borders & set(range(chunk.start + 1, chunk.end))
        assert chunk.end - chunk.start <= size or one_character
    for before, after in itertools.pairwise(chunks):
        assert before.start < after.start <= before.end < after.end
    if chunks:
        assert (chunks[0].start, chunks[-1].end) == (0, document.total_tokens)
    else:
        assert text == ""


@pytest.mark.parametrize(
    ("tokens", "size", "overlap", "windows"),
    [
        (8, 4, 0, [(0, 4), (4, 8)]),
        (8001, 4000, 0, [(0, 4000), (4000, 6001), (6001, 8001)]),
        (8500, 4000, 0, [(0, 4000), (4000, 8000), (8000, 8500)]),
        (4000, 4000, 200, [(0, 4000)]),
        (4100, 4000, 200, [(0, 2150), (1950, 4100)]),
        (2, 100, 50, [(0, 2)]),
        (5, 10**9, 0, [(0, 5)]),
        (5, 2, 1, [(0, 2), (1, 3), (2, 4), (3, 5)]),
        (0, 100, 50, []),
    ],
)
def test_windows_stop_at_the_end_and_a_small_tail_is_shared(
    tokens: int, size: int, overlap: int, windows: list[tuple[int, int]]
) -> None:
    chunks = chunk_document(make_document("x" * tokens), size, overlap)
    assert [(chunk.start, chunk.end) for chunk in chunks] == windows


def test_chunks_end_with_a_sentence_where_one_ends_late_enough() -> None:
    text = 'One two. Three four five.\nSix "seven?" Eight. ' + "x" * 40
    parts = [chunk.text for chunk in chunk_document(make_document(text), 20, border="sentence")]
    assert parts[:3] == ["One two. Three four ", 'five.\nSix "seven?"', " Eight. " + "x" * 12]
    ends = [chunk.text for chunk in chunk_document(make_document("a b c. " * 9), 8, border="sentence")]
    assert ends[:-2] == ["a b c."] + [" a b c."] * (len(ends) - 3)


@pytest.mark.parametrize(("size", "overlap"), [(5, 5), (5, 6), (0, 0), (-1, 0), (5, -1)])
def test_sizes_that_never_get_ahead_are_refused(size: int, overlap: int) -> None:
    with pytest.raises(ToolError, match=f"got {overlap if size > 0 else size}$"):
        chunk_document(make_document("some text"), size, overlap)


def test_an_overlap_that_would_take_all_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_TABLE_TOKENS", 1_000)
    document = make_document("x" * 400)
    assert len(chunk_document(document, 100, 50)) == 7
    with pytest.raises(ToolError, match="overlap 99 is too near"):
        chunk_document(document, 100, 99)


def test_a_document_cannot_be_changed_and_a_tokenizer_that_loses_text_is_a_bug() -> None:
    document = make_document("abc")
    with pytest.raises(ValueError, match="read-only"):
        document.token_ids[0] = 9
    with pytest.raises(ValueError, match="read-only"):
        document.starts[0] = 9
    assert document.total_tokens == 3

    class Empty:
        def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
            return np.zeros(0, np.int32), np.zeros(0, np.int64)

    with pytest.raises(ValueError, match="one start for each"):
        Document.from_text("abc", Empty())


# --- the store --------------------------------------------------------------------------------------------


def test_equal_texts_share_tokens_chunks_and_index() -> None:
    tokenizer = ByteTokenizer()
    store = DocumentStore(tokenizer)
    one, two = store.get("the tide " * 20), store.get("".join(["the tide "] * 20))
    assert one is two
    assert tokenizer.calls == 1
    assert store.chunks(one, 30) is store.chunks(two, 30)
    assert store.index(one, 30) is store.index(two, 30)
    assert store.chunks(one, 30) is not store.chunks(one, 30, 5)
    assert store.index(one, 30) is not store.index(one, 31)
    assert store.chunks(one, 30) is not store.chunks(one, 30, 0, "sentence")
    assert store.index(one, 30) is not store.index(one, 30, 0, "sentence")
    with pytest.raises(ToolError):
        store.chunks(one, 5, 5)


def test_the_store_drops_the_least_recently_used_and_makes_it_again() -> None:
    tokenizer = ByteTokenizer()
    store = DocumentStore(tokenizer, max_tokens=20)
    first = store.get("a" * 10)
    store.get("b" * 10)
    assert store.get("a" * 10) is first  # and so b is the oldest
    store.get("c" * 10)
    assert store.get("a" * 10) is first
    assert tokenizer.calls == 3
    store.get("b" * 10)
    assert tokenizer.calls == 4
    assert store.get("z" * 1000).total_tokens == 1000  # larger than the bound: kept alone
    assert store.get("z" * 1000) is store.get("z" * 1000)
    assert store.get("a" * 10) is not first
    assert first.text == "a" * 10


def test_threads_get_one_and_the_same_document_and_index() -> None:
    tokenizer = ByteTokenizer()
    store = DocumentStore(tokenizer)
    found: list[object] = []
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        found.append(store.index(store.get("gull " * 500), 100))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tokenizer.calls == 1
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


# --- words ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Can't stop, e.g. at 3,141.59!", ["can't", "stop", "e.g", "at", "3,141.59"]),
        ("well-known key:value a,b 1, 2", ["well", "known", "key", "value", "a", "b", "1", "2"]),
        ("_Pequod_ foo_bar __init__ a__b ___", ["pequod", "foo_bar", "init", "a", "b"]),
        ("Ahab’s Ahab's AHAB", ["ahab", "ahab", "ahab"]),
        ("‘tis o’clock o'clock", ["tis", "o'clock", "o'clock"]),
        ("m² x\u00adray ½", ["m2", "xray", "1⁄2"]),
        ("海雾 abc海9", ["海", "雾", "abc", "海", "9"]),
        ("ｶﾞ ガ カ", ["ガ", "ガ", "カ"]),
        ("สวัสดี", ["ส", "วั", "ส", "ดี"]),
        ("e\u0301te\u0301 \u0301x", ["ete", "x"]),
        ("", []),
        ("—…! \n", []),
    ],
)
def test_words_are_found_and_folded(text: str, expected: list[str]) -> None:
    assert word_list(text) == expected


@pytest.mark.parametrize(
    "same",
    [
        ["Łódź", "ŁÓDŹ", "lodz", "Ło\u0301dz\u0301"],
        ["café", "CAFE", "cafe\u0301", "Café’s"],
        ["naïve", "naive"],
        ["Straße", "STRASSE", "strasse"],
        ["Ærø", "aero"],
        ["ΟΔΟΣ", "οδος", "οδός"],
        ["İstanbul", "ISTANBUL", "istanbul"],
        ["ﬁne", "ＦＩＮＥ", "fine"],
        ["كِتَاب", "كتاب"],
        ["ё", "Е"],
    ],
)
def test_case_accents_and_forms_of_a_word_are_one_word(same: list[str]) -> None:
    assert {words.fold(word) for word in same} == {words.fold(same[0])}
    index = make_index(*same, "other")
    for word in same:
        assert found_ids(index, word) == list(range(len(same)))


@pytest.mark.parametrize(("one", "other"), [("か", "が"), ("की", "कु"), ("ก่", "ก้"), ("gull", "gulls"), ("a", "b")])
def test_marks_that_make_another_letter_are_kept(one: str, other: str) -> None:
    assert words.fold(one) != words.fold(other)


def reference_words(text: str) -> list[tuple[int, int]]:
    """The rule of `words` read aloud, one character at a time."""

    def kind(char: str) -> str:
        category = unicodedata.category(char)
        if char in ".'’":
            return "both"
        if char in ",;":
            return "mid digit"
        if char == "·":
            return "mid letter"
        if char in "海雾กサ":
            return "spaceless"
        if category == "Pc":
            return "connect"
        return {"L": "letter", "N": "digit", "M": "extend"}.get(category[0], "other")

    bases = [i for i, char in enumerate(text) if kind(char) != "extend"]
    kinds = [kind(text[i]) for i in bases]
    ends = [*bases[1:], len(text)]

    def at(i: int) -> str:
        return kinds[i] if 0 <= i < len(kinds) else "other"

    def in_word(i: int) -> bool:
        around = {at(i - 1), at(i + 1)}
        joined = {
            "connect": around <= {"letter", "digit"},
            "both": around in ({"letter"}, {"digit"}),
            "mid letter": around == {"letter"},
            "mid digit": around == {"digit"},
        }
        return at(i) in ("letter", "digit") or joined.get(at(i), False)

    found: list[tuple[int, int]] = []
    inside = False
    for i in range(len(bases)):
        if at(i) == "spaceless":
            found.append((bases[i], ends[i]))
        elif in_word(i) and inside:
            found[-1] = found[-1][0], ends[i]
        elif in_word(i):
            found.append((bases[i], ends[i]))
        inside = in_word(i)
    return found


@given(st.text(st.sampled_from("aé1_.'’,;·- \u0301海กサ\u0e34\n")))
def test_words_lie_where_the_rule_says(text: str) -> None:
    found = words.find_words(text)
    assert list(zip(found.starts.tolist(), found.ends.tolist(), strict=True)) == reference_words(text)


# --- search against the oracle ----------------------------------------------------------------------------


def reference_occurrences(text: Sequence[str], phrase: Sequence[str], slop: int) -> list[int]:
    """Widths of all occurrences, by trying every choice of positions."""
    places = [[p for p, word in enumerate(text) if word == wanted] for wanted in phrase]
    ranges = set()
    for choice in itertools.product(*places):
        moved = [p - i for i, p in enumerate(choice)]
        if len(set(choice)) == len(choice) and max(moved) - min(moved) <= slop:
            ranges.add((min(moved), max(moved)))
    smallest = [r for r in ranges if not any(r != s and r[0] <= s[0] and s[1] <= r[1] for s in ranges)]
    return [high - low for low, high in sorted(smallest)]


def reference_search(texts: Sequence[str], keywords: Sequence[str]) -> list[tuple[float, int]]:
    """(score, chunk id), best first. Words are divided by blanks and hyphens; case is folded."""
    chunks = [text.casefold().replace("-", " ").split() for text in texts]
    mean = sum(map(len, chunks)) / len(chunks)

    def idf(word: str) -> float:
        n = sum(word in chunk for chunk in chunks)
        return math.log(1.0 + (len(chunks) - n + 0.5) / (n + 0.5))

    hits = []
    for chunk_id, chunk in enumerate(chunks):
        score = 0.0
        for keyword in keywords:
            parts = keyword.casefold().replace("-", " ").split()
            groups = [parts] if " " in keyword else [[part] for part in parts]
            widths = [reference_occurrences(chunk, group, 2) for group in groups]
            if not all(widths):
                continue
            for group, found in zip(groups, widths, strict=True):
                frequency = sum(1.0 / (1.0 + width) for width in found)
                norm = 1.2 * (1.0 - 0.75 + 0.75 * (len(chunk) / mean))
                score += sum(idf(word) for word in group) * (frequency * 2.2 / (frequency + norm))
        if score:
            hits.append((score, chunk_id))
    return sorted(hits, key=lambda hit: (-hit[0], hit[1]))


LETTERS = st.sampled_from(["ha", "Ha", "tide", "gull", "fog"])
CORPUS = st.lists(st.lists(LETTERS, max_size=9).map(" ".join), min_size=1, max_size=6).filter(any)
KEYWORDS = st.lists(LETTERS, min_size=1, max_size=4).flatmap(
    lambda parts: st.sampled_from([" ", "-"]).map(lambda s: s.join(parts))
)


@settings(max_examples=200)
@given(CORPUS, st.lists(KEYWORDS, min_size=1, max_size=3), st.booleans())
@example(["ha"], ["ha ha"], False)
@example(["ha ha ha", "tide ha"], ["ha ha", "ha-tide", "tide ha"], True)
@example(["gull tide", "tide"], ["tide gull"], False)
@example(["tide gull", "gull"], ["gull gull"], False)
def test_hits_and_scores_equal_the_oracle(texts: list[str], keywords: list[str], small_blocks: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if small_blocks:  # block borders inside the corpus and inside the starts of a phrase change nothing
            patch.setattr(postings, "_BLOCK_CHARS", 5)
            patch.setattr(postings, "_BLOCK_PLACES", 3)
        result = make_index(*texts).search(keywords, 100)
    assert [(hit.score, hit.chunk_id) for hit in result.hits] == reference_search(texts, keywords)
    assert result.total == len(result.hits)


@pytest.mark.parametrize(
    ("text", "frequency"),
    [
        ("red gull", 1.0),
        ("red sea gull", 1 / 2),
        ("gull red", 1 / 3),
        ("red old sea gull", 1 / 3),
        ("red very old sea gull", 0.0),
        ("gull sea red", 0.0),
        ("red gull red gull", 2.0),  # the swap between them holds an exact one on either side
        ("red", 0.0),
    ],
)
def test_a_phrase_may_have_gaps_and_swaps_that_count_less(text: str, frequency: float) -> None:
    found = postings.Postings([text], gap=1).match(["red", "gull"], 2)
    assert (0.0 if found is None else found.frequency_C.sum()) == pytest.approx(frequency)
    assert bool(found_ids(make_index(text), "red gull")) == (frequency > 0)


def test_a_phrase_never_reaches_into_the_next_chunk() -> None:
    assert found_ids(make_index("old red", "gull", "", "red", "gull red"), "red gull") == [4]


@given(st.text(st.sampled_from("海雾在黎明散去ภาษาไทยひカ"), min_size=1, max_size=12), st.data())
def test_any_substring_of_unspaced_text_is_found_as_a_phrase(text: str, data: st.DataObject) -> None:
    low = data.draw(st.integers(0, len(text) - 1))
    high = data.draw(st.integers(low + 1, len(text)))
    shuffled = "".join(sorted(text))
    ids = found_ids(make_index(text, shuffled), text[low:high])
    assert 0 in ids
    assert (1 in ids) == (text[low:high] in shuffled)


def test_a_word_asks_for_all_its_parts_and_a_list_for_any() -> None:
    index = make_index("known and well", "well", "known", "a well-known fact")
    assert sorted(found_ids(index, "well-known")) == [0, 3]
    assert sorted(found_ids(index, "well", "fact")) == [0, 1, 3]
    assert found_ids(index, "well known fact") == [3]


def test_ties_go_by_chunk_id_and_the_limit_cuts_but_does_not_change_the_total() -> None:
    index = make_index(*["the fog"] * 5, "fog fog")
    assert found_ids(index, "fog") == [5, 0, 1, 2, 3, 4]
    result = index.search(["fog"], 2)
    assert ([hit.chunk_id for hit in result.hits], result.total) == ([5, 0], 6)
    assert index.search(["fog"], 0) == SearchResult((), 6)
    assert index.search(["fog"], 99) == index.search(["fog"], 6)


def test_chunks_without_words_are_never_hits() -> None:
    for texts in ([], ["", "   ", "—…!"]):
        assert make_index(*texts).search(["tide"], 5) == SearchResult((), 0)
    assert found_ids(make_index("", "tide", "…"), "tide") == [1]


@pytest.mark.parametrize("keywords", [[], [""], ["?!"], [" ", ","]])
def test_a_query_without_a_word_is_one_clear_error(keywords: list[str]) -> None:
    with pytest.raises(ToolError, match="keyword is empty"):
        make_index("tide").search(keywords, 5)


def test_what_does_not_match_is_no_hit() -> None:
    index = make_index("the gull slept", "the fog lifted", "the tide")
    assert index.search(["zeppelin"], 9) == SearchResult((), 0)
    assert sorted(found_ids(index, "the")) == [0, 1, 2]
    assert all(hit.score > 0 for hit in index.search(["the"], 9).hits)


def test_common_words_never_outweigh_a_rare_one() -> None:
    index = make_index("the gull slept", "the fog lifted")
    assert found_ids(index, "gull") == [0]
    assert index.search(["gull"], 9).hits[0].score > 0
    assert found_ids(index, "the", "gull") == [0, 1]


def test_other_scripts_and_accents_are_searchable() -> None:
    index = make_index("海雾在黎明散去", "Łódź café naïve")
    assert found_ids(index, "海雾") == [0]
    assert found_ids(index, "雾海") == []
    assert found_ids(index, "cafe") == found_ids(index, "Łódź") == found_ids(index, "NAIVE") == [1]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("tide, sea  gull ,,", ("tide", "sea gull")),
        ('["tide, high", "gull"]', ("tide, high", "gull")),
        (["tide, high", " ", "gull\n"], ("tide, high", "gull")),
        ('["tide"', ('["tide"',)),
        ("[]", ("[]",)),
        (" , ,", ()),
        ("", ()),
        ([], ()),
    ],
)
def test_keywords_come_as_a_list_as_json_or_with_commas(value: str | list[str], expected: tuple[str, ...]) -> None:
    assert split_keywords(value) == expected


# --- highlights -------------------------------------------------------------------------------------------


SENTENCES = st.lists(st.sampled_from(["gull", "tide", "fog", "sea,", "—", "the\n", "x" * 150, "y" * 400]), max_size=120)


@given(SENTENCES.map(" ".join), st.sampled_from([["gull"], ["gull", "tide"], ["tide gull"], ["x" * 150, "y" * 400]]))
def test_excerpts_are_short_true_and_mark_what_matched(text: str, keywords: list[str]) -> None:
    wanted = {word for keyword in keywords for word in keyword.split()}
    for hit in make_index(text, "gull tide").search(keywords, 5).hits:
        source = " ".join((text if hit.chunk_id == 0 else "gull tide").split())
        assert 1 <= len(hit.highlights) <= 3
        at = 0
        for line in hit.highlights:
            plain = line.replace("<em>", "").replace("</em>", "")
            assert len(plain) <= highlights.EXCERPT_CHARS
            at = source.index(plain, at) + len(plain)  # in the order of the text, none over another
            marked = [part.split("</em>")[0] for part in line.split("<em>")[1:]]
            assert marked
            pieces = {piece.strip(",—") for part in marked for piece in part.split()} - {""}
            assert all(any(word.startswith(piece) for word in wanted) for piece in pieces)


def test_the_best_passages_are_shown_cut_at_words_and_in_order() -> None:
    text = f"Fog. {'sea ' * 100}A gull, a fog. {'sea ' * 100}fog {'sea ' * 100}fog fog {'sea ' * 100}end"
    (hit,) = make_index(text).search(["fog", "gull"], 1, max_highlights=2).hits
    assert len(hit.highlights) == 2
    assert "A <em>gull</em>, a <em>fog</em>." in hit.highlights[0]
    assert "<em>fog fog</em>" in hit.highlights[1]
    assert set(hit.highlights[1].replace("<em>", "").replace("</em>", "").split()) == {"sea", "fog"}
    assert len(hit.highlights[0].replace("<em>", "").replace("</em>", "")) > 170


def test_a_swapped_phrase_is_marked_as_it_stands() -> None:
    (hit,) = make_index("see the Gull red, he said").search(["red gull"], 1).hits
    assert hit.highlights == ("see the <em>Gull red</em>, he said",)
    assert make_index("海雾在黎明散去").search(["黎明"], 1).hits[0].highlights == ("海雾在<em>黎明</em>散去",)


# --- whole texts ------------------------------------------------------------------------------------------


def test_long_quotations_and_endless_repeats_are_bounded() -> None:
    noise = "the grass is green " * 3_000
    index = make_index(noise, noise + "the sea is blue")
    assert sorted(found_ids(index, noise[:4_000])) == [0, 1]
    groups = search.parse_query([noise])
    assert len(groups[0][0].terms) == search.MAX_PHRASE_WORDS
    assert found_ids(make_index("海" * 500, "雾"), "海" * 300) == [0]


def test_exact_quotations_find_their_chunk_in_a_novel() -> None:
    folder = os.environ.get("STATELM_DATA")
    if not folder:
        pytest.skip("STATELM_DATA is not set")
    text = (Path(folder) / "novels" / "frankenstein.txt").read_text(encoding="utf-8")
    store = DocumentStore(ByteTokenizer([4]))
    document = store.get(text)
    chunks = store.chunks(document, 2_000)
    index = store.index(document, 2_000)
    assert "".join(chunk.text for chunk in chunks) == text
    for chunk in chunks[:: max(1, len(chunks) // 40)]:
        quotation = " ".join(chunk.text[2_000:2_120].split()[1:-1])
        (hit, *_), _ = index.search([quotation], 3)
        assert hit.chunk_id == chunk.chunk_id
        assert hit == index.search([quotation], 3).hits[0]
        assert json.loads(json.dumps(hit.score)) == hit.score
