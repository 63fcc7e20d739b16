"""Token trees: what is in them, what each node sees, and that every trained token is there exactly once."""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statelm_jax.errors import UserError
from statelm_jax.token_tree import TokenTree, balance, build_tree, join, split, weigh
from statelm_jax.types import Action, Snapshot
from tests.snapshots import ids, longest, snapshot, snapshots


def path(tree: TokenTree, node: int) -> tuple[int, ...]:
    """Tokens from the root to the node, found by walking the parents."""
    tokens = []
    while node >= 0:
        tokens.append(int(tree.tokens_T[node]))
        node = int(tree.parent_T[node])
    return tuple(reversed(tokens))


def ancestors(tree: TokenTree, node: int) -> set[int]:
    found = set()
    while node >= 0:
        found.add(node)
        node = int(tree.parent_T[node])
    return found


def targets_of(trees) -> dict:
    """(path, advantage, sampler log-prob) -> total weight, over all trees."""
    total = defaultdict(float)
    for tree in trees:
        for i, node in enumerate(tree.target_R):
            key = (path(tree, int(node)), tree.advantage_R[i], tree.sampler_logprob_R[i])
            total[key] += tree.weight_R[i]
    return dict(total)


def targets_of_snapshots(items) -> dict:
    """The same, straight from the snapshots."""
    total = defaultdict(float)
    for item in items:
        sequence = ids(item).tolist()
        for i, weight in enumerate(item.weight_A):
            logprob = 0.0 if item.logprobs_A is None else float(item.logprobs_A[i])
            if weight > 0:
                total[tuple(sequence[: item.prompt.size + i + 1]), item.advantage, logprob] += float(weight)
    return dict(total)


@given(snapshots())
def test_every_distinct_prefix_is_one_node(items):
    tree = build_tree(items)
    prefixes = set()
    for item in items:
        last = max((i for i, weight in enumerate(item.weight_A) if weight > 0), default=-1)
        if last >= 0:
            sequence = ids(item)[: item.prompt.size + last + 1].tolist()
            prefixes |= {tuple(sequence[: n + 1]) for n in range(len(sequence))}
    assert sorted(path(tree, node) for node in range(tree.tokens)) == sorted(prefixes)


@given(snapshots(), snapshots())
def test_a_node_sees_its_root_path_and_nothing_else(items, others):
    row = join([build_tree(items), build_tree(others)])
    for i in range(row.tokens):
        visible = {j for j in range(row.tokens) if j <= i < row.end_T[j]}
        assert visible == ancestors(row, i)
        assert row.position_T[i] == len(visible) - 1


@given(snapshots())
def test_every_action_token_is_weighted_exactly_once(items):
    assert targets_of([build_tree(items)]) == targets_of_snapshots(items)


@given(st.randoms(use_true_random=False), snapshots())
def test_the_order_of_snapshots_changes_nothing(random, items):
    tree = build_tree(items)
    random.shuffle(items)
    again = build_tree(items)
    for name in ("tokens_T", "position_T", "parent_T", "end_T", "target_R", "advantage_R", "sampler_logprob_R"):
        np.testing.assert_array_equal(getattr(tree, name), getattr(again, name))
    np.testing.assert_allclose(tree.weight_R, again.weight_R, rtol=1e-14)


def test_two_snapshots_by_hand():
    tree = build_tree([snapshot([5, 6], [7, 8]), snapshot([5, 6, 9], [7])])
    assert tree.tokens_T.tolist() == [5, 6, 7, 8, 9, 7]
    assert tree.position_T.tolist() == [0, 1, 2, 3, 2, 3]
    assert tree.parent_T.tolist() == [-1, 0, 1, 2, 1, 4]
    assert tree.end_T.tolist() == [6, 6, 4, 4, 6, 6]
    assert tree.target_R.tolist() == [2, 3, 5]
    assert tree.snapshot_tokens == 8


def test_a_revisited_branch_is_not_laid_out_twice():
    first, detour = snapshot([1, 2, 3], [4]), snapshot([1, 9], [4])
    back = snapshot([1, 2, 3, 4, 5], [6])
    assert build_tree([first, detour, back]).tokens == 8


def test_coinciding_targets_add_up_and_differing_advantages_stay_apart():
    same = build_tree([snapshot([1], [2], 1.0), snapshot([1], [2], 0.5)])
    assert (same.target_R.tolist(), same.weight_R.tolist()) == ([1], [1.5])
    apart = build_tree([snapshot([1], [2], 1.0, advantage=-1.0), snapshot([1], [2], 0.5, advantage=2.0)])
    assert (apart.target_R.tolist(), apart.advantage_R.tolist()) == ([1, 1], [-1.0, 2.0])
    assert apart.weight_R.tolist() == [1.0, 0.5]


def test_tokens_that_lead_to_no_target_are_left_out():
    tree = build_tree([snapshot([1, 2], [3, 4, 5], [0, 1, 0]), snapshot([7, 8], [9], 0.0)])
    assert tree.tokens_T.tolist() == [1, 2, 3, 4]
    assert tree.target_R.tolist() == [3]


