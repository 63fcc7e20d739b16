"""Scoring: only a right finish answer earns a reward, whatever form it and the accepted answers take."""

from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from statelm_jax.env.rewards import (
    NOT_FOUND,
    NOT_FOUND_FORMS,
    gold_texts,
    normalise,
    parse_choice,
    reward,
    same_answer,
    score_answer,
    task_problem,
)
from statelm_jax.types import StopReason, Task, Trajectory, TurnRecord

WEATHER = ("Fog", "Rain", "Fog", "Sun")
words = st.text(string.ascii_letters + string.digits + " é海", min_size=1).filter(str.strip)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def episode(answer: str | None, stop: StopReason = StopReason.FINISHED, shown: str = "") -> Trajectory:
    turn = TurnRecord(
        turn=1,
        prompt_tokens=10,
        tool="readChunk",
        arguments={"chunk_id": 0},
        thought=shown,
        result=shown,
        error=False,
        deleted=(),
        freed_tokens=0,
        notes=(("gold", shown),),
        tokens_left=10,
        cached_tokens=0,
        prefilled_tokens=10,
    )
    return Trajectory(
        task_id="t",
        question="Which year?",
        answers=("1812",),
        snapshots=(),
        turns=(turn,),
        answer=answer,
        reward=None,
        stop=stop,
    )


def task(*answers: str, options: tuple[str, ...] = ()) -> Task:
    return Task(task_id="t", question="Which year?", document="It was 1812.", answers=answers, options=options)


@pytest.mark.parametrize(
    ("answer", "stop", "value"),
    [
        ("1812", StopReason.FINISHED, 1.0),
        ("1813", StopReason.FINISHED, -0.5),
        ("", StopReason.FINISHED, -0.5),
        (None, StopReason.FINISHED, -1.0),
        (None, StopReason.MAX_TURNS, -1.0),
        ("1812", StopReason.CONTEXT_OVERFLOW, -1.0),
    ],
)
def test_an_episode_is_worth_one_minus_a_half_or_minus_one(answer, stop, value):
    assert reward(episode(answer, stop), task("1812")) == value


@pytest.mark.parametrize("stop", list(StopReason))
def test_an_answer_that_stands_in_texts_and_was_never_given_earns_nothing(stop):
    assert reward(episode(None, stop, shown="the gold is 1812"), task("1812")) == -1.0
    assert reward(episode("dunno", stop, shown="1812"), task("1812")) < 0


@pytest.mark.parametrize("answer", ["not found", "Not found.", '"NOT  FOUND"', "unanswerable", "Not in the document."])
def test_an_unanswerable_task_wants_a_not_found(answer):
    assert score_answer(answer, ())
    assert score_answer(answer, [], ("Fog", "Rain"))
    assert not score_answer(answer, ("1812",))


@pytest.mark.parametrize("answer", ["1812", "", None, "A", "It was not found.", "found", [], "()"])
def test_nothing_else_is_right_for_an_unanswerable_task(answer):
    assert not score_answer(answer, ())


def test_the_not_found_forms_are_reachable():
    assert NOT_FOUND in NOT_FOUND_FORMS
    assert all(normalise(form) == form for form in NOT_FOUND_FORMS)


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("123", "123", True),
        ("1234", "123", False),
        ("0123", "123", False),
        ("x123x", "123", False),
        ("12 3", "123", False),
        ("1,234", "1234", True),
        ("12,34", "1234", False),
        ("1234.0", "1234", True),
        ("1234.5", "1234", False),
        (".5", "0.5", True),
        ("-5", "5", False),
        ("+5", "5", True),
        ("5%", "5", False),
        ("007", "7", False),
        ("007", "007", True),
        ("１２３", "123", True),
        ("(123).", "123", True),
        ("123456789012345678901", "123456789012345678900", False),
        ("1e3", "1000", False),
        pytest.param("9" * 5_000 + "1", "9" * 5_000 + "1.0", True, id="long"),
    ],
)
def test_numbers_are_right_by_their_exact_value(answer, gold, right):
    assert score_answer(answer, (gold,)) is right


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_two_numbers_are_the_same_answer_exactly_when_they_are_equal(left, right):
    assert score_answer(f"{left:,}.", (str(right),)) == (left == right)
    assert score_answer(str(left), (str(left),))


