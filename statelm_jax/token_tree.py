"""Snapshots -> token trees: every distinct prefix once, with losses equal to those of separate snapshots.

Consecutive snapshots of a trajectory repeat most of each other. Their token sequences (prompt + action) are laid
out as a prefix tree, one node per token, in depth-first order. A causal transformer's state at a node depends on
its root path alone, so with position = depth, and token i reading token j iff ``j <= i < end[j]`` (`end` = end of
j's subtree), every logit is the one of the separate snapshot. Loss and gradient equal the sum over separate
snapshots: an identity, not an approximation. A plain row, a packed row and a group that shares its prompt are all
special cases, and all are a `TokenTree`.

Losses are taken at *targets*: (node, weight, advantage, sampler log-prob) entries, several per node where
snapshots that differ in advantage or log-prob train the same node, so that a loss that is not linear in them
(a clipped ratio) still equals the sum over snapshots. The log-prob of a target comes from its parent's hidden
state.

The steps: `weigh` each snapshot, `build_tree` of those of a trajectory or a whole group, `split` what is larger
than a row, `join` several into one row (`batch.pack` does the last two). Host side, numpy only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from statelm_jax.errors import UserError
from statelm_jax.types import Snapshot, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightedSnapshot:
    """A snapshot and what it contributes to the loss.

    Attributes:
      prompt: Token ids as fed.
      action: Token ids as sampled.
      weight_A: float64, one per action token, >= 0. 0 keeps a token as context without a loss of its own.
      advantage: Of the whole snapshot; 1 for supervised training.
      logprobs_A: float32, the sampler's log-prob of every action token; None where unknown (read as 0).
      name: Says in messages which snapshot this is.
    """

    prompt: TokenIds
    action: TokenIds
    weight_A: NDArray[np.float64]
    advantage: float = 1.0
    logprobs_A: NDArray[np.float32] | None = None
    name: str = "snapshot"

    def __post_init__(self) -> None:
        if self.weight_A.shape != self.action.shape:
            raise ValueError(f"{self.name}: {self.action.size} action tokens but weights {self.weight_A.shape}")
        if self.logprobs_A is not None and self.logprobs_A.shape != self.action.shape:
            raise ValueError(f"{self.name}: {self.action.size} action tokens but log-probs {self.logprobs_A.shape}")
        numbers = [self.weight_A, [self.advantage], () if self.logprobs_A is None else self.logprobs_A]
        if not all(np.isfinite(part).all() for part in numbers) or (self.weight_A < 0).any():
            raise ValueError(f"{self.name}: weights must be finite and >= 0, advantage and log-probs finite")
        if self.prompt.size == 0 and self.weight_A[:1].any():
            raise UserError(f"{self.name}: an empty prompt leaves nothing to predict the first token from")


def weigh(
    snapshot: Snapshot,
    *,
    per: Literal["token", "step"] = "token",
    multiplier: float = 1.0,
    advantage: float = 1.0,
    name: str = "snapshot",
) -> WeightedSnapshot:
    """A snapshot with the same weight on all of its action tokens.

    Args:
      snapshot: What the model saw and said.
      per: `token`: weight 1 per token, so that long actions weigh more; `step`: 1/length per token, so that every
        step weighs the same.
      multiplier: Times this, to stress rare actions (see `balance`).
      advantage: Of the step.
      name: For messages.
    """
    action = snapshot.action.token_ids
    weight = multiplier / max(action.size, 1) if per == "step" else multiplier
    return WeightedSnapshot(
        prompt=snapshot.prompt,
        action=action,
        weight_A=np.full(action.shape, weight, np.float64),
        advantage=advantage,
        logprobs_A=snapshot.action.logprobs,
        name=name,
    )


def balance(labels: Sequence[str | None], strength: float = 1.0) -> NDArray[np.float64]:
    """Multipliers that even out how much each kind of action weighs, with mean 1 over all snapshots.

    Instead of dropping snapshots of frequent tools (paper, section 4.2), every snapshot is kept at a lower weight.

    Args:
      labels: The kind of each snapshot (its tool; None for no runnable call).
      strength: 1 gives every kind the same total weight, 0 changes nothing; a multiplier is ∝ count ** -strength.

    Returns:
      float64, one per label.
    """
    if not labels:
        return np.zeros(0, np.float64)
    _, kind, count = np.unique(np.array([label or "" for label in labels]), return_inverse=True, return_counts=True)
    raw = count[kind].astype(np.float64) ** -strength
    return raw / raw.mean()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenTree:
    """A prefix tree (or a forest: a packed row) of token ids in depth-first order.

    Attributes:
      tokens_T: int32 token of each node.
      position_T: int32 depth of each node, 0 at a root.
      parent_T: int32 index of the node before it on its path, -1 at a root.
      end_T: int32, one past the last node of its subtree.
      target_R: int32 node of every target, ascending; never a root.
      weight_R: float64, > 0.
      advantage_R: float64.
      sampler_logprob_R: float64; 0 where unknown.
      leaf_S: int32 last node of each snapshot.
      names_S: Name of each snapshot.
    """

    tokens_T: NDArray[np.int32]
    position_T: NDArray[np.int32]
    parent_T: NDArray[np.int32]
    end_T: NDArray[np.int32]
    target_R: NDArray[np.int32]
    weight_R: NDArray[np.float64]
    advantage_R: NDArray[np.float64]
    sampler_logprob_R: NDArray[np.float64]
    leaf_S: NDArray[np.int32]
    names_S: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Number of nodes: the tokens that are computed."""
        return self.tokens_T.size

    @property
    def targets(self) -> int:
        """Number of target entries: the positions at which the LM head runs."""
        return self.target_R.size

    @property
    def snapshot_tokens(self) -> int:
        """Tokens that one row per snapshot would compute."""
        return int(self.position_T[self.leaf_S].sum()) + self.leaf_S.size


