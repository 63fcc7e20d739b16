"""Stand-ins that make the environment run in milliseconds: a byte tokenizer and a policy that plays a list."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from statelm_jax.chat import ChatFormat
from statelm_jax.config import ChatConfig, EnvConfig
from statelm_jax.env.index import DocumentStore
from statelm_jax.env.pensieve import Pensieve
from statelm_jax.tokenizer import CONTROL_TEXTS, ControlTokens, Tokenizer
from statelm_jax.types import Action, ActionStop, Request, StepResult, Task, TokenIds, ToolCall

CONTROL = ControlTokens(
    endoftext=151643,
    im_start=151644,
    im_end=151645,
    tool_call=151657,
    tool_call_end=151658,
    tool_response=151665,
    tool_response_end=151666,
    think=151667,
    think_end=151668,
)


@dataclass(frozen=True)
class ByteTokenizer:
    """One token per UTF-8 byte, and Qwen3's control tokens under their own ids."""

    control: ControlTokens = CONTROL
    added_ids: frozenset[int] = frozenset(getattr(CONTROL, name) for name in CONTROL_TEXTS)
    stop_ids: frozenset[int] = frozenset({CONTROL.im_end, CONTROL.endoftext})
    vocab_size: int = 151669
    fingerprint: str = "bytes"
    chat_template: str | None = None
    source: Path = Path("bytes/tokenizer.json")
    spelling: dict[int, str] = field(
        default_factory=lambda: {getattr(CONTROL, name): text for name, text in CONTROL_TEXTS.items()}
    )

    def encode(self, text: str) -> TokenIds:
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        return [self.encode(text) for text in texts]

    def encode_with_offsets(self, text: str) -> tuple[TokenIds, np.ndarray]:
        lengths = [len(char.encode("utf-8", "replace")) for char in text]
        return self.encode(text), np.repeat(np.arange(len(text), dtype=np.int64), lengths)

    def decode(self, ids: Any) -> str:
        parts = [bytes([token]) if token < 256 else self.spelling.get(token, "?").encode() for token in map(int, ids)]
        return b"".join(parts).decode("utf-8", "replace")


def byte_chat(tools_in_prompt: Any = "names", **config: Any) -> ChatFormat:
    """The real chat format over bytes; tools by name only, as the schemas would be thousands of bytes."""
    tokenizer = cast(Tokenizer, ByteTokenizer())
    return ChatFormat(tokenizer, ChatConfig(tools_in_prompt=tools_in_prompt, **config))


def reply(chat: ChatFormat, tool: str, thought: str = "", **arguments: Any) -> Action:
    """A reply with one call."""
    return Action(token_ids=chat.encode_reply(thought, [ToolCall(name=tool, arguments=arguments)]))


def text_reply(chat: ChatFormat, body: str, stop: ActionStop = ActionStop.STOP) -> Action:
    """A reply whose call body is `body`, whatever it holds; without its end marks when it was cut."""
    control = chat.tokenizer.control
    end = [control.tool_call_end, control.im_end] if stop is ActionStop.STOP else []
    return Action(token_ids=np.array([control.tool_call, *chat.tokenizer.encode(body), *end], np.int32), stop=stop)


class Episode:
    """An episode over bytes with a call per line: `episode("readChunk", chunk_id=3)`."""

    def __init__(self, document: str = "", chat: ChatFormat | None = None, **config: Any) -> None:
        ids = {key: config.pop(key) for key in ("first_msg_id", "first_chunk_id") if key in config}
        question = config.pop("question", "Which pier?")
        self.first_id = ids.get("first_msg_id", 1)
        self.chat = chat or byte_chat()
        self.config = EnvConfig(**{"system_prompt": "Be brief.", "max_turns": 10_000, **config})
        self.task = Task(task_id="t", question=question, document=document, answers=("four",))
        self.env = Pensieve(self.task, self.chat, self.config, DocumentStore(self.chat.tokenizer), **ids)

    def __call__(self, tool: str, *, thought: str = "", **arguments: Any) -> StepResult:
        return self.env.step(reply(self.chat, tool, thought, **arguments))

    def say(self, body: str, stop: ActionStop = ActionStop.STOP) -> StepResult:
        return self.env.step(text_reply(self.chat, body, stop))

    @property
    def result(self) -> str:
        return self.env.turns[-1].result

    @property
    def error(self) -> bool:
        return self.env.turns[-1].error

    @property
    def shown(self) -> list[str]:
        """The texts of all messages after the head, as the model sees them; calls as `*tool`."""
        messages = self.env.observe().messages[2:]
        return ["*" + ",".join(c.name for c in m.tool_calls) if m.token_ids is not None else m.text for m in messages]


class ScriptedPolicy:
    """Implements `types.Policy`: plays the same list of replies in every episode."""

    def __init__(self, actions: Iterable[Action]) -> None:
        self._actions = list(actions)
        self._requests: list[Request] = []
        self.seen: dict[int, list[Request]] = {}
        self.released: list[int] = []

    def submit(self, request: Request) -> None:
        self._requests.append(request)
        self.seen.setdefault(request.episode, []).append(request)

    def collect(self) -> Sequence[tuple[int, Action | Exception]]:
        requests, self._requests = self._requests, []
        return [(request.episode, self._answer(request.turn)) for request in requests]

    def release(self, episode: int) -> None:
        self.released.append(episode)

    def _answer(self, turn: int) -> Action | Exception:
        return self._actions[turn - 1] if turn <= len(self._actions) else IndexError("the script is over")