@given(st.integers(1, 10**9), st.text(string.digits, max_size=3), st.text(string.digits, max_size=3))
def test_a_number_inside_a_longer_one_is_never_right(gold, before, after):
    assume(before or after)
    assert not score_answer(f"{before}{gold}{after}", (str(gold),))


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("CAPTAIN WREN", ["WREN", "CAPTAIN WREN"], True),
        ("wren", ["WREN", "CAPTAIN WREN"], True),
        ("WRENCH", ["WREN", "CAPTAIN WREN"], False),
        ("wren", "WREN", True),
        ("w", "WREN", False),
        ("wren", [["WREN"]], True),
        ("wren", (("CAPTAIN",), ["WREN"]), True),
        ("12", [12], True),
        ("12", 12, True),
        ("1. kelp 2. buoy", ["kelp", "buoy"], False),
        ("kelp, buoy", ["kelp", "buoy"], False),
    ],
)
def test_any_of_the_accepted_answers_will_do_in_whatever_nesting(answer, gold, right):
    assert score_answer(answer, gold) is right


@pytest.mark.parametrize("gold", ["A", "The", "An", "?", "...", '"', "''", "(", "()", "«.»"])
def test_a_gold_of_articles_or_marks_matches_itself_alone(gold):
    assert score_answer(gold, (gold,))
    for other in ("B", "zzz", "", " ", None, "!"):
        assert not score_answer(other, (gold,))


@pytest.mark.parametrize("gold", ["", " \n", [""], [[]], [None], None, [{}]])
def test_a_task_whose_answers_are_blank_is_broken_and_nothing_is_right_for_it(gold):
    assert not any(score_answer(answer, gold) for answer in ("", " ", None, "None", "not found", "[]", "{}"))


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (None, "None", False),
        (None, "null", False),
        (42, "42", True),
        (42.0, "42", True),
        (True, "true", True),
        (["a", "b"], "a", False),
        (["a"], "a", True),
        ({}, "", False),
        ({}, "{}", True),
        pytest.param(10**5_000, "1", False, id="huge"),
    ],
)
def test_an_answer_of_any_json_type_is_scored_as_its_text(answer, gold, right):
    assert score_answer(answer, (gold,)) is right


@given(json_values, json_values, st.lists(st.text(), max_size=5))
def test_scoring_never_raises_and_is_a_plain_yes_or_no(answer, gold, options):
    assert isinstance(score_answer(answer, gold, options), bool)


@given(st.text(), st.sampled_from([("“", ".”"), ('"', '".'), ("  ", "!\n"), ("**", "**"), ("(", ")"), ("[`", "`]")]))
def test_outer_marks_case_and_white_space_do_not_matter(text, around):
    assume(normalise(text) and text.strip()[-1] not in "\"'`*“”‘’„«»()[]{}<>" + ".,;:!?。")
    assume(text.strip()[0] not in "\"'`*“”‘’„«»()[]{}<>")
    assume(not set(normalise(text)) & set("\"'`*“”‘’„«»()[]{}<>"))
    dressed = around[0] + text.swapcase().replace(" ", " \t") + around[1]
    assume(text.swapcase().casefold() == text.casefold())
    assert same_answer(dressed, text)


@pytest.mark.parametrize("text", ['"kelp" or "buoy"', "(a) or (b)", "[1] [2]"])
def test_marks_that_do_not_belong_together_stay(text):
    assert normalise(text) == text


@example('("5.")')
@given(st.text() | st.text("\"'()*.!a5 "))
def test_normalising_is_idempotent_and_leaves_nothing_only_of_blanks(text):
    assert normalise(normalise(text)) == normalise(text)
    assert bool(normalise(text)) == bool(text.strip())
    assert same_answer(text, text) == bool(text.strip())


