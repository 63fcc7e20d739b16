"""The report of a run: one HTML file with the numbers, the figures and the episodes behind them.

The life of a report:
  1. the figures are drawn twice, light and dark; the light ones are also written as PNG files beside the report;
  2. each section is a function from the frozen record to markup, every text of it escaped;
  3. a handful of right and wrong episodes of each group goes into the same viewer that `statelm view` makes;
  4. the page is written whole or not at all.
"""

from __future__ import annotations

import io
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from statelm_jax.tokenizer import Tokenizer
from statelm_jax.train import html
from statelm_jax.train.episodes import Choice, viewer_data
from statelm_jax.train.failures import FAILURES
from statelm_jax.train.plots import Target, Theme, plot_accuracy, plot_sawtooth, plot_training
from statelm_jax.train.results import CONDITIONS, ConditionResult, DemoReport
from statelm_jax.train.view import KEYS, masthead, viewer_section
from statelm_jax.types import Trajectory

LIMITS = (
    "The tiny model answers one kind of question: what value a needle sentence gives to a key. It was trained on "
    "nothing else and does not understand the text around it. Other questions get a wrong answer or none.",
    "The model acts greedily and was trained once. The intervals cover the choice of test questions, not of the seed.",
    "The test documents use keys, values and stretches of text that were never trained on, but the same sentence "
    "forms and the same kind of text.",
    "The twin is as large as the model and was trained on the same needles, but it can only read what fits into its "
    "window: its numbers show what the window costs, not what the best model without tools could do.",
)
"""What a reader must know to read the numbers rightly, after what the run itself says."""


def write_report(
    run_dir: Path,
    report: DemoReport,
    trajectories: Mapping[str, Sequence[Trajectory]],
    tokenizer: Tokenizer,
    *,
    episodes_per_group: int = 4,
) -> Path:
    """Write `report.html` and its figures into `run_dir`; returns the report's path.

    Args:
      run_dir: Folder of the run.
      report: The numbers and the words.
      trajectories: Evaluated episodes by group, in the order to show ("scan, 4x", ...). The saw-tooth is drawn of
        the group with the longest episode.
      tokenizer: The one that the episodes' ids come from.
      episodes_per_group: Episodes of each group to show, right and wrong ones in equal parts as far as there are.

    Raises:
      UserError: The folder cannot be written.
    """
    chosen = {name: _choose(group, episodes_per_group) for name, group in trajectories.items()}
    data = viewer_data(chosen.items(), tokenizer, report.window)
    body = "".join(
        (
            masthead(report.title, f"{report.model}, window {report.window:,} tokens"),
            '<main class="report">',
            f'<p class="headline">{html.text(headline(report))}</p>',
            _tiles(report),
            _section("Results", _results_table(report.results)),
            '<div class="figures">',
            _accuracy_figure(run_dir, report),
            _sawtooth_figure(run_dir, report, trajectories),
            "</div>",
            _section("Where failures come from", _failures(report.results)),
            _training_section(run_dir, report),
            '<div class="pair">',
            _section("Time", _stages_table(report)),
            _section(
                "Machine", html.table(("", ""), [(html.text(k), html.text(v)) for k, v in report.machine.items()])
            ),
            "</div>",
            _section("What these numbers do not say", _list((*report.limits, *LIMITS))),
            "</main>",
            _episodes(data, sum(map(len, trajectories.values()))),
        )
    )
    path = run_dir / "report.html"
    html.write(path, html.page(report.title, body))
    return path


def headline(report: DemoReport) -> str:
    """The outcome at the longest documents in one sentence, whatever it is."""
    longest = max((result.multiple for result in report.results), default=None)
    rows = {result.name: result for result in report.results if result.multiple == longest and result.episodes}
    if longest is None or not rows:
        return "No episode was evaluated."
    tokens = next(iter(rows.values())).document_tokens
    where = f"In documents of {tokens:,} tokens, {longest:g} times the window of {report.window:,}, "
    ways = [
        f"{100 * rows[name].accuracy:.0f} % {way}"
        for name, way in (("scan", "by scanning"), ("search", "with search"))
        if name in rows
    ]
    parts = [f"StateLM answers {' and '.join(ways)}"] if ways else []
    if "twin" in rows:
        parts.append(f"a full-context model of the same size answers {100 * rows['twin'].accuracy:.0f} %")
    return where + "; ".join(parts) + "."


def machine_info() -> dict[str, str]:
    """The machine and the versions that a run's numbers depend on."""
    packages = {name: _version(name) for name in ("jax", "flax", "numpy")}
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or "?"),
        "memory": _memory(),
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        **{name: version for name, version in packages.items() if version},
    }


# --- sections -------------------------------------------------------------------------------------------


def _section(title: str, body: str) -> str:
    return f"<section><h2>{html.text(title)}</h2>{body}</section>"


def _list(items: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.text(item)}</li>" for item in items) + "</ul>"


def _episodes(data: Mapping[str, Any], total: int) -> str:
    """The viewer under a bar of its own."""
    return (
        '<header class="masthead" id="episodes-head"><h2>Episodes</h2>'
        f'<span class="dim">{len(data["episodes"])} of {total}, right and wrong ones of each group</span>'
        f'<span class="keys dim">{KEYS}</span></header>' + viewer_section(data)
    )


