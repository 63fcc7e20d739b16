"""Checkpoints: what is restored is what was saved, bit for bit, and a wrong or damaged one is refused in one line."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from statelm_jax.checkpoint import Checkpointer
from statelm_jax.config import MeshConfig, ModelConfig, OptimConfig
from statelm_jax.errors import UserError
from statelm_jax.model import Qwen3
from statelm_jax.sharding import make_mesh
from statelm_jax.train.loop import Trainer, TrainState

MODEL = ModelConfig(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
)
CONFIG = {"model": MODEL.model_dump(), "optim": {"learning_rate": 0.1}, "trajectories": ("a.jsonl",), "seed": 3}


@pytest.fixture(scope="module")
def state() -> TrainState:
    """A train state in which every number differs from a fresh one."""
    model = Qwen3(MODEL, rngs=nnx.Rngs(0))
    trainer = Trainer(model, OptimConfig(), 10, make_mesh(MeshConfig(), jax.devices()[:1]))
    rng = np.random.default_rng(0)

    def moved(x):
        return x + jnp.asarray(rng.normal(size=x.shape) * 10, x.dtype)

    return jax.tree.map(moved, trainer.init(model))


def like(state: TrainState) -> TrainState:
    return jax.tree.map(jnp.zeros_like, state)


def complaint(checkpointer: Checkpointer, template: Any) -> str:
    with pytest.raises(UserError) as error:
        checkpointer.restore(template)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_state_is_restored_bit_equal(state, tmp_path):
    Checkpointer(tmp_path, CONFIG).save(7, state)
    restored, step = Checkpointer(tmp_path, CONFIG).restore(like(state))
    assert step == 7
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    jax.tree.map(lambda a, b: np.testing.assert_equal(a.dtype, b.dtype), restored, state)


def test_the_newest_is_chosen_and_old_ones_go(tmp_path):
    saver = Checkpointer(tmp_path, CONFIG, keep=2)
    assert saver.latest() is None
    for step in (8, 9, 10):
        saver.save(step, {"x": jnp.full(3, step)})
    assert saver.latest() == 10
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.isdigit()) == ["10", "9"]
    restored, step = saver.restore({"x": jnp.zeros(3, int)})
    assert (step, restored["x"].tolist()) == (10, [10, 10, 10])


def test_without_a_checkpoint_the_remedy_is_named(tmp_path):
    assert "start without --resume" in complaint(Checkpointer(tmp_path / "none", CONFIG), {"x": jnp.zeros(3)})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 4}, "seed = 3, this run has 4"),
        ({"optim": {"learning_rate": 0.2}}, "optim.learning_rate = 0.1, this run has 0.2"),
        ({"model": {**MODEL.model_dump(), "head_dim": 8}}, "model.head_dim = 4, this run has 8"),
        ({"trajectories": ("b.jsonl",)}, "trajectories"),
        ({"rows": 2}, "rows = None, this run has 2"),
    ],
)
def test_a_checkpoint_of_another_configuration_is_refused_with_the_key(tmp_path, change, told):
    Checkpointer(tmp_path, CONFIG).save(1, {"x": jnp.zeros(3)})
    assert told in complaint(Checkpointer(tmp_path, {**CONFIG, **change}), {"x": jnp.zeros(3)})


def test_a_key_that_this_run_no_longer_has_is_a_difference_too(tmp_path):
    Checkpointer(tmp_path, {**CONFIG, "gone": 1}).save(1, {"x": jnp.zeros(3)})
    assert "gone = 1" in complaint(Checkpointer(tmp_path, CONFIG), {"x": jnp.zeros(3)})


def damages(folder: Path) -> dict[str, list[Path]]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    return {
        "config": [path for path in files if "config" in path.relative_to(folder).parts],
        "state": [path for path in files if "state" in path.relative_to(folder).parts],
    }


@pytest.mark.parametrize("part", ["config", "state"])
@pytest.mark.parametrize("kind", ["removed", "emptied"])
def test_a_torn_checkpoint_is_refused_and_the_folder_is_named(tmp_path, part, kind):
    saver = Checkpointer(tmp_path, CONFIG)
    saver.save(5, {"x": jnp.arange(300.0)})
    files = damages(tmp_path / "5")[part]
    assert files
    for path in files:
        path.unlink() if kind == "removed" else path.write_bytes(b"")
    message = complaint(saver, {"x": jnp.zeros(300)})
    assert str(tmp_path / "5") in message
    assert "remove that folder" in message


def test_a_model_of_another_shape_is_refused(tmp_path):
    saver = Checkpointer(tmp_path, CONFIG)
    saver.save(5, {"x": jnp.arange(6.0)})
    assert "does not fit this model" in complaint(saver, {"x": jnp.zeros(7)})


def test_an_unfinished_save_is_never_chosen(tmp_path):
    saver = Checkpointer(tmp_path, CONFIG)
    saver.save(5, {"x": jnp.arange(3.0)})
    shutil.copytree(tmp_path / "5", tmp_path / "6.orbax-checkpoint-tmp")
    (tmp_path / "7").write_text("not a folder")
    assert saver.latest() == 5
    restored, step = saver.restore({"x": jnp.zeros(3)})
    assert (step, restored["x"].tolist()) == (5, [0.0, 1.0, 2.0])


def test_a_save_that_fails_leaves_the_checkpoint_before_it(tmp_path):
    saver = Checkpointer(tmp_path, CONFIG)
    saver.save(5, {"x": jnp.arange(3.0)})
    with pytest.raises(UserError, match="cannot save"):
        saver.save(6, {"x": jnp.arange(3.0), "y": object()})
    assert saver.latest() == 5
    assert saver.restore({"x": jnp.zeros(3)})[1] == 5
