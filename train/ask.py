"""`statelm ask`: one question about one document, answered by a trained agent, turn by turn.

What is printed is what happened: the call of each turn, the beginning of its result, the context in tokens, and how
much of the prompt was still in the cache.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from statelm_jax.config import Config
from statelm_jax.env.needles import question_key
from statelm_jax.env.rollout import rollout
from statelm_jax.env.tasks import load_source_text
from statelm_jax.env.trajectories import encode_trajectory
from statelm_jax.errors import UserError
from statelm_jax.train.agents import load_agent, packaged_agent
from statelm_jax.types import StopReason, Task, TurnRecord

_SHOWN_CHARS = 160


class AskConfig(Config):
    """Put a question about a document to a trained agent and watch it work.

    The packaged agent is tiny: it answers questions such as "What is the secret number of the crimson lantern?"
    about documents that hold sentences such as "The secret number of the crimson lantern is 48213.", and no others.
    """

    document: Path
    """A UTF-8 text file of any length."""
    question: str
    """What to ask."""
    model: Path | None = None
    """Agent folder or run (runs/demo); the packaged tiny agent by default."""
    search: bool = True
    """Give the agent the search tool; `--no-search` makes it scan the whole document."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the trajectory as one line of JSON, nothing else."""


def main(config: AskConfig) -> int:
    """Run one episode. Exit code 0 when it ended with an answer, 1 when it did not."""
    console = Console(stderr=config.as_json, highlight=False)
    document = load_source_text(config.document)
    if not config.question.strip():
        raise UserError("--question is empty")
    agent = load_agent(config.model or packaged_agent())
    task = Task(task_id="ask", question=config.question.strip(), document=document)
    if not config.as_json:
        if agent.settings.limits:
            console.print(f"[dim]{escape(agent.settings.limits)}[/dim]")
        if agent.settings.limits and question_key(task.question) is None:
            console.print("[yellow]This is not a question of that form; expect no sensible answer.[/yellow]")
    with console.status("compiling"):
        sampler = agent.sampler(slots=1)
    window = agent.settings.env.context_window

    def show(_: Task, record: TurnRecord) -> None:
        if not config.as_json:
            console.print(_turn_text(record, window))

    env = agent.env(search=config.search)
    (trajectory,) = rollout([task], sampler, agent.chat, env, max_live=1, seed=0, on_turn=show)
    if config.as_json:
        print(encode_trajectory(trajectory))
    elif trajectory.stop is StopReason.FINISHED:
        tokens, peak = trajectory.metrics["document_tokens"], trajectory.metrics["peak_context_tokens"]
        console.print(
            f"[bold]{escape(trajectory.answer or '')}[/bold]\n"
            f"[dim]{len(trajectory.turns)} turns over {tokens:,} tokens; "
            f"the context never held more than {peak} of {window}[/dim]"
        )
    else:
        console.print(f"[red]no answer: the episode ended with {trajectory.stop}[/red]")
    return 0 if trajectory.stop is StopReason.FINISHED else 1


def _turn_text(record: TurnRecord, window: int) -> Text:
    """Two lines: the call with the size of the context, and how the result begins."""
    arguments = json.dumps(dict(record.arguments), ensure_ascii=False)
    line = Text(f"{record.turn:>4}  ", style="dim")
    line.append(f"{record.tool or '(no call)'} ", style="bold cyan" if not record.error else "bold red")
    line.append(arguments if record.tool else record.thought[:_SHOWN_CHARS])
    line.append(f"  {record.prompt_tokens}/{window} tokens, {record.cached_tokens} cached", style="dim")
    result = " ".join(record.result.split())
    shown = result if len(result) <= _SHOWN_CHARS else result[:_SHOWN_CHARS] + " ..."
    line.append(f"\n      {shown}", style="red" if record.error else "dim")
    return line
