"""Attention with the tree mask, behind one function with several backends.

The mask is one rule for training rows, packed rows, token trees and KV caches: a query with index `i` sees
the key at place `j` iff ``j <= i < end[j]``. In a training row the index of a query is its place in the row
and `end[j]` is the end of j's subtree; in a cache the index is the token's position and every `end` is the
cache length. A padding key has ``end = 0`` and is seen by nobody; a query that sees no key yields zeros.

Scores and softmax are float32 whatever the inputs are.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

_MASKED = -1e30
"""Finite, so that a row with every key masked gives zeros and finite gradients, never NaN."""

MIN_MAPPED = 16
"""Fewer queries per row than this are never mapped."""

QUERY_BLOCK = 128
"""Queries per block of the `mapped` backend: keys after the block are never touched."""


def attend(q_BTNH, k_BUKH, v_BUKH, end_BU, index_BT=None, *, backend: str = "auto"):
    """Softmax attention under the tree mask, grouped-query heads.

    Args:
      q_BTNH: Queries; N is a multiple of K.
      k_BUKH, v_BUKH: Keys and values.
      end_BU: int32, one past the last query index that may see each key; 0 hides it.
      index_BT: int32 index of every query; None means that query t has index t (and U equals T).
      backend: `dense`, `mapped`, or `auto` (mapped on CPUs, dense elsewhere).

    Returns:
      o_BTNH in the dtype of `v`.
    """
    if backend == "auto":
        # A few queries over a long cache (decoding) are one batched product on every platform.
        backend = "mapped" if jax.default_backend() == "cpu" and q_BTNH.shape[1] >= MIN_MAPPED else "dense"
    if backend == "dense":
        return _dense(q_BTNH, k_BUKH, v_BUKH, end_BU, index_BT)
    if backend == "mapped":
        return _mapped(q_BTNH, k_BUKH, v_BUKH, end_BU, index_BT)
    raise ValueError(f"unknown attention backend {backend!r}")


def visible(index_T, end_U):
    """Bool mask [..., T, U] of the rule ``j <= i < end[j]``."""
    end_1U = end_U[..., None, :]
    key_1U = jax.lax.broadcasted_iota(jnp.int32, end_1U.shape, end_1U.ndim - 1)
    return (key_1U <= index_T[..., :, None]) & (index_T[..., :, None] < end_1U)


def _softmax(score, mask):
    """float32 softmax over the last axis; all zeros where nothing is visible."""
    score = jnp.where(mask, score, _MASKED)
    top = jax.lax.stop_gradient(score.max(axis=-1, keepdims=True))
    weight = jnp.where(mask, jnp.exp(score - top), 0.0)
    total = weight.sum(axis=-1, keepdims=True)
    return weight / jnp.where(total > 0.0, total, 1.0)


def _dense(q_BTNH, k_BUKH, v_BUKH, end_BU, index_BT):
    """All scores at once. The oracle of the other backends."""
    B, T, N, H = q_BTNH.shape
    K = k_BUKH.shape[2]
    if index_BT is None:
        index_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    score_BKGTU = jnp.einsum("btkgh,bukh->bkgtu", q_BTKGH, k_BUKH, preferred_element_type=jnp.float32)
    weight_BKGTU = _softmax(score_BKGTU * jnp.float32(H**-0.5), visible(index_BT, end_BU)[:, None, None])
    o_BTKGH = jnp.einsum("bkgtu,bukh->btkgh", weight_BKGTU.astype(v_BUKH.dtype), v_BUKH)
    return o_BTKGH.reshape(B, T, N, H)


def _mapped(q_BTNH, k_BUKH, v_BUKH, end_BU, index_BT):
    """One (row, key/value head) at a time, so that scores stay in a CPU's cache; recomputed in the backward pass."""
    B, T, N, H = q_BTNH.shape
    U, K = k_BUKH.shape[1:3]
    G = N // K
    aligned = index_BT is None
    if aligned:
        index_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    q_MGTH = q_BTNH.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B * K, G, T, H)
    k_MUH = k_BUKH.transpose(0, 2, 1, 3).reshape(B * K, U, H)
    v_MUH = v_BUKH.transpose(0, 2, 1, 3).reshape(B * K, U, H)
    one_head = jax.checkpoint(functools.partial(_one_head, aligned=aligned))
    o_MGTH = jax.lax.map(
        lambda x: one_head(*x), (q_MGTH, k_MUH, v_MUH, jnp.repeat(index_BT, K, 0), jnp.repeat(end_BU, K, 0))
    )
    return o_MGTH.reshape(B, K, G, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def _one_head(q_GTH, k_UH, v_UH, index_T, end_U, *, aligned: bool):
    """Attention of the G query heads that share one key/value head."""
    G, T, H = q_GTH.shape
    blocks = []
    for start in range(0, T, QUERY_BLOCK) if aligned else (0,):
        stop = min(start + QUERY_BLOCK, T) if aligned else T
        keys = stop if aligned else k_UH.shape[0]
        q_MH = q_GTH[:, start:stop].reshape(-1, H)
        score_MU = jnp.dot(q_MH, k_UH[:keys].T, preferred_element_type=jnp.float32) * jnp.float32(H**-0.5)
        mask_TU = visible(index_T[start:stop], end_U[:keys])
        weight_MU = _softmax(score_MU.reshape(G, stop - start, keys), mask_TU[None]).reshape(score_MU.shape)
        blocks.append(jnp.dot(weight_MU.astype(v_UH.dtype), v_UH[:keys]).reshape(G, stop - start, H))
    return jnp.concatenate(blocks, axis=1)
