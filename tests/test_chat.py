"""The chat format both ways: the ids are those of the Hugging Face template, and a reply means what it says."""

from __future__ import annotations

import functools
import json
import re
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from statelm_jax.chat import ChatFormat, ParsedReply, render_call, resolve_tool_name
from statelm_jax.config import TOOL_NAMES, ChatConfig
from statelm_jax.errors import UserError
from statelm_jax.tokenizer import CONTROL_TEXTS, TINY_FOLDER, Tokenizer
from statelm_jax.types import ActionStop, Message, Role, TokenIds, ToolCall

QWEN3_FOLDER = Path.home() / ".cache" / "statelm_jax" / "tests" / "qwen3-tokenizer"
needs_qwen3 = pytest.mark.skipif(
    not (QWEN3_FOLDER / "tokenizer.json").is_file(),
    reason="Qwen3's tokenizer is not in the cache: run scripts/fetch_qwen3_tokenizer.py",
)
both_tokenizers = pytest.mark.parametrize("folder", [TINY_FOLDER, pytest.param(QWEN3_FOLDER, marks=needs_qwen3)])

TINY = Tokenizer.load(TINY_FOLDER)
CHAT = ChatFormat(TINY)
CONTROL = TINY.control
SPELLED = re.compile(f"({'|'.join(map(re.escape, CONTROL_TEXTS.values()))})")

SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": 'Öffnet "es" <tool_call> it\'s.',
            "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": []},
        },
    }
    for name in ("readChunk", "note")
]

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8
)
calls = st.builds(
    lambda name, arguments: ToolCall(name=name, arguments=arguments),
    st.sampled_from(TOOL_NAMES),
    st.dictionaries(st.text(), values, max_size=4),
)
thoughts = (st.text() | st.sampled_from(["<tool_call>{}</tool_call>", "<|im_end|>", "</think> then"])).map(str.strip)


