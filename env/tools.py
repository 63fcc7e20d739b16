"""The tools: one function each, one table, and the schemas that the model is shown.

A tool is a pure function from (what may be looked at, workspace, checked arguments) to (new workspace, result). The
environment keeps the new workspace only when the result fits into the context, so a tool that is refused has done
nothing: the scan has not moved on, no note was written, the old index still stands. What a tool cannot do it says
with a `ToolError`, in words that the model can act on.

Calls are dispatched through the table of this run's tools and nothing else (`find_tool`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from statelm_jax.chat import resolve_tool_name
from statelm_jax.config import EnvConfig
from statelm_jax.env import arguments as args
from statelm_jax.env.context import History, Runs, difference, format_runs, union
from statelm_jax.env.index import Document, Hit
from statelm_jax.env.workspace import ChunkTable, ToolResult, Turn, Workspace
from statelm_jax.errors import ToolError
from statelm_jax.memory.notes import Notes

_SHOWN_RUNS = 8
"""Runs of ids spelled out in a delete result at most; it must stay small however scattered the ids are."""


def analyze_text(turn: Turn, state: Workspace, given: args.NoArguments) -> tuple[Workspace, ToolResult]:
    """The document's length."""
    return state, ToolResult(fields={"total_tokens": state.document.total_tokens})


def load_document(turn: Turn, state: Workspace, given: args.NoArguments) -> tuple[Workspace, ToolResult]:
    """The whole document."""
    document = _document(state)
    fields = {"total_tokens": document.total_tokens}
    return state, ToolResult(fields=fields, body=document.text, body_tokens=document.total_tokens)


def build_index(turn: Turn, state: Workspace, given: args.BuildIndexArguments) -> tuple[Workspace, ToolResult]:
    """Cut the document into chunks. A new index starts with nothing read and no scan; a refused one changes nothing."""
    document = _document(state)
    size = turn.config.chunk_tokens if given.chunk_size is None else given.chunk_size
    default_overlap = max(0, min(turn.config.chunk_overlap, size - 1))
    overlap = default_overlap if given.overlap is None else given.overlap
    chunks = turn.store.chunks(document, size, overlap, turn.config.chunk_border)
    table = ChunkTable(chunks=chunks, chunk_size=size, overlap=overlap)
    first = turn.first_chunk_id
    fields = {"total_chunks": len(chunks), "first_chunk_id": first, "last_chunk_id": first + len(chunks) - 1}
    return replace(state, table=table, cursor=-1, scanning=False), ToolResult(fields=fields)


def read_chunk(turn: Turn, state: Workspace, given: args.ReadChunkArguments) -> tuple[Workspace, ToolResult]:
    """One chunk: the next after the one read last while scanning, else the one that is named."""
    chunks = _table(state).chunks
    scanning = state.scanning if given.enable_scan is None else given.enable_scan
    position = _next_position(state, len(chunks)) if scanning else _named_position(turn, given, len(chunks))
    chunk, chunk_id = chunks[position], turn.first_chunk_id + position
    fields = {
        "chunk_id": chunk_id,
        "reading_progress": f"{position + 1}/{len(chunks)}",
        "more": position + 1 < len(chunks),
    }
    if given.chunk_id not in (None, chunk_id):
        fields["warning"] = "scanning, so chunk_id was not used; enable_scan false reads by chunk_id"
    result = ToolResult(fields=fields, body=chunk.text, body_tokens=chunk.end - chunk.start)
    return replace(state, cursor=position, scanning=scanning), result


def search_engine(turn: Turn, state: Workspace, given: args.SearchEngineArguments) -> tuple[Workspace, ToolResult]:
    """The chunks that match best, with highlights."""
    table = _table(state)
    index = turn.store.index(state.document, table.chunk_size, table.overlap, turn.config.chunk_border)
    hits, total = index.search(given.keyword, turn.config.max_hits, turn.config.max_highlights)
    fields = {"chunk_ids": [turn.first_chunk_id + hit.chunk_id for hit in hits], "total": total}
    if not hits:
        return state, ToolResult(fields={**fields, "message": "no chunk matches; try other or fewer words"})
    return state, ToolResult(fields=fields, body="\n".join(_hit_lines(turn.first_chunk_id, hits)))


def note(turn: Turn, state: Workspace, given: args.NoteArguments) -> tuple[Workspace, ToolResult]:
    """Write a new note."""
    notes = state.notes.note(given.key, given.summary, given.content or "")
    return replace(state, notes=notes), _listing({}, notes, turn.notes_tokens)


