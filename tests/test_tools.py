import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statelm_jax.config import TOOL_NAMES, EnvConfig
from statelm_jax.env.arguments import check_arguments
from statelm_jax.env.tools import TOOLS, find_tool, tool_schemas
from statelm_jax.errors import ToolError
from tests.fakes import CONTROL, Episode, byte_chat, reply

WORDS = "The ferry leaves from pier four at dawn. "
SMALL: dict[str, Any] = {"context_window": 3000, "max_reply_tokens": 400, "min_reply_tokens": 80, "reserve_tokens": 400}


def episode(document: str = WORDS * 30, **config: Any) -> Episode:
    return Episode(document, **{**SMALL, **config})


def header(text: str) -> dict:
    return json.loads(text.partition("\n")[0])


def body(text: str) -> str:
    return text.partition("\n")[2]


# --- the table, schemas and names -------------------------------------------------------------------------


def test_every_tool_of_the_configuration_has_one_row():
    assert tuple(TOOLS) == TOOL_NAMES


def test_schemas_are_listed_for_the_tools_of_the_run_alone_with_its_own_defaults():
    schemas = tool_schemas(EnvConfig(tools=("buildIndex", "finish"), chunk_tokens=72, chunk_overlap=8))
    assert [schema["function"]["name"] for schema in schemas] == ["buildIndex", "finish"]
    sizes = schemas[0]["function"]["parameters"]["properties"]
    assert (sizes["chunk_size"]["default"], sizes["overlap"]["default"]) == (72, 8)


def test_schemas_say_what_the_checks_say():
    for schema in tool_schemas(EnvConfig()):
        function = schema["function"]
        parameters, model = function["parameters"], TOOLS[function["name"]].arguments
        assert list(parameters["properties"]) == list(model.model_fields)
        assert parameters["required"] == [name for name, field in model.model_fields.items() if field.is_required()]
        assert all("description" in entry for entry in parameters["properties"].values())
        assert function["description"]
        assert "null" not in json.dumps(schema)
        assert "$ref" not in json.dumps(schema)


def test_an_example_built_from_each_schema_is_accepted():
    values = {"integer": 3, "boolean": True, "string": "5"}
    for schema in tool_schemas(EnvConfig()):
        name, parameters = schema["function"]["name"], schema["function"]["parameters"]
        example = {}
        for argument, entry in parameters["properties"].items():
            kinds = [branch["type"] for branch in entry.get("anyOf", [entry])]
            kind = kinds[0] if isinstance(kinds[0], str) else kinds[0][0]
            example[argument] = entry["enum"][0] if "enum" in entry else values[kind]
        if name == "deleteContext":
            del example["msg_id"]
        assert check_arguments(name, TOOLS[name].arguments, example)


@pytest.mark.parametrize(
    "written", ["__init__", "document", "clearCurrentDocument", "_get_index", "state_manager", "", "notenote", "run"]
)
def test_only_names_in_the_table_can_be_called_and_others_change_nothing(written):
    run = episode()
    run(written or " ", key="k", summary="s")
    assert run.error
    assert run.env.turns[-1].tool is None
    if written:
        assert header(run.result)["error"].startswith(f"there is no tool {written!r}; the tools are analyzeText, ")
    assert run.env.turns[-1].notes == ()


@pytest.mark.parametrize("written", ["ReadChunk", "readchunk", "functions.readChunk", "read_chunk"])
def test_a_name_in_another_spelling_is_the_one_tool_that_fits(written):
    assert find_tool(written, TOOL_NAMES) == ("readChunk", TOOLS["readChunk"])


def test_a_tool_that_is_not_in_this_run_stays_unknown():
    run = episode(tools=("buildIndex", "readChunk", "finish"))
    run("searchEngine", keyword="ferry")
    assert header(run.result)["error"] == "there is no tool 'searchEngine'; the tools are buildIndex, readChunk, finish"
    assert "searchEngine" not in run.env.observe().messages[0].text


