"""Needle tasks: exact lengths, same bytes, keys and values and text that evaluation never shares with training."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statelm_jax.config import validate
from statelm_jax.env import haystack, needles
from statelm_jax.env.tasks import (
    NeedleConfig,
    TextEncoder,
    default_source_text,
    find_needles,
    load_source_text,
    needle_tasks,
    question_key,
    read_tasks,
    write_tasks,
)
from statelm_jax.errors import UserError
from statelm_jax.tokenizer import TINY_FOLDER, Tokenizer
from statelm_jax.types import Task, TokenIds

NUMBERED = " ".join(f"This is sentence {index} of the text." for index in range(400))


class ByteEncoder:
    """One token per UTF-8 byte: counts of pieces add up exactly."""

    def encode(self, text: str) -> TokenIds:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        return [self.encode(text) for text in texts]


class PairEncoder(ByteEncoder):
    """One token per two bytes of the whole text: counts of pieces do not add up."""

    def encode(self, text: str) -> TokenIds:
        return super().encode(text + " " * (len(text.encode()) % 2))[::2]


ENCODERS: dict[str, TextEncoder] = {
    "bytes": ByteEncoder(),
    "pairs": PairEncoder(),
    "tiny": Tokenizer.load(TINY_FOLDER),
}
TEXTS = {
    "default": default_source_text(),
    "short": "One day it rained. Then it did not! Who knows why?",
    "no sentences": "alpha beta gamma delta " * 300,
    "no blanks": "海の底に古い鐘がある。" * 60,  # three tokens a character, so cutting alone cannot meet every length
}


def make(source: str = NUMBERED, encoder: str = "bytes", n: int = 8, seed: int = 0, **fields) -> list[Task]:
    config = NeedleConfig(**{"document_tokens": 600, **fields})
    return list(needle_tasks(config, source, ENCODERS[encoder], n, seed))


@settings(deadline=None, max_examples=150)
@given(
    encoder_and_text=st.sampled_from([pair for pair in product(ENCODERS, TEXTS) if pair != ("pairs", "no blanks")]),
    tokens=st.integers(450, 3000),
    distractors=st.integers(0, 4),
    kind=st.sampled_from(["number", "word", "uuid"]),
    depth=st.none() | st.floats(0, 1),
    seed=st.integers(0, 10**9),
)
def test_documents_have_exactly_the_asked_number_of_tokens(encoder_and_text, tokens, distractors, kind, depth, seed):
    encoder, text = encoder_and_text
    fields = {"document_tokens": tokens, "distractors": distractors, "value_kinds": (kind,), "depth": depth}
    (task,) = make(TEXTS[text], encoder, 1, seed, **fields)
    assert len(ENCODERS[encoder].encode(task.document)) == tokens


@pytest.mark.parametrize("tokens", [16_384, 65_536])
def test_documents_far_longer_than_the_source_region_are_exact_too(tokens):
    (task,) = make(default_source_text(), "tiny", 1, document_tokens=tokens, region=(0.9, 1.0))
    assert len(ENCODERS["tiny"].encode(task.document)) == tokens


@settings(deadline=None, max_examples=60)
@given(
    distractors=st.integers(0, 5),
    kinds=st.sets(st.sampled_from(["number", "word", "uuid"]), min_size=1),
    split=st.sampled_from(["train", "eval"]),
    absent=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 10**9),
)
def test_the_asked_key_leads_to_the_answer_and_to_nothing_else(distractors, kinds, split, absent, seed):
    fields = {"distractors": distractors, "value_kinds": tuple(sorted(kinds)), "split": split, "absent": absent}
    for task in make(n=2, seed=seed, document_tokens=1_000, **fields):
        found = find_needles(task.document)
        values = [value for key, value in found if key == question_key(task.question)]
        assert tuple(values) == task.answers
        assert len(found) == distractors + 1 == len({key for key, _ in found})
        assert [value for _, value in found].count(task.facts["value"]) == len(task.answers)
        assert task.facts["distractors"] == len(found) - len(task.answers)
        assert task.facts["kind"] in kinds


def test_the_share_of_absent_keys_is_the_configured_one():
    share = np.mean([not task.answers for task in make(n=400, absent=0.25)])
    assert share == pytest.approx(0.25, abs=0.07)


def test_a_task_depends_on_its_seed_and_number_alone():
    assert make(n=3) == make(n=9)[:3]
    assert make(n=3) != make(n=3, seed=1)
    assert (
        len({task.task_id for seed in (0, 1) for depth in (None, 0.5) for task in make(seed=seed, depth=depth)}) == 32
    )


SAME_BYTES = """
import hashlib, numpy
from statelm_jax.env.tasks import NeedleConfig, default_source_text, needle_tasks

