"""The optimiser: planned rates, what is decayed, clipped, frozen and skipped, and Muon on stacked layers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from statelm_jax.config import ModelConfig, OptimConfig
from statelm_jax.errors import UserError
from statelm_jax.model import Qwen3
from statelm_jax.optim import ADAM_RMS, MUON_AXES, learning_rate_at, make_optimizer

CONFIG = ModelConfig(
    vocab_size=13,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    attention_bias=True,
)


@functools.cache
def model_params():
    """Random parameters of every kind, in the model's own structure."""
    shapes = nnx.split(nnx.eval_shape(lambda: Qwen3(CONFIG, rngs=nnx.Rngs(0))))[1]
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), shapes)


def named(tree) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(p, simple=True, separator=".").removesuffix(".value"): np.asarray(x) for p, x in leaves
    }


def like(params, value: float):
    return jax.tree.map(lambda leaf: jnp.full_like(leaf, value), params)


def one_update(config: OptimConfig, params, grads, trained=True, total_steps=10):
    optimizer = make_optimizer(config, params, total_steps)
    return quick(optimizer.update)(grads, jax.jit(optimizer.init)(params), params, trained)


def quick(update):
    """The update, jitted with a compiler that hurries: the tests compile more than they run."""
    return jax.jit(update, compiler_options={"xla_backend_optimization_level": 0})


def test_the_rate_rises_to_the_peak_and_falls_to_the_final_one():
    config = OptimConfig(learning_rate=1.0, final_learning_rate=0.2, warmup_fraction=0.25)
    rates = [float(learning_rate_at(config, 16, step)) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    np.testing.assert_allclose(rates[4:16], 0.2 + 0.4 * (1 + np.cos(np.pi * np.arange(12) / 12)), rtol=1e-6)
    np.testing.assert_allclose(rates[16:], 0.2, rtol=1e-6)


def test_without_warm_up_the_first_rate_is_the_peak():
    assert float(learning_rate_at(OptimConfig(learning_rate=0.5, warmup_fraction=0.0), 8, 0)) == 0.5


def test_the_rate_of_each_update_is_the_planned_one():
    # With weight decay 1, no gradient and Adam's step 0, a parameter shrinks by exactly the learning rate.
    config = OptimConfig(learning_rate=0.1, warmup_fraction=0.5, weight_decay=1.0, no_decay=())
    params = {"w": jnp.ones(3)}
    optimizer = make_optimizer(config, params, 8)
    state, update = optimizer.init(params), quick(optimizer.update)
    for step in range(8):
        before = params["w"]
        params, state, *_ = update(like(params, 0.0), state, params, True)
        np.testing.assert_allclose(1 - params["w"] / before, float(learning_rate_at(config, 8, step)), rtol=1e-4)


def test_decay_skips_norms_biases_and_the_embedding():
    config = OptimConfig(learning_rate=0.1, warmup_fraction=0.0, weight_decay=0.5)
    for optimizer in ("adamw", "muon"):
        config = config.model_copy(update={"optimizer": optimizer})
        after = named(one_update(config, model_params(), like(model_params(), 0.0)).params)
        for name, before in named(model_params()).items():
            kept = "norm" in name or "bias" in name or name == "embed_VD"
            np.testing.assert_allclose(after[name], before if kept else 0.95 * before, rtol=1e-6, err_msg=name)


def test_decay_skips_what_the_config_lists():
    config = OptimConfig(learning_rate=0.1, warmup_fraction=0.0, weight_decay=0.5, no_decay=("layers.*_LDF", "head_VD"))
    after, before = named(one_update(config, model_params(), like(model_params(), 0.0)).params), named(model_params())
    np.testing.assert_array_equal(after["layers.up_LDF"], before["layers.up_LDF"])
    np.testing.assert_array_equal(after["head_VD"], before["head_VD"])
    np.testing.assert_allclose(after["embed_VD"], 0.95 * before["embed_VD"], rtol=1e-6)
    np.testing.assert_allclose(after["layers.down_LFD"], 0.95 * before["layers.down_LFD"], rtol=1e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_frozen_parameters_stay_to_the_bit_and_count_nowhere(optimizer):
    config = OptimConfig(optimizer=optimizer, learning_rate=0.1, warmup_fraction=0.0, frozen=("embed_VD",))
    params, grads = model_params(), like(model_params(), 1e-3)
    poisoned = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.full_like(leaf, 1e6) if "embed" in jax.tree_util.keystr(path) else leaf, grads
    )
    update = one_update(config, params, poisoned)
    np.testing.assert_array_equal(named(update.params)["embed_VD"], named(params)["embed_VD"])
    trained = sum(leaf.size for name, leaf in named(params).items() if name != "embed_VD")
    assert float(update.grad_norm) == pytest.approx(1e-3 * trained**0.5, rel=1e-5)
    clean = one_update(config, params, grads)
    jax.tree.map(np.testing.assert_array_equal, update.params, clean.params)
    moments = jax.tree.leaves(jax.eval_shape(make_optimizer(config, params, 10).init, params))
    of_the_head = [leaf for leaf in moments if leaf.shape == (CONFIG.vocab_size, CONFIG.hidden_size)]
    assert len(of_the_head) == 2  # and none of the embedding, which has the same shape


def test_the_gradient_is_clipped_by_its_global_norm():
    # Adam's first step does not see the scale, its second does: equal to having fed the clipped gradient.
    config = OptimConfig(learning_rate=0.1, warmup_fraction=0.0, clip_norm=1.0, no_decay=())
    loose = config.model_copy(update={"clip_norm": 1e9})
    params = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    big, small = (
        {"a": jnp.array([3.0, 0.0]), "b": jnp.array([0.0, 4.0])},
        {"a": jnp.full(2, 0.3), "b": jnp.full(2, 0.1)},
    )
    results = []
    for optim, first in ((config, big), (loose, jax.tree.map(lambda g: g / 5, big))):
        optimizer = make_optimizer(optim, params, 10)
        update = quick(optimizer.update)
        now, state, norm, _ = update(first, optimizer.init(params), params, True)
        results.append(update(small, state, now, True).params)
        assert float(norm) == pytest.approx(5.0 if optim is config else 1.0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *results)


@pytest.mark.parametrize(("grad", "trained"), [(0.0, False), (1.0, False), (np.nan, True), (np.inf, True)])
def test_an_update_that_trains_nothing_or_is_not_finite_changes_nothing(grad, trained):
    config = OptimConfig(learning_rate=0.1, warmup_fraction=0.5, weight_decay=0.5)
    params = model_params()
    optimizer = make_optimizer(config, params, 8)
    update = quick(optimizer.update)
    _, state, _, applied = update(like(params, 0.5), jax.jit(optimizer.init)(params), params, jnp.array(True))
    assert bool(applied)
    nothing = update(like(params, grad), state, params, jnp.array(trained))
    assert not bool(nothing.applied)
    jax.tree.map(np.testing.assert_array_equal, nothing.params, params)
    jax.tree.map(np.testing.assert_array_equal, nothing.opt_state, state)


def test_muon_orthogonalises_each_layer_of_each_matrix():
    config = OptimConfig(optimizer="muon", learning_rate=1.0, warmup_fraction=0.0, weight_decay=0.0)
    params, rng = model_params(), np.random.default_rng(1)
    grads = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), params)
    update = one_update(config, params, grads)
    step = {name: before - named(update.params)[name] for name, before in named(params).items()}
    heads, kv, width = CONFIG.num_attention_heads * CONFIG.head_dim, CONFIG.num_key_value_heads * CONFIG.head_dim, 16
    matrices = {"q_LDNH": (width, heads), "k_LDKH": (width, kv), "v_LDKH": (width, kv), "o_LNHD": (heads, width)}
    matrices |= {"gate_LDF": (width, 24), "up_LDF": (width, 24), "down_LFD": (24, width)}
    assert set(matrices) == set(MUON_AXES)
    for name, shape in matrices.items():
        for layer in step["layers." + name]:
            singular = np.linalg.svd(layer.reshape(shape), compute_uv=False) / (ADAM_RMS * max(shape) ** 0.5)
            assert (singular > 0.3).all(), name
            assert (singular < 1.3).all(), name
    others = {name for name in step if name.removeprefix("layers.") not in MUON_AXES}
    assert "embed_VD" in others
    for name in others:  # Adam's first step is the sign of the gradient
        np.testing.assert_allclose(step[name], np.sign(named(grads)[name]), rtol=1e-2, err_msg=name)


