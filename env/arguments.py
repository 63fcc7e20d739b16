"""What each tool takes: checked models, and the JSON schemas that teach the model.

A model writes arguments as best it can, so what has one plain meaning is accepted (`"3"` and `3.0` for 3, `"false"`
for false, a number where text is due) and everything else is refused in one line that names the argument, what was
expected and what came. Unknown arguments are refused: a misspelt one would else be dropped without a word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from statelm_jax.env.context import format_runs
from statelm_jax.env.search import split_keywords
from statelm_jax.errors import ToolError
from statelm_jax.memory.notes import UpdateMode

_MAX_INTEGER = 10**15
_SHOWN_CHARS = 40
_INTEGER = re.compile(r"[+-]?[0-9]{1,16}(\.0*)?")
_RANGE = re.compile(r"\s*([0-9]{1,16})\s*(?:-\s*([0-9]{1,16})\s*)?")
_SURROGATE = re.compile("[\ud800-\udfff]")


def clean_text(text: str) -> str:
    """`text` with lone surrogates, which JSON can spell but no file can hold, as replacement characters."""
    return _SURROGATE.sub("\ufffd", text)


def shown(value: Any) -> str:
    """What came, for an error line: short whatever it is, and without double quotes, which JSON would escape."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return repr(clean_text(value[:_SHOWN_CHARS])) + ("…" * (len(value) > _SHOWN_CHARS))
    if isinstance(value, int):
        return str(value) if abs(value) < _MAX_INTEGER else "a huge number"
    if isinstance(value, float):
        return repr(value)
    return "a list" if isinstance(value, list | tuple) else "an object"


def _to_integer(value: Any) -> int:
    if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        value = float(value) if "." in value else int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"expected an integer, got {shown(value)}")
    if abs(value) > _MAX_INTEGER:
        raise ValueError("expected an integer of a sensible size")
    return value


def _to_flag(value: Any) -> bool:
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, got {shown(value)}")
    return value


def _to_text(value: Any) -> str:
    if value is None or isinstance(value, list | tuple | Mapping):
        raise ValueError(f"expected text, got {shown(value)}")
    return _json_text(value)


def _json_text(value: Any) -> str:
    """One rule for everything that becomes text: a string is itself, any other value its compact JSON."""
    if isinstance(value, str):
        return clean_text(value)
    try:
        return clean_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
    except (RecursionError, TypeError, ValueError):
        raise ValueError("expected text or a simple object; this is nested too deeply or no JSON") from None


def _to_content(value: Any) -> str:
    """Text; an object also when it comes as a string of JSON, so that both spellings store the same."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            decoded = json.loads(value, strict=False)
        except (RecursionError, ValueError):
            return clean_text(value)
        return _json_text(decoded)
    return _json_text(value)


def _to_answer(value: Any) -> str:
    if value is None or (isinstance(value, str) and not value.strip()):
        raise ValueError("expected the answer; to say that the document does not hold it, answer 'not found'")
    return _json_text(value)


def _to_keywords(value: Any) -> tuple[str, ...]:
    parts = [_to_text(part) for part in value] if isinstance(value, list | tuple) else _to_text(value)
    keywords = split_keywords(parts)
    if not keywords:
        raise ValueError("the keyword is empty; give words or phrases, separated by commas")
    return keywords


def _to_ranges(value: Any) -> tuple[tuple[int, int], ...]:
    """An id, a range, or a list of both -> (first, last) pairs in the order given."""
    if isinstance(value, str):
        parts: list[Any] = value.split(",")
    elif isinstance(value, list | tuple):
        parts = list(value)
    else:
        parts = [value]
    if not parts:
        raise ValueError("the list of ids is empty")
    return tuple(_to_range(part) for part in parts)


def _to_range(value: Any) -> tuple[int, int]:
    if isinstance(value, str):
        match = _RANGE.fullmatch(value)
        if not match:
            raise ValueError(f"expected an id, a list of ids or a range like 3-8, got {shown(value)}")
        first, last = int(match[1]), int(match[2] or match[1])
    else:
        first = last = _to_integer(value)
    if first > last:
        raise ValueError(f"the range {first}-{last} is empty; the smaller id comes first")
    return first, last


def _format_ranges(ranges: tuple[tuple[int, int], ...] | None) -> str | None:
    return None if ranges is None else format_runs(ranges)


Integer = Annotated[int, BeforeValidator(_to_integer)]
Flag = Annotated[bool, BeforeValidator(_to_flag)]
Text = Annotated[str, BeforeValidator(_to_text)]
Content = Annotated[str, BeforeValidator(_to_content), WithJsonSchema({"type": ["string", "object"]})]
Answer = Annotated[str, BeforeValidator(_to_answer), WithJsonSchema({"type": "string"})]
Keywords = Annotated[tuple[str, ...], BeforeValidator(_to_keywords), WithJsonSchema({"type": "string"})]
Ranges = Annotated[
    tuple[tuple[int, int], ...],
    BeforeValidator(_to_ranges),
    PlainSerializer(_format_ranges),
    WithJsonSchema(
        {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}, {"type": "string"}]}
    ),
]


class Arguments(BaseModel):
    """Base of all argument models: immutable, unknown arguments are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class NoArguments(Arguments):
    """For tools that take none."""


