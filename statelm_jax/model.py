"""Qwen3 in Flax NNX: GQA with per-head q/k RMSNorm, RoPE, SwiGLU, tied or untied head.

The layers' parameters are stacked along a leading axis L and scanned, so one layer is compiled whatever the
depth. `Qwen3` is NNX at the surface; inside jit use ``graphdef, params = nnx.split(model)`` and
``nnx.merge(graphdef, params)``: the parameters are one plain pytree.

Two ways through the same layers:

1. `Qwen3.__call__` reads whole rows under the tree mask (training, scoring);
2. `Qwen3.extend` continues sequences whose keys and values are in a `Cache` (prefill and decode).

Float32 where it matters: RoPE angles, norms, softmax and logits; the rest follows `ComputeConfig`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from statelm_jax.attention import attend
from statelm_jax.config import ComputeConfig, ModelConfig


class Cache(NamedTuple):
    """Keys and values of every slot: `k_LSCKH`, `v_LSCKH`."""

    k_LSCKH: jax.Array
    v_LSCKH: jax.Array


def new_cache(config: ModelConfig, slots: int, length: int, dtype) -> Cache:
    """An empty cache; its contents never matter beyond a slot's own positions."""
    shape = (config.num_hidden_layers, slots, length, config.num_key_value_heads, config.head_dim)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def rms_norm(x, scale, eps: float):
    """RMSNorm over the last axis, computed in float32, returned in the dtype of `x`."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    scale32 = jnp.expand_dims(scale.astype(jnp.float32), tuple(range(x.ndim - 1)))
    return (x32 * scale32).astype(x.dtype)


def rope(x_BTNH, position_BT, theta: float):
    """Rotary embedding of whole heads in half-split layout (Qwen3's), angles in float32."""
    half = x_BTNH.shape[-1] // 2
    frequency_F = jnp.float32(theta) ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_BT1F = position_BT[..., None, None].astype(jnp.float32) * frequency_F[None, None, None]
    cos, sin = jnp.cos(angle_BT1F), jnp.sin(angle_BT1F)
    low, high = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x_BTNH.dtype)


class Layers(nnx.Module):
    """The stacked parameters of all layers. A leading L, then [in..., out...]."""

    def __init__(self, config: ModelConfig, dtype, rngs: nnx.Rngs):
        L, D, F = config.num_hidden_layers, config.hidden_size, config.intermediate_size
        N, K, H = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        depth = (2 * L) ** -0.5

        def matrix(shape, fan_in, scale=1.0):
            """Normal with variance 1/fan_in; the two projections into the residual stream are scaled by depth."""
            value = jax.random.normal(rngs.params(), (L, *shape), jnp.float32) * (scale * fan_in**-0.5)
            return nnx.Param(value.astype(dtype))

        def constant(value, *shape):
            return nnx.Param(jnp.full((L, *shape), value, dtype))

        self.attn_norm_LD = constant(1, D)
        self.q_LDNH = matrix((D, N, H), D)
        self.k_LDKH = matrix((D, K, H), D)
        self.v_LDKH = matrix((D, K, H), D)
        self.o_LNHD = matrix((N, H, D), N * H, depth)
        self.q_norm_LH = constant(1, H)
        self.k_norm_LH = constant(1, H)
        self.mlp_norm_LD = constant(1, D)
        self.gate_LDF = matrix((D, F), D)
        self.up_LDF = matrix((D, F), D)
        self.down_LFD = matrix((F, D), F, depth)
        if config.attention_bias:
            self.q_bias_LNH = constant(0, N, H)
            self.k_bias_LKH = constant(0, K, H)
            self.v_bias_LKH = constant(0, K, H)
            self.o_bias_LD = constant(0, D)

    def stacked(self) -> dict[str, Any]:
        """Name -> array [L, ...], the scanned pytree."""
        return {name: value.get_value() for name, value in vars(self).items() if isinstance(value, nnx.Param)}