# --- arguments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "given", "checked"),
    [
        ("readChunk", {"chunk_id": "3"}, {"chunk_id": 3}),
        ("readChunk", {"chunk_id": " 3 "}, {"chunk_id": 3}),
        ("readChunk", {"chunk_id": 3.0}, {"chunk_id": 3}),
        ("readChunk", {"chunk_id": "3.0"}, {"chunk_id": 3}),
        ("readChunk", {"chunk_id": None, "enable_scan": "false"}, {"enable_scan": False}),
        ("readChunk", {"enable_scan": "True"}, {"enable_scan": True}),
        ("buildIndex", {"chunk_size": 1e9}, {"chunk_size": 1_000_000_000}),
        ("finish", {"answer": 42}, {"answer": "42"}),
        ("finish", {"answer": 4.5, "key": True}, {"answer": "4.5", "key": "true"}),
        ("finish", {"answer": ["a", "b"]}, {"answer": '["a","b"]'}),
        ("finish", {"answer": {}}, {"answer": "{}"}),
        ("note", {"key": 7, "summary": 8}, {"key": "7", "summary": "8"}),
        ("note", {"key": "k", "summary": "s", "content": {"b": 4}}, {"key": "k", "summary": "s", "content": '{"b":4}'}),
        (
            "note",
            {"key": "k", "summary": "s", "content": '{"b": 4}'},
            {"key": "k", "summary": "s", "content": '{"b":4}'},
        ),
        ("note", {"key": "k", "summary": "s", "content": "{b: 4}"}, {"key": "k", "summary": "s", "content": "{b: 4}"}),
        ("searchEngine", {"keyword": " tide, ,high  water,"}, {"keyword": ["tide", "high water"]}),
        ("searchEngine", {"keyword": ["tide", 7]}, {"keyword": ["tide", "7"]}),
        ("deleteContext", {"msg_id": "7"}, {"msg_id": "7"}),
        ("deleteContext", {"msg_id": [1, "3-5", 9.0]}, {"msg_id": "1,3-5,9"}),
        ("deleteContext", {"msg_id": "3 - 8, 11"}, {"msg_id": "3-8,11"}),
        ("deleteContext", {"first_id": "2", "last_id": 8}, {"first_id": 2, "last_id": 8}),
    ],
)
def test_what_has_one_plain_meaning_is_accepted(tool, given, checked):
    arguments = check_arguments(tool, TOOLS[tool].arguments, given)
    assert arguments.model_dump(mode="json", exclude_none=True) == checked


@pytest.mark.parametrize(
    ("tool", "given", "error"),
    [
        ("readChunk", {"chunk_id": "three"}, "readChunk: argument 'chunk_id': expected an integer, got 'three'"),
        ("readChunk", {"chunk_id": True}, "expected an integer, got true"),
        ("readChunk", {"chunk_id": 2.5}, "expected an integer, got 2.5"),
        ("readChunk", {"chunk_id": float("inf")}, "expected an integer, got inf"),
        ("readChunk", {"chunk_id": [3]}, "expected an integer, got a list"),
        ("readChunk", {"chunk_id": 10**400}, "expected an integer of a sensible size"),
        ("readChunk", {"enable_scan": 1}, "argument 'enable_scan': expected true or false, got 1"),
        ("readChunk", {"chunkId": 1}, "readChunk has no argument 'chunkId'; it takes chunk_id, enable_scan"),
        ("analyzeText", {"x": 1}, "analyzeText has no argument 'x'; it takes no arguments"),
        ("note", {"key": "k"}, "note needs the argument 'summary'; it takes key, summary, content"),
        ("note", {"key": {}, "summary": "s"}, "argument 'key': expected text, got an object"),
        ("note", {"key": None, "summary": "s"}, "argument 'key': expected text, got null"),
        ("updateNote", {"key": "k", "mode": "Append"}, "expected one of append, overwrite, delete, got 'Append'"),
        ("updateNote", {"key": "k", "mode": "replace"}, "expected one of append, overwrite, delete, got 'replace'"),
        ("updateNote", {"key": "k"}, "updateNote needs the argument 'mode'"),
        ("searchEngine", {"keyword": ""}, "keyword is empty"),
        ("searchEngine", {"keyword": " , ,"}, "keyword is empty"),
        ("searchEngine", {"keyword": []}, "keyword is empty"),
        ("searchEngine", {"keyword": [{}]}, "argument 'keyword': expected text, got an object"),
        ("searchEngine", {}, "searchEngine needs the argument 'keyword'"),
        ("deleteContext", {}, "deleteContext: give either msg_id, or first_id and/or last_id"),
        ("deleteContext", {"msg_id": 3, "last_id": 4}, "deleteContext: give either msg_id"),
        ("deleteContext", {"msg_id": []}, "the list of ids is empty"),
        ("deleteContext", {"msg_id": "8-3"}, "the range 8-3 is empty"),
        ("deleteContext", {"msg_id": "all"}, "expected an id, a list of ids or a range like 3-8, got 'all'"),
        ("deleteContext", {"msg_id": [[1]]}, "expected an integer, got a list"),
        ("finish", {}, "finish needs the argument 'answer'"),
        ("finish", {"answer": None}, "answer 'not found'"),
        ("finish", {"answer": "  "}, "answer 'not found'"),
        ("x", {"y" * 5000: "z" * 5000}, "has no argument"),
        ("x", {"chunk_id": "z" * 5000}, "…"),
    ],
)
def test_anything_else_is_refused_in_a_short_line_that_names_the_argument(tool, given, error):
    model = TOOLS[tool if tool in TOOLS else "readChunk"].arguments
    with pytest.raises(ToolError) as caught:
        check_arguments(tool, model, given)
    assert error in str(caught.value)
    assert len(str(caught.value)) <= 300
    assert "\n" not in str(caught.value)


