"""What an evaluated run reports: frozen records, no logic beyond an interval."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

CONDITIONS: Mapping[str, str] = {
    "scan": "StateLM, scanning",
    "search": "StateLM, with search",
    "twin": "full-context twin",
}
"""How a model was let at the document, and what that is called in tables and legends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionResult:
    """The episodes of one condition at one document length.

    Attributes:
      name: `scan`, `search` or `twin`.
      multiple: Document length in context windows.
      document_tokens: Document length in tokens.
      episodes: How many were run.
      correct: How many were answered right.
      mean_turns: Model calls per episode.
      peak_context: The most tokens that prompt and reply took in any turn of any episode.
      failures: Number of wrong episodes by `failures.failure_kind`.
    """

    name: str
    multiple: float
    document_tokens: int
    episodes: int
    correct: int
    mean_turns: float
    peak_context: int
    failures: Mapping[str, int] = field(default_factory=dict)

    @property
    def accuracy(self) -> float:
        """Share of right answers; NaN without episodes."""
        return self.correct / self.episodes if self.episodes else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of `accuracy`."""
        return wilson_interval(self.correct, self.episodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a run and how long it took."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The loss of one training phase by optimiser step."""

    phase: str
    steps: tuple[int, ...]
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """All that the report of a run says beside its episodes.

    Attributes:
      title: Heading of the report.
      model: The model in words ("0.88 M parameters, 4 layers of width 128").
      window: Context window in tokens, enforced.
      results: One per condition and length.
      stages: In the order in which they ran.
      curves: Training curves, see `read_curves`.
      machine: Facts about the machine and the software, in order.
      limits: What the model cannot do and what the numbers do not say, one sentence or two each.
    """

    title: str
    model: str
    window: int
    results: tuple[ConditionResult, ...]
    stages: tuple[Stage, ...] = ()
    curves: tuple[Curve, ...] = ()
    machine: Mapping[str, str] = field(default_factory=dict)
    limits: tuple[str, ...] = ()


def wilson_interval(correct: int, episodes: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval for a share (Wilson 1927); (0, 1) without episodes. `z` 1.96 gives 95 %."""
    if not episodes:
        return 0.0, 1.0
    share, square = correct / episodes, z * z / episodes
    centre = (share + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(share * (1 - share) / episodes + square / (4 * episodes))
    # Rounding must not push an end past the share itself: at 0 and 1 they are equal.
    return max(0.0, min(centre - half, share)), min(1.0, max(centre + half, share))


def read_curves(path: Path, value: str = "loss") -> tuple[Curve, ...]:
    """The training curves in a metrics file: JSON lines with `step`, `value` and, where there are several, `phase`.

    Lines without these keys (other metrics) are passed over, and so is a torn last line: a report of an
    interrupted run shows what there is. A step that a resumed run did again counts as it came out last. A missing
    file gives no curves.
    """
    curves: dict[str, dict[int, float]] = {}
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if not isinstance(record, dict) or not all(_is_number(record.get(key)) for key in ("step", value)):
            continue
        curves.setdefault(str(record.get("phase", "train")), {})[int(record["step"])] = float(record[value])
    return tuple(
        Curve(phase=phase, steps=tuple(sorted(losses)), losses=tuple(losses[step] for step in sorted(losses)))
        for phase, losses in curves.items()
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
