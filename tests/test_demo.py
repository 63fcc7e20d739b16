"""Claims about the main job, on a scale that a test can afford, and about what interrupts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from statelm_jax.env.trajectories import read_trajectories

SMALL = (
    *("--copy_steps", "2", "--sft_steps", "4", "--twin_steps", "2", "--multiples", "1", "--episodes", "2"),
    *("--slots", "2", "--rows", "2", "--env.max_turns", "6"),
)


def statelm(*args: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*args), capture_output=True, text=True, timeout=600, check=False, **options)


def command(*args: str) -> list[str]:
    return [sys.executable, "-c", "import sys; from statelm_jax.train.cli import main; sys.exit(main())", *args]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A demo run of a few steps."""
    out = tmp_path_factory.mktemp("demo") / "run"
    done = statelm("demo", "--out", str(out), *SMALL)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_leaves_everything_a_person_needs(run: Path):
    for name in ("report.html", "results.json", "metrics.jsonl", "model/model.safetensors", "model/statelm.json"):
        assert (run / name).stat().st_size > 0, name
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))["results"]
    assert [(row["name"], row["episodes"]) for row in results] == [("scan", 2), ("search", 2), ("twin", 2)]
    (path,) = run.glob("trajectories_scan_1x.jsonl")
    for trajectory in read_trajectories(path):
        assert trajectory.metrics["peak_context_tokens"] <= 576
    assert any((run / "checkpoints").iterdir())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_demo_model_can_be_asked_and_evaluated(run: Path, tmp_path: Path):
    document = tmp_path / "text.txt"
    document.write_text("The secret number of the crimson lantern is 48213. " * 3, encoding="utf-8")
    asked = statelm(
        *("ask", "--model", str(run), "--document", str(document), "--json"),
        *("--question", "What is the secret number of the crimson lantern?"),
    )
    assert asked.returncode in (0, 1), asked.stderr
    assert json.loads(asked.stdout)["task_id"] == "ask"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_second_run_does_not_overwrite_the_first(run: Path):
    again = statelm("demo", "--out", str(run), *SMALL)
    assert again.returncode == 2
    assert "--resume" in again.stderr
    assert again.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_training_saves_and_says_how_to_go_on(tmp_path: Path, signum: signal.Signals):
    out = tmp_path / "run"
    args = [*SMALL, "--sft_steps", "5000"]
    with subprocess.Popen(
        command("demo", "--out", str(out), *args), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as child:
        deadline = time.monotonic() + 300
        while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").stat().st_size:
            assert child.poll() is None, "ended before it trained"
            assert time.monotonic() < deadline
            time.sleep(0.2)
        os.kill(child.pid, signum)
        _, errors = child.communicate(timeout=120)
    assert child.returncode == 130
    assert "--resume" in errors.splitlines()[-1]
    saved = [path.name for path in (out / "checkpoints").iterdir()]
    assert saved
    assert all(name.isdigit() for name in saved)
    step = max(map(int, saved))
    resumed = statelm("demo", "--out", str(out), *args, "--sft_steps", str(max(step - 2, 1)), "--resume")
    assert resumed.returncode == 2, "another number of steps is another run"
    assert "sft_steps" in resumed.stderr