def test_lone_surrogates_and_deep_nesting_do_no_harm():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    for value in ("\ud800", ["\udfff"], {"\ud800": 1}):
        assert check_arguments("finish", TOOLS["finish"].arguments, {"answer": value})
    with pytest.raises(ToolError, match="nested too deeply"):
        check_arguments("finish", TOOLS["finish"].arguments, {"answer": deep})
    note = check_arguments("note", TOOLS["note"].arguments, {"key": "\ud800", "summary": "s", "content": "[" * 100_000})
    assert note.model_dump()["key"] == "\ufffd"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ARGUMENT_NAMES = sorted({name for tool in TOOLS.values() for name in tool.arguments.model_fields})


@given(
    st.sampled_from(TOOL_NAMES),
    st.dictionaries(st.sampled_from(ARGUMENT_NAMES) | st.text(max_size=5), JSON, max_size=4),
)
def test_any_json_is_either_accepted_or_refused_with_a_tool_error(tool, given_arguments):
    try:
        checked = check_arguments(tool, TOOLS[tool].arguments, given_arguments)
    except ToolError as error:
        refusal = str(error)
        checked = None
    else:
        refusal = "-"
    assert 0 < len(refusal) <= 300
    if checked is not None:
        text = json.dumps(checked.model_dump(mode="json", exclude_none=True))
        assert check_arguments(tool, TOOLS[tool].arguments, json.loads(text)) == checked


# --- document, index, reading -----------------------------------------------------------------------------


def test_the_empty_document_gives_clear_errors_and_the_run_can_still_finish():
    run = episode("")
    run("analyzeText")
    assert header(run.result)["total_tokens"] == 0
    for tool in ("loadDocument", "buildIndex"):
        run(tool)
        assert "the document is empty" in header(run.result)["error"]
    run("readChunk", chunk_id=0)
    assert "call buildIndex first" in header(run.result)["error"]
    assert run("finish", answer="not found").terminated


def test_load_document_shows_the_raw_text_or_says_what_it_would_take():
    run = episode('She said "no".\n' * 3)
    run("loadDocument")
    assert body(run.result) == run.task.document
    run = episode(WORDS * 1000)
    run("loadDocument")
    assert f"takes about {len(WORDS) * 1000} tokens" in header(run.result)["error"]
    assert "buildIndex" in header(run.result)["error"]


@pytest.mark.parametrize("tool", ["readChunk", "searchEngine"])
def test_chunks_are_needed_first(tool):
    run = episode()
    run(tool, **({"chunk_id": 0} if tool == "readChunk" else {"keyword": "x"}))  # pyright: ignore
    assert header(run.result)["error"] == "there are no chunks yet: call buildIndex first"


@pytest.mark.parametrize(
    "sizes", [{"chunk_size": 5, "overlap": 5}, {"chunk_size": 0}, {"chunk_size": -1}, {"chunk_size": 9, "overlap": -1}]
)
def test_a_refused_rebuild_keeps_the_old_index_the_cursor_and_the_scan(sizes):
    run = episode()
    run("buildIndex", chunk_size=300)
    run("readChunk", enable_scan=True)
    run("buildIndex", **sizes)
    assert run.error
    run("readChunk")
    assert header(run.result)["reading_progress"] == "2/5"


