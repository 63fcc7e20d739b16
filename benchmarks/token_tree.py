"""What token trees save in training: the same snapshots with the same weights, laid out in three ways.

    python -m benchmarks.token_tree [--json]

The trajectories are the scanning expert's in the native environment: 30 turns over 8 chunks, every step trained.
The geometry is that of long-document work scaled down (a head of 55 tokens, chunks of 256, 12 notes), with the
packaged tokenizer and a model of the demo's size. The three sides:

* padded: one snapshot per row, all rows as long as the longest snapshot;
* packed: whole snapshots side by side in rows of `ROW_TOKENS`, none sharing anything;
* tree: one token tree per trajectory, in rows of `ROW_TOKENS`.

All sides run the same jitted loss and gradient (the optimiser's update costs the same everywhere and is left out)
over all snapshots, in batches of about `BATCH_TOKENS` tokens, alternating, in one process. Times are medians of the
rounds. The last line is one JSON object:

* `token_ratio_padded`, `token_ratio_packed`: tokens computed, padding included, in multiples of the tree's;
* `wall_ratio_padded`, `wall_ratio_packed`: time per pass over the data, in multiples of the tree's;
* `max_grad_rel_diff`: the largest relative difference of any gradient leaf (by norm) between the tree and another side.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from statelm_jax.batch import Packing, TreeBatch, make_batch, pack
from statelm_jax.chat import ChatFormat
from statelm_jax.config import ChatConfig, EnvConfig, ModelConfig
from statelm_jax.env.experts import ScanExpert
from statelm_jax.env.haystack import default_source_text
from statelm_jax.env.rollout import rollout
from statelm_jax.env.tasks import NeedleConfig, needle_tasks
from statelm_jax.losses import sft_loss, target_logprobs
from statelm_jax.model import Qwen3
from statelm_jax.token_tree import WeightedSnapshot, build_tree, weigh
from statelm_jax.tokenizer import TINY_FOLDER, Tokenizer
from statelm_jax.types import StopReason, Trajectory

EPISODES = 8
ROUNDS = 3
CHUNKS, CHUNK_TOKENS, NOTES = 8, 256, 12
ROW_TOKENS = 2_048
BATCH_TOKENS = 4_096
ENV = EnvConfig(
    context_window=ROW_TOKENS,
    max_reply_tokens=128,
    min_reply_tokens=64,
    reserve_tokens=160,
    notes_share=0.5,
    chunk_tokens=CHUNK_TOKENS,
    system_prompt="Answer from the notes.",
)
MODEL = ModelConfig(
    vocab_size=1_024,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    rope_theta=10_000.0,
    tie_word_embeddings=True,
)

Gradient = Callable[[Any, TreeBatch], Any]


def measure(episodes: int = EPISODES, rounds: int = ROUNDS) -> dict[str, Any]:
    """All figures, as described at the head of this module."""
    trajectories = expert_trajectories(episodes)
    layouts = lay_out([weighted(trajectory) for trajectory in trajectories])
    graphdef, params = nnx.split(Qwen3(MODEL, rngs=nnx.Rngs(0)))

    @jax.jit
    def gradient(params, batch):
        def loss(params):
            logp_BR = target_logprobs(nnx.merge(graphdef, params), batch)
            return sft_loss(logp_BR, batch.weight_BR, batch.denominator)

        return jax.grad(loss)(params)

    batches = {side: as_batches(packing) for side, packing in layouts.items()}
    grads = {side: total_gradient(gradient, params, batches[side]) for side in layouts}  # compiles, too
    seconds: dict[str, list[float]] = {side: [] for side in layouts}
    for _, side in itertools.product(range(rounds), layouts):
        start = time.perf_counter()
        jax.block_until_ready(total_gradient(gradient, params, batches[side]))
        seconds[side].append(time.perf_counter() - start)
    wall = {side: statistics.median(times) for side, times in seconds.items()}
    tokens = {side: len(packing.rows) * packing.row_tokens for side, packing in layouts.items()}
    turns = [len(trajectory.turns) for trajectory in trajectories]
    return {
        "token_ratio_padded": tokens["padded"] / tokens["tree"],
        "token_ratio_packed": tokens["packed"] / tokens["tree"],
        "wall_ratio_padded": wall["padded"] / wall["tree"],
        "wall_ratio_packed": wall["packed"] / wall["tree"],
        "max_grad_rel_diff": max(relative_difference(grads["tree"], grads[side]) for side in ("padded", "packed")),
        "episodes": episodes,
        "turns": statistics.mean(turns),
        "snapshot_tokens": sum(row.snapshot_tokens for row in layouts["tree"].rows),
        "longest_snapshot": layouts["padded"].row_tokens,
        **{f"tokens_{side}": count for side, count in tokens.items()},
        **{f"fill_{side}": packing.fill for side, packing in layouts.items()},
        **{f"wall_s_{side}": seconds for side, seconds in wall.items()},
    }


def expert_trajectories(episodes: int) -> list[Trajectory]:
    """Finished trajectories of about 30 turns (two to open, reads, notes, deletes, and the answer)."""
    tokenizer = Tokenizer.load(TINY_FOLDER)
    chat = ChatFormat(tokenizer, ChatConfig(tools_in_prompt="names", compact_json=True))
    needles = NeedleConfig(document_tokens=CHUNKS * CHUNK_TOKENS, distractors=NOTES - 1)
    tasks = needle_tasks(needles, default_source_text(), tokenizer, episodes, seed=0)
    done = list(rollout(tasks, ScanExpert(chat), chat, ENV, max_live=episodes, seed=0))
    assert all(trajectory.stop is StopReason.FINISHED for trajectory in done)
    return sorted(done, key=lambda trajectory: trajectory.task_id)


def weighted(trajectory: Trajectory) -> list[WeightedSnapshot]:
    """Every step, weight 1 per action token."""
    return [weigh(s, name=f"{trajectory.task_id}#{turn}") for turn, s in enumerate(trajectory.snapshots, 1)]


def lay_out(trajectories: Sequence[Sequence[WeightedSnapshot]]) -> Mapping[str, Packing]:
    """The three sides, all through the same code: a plain row is a tree of one snapshot."""
    single = [build_tree([snapshot]) for snapshots in trajectories for snapshot in snapshots]
    longest = max(tree.tokens for tree in single)
    return {
        "padded": Packing(
            rows=tuple(single),
            row_tokens=longest,
            row_targets=max(tree.targets for tree in single),
            repeated_tokens=0,
            untrained_trees=0,
        ),
        "packed": pack(single, ROW_TOKENS),
        "tree": pack([build_tree(snapshots) for snapshots in trajectories], ROW_TOKENS),
    }


def as_batches(packing: Packing) -> list[TreeBatch]:
    """Batches of about `BATCH_TOKENS` tokens with one denominator for all of them."""
    total = sum(float(row.weight_R.sum()) for row in packing.rows)
    size = min(max(BATCH_TOKENS // packing.row_tokens, 1), len(packing.rows))
    return [
        make_batch(packing.rows[start : start + size], packing, size, denominator=total)
        for start in range(0, len(packing.rows), size)
    ]


def total_gradient(gradient: Gradient, params: Any, batches: Sequence[TreeBatch]) -> Any:
    """The gradient of the loss over all batches."""
    total = gradient(params, batches[0])
    for batch in batches[1:]:
        total = jax.tree.map(jax.numpy.add, total, gradient(params, batch))
    return total


def relative_difference(one: Any, two: Any) -> float:
    """The largest ||a - b|| / ||b|| over all leaves."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return max(float(np.linalg.norm(np.subtract(a, b)) / np.linalg.norm(b)) for a, b in pairs)


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table (unless --json) and the JSON line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.token_tree", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    parser.add_argument("--episodes", type=int, default=EPISODES, help="trajectories (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timed passes of each side (default: %(default)s)")
    given = parser.parse_args(argv)
    figures = measure(given.episodes, given.rounds)
    if not given.json:
        table = Table("figure", "value", title="Token trees against separate snapshots")
        for name, value in figures.items():
            table.add_row(name, f"{value:,.3g}" if isinstance(value, float) else f"{value:,}")
        Console().print(table)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
