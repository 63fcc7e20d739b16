"""Packing and batching: rows of one shape, nothing lost, nothing counted twice, the same from the same trees."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statelm_jax.batch import TARGET_ROUNDING, batches, make_batch, pack
from statelm_jax.errors import UserError
from statelm_jax.token_tree import build_tree
from tests.snapshots import longest, snapshot, snapshots
from tests.test_token_tree import targets_of, targets_of_snapshots

groups = st.lists(snapshots(max_count=3), min_size=1, max_size=5)


def packed(trees, row_tokens, row_targets):
    try:
        return pack(trees, row_tokens, row_targets)
    except UserError:  # one token has more targets than a row
        assert max(np.bincount(tree.target_R).max() for tree in trees if tree.targets) > row_targets
        return None


@given(groups, st.integers(0, 20), st.integers(4, 20))
def test_packing_keeps_every_target_and_every_limit(group, slack, row_targets):
    items = [item for items in group for item in items]
    packing = packed([build_tree(items) for items in group], longest(items) + slack, row_targets)
    if packing is None:
        return
    assert targets_of(packing.rows) == targets_of_snapshots(items)
    assert all(0 < row.tokens <= packing.row_tokens and row.targets <= row_targets for row in packing.rows)
    assert packing.untrained_trees == sum(not any(item.weight_A.any() for item in items) for items in group)
    unsplit = sum(build_tree(items).tokens for items in group)
    assert packing.repeated_tokens == sum(row.tokens for row in packing.rows) - unsplit


@given(groups)
def test_the_same_trees_give_the_same_rows(group):
    trees = [build_tree(items) for items in group]
    row_tokens = longest([item for items in group for item in items])
    one, two = pack(trees, row_tokens), pack(trees, row_tokens)
    assert [row.tokens_T.tolist() for row in one.rows] == [row.tokens_T.tolist() for row in two.rows]


def test_best_fit_decreasing_fills_rows():
    trees = [build_tree([snapshot([n] * (size - 1), [n])]) for n, size in enumerate([3, 7, 5, 6, 4, 5])]
    packing = pack(trees, row_tokens=10)
    assert [row.tokens for row in packing.rows] == [10, 10, 10]
    assert packing.fill == 1.0
    assert packing.row_targets == TARGET_ROUNDING
    assert packing.target_fill == 6 / (3 * TARGET_ROUNDING)


def test_a_row_has_room_for_targets_as_well_as_tokens():
    trees = [build_tree([snapshot([n], [n, n, n])]) for n in range(4)]
    packing = pack(trees, row_tokens=100, row_targets=7)
    assert [row.targets for row in packing.rows] == [6, 6]


def test_a_snapshot_longer_than_a_row_is_refused():
    with pytest.raises(UserError, match="turn 9 has 5 tokens and does not fit a row of 4"):
        pack([build_tree([snapshot([1, 2, 3], [4, 5], name="turn 9")])], row_tokens=4)


def test_long_trajectories_lose_no_turn_to_the_row_length():
    history, turns = [1], []
    for turn in range(10):
        turns.append(snapshot(history, [turn % 5 + 2] * 12))
        history = [*history[:3], turn, turn]
    packing = pack([build_tree(turns)], row_tokens=17)
    assert sum(row.targets for row in packing.rows) == 120


def test_padding_is_invisible_weightless_and_in_range():
    packing = pack([build_tree([snapshot([5, 6], [7])])], row_tokens=5, row_targets=3)
    batch = make_batch(packing.rows, packing, 2)
    assert batch.tokens_BT.tolist() == [[5, 6, 7, 0, 0], [0] * 5]
    assert batch.position_BT.tolist() == [[0, 1, 2, 0, 0], [0] * 5]
    assert batch.parent_BT.tolist() == [[-1, 0, 1, -1, -1], [-1] * 5]
    assert batch.end_BT.tolist() == [[3, 3, 3, 0, 0], [0] * 5]
    assert batch.target_BR.tolist() == [[2, 0, 0], [0, 0, 0]]
    assert batch.weight_BR.tolist() == [[1, 0, 0], [0, 0, 0]]


def test_an_empty_batch_has_a_denominator_of_one():
    batch = make_batch([], pack([], row_tokens=4, row_targets=2), 1)
    assert batch.denominator == 1
    assert not batch.weight_BR.any()


@given(groups, st.integers(1, 4), st.none() | st.integers(0, 99))
def test_batches_hold_every_row_once_in_one_shape(group, rows_per_batch, seed):
    row_tokens = longest([item for items in group for item in items])
    packing = pack([build_tree(items) for items in group], row_tokens)
    rng = None if seed is None else np.random.default_rng(seed)
    made = list(batches(packing, rows_per_batch, rng=rng, dtype=np.float64))
    rows = [tuple(row[end > 0].tolist()) for b in made for row, end in zip(b.tokens_BT, b.end_BT, strict=True)]
    assert sorted(row for row in rows if row) == sorted(tuple(row.tokens_T.tolist()) for row in packing.rows)
    assert len(made) == -(-len(packing.rows) // rows_per_batch)
    for batch in made:
        assert batch.tokens_BT.shape == (rows_per_batch, row_tokens)
        assert batch.weight_BR.shape == (rows_per_batch, packing.row_targets)
        assert batch.denominator == pytest.approx(batch.weight_BR.sum())


def test_a_denominator_can_be_given():
    packing = pack([build_tree([snapshot([5, 6], [7])])], row_tokens=5)
    assert make_batch(packing.rows, packing, 1, denominator=8.0).denominator == 8.0


def test_a_batch_is_a_pytree_of_its_arrays():
    batch = make_batch([], pack([], row_tokens=4, row_targets=2), 1)
    leaves, structure = jax.tree.flatten(batch)
    assert len(leaves) == len(dataclasses.fields(batch))
    assert {leaf.dtype.name for leaf in leaves} == {"int32", "float32"}
    assert isinstance(jax.tree.unflatten(structure, leaves), type(batch))
