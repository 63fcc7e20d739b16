"""A trained model with all that it needs to act: weights, tokenizer, chat format, environment.

An agent folder is a Hugging Face model folder (`statelm_jax.weights`) with a `statelm.json` beside the weights:
the chat and environment configuration that the model was trained with, and what a user should know of its limits.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from statelm_jax.chat import ChatFormat
from statelm_jax.config import ChatConfig, Config, EnvConfig, SamplerConfig, SamplingConfig, validate
from statelm_jax.errors import UserError
from statelm_jax.model import Qwen3
from statelm_jax.sampler import Sampler
from statelm_jax.tokenizer import Tokenizer
from statelm_jax.weights import load_model, read_json, save_model, write_json

FORMAT = 1
SETTINGS = "statelm.json"
SEARCH_TOOL = "searchEngine"


class AgentSettings(Config):
    """What `statelm.json` holds."""

    format: int = FORMAT
    chat: ChatConfig = ChatConfig()
    env: EnvConfig = EnvConfig()
    limits: str = ""
    """What the model can and cannot do, in a sentence or two; shown by `statelm ask`."""
    tokenizer_sha256: str = ""
    """Of the tokenizer.json that the model was trained with."""


@dataclass(frozen=True, kw_only=True)
class Agent:
    """A model that can be let at a document."""

    model: Qwen3
    tokenizer: Tokenizer
    settings: AgentSettings

    @property
    def chat(self) -> ChatFormat:
        """How its messages become tokens."""
        return ChatFormat(self.tokenizer, self.settings.chat)

    def env(self, *, search: bool) -> EnvConfig:
        """Its environment, with or without the search tool."""
        tools = [tool for tool in self.settings.env.tools if tool != SEARCH_TOOL]
        if search:
            tools.insert(tools.index("readChunk") + 1 if "readChunk" in tools else 0, SEARCH_TOOL)
        return self.settings.env.model_copy(update={"tools": tuple(tools)})

    def sampler(self, *, slots: int, sampling: SamplingConfig = SamplingConfig(), warm_up: bool = True) -> Sampler:
        """A sampler for this many episodes at once, compiled."""
        sampler = Sampler(self.model, sampler_config(self.settings.env, slots, sampling), self.tokenizer.stop_ids)
        if warm_up:
            sampler.warm_up()
        return sampler


def sampler_config(env: EnvConfig, slots: int, sampling: SamplingConfig = SamplingConfig()) -> SamplerConfig:
    """Buckets that fit an environment: what one tool result brings, and a whole window."""
    window = env.context_window
    turn = min(window, 2 * -(-(env.chunk_tokens + 64) // 64) * 32)
    buckets = tuple(sorted({min(64, window), turn, window}))
    rows = tuple(sorted({1, max(slots // 4, 1), slots}))
    return SamplerConfig(
        slots=slots, cache_tokens=window, prefill_buckets=buckets, prefill_rows=rows, sampling=sampling
    )


def packaged_agent() -> Path:
    """The folder of the tiny agent that ships with the package."""
    return Path(str(resources.files("statelm_jax"))) / "assets" / "tiny"


def agent_folder(path: Path) -> Path:
    """The agent folder that `path` means: itself, or the `model` folder of a run."""
    if not path.exists():
        raise UserError(f"no such model folder: {path}")
    return path / "model" if (path / "model").is_dir() and not (path / "config.json").exists() else path


def load_agent(path: Path) -> Agent:
    """Load an agent folder or a run. `UserError` in one line for whatever is missing, torn or of another making."""
    folder = agent_folder(path)
    settings = validate(AgentSettings, read_json(folder / SETTINGS), str(folder / SETTINGS))
    if settings.format > FORMAT:
        raise UserError(f"{folder / SETTINGS} has format {settings.format}; this version reads up to {FORMAT}: upgrade")
    tokenizer = Tokenizer.load(folder)
    if settings.tokenizer_sha256 and settings.tokenizer_sha256 != tokenizer.fingerprint:
        raise UserError(f"{folder}/tokenizer.json is not the tokenizer that the model was trained with")
    model = load_model(folder)
    if model.config.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} ids, the model only {model.config.vocab_size}"
        )
    return Agent(model=model, tokenizer=tokenizer, settings=settings)


def save_agent(agent: Agent, folder: Path, *, dtype: str | None = None) -> None:
    """Write an agent folder."""
    save_model(agent.model, folder, dtype=dtype)
    agent.tokenizer.save(folder)
    settings = agent.settings.model_copy(update={"tokenizer_sha256": agent.tokenizer.fingerprint})
    write_json(folder / SETTINGS, settings.model_dump(mode="json"))


def with_model(agent: Agent, model: Qwen3) -> Agent:
    """The same agent with other weights."""
    return dataclasses.replace(agent, model=model)
