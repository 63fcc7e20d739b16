"""Model folders: what is written can be read again bit for bit, and whatever is wrong with one is said in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from statelm_jax.config import ComputeConfig, ModelConfig
from statelm_jax.errors import UserError
from statelm_jax.model import Qwen3
from statelm_jax.weights import atomic, load_model, read_config, save_model

CONFIG = ModelConfig(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    rope_theta=5_000.0,
)
WEIGHTS = "model.safetensors"
GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture(scope="module")
def model() -> Qwen3:
    return Qwen3(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture
def folder(model: Qwen3, tmp_path: Path) -> Path:
    save_model(model, tmp_path / "agent")
    return tmp_path / "agent"


def same_parameters(a: Qwen3, b: Qwen3) -> None:
    jax.tree.map(np.testing.assert_array_equal, nnx.split(a)[1], nnx.split(b)[1])


def edit_weights(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def edit_config(folder: Path, **changes) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **changes}))


def complaint(folder: Path) -> str:
    """The one line with which the folder is refused."""
    with pytest.raises(UserError) as error:
        load_model(folder)
    message = str(error.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


def test_a_saved_model_is_loaded_bit_equal(model, folder):
    same_parameters(load_model(folder), model)
    assert load_model(folder).config == CONFIG


def test_a_bfloat16_file_is_loaded_as_the_rounded_parameters(model, tmp_path):
    save_model(model, tmp_path, dtype="bfloat16")
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    rounded = jax.tree.map(lambda x: x.astype("bfloat16"), nnx.split(model)[1])
    loaded = load_model(tmp_path, compute=ComputeConfig(param_dtype="bfloat16"))
    jax.tree.map(np.testing.assert_array_equal, nnx.split(loaded)[1], rounded)


def test_saving_again_replaces_the_files_and_leaves_nothing_else(model, folder):
    other = Qwen3(CONFIG, rngs=nnx.Rngs(1))
    save_model(other, folder)
    same_parameters(load_model(folder), other)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", WEIGHTS]


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(TypeError), atomic(path) as temporary:
        temporary.write_text(b"half of the n")  # pyright: ignore[reportArgumentType]
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_tied_models_have_no_head_in_the_file(tmp_path):
    save_model(Qwen3(CONFIG.model_copy(update={"tie_word_embeddings": True}), rngs=nnx.Rngs(0)), tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / WEIGHTS)


# --- refused folders ---------------------------------------------------------------------------------------------


def test_a_missing_folder_is_named(tmp_path):
    assert "config.json is missing" in complaint(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    assert f"{name} is missing" in complaint(folder)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_torn_weight_file_is_refused(folder, share):
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: int(len(content) * share)])
    assert "torn" in complaint(folder)


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"model_type": '])
def test_a_torn_config_is_refused(folder, content):
    (folder / "config.json").write_text(content)
    assert "config.json" in complaint(folder)


def test_a_missing_tensor_is_named(folder):
    edit_weights(folder, lambda tensors: tensors.pop(GATE))
    assert GATE in complaint(folder)


def test_a_tensor_too_many_is_named(folder):
    edit_weights(folder, lambda tensors: tensors.update({"model.layers.2.extra": np.zeros(1, np.float32)}))
    assert "unexpected tensor 'model.layers.2.extra'" in complaint(folder)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder):
    edit_weights(folder, lambda tensors: tensors.update({GATE: np.zeros((12, 9), np.float32)}))
    message = complaint(folder)
    assert GATE in message
    assert "(12, 9)" in message
    assert "(12, 8)" in message


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_hidden_layers": 3}, "model.layers.2."),
        ({"num_hidden_layers": 1}, "model.layers.1."),
        ({"hidden_size": 16}, "shape"),
        ({"num_key_value_heads": 2}, "k_proj"),
        ({"tie_word_embeddings": True}, "lm_head.weight"),
        ({"attention_bias": True}, "bias"),
        ({"model_type": "llama"}, "'llama'"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'linear'"),
        ({"num_experts": 8}, "'num_experts'"),
        ({"head_dim": "many"}, "head_dim"),
        ({"head_dim": 3}, "even"),
    ],
)
def test_a_config_of_another_model_is_refused(folder, changes, told):
    edit_config(folder, **changes)
    assert told in complaint(folder)


def test_rope_theta_is_read_from_both_places_where_transformers_writes_it(folder):
    assert read_config(folder).rope_theta == 5_000.0
    edit_config(folder, rope_theta=1.0, rope_parameters={"rope_type": "default", "rope_theta": 7_000.0})
    assert read_config(folder).rope_theta == 7_000.0
