"""`statelm tasks`: needle tasks over any text, as JSON lines.

1. The text is read and checked: a file, or the English prose that comes with every Python.
2. Tasks are drawn one by one, each from a generator of its own: same settings, same bytes.
3. They are written as they are made, and the file appears under its name only when it is whole.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

import tyro
from pydantic import Field

from statelm_jax.config import Config
from statelm_jax.env.tasks import NeedleConfig, default_source_text, load_source_text, needle_tasks, write_tasks
from statelm_jax.tokenizer import Tokenizer


class TasksConfig(Config):
    """Write needle tasks: documents of an exact length that hide one asked sentence among others of its form."""

    out: Annotated[Path, tyro.conf.arg(aliases=("-o",))]
    """The JSONL file to write."""
    count: int = Field(default=100, ge=1)
    """How many tasks."""
    seed: int = 0
    """The same seed gives the same bytes."""
    text: Path | None = None
    """UTF-8 text to hide the needles in; None takes the prose of Python's own language reference."""
    tokenizer: Path | None = None
    """A tokenizer.json, or its folder, that document lengths are counted with; None takes the built-in one."""
    needles: NeedleConfig = NeedleConfig(document_tokens=4_096)


def main(config: TasksConfig) -> None:
    """Write the file that `config` describes. `UserError` where the text, the tokenizer or the target is unusable."""
    text = default_source_text() if config.text is None else load_source_text(config.text)
    if config.tokenizer is None:
        with resources.as_file(resources.files("statelm_jax") / "assets" / "tiny") as folder:
            tokenizer = Tokenizer.load(folder)
    else:
        tokenizer = Tokenizer.load(config.tokenizer)
    tasks = needle_tasks(config.needles, text, tokenizer, config.count, config.seed)
    count = write_tasks(config.out, tasks)
    print(f"{count} tasks of {config.needles.document_tokens} tokens -> {config.out}")
