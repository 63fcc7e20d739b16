"""The model against transformers' Qwen3 in PyTorch, and the attention backends against plain loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from statelm_jax import attention
from statelm_jax.attention import attend, visible
from statelm_jax.config import ComputeConfig, ModelConfig
from statelm_jax.model import Qwen3, rms_norm
from statelm_jax.weights import load_model, save_model

CONFIGS = {
    "tied, 4 queries per key": ModelConfig(
        vocab_size=41,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        rope_theta=500.0,
        tie_word_embeddings=True,
    ),
    "untied, bias, 2 queries per key": ModelConfig(
        vocab_size=37,
        hidden_size=32,
        intermediate_size=28,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=10,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-3,
        attention_bias=True,
    ),
    "untied, 1 query per key": ModelConfig(
        vocab_size=29,
        hidden_size=16,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=6,
        rope_theta=10_000.0,
    ),
}
B, T = 2, 19


def random_model(config: ModelConfig, seed: int, **compute) -> Qwen3:
    """Every parameter random, those that start at 1 or 0 as well."""
    model = Qwen3(config, rngs=nnx.Rngs(seed), compute=ComputeConfig(**compute))
    rng = np.random.default_rng(seed)
    graphdef, params = nnx.split(model)
    params = jax.tree.map(lambda x: x + jnp.asarray(rng.normal(size=x.shape) * 0.1, x.dtype), params)
    return nnx.merge(graphdef, params)


def row_inputs(config: ModelConfig, seed: int):
    tokens_BT = np.random.default_rng(seed).integers(0, config.vocab_size, (B, T)).astype(np.int32)
    position_BT = np.tile(np.arange(T, dtype=np.int32), (B, 1))
    return tokens_BT, position_BT, np.full((B, T), T, np.int32)


def torch_model(folder: Path) -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_every_gradient_equal_those_of_transformers(name, tmp_path):
    torch = pytest.importorskip("torch")
    config = CONFIGS[name]
    model = random_model(config, 1)
    save_model(model, tmp_path / "weights")
    theirs = torch_model(tmp_path / "weights")
    inputs = row_inputs(config, 2)
    pull_BTV = np.random.default_rng(3).normal(size=(B, T, config.vocab_size)).astype(np.float32)
    graphdef, params = nnx.split(model)

    @jax.jit
    def ours(params):
        def loss(params):
            model = nnx.merge(graphdef, params)
            logits_BTV = model.logits(model(*inputs))
            return jnp.mean(jax.nn.log_softmax(logits_BTV) * pull_BTV), logits_BTV

        return jax.grad(loss, has_aux=True)(params)

    grads, logits_BTV = ours(params)
    their_logits = theirs(torch.tensor(inputs[0], dtype=torch.long)).logits
    np.testing.assert_allclose(logits_BTV, their_logits.detach().numpy(), atol=1e-4, rtol=0)

    (torch.log_softmax(their_logits, -1) * torch.tensor(pull_BTV)).mean().backward()
    save_model(nnx.merge(graphdef, grads), tmp_path / "gradients")
    exported = load_file(tmp_path / "gradients" / "model.safetensors")
    expected = {name: p.grad.numpy() for name, p in theirs.named_parameters()}
    assert exported.keys() == expected.keys()
    for key, grad in expected.items():
        assert np.linalg.norm(exported[key] - grad) <= 1e-4 * np.linalg.norm(grad), key


def test_hidden_states_equal_those_of_transformers_after_every_layer(tmp_path):
    torch = pytest.importorskip("torch")
    config = CONFIGS["untied, bias, 2 queries per key"]
    model = random_model(config, 4)
    save_model(model, tmp_path)
    inputs = row_inputs(config, 5)
    with torch.no_grad():
        out = torch_model(tmp_path)(torch.tensor(inputs[0], dtype=torch.long), output_hidden_states=True)
    for layers in range(1, config.num_hidden_layers + 1):
        shallow = Qwen3(config.model_copy(update={"num_hidden_layers": layers}), rngs=nnx.Rngs(0))
        for param, value in ((shallow.embed_VD, model.embed_VD), (shallow.final_norm_D, model.final_norm_D)):
            param.set_value(value.get_value())
        for name, value in model.layers.stacked().items():
            getattr(shallow.layers, name).set_value(value[:layers])
        expected = jnp.asarray(out.hidden_states[layers].numpy())
        if layers < config.num_hidden_layers:  # transformers norms the last one only
            expected = rms_norm(expected, model.final_norm_D.get_value(), config.rms_norm_eps)
        np.testing.assert_allclose(shallow(*inputs), expected, atol=1e-4, rtol=0, err_msg=f"after layer {layers}")


def test_import_of_an_export_is_bit_equal(tmp_path):
    for name, config in CONFIGS.items():
        model = random_model(config, 6)
        save_model(model, tmp_path / name)
        loaded = load_model(tmp_path / name)
        assert loaded.config == config
        jax.tree.map(np.testing.assert_array_equal, nnx.split(model)[1], nnx.split(loaded)[1])


def test_keeping_layer_inputs_only_changes_no_gradient():
    config = CONFIGS["tied, 4 queries per key"]
    inputs = row_inputs(config, 7)

    def gradient(**compute):
        graphdef, params = nnx.split(random_model(config, 8, **compute))
        return jax.jit(jax.grad(lambda p: jnp.sum(nnx.merge(graphdef, p)(*inputs) ** 3)))(params)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), gradient(), gradient(remat="layer")
    )


# --- attention ---------------------------------------------------------------------------------------------------

ROWS, TOKENS, HEADS, KEYS, WIDTH = 2, 40, 4, 2, 8


@st.composite
def tree_ends(draw) -> np.ndarray:
    """`end` of two rows of random forests in depth-first order, padding (end 0) behind them."""
    rows = []
    for _ in range(ROWS):
        size = draw(st.integers(0, TOKENS))
        parents = []
        for i in range(size):
            path = [-1]
            node = i - 1
            while node >= 0:  # in depth-first order, a parent is on the path of the node before
                path.append(node)
                node = parents[node]
            parents.append(draw(st.sampled_from(path)) if draw(st.integers(0, 3)) == 0 else i - 1)
        end = np.arange(1, size + 1)
        for i in reversed(range(size)):
            if parents[i] >= 0:
                end[parents[i]] = max(end[parents[i]], end[i])
        rows.append(np.concatenate([end, np.zeros(TOKENS - size, int)]))
    return np.asarray(rows, np.int32)


def qkv(seed: int, queries: int = TOKENS, keys: int = TOKENS):
    rng = np.random.default_rng(seed)
    shapes = ((queries, HEADS), (keys, KEYS), (keys, KEYS))
    return tuple(jnp.asarray(rng.normal(size=(ROWS, *shape, WIDTH)), jnp.float32) for shape in shapes)


def loops(q_BTNH, k_BUKH, v_BUKH, end_BU, index_BT) -> np.ndarray:
    """The definition, one query at a time."""
    q_BTNH, k_BUKH, v_BUKH = (np.asarray(x, np.float64) for x in (q_BTNH, k_BUKH, v_BUKH))
    out = np.zeros_like(q_BTNH)
    for b, t, n in np.ndindex(out.shape[:3]):
        i, k = index_BT[b, t], n // (HEADS // KEYS)
        seen = [j for j in range(k_BUKH.shape[1]) if j <= i < end_BU[b, j]]
        if seen:
            score = k_BUKH[b, seen, k] @ q_BTNH[b, t, n] / WIDTH**0.5
            weight = np.exp(score - score.max())
            out[b, t, n] = weight / weight.sum() @ v_BUKH[b, seen, k]
    return out


@pytest.fixture(scope="module")
def backends():
    """Backend -> jitted (output, gradients of a fixed loss), with blocks so small that rows have several."""
    pull_BTNH = qkv(99)[0]

    def compiled(backend: str):
        def loss(q, k, v, end):
            o_BTNH = attend(q, k, v, end, backend=backend)
            return jnp.sum(o_BTNH * pull_BTNH), o_BTNH

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "QUERY_BLOCK", 16)
        functions = {backend: compiled(backend) for backend in ("dense", "mapped")}
        for function in functions.values():
            function(*qkv(0), np.zeros((ROWS, TOKENS), np.int32))
        yield functions


@settings(max_examples=25)
@given(end_BU=tree_ends(), seed=st.integers(0, 99))
def test_mapped_attention_equals_dense_in_values_and_gradients_under_tree_masks(backends, end_BU, seed):
    (dense_grads, dense), (mapped_grads, mapped) = (backends[name](*qkv(seed), end_BU) for name in backends)
    np.testing.assert_allclose(mapped, dense, atol=1e-5)
    for a, b in zip(mapped_grads, dense_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@settings(max_examples=5)
@given(end_BU=tree_ends(), seed=st.integers(0, 99))
def test_attention_is_the_softmax_over_the_visible_keys(backends, end_BU, seed):
    index_BT = np.tile(np.arange(TOKENS), (ROWS, 1))
    expected = loops(*qkv(seed), end_BU, index_BT)  # pyright: ignore
    for function in backends.values():
        np.testing.assert_allclose(function(*qkv(seed), end_BU)[1], expected, atol=1e-5)


@pytest.mark.parametrize("backend", ["dense", "mapped"])
def test_queries_at_any_position_see_the_cache_up_to_themselves(backend):
    queries, length = 17, 23
    q, k, v = qkv(1, queries, length)
    index_BT = np.random.default_rng(2).integers(0, length + 1, (ROWS, queries)).astype(np.int32)
    end_BU = np.full((ROWS, length), length, np.int32)
    out = attend(q, k, v, end_BU, index_BT, backend=backend)
    np.testing.assert_allclose(out, loops(q, k, v, end_BU, index_BT), atol=1e-5)


def test_rows_of_padding_give_zeros_and_zero_gradients(backends):
    end_BU = np.zeros((ROWS, TOKENS), np.int32)
    for function in backends.values():
        grads, out = function(*(100 * x for x in qkv(3)), end_BU)
        assert not np.asarray(out).any()
        assert all(not np.asarray(grad).any() for grad in grads)


@given(end_BU=tree_ends())
def test_visible_is_the_rule(end_BU):
    index_T = np.arange(TOKENS)
    mask_BTU = np.asarray(visible(jnp.tile(index_T[None], (ROWS, 1)), jnp.asarray(end_BU)))
    expected = (index_T[None, None] <= index_T[None, :, None]) & (index_T[None, :, None] < end_BU[:, None])
    np.testing.assert_array_equal(mask_BTU, expected)


def test_an_unknown_backend_is_an_error():
    with pytest.raises(ValueError, match="flashy"):
        attend(*qkv(0), np.zeros((ROWS, TOKENS), np.int32), backend="flashy")  # pyright: ignore