def _tiles(report: DemoReport) -> str:
    """The few numbers that a reader looks for first."""
    tiles = []
    for name, label in CONDITIONS.items():
        rows = sorted((r for r in report.results if r.name == name and r.episodes), key=lambda r: r.multiple)
        tiles += [
            _tile(_percent(row), f"{label} at {row.multiple:g}×", _range(row))
            for row in rows[-2 if name == "scan" else -1 :]
        ]
    models = [result for result in report.results if result.name != "twin"]
    if models:
        peak = max(result.peak_context for result in models)
        tiles.append(_tile(f"{peak:,}", "tokens of context at most", f"of {report.window:,}"))
    if report.stages:
        tiles.append(_tile(_duration(sum(stage.seconds for stage in report.stages)), "from nothing to this page", ""))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _tile(value: str, label: str, detail: str) -> str:
    return (
        f'<div class="tile"><b>{html.text(value)}</b><span>{html.text(label)}</span>'
        f'<span class="dim">{html.text(detail)}</span></div>'
    )


def _results_table(results: Sequence[ConditionResult]) -> str:
    names = [name for name in CONDITIONS if any(result.name == name for result in results)]
    table = {(result.multiple, result.name): result for result in results}
    lengths = {result.multiple: result.document_tokens for result in results}
    models = [name for name in names if name != "twin"]
    rows = []
    for multiple in sorted(lengths):
        cells = {name: table.get((multiple, name)) for name in names}
        peak = max((cells[name].peak_context for name in models if cells[name]), default=None)  # type: ignore[union-attr]
        rows.append(
            [
                f"<b>{multiple:g}×</b>",
                f"{lengths[multiple]:,}",
                *(_accuracy_cell(cells[name]) for name in names),
                *(f"{row.mean_turns:,.1f}" if (row := cells[name]) else "–" for name in models),
                f"{peak:,}" if peak is not None else "–",
            ]
        )
    head = [
        "document, in windows",
        "tokens",
        *(CONDITIONS[name] for name in names),
        *(f"turns, {name}" for name in models),
        "peak context",
    ]
    return html.table(
        head, rows, "Right answers with Wilson's 95 % interval. Turns are means; peak context is in tokens."
    )


def _accuracy_cell(row: ConditionResult | None) -> str:
    if row is None or not row.episodes:
        return "–"
    return f'<b>{_percent(row)}</b> <span class="dim">{_range(row)} · {row.correct}/{row.episodes}</span>'


def _failures(results: Sequence[ConditionResult]) -> str:
    """One table per condition: kinds of failure by document length."""
    tables = []
    for name, label in CONDITIONS.items():
        rows = sorted((r for r in results if r.name == name), key=lambda r: r.multiple)
        kinds = {kind for row in rows for kind, count in row.failures.items() if count}
        if not kinds:
            continue
        order = [kind for kind in FAILURES if kind in kinds] + sorted(kinds - set(FAILURES))
        body = [
            [html.text(FAILURES.get(kind, kind)), *(_count(row.failures.get(kind, 0)) for row in rows)]
            for kind in order
        ]
        body.append(["<b>episodes</b>", *(f"<b>{row.episodes}</b>" for row in rows)])
        tables.append(html.table(["", *(f"{row.multiple:g}×" for row in rows)], body, label))
    return "".join(tables) or "<p>No episode failed.</p>"


def _count(count: int) -> str:
    return str(count) if count else '<span class="dim">·</span>'


def _stages_table(report: DemoReport) -> str:
    rows = [(html.text(stage.name), _duration(stage.seconds)) for stage in report.stages]
    rows.append(("<b>together</b>", f"<b>{_duration(sum(stage.seconds for stage in report.stages))}</b>"))
    return html.table(("stage", "time"), rows)


# --- figures --------------------------------------------------------------------------------------------


def _accuracy_figure(run_dir: Path, report: DemoReport) -> str:
    if not report.results:
        return ""
    return _figure(
        run_dir / "accuracy.png",
        lambda target, theme: plot_accuracy(report.results, target, theme),
        "Right answers by document length",
    )


def _sawtooth_figure(run_dir: Path, report: DemoReport, trajectories: Mapping[str, Sequence[Trajectory]]) -> str:
    groups = [group for group in trajectories.values() if any(episode.turns for episode in group)]
    if not groups:
        return ""
    group = max(groups, key=lambda episodes: max(len(episode.turns) for episode in episodes))
    episodes = sorted(group, key=lambda episode: len(episode.turns))[-5:]
    document = episodes[-1].metrics.get("document_tokens")
    return _figure(
        run_dir / "sawtooth.png",
        lambda target, theme: plot_sawtooth(episodes, report.window, document, target, theme),
        "Context tokens by turn, beside a context that keeps everything",
    )


def _training_section(run_dir: Path, report: DemoReport) -> str:
    curves = [curve for curve in report.curves if curve.steps]
    if not curves:
        return ""
    figure = _figure(
        run_dir / "training.png",
        lambda target, theme: plot_training(curves, target, theme),
        "Training loss by optimiser step, one panel per phase",
    )
    return _section("Training", f'<div class="figures">{figure}</div>')


def _figure(path: Path, draw: Callable[[Target, Theme], None], caption: str) -> str:
    """Draw light (into the file) and dark; both inlined, the page shows the one that fits."""
    draw(path, "light")
    dark = io.BytesIO()
    draw(dark, "dark")
    images = html.image(path.read_bytes(), caption, "only-light") + html.image(dark.getvalue(), caption, "only-dark")
    return f"<figure>{images}<figcaption>{html.text(caption)}</figcaption></figure>"


# --- words ----------------------------------------------------------------------------------------------


def _choose(group: Sequence[Trajectory], limit: int) -> list[Trajectory]:
    choice = Choice(limit)
    for trajectory in group:
        choice.add(trajectory)
    return choice.chosen()


def _percent(row: ConditionResult) -> str:
    return f"{100 * row.accuracy:.0f} %"


def _range(row: ConditionResult) -> str:
    low, high = row.interval
    return f"{100 * low:.0f}–{100 * high:.0f} %"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    except (AttributeError, OSError, ValueError):
        return "unknown"
