"""Initial weights that already know how to look one token back and to match it: a head start for copying.

An induction head (Olsson et al. 2022, arXiv 2209.11895) continues a sequence as it went on before: one head marks
every position with the token before it, a head of a later layer looks for positions marked with the current token
and copies what stands there. A small model finds this circuit only after a long plateau, as neither head is of use
without the other. `induction_init` writes a soft version of it into two layers of a random model; nothing is frozen,
and everything else stays random. The idea of initial weights that mimic trained ones is that of mimetic
initialisation (Trockman and Kolter 2023, arXiv 2305.09828); this construction is our own.

How, with A, B, C three orthogonal H-dimensional subspaces of the residual stream and m a direction beside them:

1. All token embeddings share a component along m, so that a head can act whatever the token is.
2. Layer 0, first key/value head: queries and keys are fixed vectors (read off m) whose rotary phases agree at
   distance one: it attends to the previous token. Its value is the token's A part, and it writes that into B.
3. Layer 1, first key/value head: queries read A (this token), keys read B (the token before that position), so it
   attends to what followed this token earlier. Only slowly rotating pairs are used, so distance hardly matters.
   Its value and output are C: the token found there is added to the prediction.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from statelm_jax.errors import UserError
from statelm_jax.model import Qwen3

EMBED_STD = 0.09
"""Large enough for the tied head to give sharp distributions from the start."""
QK_SCALE = 1.3
"""Initial scale of the q and k norms, so that attention can be sharp."""
PREVIOUS_GAIN, MARK_GAIN, COPY_GAIN = 3.0, 2.0, 3.0
FAST_PAIRS = 6
"""Rotary pairs that turn fast enough to tell one position from the next."""
FAST_WEIGHT = 0.2


def induction_init(model: Qwen3, seed: int) -> None:
    """Write the circuit into `model`, in place.

    Raises:
      UserError: The model is too small: it takes two layers and a width of at least three heads and one.
    """
    config = model.config
    D, H = config.hidden_size, config.head_dim
    G = config.num_attention_heads // config.num_key_value_heads
    if config.num_hidden_layers < 2 or 3 * H + 1 > D or H // 2 <= FAST_PAIRS:
        raise UserError("induction initialisation takes 2 layers, width > 3 x head_dim and head_dim > 12")
    rng = np.random.default_rng(seed)
    basis_DX, _ = np.linalg.qr(rng.normal(size=(D, 3 * H + 1)))
    m_D, a_DH, b_DH, c_DH = basis_DX[:, 0], *np.split(basis_DX[:, 1:], 3, axis=1)

    embed_VD = rng.normal(size=(config.vocab_size, D)) + m_D * D**0.5
    _set(model.embed_VD, embed_VD * EMBED_STD)
    layers = model.layers
    for norm in (layers.q_norm_LH, layers.k_norm_LH):
        _set(norm, np.full(norm.get_value().shape, QK_SCALE))

    now_H, before_H = _one_apart(config.rope_theta, H)
    slow_H = np.tile(np.where(np.arange(H // 2) < FAST_PAIRS, FAST_WEIGHT, 1.0), 2)
    q, k, v, o = (np.array(p.get_value()) for p in (layers.q_LDNH, layers.k_LDKH, layers.v_LDKH, layers.o_LNHD))
    k[0, :, 0] = 0.3 * k[0, :, 0] + PREVIOUS_GAIN * np.outer(m_D, before_H)
    k[1, :, 0] = b_DH * slow_H
    v[0, :, 0], v[1, :, 0] = a_DH, c_DH
    for n in range(G):
        q[0, :, n] = 0.3 * q[0, :, n] + PREVIOUS_GAIN * np.outer(m_D, now_H)
        q[1, :, n] = a_DH * slow_H
        o[0, n], o[1, n] = b_DH.T * (MARK_GAIN / G), c_DH.T * (COPY_GAIN / G)
    for param, value in ((layers.q_LDNH, q), (layers.k_LDKH, k), (layers.v_LDKH, v), (layers.o_LNHD, o)):
        _set(param, value)


def _one_apart(theta: float, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """A query and a key of fast pairs only, whose rotated product is largest when the key is one position back."""
    half = head_dim // 2
    angle = theta ** (-np.arange(half) / half)
    unit = np.where(np.arange(half) < FAST_PAIRS, FAST_PAIRS**-0.5, 0.0)
    return np.concatenate([unit, 0 * unit]), np.concatenate([unit * np.cos(angle), unit * np.sin(angle)])


def _set(param, value) -> None:
    param.set_value(jnp.asarray(value, param.get_value().dtype))
