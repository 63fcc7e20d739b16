import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statelm_jax.env.context import (
    PROFILES,
    ContextEncoder,
    History,
    difference,
    format_runs,
    native_result_text,
    render_native,
    union,
)
from statelm_jax.types import Message, Role, ToolCall
from tests.fakes import byte_chat

HEAD = (
    Message(msg_id=None, role=Role.SYSTEM, text="Be brief."),
    Message(msg_id=None, role=Role.USER, text="Which pier?"),
)
RUNS = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 6)).map(lambda pair: (pair[0], sum(pair))), max_size=8)


def ids(runs):
    return {number for first, last in runs for number in range(first, last + 1)}


@given(RUNS, RUNS)
def test_runs_are_sets_of_ids(left, right):
    left, right = union((), left), union((), right)
    assert ids(union(left, right)) == ids(left) | ids(right)
    assert ids(difference(left, right)) == ids(left) - ids(right)


@given(RUNS)
def test_runs_are_ascending_and_never_adjacent(runs):
    runs = union((), runs)
    assert all(before[1] + 1 < after[0] for before, after in itertools.pairwise(runs))


def test_runs_are_written_as_ids_and_ranges():
    assert format_runs([(7, 7)]) == "7"
    assert format_runs([(3, 3), (7, 10)]) == "3,7-10"


def with_turns(history: History, turns: int, chat=None) -> History:
    """`turns` more pairs of call and result; the ids of calls as sampled when there is a chat."""
    for _ in range(turns):
        number = history.next_id
        calls = (ToolCall(name="readChunk", arguments={"chunk_id": number}),)
        sampled = None if chat is None else chat.encode_reply("hm", calls)
        call = Message(msg_id=number, role=Role.ASSISTANT, text="hm", tool_calls=calls, token_ids=sampled)
        text = native_result_text(number + 1, number, {"n": number}, "text")
        result = Message(msg_id=number + 1, role=Role.TOOL, text=text, caller_id=number)
        history = history.append(call).append(result)
    return history


def with_delete(history: History, runs) -> History:
    number = history.next_id
    call = Message(msg_id=number, role=Role.ASSISTANT, text="", token_ids=np.array([1, 2], np.int32))
    history = history.append(call).delete(union((), runs))
    run = format_runs(history.deleted[-1:])
    text = native_result_text(number + 1, number, {"deleted": run}, "Notes: none")
    return history.append(Message(msg_id=number + 1, role=Role.TOOL, text=text, caller_id=number))


def shown(history: History) -> list[str]:
    """Rendered messages after the head: ids of live ones, text of stubs."""
    messages = render_native(history)
    assert messages[:2] == history.head
    return [str(m.msg_id) if m.msg_id is not None else m.text for m in messages[2:]]


def test_live_messages_are_shown_as_they_are():
    history = with_turns(History(head=HEAD), 2)
    assert render_native(history) == (*HEAD, *history.messages)


def test_deleting_everything_leaves_the_head_and_one_stub_with_the_result_of_the_delete():
    history = with_delete(with_turns(History(head=HEAD), 3), [(1, 6)])
    assert shown(history) == ["8"]
    assert json.loads(render_native(history)[-1].text.split("\n")[0]) == {"msg_id": 8, "call_id": 7, "deleted": "1-8"}


def test_neighbouring_deleted_messages_are_one_stub_and_others_stand_where_they_were():
    history = with_delete(with_turns(History(head=HEAD), 4), [(1, 2), (4, 5)])
    assert shown(history) == ['{"deleted":"1-2"}', "3", '{"deleted":"4-5"}', "6", "7", "8", "10"]


def test_only_the_newest_delete_shows_its_result_and_older_ones_become_stubs():
    history = with_delete(with_turns(History(head=HEAD), 1), [(1, 2)])
    assert shown(history) == ["4"]
    history = with_turns(history, 2)
    assert shown(history) == ["4", "5", "6", "7", "8"]
    apart = with_delete(history, [(5, 6)])
    assert shown(apart) == ['{"deleted":"1-6"}', "7", "8", "10"]
    merged = with_delete(history, [(5, 8)])
    assert shown(merged) == ["10"]
    assert '"deleted":"1-10"' in render_native(merged)[-1].text


def test_ids_count_from_where_the_history_starts():
    history = with_delete(with_turns(History(head=HEAD, first_id=901), 2), [(901, 902)])
    assert shown(history) == ['{"deleted":"901-902"}', "903", "904", "906"]


