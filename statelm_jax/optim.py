"""The optimiser: clip, AdamW or Muon, warm-up and cosine decay, from an `OptimConfig`.

The life of one update:

1. frozen parameters leave the room: they have no optimiser state, and count neither in the norm nor in the clip;
2. the gradient is clipped by its global norm;
3. AdamW's direction, or Muon's for the matrices inside the layers (momentum, orthogonalised; AdamW for the rest);
4. decoupled weight decay, never on norms, biases and what `no_decay` lists (by default the embedding);
5. times the learning rate of this update;
6. kept only if the batch trained something and the gradient is finite: otherwise parameters and optimiser state
   (its count, so its schedule, too) stay as they are.

Steps are optimiser updates everywhere. Gradients of micro-batches are summed before they come here: batches carry
the denominator of the global batch, so there is nothing to average.

Parameters are named by their path in the tree (`layers.q_LDNH`, `embed_VD`). The layers are stacked along a leading
axis, so the number of axes says nothing about what a parameter is: names decide.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from statelm_jax.config import OptimConfig
from statelm_jax.errors import UserError

Params = Any
"""A pytree of arrays."""

NEVER_DECAYED = ("*norm*", "*bias*")

ADAM_RMS = 0.2
"""The usual root mean square of Adam's steps (Liu et al. 2025, arXiv 2502.16982, section 2.2)."""

MUON_AXES = {
    "q_LDNH": MuonDimensionNumbers(reduction_axis=1, output_axis=(2, 3)),
    "k_LDKH": MuonDimensionNumbers(reduction_axis=1, output_axis=(2, 3)),
    "v_LDKH": MuonDimensionNumbers(reduction_axis=1, output_axis=(2, 3)),
    "o_LNHD": MuonDimensionNumbers(reduction_axis=(1, 2), output_axis=3),
    "gate_LDF": MuonDimensionNumbers(reduction_axis=1, output_axis=2),
    "up_LDF": MuonDimensionNumbers(reduction_axis=1, output_axis=2),
    "down_LFD": MuonDimensionNumbers(reduction_axis=1, output_axis=2),
}
"""Input and output axes of the matrices inside the layers; the axis that is neither (L) is a batch of matrices."""


def learning_rate_at(config: OptimConfig, total_steps: int, step):
    """Learning rate of update number `step` (0-based; an int or an array): linear warm-up, then a cosine.

    The first update already moves (rate peak / warm-up steps), the last one of the warm-up has the peak rate, and
    from `total_steps` on the rate is the final one.
    """
    warmup = round(config.warmup_fraction * total_steps)
    rising = (step + 1) / max(warmup, 1)
    progress = jnp.clip((step - warmup) / max(total_steps - warmup, 1), 0.0, 1.0)
    falling = 0.5 * (1 + jnp.cos(jnp.pi * progress))
    final = config.final_learning_rate
    return jnp.where(step < warmup, config.learning_rate * rising, final + (config.learning_rate - final) * falling)


class Update(NamedTuple):
    """The outcome of `Optimizer.update`.

    Attributes:
      params: New parameters.
      opt_state: New optimiser state.
      grad_norm: Global norm of the gradient of the trained parameters, before clipping.
      applied: Bool: False when nothing was trained or the gradient was not finite, and so nothing changed.
    """

    params: Params
    opt_state: optax.OptState
    grad_norm: jax.Array
    applied: jax.Array


@dataclass(frozen=True)
class Optimizer:
    """A chain for parameters of one structure. Both methods are pure and may be jitted.

    Attributes:
      transform: The optax chain.
      frozen: Names of the parameters that are not trained.
    """

    transform: optax.GradientTransformation
    frozen: frozenset[str]

    def init(self, params: Params) -> optax.OptState:
        """A fresh state."""
        return self.transform.init(params)

    def update(self, grads: Params, opt_state: optax.OptState, params: Params, trained: jax.Array | bool) -> Update:
        """One update.

        Args:
          grads: Of the whole global batch.
          opt_state: From `init` or the update before.
          params: The parameters that `grads` belong to.
          trained: Whether any token of the batch carried weight.
        """
        grad_norm = optax.tree.norm([g for name, g in _named(grads) if name not in self.frozen])
        applied = jnp.isfinite(grad_norm) & trained
        steps, new_state = self.transform.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, steps)

        def choose(new, old):
            return jax.tree.map(lambda a, b: jnp.where(applied, a, b), new, old)

        return Update(choose(new_params, params), choose(new_state, opt_state), grad_norm, applied)


def make_optimizer(config: OptimConfig, params: Params, total_steps: int) -> Optimizer:
    """The optimiser of a run of `total_steps` updates.

    Args:
      config: What to build.
      params: The parameters, or their shapes; only names are read.
      total_steps: Updates of the whole run; the schedule ends there.

    Raises:
      UserError: A pattern of `frozen` or `no_decay` matches no parameter.
    """
    names = [name for name, _ in _named(params)]
    frozen = frozenset(_matching(names, config.frozen, "frozen"))
    kept = frozenset(_matching(names, config.no_decay, "no_decay")) | {
        name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in NEVER_DECAYED)
    }
    chain = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        _direction(config),
        optax.add_decayed_weights(config.weight_decay, lambda tree: _map_names(lambda name: name not in kept, tree)),
        optax.scale_by_learning_rate(lambda count: learning_rate_at(config, total_steps, count)),
    )
    transform = optax.partition(
        {"trained": chain, "frozen": optax.set_to_zero()},
        lambda tree: _map_names(lambda name: "frozen" if name in frozen else "trained", tree),
    )
    return Optimizer(transform, frozen)


def _direction(config: OptimConfig) -> optax.GradientTransformation:
    """What is decayed and scaled: Adam's step, or Muon's for the layers' matrices and Adam's for the others."""
    adam = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
    if config.optimizer == "adamw":
        return adam
    muon = optax.chain(
        scale_by_muon(beta=config.muon_momentum, weight_dimension_numbers=lambda tree: _map_names(_muon_axes, tree)),
        optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(_match_adam, updates)),
    )
    return optax.partition(
        {"muon": muon, "adam": adam}, lambda tree: _map_names(lambda name: "muon" if _muon_axes(name) else "adam", tree)
    )


def _muon_axes(name: str) -> MuonDimensionNumbers | None:
    return MUON_AXES.get(name.removeprefix("layers."))


def _match_adam(path, update):
    """Scale an orthogonal matrix so that its elements are as large as Adam's steps usually are.

    An orthogonal [in, out] matrix has root mean square 1/sqrt(max(in, out)). One learning rate and one weight decay
    then serve both.
    """
    axes = _muon_axes(_name(path))
    assert axes is not None, path
    width = max(math.prod(update.shape[i] for i in jax.tree.leaves(side)) for side in axes)
    return update * (ADAM_RMS * width**0.5)


def _name(path) -> str:
    """`layers.q_LDNH` for the path of a parameter; NNX's wrapping of its value is no part of the name."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


def _named(tree: Params) -> list[tuple[str, jax.Array]]:
    return [(_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _map_names(function, tree: Params) -> Params:
    return jax.tree_util.tree_map_with_path(lambda path, _: function(_name(path)), tree)


def _matching(names: Sequence[str], patterns: Sequence[str], key: str) -> list[str]:
    """The names that match any pattern. A pattern without a match is an error: it would silently do nothing."""
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            near = difflib.get_close_matches(pattern, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the parameters are {', '.join(names)}"
            raise UserError(f"optim.{key}: no parameter matches {pattern!r}; {hint}")
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