class Encoder:
    encode = staticmethod(lambda text: numpy.frombuffer(text.encode(), numpy.uint8).astype(numpy.int32))
    encode_batch = staticmethod(lambda texts: [Encoder.encode(text) for text in texts])

config = NeedleConfig(document_tokens=900, value_kinds=("number", "word", "uuid"), absent=0.3)
tasks = list(needle_tasks(config, default_source_text(), Encoder(), 20, 7))
digest = hashlib.sha256(repr(tasks).encode()).hexdigest()
"""


def test_the_same_seed_gives_the_same_bytes_in_every_process():
    here: dict[str, str] = {}
    exec(SAME_BYTES, here)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SAME_BYTES + "print(digest)"],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for hash_seed in ("1", "2")
    ]
    assert [process.communicate()[0].strip() for process in processes] == [here["digest"]] * 2


@pytest.mark.parametrize("kind", ["number", "word", "uuid"])
def test_evaluation_shares_no_key_word_and_no_value_with_training(kind):
    seen: dict[str, tuple[set[str], set[str]]] = {}
    for split in ("train", "eval"):
        tasks = make(n=300, split=split, value_kinds=(kind,), number_digits=3, document_tokens=400)
        found = [pair for task in tasks for pair in find_needles(task.document)]
        seen[split] = ({word for key, _ in found for word in key.split()}, {value for _, value in found})
    assert len(seen["eval"][0]) > 60
    assert len(seen["eval"][1]) > 20
    assert not seen["train"][0] & seen["eval"][0]
    assert not seen["train"][1] & seen["eval"][1]


def test_the_word_lists_are_plain_distinct_and_disjoint():
    words = needles.ADJECTIVES + needles.NOUNS + needles.VALUE_WORDS
    assert len(set(words)) == len(words)
    assert all(re.fullmatch("[a-z]{2,10}", word) for word in words)
    assert min(len(needles.ADJECTIVES), len(needles.NOUNS)) >= 160


def test_numbers_have_the_configured_digits_and_no_leading_zero():
    for digits in (2, 5, 7):
        values = [task.facts["value"] for task in make(number_digits=digits, document_tokens=400)]
        assert all(re.fullmatch(rf"[1-9][0-9]{{{digits - 1}}}", value) for value in values)


def test_regions_share_no_sentence():
    def sentences(region: tuple[float, float]) -> set[int]:
        found = set()
        for task in make(n=20, document_tokens=4_000, distractors=0, region=region):
            found |= {int(number) for number in re.findall(r"sentence (\d+) of the text", task.document)}
        return found

    train, evaluation = sentences((0.0, 0.8)), sentences((0.8, 1.0))
    assert train
    assert evaluation
    assert max(train) < min(evaluation)


@pytest.mark.parametrize("encoder", ["bytes", "tiny"])
@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0, None])
def test_the_needle_stands_at_its_depth_and_the_depth_told_is_the_one_reached(encoder, depth):
    for task in make(default_source_text(), encoder, 6, document_tokens=4_000, depth=depth):
        needle = needles.Needle(kind="number", key=task.facts["key"], value=task.facts["value"]).sentence
        before, after = task.document.split(needle)
        count = len(ENCODERS[encoder].encode(before.rstrip()))
        others = 4_000 - len(ENCODERS[encoder].encode(" " + needle))
        assert task.facts["depth"] == pytest.approx(count / others, abs=1e-4)
        if depth in (0.0, 1.0):
            assert (before if depth == 0.0 else after) == ""
        elif depth is not None:
            assert abs(count - depth * others) <= 240 / 2


def test_uniform_depths_reach_all_parts_of_the_document():
    depths = [task.facts["depth"] for task in make(n=200, document_tokens=3_000)]
    assert np.histogram(depths, bins=5, range=(0, 1))[0].min() >= 20


def test_needles_stand_at_sentence_borders():
    for task in make(n=20, document_tokens=2_000):
        for part in re.split(r"The secret number of the [a-z]+ [a-z]+ is \d+\.", task.document)[:-2]:
            assert not part.strip() or part.strip().endswith("text.")


def test_needles_that_the_source_text_already_holds_are_taken_out():
    source = NUMBERED.replace("sentence 7 of", "sentence 7. The secret number of the\nold mill is 7. Now of")
    source *= 2
    assert len(find_needles(source)) == 2
    for task in make(source, n=20, distractors=0, document_tokens=4_000):
        assert find_needles(task.document) == [(task.facts["key"], task.facts["value"])]


def test_needles_are_found_in_order_across_line_ends_and_only_when_whole():
    text = (
        "X the secret word of the red fox\nis\telm. The secret\n  number of the dry\nwell is 12.The secret code of the "
        "big bee is a-1. The secret number of the The secret number of the old oak is 3. The secret number of the sea"
    )
    assert find_needles(text) == [("red fox", "elm"), ("dry well", "12"), ("big bee", "a-1"), ("old oak", "3")]


@pytest.mark.parametrize(
    ("question", "key"),
    [
        ("What is the secret number of the crimson lantern?", "crimson lantern"),
        ("  what's the  secret code of the\tcrimson lantern ", "crimson lantern"),
        ("The secret word of the sea?", "sea"),
        ("What is the secret number?", None),
        ("What is the secret number of the crimson lantern? And why?", None),
        ("Who rows the boat?", None),
        ("", None),
    ],
)
def test_the_key_of_a_needle_question_is_read_and_no_other_question_has_one(question, key):
    assert question_key(question) == key


@given(st.text(max_size=200))
def test_reading_needles_and_questions_never_raises(text):
    find_needles(text)
    question_key(text)
    assert find_needles(needles.without_needles(text + " The secret word of the sea is elm.")) == []


def test_needles_that_do_not_fit_are_refused_with_the_numbers():
    with pytest.raises(UserError, match=r"needles of \d+ tokens do not fit into a document of 100"):
        make(document_tokens=100)


@pytest.mark.parametrize(("source", "region"), [("", (0.0, 1.0)), (" \n ", (0.0, 1.0)), ("One sentence.", (0.5, 1.0))])
def test_a_source_region_without_text_is_refused_before_the_first_task(source, region):
    with pytest.raises(UserError, match="no sentence of the source text"):
        needle_tasks(NeedleConfig(document_tokens=600, region=region), source, ENCODERS["bytes"], 1, 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"region": [0.5, 0.5]}, "region must be"),
        ({"depth": 1.5}, "^test: depth: "),
        ({"value_kinds": []}, "^test: value_kinds: "),
        ({"value_kinds": ["colour"]}, r"^test: value_kinds.0: "),
        ({"distractor": 3}, "did you mean 'distractors'"),
        ({"distractors": 10_000}, "^test: distractors: "),
    ],
)
def test_a_wrong_configuration_is_refused_by_the_name_of_its_key(fields, message):
    with pytest.raises(UserError, match=message):
        validate(NeedleConfig, {"document_tokens": 600, **fields}, "test")


def test_the_largest_number_of_distractors_works_on_both_sides():
    for split in ("train", "eval"):
        (task,) = make(n=1, distractors=500, document_tokens=40_000, number_digits=2, split=split)
        assert len(find_needles(task.document)) == 501


def test_the_default_text_is_prose_without_repetition():
    paragraphs = default_source_text().split("\n\n")
    assert len(default_source_text()) > 200_000
    assert len(set(paragraphs)) == len(paragraphs)
    assert not re.search(r"::=|>>>|\*{4}|={4}", default_source_text())
    assert find_needles(default_source_text()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "file not found: .*book.txt$"),
        (b"", "book.txt is empty"),
        (b"\xef\xbb\xbf \r\n\t", "book.txt is empty"),
        (b"PK\x03\x04\x00\x00", r"book.txt is binary \(a NUL byte at position 4\)"),
        ("été".encode("latin-1"), r"book.txt is not UTF-8 \(byte 0: "),
        (b"ok \xc3", r"book.txt is not UTF-8 \(byte 3: "),
    ],
)
def test_a_text_file_that_cannot_be_read_is_named_in_one_line(tmp_path, content, message):
    path = tmp_path / "book.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        load_source_text(path)
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_text_file(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        load_source_text(tmp_path)


def test_a_text_file_comes_back_as_it_stands(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(b"\xef\xbb\xbfa\r\n b\xc2\xa0\xe2\x80\xa8 \r")
    assert load_source_text(path) == "a\r\n b\xa0\u2028 \r"


texts = st.text(max_size=30)
tasks_strategy = st.lists(
    st.builds(
        Task,
        task_id=st.text(min_size=1, max_size=8),
        question=texts,
        document=texts,
        answers=st.lists(texts, max_size=2).map(tuple),
        options=st.lists(texts, max_size=2).map(tuple),
        facts=st.dictionaries(texts, st.none() | st.integers(-(2**60), 2**60) | texts | st.floats(0, 1), max_size=2),
    ),
    unique_by=lambda task: task.task_id,
    min_size=1,
    max_size=3,
)


@settings(deadline=None)
@given(tasks=tasks_strategy)
def test_tasks_come_back_from_a_file_unchanged(tmp_path_factory, tasks):
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    assert write_tasks(path, tasks) == len(tasks)
    assert read_tasks(path) == tuple(tasks)


@pytest.fixture
def lines(tmp_path) -> list[str]:
    write_tasks(tmp_path / "good.jsonl", make(n=3))
    return (tmp_path / "good.jsonl").read_text().splitlines()


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (2, lambda line: "", "line 2: "),
        (3, lambda line: line[: len(line) // 2], "line 3: Invalid JSON"),
        (2, lambda line: line.replace("This is", "This\x01is", 1), "line 2: Invalid JSON"),
        (1, lambda line: line.replace('"schema_version":1', '"schema_version":2'), "line 1: schema_version: "),
        (1, lambda line: line.replace('"schema_version":1,', ""), "line 1: schema_version: "),
        (2, lambda line: line.replace('"answers":', '"answer":'), "line 2: answers: "),
        (2, lambda line: re.sub(r'"answers":\[("\d+")\]', r'"answers":\1', line), "line 2: answers: "),
        (2, lambda line: re.sub(r'"answers":\["(\d+)"\]', r'"answers":[\1]', line), r"line 2: answers.0: "),
        (2, lambda line: "[" * 100_000, "line 2: Invalid JSON"),
        (3, lambda line: line.replace("-0002", "-0000"), "line 3: task_id .* used before"),
    ],
)
def test_a_malformed_line_is_named_by_its_number(tmp_path, lines, number, change, message):
    changed = change(lines[number - 1])
    assert changed != lines[number - 1]
    lines[number - 1] = changed
    (tmp_path / "bad.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=f"bad.jsonl, {message}") as caught:
        read_tasks(tmp_path / "bad.jsonl")
    assert "\n" not in str(caught.value)


def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "tasks.jsonl"
    write_tasks(path, make(n=2))
    before = path.read_bytes()

    def broken() -> Iterator[Task]:
        yield from make(n=1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tasks(path, broken())
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["tasks.jsonl"]


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(UserError, match=r"cannot write .*missing"):
        write_tasks(tmp_path / "missing" / "tasks.jsonl", [])


def test_an_encoder_that_can_never_meet_the_length_is_refused_and_does_not_hang():
    class Even(ByteEncoder):
        def encode(self, text: str) -> TokenIds:
            return super().encode(text).repeat(2)

    with pytest.raises(UserError, match="no document of exactly 601 tokens"):
        list(needle_tasks(NeedleConfig(document_tokens=601, distractors=0), NUMBERED, Even(), 1, 0))


def test_pieces_of_a_haystack_are_short_so_that_any_text_has_many_borders():
    source = TEXTS["no sentences"] + "x" * 3_000
    pieces = haystack.haystack_of(source, (0.0, 1.0), ENCODERS["bytes"]).pieces
    assert max(len(piece.text) for piece in pieces) <= 240
    assert "".join(piece.text for piece in pieces).replace(" ", "") == source.replace(" ", "")
