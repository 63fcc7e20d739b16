"""The wheel holds what the folders hold: nothing missing, nothing extra."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

FOLDERS = {"statelm_jax": "statelm_jax", "env": "statelm_jax/env", "train": "statelm_jax/train"}
"""Source folder -> where it lies in the wheel."""

SKIPPED = shutil.ignore_patterns("__pycache__", "*.pyc", ".DS_Store")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, so that no build product lands in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for folder in (*FOLDERS, "tests"):
        shutil.copytree(ROOT / folder, source / folder, ignore=SKIPPED)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(source)]
    environment = {**os.environ, "PIP_NO_INDEX": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


def metadata(wheel: zipfile.ZipFile, name: str) -> str:
    (member,) = (member for member in wheel.namelist() if member.endswith(f".dist-info/{name}"))
    return wheel.read(member).decode()


def test_the_wheel_holds_every_file_of_the_folders_and_no_other(source: Path, wheel: zipfile.ZipFile) -> None:
    expected = {
        f"{target}/{path.relative_to(source / folder).as_posix()}": path.read_bytes()
        for folder, target in FOLDERS.items()
        for path in (source / folder).rglob("*")
        if path.is_file()
    }
    members = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert members == expected.keys()
    assert [name for name, content in expected.items() if wheel.read(name) != content] == []


def test_the_wheel_brings_the_console_script_and_the_licence(wheel: zipfile.ZipFile) -> None:
    entry_points = configparser.ConfigParser()
    entry_points.read_string(metadata(wheel, "entry_points.txt"))
    assert dict(entry_points["console_scripts"]) == {"statelm": "statelm_jax.train.cli:main"}
    assert metadata(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_the_package_table_names_every_package_folder() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    found = {
        ".".join([FOLDERS[folder].replace("/", "."), *path.parent.relative_to(ROOT / folder).parts])
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert set(table) == found


def test_git_ignores_the_virtual_environment_but_never_the_env_folder() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    paths = [".venv/x", "env/pensieve.py", "train/sft.py", "statelm_jax/assets/tiny/tokenizer.json"]
    command = ["git", "-C", str(ROOT), "check-ignore", "--no-index", *paths]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert result.stdout.split() == [".venv/x"]