@functools.cache
def tokenizer_of(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


def reply_ids(text: str, tokenizer: Tokenizer = TINY) -> TokenIds:
    """Ids of a reply written as text, in which control tokens are spelled out and meant."""
    ids = {spelling: getattr(tokenizer.control, name) for name, spelling in CONTROL_TEXTS.items()}
    parts = [[ids[part]] if part in ids else tokenizer.encode(part) for part in SPELLED.split(text) if part]
    return np.concatenate([np.array(part, np.int32) for part in parts] or [np.zeros(0, np.int32)])


def parse(text: str, stop: ActionStop = ActionStop.STOP) -> ParsedReply:
    return CHAT.parse(reply_ids(text), stop)


def parse_body(body: str) -> ParsedReply:
    return parse(f"<tool_call>\n{body}\n</tool_call><|im_end|>")


def only_call(body: str) -> tuple[str, Any]:
    reply = parse_body(body)
    assert reply.error is None
    (call,) = reply.calls
    return call.name, call.arguments


def message(role: Role, text: str, **rest: Any) -> Message:
    return Message(msg_id=None, role=role, text=text, **rest)


# --- rendering: equal to the Hugging Face template --------------------------------------------------------


@functools.cache
def hugging_face(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own imports warn
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder)


def template_ids(folder: Path, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    return hugging_face(folder).apply_chat_template(messages, tokenize=True, return_dict=False, **options)


def our_ids(chat: ChatFormat, messages: list[Message]) -> list[int]:
    return np.concatenate([chat.message_ids(message) for message in messages]).tolist()


plain = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=30)


@both_tokenizers
@settings(max_examples=25)
@given(prompt=plain, question=plain, thought=plain.map(str.strip), call=calls, result=plain)
@example(
    prompt="Du hilfst.\n", question="\n Wo?", thought="Ich lese.", call=ToolCall(name="a", arguments={}), result=""
)
def test_an_episode_has_the_ids_of_the_template(
    folder: Path, prompt: str, question: str, thought: str, call: ToolCall, result: str
) -> None:
    chat = ChatFormat(tokenizer_of(folder), ChatConfig(thinking_header=False))
    function = {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
    theirs = [
        {"role": "system", "content": prompt},
        {"role": "user", "content": question},
        {"role": "assistant", "content": thought, "tool_calls": [function]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": "", "tool_calls": [function, function]},
        {"role": "tool", "content": result},
    ]
    ours = [
        message(Role.SYSTEM, chat.system_text(prompt, SCHEMAS)),
        message(Role.USER, question),
        message(Role.ASSISTANT, thought, tool_calls=(call,)),
        message(Role.TOOL, result),
        message(Role.ASSISTANT, "", tool_calls=(call, call)),
        message(Role.TOOL, result),
    ]
    expected = template_ids(folder, theirs, tools=SCHEMAS, add_generation_prompt=True)
    # The schemas above spell out <tool_call>; the template lets that become a control token, we do not.
    spelled = our_ids(chat, ours) + chat.header_ids.tolist()
    assert tokenizer_of(folder).decode(spelled) == tokenizer_of(folder).decode(expected)
    start = expected.index(tokenizer_of(folder).control.im_start, 1)
    length = len(expected) - start
    assert spelled[-length:] == expected[start:]


@both_tokenizers
def test_the_system_block_has_the_ids_of_the_template(folder: Path) -> None:
    chat = ChatFormat(tokenizer_of(folder))
    schemas = [json.loads(json.dumps(schema).replace("<tool_call>", "")) for schema in SCHEMAS]
    for prompt in ("", "Read.", "Ends in a newline.\n", "é 🪸"):
        expected = template_ids(folder, [{"role": "system", "content": prompt}], tools=schemas)
        assert our_ids(chat, [message(Role.SYSTEM, chat.system_text(prompt, schemas))]) == expected
        assert chat.tokenizer.control.tool_call in expected
    bare = template_ids(folder, [{"role": "system", "content": "Read."}])
    assert our_ids(chat, [message(Role.SYSTEM, chat.system_text("Read.", []))]) == bare


@both_tokenizers
@settings(max_examples=25)
@given(question=plain, answer=plain.map(str.strip))
def test_the_header_with_an_empty_think_block_is_the_one_of_the_template(
    folder: Path, question: str, answer: str
) -> None:
    chat = ChatFormat(tokenizer_of(folder), ChatConfig(thinking_header=True))
    asked = [{"role": "user", "content": question}]
    ours = [message(Role.USER, question)]
    expected = template_ids(folder, asked, add_generation_prompt=True, enable_thinking=False)
    assert our_ids(chat, ours) + chat.header_ids.tolist() == expected
    answered = template_ids(folder, [*asked, {"role": "assistant", "content": answer}], enable_thinking=False)
    assert our_ids(chat, [*ours, message(Role.ASSISTANT, answer)]) == answered


@needs_qwen3
def test_the_header_of_qwen3_is_the_documented_one() -> None:
    header = ChatFormat(tokenizer_of(QWEN3_FOLDER)).header_ids.tolist()
    assert header == [151644, 77091, 198, 151667, 271, 151668, 271]


def test_a_tokenizer_without_a_template_gets_the_packaged_one(tmp_path: Path) -> None:
    shutil.copy(TINY_FOLDER / "tokenizer.json", tmp_path)
    bare = Tokenizer.load(tmp_path)
    assert bare.chat_template is None
    assert ChatFormat(bare).system_text("Read.", SCHEMAS) == CHAT.system_text("Read.", SCHEMAS)


@pytest.mark.parametrize(
    ("template", "problem"), [("{{ boom() }}", "fails: 'boom' is undefined"), ("hi", "Qwen3's format")]
)
def test_a_template_of_another_kind_is_refused(tmp_path: Path, template: str, problem: str) -> None:
    shutil.copy(TINY_FOLDER / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError, match=problem):
        ChatFormat(Tokenizer.load(tmp_path)).system_text("Read.", SCHEMAS)


def test_the_compact_form_lists_the_names_and_nothing_else() -> None:
    chat = ChatFormat(TINY, ChatConfig(tools_in_prompt="names"))
    assert chat.system_text("Read.", SCHEMAS) == "Read.\nTools: readChunk note"


# --- rendering: what holds whatever the text ---------------------------------------------------------------


@pytest.mark.parametrize("config", [ChatConfig(), ChatConfig(tools_in_prompt="names", thinking_header=False)])
@given(
    pieces=st.lists(st.sampled_from([*CONTROL_TEXTS.values(), "\n", "x"]) | st.text(max_size=9), max_size=6),
    data=st.data(),
)
def test_no_text_adds_a_control_id_to_a_message(config: ChatConfig, pieces: list[str], data: st.DataObject) -> None:
    chat = ChatFormat(TINY, config)
    text = "".join(pieces)
    call = ToolCall(name="note", arguments={"key": text})
    role = data.draw(st.sampled_from(Role))
    shown = chat.system_text(text, SCHEMAS) if role is Role.SYSTEM else text

    def control_ids(text: str, call: ToolCall) -> list[int]:
        block = chat.message_ids(message(role, text, tool_calls=(call,) if role is Role.ASSISTANT else ()))
        return [id_ for id_ in block.tolist() if id_ in TINY.added_ids]

    blank = chat.system_text("", SCHEMAS) if role is Role.SYSTEM else ""
    assert control_ids(shown, call) == control_ids(blank, ToolCall(name="note", arguments={}))


def test_a_sampled_reply_stays_as_it_was_sampled() -> None:
    """Two ids where the encoder would choose one stay two; the end mark is added only where it is missing."""
    sampled = np.concatenate([TINY.encode("lan"), TINY.encode("tern")])
    assert len(TINY.encode("lantern")) < len(sampled)
    block = CHAT.message_ids(message(Role.ASSISTANT, "ignored", token_ids=sampled))
    newline = TINY.encode("\n").tolist()
    assert block.tolist() == [*CHAT.header_ids.tolist(), *sampled.tolist(), CONTROL.im_end, *newline]
    closed = np.append(sampled, np.int32(CONTROL.im_end))
    assert CHAT.message_ids(message(Role.ASSISTANT, "", token_ids=closed)).tolist() == block.tolist()
    assert block.dtype == np.int32


def test_the_next_prompt_begins_with_the_last_one_and_its_reply() -> None:
    head = [message(Role.SYSTEM, "Read."), message(Role.USER, "Which pier?")]
    reply = reply_ids(
        'look\n<tool_call>\n{"name": "searchEngine","arguments": {"keyword":"pier"}}\n</tool_call><|im_end|>'
    )
    first = our_ids(CHAT, head) + CHAT.header_ids.tolist()
    turn = [message(Role.ASSISTANT, "", token_ids=reply), message(Role.TOOL, '{"msg_id":2,"call_id":1}')]
    second = our_ids(CHAT, head + turn) + CHAT.header_ids.tolist()
    assert second[: len(first) + len(reply)] == first + reply.tolist()
    assert TINY.decode(second[len(first) + len(reply) :]).startswith("\n<|im_start|>user\n<tool_response>\n{")


@given(call=calls)
def test_the_compact_call_means_the_same(call: ToolCall) -> None:
    assert json.loads(render_call(call)) == json.loads(render_call(call, compact=True))
    compact = ChatFormat(TINY, ChatConfig(compact_json=True))
    assert compact.render_call(call) == render_call(call, compact=True)
    assert render_call(ToolCall(name="note", arguments={"k": [1, "é"]}), compact=True) == (
        '{"name":"note","arguments":{"k":[1,"é"]}}'
    )


# --- parsing: round trip and robustness --------------------------------------------------------------------


@pytest.mark.parametrize("compact", [False, True])
@given(thought=thoughts, calls=st.lists(calls, min_size=1, max_size=3))
def test_what_is_encoded_is_parsed_again(compact: bool, thought: str, calls: list[ToolCall]) -> None:
    chat = ChatFormat(TINY, ChatConfig(compact_json=compact))
    ids = chat.encode_reply(thought, calls)
    assert ids[-1] == CONTROL.im_end
    reply = chat.parse(ids, ActionStop.STOP)
    assert reply == ParsedReply(thought=thought, calls=tuple(calls), error=None, truncated=False)
    assert [render_call(call) for call in reply.calls] == [render_call(call) for call in calls]


@needs_qwen3
@given(thought=thoughts, call=calls)
def test_what_is_encoded_is_parsed_again_with_qwen3(thought: str, call: ToolCall) -> None:
    """Qwen3's tokenizer puts text into NFC, which encoding twice shows to be all that changes."""
    chat = ChatFormat(tokenizer_of(QWEN3_FOLDER))
    once = chat.parse(chat.encode_reply(thought, [call]), ActionStop.STOP)
    assert once.error is None
    assert chat.parse(chat.encode_reply(once.thought, once.calls), ActionStop.STOP) == once
    if chat.tokenizer.decode(chat.tokenizer.encode(render_call(call))) == render_call(call):
        assert once.calls == (call,)


json_soup = st.text(alphabet="{}[]:,'\"\\ \nname argumts123.", max_size=40)
soup = st.lists(
    st.sampled_from([*CONTROL_TEXTS.values(), '{"name": "note", "arguments": {"key": "a"}}', '{"name": "n"'])
    | json_soup
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=10),
    max_size=12,
)


@given(pieces=soup, stop=st.sampled_from(ActionStop))
def test_parsing_never_raises_and_its_errors_are_short(pieces: list[str], stop: ActionStop) -> None:
    reply = parse("".join(pieces), stop)
    assert reply.error is None or 0 < len(reply.error) <= 300
    assert reply.calls or reply.error
    assert not SPELLED.search(reply.thought)
    for call in reply.calls:
        json.dumps(dict(call.arguments), ensure_ascii=False).encode("utf-8")
    if CONTROL.im_end in reply_ids("".join(pieces)):
        assert not reply.truncated


@given(ids=st.lists(st.integers(0, TINY.vocab_size - 1) | st.sampled_from(sorted(TINY.added_ids)) | st.just(-1)))
def test_any_ids_at_all_can_be_parsed(ids: list[int]) -> None:
    reply = CHAT.parse(np.array(ids, np.int32), ActionStop.LENGTH)
    assert reply.calls or reply.error
    assert len(reply.error or "") <= 300


@pytest.mark.parametrize(
    "unit", ["<tool_call>", "</think>", "<think>", '<tool_call>{"name":"a"}</tool_call>', "{", "x "]
)
def test_a_long_reply_of_garbage_takes_linear_time(unit: str) -> None:
    began = time.process_time()
    parse(unit * (50_000 // len(unit)))
    assert time.process_time() - began < 5


# --- parsing: the marks ------------------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "readChunk", "arguments": {"chunk_id": 2}}\n</tool_call>'


def test_an_answer_holds_no_control_text() -> None:
    reply = parse('<tool_call>{"name":"finish","arguments":{"answer":"dawn"}}</tool_call><|im_end|>')
    assert reply.calls == (ToolCall(name="finish", arguments={"answer": "dawn"}),)
    assert reply.thought == ""


def test_a_call_that_is_spelled_out_is_text() -> None:
    reply = CHAT.parse(TINY.encode(CALL), ActionStop.STOP)
    assert reply.calls == ()
    assert reply.thought == CALL
    assert "no tool call" in (reply.error or "")


def test_text_before_between_and_after_calls_is_the_thought() -> None:
    reply = parse(f"first\n{CALL} then\n\n{CALL}\nlast <|im_end|> never read")
    assert reply.thought == "first\nthen\nlast"
    assert len(reply.calls) == 2


def test_a_call_rehearsed_in_a_think_block_is_not_run() -> None:
    rehearsed = f"<think>I could do {CALL}</think>"
    reply = parse(f"{rehearsed}No.<|im_end|>")
    assert reply.calls == ()
    assert "no tool call" in (reply.error or "")
    assert "readChunk" in reply.thought
    reply = parse(f'{rehearsed}<tool_call>{{"name":"analyzeText"}}</tool_call><|im_end|>')
    assert [call.name for call in reply.calls] == ["analyzeText"]
    reply = parse(f'I could {CALL}</think><tool_call>{{"name":"analyzeText"}}</tool_call><|im_end|>')
    assert [call.name for call in reply.calls] == ["analyzeText"]  # the block had begun with the reply
    reply = parse(f"<think>or <tool_call> or <think> what</think>{CALL}<|im_end|>")
    assert [call.name for call in reply.calls] == ["readChunk"]
    assert reply.thought == "or  or  what"


def test_a_think_block_that_is_never_closed_runs_nothing() -> None:
    reply = parse(f"<think>hm {CALL}<|im_end|>")
    assert reply.calls == ()
    assert "never closed" in (reply.error or "")


def test_a_control_token_inside_a_call_is_a_fault() -> None:
    reply = parse('<tool_call>{"name": "note", "arguments": {"key": "a<|im_start|>b"}}</tool_call><|im_end|>')
    assert reply.calls == ()
    assert "control token" in (reply.error or "")


@pytest.mark.parametrize("stop_id", sorted(TINY.stop_ids))
def test_what_follows_any_stop_token_does_not_count(stop_id: int) -> None:
    ids = np.concatenate([reply_ids(CALL), np.array([stop_id], np.int32), reply_ids(CALL)])
    reply = CHAT.parse(ids, ActionStop.LENGTH)
    assert len(reply.calls) == 1
    assert not reply.truncated


def test_an_unclosed_call_runs_only_when_the_model_stopped_by_itself() -> None:
    unclosed = CALL.removesuffix("</tool_call>")
    assert len(parse(f"{unclosed}<|im_end|>").calls) == 1
    assert len(parse(unclosed).calls) == 1
    cut = parse(unclosed, ActionStop.LENGTH)
    assert cut.calls == ()
    assert cut.truncated
    assert "cut at the token limit" in (cut.error or "")
    half = parse('<tool_call>{"name": "note", "arg<|im_end|>')
    assert half.calls == ()
    assert "</tool_call> is missing" in (half.error or "")


def test_a_cut_reply_keeps_its_whole_call_and_never_the_cut_one() -> None:
    cut = '<tool_call>{"name":"updateNote","arguments":{"key":"log","mode":"overwrite","new_content":{"a":'
    reply = parse(f"{CALL}\n{cut}", ActionStop.LENGTH)
    assert [call.name for call in reply.calls] == ["readChunk"]
    assert reply.truncated
    assert "cut" in (reply.error or "")
    alone = parse(cut, ActionStop.LENGTH)
    assert (alone.calls, alone.truncated) == ((), True)


def test_a_reply_cut_inside_a_character_is_read_and_can_be_logged() -> None:
    coral = TINY.encode("🪸")
    assert len(coral) == 4
    reply = CHAT.parse(coral[:2], ActionStop.LENGTH)
    assert reply.thought == "\ufffd"
    json.dumps(reply.thought, ensure_ascii=False).encode("utf-8")


# --- parsing: bodies ---------------------------------------------------------------------------------------


def test_arguments_as_a_string_of_json_render_as_the_mapping_does() -> None:
    mapping = parse_body('{"name": "readChunk", "arguments": {"chunk_id": 3}}')
    string = parse_body('{"name": "readChunk", "arguments": "{\\"chunk_id\\": 3}"}')
    assert mapping == string
    assert "\\" not in render_call(string.calls[0])


@pytest.mark.parametrize("nested", [{"ship": {"name": "Tern", "crew": {"n": 9}}}, {}, [1, [2, {}]], True, 0, {"a": {}}])
def test_nested_arguments_arrive_whole(nested: Any) -> None:
    body = json.dumps({"name": "note", "arguments": {"key": "k", "content": nested}})
    assert only_call(body) == ("note", {"key": "k", "content": nested})


def test_a_raw_line_break_in_a_string_is_kept() -> None:
    name, arguments = only_call('{"name":"finish","arguments":{"answer":"first\nsecond\tthird"}}')
    assert (name, arguments) == ("finish", {"answer": "first\nsecond\tthird"})


def test_a_backslash_that_is_no_escape_is_text_or_an_error_and_never_dropped() -> None:
    assert only_call(r'{"name":"searchEngine","arguments":{"keyword":"C:\dunes\map \u12"}}') == (
        "searchEngine",
        {"keyword": r"C:\dunes\map \u12"},
    )
    ambiguous = parse_body(r'{"name":"searchEngine","arguments":{"keyword":"C:\dunes\now"}}')
    assert ambiguous.calls == ()
    assert "backslash" in (ambiguous.error or "")


@pytest.mark.parametrize(
    ("body", "name", "arguments"),
    [
        ('{"name":"readChunk","arguments":{"chunk_id":2,}}', "readChunk", {"chunk_id": 2}),
        ('{"name":"readNote","parameters":{"key":"tides"}}', "readNote", {"key": "tides"}),
        ('{{"name":"checkBudget","arguments":{}}}', "checkBudget", {}),
        ('{"name":"note","arguments":{"key":"{{a}}"}}', "note", {"key": "{{a}}"}),
        ("{'name': 'readChunk', 'arguments': {'chunk_id': 2}}", "readChunk", {"chunk_id": 2}),
        ("{'name': 'readNote', 'arguments': {'key': 'captain's log'}}", "readNote", {"key": "captain's log"}),
        ('{"name":"analyzeText"}', "analyzeText", {}),
        ('{"name":"analyzeText","arguments":{}}', "analyzeText", {}),
        ('{"name":"analyzeText","arguments":""}', "analyzeText", {}),
        ('{"id":"call_1","type":"function","name":" note ","arguments":{"key":"a"}}', "note", {"key": "a"}),
    ],
)
def test_a_body_with_one_meaning_is_read(body: str, name: str, arguments: dict[str, Any]) -> None:
    assert only_call(body) == (name, arguments)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"name":"note","arguments":null}', "not null"),
        ('{"name":"note","arguments":[]}', "not a list"),
        ('{"name":"note","arguments":7}', "not a number"),
        ('{"name":"note","arguments":true}', "not true"),
        ('{"name":"note","arguments":"tide"}', "holds none"),
        ('{"name":"note","arguments":"[1]"}', "not a list"),
        ('{"name":"note","arguments":"\\"{}\\""}', "not a string"),
        ('[{"name":"note","arguments":{}}]', "not a list"),
        ('"note"', "not a string"),
        ('{"chunk_id":3}', "'name' is missing"),
        ('{"name":7,"arguments":{}}', "not a number"),
        ('{"name":" ","arguments":{}}', "'name' must be"),
        ('{"name":"readChunk","chunk_id":3}', "unknown key 'chunk_id'"),
        ('{"name":"note","arguments":{"key":"a"},"parameters":{}}', "both"),
        ('{"name":"noteReadnoteRead","arguments":{"key":"a"}{"key":"a"}}', "expected ','"),
        ('{"name":"note","arguments":"{\\"key\\":1}{\\"key\\":1}"}', "after the end"),
        ('{"name":"note","name":"readNote"}', "stands twice"),
        ("readChunk", "expected a JSON value"),
        ("", "expected a JSON value"),
    ],
)
def test_a_body_without_one_meaning_is_an_error_that_says_why(body: str, reason: str) -> None:
    reply = parse_body(body)
    assert reply.calls == ()
    assert reason in (reply.error or "")


@pytest.mark.parametrize("body", ['{"name":"note","arguments":"%s"}', '{"%s":1,"name":"a"}', "%s", '{"name":"a" "%s"}'])
def test_a_huge_payload_is_never_echoed(body: str) -> None:
    reply = parse_body(body % ("kelp" * 20_000))
    assert len(reply.error or "x" * 999) <= 300
    assert (reply.error or "").count("kelp") <= 10


SECOND = '{"name": "readChunk", "arguments": {"chunk_id": 9}}'


@pytest.mark.parametrize("between", ["\n", "\n</tool_call>\n<tool_call>\n", "\n<tool_call>\n"])
def test_several_calls_come_in_order_whether_in_one_tag_or_in_two(between: str) -> None:
    reply = parse_body(f'{{"name": "readChunk", "arguments": {{"chunk_id": 2}}}}{between}{SECOND}')
    assert [call.arguments["chunk_id"] for call in reply.calls] == [2, 9]
    assert reply.error is None


def test_the_longest_error_is_cut() -> None:
    twice = ('"' + "\U000e0001" * 50 + '":1,') * 2
    reply = parse(f"{CALL}<tool_call>" + json.dumps({"name": "note", "arguments": "{" + twice}, ensure_ascii=False))
    assert len(reply.error or "") == 300
    assert (reply.error or "").endswith("…")


def test_a_fault_ends_the_calls_and_is_reported_beside_them() -> None:
    first_bad = parse_body(f'{{"chunk_id": 2}}\n</tool_call><tool_call>\n{SECOND}')
    assert first_bad.calls == ()  # running the second would be a guess
    assert "the tool call" in (first_bad.error or "")
    second_bad = parse_body(f'{SECOND}\n</tool_call><tool_call>{{"chunk_id": 2}}')
    assert len(second_bad.calls) == 1
    assert "call 2 of the reply" in (second_bad.error or "")


# --- names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "written", ["readChunk", "ReadChunk", "readchunk", "functions.readChunk", "read_chunk", "a/b:Read-Chunk"]
)
def test_a_name_that_means_one_tool_is_resolved(written: str) -> None:
    assert resolve_tool_name(written, TOOL_NAMES) == "readChunk"


@pytest.mark.parametrize(
    "written", ["noteReadnoteRead", "readChunk.x", "notenote", "", ".", "__init__", "read", "document"]
)
def test_a_name_that_means_no_tool_stays_unknown(written: str) -> None:
    assert resolve_tool_name(written, TOOL_NAMES) is None


def test_a_tool_that_is_not_allowed_stays_unknown_and_so_does_an_ambiguous_name() -> None:
    assert resolve_tool_name("Read_Chunk", ("note", "finish")) is None
    assert resolve_tool_name("readnote", ("readNote", "read_note")) is None
    assert resolve_tool_name("read_note", ("readNote", "read_note")) == "read_note"


@given(
    name=st.sampled_from(TOOL_NAMES), prefix=st.sampled_from(["", "functions.", "tools:", "mcp/env."]), data=st.data()
)
def test_case_and_separators_never_change_which_tool_is_meant(name: str, prefix: str, data: st.DataObject) -> None:
    written = re.sub("[A-Z]", lambda match: data.draw(st.sampled_from(["", "_", "-"])) + match[0], name)
    written = prefix + data.draw(st.sampled_from([written, written.lower(), written.upper()]))
    assert resolve_tool_name(written, TOOL_NAMES) == name