def test_sizes_may_be_text_or_huge_and_a_short_document_is_one_chunk():
    run = episode("hi")
    for sizes in ({"chunk_size": 1e9}, {"chunk_size": 100, "overlap": 50}, {"chunk_size": "4"}, {}):
        run("buildIndex", **sizes)  # pyright: ignore
        assert header(run.result)["total_chunks"] == 1
        run("readChunk", chunk_id=0)
        assert body(run.result) == "hi"


def test_the_default_overlap_gives_way_to_a_smaller_chunk_size():
    run = episode(chunk_tokens=400, chunk_overlap=100)
    run("buildIndex", chunk_size=50)
    assert not run.error


def test_an_index_tells_its_ids_and_reading_tells_how_far_it_is():
    run = episode()
    run("buildIndex", chunk_size=500)
    assert header(run.result) == {"msg_id": 2, "call_id": 1, "total_chunks": 3, "first_chunk_id": 0, "last_chunk_id": 2}
    run("readChunk", chunk_id=2)
    assert header(run.result) == {
        "msg_id": 4, "call_id": 3, "chunk_id": 2, "reading_progress": "3/3", "more": False
    }  # fmt: skip
    assert run.task.document.endswith(body(run.result))
    run("readChunk", chunk_id=3)
    assert header(run.result)["error"] == "there is no chunk 3; chunk ids go from 0 to 2"


def test_a_scan_reads_every_chunk_once_in_order_and_then_says_so():
    run = episode(max_reply_tokens=150, reserve_tokens=100, chunk_tokens=200)
    run("buildIndex")
    texts, more = [], True
    while more:
        run("readChunk", **({} if texts else {"enable_scan": True}))  # pyright: ignore
        more = header(run.result)["more"]
        texts.append(body(run.result))
        run("deleteContext", last_id=header(run.env.turns[-1].result)["msg_id"])
    assert "".join(texts) == run.task.document
    run("readChunk")
    assert "the scan is at its end" in header(run.result)["error"]
    run("readChunk", chunk_id=0, enable_scan=False)
    assert body(run.result) == texts[0]


def test_a_scan_goes_on_after_the_chunk_read_last_and_a_new_index_starts_over():
    run = episode()
    run("buildIndex", chunk_size=200)
    run("readChunk", chunk_id=3)
    run("readChunk", enable_scan=True)
    assert header(run.result)["chunk_id"] == 4
    run("readChunk", chunk_id=0)
    assert header(run.result)["chunk_id"] == 5
    assert "chunk_id was not used" in header(run.result)["warning"]
    run("deleteContext", first_id=1)
    run("buildIndex", chunk_size=300)
    run("readChunk")
    assert header(run.result)["error"].startswith("give a chunk_id, or enable_scan true")
    run("readChunk", enable_scan=True)
    assert header(run.result)["chunk_id"] == 0


def test_ids_can_start_elsewhere_and_nothing_else_changes():
    run = episode(first_msg_id=101, first_chunk_id=40)
    run("buildIndex", chunk_size=500)
    assert header(run.result) == {
        "msg_id": 102, "call_id": 101, "total_chunks": 3, "first_chunk_id": 40, "last_chunk_id": 42
    }  # fmt: skip
    run("readChunk", chunk_id=41)
    assert header(run.result)["reading_progress"] == "2/3"
    assert body(run.result) == run.task.document[500:1000]
    run("readChunk", chunk_id=1)
    assert header(run.result)["error"] == "there is no chunk 1; chunk ids go from 40 to 42"
    run("deleteContext", last_id=100)
    assert header(run.result)["error"] == "there is no message 100; ids from 101 to 106 can be deleted"
    run("deleteContext", last_id=106)
    assert header(run.result)["deleted"] == "101-106,109-110"


# --- search -----------------------------------------------------------------------------------------------


def test_search_names_the_chunks_and_shows_excerpts_on_one_line_each():
    text = "fog and fog. " * 30 + "The anchor\nis chained. " + "gulls sleep. " * 30
    run = episode(text, first_chunk_id=10)
    run("buildIndex", chunk_size=300)
    run("searchEngine", keyword="anchor")
    assert header(run.result)["chunk_ids"] == [11]
    assert header(run.result)["total"] == 1
    lines = body(run.result).split("\n")
    assert lines[0].startswith("chunk 11, score ")
    assert any("<em>anchor</em> is chained" in line for line in lines[1:])
    assert all(line.startswith("- ") for line in lines[1:])