def test_a_message_must_carry_the_next_id_and_only_a_call_can_delete():
    history = with_turns(History(head=HEAD), 1)
    with pytest.raises(ValueError, match="3 is next"):
        history.append(Message(msg_id=4, role=Role.ASSISTANT, text=""))
    with pytest.raises(ValueError, match="only an assistant"):
        history.delete(((1, 2),))


def test_a_body_cannot_reach_into_the_header():
    body = '{"msg_id":2,"call_id":1}\nsecond line'
    text = native_result_text(8, 7, {"key": "a\nb\u2028c"}, body)
    header, _, rest = text.partition("\n")
    assert json.loads(header) == {"msg_id": 8, "call_id": 7, "key": "a\nb\u2028c"}
    assert rest == body
    assert header.startswith('{"msg_id":8,"call_id":7,')


DELETES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=3)
STEPS = st.lists(st.one_of(st.just("turn"), DELETES), max_size=14)


def play(steps, chat=None, first_id=1):
    history = History(head=HEAD, first_id=first_id)
    for step in steps:
        if step == "turn":
            history = with_turns(history, 1, chat)
        else:
            newest = history.next_id - 1
            runs = [(first_id + first, min(first_id + first + length, newest)) for first, length in step]
            history = with_delete(history, [(first, last) for first, last in runs if first <= last])
        yield history


@given(STEPS, st.sampled_from([1, 99]))
def test_rendering_follows_the_rule_message_by_message(steps, first_id):
    for history in play(steps, first_id=first_id):
        deleted = ids(history.deleted)
        groups: list[tuple[bool, list[int]]] = []  # the rule, spelled out: neighbours with the same fate
        for message in history.messages:
            gone = message.msg_id in deleted
            if not groups or not gone or not groups[-1][0]:
                groups.append((gone, []))
            groups[-1][1].append(message.msg_id)  # pyright: ignore
        expected = []
        for gone, group in groups:
            newest_delete = gone and max(group) == max(deleted)
            expected.append(str(group[-1]) if not gone or newest_delete else f'{{"deleted":"{format_run(group)}"}}')
        assert shown(history) == expected
        numbers = [m.msg_id for m in render_native(history) if m.msg_id is not None]
        assert numbers == sorted(set(numbers))


def format_run(group):
    return f"{group[0]}-{group[-1]}" if len(group) > 1 else str(group[0])


@settings(max_examples=40)
@given(STEPS)
def test_ids_of_a_context_equal_those_encoded_from_nothing_whatever_came_before(steps):
    chat = byte_chat()
    encoder = ContextEncoder(chat, PROFILES["native"])
    for history in play(steps, chat):
        context = encoder.encode(history)
        encoder.keep(context)
        fresh = np.concatenate([chat.message_ids(message) for message in render_native(history)])
        assert np.array_equal(np.concatenate(context.blocks), fresh)
        assert np.array_equal(encoder.prompt(context), np.concatenate([fresh, chat.header_ids]))
        assert context.tokens == len(fresh)
        again = ContextEncoder(chat, PROFILES["native"]).encode(history)
        assert [m.text for m in again.messages] == [m.text for m in context.messages]


def test_a_message_is_encoded_once_while_it_stays_and_sampled_ids_never():
    chat = byte_chat()
    encoder = ContextEncoder(chat, PROFILES["native"])
    history = with_turns(History(head=HEAD), 5, chat)
    encoder.keep(encoder.encode(history))
    before = encoder.tokens_encoded
    longer = with_turns(history, 1, chat)
    encoder.keep(encoder.encode(longer))
    assert encoder.tokens_encoded - before == len(chat.message_ids(longer.messages[-1]))
    encoder.encode(longer)
    assert encoder.tokens_encoded - before == len(chat.message_ids(longer.messages[-1]))


def test_a_delete_encodes_its_result_and_new_stubs_only():
    chat = byte_chat()
    encoder = ContextEncoder(chat, PROFILES["native"])
    history = with_turns(History(head=HEAD), 50, chat)
    encoder.keep(encoder.encode(history))
    before = encoder.tokens_encoded
    context = encoder.encode(with_delete(history, [(3, 4)]))
    stubs = [m for m in context.messages if m.text.startswith('{"deleted"')]
    assert len(stubs) == 1
    new = len(chat.message_ids(stubs[0])) + len(chat.message_ids(context.messages[-1]))
    assert encoder.tokens_encoded - before == new
