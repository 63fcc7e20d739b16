"""Qwen3's chat format both ways: messages to ids, a reply's ids to calls.

This is the only renderer and the only parser; training data, rollouts and inference all pass through it.

Rendering. A message is one block, `<|im_start|>role\\n ... <|im_end|>\\n`. Control tokens are put in as ids;
everything between two of them is encoded as one piece of plain text, so the ids are those of the Hugging Face
template wherever the block is the same, and text can never turn into a control token. Two deliberate
differences: the generation header (with its empty think block, when there is one) stays in the history, and
every tool result is a block of its own, so a rendered message never depends on its neighbours.

Parsing one reply:

1. Ids up to the first stop token count. Only real control ids are marks: `<tool_call>` spelled out is text.
2. The marks split the reply into text, think blocks and call bodies. A call rehearsed inside a think block is
   no call; a `</think>` without its opening closes a block that began with the reply. A body ends at
   `</tool_call>`, at the next `<tool_call>`, or, if the reply was not cut, at its end.
3. A body is read as one or more JSON objects (`lenient_json.py`) and each object as a call.
4. Calls stand in order up to the first fault; what follows a fault is dropped, because running a later call in
   place of a broken earlier one would be a guess. The fault goes into `error`, in words for the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from statelm_jax.config import ChatConfig
from statelm_jax.errors import UserError
from statelm_jax.lenient_json import JsonError, read_json, read_json_sequence
from statelm_jax.tokenizer import ASSETS, CONTROL_TEXTS, Tokenizer
from statelm_jax.types import ActionStop, Message, Role, TokenIds, ToolCall

MAX_ERROR_CHARS = 300
"""No error text for the model is longer."""

_ARGUMENT_KEYS = ("arguments", "parameters")
_IGNORED_KEYS = frozenset({"id", "type"})
_EXAMPLE = '<tool_call>{"name": ..., "arguments": {...}}</tool_call>'


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """What a reply says.

    Attributes:
      thought: All text outside calls, think blocks included, without marks; text after a call is kept too.
      calls: Whole, readable calls in order, up to the first fault. Names are as written (`resolve_tool_name`).
      error: What is wrong with the reply, at most 300 characters; None when nothing is. When `calls` is not
        empty it speaks of what came after them.
      truncated: The reply ran into the token limit. A call that the cut left open is never in `calls`.
    """

    thought: str
    calls: tuple[ToolCall, ...]
    error: str | None
    truncated: bool


@dataclass(slots=True)
class _Pieces:
    """A reply cut at its marks."""

    texts: list[TokenIds] = field(default_factory=list)
    bodies: list[TokenIds] = field(default_factory=list)
    open_think: bool = False
    open_call: bool = False


class ChatFormat:
    """The chat format of one tokenizer under one configuration. Holds no state between calls."""

    def __init__(self, tokenizer: Tokenizer, config: ChatConfig | None = None) -> None:
        self.tokenizer = tokenizer
        self.config = config or ChatConfig()
        self.header_ids: TokenIds = self._encode([*self._open("assistant"), *self._empty_think()])
        """The generation header: what the prompt ends with, and what a reply continues."""

    # --- rendering -----------------------------------------------------------------------------------------

    def message_ids(self, message: Message) -> TokenIds:
        """The message's whole block, trailing newline included.

        An assistant message that carries `token_ids` is those ids exactly as sampled, between the generation
        header and an end mark (added only if the reply lacks one).
        """
        end = [self.tokenizer.control.im_end, "\n"]
        match message.role:
            case Role.SYSTEM:
                return self._encode([*self._open("system"), *self._system_parts(message.text), *end])
            case Role.USER:
                return self._encode([*self._open("user"), message.text, *end])
            case Role.TOOL:
                control = self.tokenizer.control
                result = [control.tool_response, f"\n{message.text}\n", control.tool_response_end]
                return self._encode([*self._open("user"), *result, *end])
        if message.token_ids is None:
            reply = self.encode_reply(message.text, message.tool_calls)
        else:
            reply = message.token_ids
        is_closed = len(reply) > 0 and reply[-1] == self.tokenizer.control.im_end
        return np.concatenate([self.header_ids, reply, self._encode(end[1:] if is_closed else end)])

    def encode_reply(self, thought: str, calls: Sequence[ToolCall]) -> TokenIds:
        """The canonical ids of a reply, im_end included: what a model trained on it would have to sample.

        `parse` gives thought (without surrounding blanks) and calls back.
        """
        control = self.tokenizer.control
        parts: list[str | int] = [thought.strip()]
        for index, call in enumerate(calls):
            parts.append("\n" if index or parts[0] else "")
            parts += control.tool_call, f"\n{self.render_call(call)}\n", control.tool_call_end
        return self._encode([*parts, control.im_end])

    def render_call(self, call: ToolCall) -> str:
        """`render_call` in this configuration's spacing."""
        return render_call(call, compact=self.config.compact_json)

    def system_text(self, prompt: str, schemas: Sequence[Mapping[str, Any]]) -> str:
        """The system message: the prompt, then the tools as `config.tools_in_prompt` says.

        The full form is the tools block of the tokenizer's own chat template, byte for byte, so that a model
        sees what it was trained with; a tokenizer without a template gets the one that ships with the package.

        Args:
          prompt: What the operator tells the model.
          schemas: One JSON schema per tool, in the form {"type": "function", "function": {"name": ...}}.
        """
        if not schemas:
            return prompt
        if self.config.tools_in_prompt == "names":
            return f"{prompt}\nTools: {' '.join(schema.get('function', schema)['name'] for schema in schemas)}"
        return self._render_system(prompt, schemas)

    def _open(self, role: str) -> list[str | int]:
        return [self.tokenizer.control.im_start, f"{role}\n"]

    def _empty_think(self) -> list[str | int]:
        control = self.tokenizer.control
        return [control.think, "\n\n", control.think_end, "\n\n"] if self.config.thinking_header else []

    def _encode(self, parts: Iterable[str | int]) -> TokenIds:
        """Ids of text and control tokens in turn; texts that touch are one piece to the tokenizer."""
        arrays: list[TokenIds] = []
        text = ""
        for part in parts:
            if isinstance(part, str):
                text += part
                continue
            if text:
                arrays.append(self.tokenizer.encode(text))
            arrays.append(np.array([part], np.int32))
            text = ""
        if text:
            arrays.append(self.tokenizer.encode(text))
        return np.concatenate(arrays) if arrays else np.zeros(0, np.int32)

    def _system_parts(self, text: str) -> list[str | int]:
        """The template ends its tools block with an example call in real control tokens, and models were trained on
        those. That ending is a constant of the template, so its marks may be real; all before it is plain text.
        """
        if self.config.tools_in_prompt != "schemas" or not text.endswith(self._tools_ending):
            return [text]
        head = text.removesuffix(self._tools_ending)
        ids = {spelling: getattr(self.tokenizer.control, name) for name, spelling in CONTROL_TEXTS.items()}
        pieces = re.split(f"({'|'.join(map(re.escape, ids))})", self._tools_ending)
        return [head, *(ids.get(piece, piece) for piece in pieces)]

    @cached_property
    def _tools_ending(self) -> str:
        """What the template writes after the last tool."""
        mark = "end of the last schema"
        return self._render_system("", [{"name": mark}]).rpartition(json.dumps({"name": mark}))[2]

    def _render_system(self, prompt: str, schemas: Sequence[Mapping[str, Any]]) -> str:
        """The system message that the chat template writes for these tools, without its frame."""
        messages = [{"role": "system", "content": prompt}, {"role": "user", "content": "?"}]
        before, after = "<|im_start|>system\n", "<|im_end|>\n<|im_start|>user\n?<|im_end|>\n"
        try:
            text = self._template.render(messages=messages, tools=list(schemas), add_generation_prompt=False)
        except Exception as error:  # a template may raise whatever it likes
            reason = " ".join(str(error).split())[:120]
            raise UserError(f"chat template of {self.tokenizer.source} fails: {reason}") from None
        if not (text.startswith(before) and text.endswith(after)):
            raise UserError(f"chat template of {self.tokenizer.source} is not in Qwen3's format")
        return text.removeprefix(before).removesuffix(after)

    @cached_property
    def _template(self) -> Any:
        from jinja2.sandbox import ImmutableSandboxedEnvironment  # imported here: only the full form needs it

        # As transformers sets it up; a template is a file of the checkpoint, hence the sandbox.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        source = self.tokenizer.chat_template
        return environment.from_string(source or (ASSETS / "chat_template.jinja").read_text(encoding="utf-8"))

    # --- parsing -------------------------------------------------------------------------------------------

    def parse(self, token_ids: TokenIds, stop: ActionStop) -> ParsedReply:
        """What a reply says; never raises. The steps are in the module's docstring."""
        ids = np.asarray(token_ids)
        stops = np.flatnonzero(np.isin(ids, list(self.tokenizer.stop_ids)))
        truncated = stop is ActionStop.LENGTH and not len(stops)
        pieces = self._cut(ids[: stops[0]] if len(stops) else ids)
        bodies = pieces.bodies
        if truncated and pieces.open_call:
            bodies = bodies[:-1]
        calls, error = self._read_bodies(bodies, pieces.open_call and not truncated)
        error = error or _what_is_missing(calls, truncated=truncated, open_think=pieces.open_think)
        texts = (self._text(piece).strip() for piece in pieces.texts)
        thought = "\n".join(text for text in texts if text)
        return ParsedReply(thought=thought, calls=calls, error=error and _clip(error), truncated=truncated)

    def _cut(self, ids: TokenIds) -> _Pieces:
        """Cut a reply at its marks, in one pass over the marks."""
        control = self.tokenizer.control
        marks = [control.think, control.think_end, control.tool_call, control.tool_call_end]
        pieces, start = _Pieces(), 0
        for index in np.flatnonzero(np.isin(ids, marks)).tolist():
            mark = ids[index]
            if pieces.open_call and mark in (control.think, control.think_end):
                continue  # a fault of that body
            if pieces.open_think and mark != control.think_end:
                continue  # a rehearsal
            (pieces.bodies if pieces.open_call else pieces.texts).append(ids[start:index])
            if mark == control.think_end and not pieces.open_think:
                pieces.texts, pieces.bodies = [ids[:index]], []  # all so far was thinking
            pieces.open_think = bool(mark == control.think)
            pieces.open_call = bool(mark == control.tool_call)
            start = index + 1
        (pieces.bodies if pieces.open_call else pieces.texts).append(ids[start:])
        return pieces

    def _text(self, ids: TokenIds) -> str:
        """Text without added tokens."""
        return self.tokenizer.decode([token for token in ids.tolist() if token not in self.tokenizer.added_ids])

    def _read_bodies(self, bodies: Sequence[TokenIds], is_last_open: bool) -> tuple[tuple[ToolCall, ...], str | None]:
        """(calls up to the first fault, the fault)."""
        calls: list[ToolCall] = []
        for number, body in enumerate(bodies, 1):
            if self.tokenizer.added_ids.isdisjoint(body.tolist()):
                new_calls, fault = _read_calls(self.tokenizer.decode(body))
                calls += new_calls
            else:
                fault = "it holds a control token"
            if fault is not None:
                which = f"call {len(calls) + 1} of the reply" if calls else "the tool call"
                note = "; </tool_call> is missing" if is_last_open and number == len(bodies) else ""
                return tuple(calls), f"cannot read {which}: {fault}{note}"
        return tuple(calls), None