def test_search_shows_the_configured_number_of_hits_and_says_how_many_there_are():
    run = episode(max_hits=2, max_highlights=1)
    run("buildIndex", chunk_size=5 * len(WORDS))
    run("searchEngine", keyword="ferry")
    assert len(header(run.result)["chunk_ids"]) == 2
    assert header(run.result)["total"] == 6
    assert body(run.result).count("\n- ") == 2


@pytest.mark.parametrize(("keyword", "words"), [("zeppelin", "no chunk matches"), ("?!", "keyword is empty")])
def test_a_search_without_hits_says_so(keyword, words):
    run = episode()
    run("buildIndex", chunk_size=200)
    run("searchEngine", keyword=keyword)
    assert words in run.result


# --- notes ------------------------------------------------------------------------------------------------


def test_notes_come_back_as_a_listing_and_a_key_is_written_once_however_it_is_spelled():
    run = episode()
    run("note", key=7, summary="pier four")
    assert body(run.result) == "Notes:\n- 7: pier four"
    for key in ("7", " 7 "):
        run("note", key=key, summary="other")
        assert "change it with updateNote" in header(run.result)["error"]
    run("updateNote", key="7", mode="append", new_content="at dawn", new_summary="pier 4")
    assert body(run.result) == "Notes:\n- 7: pier 4"
    run("readNote", key=7)
    assert (header(run.result)["summary"], body(run.result)) == ("pier 4", "at dawn")
    run("updateNote", key=7, mode="delete")
    assert body(run.result) == "Notes: none"


def test_the_listing_is_bounded_and_a_refused_note_is_not_there():
    run = episode(context_window=10_000, notes_share=0.03)
    written = 0
    for number in range(20):
        run("note", key=f"k{number}", summary="s" * 30)
        if run.error:
            break
        written += 1
    assert 0 < written < 20
    assert "shorten or remove some with updateNote" in header(run.result)["error"]
    assert len(run.env.turns[-1].notes) == written
    assert len(run.result.encode()) + 20 <= 300
    run("updateNote", key="k0", mode="overwrite", new_summary="s" * 300)
    assert run.error
    run("updateNote", key="k0", mode="overwrite", new_summary="s")
    assert not run.error


# --- deleting ---------------------------------------------------------------------------------------------


def after_turns(turns: int, **config) -> Episode:
    run = episode(**config)
    for _ in range(turns):
        run("analyzeText")
    return run


@pytest.mark.parametrize(
    ("named", "deleted"),
    [
        ({"msg_id": 2}, (2, 9, 10)),
        ({"msg_id": [2, 5]}, (2, 5, 9, 10)),
        ({"msg_id": "3-6"}, (3, 4, 5, 6, 9, 10)),
        ({"last_id": 4}, (1, 2, 3, 4, 9, 10)),
        ({"first_id": 7}, (7, 8, 9, 10)),
        ({"first_id": 3, "last_id": 4}, (3, 4, 9, 10)),
        ({"first_id": 1}, tuple(range(1, 11))),
        ({"msg_id": [5, 2, 5, "1-2"]}, (1, 2, 5, 9, 10)),
    ],
)
def test_ids_lists_and_ranges_delete_what_they_name_and_the_deleting_turn(named, deleted):
    run = after_turns(4)
    run("deleteContext", **named)
    assert run.env.turns[-1].deleted == deleted


@pytest.mark.parametrize(
    ("named", "error"),
    [
        ({"msg_id": 9}, "there is no message 9; ids from 1 to 8 can be deleted"),
        ({"msg_id": [1, 2, 99]}, "there is no message 99"),
        ({"msg_id": 0}, "there is no message 0"),
        ({"msg_id": "2-1000000000000000"}, "there is no message 1000000000000000"),
        ({"first_id": -3}, "there is no message -3"),
        ({"last_id": 12}, "there is no message 12"),
        ({"first_id": 8, "last_id": 3}, "the range from 8 to 3 is empty"),
    ],
)
def test_a_delete_that_names_what_is_not_there_deletes_nothing(named, error):
    run = after_turns(4)
    run("deleteContext", **named)
    assert error in header(run.result)["error"]
    assert run.env.turns[-1].deleted == ()
    assert len(run.shown) == 10


