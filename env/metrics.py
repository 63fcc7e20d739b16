"""What an episode's records add up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from statelm_jax.types import ActionStop, Snapshot, TurnRecord


def episode_metrics(snapshots: Sequence[Snapshot], turns: Sequence[TurnRecord]) -> dict[str, Any]:
    """What can be counted from the records of an episode. `peak_context_tokens` is the largest prompt and reply."""
    tools = Counter(turn.tool for turn in turns if turn.tool is not None)
    deletes = [turn for turn in turns if turn.tool == "deleteContext" and not turn.error]
    return {
        "turns": len(turns),
        "peak_context_tokens": max((len(shot.prompt) + len(shot.action.token_ids) for shot in snapshots), default=0),
        "prompt_tokens": sum(turn.prompt_tokens for turn in turns),
        "reply_tokens": sum(len(shot.action.token_ids) for shot in snapshots),
        "cached_tokens": sum(turn.cached_tokens for turn in turns),
        "prefilled_tokens": sum(turn.prefilled_tokens for turn in turns),
        "deletes": len(deletes),
        "deleted_messages": sum(len(turn.deleted) for turn in deletes),
        "freed_tokens": sum(turn.freed_tokens for turn in turns),
        "invalid_replies": sum(turn.tool is None for turn in turns),
        "cut_replies": sum(shot.action.stop is ActionStop.LENGTH for shot in snapshots),
        "tool_errors": sum(turn.error and turn.tool is not None for turn in turns),
        "notes": len(turns[-1].notes) if turns else 0,
        "tool_counts": dict(sorted(tools.items())),
    }