def render_call(call: ToolCall, *, compact: bool = False) -> str:
    """The canonical JSON of a call. `compact` leaves out the blanks after ':' and ','."""
    value = {"name": call.name, "arguments": dict(call.arguments)}
    return json.dumps(value, ensure_ascii=False, separators=(",", ":") if compact else None)


def resolve_tool_name(name: str, allowed: Sequence[str]) -> str | None:
    """The tool that a written name means, or None.

    One rule: the name itself if it is allowed; else what is left after the last '.', ':' or '/', compared
    without case, '_' and '-', if exactly one allowed tool fits. `functions.read_chunk` is `readChunk`; a tool
    that is not allowed in this run stays unknown.
    """
    if name in allowed:
        return name
    written = _plain_name(name.replace(":", ".").replace("/", ".").rpartition(".")[2])
    fitting = [tool for tool in allowed if _plain_name(tool) == written]
    return fitting[0] if len(fitting) == 1 else None


def _plain_name(name: str) -> str:
    return name.strip().replace("_", "").replace("-", "").lower()


def _read_calls(text: str) -> tuple[list[ToolCall], str | None]:
    """(calls of one body up to the first fault, the fault)."""
    values, json_error = read_json_sequence(text)
    calls: list[ToolCall] = []
    for value in values:
        try:
            calls.append(_read_call(value))
        except JsonError as error:
            return calls, str(error)
    return calls, None if json_error is None else str(json_error)


