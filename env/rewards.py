"""Scoring: is the finish answer right, and what is a whole episode worth.

Only the answer that the environment parsed out of a `finish` call is ever scored; no text of the trajectory is
searched, so an answer that merely stands in a tool result earns nothing. Scoring is strict and is the same in
training and in evaluation:

* Both sides are normalised: Unicode NFKC, case folded, white space squeezed, paired outer quotes, brackets and
  emphasis marks taken off, sentence marks at the end taken off. Articles stay. A text that would vanish keeps its
  marks, so only a blank text normalises to nothing, and nothing matches nothing.
* Two plain numbers are equal when their exact values are ("1,000" and "1000.0"). A number with leading zeros is a
  code and is compared as text. Nothing is ever searched inside the answer, so "1234" is not right for "123".
* The accepted answers are alternatives: any one will do, and an answer that lists several is not one of them.
* Multiple choice: `parse_choice`. Options with the same text are the same choice.
* A task without accepted answers is unanswerable: right is one of `NOT_FOUND_FORMS` and nothing else.
* A broken task (`task_problem`) is never scored as right; reports should list it.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

from statelm_jax.types import StopReason, Task, Trajectory

NOT_FOUND = "not found"
"""What the model should answer when the document does not hold the answer."""

NOT_FOUND_FORMS = frozenset(
    {
        NOT_FOUND,
        "not found in the document",
        "not in the document",
        "not mentioned",
        "not mentioned in the document",
        "no answer",
        "unanswerable",
    }
)
"""Normalised answers that are right for an unanswerable task."""

RIGHT, WRONG, UNFINISHED = 1.0, -0.5, -1.0
"""Rewards of an episode, as the paper's authors set them."""

_CLOSING = dict(zip("\"'`*“‘„«([{<", "\"'`*”’“»)]}>", strict=True))
"""Outer marks that are taken off in pairs: opening -> closing."""
_SENTENCE_MARKS = ".,;:!?。"
_INTEGER = r"(?:0|[1-9][0-9]*|[1-9][0-9]{0,2}(?:,[0-9]{3})+)"
_NUMBER = re.compile(rf"[+-]?(?:{_INTEGER}(?:\.[0-9]+)?|\.[0-9]+)")
_LETTER = re.compile(r"\(?([a-z])\)?")
_LETTER_AND_TEXT = re.compile(r"(?:\(([a-z])\)|([a-z])[).:])\s*(\S.*)")


def reward(trajectory: Trajectory, task: Task) -> float:
    """+1 for a right finish answer, -0.5 for a wrong one, -1 when the episode ended without one."""
    if trajectory.stop is not StopReason.FINISHED or trajectory.answer is None:
        return UNFINISHED
    return RIGHT if score_answer(trajectory.answer, task.answers, task.options) else WRONG


def score_answer(answer: Any, task_answers: Any, options: Sequence[str] = ()) -> bool:
    """Whether `answer` is right, by the rules of the module docstring. Never raises.

    Args:
      answer: The `answer` argument of the finish call; see `answer_text` for what is not a string.
      task_answers: Accepted answers: a string, a number, or a (nested) sequence of them; empty when unanswerable.
      options: The choices of a multiple-choice task; golds may be option texts or letters.
    """
    text = answer_text(answer)
    if text is None or not normalise(text):
        return False
    if _is_unanswerable(task_answers):
        return normalise(text) in NOT_FOUND_FORMS
    if options:
        choice = parse_choice(text, options)
        return choice is not None and choice in _gold_choices(task_answers, options)
    return any(same_answer(text, gold) for gold in gold_texts(task_answers))


