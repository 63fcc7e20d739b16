"""JSON as models write it: a reader that mends a short list of slips and refuses everything else.

A slip is mended only where one reading is left:

* raw line breaks, tabs and other control characters inside strings are kept as they are;
* a backslash that begins no escape (`C:\\dunes`, `\\d+`, a short `\\u12`) stands for itself, and `\\'` for an
  apostrophe. When the string also holds `\\n`, `\\t` and the like, or the escape is one in Python (`\\x1b`), nobody
  can tell what was meant: an error;
* a comma before a closing bracket is dropped;
* strings may stand in single quotes. An apostrophe inside one must follow a letter or digit (`captain's`);
* Python's True, False and None are true, false and null;
* an object may be wrapped in one more pair of braces.

Nothing is evaluated, completed or guessed: a cut object, a missing quote, a key that stands twice are errors.
Time is linear in the text; depth and the length of numbers are bounded, so no input can raise anything but
`JsonError`. Lone surrogates written as escapes become replacement characters, so every value read can be
written as UTF-8 again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

MAX_DEPTH = 64
MAX_NUMBER_CHARS = 64
MAX_ERROR_CHARS = 200

_BLANK = re.compile(r"[ \t\r\n]*+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(\.[0-9]++)?([eE][+-]?[0-9]++)?")
_WORD = re.compile(r"[A-Za-z_]++")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_DOUBLE_QUOTED = re.compile(r'"([^"\\]*+(?:\\.[^"\\]*+)*+)"', re.DOTALL)
_TO_APOSTROPHE = re.compile(r"[^'\\]*+(?:\\.[^'\\]*+)*+'", re.DOTALL)
_AFTER_STRING = re.compile(r"[ \t\r\n]*+(?:[,:}\]]|\Z)")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_PYTHON_ESCAPE = re.compile(r"x[0-9a-fA-F]{2}|U[0-9a-fA-F]{8}|N\{|[0-7]")
_SIMPLE = {'"': '"', "\\": "\\", "/": "/", "'": "'", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_SURROGATE = re.compile("[\ud800-\udfff]")


class JsonError(ValueError):
    """Why a text cannot be read, in one short line (at most `MAX_ERROR_CHARS`) that a model can act on."""


def read_json(text: str) -> Any:
    """The one value that `text` holds.

    Raises:
      JsonError: it holds none, more than one, or something that is not JSON.
    """
    reader = _Reader(text)
    value = reader.value(0)
    if not reader.at_end():
        reader.fail("text after the end of the JSON value")
    return value


def read_json_sequence(text: str) -> tuple[list[Any], JsonError | None]:
    """The values that `text` holds one after another, up to the first that cannot be read, and why it cannot."""
    reader = _Reader(text)
    values: list[Any] = []
    try:
        while not reader.at_end() or not values:
            values.append(reader.value(0))
    except JsonError as error:
        return values, error
    return values, None


class _Reader:
    """A recursive-descent reader; `pos` only moves forward."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.pos = 0

    def fail(self, problem: str) -> NoReturn:
        near = self.text[self.pos : self.pos + 20]
        where = f"near {near!r}" if near else "the text ends here"
        raise JsonError(f"{problem} at character {self.pos} ({where})"[:MAX_ERROR_CHARS])

    def peek(self) -> str:
        """The next character that is not blank; '' at the end."""
        blank = _BLANK.match(self.text, self.pos)
        assert blank is not None  # the pattern matches the empty string
        self.pos = blank.end()
        return self.text[self.pos : self.pos + 1]

    def at_end(self) -> bool:
        return not self.peek()

    def take(self, char: str) -> bool:
        """Step over `char` if it comes next."""
        if self.peek() != char:
            return False
        self.pos += 1
        return True

    def expect(self, char: str) -> None:
        if not self.take(char):
            self.fail(f"expected {char!r}")

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            self.fail(f"more than {MAX_DEPTH} levels deep")
        char = self.peek()
        if char == "{":
            return self.object(depth)
        if char == "[":
            self.pos += 1
            items: list[Any] = []
            self.items("]", lambda: items.append(self.value(depth + 1)))
            return items
        if char and char in "\"'":
            return self.string()
        if char and char in "-0123456789":
            return self.number()
        return self.word()

    def object(self, depth: int) -> dict[str, Any]:
        self.expect("{")
        if self.peek() == "{":  # an object in doubled braces
            if depth >= MAX_DEPTH:
                self.fail(f"more than {MAX_DEPTH} levels deep")
            inner = self.object(depth + 1)
            self.expect("}")
            return inner
        members: dict[str, Any] = {}

        def member() -> None:
            if self.peek() not in ('"', "'"):
                self.fail("expected a key in double quotes")
            key = self.string()
            if key in members:
                self.fail(f"key {key[:40]!r} stands twice, before")
            self.expect(":")
            members[key] = self.value(depth + 1)

        self.items("}", member)
        return members

    def items(self, close: str, read_one: Callable[[], None]) -> None:
        """Comma-separated items up to `close`; one comma may precede it, but not alone."""
        if self.take(close):
            return
        read_one()
        while not self.take(close):
            if not self.take(","):
                self.fail(f"expected ',' or {close!r}")
            if self.take(close):
                return
            read_one()

    def string(self) -> str:
        if self.text[self.pos] == "'":
            return self.single_quoted()
        match = _DOUBLE_QUOTED.match(self.text, self.pos)
        if match is None:
            self.fail("a string without its closing quote")
        value = self.unescape(match[1])
        self.pos = match.end()
        return value

    def single_quoted(self) -> str:
        start = end = self.pos + 1
        while True:
            match = _TO_APOSTROPHE.match(self.text, end)
            if match is None:
                self.fail("a string without its closing quote")
            end = match.end()
            if _AFTER_STRING.match(self.text, end):
                break
            if not self.text[end - 2].isalnum():
                self.fail("single quotes are ambiguous here: write strings in double quotes; the string begins")
        value = self.unescape(self.text[start : end - 1])
        self.pos = end
        return value

    def unescape(self, raw: str) -> str:
        if "\\" not in raw:
            return _SURROGATE.sub("\ufffd", raw)
        escapes = {(escape[1], raw[escape.start(1) : escape.start(1) + 9]) for escape in _ESCAPE.finditer(raw)}
        unknown = [follows for code, follows in escapes if len(code) == 1 and code not in _SIMPLE]
        known = any(len(code) > 1 or code in "bfnrt" for code, _ in escapes)
        if unknown and (known or any(map(_PYTHON_ESCAPE.match, unknown))):
            self.fail("single backslashes are ambiguous here: write each as two; the string begins")
        value = _ESCAPE.sub(_meaning, raw)
        # A pair of escaped surrogates is one character; a lone one is none.
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")

    def number(self) -> int | float:
        match = _NUMBER.match(self.text, self.pos)
        if match is None:
            self.fail("not a JSON number")
        if match.end() - match.start() > MAX_NUMBER_CHARS:
            self.fail(f"a number of more than {MAX_NUMBER_CHARS} characters")
        value = float(match[0]) if match[1] or match[2] else int(match[0])
        if not math.isfinite(value):
            self.fail("a number out of range")
        self.pos = match.end()
        return value

    def word(self) -> bool | None:
        match = _WORD.match(self.text, self.pos)
        if match is None or match[0] not in _WORDS:
            self.fail("expected a JSON value")
        self.pos = match.end()
        return _WORDS[match[0]]


def _meaning(escape: re.Match[str]) -> str:
    code = escape[1]
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return _SIMPLE.get(code, escape[0])