def _read_call(value: Any) -> ToolCall:
    """A call from the JSON value of a body. `JsonError` says what is wrong with it."""
    if not isinstance(value, dict):
        raise JsonError(f"a call must be an object with 'name' and 'arguments', not {_kind(value)}")
    if "name" not in value:
        raise JsonError("the key 'name' is missing")
    name = value["name"]
    if not isinstance(name, str) or not name.strip():
        raise JsonError(f"'name' must be a tool's name, not {_kind(name)}")
    given = [key for key in _ARGUMENT_KEYS if key in value]
    other = [key for key in value if key != "name" and key not in _ARGUMENT_KEYS and key not in _IGNORED_KEYS]
    if other:  # dropping it in silence would run the tool without what the model meant to give it
        raise JsonError(f"unknown key {other[0][:40]!r} beside 'name'; put every argument inside 'arguments'")
    if len(given) > 1:
        raise JsonError("both 'arguments' and 'parameters' are given; write 'arguments' alone")
    return ToolCall(name=name.strip(), arguments=_read_arguments(value[given[0]] if given else {}))


def _read_arguments(arguments: Any) -> dict[str, Any]:
    """Arguments as an object; a string that holds one is decoded once, and an empty string means none."""
    if isinstance(arguments, str):
        if not arguments.strip():
            return {}
        try:
            arguments = read_json(arguments)
        except JsonError as error:
            raise JsonError(f"'arguments' must be a JSON object, and the string given holds none: {error}") from None
    if not isinstance(arguments, dict):
        raise JsonError(f"'arguments' must be a JSON object, not {_kind(arguments)}")
    return arguments


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    kinds = {str: "a string", list: "a list", dict: "an object", int: "a number", float: "a number"}
    return "an empty string" if value == "" else kinds[type(value)]


def _what_is_missing(calls: Sequence[ToolCall], *, truncated: bool, open_think: bool) -> str | None:
    """What a reply without a fault still lacks; None when it holds a call and was not cut."""
    if truncated:
        return "the reply was cut at the token limit " + ("after its call" if calls else "before it held a whole call")
    if calls:
        return None
    if open_think:
        return f"the think block was never closed, so nothing was run; close it, then reply with {_EXAMPLE}"
    return f"the reply holds no tool call; reply with {_EXAMPLE}"


def _clip(text: str) -> str:
    return text if len(text) <= MAX_ERROR_CHARS else text[: MAX_ERROR_CHARS - 1] + "…"