def build_tree(snapshots: Sequence[WeightedSnapshot]) -> TokenTree:
    """The prefix tree of all `prompt + action` sequences, each node once.

    Tokens after the last one that carries weight are left out, and so are snapshots without any weight. Targets
    that agree in node, advantage and sampler log-prob become one entry with the sum of their weights.

    The nodes do not depend on the order of the snapshots: branches are in ascending order of their ids.
    """
    trained = [s for s in snapshots if s.weight_A.any()]
    sequences = [_trained_ids(s) for s in trained]
    # Big-endian bytes compare like the sequences themselves, so plain sorting gives depth-first order.
    keys = [ids.astype(">u4").tobytes() for ids in sequences]
    order = sorted(range(len(trained)), key=keys.__getitem__)
    trained, sequences = [trained[s] for s in order], [sequences[s] for s in order]
    tokens_T, position_T, parent_T, end_T, paths = _lay_out(sequences, [s.prompt.size for s in trained])
    target_R, weight_R, advantage_R, logprob_R = _targets(trained, paths)
    return TokenTree(
        tokens_T=tokens_T,
        position_T=position_T,
        parent_T=parent_T,
        end_T=end_T,
        target_R=target_R,
        weight_R=weight_R,
        advantage_R=advantage_R,
        sampler_logprob_R=logprob_R,
        leaf_S=np.array([path[-1] for path in paths], np.int32),
        names_S=tuple(s.name for s in trained),
    )


def _trained_ids(snapshot: WeightedSnapshot) -> TokenIds:
    """Prompt and action up to the last token that carries weight."""
    kept = int(np.flatnonzero(snapshot.weight_A)[-1]) + 1
    return np.concatenate([snapshot.prompt, snapshot.action[:kept]]).astype(np.int32)


def _common_prefix(a: TokenIds, b: TokenIds) -> int:
    size = min(a.size, b.size)
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if differs.size else size


