"""Random weighted snapshots that share prefixes, branch, revisit branches and coincide; shared by several tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from statelm_jax.token_tree import WeightedSnapshot

VOCAB = 11


def snapshot(
    prompt: ArrayLike,
    action: ArrayLike,
    weights: ArrayLike = 1.0,
    advantage: float = 1.0,
    logprobs: ArrayLike | None = None,
    name: str = "snapshot",
) -> WeightedSnapshot:
    """A snapshot from plain lists; one number as weight serves all action tokens."""
    action_A = np.array(action, np.int32)
    return WeightedSnapshot(
        prompt=np.array(prompt, np.int32),
        action=action_A,
        weight_A=np.broadcast_to(np.asarray(weights, np.float64), action_A.shape).copy(),
        advantage=advantage,
        logprobs_A=None if logprobs is None else np.array(logprobs, np.float32),
        name=name,
    )


def ids(item: WeightedSnapshot) -> np.ndarray:
    """Prompt and action as one sequence."""
    return np.concatenate([item.prompt, item.action])


@st.composite
def snapshots(draw, max_count: int = 6, max_piece: int = 5, weights=(0.0, 0.25, 1.0, 3.0)) -> list[WeightedSnapshot]:
    """Trajectory-like snapshots: a prompt is some cut of an earlier sequence plus new tokens.

    The alphabet of the new tokens is small, so that branches coincide by chance as well.
    """
    token = st.integers(0, draw(st.sampled_from([1, 2, VOCAB - 1])))
    piece = st.lists(token, min_size=1, max_size=max_piece)
    made: list[WeightedSnapshot] = []
    for number in range(draw(st.integers(1, max_count))):
        base = list(ids(draw(st.sampled_from(made)))) if made else []
        prompt = base[: draw(st.integers(0, len(base)))] + draw(piece)
        action = draw(piece)
        weight = [draw(st.sampled_from(weights)) for _ in action]
        advantage = draw(st.sampled_from([1.0, -0.5]))
        logprobs = [draw(st.sampled_from([-0.5, -2.0])) for _ in action] if draw(st.booleans()) else None
        made.append(snapshot(prompt, action, weight, advantage, logprobs, name=f"turn {number + 1}"))
    return made


def longest(items: Sequence[WeightedSnapshot]) -> int:
    """Length of the longest sequence."""
    return max(ids(item).size for item in items)
