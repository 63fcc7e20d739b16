"""Slips with one reading are mended, all others are refused, and nothing else than `JsonError` is ever raised."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from statelm_jax.lenient_json import (
    MAX_DEPTH,
    MAX_ERROR_CHARS,
    MAX_NUMBER_CHARS,
    JsonError,
    read_json,
    read_json_sequence,
)

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)
json_soup = st.text(alphabet="{}[]:,'\"\\ \n0123eE+-.truefalsnxuN", max_size=40)


def read_or_error(text: str) -> Any:
    try:
        return read_json(text)
    except JsonError as error:
        return error


@given(value=json_values, ascii_only=st.booleans(), indent=st.sampled_from([None, 0, 2]), compact=st.booleans())
def test_strict_json_is_read_as_it_is(value: Any, ascii_only: bool, indent: int | None, compact: bool) -> None:
    separators = (",", ":") if compact else None
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent, separators=separators)
    result = read_json(text)
    assert result == value
    assert json.dumps(result) == json.dumps(value)  # 1, 1.0 and true are told apart


@given(text=json_soup)
def test_what_strict_json_accepts_means_the_same_here(text: str) -> None:
    """The only exceptions: keys that stand twice and numbers out of range, which are refused."""
    try:
        expected = json.loads(text, strict=False)
    except ValueError:
        return
    result = read_or_error(text)
    if isinstance(result, JsonError):
        assert "stands twice" in str(result) or "number" in str(result)
    else:
        assert repr(result) == repr(expected)


@given(value=json_values)
def test_a_python_literal_is_read_right_or_not_at_all(value: Any) -> None:
    result = read_or_error(repr(value))
    if isinstance(result, JsonError):
        assert "'" in repr(value) or "\\" in repr(value)
    else:
        assert result == value


@given(text=json_soup | st.text(st.characters(exclude_categories=[])))
@example(text="{" + ('"' + "\U000e0001" * 50 + '":1,') * 2)
def test_only_json_errors_are_raised_and_they_are_short(text: str) -> None:
    result = read_or_error(text)
    if isinstance(result, JsonError):
        assert len(str(result)) <= MAX_ERROR_CHARS
        assert "\n" not in str(result)
    else:
        json.dumps(result, ensure_ascii=False).encode("utf-8")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": "first\nsecond\tthird\x01"}', {"a": "first\nsecond\tthird\x01"}),
        (r'"C:\dunes\map"', r"C:\dunes\map"),
        (r'"\d+ \u12 C:\Users"', r"\d+ \u12 C:\Users"),
        (r'"the captain\'s log"', "the captain's log"),
        (r'"a \\ \" \/ \d"', 'a \\ " / \\d'),
        ('{"a": [1, 2,], "b": {"c": 1 , },}', {"a": [1, 2], "b": {"c": 1}}),
        ("{'a': 'captain's log', 'b': \"it's\"}", {"a": "captain's log", "b": "it's"}),
        ("{'a': 'the crews' boat'}", {"a": "the crews' boat"}),
        (r"{'a': 'x\', y'}", {"a": "x', y"}),
        ("{'a': 'say \"ahoy\"'}", {"a": 'say "ahoy"'}),
        ("{'a': True, 'b': False, 'c': None}", {"a": True, "b": False, "c": None}),
        ("{{'a': {{'b': '{{x}}'}}}}", {"a": {"b": "{{x}}"}}),
        (r'"\ud83e\udeb8"', "🪸"),
        (r'"a\ud800b\udfff"', "a\ufffdb\ufffd"),
        ("-0.5e-3", -0.0005),
    ],
)
def test_a_slip_with_one_reading_is_mended(text: str, value: Any) -> None:
    assert read_json(text) == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (r'"C:\dunes\now"', "ambiguous"),
        (r'"\d\u0041"', "ambiguous"),
        (r'"\x1b"', "ambiguous"),
        ("{'a': 'rock 'n' roll'}", "ambiguous"),
        ("{'a': 'the crews', he said'}", "expected a key"),
        ('{"a": "he said "no""}', "expected ',' or '}'"),
        ('{"a": 1', "the text ends here"),
        ('{"a": "b', "without its closing quote"),
        ("{'a': 'b", "without its closing quote"),
        ('{"a" 1}', "expected ':'"),
        ('{"a": 1} 2', "after the end"),
        ('{"a": 1}}', "after the end"),
        ('{"a": 1, "a": 1}', "'a' stands twice"),
        ("{a: 1}", "expected a key"),
        ("{,}", "expected a key"),
        ("[1,,]", "expected a JSON value"),
        ("[1 2]", "expected ',' or ']'"),
        ('{{"a": 1}', "expected '}'"),
        ('{{"a": 1}, "b": 2}', "expected '}'"),
        ("01", "after the end"),
        ("-", "not a JSON number"),
        ("1e999", "out of range"),
        ("9" * (MAX_NUMBER_CHARS + 1), "more than 64 characters"),
        ("NaN", "expected a JSON value"),
        ("", "expected a JSON value"),
        ("__import__('os')", "expected a JSON value"),
        ("[" * (MAX_DEPTH + 2), "levels deep"),
        ("{" * 100_000, "levels deep"),
    ],
)
def test_what_has_no_single_reading_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(JsonError) as caught:
        read_json(text)
    assert reason in str(caught.value)


def test_a_sequence_keeps_what_came_before_its_fault() -> None:
    values, error = read_json_sequence('{"a": 1}\n{"a": 2} [3] {"a"}')
    assert values == [{"a": 1}, {"a": 2}, [3]]
    assert error is not None
    assert "expected ':'" in str(error)
    assert read_json_sequence(" 1 ") == ([1], None)


@pytest.mark.parametrize(
    "unit", ['{"a":', "[", "'", '"', "\\", "' ", '\\"', '"\\d\\n",', "1,", "{{", "[]", "'a'b", "{'a':'b' c", " ", "-1 "]
)
@pytest.mark.parametrize("frame", ["GARBAGE", '["GARBAGE"]', "['GARBAGE']", '{"a": [GARBAGE]}'])
def test_a_long_reply_of_garbage_takes_linear_time(unit: str, frame: str) -> None:
    """Anything quadratic would need minutes for 200,000 characters; the bound leaves room for a slow machine."""
    text = frame.replace("GARBAGE", unit * (200_000 // len(unit)))
    began = time.process_time()
    read_json_sequence(text)
    assert time.process_time() - began < 5
