"""Token trees -> packed rows -> `TreeBatch`: the one way from the host to a train step.

1. `pack` puts whole trees into rows of a fixed length (a tree that is too large is split first, with the shared
   prefix repeated; nothing is ever truncated);
2. `batches` turns rows into padded arrays of one shape, with the loss denominator of the whole (global) batch.

Everything here but the registration of `TreeBatch` as a pytree is numpy; the train loop moves batches to devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import numpy as np
from numpy.typing import DTypeLike, NDArray

from statelm_jax.token_tree import TokenTree, join, split

Array: TypeAlias = np.ndarray | jax.Array
"""numpy on the host, jax on a device and inside jit."""

TARGET_ROUNDING = 64
"""A target bucket that is chosen from the data is a multiple of this."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packing:
    """Rows of one shape.

    Attributes:
      rows: Forests of at most `row_tokens` nodes and `row_targets` targets each.
      row_tokens: T of the batches.
      row_targets: R of the batches.
      repeated_tokens: Prefix tokens that splitting repeated.
      untrained_trees: Trees left out because no token in them carries weight.
    """

    rows: tuple[TokenTree, ...]
    row_tokens: int
    row_targets: int
    repeated_tokens: int
    untrained_trees: int

    @property
    def fill(self) -> float:
        """Share of the rows' tokens that are not padding."""
        return sum(row.tokens for row in self.rows) / max(len(self.rows) * self.row_tokens, 1)

    @property
    def target_fill(self) -> float:
        """Share of the rows' targets that are not padding."""
        return sum(row.targets for row in self.rows) / max(len(self.rows) * self.row_targets, 1)


def pack(trees: Sequence[TokenTree], row_tokens: int, row_targets: int | None = None) -> Packing:
    """Whole trees into as few rows as best-fit-decreasing finds; the same trees give the same rows.

    Args:
      trees: From `build_tree`; those that do not fit a row are split.
      row_tokens: Tokens of a row.
      row_targets: Targets of a row; None takes what the fullest row needs, rounded up.

    Raises:
      UserError: A single snapshot is longer than a row.
    """
    limit = row_targets if row_targets is not None else max(sum(tree.targets for tree in trees), 1)
    pieces = [piece for tree in trees for piece in split(tree, row_tokens, limit)]
    free_tokens = np.zeros(len(pieces), np.int64)
    free_targets = np.zeros(len(pieces), np.int64)
    rows: list[list[TokenTree]] = []
    for piece in sorted(pieces, key=lambda piece: (-piece.tokens, -piece.targets)):
        fits = np.flatnonzero((free_tokens >= piece.tokens) & (free_targets >= piece.targets))
        row = int(fits[free_tokens[fits].argmin()]) if fits.size else len(rows)
        if row == len(rows):
            rows.append([])
            free_tokens[row], free_targets[row] = row_tokens, limit
        rows[row].append(piece)
        free_tokens[row] -= piece.tokens
        free_targets[row] -= piece.targets
    packed = tuple(join(row) for row in rows)
    if row_targets is None:
        fullest = max((row.targets for row in packed), default=1)
        row_targets = -(-fullest // TARGET_ROUNDING) * TARGET_ROUNDING
    return Packing(
        rows=packed,
        row_tokens=row_tokens,
        row_targets=row_targets,
        repeated_tokens=sum(piece.tokens for piece in pieces) - sum(tree.tokens for tree in trees),
        untrained_trees=sum(tree.targets == 0 for tree in trees),
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class TreeBatch:
    """What a train step reads: B rows of T tokens and R targets. A pytree.

    Padding tokens have end 0 (nobody sees them, they see nobody), parent -1; padding targets have index 0, weight 0.

    Attributes:
      tokens_BT, position_BT, parent_BT, end_BT: int32, as in `TokenTree`.
      target_BR: int32 index in the row of each target token.
      weight_BR, advantage_BR, sampler_logprob_BR: float, as in `TokenTree`.
      denominator: float scalar that the weighted sum over the *global* batch is divided by; the same in all
        micro-batches and on all devices, so that no loss depends on how rows were distributed.
    """

    tokens_BT: Array
    position_BT: Array
    parent_BT: Array
    end_BT: Array
    target_BR: Array
    weight_BR: Array
    advantage_BR: Array
    sampler_logprob_BR: Array
    denominator: Array


def make_batch(
    rows: Sequence[TokenTree],
    packing: Packing,
    rows_per_batch: int,
    *,
    denominator: float | None = None,
    dtype: DTypeLike = np.float32,
) -> TreeBatch:
    """At most `rows_per_batch` rows as arrays; missing rows are padding.

    Args:
      rows: Rows of the packing.
      packing: Gives T and R.
      rows_per_batch: B, over all devices and micro-batches.
      denominator: None takes the sum of all weights (a weighted mean). A batch without any weight has 1, so that
        its loss and gradient are 0 and not NaN.
      dtype: Of weights, advantages and log-probs.
    """
    if denominator is None:
        denominator = sum(float(row.weight_R.sum()) for row in rows)

    def padded(columns: Sequence[NDArray], width: int, fill: int, kind: DTypeLike) -> NDArray:
        out = np.full((rows_per_batch, width), fill, kind)
        for line, column in zip(out[: len(columns)], columns, strict=True):
            line[: column.size] = column
        return out

    T, R = packing.row_tokens, packing.row_targets
    return TreeBatch(
        tokens_BT=padded([row.tokens_T for row in rows], T, 0, np.int32),
        position_BT=padded([row.position_T for row in rows], T, 0, np.int32),
        parent_BT=padded([row.parent_T for row in rows], T, -1, np.int32),
        end_BT=padded([row.end_T for row in rows], T, 0, np.int32),
        target_BR=padded([row.target_R for row in rows], R, 0, np.int32),
        weight_BR=padded([row.weight_R for row in rows], R, 0, dtype),
        advantage_BR=padded([row.advantage_R for row in rows], R, 0, dtype),
        sampler_logprob_BR=padded([row.sampler_logprob_R for row in rows], R, 0, dtype),
        denominator=np.asarray(denominator if denominator > 0 else 1.0, dtype),
    )


def batches(
    packing: Packing,
    rows_per_batch: int,
    *,
    rng: np.random.Generator | None = None,
    dtype: DTypeLike = np.float32,
) -> Iterator[TreeBatch]:
    """All rows once, in batches of one shape; the last one is filled up with empty rows.

    Args:
      packing: From `pack`.
      rows_per_batch: B, over all devices and micro-batches.
      rng: Shuffles the rows; None keeps their order.
      dtype: Of weights, advantages and log-probs.
    """
    order = rng.permutation(len(packing.rows)) if rng is not None else np.arange(len(packing.rows))
    for start in range(0, len(order), rows_per_batch):
        rows = [packing.rows[i] for i in order[start : start + rows_per_batch]]
        yield make_batch(rows, packing, rows_per_batch, dtype=dtype)
