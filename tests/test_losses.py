"""The token tree's promise: loss and gradients are those of separate snapshots, however rows are built.

The reference knows nothing of trees: one plain causal row per snapshot, logits everywhere, log-softmax, sum.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from statelm_jax import attention, losses, model
from statelm_jax.batch import TreeBatch, make_batch, pack
from statelm_jax.config import ComputeConfig, ModelConfig
from statelm_jax.losses import entropy, sft_loss, target_logprobs, target_scores, token_logprob
from statelm_jax.token_tree import TokenTree, build_tree, join, split
from tests.snapshots import VOCAB, ids, longest, snapshot, snapshots

CONFIG = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
ROWS, TOKENS, TARGETS = 4, 64, 64
"""Shapes of the tree batches: any six snapshots of `snapshots()` fit, split or not."""
LONGEST = 60
"""Six pieces of prompt and action of at most five tokens each."""

model_settings = settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
"""Few examples of one compiled shape; shrinking would take minutes."""


SINGLE = ComputeConfig(attention="dense")
DOUBLE = ComputeConfig.model_construct(
    param_dtype="float64", compute_dtype="float64", attention="dense", remat="none"
)


def random_model(config: ModelConfig = CONFIG, compute: ComputeConfig = SINGLE):
    """(graphdef, params), with norms that are not 1, so that a fault in them shows."""
    graphdef, params = nnx.split(model.Qwen3(config, rngs=nnx.Rngs(0), compute=compute))
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [leaf + 0.1 * jax.random.normal(key, leaf.shape, leaf.dtype) for leaf, key in zip(leaves, keys, strict=True)]
    return graphdef, jax.tree.unflatten(structure, noisy)


@contextlib.contextmanager
def double_precision():
    """Everything the model and the losses say is float32 is float64 in here."""
    wide = types.SimpleNamespace(**{**vars(jnp), "float32": jnp.float64})
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(True))
        for module in (model, attention, losses):
            stack.enter_context(mock.patch.object(module, "jnp", wide))
        yield


def clipped(logp, weight, advantage, sampler_logprob):
    """A loss that is not linear in the advantage: PPO's clipped surrogate."""
    ratio = jnp.exp(logp - sampler_logprob)
    return -weight * jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)


def tree_losses(graphdef, params, batch: TreeBatch):
    """(supervised, clipped) loss of a batch."""
    logp_BR = target_logprobs(nnx.merge(graphdef, params), batch)
    supervised = sft_loss(logp_BR, batch.weight_BR, batch.denominator)
    surrogate = clipped(logp_BR, batch.weight_BR, batch.advantage_BR, batch.sampler_logprob_BR)
    return jnp.stack([supervised, surrogate.sum() / batch.denominator])


def separate_losses(graphdef, params, rows: dict, denominator):
    """The same of one plain row per snapshot."""
    net = nnx.merge(graphdef, params)
    tokens_ST = rows["tokens"]
    index_ST = jnp.broadcast_to(jnp.arange(tokens_ST.shape[1], dtype=jnp.int32), tokens_ST.shape)
    end_ST = jnp.where(index_ST < rows["length"][:, None], rows["length"][:, None], 0)
    logp_STV = jax.nn.log_softmax(net.logits(net(tokens_ST, index_ST, end_ST)))
    logp_ST = jnp.take_along_axis(logp_STV[:, :-1], tokens_ST[:, 1:, None], axis=2)[..., 0]
    surrogate = clipped(logp_ST, rows["weight"][:, 1:], rows["advantage"][:, 1:], rows["logprob"][:, 1:])
    return jnp.stack([-(rows["weight"][:, 1:] * logp_ST).sum(), surrogate.sum()]) / denominator


def separate_rows(items, dtype, count=6, width=LONGEST) -> dict:
    rows = {key: np.zeros((count, width), dtype) for key in ("weight", "advantage", "logprob")}
    rows |= {"tokens": np.zeros((count, width), np.int32), "length": np.zeros(count, np.int32)}
    for i, item in enumerate(items):
        action = slice(item.prompt.size, ids(item).size)
        rows["tokens"][i, : action.stop], rows["length"][i] = ids(item), action.stop
        rows["weight"][i, action], rows["advantage"][i, action] = item.weight_A, item.advantage
        rows["logprob"][i, action] = 0 if item.logprobs_A is None else item.logprobs_A
    return rows


def with_gradients(function):
    """Values of both losses and the gradient of each, in one jitted function."""

    @functools.partial(jax.jit, static_argnums=0)
    def run(graphdef, params, *args):
        values, pull = jax.vjp(lambda p: function(graphdef, p, *args), params)
        return values, jax.vmap(pull)(jnp.eye(len(values), dtype=values.dtype))

    return run


tree_run, separate_run = with_gradients(tree_losses), with_gradients(separate_losses)


def assert_equal(one, two, rtol: float):
    """Values and every gradient leaf (its norm) are equal to `rtol`."""
    np.testing.assert_allclose(one[0], two[0], rtol=rtol)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one[1]), jax.tree.leaves(two[1]), strict=True):
        for a_loss, b_loss in zip(np.asarray(a, np.float64), np.asarray(b, np.float64), strict=True):
            difference, size = np.linalg.norm(a_loss - b_loss), np.linalg.norm(b_loss)
            assert difference <= rtol * size, f"{jax.tree_util.keystr(path)}: {difference} of {size}"


def rows_of(items, row_tokens: int):
    tree = build_tree(items)
    return tree, pack([tree], row_tokens, TARGETS)


@model_settings
@given(snapshots(), st.booleans())
def test_tree_loss_and_every_gradient_equal_separate_snapshots_in_double_precision(items, narrow):
    with double_precision():
        check_against_separate(items, narrow, *random_model(compute=DOUBLE), np.float64, rtol=1e-12)


@model_settings
@given(snapshots(), st.booleans())
def test_tree_loss_and_every_gradient_equal_separate_snapshots_in_single_precision(items, narrow):
    check_against_separate(items, narrow, *random_model(), np.float32, rtol=1e-5)


def check_against_separate(items, narrow, graphdef, params, dtype, rtol):
    tree = build_tree(items)
    pieces = split(tree, longest(items), TARGETS) if narrow and tree.targets else (tree,)
    packing = dataclasses.replace(pack([], TOKENS, TARGETS), rows=tuple(pieces))
    batch = make_batch(packing.rows, packing, 6, dtype=dtype)
    separate = separate_rows(items, dtype)
    assert_equal(
        tree_run(graphdef, params, batch), separate_run(graphdef, params, separate, batch.denominator), rtol
    )