def answer_text(answer: Any) -> str | None:
    """An answer of any JSON type as text: strings as they are, None as no answer, others as their JSON text.

    `normalise` takes brackets and quotes off, so a list of one string is scored as that string.
    """
    if answer is None or isinstance(answer, str):
        return answer
    try:
        return json.dumps(answer, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a structure of thousands of levels
        return None


def gold_texts(task_answers: Any) -> tuple[str, ...]:
    """The usable accepted answers: nested sequences are flattened, numbers become text, blank ones are dropped."""
    return tuple(text for text in _flatten(task_answers) if normalise(text))


def task_problem(task: Task) -> str | None:
    """Why a task cannot be scored, or None when it can."""
    if _is_unanswerable(task.answers):
        return None
    if not gold_texts(task.answers):
        return "all accepted answers are blank"
    if task.options and not _gold_choices(task.answers, task.options):
        return f"no accepted answer is one of the {len(task.options)} options"
    return None


def parse_choice(answer: str, options: Sequence[str]) -> int | None:
    """Index of the one option that `answer` names, or None.

    Read are: a letter ("B", "b", "(B)", "B.", "B)", "B:"), a letter and the text of that very option ("B) rain"),
    or the text of an option alone (the first of those with the same text). Everything else is no choice: several
    letters, a sentence, a letter beyond the options, a letter whose text is another option's, and a letter that is
    at the same time the text of another option.
    """
    text = normalise(answer)
    by_text = next((index for index, option in enumerate(options) if same_answer(text, option)), None)
    by_letter = None
    if match := _LETTER.fullmatch(text):
        by_letter = _letter_index(match[1], options)
    elif match := _LETTER_AND_TEXT.fullmatch(text):
        index = _letter_index(match[1] or match[2], options)
        if index is not None and same_answer(match[3], options[index]):
            by_letter = index
    if by_text is None or by_letter is None:
        return by_letter if by_text is None else by_text
    return by_letter if same_answer(options[by_letter], options[by_text]) else None


def same_answer(answer: str, gold: str) -> bool:
    """Whether two texts are the same answer: equal numbers, or equal after `normalise`. Blank texts never are."""
    left, right = normalise(answer), normalise(gold)
    if not left or not right:
        return False
    if _NUMBER.fullmatch(left) and _NUMBER.fullmatch(right):
        return Decimal(left.replace(",", "")) == Decimal(right.replace(",", ""))
    return left == right


def normalise(text: str) -> str:
    """The form in which texts are compared; empty only for a blank text. Idempotent."""
    bare = " ".join(_fold(_fold(text)).split())  # twice: folding can undo a composition, and composing a folding
    while True:
        inner = (bare[1:-1] if _is_wrapped(bare) else bare.rstrip(_SENTENCE_MARKS)).strip()
        if not inner or inner == bare:  # nothing but marks: then they are all that the text says
            return bare
        bare = inner


def _fold(text: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def _is_wrapped(text: str) -> bool:
    """Whether the first and the last character are marks that belong together: "(a)" is, "(a) or (b)" is not."""
    if len(text) < 2 or _CLOSING.get(text[0]) != text[-1]:
        return False
    opening, closing, inner = text[0], text[-1], text[1:-1]
    if opening == closing:
        return opening not in inner.strip(opening)
    depth = 0
    for character in inner:
        depth += (character == opening) - (character == closing)
        if depth < 0:
            return False
    return True


def _is_unanswerable(task_answers: Any) -> bool:
    return isinstance(task_answers, Sequence) and not isinstance(task_answers, str) and len(task_answers) == 0


def _flatten(task_answers: Any) -> Iterator[str]:
    if isinstance(task_answers, Sequence) and not isinstance(task_answers, str):
        for item in task_answers:
            yield from _flatten(item)
    elif isinstance(task_answers, str | int | float):
        yield answer_text(task_answers) or ""


def _gold_choices(task_answers: Any, options: Sequence[str]) -> frozenset[int]:
    """Options that an accepted answer stands for, by its text or else by its letter, with those of the same text."""
    choices: set[int] = set()
    for gold in gold_texts(task_answers):
        named = [index for index, option in enumerate(options) if same_answer(gold, option)]
        if not named and (match := _LETTER.fullmatch(normalise(gold))):
            letter = _letter_index(match[1], options)
            named = [] if letter is None else [letter]
        choices.update(named)
    twins = (index for index, option in enumerate(options) if any(same_answer(option, options[c]) for c in choices))
    return frozenset(choices | set(twins))


def _letter_index(letter: str, options: Sequence[str]) -> int | None:
    index = ord(letter) - ord("a")
    return index if index < len(options) else None
