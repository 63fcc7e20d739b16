"""Which step of an episode a wrong answer comes from, told from its turns and from what the task's source knows.

The steps of a needle task in order, and the first one that failed names the failure: the needle is shown, it is
noted (right key, right value), the note lives until the end, and the answer is read from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from statelm_jax.env.needles import find_needles
from statelm_jax.env.rewards import NOT_FOUND_FORMS, normalise, reward
from statelm_jax.types import StopReason, Task, Trajectory, TurnRecord

RIGHT = "right"

FAILURES: Mapping[str, str] = {
    "context_overflow": "the context left no room for another reply",
    "invalid_replies": "too many replies in a row without a call that could be run",
    "max_turns": "the turns ran out",
    "interrupted": "the run was stopped",
    "policy_error": "the model could not be asked",
    "needle_not_reached": "ended before the needle was shown",
    "needle_split": "the needle was read only in parts, cut by the border of two chunks",
    "needle_not_noted": "the needle was shown, and no note was made of it",
    "noted_wrong_key": "noted the right value under another key",
    "noted_wrong_value": "noted the right key with another value",
    "note_lost": "the right note was overwritten or removed later",
    "wrong_key_used": "the right note was there, the answer was read from another",
    "gave_up": "the right note was there, the answer was that there is none",
    "wrong_copy": "the right note was there, its value was copied wrongly",
    "invented_answer": "answered although the document holds no answer",
    "wrong_answer": "a wrong answer, and no step to trace it to",
}
"""Every kind of failure in words, in the order in which an episode meets them."""

_READING_TOOLS = ("readChunk", "loadDocument", "searchEngine")


def failure_kind(trajectory: Trajectory, task: Task) -> str:
    """`RIGHT`, or the key of `FAILURES` that says what went wrong.

    Uses the facts `key` and `value` of the task where there are any (see `env.tasks`); nothing but the answer
    decides whether the episode is right.
    """
    if reward(trajectory, task) > 0:
        return RIGHT
    if trajectory.stop is not StopReason.FINISHED:
        return str(trajectory.stop)
    if not task.answers:
        return "invented_answer"
    key, value = (task.facts.get(name) for name in ("key", "value"))
    if not key or not value:
        return "wrong_answer"
    key, value = _squeeze(str(key)), _squeeze(str(value))
    return _before_the_note(trajectory.turns, task, key, value) or _after_the_note(trajectory, key, value)


def _before_the_note(turns: Sequence[TurnRecord], task: Task, key: str, value: str) -> str | None:
    """The failure when the right note was never made; None when it was."""
    notes = {(_squeeze(name), _squeeze(summary)) for turn in turns for name, summary in turn.notes}
    if any(_is_right_note(note, key, value) for note in notes):
        return None
    shown = [turn for turn in turns if turn.tool in _READING_TOOLS and not turn.error]
    if not any(_shows(_body(turn), task, key, value) for turn in shown):
        return "needle_split" if _saw_a_part(shown, key) else "needle_not_reached"
    if any(key in name for name, _ in notes):
        return "noted_wrong_value"
    return "noted_wrong_key" if any(value in summary for _, summary in notes) else "needle_not_noted"


def _shows(text: str, task: Task, key: str, value: str) -> bool:
    """Whether a text holds the whole needle: its sentence where it is one of our sentences, else key and value."""
    if _has_sentence(task.document, key, value):
        return _has_sentence(text, key, value)
    text = _squeeze(text)
    return key in text and value in text


def _has_sentence(text: str, key: str, value: str) -> bool:
    return any((_squeeze(name), _squeeze(held)) == (key, value) for name, held in find_needles(text))


def _saw_a_part(shown: Sequence[TurnRecord], key: str) -> bool:
    """Whether a needle that was nowhere shown whole was read in parts. Search excerpts are not reading."""
    read = [_body(turn) for turn in shown if turn.tool != "searchEngine"]
    return any(key in _squeeze(text) for text in read) or key in _squeeze("".join(read))


def _after_the_note(trajectory: Trajectory, key: str, value: str) -> str:
    """The failure when the right note was made at some time."""
    final = [(_squeeze(name), _squeeze(summary)) for name, summary in trajectory.turns[-1].notes]
    if not any(_is_right_note(note, key, value) for note in final):
        return "note_lost"
    answer = normalise(trajectory.answer or "")
    if answer in NOT_FOUND_FORMS:
        return "gave_up"
    used = _squeeze(str(trajectory.turns[-1].arguments.get("key") or ""))
    if (used and key not in used) or (answer and any(answer in summary for name, summary in final if key not in name)):
        return "wrong_key_used"
    return "wrong_copy"


def _is_right_note(note: tuple[str, str], key: str, value: str) -> bool:
    return value in note[1] and key in " ".join(note)


def _body(turn: TurnRecord) -> str:
    """The text of a result without its header line."""
    return turn.result.partition("\n")[2] or turn.result


def _squeeze(text: str) -> str:
    """Case folded, white space squeezed: line breaks inside a needle do no harm."""
    return " ".join(text.casefold().split())
