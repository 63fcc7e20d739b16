"""The report of a run: intervals, where failures come from, figures, and the page that holds them."""

from __future__ import annotations

import functools
import io
import json
import math
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.image
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statelm_jax.errors import UserError
from statelm_jax.train.failures import FAILURES, RIGHT, failure_kind
from statelm_jax.train.plots import Theme, keeping_everything, plot_accuracy, plot_sawtooth, plot_training
from statelm_jax.train.report import LIMITS, headline, machine_info, write_report
from statelm_jax.train.results import (
    ConditionResult,
    Curve,
    DemoReport,
    Stage,
    read_curves,
    wilson_interval,
)
from statelm_jax.types import StopReason, Task, Trajectory
from tests.fake_episodes import KEY, NEEDLE, QUESTION, VALUE, EpisodeScript, scanning_episode, tiny_tokenizer

tokenizer = functools.cache(tiny_tokenizer)

HOSTILE = '</td></script><script>alert(1)</script><img src="http://example.org/x.png">&amp;'
FACTS = {"kind": "number", "key": KEY, "value": VALUE}


def task(**changes: Any) -> Task:
    fields = {"document": f"Some text. {NEEDLE} More text.", "answers": (VALUE,), "facts": FACTS}
    return Task(task_id="t", question=QUESTION, **{**fields, **changes})


# --- numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("correct", "episodes", "low", "high"),
    [(8, 10, 0.490162, 0.943318), (0, 20, 0.0, 0.161125), (20, 20, 0.838875, 1.0), (1, 2, 0.094531, 0.905469)],
)
def test_wilson_intervals_are_the_published_ones(correct: int, episodes: int, low: float, high: float) -> None:
    assert wilson_interval(correct, episodes) == pytest.approx((low, high), abs=1e-6)


@given(st.integers(1, 500), st.data())
def test_an_interval_holds_the_share_and_narrows_with_episodes(episodes: int, data: st.DataObject) -> None:
    correct = data.draw(st.integers(0, episodes))
    low, high = wilson_interval(correct, episodes)
    assert 0 <= low <= correct / episodes <= high <= 1
    finer = wilson_interval(4 * correct, 4 * episodes)
    assert finer[1] - finer[0] < high - low
    mirrored = wilson_interval(episodes - correct, episodes)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high))


def test_without_episodes_nothing_is_known() -> None:
    row = result("scan", 1, correct=0, episodes=0)
    assert math.isnan(row.accuracy)
    assert row.interval == (0.0, 1.0)