def _lay_out(sequences: Sequence[TokenIds], firsts: Sequence[int]) -> tuple:
    """Nodes of the trie of sorted sequences, and each sequence's path of nodes from its `first` token on.

    Sorted neighbours share the longest prefixes, so what a sequence adds is what it does not share with its
    predecessor, and `path` (the nodes of the current sequence by depth) is all the state there is.
    """
    shared = [0] * bool(sequences) + [_common_prefix(a, b) for a, b in itertools.pairwise(sequences)]
    total = sum(ids.size - common for ids, common in zip(sequences, shared, strict=True))
    tokens_T, position_T, parent_T, end_T = (np.empty(total, np.int32) for _ in range(4))
    path = np.empty(max((ids.size for ids in sequences), default=0), np.int32)
    paths = []
    depth = start = 0
    for ids, common, first in zip(sequences, shared, firsts, strict=True):
        end_T[path[common:depth]] = start  # the branches that this sequence leaves
        depth = ids.size
        stop = start + depth - common
        if stop > start:
            tokens_T[start:stop] = ids[common:]
            position_T[start:stop] = np.arange(common, depth)
            parent_T[start:stop] = np.arange(start - 1, stop - 1)
            parent_T[start] = path[common - 1] if common else -1
            path[common:depth] = np.arange(start, stop)
        paths.append(path[first:depth].copy())
        start = stop
    end_T[path[:depth]] = total
    return tokens_T, position_T, parent_T, end_T, paths


def _targets(snapshots: Sequence[WeightedSnapshot], paths: Sequence[NDArray[np.int32]]) -> tuple:
    """(node, weight, advantage, sampler log-prob) of all targets, sorted by node, equal ones merged."""
    kept = [s.weight_A[: path.size] > 0 for s, path in zip(snapshots, paths, strict=True)]
    columns: list[list[NDArray]] = [[np.zeros(0)] for _ in range(4)]
    for snapshot, path, keep in zip(snapshots, paths, kept, strict=True):
        logprobs = np.zeros(path.size) if snapshot.logprobs_A is None else snapshot.logprobs_A[: path.size]
        columns[0].append(path[keep])
        columns[1].append(snapshot.weight_A[: path.size][keep])
        columns[2].append(np.full(int(keep.sum()), snapshot.advantage))
        columns[3].append(logprobs[keep])
    node, weight, advantage, logprob = (np.concatenate(column).astype(np.float64) for column in columns)
    order = np.lexsort((logprob, advantage, node))
    what = np.stack([node, advantage, logprob])[:, order]
    new = np.ones(node.size, bool)
    new[1:] = (what[:, 1:] != what[:, :-1]).any(axis=0)
    weight = np.bincount(np.cumsum(new) - 1, weights=weight[order], minlength=int(new.sum()))
    return what[0, new].astype(np.int32), weight, what[1, new], what[2, new]


def split(tree: TokenTree, row_tokens: int, row_targets: int) -> tuple[TokenTree, ...]:
    """The tree in pieces that fit a row, each target in exactly one of them.

    A piece is a range of nodes plus the path that leads to it; the repeated path carries no targets, so loss and
    gradient stay the same. Cuts are made where branches start, and inside a branch only if that alone holds more
    targets than a row.

    Raises:
      UserError: A single snapshot is longer than a row.
    """
    targets_before = np.searchsorted(tree.target_R, np.arange(tree.tokens + 1))
    pieces = []
    start = 0
    for unit, stop in itertools.pairwise(_cut_points(tree, row_targets)):
        tokens = tree.position_T[start] + stop - start
        if tokens > row_tokens or targets_before[stop] - targets_before[start] > row_targets:
            if unit > start:
                pieces.append(_piece(tree, start, unit))
                start = unit
            _check_fits(tree, unit, stop, row_tokens)
    if tree.tokens:
        pieces.append(_piece(tree, start, tree.tokens) if start else tree)
    return tuple(pieces)


