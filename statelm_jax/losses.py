"""Losses over token trees: pure functions of a model and a `TreeBatch`.

The LM head runs only at targets. Their hidden states are gathered first, and a head whose logits would exceed a
limit runs in blocks that the backward pass recomputes, so no array of rows x tokens x vocabulary exists anywhere,
and none of rows x targets x vocabulary where that would be large. Log-probs are float32.

`target_logprobs` is all a loss needs; `target_scores` adds what a metric wants to know. Every loss is a weighted
sum over targets divided by the denominator of the global batch, so sums over micro-batches, rows and devices add up
to the same loss and gradient however the rows were distributed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from statelm_jax.batch import Array, TreeBatch
from statelm_jax.model import Qwen3

MAX_LOGITS = 2**25
"""Logits held at once by default (128 MiB of float32)."""


class TargetScores(NamedTuple):
    """What the model says of every target.

    Attributes:
      logp_BR: Log-prob of the target token.
      entropy_BR: Entropy of the distribution it is drawn from, in nats.
      correct_BR: Bool: it is the most likely token (greedy decoding would write it).
    """

    logp_BR: jax.Array
    entropy_BR: jax.Array
    correct_BR: jax.Array


def target_logprobs(model: Qwen3, batch: TreeBatch, *, max_logits: int = MAX_LOGITS) -> jax.Array:
    """logp_BR, the float32 log-prob of every target token given its path. Padding targets hold some finite number.

    Args:
      model: The merged model.
      batch: Rows of token trees.
      max_logits: No array of logits is larger than this (but at least one target of every row is done at a time).
    """
    return _over_targets(model, batch, token_logprob, max_logits)


def target_scores(model: Qwen3, batch: TreeBatch, *, max_logits: int = MAX_LOGITS) -> TargetScores:
    """Log-prob, entropy and greedy correctness of every target; arguments as for `target_logprobs`."""

    def score(logits_MV: jax.Array, token_M: jax.Array) -> TargetScores:
        return TargetScores(
            logp_BR=token_logprob(logits_MV, token_M),
            entropy_BR=entropy(logits_MV),
            correct_BR=jnp.argmax(logits_MV, axis=-1) == token_M,
        )

    return _over_targets(model, batch, score, max_logits)


def token_logprob(logits: Array, token: Array) -> jax.Array:
    """The log of softmax(logits [..., V]) at the ids `token` [...]."""
    chosen = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def entropy(logits: Array) -> jax.Array:
    """Entropy in nats of softmax(logits [..., V]); finite for finite logits."""
    logp = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.sum(jnp.exp(logp) * logp, axis=-1)


def sft_loss(logp_BR: Array, weight_BR: Array, denominator: Array | float) -> jax.Array:
    """Weighted negative log-likelihood, ``-sum(weight * logp) / denominator``: a scalar.

    Targets of weight 0 are cut out of the graph, so whatever stands at padding reaches neither loss nor gradient.
    """
    return -jnp.sum(jnp.where(weight_BR > 0, weight_BR * logp_BR, 0)) / denominator


def _over_targets(model: Qwen3, batch: TreeBatch, score: Callable, max_logits: int):
    """`score(logits [..., V], tokens [...])` at every target, in blocks of targets; a pytree of [B, R] arrays."""
    hidden_BTD = model(batch.tokens_BT, batch.position_BT, batch.end_BT)
    token_BR = jnp.take_along_axis(batch.tokens_BT, batch.target_BR, axis=1)
    # Only padding has a target without a parent: its index 0 is a root.
    source_BR = jnp.maximum(jnp.take_along_axis(batch.parent_BT, batch.target_BR, axis=1), 0)
    hidden_BRD = jnp.take_along_axis(hidden_BTD, source_BR[..., None], axis=1)

    rows, targets = token_BR.shape
    block = max(max_logits // (rows * model.config.vocab_size), 1)
    if block >= targets:
        return score(model.logits(hidden_BRD), token_BR)
    blocks = -(-targets // block)
    block = -(-targets // blocks)

    def blocked(x_BR):
        """[B, R, ...] -> [blocks, B, block, ...]."""
        padding = [(0, 0)] * x_BR.ndim
        padding[1] = (0, blocks * block - targets)
        x_BR = jnp.pad(x_BR, padding)
        return jnp.moveaxis(x_BR.reshape(rows, blocks, block, *x_BR.shape[2:]), 1, 0)

    def whole(x_CBR):
        return jnp.moveaxis(x_CBR, 0, 1).reshape(rows, blocks * block)[:, :targets]

    # Recomputing the block keeps its logits out of what the backward pass holds on to.
    one_block = jax.checkpoint(lambda hidden_BRD, token_BR: score(model.logits(hidden_BRD), token_BR))
    scored = jax.lax.map(lambda x: one_block(*x), (blocked(hidden_BRD), blocked(token_BR)))
    return jax.tree.map(whole, scored)
