"""The mesh and where every array lives on it: one table.

Axes: `data` repeats the parameters, `fsdp` splits them and the batch, `tp` splits heads, MLP width and vocabulary.
A dimension that its axis does not divide stays whole (key/value heads fewer than `tp`, a vocabulary of odd size):
slower, never wrong. A parameter without a rule is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from statelm_jax.config import MeshConfig
from statelm_jax.errors import UserError

AXES = ("data", "fsdp", "tp")
BATCH = PartitionSpec(("data", "fsdp"))
"""Rows of a batch go to different devices; the tokens of a row stay together."""

RULES: dict[str, PartitionSpec] = {
    "embed_VD": PartitionSpec("tp", "fsdp"),
    "head_VD": PartitionSpec("tp", "fsdp"),
    "final_norm_D": PartitionSpec(),
    "layers.attn_norm_LD": PartitionSpec(),
    "layers.mlp_norm_LD": PartitionSpec(),
    "layers.q_norm_LH": PartitionSpec(),
    "layers.k_norm_LH": PartitionSpec(),
    "layers.q_LDNH": PartitionSpec(None, "fsdp", "tp"),
    "layers.k_LDKH": PartitionSpec(None, "fsdp", "tp"),
    "layers.v_LDKH": PartitionSpec(None, "fsdp", "tp"),
    "layers.o_LNHD": PartitionSpec(None, "tp", None, "fsdp"),
    "layers.q_bias_LNH": PartitionSpec(None, "tp"),
    "layers.k_bias_LKH": PartitionSpec(None, "tp"),
    "layers.v_bias_LKH": PartitionSpec(None, "tp"),
    "layers.o_bias_LD": PartitionSpec(),
    "layers.gate_LDF": PartitionSpec(None, "fsdp", "tp"),
    "layers.up_LDF": PartitionSpec(None, "fsdp", "tp"),
    "layers.down_LFD": PartitionSpec(None, "tp", "fsdp"),
}
"""Parameter path -> how its dimensions are split."""


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over all devices (or those given). `UserError` gives the numbers when the axes do not multiply up."""
    devices = list(jax.devices() if devices is None else devices)
    fixed = config.fsdp * config.tp
    data = len(devices) // fixed if config.data == -1 else config.data
    if data < 1 or data * fixed != len(devices):
        raise UserError(
            f"mesh: data {config.data} x fsdp {config.fsdp} x tp {config.tp} does not fit {len(devices)} device(s)"
        )
    grid = np.asarray(devices).reshape(data, config.fsdp, config.tp)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def param_path(path: Sequence[Any]) -> str:
    """`layers.q_LDNH` for a key path, of parameters or of an optimiser state that mirrors them."""
    names = [str(part) for entry in path if (part := getattr(entry, "key", getattr(entry, "name", None))) is not None]
    names = [name for name in names if name != "value"]
    return ".".join(names[-2:]) if len(names) > 1 and names[-2] == "layers" else (names[-1] if names else "")


def shardings(mesh: Mesh, tree: Any, *, strict: bool = True) -> Any:
    """A `NamedSharding` for every leaf of a tree of arrays or shapes.

    Args:
      mesh: From `make_mesh`.
      tree: Parameters, or anything whose leaves sit under parameters' names (an optimiser state).
      strict: A leaf without a rule raises `KeyError`; otherwise (counters of an optimiser) it is replicated.
    """

    def place(path, leaf):
        name = param_path(path)
        if name not in RULES and strict:
            raise KeyError(f"no sharding rule for parameter {name!r}; add one to statelm_jax.sharding.RULES")
        return NamedSharding(mesh, _fitted(mesh, RULES.get(name, PartitionSpec()), leaf.shape))

    return jax.tree_util.tree_map_with_path(place, tree)


def batch_shardings(mesh: Mesh, batch: Any) -> Any:
    """Rows split over `data` and `fsdp`; scalars replicated."""
    return jax.tree.map(lambda x: NamedSharding(mesh, _fitted(mesh, BATCH, x.shape)), batch)


def _fitted(mesh: Mesh, spec: PartitionSpec, shape: tuple[int, ...]) -> PartitionSpec:
    """The rule without the axes that do not divide their dimension."""
    fitted = []
    for size, axes in zip(shape, spec, strict=False):
        names = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
        ways = int(np.prod([mesh.shape[name] for name in names]))
        fitted.append(axes if ways and size % ways == 0 else None)
    return PartitionSpec(*fitted)
