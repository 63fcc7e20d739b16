"""Checkpoints of a training run, through Orbax: the train state and what it was trained with.

`runs/NAME/checkpoints/STEP/` holds the state (parameters, optimiser, step) and the configuration. A step's folder
takes its final name only when all of it is on disk, so an unfinished save is never chosen. A checkpoint of another
configuration, or a damaged one, is refused in one line.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from statelm_jax.errors import UserError


class Checkpointer:
    """Saves and restores the train state of one run.

    Args:
      folder: The run's checkpoint folder; made when the first save happens.
      config: What a later run must agree with to go on from here (model, optimiser, data, seed).
      keep: How many checkpoints stay.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], *, keep: int = 2) -> None:
        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax logs a page per save
        self._folder = folder.absolute()
        self._config = json.loads(json.dumps(config))
        self._options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint; None when there is none."""
        if not self._folder.is_dir():
            return None
        steps = [int(path.name) for path in self._folder.iterdir() if path.is_dir() and path.name.isdigit()]
        return max(steps, default=None)

    def save(self, step: int, state: Any) -> None:
        """Write a checkpoint. `UserError` when the disk does not take it."""
        with _explained(f"cannot save a checkpoint to {self._folder}"), self._manager() as manager:
            args = ocp.args.Composite(state=ocp.args.StandardSave(state), config=ocp.args.JsonSave(self._config))
            manager.save(step, args=args, force=True)
            manager.wait_until_finished()

    def restore(self, like: Any) -> tuple[Any, int]:
        """The newest state, in the structure, dtypes and shardings of `like` (arrays or shapes with shardings).

        Raises:
          UserError: There is no checkpoint, it is torn, or it belongs to another configuration.
        """
        step = self.latest()
        if step is None:
            raise UserError(f"no checkpoint in {self._folder}; start without --resume")
        where = f"checkpoint {self._folder / str(step)}"
        remedy = "remove that folder to go on from an earlier one"
        with _explained(f"{where} is torn or unreadable; {remedy}"), self._manager() as manager:
            saved = manager.restore(step, args=ocp.args.Composite(config=ocp.args.JsonRestore())).config
        self._compare(saved, where)
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        with _explained(f"{where} is torn or does not fit this model; {remedy}"), self._manager() as manager:
            args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
            return manager.restore(step, args=args).state, step

    def _compare(self, saved: Mapping[str, Any], where: str) -> None:
        before, now = _flat(saved), _flat(self._config)
        for key in [*now, *before]:  # a key that only one of them has is a difference too
            old, new = before.get(key), now.get(key)
            if old != new:
                raise UserError(f"{where} was made with {key} = {old!r}, this run has {new!r}; use another --out")

    def _manager(self) -> ocp.CheckpointManager:
        return ocp.CheckpointManager(self._folder, options=self._options)


@contextlib.contextmanager
def _explained(what: str):
    """Turn whatever the storage raises into one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # Orbax and tensorstore raise many kinds
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{what}: {reason}") from error


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            out |= _flat(value, f"{prefix}{key}.")
        else:
            out[prefix + key] = value
    return out
