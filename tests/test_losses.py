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
from jax.extend.core import jaxprs_in_params

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
ROWS, TOKENS, TARGETS = 6, 64, 64
"""The one shape of all tree batches: six snapshots of `snapshots()` fit, in one row or in six."""
LONGEST = 60
"""Six pieces of prompt and action of at most five tokens each."""

QUICK = {"xla_backend_optimization_level": 0}
"""The tests compile more than they run."""

model_settings = settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
"""Few examples of one compiled shape; shrinking would take minutes."""


@functools.cache
def random_model(dtype: str = "float32", vocab_size: int = VOCAB):
    """(graphdef, params) with norm scales that are not 1, so that a fault in them shows."""
    config = CONFIG.model_copy(update={"vocab_size": vocab_size})
    compute = ComputeConfig.model_construct(param_dtype=dtype, compute_dtype=dtype, attention="dense", remat="none")
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: model.Qwen3(config, rngs=nnx.Rngs(0), compute=compute)))
    rng = np.random.default_rng(0)

    def fill(path, leaf):
        noise = rng.standard_normal(leaf.shape)
        return jnp.asarray(1 + 0.1 * noise if "norm" in jax.tree_util.keystr(path) else 0.2 * noise, leaf.dtype)

    return graphdef, jax.tree_util.tree_map_with_path(fill, shapes)


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

    @functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
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


def make(rows, dtype=np.float32, **options) -> TreeBatch:
    """The rows in the one shape that the tests compile."""
    return make_batch(rows, pack([], TOKENS, TARGETS), ROWS, dtype=dtype, **options)


def pieces_of(items, narrow: bool) -> tuple[TokenTree, ...]:
    """The tree of the snapshots; `narrow`: split into as many rows as the longest snapshot allows."""
    tree = build_tree(items)
    return split(tree, longest(items), TARGETS) if narrow else (tree,)


def check_against_separate(items, narrow, dtype, rtol):
    graphdef, params = random_model(np.dtype(dtype).name)
    batch = make(pieces_of(items, narrow), dtype)
    separate = separate_run(graphdef, params, separate_rows(items, dtype), batch.denominator)
    assert_equal(tree_run(graphdef, params, batch), separate, rtol)


@model_settings
@given(snapshots(), st.booleans())
def test_tree_loss_and_every_gradient_equal_separate_snapshots_in_double_precision(items, narrow):
    with double_precision():
        check_against_separate(items, narrow, np.float64, rtol=1e-12)


@model_settings
@given(snapshots(), st.booleans())
def test_tree_loss_and_every_gradient_equal_separate_snapshots_in_single_precision(items, narrow):
    check_against_separate(items, narrow, np.float32, rtol=1e-5)


@model_settings
@given(st.lists(snapshots(max_count=3), min_size=2, max_size=ROWS), st.randoms(use_true_random=False))
def test_order_and_micro_batches_of_rows_change_nothing(groups, random):
    graphdef, params = random_model()
    rows = [build_tree(items) for items in groups]
    whole = make(rows)
    together = tree_run(graphdef, params, whole)
    random.shuffle(rows)
    cut = random.randrange(1, len(rows))
    micro = [make(part, denominator=float(whole.denominator)) for part in (rows[:cut], rows[cut:])]
    one, two = (tree_run(graphdef, params, batch) for batch in micro)
    assert_equal(jax.tree.map(jnp.add, one, two), together, rtol=1e-5)


def test_neighbours_in_a_row_change_nothing():
    mine = build_tree([snapshot([3, 1, 4], [1, 5]), snapshot([3, 1, 4, 1, 5], [9, 2])])
    other = build_tree([snapshot([3, 1, 4, 1, 5], [3, 5])])
    third = build_tree([snapshot([10, 9, 8, 7, 6, 5, 4], [3])])
    batch = make([join([other, mine]), join([third, mine, other]), mine])
    logp_BR = np.asarray(
        jax.jit(lambda g, p, b: target_logprobs(nnx.merge(g, p), b), static_argnums=0)(*random_model(), batch)
    )
    assert mine.targets == 4
    np.testing.assert_allclose(logp_BR[0, 2:6], logp_BR[2, :4], rtol=1e-6)
    np.testing.assert_allclose(logp_BR[1, 1:5], logp_BR[2, :4], rtol=1e-6)


def test_what_stands_at_padding_changes_nothing():
    graphdef, params = random_model()
    batch = make([build_tree([snapshot([3, 1, 4], [1, 5])])])
    littered = dataclasses.replace(
        batch,
        tokens_BT=np.where(batch.end_BT == 0, 7, batch.tokens_BT),
        position_BT=np.where(batch.end_BT == 0, 9, batch.position_BT),
    )
    assert_equal(tree_run(graphdef, params, littered), tree_run(graphdef, params, batch), rtol=1e-6)