def test_muon_treats_a_layer_like_the_same_matrix_alone():
    config = OptimConfig(
        optimizer="muon", learning_rate=1.0, warmup_fraction=0.0, weight_decay=0.0, no_decay=(), clip_norm=1e9
    )
    rng = np.random.default_rng(2)
    stacked = {"layers": {"up_LDF": jnp.asarray(rng.normal(size=(3, 6, 9)), jnp.float32)}}
    zeros = like(stacked, 0.0)
    together = one_update(config, zeros, stacked).params["layers"]["up_LDF"]
    for layer in range(3):
        alone = jax.tree.map(lambda leaf, i=layer: leaf[i : i + 1], stacked)
        single = one_update(config, like(alone, 0.0), alone).params["layers"]["up_LDF"]
        np.testing.assert_allclose(together[layer], single[0], rtol=1e-4, atol=1e-5)


def test_every_optimiser_lowers_a_loss_under_jit():
    for name in ("adamw", "muon"):
        config = OptimConfig(optimizer=name, learning_rate=0.2, no_decay=())
        params = {"layers": {"up_LDF": jnp.zeros((2, 4, 4))}, "bias": jnp.zeros(4)}
        goal = {"layers": {"up_LDF": jnp.ones((2, 4, 4))}, "bias": jnp.ones(4)}
        optimizer = make_optimizer(config, params, 200)

        def loss(params, goal=goal):
            return sum(
                jnp.sum((a - b) ** 2) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(goal), strict=True)
            )

        @quick
        def step(params, state, optimizer=optimizer, loss=loss):
            return optimizer.update(jax.grad(loss)(params), state, params, True)[:2]

        state = optimizer.init(params)
        for _ in range(200):
            params, state = step(params, state)
        assert float(loss(params)) < 0.1, name


@pytest.mark.parametrize("key", ["frozen", "no_decay"])
def test_a_pattern_that_matches_no_parameter_is_refused(key):
    with pytest.raises(
        UserError, match=rf"optim.{key}: no parameter matches 'layers.q_LDN'; did you mean 'layers.q_LDNH'"
    ):
        make_optimizer(OptimConfig.model_validate({key: ("layers.q_LDN",)}), model_params(), 10)