def test_curves_are_read_by_phase_and_other_lines_are_passed_over(tmp_path: Path) -> None:
    lines = [
        {"phase": "copying", "step": 1, "loss": 5.0},
        {"phase": "sft", "step": 1, "loss": 2},
        {"phase": "copying", "step": 3, "loss": 3.5},
        {"phase": "copying", "step": 2, "loss": 4.0},
        {"phase": "copying", "step": 3, "loss": 3.0},
        {"phase": "sft", "step": 2, "loss": None},
        {"phase": "sft", "accuracy": 0.5},
        {"step": 7, "loss": 1.5},
    ]
    text = "\n".join([*map(json.dumps, lines), "[1]", '{"phase": "sft", "step": 3, "loss": NaN}', '{"phase": "sf'])
    (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
    assert read_curves(tmp_path / "metrics.jsonl") == (
        Curve(phase="copying", steps=(1, 2, 3), losses=(5.0, 4.0, 3.0)),
        Curve(phase="sft", steps=(1,), losses=(2.0,)),
        Curve(phase="train", steps=(7,), losses=(1.5,)),
    )
    assert read_curves(tmp_path / "none.jsonl") == ()


# --- where failures come from -------------------------------------------------------------------------------


def script() -> EpisodeScript:
    return EpisodeScript(tokenizer())


def noted(key: str = KEY, value: str = VALUE) -> EpisodeScript:
    read = script().turn("readChunk", body=f"Text. {NEEDLE}")
    return read.turn("note", {"key": "green anchor", "summary": "11111"}).turn("note", {"key": key, "summary": value})


def finish(episode: EpisodeScript, answer: str, **arguments: Any) -> Trajectory:
    return episode.turn("finish", {**arguments, "answer": answer}).end(answer)


def lost() -> EpisodeScript:
    episode = noted()
    del episode.notes[KEY]
    return episode.turn("updateNote", {"key": KEY, "mode": "delete"})


def split() -> EpisodeScript:
    half = len(NEEDLE) // 2
    return script().turn("readChunk", body="Text. " + NEEDLE[:half]).turn("readChunk", body=NEEDLE[half:] + " Text.")


CASES: dict[str, list[Callable[[], Trajectory]]] = {
    RIGHT: [
        lambda: finish(noted(), VALUE, key=KEY),
        lambda: finish(script(), VALUE),
    ],
    "needle_not_reached": [
        lambda: finish(script().turn("readChunk", body="Text."), "1"),
        lambda: finish(script().turn("searchEngine", body=f"...of the <em>{KEY}</em> is..."), "1"),
        lambda: finish(script().turn("readChunk", fields={"error": NEEDLE}), "1"),
    ],
    "needle_split": [
        lambda: finish(split(), "1"),
        lambda: finish(script().turn("readChunk", body=NEEDLE[1:]), "1"),
    ],
    "needle_not_noted": [lambda: finish(script().turn("readChunk", body=NEEDLE.replace(" of ", "\nof ")), "1")],
    "noted_wrong_key": [lambda: finish(noted("crimson anchor"), VALUE[::-1], key=KEY)],
    "noted_wrong_value": [lambda: finish(noted(value="48123"), "48123", key=KEY)],
    "note_lost": [lambda: finish(lost(), "1", key=KEY)],
    "wrong_key_used": [
        lambda: finish(noted(), "11111"),
        lambda: finish(noted(), "12345", key="green anchor"),
    ],
    "gave_up": [lambda: finish(noted(), "not found", key=KEY)],
    "wrong_copy": [lambda: finish(noted(), "48214", key=KEY), lambda: finish(noted(), "48214")],
    "context_overflow": [lambda: noted().end(None, StopReason.CONTEXT_OVERFLOW)],
    "invalid_replies": [lambda: script().end(None, StopReason.INVALID_REPLIES)],
    "max_turns": [lambda: noted().end(VALUE, StopReason.MAX_TURNS)],
    "interrupted": [lambda: script().end(None, StopReason.INTERRUPTED)],
    "policy_error": [lambda: script().end(None, StopReason.POLICY_ERROR)],
}


@pytest.mark.parametrize(
    ("kind", "episode"), [(kind, episode) for kind, episodes in CASES.items() for episode in episodes]
)
def test_the_first_step_that_failed_names_the_failure(kind: str, episode: Callable[[], Trajectory]) -> None:
    assert failure_kind(episode(), task()) == kind


def test_tasks_without_an_answer_or_without_facts_have_kinds_of_their_own() -> None:
    absent = task(document="Text.", answers=(), facts={"key": KEY, "value": None})
    assert failure_kind(finish(noted(), "11111"), absent) == "invented_answer"
    assert failure_kind(finish(noted(), "not found"), absent) == RIGHT
    assert failure_kind(finish(noted(), "1"), task(facts={})) == "wrong_answer"
    other_form = task(document=f"{KEY}: {VALUE}")
    assert (
        failure_kind(finish(script().turn("readChunk", body=f"{KEY}: {VALUE}"), "1"), other_form) == "needle_not_noted"
    )


def test_every_kind_of_failure_is_in_the_cases() -> None:
    assert {*CASES, "invented_answer", "wrong_answer"} - {RIGHT} == set(FAILURES)
    assert {str(stop) for stop in StopReason} - {"finished"} <= set(FAILURES)


# --- figures ------------------------------------------------------------------------------------------------


def result(name: str, multiple: float, correct: int = 45, episodes: int = 50, **failures: int) -> ConditionResult:
    return ConditionResult(
        name=name,
        multiple=multiple,
        document_tokens=int(1024 * multiple),
        episodes=episodes,
        correct=correct,
        mean_turns=7.25 * multiple,
        peak_context=433,
        failures=failures,
    )


RESULTS = (
    result("scan", 1, 50),
    result("scan", 16, 47, needle_split=2, wrong_copy=1),
    result("search", 1, 49, not_a_known_kind=1),
    result("search", 16, 50),
    result("twin", 1, 48),
    result("twin", 16, 3),
)
CURVES = (
    Curve(phase="copying", steps=(1, 2, 3), losses=(5.9, 2.0, 0.1)),
    Curve(phase="sft", steps=(10, 20), losses=(1.0, 0.0)),
    Curve(phase="none", steps=(), losses=()),
)


def picture(png: bytes) -> Any:
    return matplotlib.image.imread(io.BytesIO(png), format="png")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_figures_are_png_pictures_on_the_page_colour_and_change_no_global_setting(theme: Theme) -> None:
    before = dict(mpl.rcParams)
    episodes = [scanning_episode(tokenizer(), n) for n in (3, 5)]
    draws: list[Callable[[Any], None]] = [
        lambda target: plot_sawtooth(episodes, 1024, 4096, target, theme),
        lambda target: plot_sawtooth(episodes[:1], 1024, None, target, theme),
        lambda target: plot_accuracy(RESULTS, target, theme),
        lambda target: plot_accuracy([result("twin", 0.5)], target, theme),
        lambda target: plot_training(CURVES, target, theme),
    ]
    for draw in draws:
        target = io.BytesIO()
        draw(target)
        pixels = picture(target.getvalue())
        assert pixels.shape[1] >= 1000
        assert (pixels[0, 0, :3] > 0.5).all() == (theme == "light")
        assert pixels[..., :3].std() > 0.02  # something is drawn on it
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize(
    "draw",
    [
        lambda path: plot_sawtooth([], 1024, None, path),
        lambda path: plot_accuracy([], path),
        lambda path: plot_training([CURVES[2]], path),
    ],
)
def test_nothing_to_draw_is_said_and_leaves_no_file(draw: Callable[[Path], None], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no "):
        draw(tmp_path / "x.png")
    assert list(tmp_path.iterdir()) == []


def test_a_context_that_keeps_everything_grows_by_what_was_freed() -> None:
    trajectory = scanning_episode(tokenizer(), 4)
    whole = keeping_everything(trajectory)
    freed = [turn.freed_tokens for turn in trajectory.turns]
    assert [w - t.prompt_tokens for w, t in zip(whole, trajectory.turns, strict=True)] == [
        sum(freed[:index]) for index in range(len(freed))
    ]
    assert sum(freed) > 0
    assert whole == sorted(whole)


# --- the page -----------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Elements and words of a page."""

    def __init__(self, markup: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.island = ""
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.island = self.island or data
        else:
            self.words += data + " "


def report(**changes: Any) -> DemoReport:
    fields: dict[str, Any] = {
        "title": "A tiny StateLM",
        "model": "0.88 M parameters",
        "window": 1024,
        "results": RESULTS,
        "stages": (Stage(name="expert", seconds=12.34), Stage(name="training", seconds=605.4)),
        "curves": CURVES,
        "machine": {"processor": "a & b"},
        "limits": ("Needs a clear day.",),
    }
    return DemoReport(**{**fields, **changes})


def episodes() -> dict[str, list[Trajectory]]:
    wrong = [scanning_episode(tokenizer(), 2, answer="1", task_id=f"wrong-{i}") for i in range(4)]
    right = [scanning_episode(tokenizer(), 6, task_id=f"right-{i}") for i in range(4)]
    return {"scan, 1x": [*right, *wrong], "search, 1x": right[:1]}


def test_a_report_holds_the_numbers_the_figures_and_the_episodes(tmp_path: Path) -> None:
    path = write_report(tmp_path, report(), episodes(), tokenizer())
    assert path == tmp_path / "report.html"
    page = Page(path.read_text(encoding="utf-8"))
    words = " ".join(page.words.split())
    for expected in (
        "94 % 84–98 % · 47/50",
        "100 % 93–100 % · 50/50",
        "6 % 2–16 % · 3/50",
        "16,384",
        "116.0",
        FAILURES["needle_split"],
        "not_a_known_kind",
        "10 min 05 s",
        "12.3 s",
        "10 min 18 s",
        "a & b",
        "Needs a clear day.",
        LIMITS[0],
        "5 of 9",
    ):
        assert expected in words, expected
    sources = [attributes["src"] for tag, attributes in page.elements if tag == "img"]
    assert len(sources) == 6
    assert all(str(source).startswith("data:image/png;base64,") for source in sources)
    shown = json.loads(page.island)["episodes"]
    assert [(e["group"], e["id"], e["window"]) for e in shown] == [
        ("scan, 1x", "right-0", 1024),
        ("scan, 1x", "right-1", 1024),
        ("scan, 1x", "wrong-0", 1024),
        ("scan, 1x", "wrong-1", 1024),
        ("search, 1x", "right-0", 1024),
    ]
    for name in ("accuracy.png", "sawtooth.png", "training.png"):
        assert picture((tmp_path / name).read_bytes()).shape[1] >= 1000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["accuracy.png", "report.html", "sawtooth.png", "training.png"]


def test_hostile_words_stay_words_in_a_report(tmp_path: Path) -> None:
    plain = write_report(tmp_path / "plain", report(), episodes(), tokenizer())
    hostile = report(
        title=HOSTILE,
        model=HOSTILE,
        stages=(Stage(name=HOSTILE, seconds=1), Stage(name=HOSTILE, seconds=2)),
        machine={HOSTILE: HOSTILE},
        limits=(HOSTILE,),
        results=(*RESULTS[:2], result("search", 1, 49, **{HOSTILE: 1}), *RESULTS[3:]),
    )
    groups = {HOSTILE: [scanning_episode(tokenizer(), 2, task_id=HOSTILE)], **episodes()}
    path = write_report(tmp_path / "hostile", hostile, groups, tokenizer())

    def tags(file: Path) -> list[tuple[str, list[str]]]:
        return [(tag, sorted(attributes)) for tag, attributes in Page(file.read_text(encoding="utf-8")).elements]

    assert tags(path) == tags(plain)
    assert Page(path.read_text(encoding="utf-8")).words.count(HOSTILE) == 9
    assert HOSTILE not in path.read_text(encoding="utf-8")


def test_a_run_without_results_or_episodes_still_has_a_report(tmp_path: Path) -> None:
    path = write_report(tmp_path, DemoReport(title="t", model="m", window=64, results=()), {}, tokenizer())
    words = Page(path.read_text(encoding="utf-8")).words
    assert "No episode was evaluated." in words
    assert "No episode failed." in words
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html"]


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        (
            RESULTS,
            "In documents of 16,384 tokens, 16 times the window of 1,024, StateLM answers 94 % by scanning and 100 % "
            "with search; a full-context model of the same size answers 6 %.",
        ),
        (
            (RESULTS[0], result("scan", 64, 0, 20)),
            "In documents of 65,536 tokens, 64 times the window of 1,024, StateLM answers 0 % by scanning.",
        ),
        (
            (result("twin", 2, 25),),
            "In documents of 2,048 tokens, 2 times the window of 1,024, a full-context model of the same size answers "
            "50 %.",
        ),
        ((result("scan", 4, 0, 0),), "No episode was evaluated."),
    ],
)
def test_the_headline_says_how_it_went_at_the_longest_documents(
    results: tuple[ConditionResult, ...], expected: str
) -> None:
    assert headline(report(results=results)) == expected


def test_a_report_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(UserError, match="cannot write"):
        write_report(tmp_path / "run", report(), {}, tokenizer())


def test_the_machine_is_described_in_short_words() -> None:
    facts = machine_info()
    assert {"processor", "cores", "memory", "system", "Python"} <= set(facts)
    assert all(value and "\n" not in value for value in facts.values())
