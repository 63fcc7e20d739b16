"""Frozen, checked configuration: one TOML file plus `--a.b value` overrides -> one validated object.

Every section is a `Config`: immutable, and an unknown key is an error that gives the key's path. There
is no second place for defaults: what a field says here is what holds.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeGuard, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from statelm_jax.errors import UserError

TOOL_NAMES = (
    "analyzeText",
    "loadDocument",
    "buildIndex",
    "readChunk",
    "searchEngine",
    "note",
    "readNote",
    "updateNote",
    "deleteContext",
    "checkBudget",
    "finish",
)
"""The tools on their wire names (paper, section 3), in the order in which they are listed to the model."""


class Config(BaseModel):
    """Base of every configuration section: frozen, unknown keys are refused, docstrings under fields are their help."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)


class ChatConfig(Config):
    """How messages become tokens.

    A model must be run with the chat configuration it was trained with, so it is saved beside the weights.
    """

    tools_in_prompt: Literal["schemas", "names"] = "schemas"
    """`schemas`: the full JSON schema of every tool in the system block, as Qwen3 expects; `names`: only their
    names (for models so small that the schemas would fill the window)."""
    thinking_header: bool = True
    """Put Qwen3's empty think block into the generation header (non-thinking mode)."""
    compact_json: bool = False
    """Write calls without blanks after ':' and ','. Both forms are read."""


class EnvConfig(Config):
    """The Pensieve environment: what the model may do, and the budget that is enforced."""

    profile: Literal["native"] = "native"
    tools: tuple[str, ...] = TOOL_NAMES
    """Tools of this run, by wire name."""
    context_window: int = Field(default=32_768, ge=64)
    """Tokens that prompt and reply together may take. Enforced."""
    max_reply_tokens: int = Field(default=2_048, ge=8)
    min_reply_tokens: int = Field(default=64, ge=8)
    """With less room than this for a reply the episode ends with `context_overflow`."""
    reserve_tokens: int = Field(default=512, ge=8)
    """Kept free for a delete or a finish turn: a tool result that would eat into it is refused."""
    notes_share: float = Field(default=0.25, gt=0, le=1)
    """Share of the context window that the notes listing may take: a note that would pass it is refused."""
    max_turns: int = Field(default=150, ge=1)
    max_invalid_replies: int = Field(default=3, ge=1)
    """This many replies in a row without a runnable call end the episode."""
    chunk_tokens: int = Field(default=4_000, ge=1)
    """Default chunk size of buildIndex."""
    chunk_overlap: int = Field(default=0, ge=0)
    chunk_border: Literal["token", "sentence"] = "token"
    """`sentence`: a chunk may end early, after its last whole sentence, so that few sentences are cut in two."""
    max_hits: int = Field(default=20, ge=1)
    """Search hits shown at most."""
    max_highlights: int = Field(default=3, ge=1)
    """Highlights shown per hit at most."""
    system_prompt: str | None = None
    """Replaces the built-in system prompt."""

    @model_validator(mode="after")
    def _check(self) -> EnvConfig:
        unknown = [name for name in self.tools if name not in TOOL_NAMES]
        if unknown:
            raise ValueError(f"unknown tool {unknown[0]!r}; the tools are {', '.join(TOOL_NAMES)}")
        if len(set(self.tools)) != len(self.tools):
            raise ValueError("a tool is listed twice")
        if self.min_reply_tokens + self.reserve_tokens >= self.context_window:
            raise ValueError("min_reply_tokens + reserve_tokens must be below context_window")
        if self.chunk_overlap >= self.chunk_tokens:
            raise ValueError("chunk_overlap must be below chunk_tokens")
        return self


class ModelConfig(Config):
    """A dense Qwen3. Field names follow Hugging Face's config.json where one exists."""

    vocab_size: int = Field(ge=2)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    rope_theta: float = Field(default=1_000_000.0, gt=0)
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    tie_word_embeddings: bool = False
    attention_bias: bool = False

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if self.head_dim % 2:
            raise ValueError("head_dim must be even (RoPE rotates pairs)")
        return self


class ComputeConfig(Config):
    """How the model computes; changes speed and memory, never what is computed (beyond rounding)."""

    param_dtype: Literal["float32", "bfloat16"] = "float32"
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Literal["auto", "dense", "mapped"] = "auto"
    """`dense`: one einsum (the oracle); `mapped`: one (row, kv head) at a time, the fastest on CPUs; `auto`: by
    platform."""
    remat: Literal["none", "layer"] = "none"
    """`layer`: keep only each layer's input for the backward pass."""


class SamplingConfig(Config):
    """How one token is drawn from the model's distribution."""

    temperature: float = Field(default=0.0, ge=0.0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, ge=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0)
    """0 keeps every token."""


