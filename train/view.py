"""`statelm view RUN|TRAJECTORIES -o out.html`: episodes, turn by turn, in one HTML file that needs no server.

The life of a page:
  1. trajectories are read from one JSONL file or from every `trajectories*.jsonl` of a run folder, and a
     balanced handful of right and wrong episodes is kept;
  2. `episodes.viewer_data` decodes them into shared tables (what the model saw, what it said, what changed);
  3. `html.page` puts the data, the style and the script (`web/`) into one file, everything escaped.

`viewer_section` is the same component inside the report of a run.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from pydantic import Field

from statelm_jax.config import Config
from statelm_jax.env.trajectories import read_trajectories
from statelm_jax.errors import UserError
from statelm_jax.tokenizer import TINY_FOLDER, Tokenizer
from statelm_jax.train import html
from statelm_jax.train.episodes import Choice, viewer_data
from statelm_jax.types import Trajectory

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Lone surrogates: no tokenizer can hold them, they are fed as replacement characters."""

KEYS = "<kbd>←</kbd> <kbd>→</kbd> turn &nbsp;<kbd>j</kbd> <kbd>k</kbd> episode &nbsp;<kbd>c</kbd> control tokens"
"""The viewer's keys, as markup."""


class ViewConfig(Config):
    """Turn a run's episodes into one HTML page that shows, turn by turn, what the model saw and did."""

    source: tyro.conf.Positional[Path]
    """A run folder with trajectories*.jsonl in it, or one such file."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("episodes.html")
    """The page to write."""
    tokenizer: Path | None = None
    """Folder of the tokenizer that the run used; default: the one beside the trajectories (tokenizer/ or the run's
    model/), else the built-in one."""
    context_window: int | None = Field(default=None, ge=1)
    """The window in tokens, where neither the trajectories nor the model beside them say it."""
    limit: int = Field(default=60, ge=1)
    """Show at most this many episodes, right and wrong ones in equal parts as far as there are."""


def main(config: ViewConfig) -> None:
    """Write the page. `UserError` when there is nothing to show, or the page cannot be written."""
    files = find_trajectories(config.source)
    if config.out.resolve() in (file.resolve() for file in files):
        raise UserError(f"{config.out} is the file of trajectories itself; give another file with -o")
    tokenizer = load_tokenizer(config.tokenizer, files[0].parent)
    groups, total = read_groups(files, config.limit)
    check_tokenizer(groups, tokenizer)
    data = viewer_data(groups.items(), tokenizer, config.context_window or window_beside(files[0].parent))
    shown = len(data["episodes"])
    html.write(config.out, viewer_page(f"Episodes of {config.source}", f"{shown} of {total} episodes", data))
    size = config.out.stat().st_size / 1e6
    print(f"wrote {config.out}: {shown} of {total} episodes, {size:.1f} MB; open it in a browser")


def viewer_page(title: str, subtitle: str, data: Mapping[str, Any]) -> str:
    """A whole page that is nothing but the viewer."""
    return html.page(title, masthead(title, subtitle, with_keys=True) + viewer_section(data))


def viewer_section(data: Mapping[str, Any]) -> str:
    """The viewer as a part of a page (one per page), over what `episodes.viewer_data` gave."""
    return (
        '<section class="viewer" id="viewer" aria-label="Episodes">'
        "<noscript>The episode viewer needs JavaScript.</noscript></section>" + html.data_block("episodes", data)
    )


def masthead(title: str, subtitle: str, *, with_keys: bool = False) -> str:
    """The bar at the top of a page, with the switch between light and dark."""
    return (
        f'<header class="masthead"><h1>{html.text(title)}</h1><span class="dim">{html.text(subtitle)}</span>'
        f'<span class="keys dim">{KEYS if with_keys else ""}</span>'
        '<button id="theme" type="button">light / dark</button></header>'
    )


def find_trajectories(source: Path) -> tuple[Path, ...]:
    """The trajectory files that `source` stands for, in order of name."""
    if source.is_file():
        return (source,)
    if not source.is_dir():
        raise UserError(f"{source} does not exist; give a run folder or a file of trajectories (JSONL)")
    files = tuple(sorted(source.glob("trajectories*.jsonl"), key=_by_number))
    if not files:
        raise UserError(f"{source} holds no trajectories*.jsonl; give the folder of a run, or the file itself")
    return files


def _by_number(path: Path) -> list[tuple[int, str]]:
    """Sort key that puts 4x before 16x."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def read_groups(files: Sequence[Path], limit: int) -> tuple[dict[str, list[Trajectory]], int]:
    """(episodes by the file's own part of its name, how many there were): an equal share of `limit` from each file."""
    groups: dict[str, list[Trajectory]] = {}
    total = 0
    share = max(limit // len(files), 1)
    for file in files[:limit]:
        choice = Choice(share)
        for trajectory in read_trajectories(file):
            choice.add(trajectory)
        total += choice.seen
        groups[file.stem.removeprefix("trajectories").strip("-_.") if len(files) > 1 else ""] = choice.chosen()
    if not total:
        raise UserError(f"{files[0]} holds no trajectory; wait until the run has finished an episode")
    return groups, total


def load_tokenizer(given: Path | None, folder: Path) -> Tokenizer:
    """The tokenizer at `given`; else the one that lies beside the trajectories; else the built-in tiny one."""
    beside = (folder / name for name in ("tokenizer", "model") if (folder / name / "tokenizer.json").is_file())
    return Tokenizer.load(given or next(beside, TINY_FOLDER))


def window_beside(folder: Path) -> int | None:
    """The context window of the model that lies beside the trajectories, where there is one."""
    try:
        settings = json.loads((folder / "model" / "statelm.json").read_text(encoding="utf-8"))
        return int(settings["env"]["context_window"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_tokenizer(groups: Mapping[str, Sequence[Trajectory]], tokenizer: Tokenizer) -> None:
    """`UserError` when the ids are not from this tokenizer, rather than a page of nonsense.

    The question stands in the first prompt, so decoding must bring it back.
    """
    for trajectory in (trajectory for group in groups.values() for trajectory in group if trajectory.snapshots):
        decoded = unicodedata.normalize("NFC", tokenizer.decode(trajectory.snapshots[0].prompt))
        question = unicodedata.normalize("NFC", _SURROGATE.sub("\ufffd", trajectory.question))
        if question not in decoded:
            raise UserError(
                f"the ids of {trajectory.task_id} are not from this tokenizer; "
                "give the folder of the one that the run used with --tokenizer"
            )
