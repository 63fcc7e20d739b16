"""The console script: what a person types, what comes back, and with which exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
import tyro
from pydantic import Field, model_validator

from statelm_jax.config import Config
from statelm_jax.env.tasks import read_tasks
from statelm_jax.errors import UserError
from statelm_jax.train import cli


class SoilConfig(Config):
    """The ground."""

    depth: int = Field(default=3, ge=1)
    """How deep, in metres."""
    kinds: tuple[str, ...] = ("clay", "sand")
    tool: Literal["spade", "pick"] = "spade"
    limit: int = 10

    @model_validator(mode="after")
    def _check(self) -> SoilConfig:
        if self.depth > self.limit:
            raise ValueError("depth must not exceed limit")
        return self


class DigConfig(Config):
    """Dig a hole.

    It stays dug.
    """

    site: tyro.conf.Positional[Path]
    """Where to dig."""
    who: str
    out: Annotated[Path, tyro.conf.arg(aliases=("-o",))] = Path("hole.txt")
    wet: bool = False
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    outcome: Literal["code", "user", "interrupt", "bug"] = "code"
    soil: SoilConfig = SoilConfig()


seen: list[DigConfig] = []


def main(config: DigConfig) -> int | None:
    seen.append(config)
    match config.outcome:
        case "user":
            raise UserError("the spade is\n broken: buy another")
        case "interrupt":
            raise KeyboardInterrupt("half a hole is saved; go on with: statelm dig --resume")
        case "bug":
            raise RuntimeError("a bug")
    return 7 if config.wet else None


@pytest.fixture(autouse=True)
def dig(monkeypatch: pytest.MonkeyPatch) -> list[DigConfig]:
    monkeypatch.setattr(cli, "COMMANDS", {**cli.COMMANDS, "dig": cli.Command(__name__, "DigConfig", "dig a hole")})
    monkeypatch.delenv("STATELM_TRACEBACK", raising=False)
    seen.clear()
    return seen


def run_cli(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "statelm_jax.train.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("statelm: error: ")
    return captured.err.removeprefix("statelm: error: ").rstrip("\n")


# --- the general help


def test_help_names_every_command_and_imports_neither_jax_nor_any_command() -> None:
    program = (
        "import sys; from statelm_jax.train import cli; assert cli.main(['--help']) == 0;"
        "heavy = {'jax', 'flax', 'tyro', 'transformers', 'matplotlib', 'tantivy'} & set(sys.modules);"
        "rooms = [name for name in sys.modules if name.startswith('statelm_jax.train.') and name != cli.__name__];"
        "assert not heavy and not rooms, (heavy, rooms)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    for name, command in cli.COMMANDS.items():
        if name != "dig":
            assert f"  {name} " in result.stdout
            assert command.summary in result.stdout


def test_no_arguments_print_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "usage: statelm COMMAND" in capsys.readouterr().out


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evalute", "--x", "1"]) == 2
    assert one_line(capsys).startswith("unknown command 'evalute'; did you mean 'evaluate'?")


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_loads_and_describes_its_flags(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    config_class, run = cli.COMMANDS[name].load()
    assert issubclass(config_class, Config)
    assert callable(run)
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: statelm {name}" in shown
    assert "--config FILE.toml" in shown


# --- flags and the file


def test_flags_positionals_and_aliases_reach_the_command_typed(dig: list[DigConfig]) -> None:
    args = ["garden", "--who", "me", "-o", "x.txt", "--json", "--soil.depth", "5", "--soil.kinds", "peat", "loam"]
    assert cli.main(["dig", *args]) == 0
    (config,) = dig
    assert config == DigConfig(
        site=Path("garden"),
        who="me",
        out=Path("x.txt"),
        as_json=True,
        soil=SoilConfig(depth=5, kinds=("peat", "loam")),
    )


def test_the_return_value_of_a_command_is_the_exit_code() -> None:
    assert cli.main(["dig", "garden", "--who", "me", "--wet"]) == 7


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "dig.toml"
    path.write_text('who = "file"\n[soil]\ndepth = 4\nkinds = ["rock"]\n', encoding="utf-8")
    return path


@pytest.mark.parametrize("spelling", ["--config {}", "--config={}"])
def test_flags_win_over_the_file_and_the_file_over_the_defaults(
    spelling: str, toml: Path, dig: list[DigConfig]
) -> None:
    assert cli.main(["dig", "garden", *spelling.format(toml).split(), "--soil.depth", "6"]) == 0
    assert dig == [DigConfig(site=Path("garden"), who="file", soil=SoilConfig(depth=6, kinds=("rock",)))]


def test_help_shows_the_values_that_would_hold_and_the_docstrings(
    toml: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        cli.main(["dig", "--config", str(toml), "--help"])
    shown = capsys.readouterr().out
    assert "It stays dug." in shown
    assert "How deep, in metres. (default: 4)" in shown
    assert "--soil.kinds [STR [STR ...]]" in shown
    assert "(default: rock)" in shown
    assert "(default: file)" in shown


def test_an_unknown_key_in_the_file_is_named_with_its_path_and_the_nearest(
    tmp_path: Path, dig: list[DigConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "dig.toml"
    path.write_text("[soil]\ndeph = 4\n", encoding="utf-8")
    assert cli.main(["dig", "garden", "--who", "me", "--config", str(path)]) == 2
    assert one_line(capsys) == f"{path}: unknown key 'soil.deph'; did you mean 'soil.depth'?"
    assert not dig


def test_a_wrong_value_in_the_file_is_reported_even_where_required_keys_are_absent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "dig.toml"
    path.write_text('[soil]\ndepth = "deep"\n', encoding="utf-8")
    assert cli.main(["dig", "--config", str(path)]) == 2
    assert one_line(capsys).startswith(f"{path}: soil.depth: Input should be a valid integer")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(None, "config file not found: "), (b"who = ", "cannot read config file "), (b"\xff", "cannot read config file ")],
)
def test_a_missing_or_malformed_file_is_one_line(
    content: bytes | None, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "dig.toml"
    if content is not None:
        path.write_bytes(content)
    assert cli.main(["dig", "--config", str(path)]) == 2
    assert one_line(capsys).startswith(f"{complaint}{path}")


# --- wrong flags


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ("garden --who me --soil.deph 4", "dig: unknown flag --soil.deph; did you mean '--soil.depth'?"),
        ("garden --whom me", "dig: unknown flag --whom; did you mean '--who'?"),
        ("garden --who me --depth=4", "dig: unknown flag --depth; did you mean '--soil.depth'?"),
        ("garden --who me --soil 4", "dig: unknown flag --soil; did you mean '--soil."),
        ("garden --who me --zzzz", "dig: unknown flag --zzzz (statelm dig --help lists them)"),
        ("garden --who me shed", "dig: unexpected argument 'shed'"),
        ("garden", "dig: missing --who"),
        ("--who me", "dig: missing site"),
        ("garden --who", "dig: --who wants STR"),
        ("garden --who me --soil.depth deep", "dig: --soil.depth: invalid literal for int()"),
        ("garden --who me --soil.depth 0", "dig: soil.depth: Input should be greater than or equal to 1"),
        ("garden --who me --soil.depth 11", "dig: soil: depth must not exceed limit"),
        ("garden --who me --soil.tool fork", "dig: --soil.tool is one of spade, pick, not 'fork'"),
        ("garden --who me --config", "--config wants one file"),
        ("garden --who me --config a --config b", "--config wants one file, not 2"),
    ],
)
def test_a_wrong_flag_is_one_line_that_names_it(
    args: str, complaint: str, dig: list[DigConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["dig", *args.split()]) == 2
    assert one_line(capsys).startswith(complaint)
    assert not dig


# --- how a command ends


def test_a_user_error_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dig", "garden", "--who", "me", "--outcome", "user"]) == 2
    assert one_line(capsys) == "the spade is broken: buy another"


@pytest.mark.parametrize("way", ["flag", "variable"])
def test_the_trace_behind_an_error_is_shown_on_demand(
    way: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "variable":
        monkeypatch.setenv("STATELM_TRACEBACK", "1")
    flags = ["--traceback"] if way == "flag" else []
    assert cli.main(["dig", "garden", "--who", "me", "--outcome", "user", *flags]) == 2
    shown = capsys.readouterr().err
    assert "Traceback (most recent call last)" in shown
    assert shown.endswith("statelm: error: the spade is broken: buy another\n")


def test_an_interrupt_is_one_line_with_what_the_command_saved_and_exit_code_130(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["dig", "garden", "--who", "me", "--outcome", "interrupt"]) == 130
    expected = "statelm: interrupted: half a hole is saved; go on with: statelm dig --resume\n"
    assert capsys.readouterr().err == expected


def test_a_bug_is_not_hidden_behind_one_line() -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["dig", "garden", "--who", "me", "--outcome", "bug"])


def test_a_reader_that_has_gone_is_no_error() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "statelm_jax.train.cli", "--help"]
    result = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    os.close(write_end)
    assert (result.returncode, result.stderr) == (141, "")


def test_an_error_reaches_the_shell_as_exit_code_2_without_a_traceback() -> None:
    result = run_cli("nonsense")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("statelm: error: unknown command 'nonsense'")
    assert result.stderr.count("\n") == 1


# --- statelm tasks


def test_the_tasks_command_writes_the_same_readable_file_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    for path in (first, second):
        assert cli.main(["tasks", "-o", str(path), "--count", "3", "--needles.document_tokens", "400"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == f"3 tasks of 400 tokens -> {second}"
    assert first.read_bytes() == second.read_bytes()
    assert [task.facts["document_tokens"] for task in read_tasks(first)] == [400] * 3


def test_the_tasks_command_refuses_an_unreadable_text_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tasks.jsonl"
    assert cli.main(["tasks", "-o", str(out), "--text", str(tmp_path / "absent.txt")]) == 2
    assert "absent.txt" in one_line(capsys)
    assert list(tmp_path.iterdir()) == []
