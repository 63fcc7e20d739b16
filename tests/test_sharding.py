"""Any mesh takes the same train step as one device; what does not fit a mesh is said, never guessed.

The steps run in a child process with eight fake CPU devices, as the number of devices is fixed when JAX starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from statelm_jax.batch import TreeBatch
from statelm_jax.config import MeshConfig, ModelConfig, OptimConfig
from statelm_jax.errors import UserError
from statelm_jax.model import Qwen3
from statelm_jax.sharding import RULES, make_mesh, param_path, shardings
from statelm_jax.train.curriculum import copy_batches
from statelm_jax.train.loop import Trainer

MODEL = ModelConfig(
    vocab_size=33,  # not divisible by two: stays whole
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    attention_bias=True,
)
MESHES = {
    "one device": MeshConfig(),
    "data 2, fsdp 2, tp 2": MeshConfig(data=2, fsdp=2, tp=2),
}
STEPS = 2


def new_model() -> Qwen3:
    return Qwen3(MODEL, rngs=nnx.Rngs(0))


def small_batch(step: int) -> TreeBatch:
    return copy_batches(33, rows=4, row_tokens=12, longest=5, seed=0)(step)


def train_on(mesh_config: MeshConfig, devices: int) -> dict[str, Any]:
    """Losses, final parameters and the share of q that one device holds."""
    model = new_model()
    # A large eps: otherwise the first steps of Adam divide rounding errors by rounding errors.
    optim = OptimConfig(learning_rate=1e-2, warmup_fraction=0.0, eps=1e-4)
    trainer = Trainer(model, optim, STEPS, make_mesh(mesh_config, jax.devices()[:devices]))
    state = trainer.init(model)
    losses = []
    for step in range(STEPS):
        state, metrics = trainer.step(state, small_batch(step))
        losses.append(float(metrics["loss"]))
    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    (q,) = (leaf for path, leaf in leaves if param_path(path) == "layers.q_LDNH")
    return {
        "losses": losses,
        "params": {param_path(path): np.asarray(leaf).tolist() for path, leaf in leaves},
        "q_share": q.addressable_shards[0].data.size / q.size,
    }


def main() -> None:
    """In the child process: all meshes, as one line of JSON."""
    print(json.dumps({name: train_on(mesh, mesh.fsdp * mesh.tp * abs(mesh.data)) for name, mesh in MESHES.items()}))


@pytest.mark.slow
def test_a_train_step_on_eight_devices_equals_that_on_one():
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "from tests.test_sharding import main; main()"]
    root = Path(__file__).resolve().parent.parent
    child = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=600, check=False)
    assert child.returncode == 0, child.stderr[-3000:]
    results = json.loads(child.stdout.splitlines()[-1])
    one, eight = (results[name] for name in MESHES)
    assert (one["q_share"], eight["q_share"]) == (1.0, 0.25)
    np.testing.assert_allclose(eight["losses"], one["losses"], atol=1e-5, rtol=0)
    start = {param_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.split(new_model())[1])}
    assert one["params"].keys() == start.keys()
    for name, expected in one["params"].items():
        np.testing.assert_allclose(eight["params"][name], expected, atol=1e-5, rtol=0, err_msg=name)
        assert np.any(np.asarray(expected, np.float32) != np.asarray(start[name])), f"{name} was not trained"


def test_every_parameter_of_every_kind_of_model_has_a_rule_and_every_rule_a_parameter():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    seen = set()
    for tied, bias in ((False, True), (True, False)):
        config = MODEL.model_copy(update={"tie_word_embeddings": tied, "attention_bias": bias})
        model = nnx.eval_shape(lambda config=config: Qwen3(config, rngs=nnx.Rngs(0)))
        params = nnx.split(model)[1]
        shardings(mesh, params)
        seen |= {param_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    assert seen == set(RULES)


def test_a_parameter_without_a_rule_is_an_error_that_names_it():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with pytest.raises(KeyError, match=r"layers\.router_LDE"):
        shardings(mesh, {"layers": {"router_LDE": np.zeros((2, 4, 4))}})
    counter = shardings(mesh, {"count": np.zeros(())}, strict=False)["count"]
    assert counter.spec == PartitionSpec()


@pytest.mark.parametrize(
    "numbers",
    [{"fsdp": 3}, {"data": 2, "fsdp": 2}, {"data": 16}, {"data": 0}, {"data": -2}, {"tp": 16}, {"data": 4, "tp": 4}],
)
def test_mesh_numbers_that_do_not_fit_are_a_user_error_with_the_numbers(numbers):
    devices = [jax.devices()[0]] * 8
    config = MeshConfig(**numbers)
    with pytest.raises(UserError) as error:
        make_mesh(config, devices)
    assert f"data {config.data} x fsdp {config.fsdp} x tp {config.tp} does not fit 8 device(s)" in str(error.value)


def test_the_data_axis_takes_the_devices_that_are_left():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "tp": 1}
