"""Hugging Face folders <-> parameters: one table of names and layouts.

A model folder holds `config.json`, `model.safetensors`, the tokenizer's files and `statelm.json` (the chat and
environment configuration that the model was trained with). transformers and vLLM read it as a Qwen3 checkpoint.

Linear layers are stored [out, in] there and [in, out...] here; layers are separate tensors there and stacked here.
Every tensor of a file is used exactly once, and every parameter is found exactly once, or the folder is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from statelm_jax.config import ComputeConfig, ModelConfig, validate
from statelm_jax.errors import UserError
from statelm_jax.model import Qwen3

WEIGHTS = "model.safetensors"

TOP_LEVEL = {
    "embed_VD": "model.embed_tokens.weight",
    "final_norm_D": "model.norm.weight",
    "head_VD": "lm_head.weight",
}

PER_LAYER = {
    "attn_norm_LD": "input_layernorm.weight",
    "mlp_norm_LD": "post_attention_layernorm.weight",
    "q_norm_LH": "self_attn.q_norm.weight",
    "k_norm_LH": "self_attn.k_norm.weight",
    "q_LDNH": "self_attn.q_proj.weight",
    "k_LDKH": "self_attn.k_proj.weight",
    "v_LDKH": "self_attn.v_proj.weight",
    "o_LNHD": "self_attn.o_proj.weight",
    "q_bias_LNH": "self_attn.q_proj.bias",
    "k_bias_LKH": "self_attn.k_proj.bias",
    "v_bias_LKH": "self_attn.v_proj.bias",
    "o_bias_LD": "self_attn.o_proj.bias",
    "gate_LDF": "mlp.gate_proj.weight",
    "up_LDF": "mlp.up_proj.weight",
    "down_LFD": "mlp.down_proj.weight",
}

INPUT_AXES = {"q_LDNH": 1, "k_LDKH": 1, "v_LDKH": 1, "o_LNHD": 2, "gate_LDF": 1, "up_LDF": 1, "down_LFD": 1}
"""Of a layer's matrix: how many leading axes are inputs. The file has [outputs, inputs], flattened."""

IGNORED_KEYS = {
    *("_name_or_path", "architectures", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype"),
    *("initializer_range", "max_position_embeddings", "max_window_layers", "transformers_version", "use_cache"),
    *("attention_dropout", "layer_types", "sliding_window", "rope_scaling", "rope_parameters"),
}
"""Keys of config.json that do not change the mathematics (the last four are checked first)."""


def read_config(folder: Path) -> ModelConfig:
    """The model configuration of a folder's config.json. `UserError` for whatever this port would compute wrongly."""
    path = folder / "config.json"
    values = read_json(path)
    if values.get("model_type") != "qwen3":
        raise UserError(f"{path}: model_type is {values.get('model_type')!r}; only 'qwen3' can be loaded")
    if values.get("use_sliding_window") or "sliding_attention" in (values.get("layer_types") or ()):
        raise UserError(f"{path}: sliding-window attention is on; it is not supported")
    if values.get("hidden_act", "silu") != "silu":
        raise UserError(f"{path}: hidden_act is {values['hidden_act']!r}; only 'silu' is supported")
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UserError(f"{path}: RoPE scaling {kind!r} is not supported")
    known = set(ModelConfig.model_fields)
    extra = set(values) - known - IGNORED_KEYS - {"model_type", "hidden_act", "use_sliding_window"}
    if extra:
        raise UserError(f"{path}: unknown key {min(extra)!r}; it may change the mathematics, so nothing is loaded")
    fields = {name: values[name] for name in known if name in values}
    if "rope_theta" in rope:
        fields["rope_theta"] = rope["rope_theta"]
    return validate(ModelConfig, fields, str(path))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. `UserError` names a missing or malformed file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent} is not a model folder: {path.name} is missing") from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a JSON object")
    return values