class SamplerConfig(Config):
    """Cache slots and the bucket table: all shapes that the sampler compiles."""

    slots: int = Field(default=8, ge=1)
    """Episodes whose cache is held at once."""
    cache_tokens: int = Field(default=1_024, ge=8)
    """Cache length per slot: the context window, reply included."""
    prefill_buckets: tuple[int, ...] = (32, 128, 512)
    """Token counts of the prefill programs, ascending; a longer prefill takes several calls."""
    prefill_rows: tuple[int, ...] = (1, 8)
    """Row counts of the prefill programs, ascending."""
    decode_steps: int = Field(default=16, ge=1)
    """Tokens decoded at most before finished replies are handed to the host."""
    handover_share: float = Field(default=0.5, ge=0.0, le=1.0)
    """Decoding pauses when this share of the open replies has finished; 0 hands over each one at once."""
    sampling: SamplingConfig = SamplingConfig()


class OptimConfig(Config):
    """AdamW or Muon with warm-up and cosine decay. Steps are optimiser updates."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon for the matrices inside the layers, AdamW for embedding, head and norms."""
    learning_rate: float = Field(default=1e-5, gt=0)
    final_learning_rate: float = Field(default=0.0, ge=0)
    warmup_fraction: float = Field(default=0.03, ge=0, lt=1)
    b1: float = Field(default=0.9, ge=0, lt=1)
    b2: float = Field(default=0.98, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    weight_decay: float = Field(default=0.01, ge=0)
    no_decay: tuple[str, ...] = ("embed_VD",)
    """Parameters without weight decay beside norms and biases, which never have it. Names or shell patterns."""
    frozen: tuple[str, ...] = ()
    """Parameters that are not trained. Names (`layers.q_LDNH`) or shell patterns (`layers.*`)."""
    clip_norm: float = Field(default=1.0, gt=0)


class MeshConfig(Config):
    """Devices along each mesh axis; -1 at one axis takes what is left."""

    data: int = -1
    fsdp: int = Field(default=1, ge=1)
    tp: int = Field(default=1, ge=1)


C = TypeVar("C", bound=Config)


def load_toml(path: Path) -> dict[str, Any]:
    """The file as a dict. `UserError` names a missing or malformed file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"config file not found: {path}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"cannot read config file {path}: {error}") from None


def validate(config_class: type[C], values: Mapping[str, Any], source: str) -> C:
    """`values` as a checked config. `UserError` gives the path of the first wrong key and the nearest right one."""
    try:
        return config_class.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{source}: {describe(error, config_class)}") from None


def validate_partial(config_class: type[C], values: Mapping[str, Any], source: str) -> C:
    """`values` as defaults that flags will complete: like `validate`, but required keys may still be absent.

    The result lacks the attributes that were not given; never hand it to anything but a parser.
    """
    try:
        return config_class.model_validate(values)
    except ValidationError as error:
        problems = [problem for problem in error.errors() if problem["type"] != "missing"]
        if problems:
            raise UserError(f"{source}: {_describe(problems[0], config_class)}") from None
    return _unchecked(config_class, values)


def _unchecked(config_class: type[C], values: Mapping[str, Any]) -> C:
    fields: dict[str, Any] = {}
    for name, value in values.items():
        kind: Any = config_class.model_fields[name].annotation
        fields[name] = _unchecked(kind, value) if _is_section(kind) else TypeAdapter(kind).validate_python(value)
    return config_class.model_construct(**fields)


def describe(error: ValidationError, config_class: type[Config]) -> str:
    """The first problem of a validation error in one line, with the key's path."""
    return _describe(error.errors()[0], config_class)


def _describe(problem: Mapping[str, Any], config_class: type[Config]) -> str:
    path = ".".join(str(part) for part in problem["loc"]) or "config"
    if problem["type"] == "extra_forbidden":
        return f"unknown key {path!r}" + did_you_mean(path, key_paths(config_class))
    return f"{path}: {problem['msg'].removeprefix('Value error, ')}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest known dotted name (its whole path, or its last part); else empty."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    near = near or [name for name in known if name.rsplit(".", 1)[-1] == word.rsplit(".", 1)[-1]]
    return f"; did you mean {near[0]!r}?" if near else ""


def key_paths(config_class: type[Config], prefix: str = "") -> Iterator[str]:
    """Every key of a configuration as its dotted path, sections themselves included."""
    for name, field in config_class.model_fields.items():
        yield prefix + name
        if _is_section(field.annotation):
            yield from key_paths(field.annotation, f"{prefix}{name}.")


def _is_section(annotation: Any) -> TypeGuard[type[Config]]:
    return isinstance(annotation, type) and issubclass(annotation, Config)
