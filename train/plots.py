"""The figures of a report as PNG files: the saw-tooth, accuracy by document length, training curves.

Drawn on matplotlib's Agg canvas without pyplot, so nothing global changes and no display is needed. Colours are
Okabe and Ito's (safe for colour-blind readers), and lines differ in marker or dash as well. `theme` is `light`
for files that stand alone; the report also holds `dark` ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from statelm_jax.errors import UserError
from statelm_jax.train.results import CONDITIONS, ConditionResult, Curve
from statelm_jax.types import Trajectory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Theme = Literal["light", "dark"]
Target = Path | IO[bytes]
"""A PNG file to write, or an open one."""

_INK: Mapping[str, Mapping[str, str]] = {
    "light": {"page": "#ffffff", "ink": "#1b2129", "dim": "#5d6875", "grid": "#e3e6ea"},
    "dark": {"page": "#191d23", "ink": "#e4e8ee", "dim": "#98a3b1", "grid": "#2c333c"},
}
_BLUE: Mapping[str, str] = {"light": "#0072b2", "dark": "#56b4e9"}
_GREEN: Mapping[str, str] = {"light": "#009e73", "dark": "#35c49b"}
_RED: Mapping[str, str] = {"light": "#d55e00", "dark": "#f08a4b"}
_STYLE: Mapping[str, tuple[Mapping[str, str], str]] = {
    "scan": (_BLUE, "o"),
    "search": (_GREEN, "s"),
    "twin": (_RED, "^"),
}
_DPI = 200
_ZOOM_TURNS = 100
"""More teeth than these run together on the page."""


def plot_sawtooth(
    trajectories: Sequence[Trajectory],
    window: int,
    document_tokens: int | None,
    path: Target,
    theme: Theme = "light",
) -> None:
    """Context tokens by turn beside what a model that deletes nothing would hold.

    Two panels: above, both on the scale of the whole document; below, the saw-tooth alone on the scale of the window,
    its first turns only where the episode is long. The longest episode is drawn boldly, the others faintly.

    Args:
      trajectories: Episodes over documents of one length; at least one turn among them.
      window: Context window in tokens.
      document_tokens: Length of the documents, drawn as a line; None leaves it out.
      path: Where the PNG goes.
      theme: Colours.
    """
    episodes = sorted((t for t in trajectories if t.turns), key=lambda t: len(t.turns))
    if not episodes:
        raise ValueError("no episode with a turn to draw")
    longest = len(episodes[-1].turns)
    with _figure(path, theme, 6.0, 4.8) as figure:
        above, below = figure.subplots(2, 1, height_ratios=(1.1, 1))
        for index, episode in enumerate(episodes, start=1):
            _draw_episode(above, below, episode, theme, bold=index == len(episodes))
        if document_tokens:
            _level(above, document_tokens, f"document: {document_tokens:,} tokens", _INK[theme]["dim"], ":")
        for axes, turns in ((above, longest), (below, min(longest, _ZOOM_TURNS))):
            _level(axes, window, f"window: {window:,} tokens", _INK[theme]["ink"], "-.", right=axes is above)
            axes.set_xlim(1, turns + 1)
            axes.set_ylabel("context tokens")
            axes.yaxis.set_major_formatter("{x:,.0f}")
        above.set_ylim(0, above.get_ylim()[1] * 1.06)
        below.set_ylim(0, window * 1.2)
        below.set_xlabel("turn")
        above.set_title("on the scale of the document", loc="left")
        part = f"the first {_ZOOM_TURNS} turns" if longest > _ZOOM_TURNS else "the same"
        below.set_title(f"{part} on the scale of the window", loc="left")
        _legend(figure, above)


def _draw_episode(above: Axes, below: Axes, episode: Trajectory, theme: Theme, *, bold: bool) -> None:
    strength: dict[str, Any] = {"alpha": 1.0, "lw": 1.6} if bold else {"alpha": 0.3, "lw": 0.8}
    turns, context = _saw(episode)
    above.plot(*_keeping_everything(episode), color=_RED[theme], ls="--", label="keeping everything", **strength)
    for axes in (above, below):
        axes.plot(turns, context, color=_BLUE[theme], label="StateLM", **strength)
    if bold:
        below.fill_between(turns, context, color=_BLUE[theme], alpha=0.15, lw=0)


def plot_accuracy(results: Sequence[ConditionResult], path: Target, theme: Theme = "light") -> None:
    """Share of right answers by document length in windows (log axis), with Wilson's 95 % intervals."""
    if not results:
        raise ValueError("no results to draw")
    with _figure(path, theme, 6.0, 4.8) as figure:
        axes = figure.subplots()
        names = [name for name in CONDITIONS if any(result.name == name for result in results)]
        for place, name in enumerate(names):
            rows = sorted((r for r in results if r.name == name and r.episodes), key=lambda r: r.multiple)
            dodge = 2 ** (0.07 * (place - (len(names) - 1) / 2))  # intervals side by side, not on top of each other
            shares = [100 * row.accuracy for row in rows]
            errors = [
                [100 * (row.accuracy - row.interval[0]) for row in rows],
                [100 * (row.interval[1] - row.accuracy) for row in rows],
            ]
            colour, marker = _STYLE[name][0][theme], _STYLE[name][1]
            axes.errorbar(
                [row.multiple * dodge for row in rows], shares, yerr=errors, color=colour, marker=marker, ms=6.5,
                lw=1.8, elinewidth=1.2, capsize=2.5, label=CONDITIONS[name], clip_on=False, zorder=3,
            )  # fmt: skip
        _accuracy_axes(axes, results, theme)
        _legend(figure, axes)


