"""Configuration: frozen, checked, and every complaint names the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from statelm_jax.config import (
    ChatConfig,
    Config,
    EnvConfig,
    ModelConfig,
    SamplerConfig,
    describe,
    did_you_mean,
    key_paths,
    load_toml,
    validate,
    validate_partial,
)
from statelm_jax.errors import UserError


class RunConfig(Config):
    """A run of everything."""

    name: str
    """What it is called."""
    out: Path = Path("runs")
    rate: float = Field(default=0.5, gt=0)
    env: EnvConfig = EnvConfig(max_turns=9)
    sampler: SamplerConfig = SamplerConfig()


PATHS = list(key_paths(RunConfig))


def nested(path: str, value: Any) -> dict[str, Any]:
    """`a.b` and a value as {"a": {"b": value}}."""
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def complaint(values: dict[str, Any], config_class: type[Config] = RunConfig) -> str:
    with pytest.raises(UserError) as caught:
        validate(config_class, values, "run.toml")
    return str(caught.value)


def test_values_fill_what_is_given_and_defaults_hold_elsewhere() -> None:
    config = validate(RunConfig, {"name": "x", "env": {"chunk_tokens": 50}}, "run.toml")
    assert config.env == EnvConfig(chunk_tokens=50)
    assert (config.name, config.rate, config.out) == ("x", 0.5, Path("runs"))


def test_a_config_cannot_be_changed() -> None:
    config = EnvConfig()
    with pytest.raises(ValidationError):
        config.max_turns = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_docstrings_under_fields_are_their_descriptions() -> None:
    assert RunConfig.model_fields["name"].description == "What it is called."
    assert EnvConfig.model_fields["tools"].description == "Tools of this run, by wire name."


@given(path=st.sampled_from(PATHS), slip=st.sampled_from(["x{}", "{}x", "{}_"]))
def test_a_misspelt_key_is_named_with_its_path_and_the_nearest_real_one(path: str, slip: str) -> None:
    section, _, key = path.rpartition(".")
    wrong = ".".join(filter(None, [section, slip.format(key)]))
    shown = complaint({"name": "x"} | nested(wrong, 1))
    assert shown.startswith(f"run.toml: unknown key {wrong!r}; did you mean '")
    suggested = shown.rpartition("did you mean ")[2].strip("'?")
    assert suggested in PATHS


def test_the_nearest_key_is_the_one_with_one_letter_missing() -> None:
    assert complaint({"name": "x", "env": {"chunk_token": 3}}) == (
        "run.toml: unknown key 'env.chunk_token'; did you mean 'env.chunk_tokens'?"
    )


def test_a_key_in_the_wrong_section_is_found_where_it_belongs() -> None:
    assert did_you_mean("chunk_tokens", PATHS) == "; did you mean 'env.chunk_tokens'?"
    assert did_you_mean("qqqqqqqqqqqqqqqq.top_k", PATHS) == "; did you mean 'sampler.sampling.top_k'?"


def test_a_key_that_resembles_nothing_gets_no_suggestion() -> None:
    assert complaint({"name": "x", "qqqqqq": 1}) == "run.toml: unknown key 'qqqqqq'"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "name: Field required"),
        ({"name": "x", "rate": 0}, "rate: Input should be greater than 0"),
        ({"name": "x", "rate": "fast"}, "rate: Input should be a valid number"),
        ({"name": "x", "env": {"max_turns": 0}}, "env.max_turns: Input should be greater than or equal to 1"),
        ({"name": "x", "env": {"tools": ["note", "fly"]}}, "env: unknown tool 'fly'; the tools are analyzeText, "),
        ({"name": "x", "env": {"tools": ["note", "note"]}}, "env: a tool is listed twice"),
        ({"name": "x", "env": {"chunk_tokens": 5, "chunk_overlap": 5}}, "env: chunk_overlap must be below"),
        ({"name": "x", "env": {"context_window": 100}}, "env: min_reply_tokens + reserve_tokens must be below"),
        ({"name": "x", "env": 3}, "env: Input should be a valid dictionary or instance of EnvConfig"),
        ({"name": "x", "sampler": {"prefill_buckets": [1, "two"]}}, "sampler.prefill_buckets.1: Input should be"),
    ],
)
def test_a_wrong_value_is_named_with_its_path(values: dict[str, Any], expected: str) -> None:
    shown = complaint(values)
    assert shown.startswith(f"run.toml: {expected}")
    assert "\n" not in shown


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_key_value_heads": 3}, "config: num_attention_heads must be a multiple of num_key_value_heads"),
        ({"head_dim": 5}, "config: head_dim must be even"),
    ],
)
def test_a_model_shape_that_cannot_be_is_refused(change: dict[str, int], expected: str) -> None:
    shape = {
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
    }
    assert validate(ModelConfig, shape, "model").num_hidden_layers == 1
    assert complaint(shape | change, ModelConfig).startswith(f"run.toml: {expected}")


def test_describe_reports_the_first_problem() -> None:
    with pytest.raises(ValidationError) as caught:
        ChatConfig.model_validate({"tools_in_prompt": "all", "compact": True})
    assert describe(caught.value, ChatConfig) == "tools_in_prompt: Input should be 'schemas' or 'names'"


# --- values that flags will complete


def test_partial_values_may_lack_required_keys_and_come_back_typed() -> None:
    values = {"out": "elsewhere", "sampler": {"prefill_buckets": [8, 16], "sampling": {"top_k": 4}}}
    partial = validate_partial(RunConfig, values, "run.toml")
    assert not hasattr(partial, "name")
    assert partial.out == Path("elsewhere")
    assert partial.sampler.prefill_buckets == (8, 16)
    assert partial.sampler.sampling.top_k == 4
    assert partial.env.max_turns == 9


def test_complete_partial_values_are_a_checked_config() -> None:
    values = {"name": "x", "rate": 2.0}
    assert validate_partial(RunConfig, values, "run.toml") == validate(RunConfig, values, "run.toml")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"rat": 1}, "unknown key 'rat'; did you mean 'rate'?"),
        ({"env": {"max_turns": 0}}, "env.max_turns: Input should be greater"),
        ({"env": {"chunk_tokens": 5, "chunk_overlap": 5}}, "env: chunk_overlap must be below chunk_tokens"),
    ],
)
def test_partial_values_are_checked_as_far_as_they_go(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        validate_partial(RunConfig, values, "run.toml")
    assert str(caught.value).startswith(f"run.toml: {expected}")


# --- files


def test_a_toml_file_is_read_as_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes('name = "Übung"\n[env]\nmax_turns = 3\n'.encode())
    assert load_toml(path) == {"name": "Übung", "env": {"max_turns": 3}}


@pytest.mark.parametrize("content", [b"name = ", b"\xff\xfe", b"[a]\n[a]\n"])
def test_a_malformed_file_is_refused_in_one_line_that_names_it(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_toml(path)
    assert str(caught.value).startswith(f"cannot read config file {path}: ")
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="config file not found: "):
        load_toml(tmp_path / "absent.toml")
    with pytest.raises(UserError, match="cannot read config file "):
        load_toml(tmp_path)
