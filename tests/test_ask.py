"""Claims about `statelm ask` and the agent that ships with the package."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from statelm_jax.env.tasks import NeedleConfig, default_source_text, needle_tasks
from statelm_jax.tokenizer import Tokenizer
from statelm_jax.train.agents import load_agent, packaged_agent
from statelm_jax.train.cli import main

QUESTION = "What is the secret number of the crimson lantern?"


@pytest.fixture
def document(tmp_path: Path) -> Path:
    """An unseen needle task as a text file, with its question and answer beside it."""
    config = NeedleConfig(document_tokens=1_200, split="eval", region=(0.7, 1.0))
    tokenizer = Tokenizer.load(packaged_agent())
    (task,) = needle_tasks(config, default_source_text(), tokenizer, 1, seed=3)
    path = tmp_path / "text.txt"
    path.write_text(task.document, encoding="utf-8")
    (tmp_path / "task.json").write_text(json.dumps([task.question, task.answers[0]]), encoding="utf-8")
    return path


def ask(capsys, *args: str) -> tuple[int, str, str]:
    code = main(["ask", *args])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_packaged_agent_acts_by_itself_and_edits_its_context(document: Path, capsys):
    question, _ = json.loads((document.parent / "task.json").read_text(encoding="utf-8"))
    _, out, err = ask(capsys, "--document", str(document), "--question", question, "--json")
    trajectory = json.loads(out)
    assert "Traceback" not in err
    assert [turn["tool"] for turn in trajectory["turns"]][:2] == ["analyzeText", "buildIndex"]
    assert any(turn["tool"] == "deleteContext" and turn["deleted"] for turn in trajectory["turns"])
    assert all(turn["prompt_tokens"] <= 576 for turn in trajectory["turns"])


def test_the_packaged_agent_is_small():
    size = sum(path.stat().st_size for path in packaged_agent().rglob("*") if path.is_file())
    assert size <= 4 * 2**20


def test_a_question_about_a_key_that_is_not_there_ends_properly(document: Path, capsys):
    code, out, _ = ask(capsys, "--document", str(document), "--question", QUESTION, "--json")
    trajectory = json.loads(out)
    assert (code == 0) == (trajectory["stop"] == "finished")
    assert trajectory["stop"] in ("finished", "max_turns", "invalid_replies", "context_overflow")


@pytest.mark.parametrize(
    ("content", "word"),
    [(None, "not found"), (b"", "empty"), (b"a\0b", "binary"), (b"caf\xe9 au lait", "UTF-8"), (b" \n ", "")],
)
def test_a_document_that_is_no_text_is_one_clear_line(tmp_path: Path, capsys, content: bytes | None, word: str):
    path = tmp_path / "document.txt"
    if content is not None:
        path.write_bytes(content)
    code, out, err = ask(capsys, "--document", str(path), "--question", QUESTION)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert word.lower() in err.lower()
    assert str(path) in err


def _copy_agent(to: Path) -> Path:
    to.mkdir()
    for path in packaged_agent().iterdir():
        if path.is_file():
            (to / path.name).write_bytes(path.read_bytes())
    return to


@pytest.mark.parametrize("fault", ["missing", "torn", "other_config", "other_tokenizer", "newer", "no_weights"])
def test_a_model_folder_that_is_torn_or_of_another_config_is_one_clear_line(
    tmp_path: Path, document: Path, capsys, fault: str
):
    folder = tmp_path / "agent" if fault == "missing" else _copy_agent(tmp_path / "agent")
    if fault == "torn":
        os.truncate(folder / "model.safetensors", 1_000)
    if fault == "no_weights":
        (folder / "model.safetensors").unlink()
    if fault == "other_config":
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 64}), encoding="utf-8")
    if fault == "other_tokenizer":
        spec = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        (folder / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    if fault == "newer":
        settings = json.loads((folder / "statelm.json").read_text(encoding="utf-8"))
        (folder / "statelm.json").write_text(json.dumps({**settings, "format": 99}), encoding="utf-8")
    code, out, err = ask(capsys, "--document", str(document), "--question", QUESTION, "--model", str(folder))
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert str(folder) in err


def test_loading_the_packaged_agent_gives_what_its_settings_say():
    agent = load_agent(packaged_agent())
    assert agent.settings.env.context_window <= 1_024
    assert "searchEngine" in agent.env(search=True).tools
    assert "searchEngine" not in agent.env(search=False).tools