def _accuracy_axes(axes: Axes, results: Sequence[ConditionResult], theme: Theme) -> None:
    tokens = {result.multiple: result.document_tokens for result in results}
    multiples = sorted(tokens)
    axes.set_xscale("log", base=2)
    axes.set_xticks(multiples, [f"{multiple:g}×\n{tokens[multiple]:,}" for multiple in multiples])
    axes.set_xticks([], minor=True)
    axes.set_xlim(multiples[0] / 1.4, multiples[-1] * 1.4)
    axes.set_yticks(range(0, 101, 20), [f"{share} %" for share in range(0, 101, 20)])
    axes.set_ylim(0, 100)
    axes.set_xlabel("document length in context windows, and in tokens")
    axes.set_ylabel("right answers (95 % interval)")
    axes.axvline(1, color=_INK[theme]["dim"], lw=1.1, ls="-.", zorder=1)
    axes.annotate(
        "context window", (1, 0.5), xycoords=("data", "axes fraction"), rotation=90, ha="right", va="center",
        xytext=(-4, 0), textcoords="offset points", color=_INK[theme]["dim"], fontsize=8.5,
    )  # fmt: skip


def plot_training(curves: Sequence[Curve], path: Target, theme: Theme = "light") -> None:
    """Loss by step, one panel for each training phase (each has its own objective, so no common scale)."""
    curves = [curve for curve in curves if curve.steps]
    if not curves:
        raise ValueError("no training curve to draw")
    with _figure(path, theme, 7.2, 2.6) as figure:
        panels = figure.subplots(1, len(curves), squeeze=False)[0]
        for axes, curve in zip(panels, curves, strict=True):
            axes.plot(curve.steps, curve.losses, color=_BLUE[theme], lw=0.8, alpha=0.4)
            axes.plot(curve.steps, _smooth(curve.losses), color=_BLUE[theme], lw=1.7)
            if min(curve.losses) > 0 and max(curve.losses) > 5 * min(curve.losses):
                _log_scale(axes)
            axes.set_title(curve.phase)
            axes.set_xlabel("step")
        panels[0].set_ylabel("loss")


def _log_scale(axes: Axes) -> None:
    """A log axis with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def keeping_everything(trajectory: Trajectory) -> list[int]:
    """Tokens before each turn if nothing had ever been deleted: the prompt plus all that was freed so far."""
    freed = accumulate((turn.freed_tokens for turn in trajectory.turns), initial=0)
    return [turn.prompt_tokens + before for turn, before in zip(trajectory.turns, freed, strict=False)]


def _keeping_everything(trajectory: Trajectory) -> tuple[list[float], list[int]]:
    whole = keeping_everything(trajectory)
    replies = [len(snapshot.action.token_ids) for snapshot in trajectory.snapshots]
    return [*map(float, range(1, len(whole) + 1)), len(whole) + 0.9], [*whole, whole[-1] + replies[-1]]


def _saw(trajectory: Trajectory) -> tuple[list[float], list[int]]:
    """The prompt at the start of each turn, and with the reply just before its end."""
    turns: list[float] = []
    context: list[int] = []
    for index, snapshot in enumerate(trajectory.snapshots, start=1):
        turns += [index, index + 0.9]
        context += [len(snapshot.prompt), len(snapshot.prompt) + len(snapshot.action.token_ids)]
    return turns, context


def _smooth(values: Sequence[float]) -> NDArray[np.float64]:
    """A centred moving mean (no lag); its span grows with the length of the curve and is cut at the ends."""
    half = len(values) // 100
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    first, last = np.maximum(places - half, 0), np.minimum(places + half + 1, len(values))
    return (sums[last] - sums[first]) / (last - first)


def _level(axes: Axes, height: float, text: str, colour: str, dash: str, *, right: bool = False) -> None:
    """A named horizontal line."""
    axes.axhline(height, color=colour, lw=1.1, ls=dash, zorder=1)
    axes.annotate(
        text, (int(right), height), xycoords=("axes fraction", "data"), xytext=(-6 if right else 6, 3),
        textcoords="offset points", ha="right" if right else "left", color=colour, fontsize=8.5,
    )  # fmt: skip


def _legend(figure: Figure, axes: Axes) -> None:
    handles = {
        label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }  # the last of each
    figure.legend(
        handles.values(), handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9.5
    )


@contextmanager
def _figure(path: Target, theme: Theme, width: float, height: float) -> Iterator[Figure]:
    """A figure in the house style, written to `path` at the end. `UserError` when it cannot be written."""
    import matplotlib  # takes half a second: only for those who draw
    from matplotlib.figure import Figure

    ink = _INK[theme]
    style: dict[Any, Any] = {
        "figure.facecolor": ink["page"], "axes.facecolor": ink["page"], "savefig.facecolor": ink["page"],
        "axes.edgecolor": ink["dim"], "axes.labelcolor": ink["ink"], "text.color": ink["ink"],
        "axes.titlecolor": ink["ink"], "xtick.color": ink["dim"], "ytick.color": ink["dim"], "grid.color": ink["grid"],
        "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.linewidth": 0.8, "axes.linewidth": 0.8,
        "axes.spines.top": False, "axes.spines.right": False, "font.family": "sans-serif", "font.size": 9.5,
        "axes.labelsize": 9.5, "axes.titlesize": 9.5,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        try:
            if isinstance(path, Path):
                path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, format="png", dpi=_DPI)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}") from None