def test_a_batch_without_a_trained_token_has_zero_loss_and_gradient():
    for batch in (make([]), make([build_tree([snapshot([1, 2], [3], 0.0)])])):
        for leaf in jax.tree.leaves(tree_run(*random_model(), batch)):
            np.testing.assert_array_equal(leaf, 0.0)


def test_a_weightless_target_reaches_neither_loss_nor_gradient():
    logp, weight = jnp.array([[-1.0, jnp.nan, -jnp.inf]]), jnp.array([[2.0, 0.0, 0.0]])
    loss, gradient = jax.value_and_grad(sft_loss)(logp, weight, 4.0)
    assert float(loss) == 0.5
    assert gradient.tolist() == [[-0.5, 0.0, 0.0]]


def test_scores_are_those_of_the_whole_distribution():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(2, 5, VOCAB)).astype(np.float32)
    token = rng.integers(0, VOCAB, (2, 5)).astype(np.int32)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.take_along_axis(p, token[..., None], -1)[..., 0]
    np.testing.assert_allclose(token_logprob(jnp.asarray(logits), jnp.asarray(token)), np.log(chosen), rtol=1e-5)
    np.testing.assert_allclose(entropy(jnp.asarray(logits)), -(p * np.log(p)).sum(-1), rtol=1e-5)
    assert float(entropy(jnp.array([1e4, -1e4, 0.0]))) == 0.0


@functools.partial(jax.jit, static_argnums=(0, 3), compiler_options=QUICK)
def scores_and_gradient(graphdef, params, batch, max_logits):
    def loss(params):
        scores = target_scores(nnx.merge(graphdef, params), batch, max_logits=max_logits)
        return sft_loss(scores.logp_BR, batch.weight_BR, batch.denominator), scores

    return jax.grad(loss, has_aux=True)(params)


def test_a_head_in_blocks_gives_the_same_scores_and_gradients():
    batch = make([build_tree([snapshot([3, 1, 4], [1, 5, 9, 2, 6])]), build_tree([snapshot([2, 7], [1, 8, 2])])])
    whole = scores_and_gradient(*random_model(), batch, losses.MAX_LOGITS)
    blocks = scores_and_gradient(*random_model(), batch, ROWS * VOCAB * 9)  # 9 does not divide the 64 targets
    for a, b in zip(jax.tree.leaves(blocks), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-5, atol=1e-7)


def test_correct_means_that_greedy_decoding_would_write_the_token():
    graphdef, params = random_model()
    net, prompt = nnx.merge(graphdef, params), [3, 1, 4]
    position = jnp.arange(3, dtype=jnp.int32)[None]
    hidden_BTD = net(jnp.array([prompt], jnp.int32), position, jnp.full((1, 3), 3, jnp.int32))
    best = int(jnp.argmax(net.logits(hidden_BTD[0, -1])))
    _, scores = scores_and_gradient(graphdef, params, make([build_tree([snapshot(prompt, [best])])]), losses.MAX_LOGITS)
    assert bool(scores.correct_BR[0, 0])
    wrong = make([build_tree([snapshot(prompt, [(best + 1) % VOCAB])])])
    assert not bool(scores_and_gradient(graphdef, params, wrong, losses.MAX_LOGITS)[1].correct_BR[0, 0])


def shapes_in(jaxpr) -> set[tuple[int, ...]]:
    """Shapes of every array that the program makes, sub-programs included."""
    found = set()
    for equation in jaxpr.eqns:
        found |= {tuple(getattr(out.aval, "shape", ())) for out in equation.outvars}
        for inner in jaxprs_in_params(equation.params):
            found |= shapes_in(inner)
    return found


@pytest.mark.parametrize("block", [1, 10, TARGETS])
def test_no_array_of_logits_is_larger_than_the_limit(block):
    vocab = 97
    graphdef, params = random_model(vocab_size=vocab)
    batch, limit = make([]), ROWS * block * vocab

    def loss(params):
        scores = target_scores(nnx.merge(graphdef, params), batch, max_logits=limit)
        return sft_loss(scores.logp_BR, batch.weight_BR, batch.denominator) + scores.entropy_BR.sum()

    shapes = shapes_in(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)
    logits = {shape for shape in shapes if vocab in shape and shape != (vocab, CONFIG.hidden_size)}
    assert logits
    assert max(int(np.prod(shape)) for shape in logits) <= limit


def test_log_probs_are_float32_whatever_the_model_computes_in():
    graphdef, params = random_model("bfloat16")
    shaped = jax.eval_shape(lambda p: target_scores(nnx.merge(graphdef, p), make([])), params)
    assert shaped.logp_BR.dtype == shaped.entropy_BR.dtype == jnp.float32