def load_model(folder: Path, *, compute: ComputeConfig = ComputeConfig()) -> Qwen3:
    """The model of a folder, parameters in `compute.param_dtype`.

    Raises:
      UserError: The folder, a file or a tensor is missing, torn, of the wrong shape, or left over.
    """
    config = read_config(folder)
    model = nnx.eval_shape(lambda: Qwen3(config, rngs=nnx.Rngs(0), compute=compute))
    graphdef, shapes = nnx.split(model)
    dtype = jax.numpy.dtype(compute.param_dtype)
    tensors = _read_tensors(folder / WEIGHTS)
    values = {name: _parameter(name, leaf, tensors, folder).astype(dtype) for name, leaf in _named(shapes)}
    if tensors:
        raise UserError(f"{folder / WEIGHTS}: unexpected tensor {min(tensors)!r}")
    params = jax.tree_util.tree_map_with_path(lambda path, _: jax.numpy.asarray(values[_path(path)]), shapes)
    return nnx.merge(graphdef, params)


def save_model(model: Qwen3, folder: Path, *, dtype: str | None = None) -> None:
    """Write config.json and model.safetensors; each file appears whole or not at all.

    Args:
      model: Its parameters are fetched to this host.
      folder: Made if missing.
      dtype: Of the file; None keeps the parameters'.
    """
    folder.mkdir(parents=True, exist_ok=True)
    params = nnx.split(model)[1]
    tensors: dict[str, np.ndarray] = {}
    for name, leaf in _named(params):
        value = np.asarray(jax.device_get(leaf))
        tensors |= _tensors(name, value.astype(jax.numpy.dtype(dtype)) if dtype else value)
    kind = next(iter(tensors.values())).dtype.name
    with atomic(folder / WEIGHTS) as path:
        save_file(tensors, path, metadata={"format": "pt"})
    values = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "torch_dtype": kind,
        "max_position_embeddings": 40_960,
        **model.config.model_dump(),
    }
    write_json(folder / "config.json", values)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """A JSON file that appears whole or not at all."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; what is written there takes the name `path` only if the block succeeds."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _path(path) -> str:
    names = [str(getattr(entry, "key", getattr(entry, "name", ""))) for entry in path]
    return ".".join(name for name in names if name not in ("value", ""))


def _named(tree) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield _path(path), leaf


def _read_tensors(path: Path) -> dict[str, np.ndarray]:
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise UserError(f"{path.parent} is not a model folder: {path.name} is missing") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is torn or not a safetensors file: {error}") from None


def _parameter(name: str, leaf, tensors: dict[str, np.ndarray], folder: Path) -> np.ndarray:
    """One parameter in our layout; its tensors are taken out of the dict."""

    def take(key: str, shape: tuple[int, ...]) -> np.ndarray:
        if key not in tensors:
            raise UserError(
                f"{folder / WEIGHTS}: tensor {key!r} is missing (does config.json belong to these weights?)"
            )
        value = tensors.pop(key)
        if value.shape != shape:
            raise UserError(f"{folder / WEIGHTS}: tensor {key!r} has shape {value.shape}, config.json says {shape}")
        return value

    if name in TOP_LEVEL:
        return take(TOP_LEVEL[name], leaf.shape)
    short = name.removeprefix("layers.")
    layers, shape = leaf.shape[0], leaf.shape[1:]
    keys = [f"model.layers.{i}.{PER_LAYER[short]}" for i in range(layers)]
    if short not in INPUT_AXES:
        flat = (int(np.prod(shape)),)
        return np.stack([take(key, flat).reshape(shape) for key in keys])
    inputs = int(np.prod(shape[: INPUT_AXES[short]]))
    flat = (int(np.prod(shape)) // inputs, inputs)
    return np.stack([take(key, flat).T.reshape(shape) for key in keys])


def _tensors(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of one parameter in the file's layout."""
    if name in TOP_LEVEL:
        return {TOP_LEVEL[name]: value}
    short = name.removeprefix("layers.")
    out = {}
    for i, layer in enumerate(value):
        axes = INPUT_AXES.get(short)
        inputs = int(np.prod(layer.shape[:axes])) if axes else 0
        flat = np.ascontiguousarray(layer.reshape(inputs, -1).T) if axes else layer.reshape(-1)
        out[f"model.layers.{i}.{PER_LAYER[short]}"] = flat
    return out