def test_nothing_can_be_deleted_before_the_first_turn():
    run = episode()
    run("deleteContext", first_id=1)
    assert "nothing to delete yet" in header(run.result)["error"]


def test_a_delete_reports_the_tokens_of_the_messages_it_took_out():
    run = after_turns(4)
    chat, messages = run.chat, run.env.observe().messages
    run("deleteContext", msg_id="3-6")
    expected = sum(len(chat.message_ids(message)) for message in messages if message.msg_id in (3, 4, 5, 6))
    assert header(run.result)["freed_tokens"] == expected == run.env.turns[-1].freed_tokens


def test_deleting_again_is_a_flagged_no_op():
    run = after_turns(4)
    run("deleteContext", msg_id="1-2")
    run("deleteContext", msg_id=1)
    assert header(run.result) == {
        "msg_id": 12, "call_id": 11, "deleted": "9-12", "freed_tokens": 0, "no_op": True
    }  # fmt: skip
    assert run.env.turns[-1].deleted == (11, 12)
    run("deleteContext", msg_id=[2, 3, "9-10"])
    assert header(run.result)["already_deleted"] == "2,9-10"
    assert "no_op" not in header(run.result)
    run("deleteContext", last_id=4)  # an open range names whatever is left in it
    assert "already_deleted" not in header(run.result)


def test_a_delete_result_stays_small_however_scattered_the_ids_are():
    run = after_turns(40, context_window=12_000)
    run("deleteContext", msg_id=list(range(2, 81, 2)))
    assert header(run.result)["deleted"] == "80-82"
    assert len(run.result) < 120


def test_a_delete_carries_the_notes():
    run = episode()
    run("note", key="pier", summary="four")
    run("deleteContext", first_id=1)
    assert body(run.result) == "Notes:\n- pier: four"


# --- budget and finish ------------------------------------------------------------------------------------


def test_check_budget_reports_the_numbers_that_add_up():
    run = episode()
    run("checkBudget")
    told = header(run.result)
    assert told["context_window"] == 3000
    assert told["context_tokens"] + told["reserve_tokens"] + told["tokens_left"] == 3000
    assert told["turns_left"] == 9_999
    before = run.env.observe()
    assert len(before.prompt) == told["context_tokens"] + len(run.chat.message_ids(before.messages[-1]))


@pytest.mark.parametrize("extra", [0, 1])
def test_exactly_the_reported_room_is_enforced(extra):
    # Two episodes that differ in their last call alone, of one length: what checkBudget reports for it is the
    # largest result that readChunk may have in its place.
    probe = episode("x" * 3000)
    probe("buildIndex", chunk_size=1000)
    probe("checkBudget")
    overhead = len(byte_chat().message_ids(probe.env.observe().messages[-1])) - len(probe.result)
    left = header(probe.result)["tokens_left"]
    frame = len('{"msg_id":4,"call_id":3,"chunk_id":0,"reading_progress":"1/2","more":true}\n') + overhead
    call_growth = len(reply(byte_chat(), "readChunk", chunk_id=0).token_ids) - len(
        reply(byte_chat(), "checkBudget").token_ids
    )
    run = episode("x" * 3000)
    run("buildIndex", chunk_size=left - frame - call_growth + extra)
    run("readChunk", chunk_id=0)
    assert run.error == bool(extra)
    if extra:
        assert f"takes {left - call_growth + 1} tokens; {left - call_growth} are left" in run.result
    else:
        assert run.env.turns[-1].tokens_left == 0


@pytest.mark.parametrize(
    ("given_answer", "answer"), [("dawn", "dawn"), (42, "42"), (["a", "b"], '["a","b"]'), ({}, "{}")]
)
def test_finish_takes_any_value_as_text(given_answer, answer):
    run = episode()
    result = run("finish", answer=given_answer)
    assert (result.terminated, result.truncated) == (True, False)
    assert run.env.trajectory().answer == answer


def test_null_is_no_answer_and_does_not_end_the_episode():
    run = episode()
    assert run("finish", answer=None).stop is None
    assert "not found" in header(run.result)["error"]
    assert CONTROL.im_end not in run.chat.tokenizer.encode(run.result)