def read_note(turn: Turn, state: Workspace, given: args.ReadNoteArguments) -> tuple[Workspace, ToolResult]:
    """One note in full."""
    found = state.notes.read(given.key)
    return state, ToolResult(fields={"key": found.key, "summary": found.summary}, body=found.content or None)


def update_note(turn: Turn, state: Workspace, given: args.UpdateNoteArguments) -> tuple[Workspace, ToolResult]:
    """Change or remove a note."""
    notes = state.notes.update(given.key, given.mode, given.new_content, given.new_summary)
    grows = len(notes.listing()) > len(state.notes.listing())  # a memory over its limit may always shrink
    return replace(state, notes=notes), _listing({}, notes, turn.notes_tokens if grows else None)


def delete_context(turn: Turn, state: Workspace, given: args.DeleteContextArguments) -> tuple[Workspace, ToolResult]:
    """Delete messages, and this turn with them.

    `freed_tokens` is what the newly deleted messages took in the context. `deleted` names them together with the run
    of deleted messages that this result stands for. Ids that were deleted before are flagged, not refused.
    """
    history = state.history
    ranges = _named_ranges(history, given)
    fresh = difference(union((), ranges), history.deleted)
    freed = sum(turn.message_tokens(message) for run in fresh for message in history.span(*run))
    history = history.delete(fresh)
    shown = union(fresh, history.deleted[-1:])
    fields: dict[str, Any] = {
        "deleted": format_runs(shown if len(shown) <= _SHOWN_RUNS else history.deleted[-1:]),
        "freed_tokens": freed,
    }
    repeated = [named for named in ranges if not difference((named,), state.history.deleted)]
    if not fresh:
        fields["no_op"] = True
    elif repeated:
        fields["already_deleted"] = format_runs(repeated[:_SHOWN_RUNS])
    return replace(state, history=history), _listing(fields, state.notes, None)


def check_budget(turn: Turn, state: Workspace, given: args.NoArguments) -> tuple[Workspace, ToolResult]:
    """The budget, exactly as it was enforced for this turn's result.

    `context_tokens` is the next prompt without this result, `tokens_left` what a result that brings text in may take.
    """
    budget = turn.budget
    fields = {
        "context_window": budget.window,
        "context_tokens": budget.used,
        "reserve_tokens": budget.reserve,
        "tokens_left": budget.tokens_left,
        "turns_left": turn.turns_left,
    }
    return state, ToolResult(fields=fields)


def finish(turn: Turn, state: Workspace, given: args.FinishArguments) -> tuple[Workspace, ToolResult]:
    """End the episode with an answer."""
    return replace(state, answer=given.answer), ToolResult(fields={"finished": True})


def _document(state: Workspace) -> Document:
    if not state.document.total_tokens:
        raise ToolError("the document is empty; there is nothing to read, so finish with 'not found'")
    return state.document


def _table(state: Workspace) -> ChunkTable:
    if state.table is None:
        raise ToolError("there are no chunks yet: call buildIndex first")
    return state.table


def _next_position(state: Workspace, total: int) -> int:
    if state.cursor + 1 >= total:
        raise ToolError(
            f"the scan is at its end ({total}/{total}); to read a chunk again, give its chunk_id and enable_scan false"
        )
    return state.cursor + 1


def _named_position(turn: Turn, given: args.ReadChunkArguments, total: int) -> int:
    if given.chunk_id is None:
        raise ToolError("give a chunk_id, or enable_scan true to read one chunk after another")
    position = given.chunk_id - turn.first_chunk_id
    if not 0 <= position < total:
        valid = f"{turn.first_chunk_id} to {turn.first_chunk_id + total - 1}"
        raise ToolError(f"there is no chunk {given.chunk_id}; chunk ids go from {valid}")
    return position


def _hit_lines(first_chunk_id: int, hits: Sequence[Hit]) -> list[str]:
    lines = []
    for hit in hits:
        lines.append(f"chunk {first_chunk_id + hit.chunk_id}, score {hit.score:.3f}:")
        lines += [f"- {' '.join(highlight.split())}" for highlight in hit.highlights]
    return lines


def _listing(fields: Mapping[str, Any], notes: Notes, max_tokens: int | None) -> ToolResult:
    return ToolResult(fields=fields, body=notes.listing(), max_tokens=max_tokens)