class BuildIndexArguments(Arguments):
    """`buildIndex`; sizes that are not given come from the run's configuration."""

    chunk_size: Integer | None = Field(default=None, description="Tokens per chunk.")
    overlap: Integer | None = Field(default=None, description="Tokens that neighbouring chunks share.")


class ReadChunkArguments(Arguments):
    """`readChunk`."""

    chunk_id: Integer | None = Field(default=None, description="Which chunk to read. Not needed while scanning.")
    enable_scan: Flag | None = Field(
        default=None,
        description="true: from now on each call reads the next chunk in order. false: back to reading by chunk_id.",
    )


class SearchEngineArguments(Arguments):
    """`searchEngine`."""

    keyword: Keywords = Field(
        description="Words or short phrases to look for, separated by commas. A chunk is found when it holds any of "
        "them; the words of a phrase must stand close together.",
    )


class NoteArguments(Arguments):
    """`note`."""

    key: Text = Field(description="A new, short name for the note.")
    summary: Text = Field(description="One line that you will see in every listing of the notes.")
    content: Content | None = Field(default=None, description="More detail, shown only by readNote.")


class ReadNoteArguments(Arguments):
    """`readNote`."""

    key: Text = Field(description="The name of the note.")


class UpdateNoteArguments(Arguments):
    """`updateNote`."""

    key: Text = Field(description="The name of the note.")
    mode: UpdateMode = Field(
        description="append: put new_content below the old content. overwrite: replace it. delete: remove the note."
    )
    new_content: Content | None = Field(default=None, description="The content to append or to put in its place.")
    new_summary: Text | None = Field(default=None, description="Replaces the summary line.")


class DeleteContextArguments(Arguments):
    """`deleteContext`: some ids, or a range that may be open at one end."""

    msg_id: Ranges | None = Field(default=None, description='One id, a list of ids, or a range such as "3-8".')
    first_id: Integer | None = Field(default=None, description="Delete from this id on.")
    last_id: Integer | None = Field(default=None, description="Delete up to this id, including it.")

    @model_validator(mode="after")
    def _one_way(self) -> DeleteContextArguments:
        ranged = self.first_id is not None or self.last_id is not None
        if (self.msg_id is None) != ranged:
            raise ValueError("give either msg_id, or first_id and/or last_id")
        return self


class FinishArguments(Arguments):
    """`finish`."""

    key: Text | None = Field(default=None, description="What the answer belongs to, such as the note that gave it.")
    answer: Answer = Field(description='The answer alone, without explanation. "not found" if there is none.')


A = TypeVar("A", bound=Arguments)


def check_arguments(tool: str, model: type[A], arguments: Mapping[str, Any]) -> A:
    """`arguments` as a checked record. `ToolError` names the first thing that is wrong and what was expected."""
    try:
        return model.model_validate(dict(arguments))
    except ValidationError as error:
        raise ToolError(_describe(tool, model, error)) from None


def _describe(tool: str, model: type[Arguments], error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    name = str(first["loc"][0])[:_SHOWN_CHARS] if first["loc"] else ""
    takes = ", ".join(model.model_fields) or "no arguments"
    if first["type"] == "extra_forbidden":
        return f"{tool} has no argument {shown(name)}; it takes {takes}"
    if first["type"] == "missing":
        return f"{tool} needs the argument {name!r}; it takes {takes}"
    if first["type"] == "enum":
        modes = ", ".join(mode.value for mode in UpdateMode)
        return f"{tool}: argument {name!r}: expected one of {modes}, got {shown(first['input'])}"
    where = f"argument {name!r}: " if name else ""
    return f"{tool}: {where}{first['msg'].removeprefix('Value error, ')}"


def parameters_schema(model: type[Arguments], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a tool's arguments, reduced to what a reader needs.

    `defaults` are this run's values for arguments that may be left out.
    """
    schema = model.model_json_schema()
    definitions = schema.get("$defs", {})
    properties = {}
    for name, entry in schema.get("properties", {}).items():
        properties[name] = _reduced(entry, definitions)
        if name in defaults:
            properties[name]["default"] = defaults[name]
    return {"type": "object", "properties": properties, "required": schema.get("required", [])}


def _reduced(entry: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """One property: optional ones lose their null branch (they may be left out), references their detour."""
    description = {"description": entry["description"]} if "description" in entry else {}
    branches = [branch for branch in entry.get("anyOf", [entry]) if branch.get("type") != "null"]
    kind: dict[str, Any] = branches[0] if len(branches) == 1 else {"anyOf": branches}
    if "$ref" in kind:
        kind = definitions[kind["$ref"].rsplit("/", 1)[-1]]
    kept = {key: kind[key] for key in ("type", "enum", "items", "anyOf") if key in kind}
    return {**kept, **description}