def _cut_points(tree: TokenTree, row_targets: int) -> list[int]:
    """Nodes where the tree may be cut, ascending, from 0 to the number of nodes."""
    if not tree.tokens:
        return [0]
    branches = np.flatnonzero(tree.parent_T != np.arange(tree.tokens) - 1)
    cuts = np.union1d(branches, [0, tree.tokens]).tolist()
    for start, stop in itertools.pairwise(list(cuts)):
        inside = tree.target_R[np.searchsorted(tree.target_R, start) : np.searchsorted(tree.target_R, stop)]
        if inside.size > row_targets:
            node, count = np.unique(inside, return_counts=True)
            if count.max() > row_targets:
                raise UserError(
                    f"{_name_below(tree, int(node[count.argmax()]))}: {count.max()} snapshots train one token, more "
                    f"than the {row_targets} targets of a row: raise row_targets"
                )
            cuts += _fill(node, count, row_targets)
    return sorted(set(cuts))


def _fill(node: NDArray, count: NDArray, limit: int) -> list[int]:
    """Nodes before which to cut so that the counts between cuts stay within the limit."""
    cuts, held = [], 0
    for here, more in zip(node.tolist(), count.tolist(), strict=True):
        if held + more > limit:
            cuts.append(here)
            held = 0
        held += more
    return cuts


def _check_fits(tree: TokenTree, start: int, stop: int, row_tokens: int) -> None:
    tokens = int(tree.position_T[start]) + stop - start
    if tokens > row_tokens:
        raise UserError(
            f"{_name_below(tree, stop - 1)} has {tokens} tokens and does not fit a row of {row_tokens}: "
            "raise row_tokens (snapshots are never truncated)"
        )


def _name_below(tree: TokenTree, node: int) -> str:
    """The first snapshot that runs through this node."""
    below = np.flatnonzero((tree.leaf_S >= node) & (tree.leaf_S < tree.end_T[node]))
    return tree.names_S[int(below[0])] if below.size else "a snapshot"


def _piece(tree: TokenTree, start: int, stop: int) -> TokenTree:
    """Nodes start..stop and the path above them, with the targets of the range only."""
    above = np.flatnonzero(tree.end_T[:start] > start)
    node = np.concatenate([above, np.arange(start, stop)])
    index = np.full(tree.tokens + 1, -1, np.int32)  # the last entry serves parent -1
    index[node] = np.arange(node.size)
    mine_R = (tree.target_R >= start) & (tree.target_R < stop)
    mine_S = (tree.leaf_S >= start) & (tree.leaf_S < stop)
    return TokenTree(
        tokens_T=tree.tokens_T[node],
        position_T=tree.position_T[node],
        parent_T=index[tree.parent_T[node]],
        end_T=np.searchsorted(node, tree.end_T[node]).astype(np.int32),
        target_R=index[tree.target_R[mine_R]],
        weight_R=tree.weight_R[mine_R],
        advantage_R=tree.advantage_R[mine_R],
        sampler_logprob_R=tree.sampler_logprob_R[mine_R],
        leaf_S=index[tree.leaf_S[mine_S]],
        names_S=tuple(itertools.compress(tree.names_S, mine_S)),
    )


def join(trees: Sequence[TokenTree]) -> TokenTree:
    """One forest of all trees: indices are shifted, positions restart, and no tree sees another."""
    shift = np.cumsum([0, *(tree.tokens for tree in trees)]).tolist()
    shifted = list(zip(trees, shift, strict=False))

    def all_of(parts: Iterator[NDArray], dtype: DTypeLike) -> NDArray:
        return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)

    return TokenTree(
        tokens_T=all_of((tree.tokens_T for tree in trees), np.int32),
        position_T=all_of((tree.position_T for tree in trees), np.int32),
        parent_T=all_of((np.where(t.parent_T < 0, -1, t.parent_T + by) for t, by in shifted), np.int32),
        end_T=all_of((tree.end_T + by for tree, by in shifted), np.int32),
        target_R=all_of((tree.target_R + by for tree, by in shifted), np.int32),
        weight_R=all_of((tree.weight_R for tree in trees), np.float64),
        advantage_R=all_of((tree.advantage_R for tree in trees), np.float64),
        sampler_logprob_R=all_of((tree.sampler_logprob_R for tree in trees), np.float64),
        leaf_S=all_of((tree.leaf_S + by for tree, by in shifted), np.int32),
        names_S=tuple(itertools.chain.from_iterable(tree.names_S for tree in trees)),
    )