class Qwen3(nnx.Module):
    """A dense Qwen3 decoder (same mathematics as Hugging Face's `Qwen3ForCausalLM`)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, compute: ComputeConfig = ComputeConfig()):
        dtype = jnp.dtype(compute.param_dtype)
        V, D = config.vocab_size, config.hidden_size
        self.config = config
        self.compute = compute
        self.embed_VD = nnx.Param((jax.random.normal(rngs.params(), (V, D)) * 0.02).astype(dtype))
        self.layers = Layers(config, dtype, rngs)
        self.final_norm_D = nnx.Param(jnp.ones((D,), dtype))
        if not config.tie_word_embeddings:
            self.head_VD = nnx.Param((jax.random.normal(rngs.params(), (V, D)) * D**-0.5).astype(dtype))

    def __call__(self, tokens_BT, position_BT, end_BT):
        """Hidden states of whole rows.

        Args:
          tokens_BT: int32 ids.
          position_BT: int32 RoPE positions (depth in the token tree).
          end_BT: int32; token i sees token j of its row iff ``j <= i < end[j]``. 0 for padding.

        Returns:
          hidden_BTD after the final norm, in the compute dtype.
        """

        def layer(x_BTD, params):
            def read(q_BTNH, k_BTKH, v_BTKH):
                return attend(q_BTNH, k_BTKH, v_BTKH, end_BT, backend=self.compute.attention)

            return self._layer(x_BTD, params, position_BT, read), None

        if self.compute.remat == "layer":
            layer = jax.checkpoint(layer)
        x_BTD, _ = jax.lax.scan(layer, self._embed(tokens_BT), self.layers.stacked())
        return rms_norm(x_BTD, self.final_norm_D.get_value(), self.config.rms_norm_eps)

    def extend(
        self, tokens_RT, position_RT, slot_R: jax.Array | None, cache: Cache, *, length: int | None = None
    ) -> tuple[jax.Array, Cache]:
        """Continue R sequences by T tokens each.

        Args:
          tokens_RT: int32 ids.
          position_RT: int32 position of each token in its sequence, which is also its place in the cache.
            A position outside the cache marks padding: nothing is written and its output is meaningless.
          slot_R: int32 cache slot of each row; slots of real rows are distinct. None: row r is slot r, for all slots.
          cache: Holds positions 0..p-1 of every row whose first token here has position p.
          length: Positions that are read, counted from 0; every real row must end within. None reads all.

        Returns:
          hidden_RTD after the final norm, and the cache with the new keys and values.
        """
        length = length or cache.k_LSCKH.shape[2]
        rows = tokens_RT.shape[0]
        end_RC = jnp.full((rows, length), length, jnp.int32)
        where = (jnp.arange(rows)[:, None] if slot_R is None else slot_R[:, None], position_RT)

        def layer(carry, params_and_index):
            x_RTD, k_LSCKH, v_LSCKH = carry
            params, i = params_and_index

            def read(q_RTNH, k_RTKH, v_RTKH):
                nonlocal k_LSCKH, v_LSCKH
                k_LSCKH = k_LSCKH.at[(i, *where)].set(k_RTKH.astype(k_LSCKH.dtype), mode="drop")
                v_LSCKH = v_LSCKH.at[(i, *where)].set(v_RTKH.astype(v_LSCKH.dtype), mode="drop")
                k_RCKH, v_RCKH = k_LSCKH[i, :, :length], v_LSCKH[i, :, :length]
                if slot_R is not None:
                    k_RCKH, v_RCKH = k_RCKH[slot_R], v_RCKH[slot_R]
                return attend(q_RTNH, k_RCKH, v_RCKH, end_RC, position_RT, backend=self.compute.attention)

            x_RTD = self._layer(x_RTD, params, position_RT, read)
            return (x_RTD, k_LSCKH, v_LSCKH), None

        carry = (self._embed(tokens_RT), *cache)
        xs = (self.layers.stacked(), jnp.arange(self.config.num_hidden_layers))
        (x_RTD, k_LSCKH, v_LSCKH), _ = jax.lax.scan(layer, carry, xs)
        hidden_RTD = rms_norm(x_RTD, self.final_norm_D.get_value(), self.config.rms_norm_eps)
        return hidden_RTD, Cache(k_LSCKH, v_LSCKH)

    def logits(self, hidden):
        """float32 logits [..., V] of hidden states [..., D]. Call it only at positions that need them."""
        head_VD = (self.embed_VD if self.config.tie_word_embeddings else self.head_VD).get_value()
        return jnp.einsum("...d,vd->...v", hidden, head_VD.astype(hidden.dtype), preferred_element_type=jnp.float32)

    def _embed(self, tokens):
        return self.embed_VD.get_value()[tokens].astype(jnp.dtype(self.compute.compute_dtype))

    def _layer(self, x_BTD, params, position_BT, read):
        """One decoder layer; `read(q, k, v)` is the attention.

        All products are of two matrices: a CPU's transposed products of the backward pass are faster that way.
        """
        config, dtype = self.config, x_BTD.dtype
        B, T, D = x_BTD.shape
        N, K, H = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        p = {name: value.astype(dtype) for name, value in params.items()}

        def project(h_MD, name, heads):
            y_MP = h_MD @ p[f"{name}_LDNH" if name == "q" else f"{name}_LDKH"].reshape(D, heads * H)
            y_BTNH = y_MP.reshape(B, T, heads, H)
            bias = f"{name}_bias_LNH" if name == "q" else f"{name}_bias_LKH"
            return y_BTNH + p[bias][None, None] if config.attention_bias else y_BTNH

        def rotated(y_BTNH, scale):
            return rope(rms_norm(y_BTNH, params[scale], config.rms_norm_eps), position_BT, config.rope_theta)

        x_MD = x_BTD.reshape(B * T, D)
        h_MD = rms_norm(x_MD, params["attn_norm_LD"], config.rms_norm_eps)
        q_BTNH = rotated(project(h_MD, "q", N), "q_norm_LH")
        k_BTKH = rotated(project(h_MD, "k", K), "k_norm_LH")
        o_BTNH = read(q_BTNH, k_BTKH, project(h_MD, "v", K))
        o_MD = o_BTNH.reshape(B * T, N * H) @ p["o_LNHD"].reshape(N * H, D)
        x_MD = x_MD + (o_MD + p["o_bias_LD"][None] if config.attention_bias else o_MD)

        @jax.checkpoint  # the wide activations are cheaper to recompute than to write out and read back
        def mlp(x_MD):
            h_MD = rms_norm(x_MD, params["mlp_norm_LD"], config.rms_norm_eps)
            return (jax.nn.silu(h_MD @ p["gate_LDF"]) * (h_MD @ p["up_LDF"])) @ p["down_LFD"]

        return (x_MD + mlp(x_MD)).reshape(B, T, D)