def _named_ranges(history: History, given: args.DeleteContextArguments) -> Runs:
    """The ranges that a call names, as it names them. `ToolError` unless each lies within the ids before the call."""
    first, newest = history.first_id, history.next_id - 2
    if newest < first:
        raise ToolError("there is nothing to delete yet; only messages with an id can be deleted")
    open_range = (
        first if given.first_id is None else given.first_id,
        newest if given.last_id is None else given.last_id,
    )
    ranges = (open_range,) if given.msg_id is None else given.msg_id
    for start, end in ranges:
        for named in (start, end):
            if not first <= named <= newest:
                raise ToolError(f"there is no message {named}; ids from {first} to {newest} can be deleted")
        if start > end:
            raise ToolError(f"the range from {start} to {end} is empty; first_id must not be above last_id")
    return ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One row of the table.

    Attributes:
      description: What the model is told.
      arguments: What it takes.
      run: What it does.
      brings_text: Whether its results bring text in, of whatever size; they must leave the reserve free, all others
        only room for a reply.
      hint: What the model can do when a result does not fit.
    """

    description: str
    arguments: type[args.Arguments]
    run: Callable[[Turn, Workspace, Any], tuple[Workspace, ToolResult]]
    brings_text: bool = False
    hint: str = "delete messages that you no longer need, then try again"


TOOLS: Mapping[str, Tool] = {
    "analyzeText": Tool(
        description="Tells how long the document is, in tokens. A good first step.",
        arguments=args.NoArguments,
        run=analyze_text,
    ),
    "loadDocument": Tool(
        description="Shows the whole document at once. Only for a document that fits into tokens_left.",
        arguments=args.NoArguments,
        run=load_document,
        brings_text=True,
        hint="read it in parts: buildIndex, then readChunk",
    ),
    "buildIndex": Tool(
        description="Cuts the document into chunks, for readChunk and searchEngine. Calling it again cuts anew and "
        "starts reading from the beginning.",
        arguments=args.BuildIndexArguments,
        run=build_index,
    ),
    "readChunk": Tool(
        description="Shows one chunk of the document: the one with chunk_id or, while scanning, the next one in order. "
        'The result says how far you are, and with "more" whether chunks follow.',
        arguments=args.ReadChunkArguments,
        run=read_chunk,
        brings_text=True,
        hint="delete messages that you no longer need, or call buildIndex with a smaller chunk_size",
    ),
    "searchEngine": Tool(
        description="Finds the chunks that hold given words and shows excerpts, best chunks first. Needs buildIndex.",
        arguments=args.SearchEngineArguments,
        run=search_engine,
        brings_text=True,
        hint="search for rarer words, or delete messages that you no longer need",
    ),
    "note": Tool(
        description="Writes down a finding under a new key. Notes outlive the deletion of messages; the result lists "
        "all notes.",
        arguments=args.NoteArguments,
        run=note,
    ),
    "readNote": Tool(
        description="Shows one note in full.",
        arguments=args.ReadNoteArguments,
        run=read_note,
        brings_text=True,
    ),
    "updateNote": Tool(
        description="Adds to, replaces or removes an existing note. The result lists all notes.",
        arguments=args.UpdateNoteArguments,
        run=update_note,
    ),
    "deleteContext": Tool(
        description="Removes messages from the context for good, to make room. Every tool result shows its own id "
        "(msg_id) and that of the call before it (call_id); both can be deleted. Name ids with msg_id, or a whole "
        "stretch with first_id and/or last_id. The deleting turn goes too. The result lists all notes.",
        arguments=args.DeleteContextArguments,
        run=delete_context,
    ),
    "checkBudget": Tool(
        description="Tells how many tokens the context takes, how many a tool result may still take (tokens_left), and "
        "how many turns are left.",
        arguments=args.NoArguments,
        run=check_budget,
    ),
    "finish": Tool(
        description="Gives the final answer and ends the task.",
        arguments=args.FinishArguments,
        run=finish,
    ),
}
"""The tools on their wire names."""


def find_tool(written: str, names: Sequence[str]) -> tuple[str, Tool]:
    """(wire name, tool) for a name as the model wrote it; only `names`, the tools of this run, can be found.

    Raises:
      ToolError: No tool, or more than one, is meant; the right names are listed.
    """
    name = resolve_tool_name(written, names)
    if name is None:
        raise ToolError(f"there is no tool {args.shown(written)}; the tools are {', '.join(names)}")
    return name, TOOLS[name]


def tool_schemas(config: EnvConfig) -> list[dict[str, Any]]:
    """The schemas of this run's tools, in the form that chat templates take."""
    defaults = {"chunk_size": config.chunk_tokens, "overlap": config.chunk_overlap}
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": TOOLS[name].description,
                "parameters": args.parameters_schema(TOOLS[name].arguments, defaults),
            },
        }
        for name in config.tools
    ]