def test_snapshots_without_weight_make_an_empty_tree():
    tree = build_tree([snapshot([1, 2], [3], 0.0)])
    assert (tree.tokens, tree.targets, tree.snapshot_tokens) == (0, 0, 0)
    assert (build_tree([]).tokens, split(tree, 8, 8)) == (0, ())


@given(snapshots(), st.integers(0, 12), st.integers(2, 12))
def test_splitting_keeps_every_target_and_every_limit(items, slack, row_targets):
    tree = build_tree(items)
    row_tokens = longest(items) + slack
    try:
        pieces = split(tree, row_tokens, row_targets)
    except UserError:
        assert np.bincount(tree.target_R).max() > row_targets
        return
    assert targets_of(pieces) == targets_of_snapshots(items)
    assert all(piece.tokens <= row_tokens and 0 < piece.targets <= row_targets for piece in pieces)
    assert sorted(name for piece in pieces for name in piece.names_S) == sorted(tree.names_S)
    for piece in pieces:
        for i in range(piece.tokens):
            assert {j for j in range(piece.tokens) if j <= i < piece.end_T[j]} == ancestors(piece, i)


def test_a_tree_is_cut_where_branches_start():
    items = [snapshot([1, 2, 3, token], [token], name=f"turn {token}") for token in (4, 5, 6)]
    pieces = split(build_tree(items), row_tokens=7, row_targets=10)
    assert [piece.tokens_T.tolist() for piece in pieces] == [[1, 2, 3, 4, 4, 5, 5], [1, 2, 3, 6, 6]]
    assert [piece.names_S for piece in pieces] == [("turn 4", "turn 5"), ("turn 6",)]


def test_a_chain_with_more_targets_than_a_row_is_cut_between_targets():
    pieces = split(build_tree([snapshot([1], [2, 3, 4, 5, 6])]), row_tokens=6, row_targets=2)
    assert [piece.tokens_T[piece.target_R].tolist() for piece in pieces] == [[2, 3], [4, 5], [6]]


def test_a_snapshot_longer_than_a_row_is_refused_by_name():
    items = [snapshot([1, 2], [3], name="task 7 turn 1"), snapshot([1, 4, 5, 6], [7], name="task 7 turn 2")]
    with pytest.raises(UserError, match=r"task 7 turn 2 has 5 tokens and does not fit a row of 4.*row_tokens"):
        split(build_tree(items), row_tokens=4, row_targets=10)


def test_a_first_token_can_not_be_a_target():
    with pytest.raises(UserError, match="turn 1: an empty prompt"):
        snapshot([], [1, 2], name="turn 1")
    assert build_tree([snapshot([], [1, 2], [0, 1])]).target_R.tolist() == [1]


@pytest.mark.parametrize(
    "wrong",
    [{"weights": -1.0}, {"weights": np.nan}, {"advantage": np.inf}, {"logprobs": [0, np.nan]}, {"logprobs": [0]}],
    ids=repr,
)
def test_numbers_that_would_poison_a_loss_are_refused(wrong):
    with pytest.raises(ValueError, match="turn 3"):
        snapshot([1], [2, 3], name="turn 3", **wrong)


def test_weights_per_token_or_per_step():
    seen = Snapshot(
        prompt=np.array([1, 2], np.int32),
        action=Action(token_ids=np.array([3, 4, 5, 6], np.int32), logprobs=np.full(4, -1, np.float32)),
    )
    assert weigh(seen).weight_A.tolist() == [1, 1, 1, 1]
    step = weigh(seen, per="step", multiplier=3.0, advantage=-2.0, name="turn 1")
    assert step.weight_A.tolist() == [0.75] * 4
    assert (step.advantage, step.name) == (-2.0, "turn 1")
    assert step.logprobs_A is seen.action.logprobs


@given(st.lists(st.sampled_from(["note", "readChunk", "finish", None]), min_size=1), st.floats(0, 1))
def test_balancing_keeps_the_mean_and_evens_out_the_kinds(labels, strength):
    multiplier = balance(labels, strength)
    assert multiplier.mean() == pytest.approx(1)
    full, count = defaultdict(float), Counter(labels)
    for label, value in zip(labels, balance(labels), strict=True):
        full[label] += value
    assert all(total == pytest.approx(len(labels) / len(count)) for total in full.values())
    np.testing.assert_allclose(balance(labels, 0.0), 1)
    for (a, x), (b, y) in itertools.combinations(zip(labels, multiplier, strict=True), 2):
        assert x == pytest.approx(y * (count[b] / count[a]) ** strength)


def test_trees_of_five_hundred_episodes_take_seconds():
    rng = np.random.default_rng(0)
    episodes = []
    for _ in range(500):
        history, turns = rng.integers(0, 700, 100), []
        for turn in range(60):
            result, action = rng.integers(0, 700, 80), rng.integers(0, 700, 20)
            history = np.concatenate([history[:100] if turn % 4 == 0 else history, result])
            turns.append(snapshot(history, action))
            history = np.concatenate([history, action])
        episodes.append(turns)
    start = time.perf_counter()
    trees = [build_tree(turns) for turns in episodes]
    assert sum(tree.targets for tree in trees) == 500 * 60 * 20
    assert time.perf_counter() - start < 20