@pytest.mark.parametrize(
    ("answer", "index"),
    [
        ("B", 1),
        ("b", 1),
        ("(B)", 1),
        ("B.", 1),
        ("B)", 1),
        ("B:", 1),
        (" **B** ", 1),
        ("[B]", 1),
        ("B) Rain", 1),
        ("(B) rain.", 1),
        ("B. Rain", 1),
        ("B: Rain", 1),
        ("Rain", 1),
        ("fog", 0),
        ("C) Fog", 2),
        ("C", 2),
        ("D", 3),
        ("E", None),
        ("B) Fog", None),
        ("B Rain", None),
        ("AB", None),
        ("A and C", None),
        ("A, C", None),
        ("A or (C)", None),
        ("(A) (C)", None),
        ("A)", 0),
        ("None of the above", None),
        ("Dunno", None),
        ("Could not find it", None),
        ("Bob did it", None),
        ("Answer: the butler", None),
        ("ANSWER: B", None),
        ("B\nbecause it rained", None),
        ("Rain and fog", None),
        ("", None),
        (".", None),
        ("1", None),
    ],
)
def test_a_choice_is_a_letter_or_an_options_text_and_nothing_else(answer, index):
    assert parse_choice(answer, WEATHER) == index


def test_brackets_inside_an_options_text_do_not_hide_its_letter():
    assert parse_choice("(A) fog (dense)", ("Fog (dense)", "Rain")) == 0


def test_a_letter_that_is_also_another_options_text_is_no_choice():
    assert parse_choice("A", ("B", "A", "AB")) is None
    assert parse_choice("A) B", ("B", "A", "AB")) == 0
    assert parse_choice("A", ("A", "B", "AB")) == 0
    assert parse_choice("AB", ("B", "A", "AB")) == 2


@given(st.lists(words, min_size=1, max_size=26), st.data())
def test_every_form_of_a_choice_names_an_option_of_its_text(options, data):
    index = data.draw(st.integers(0, len(options) - 1))
    letter = string.ascii_uppercase[index]
    assert parse_choice(f"{letter}) {options[index]}", options) == index
    if len(options[index].strip()) > 1:
        found = parse_choice(options[index], options)
        assert found is not None
        assert same_answer(options[found], options[index])
    if not any(len(option.strip()) == 1 for option in options):
        assert {parse_choice(form, options) for form in (letter, f"({letter})", f"{letter}.", letter.lower())} == {
            index
        }


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("A", ("Fog",), True),
        ("C", ("Fog",), True),
        ("Fog", ("Fog",), True),
        ("B", ("Fog",), False),
        ("C", ("A",), True),
        ("A) fog", ("C",), True),
        ("D", ("Sun", "D"), True),
        ("Fog", (["Fog", "A"],), True),
        ("Sun", ("Rain", "Sun"), True),
        ("None of the above", ("Fog",), False),
        ("Snow", ("Snow",), False),
        (None, ("Fog",), False),
        ("A and C", ("Fog",), False),
    ],
)
def test_a_choice_is_right_when_its_text_is_the_accepted_one(answer, gold, right):
    assert score_answer(answer, gold, WEATHER) is right


@given(st.text(), st.lists(words, min_size=2, max_size=6, unique_by=normalise))
def test_one_answer_is_never_right_for_two_different_options(answer, options):
    assert sum(score_answer(answer, (option,), options) for option in options) <= 1


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        (task("Fog", options=WEATHER), None),
        (task("C", options=WEATHER), None),
        (task("anything"), None),
        (task(), None),
        (task(options=WEATHER), None),
        (task("Snow", options=WEATHER), "no accepted answer is one of the 4 options"),
        (task("E", options=WEATHER), "no accepted answer is one of the 4 options"),
        (task("", " "), "all accepted answers are blank"),
    ],
)
def test_a_task_that_cannot_be_scored_is_reported(item, problem):
    assert task_problem(item) == problem
    if problem:
        assert not any(
            score_answer(answer, item.answers, item.options) for answer in ("Snow", "E", "A", "", "not found")
        )


@pytest.mark.parametrize(
    ("gold", "texts"), [("ab", ("ab",)), (["a", ["b", 3]], ("a", "b", "3")), (None, ()), ([""], ())]
)
def test_accepted_answers_are_flattened_but_never_split_into_characters(gold: Any, texts):
    assert gold_texts(gold) == texts
