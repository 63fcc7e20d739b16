import pytest
from hypothesis import given
from hypothesis import strategies as st

from statelm_jax.errors import ToolError
from statelm_jax.memory.notes import (
    MAX_CONTENT_CHARS,
    MAX_KEY_CHARS,
    MAX_SUMMARY_CHARS,
    Note,
    Notebook,
    Notes,
    UpdateMode,
)


def notebook(**notes: str) -> Notebook:
    book = Notebook()
    for key, summary in notes.items():
        book = book.note(key, summary, f"content of {key}")
    return book


def test_a_notebook_is_a_memory():
    memory: Notes = Notebook()  # checked by pyright
    assert memory.listing() == "Notes: none"
    assert memory.items() == ()


def test_listing_shows_one_line_per_note_in_the_order_of_writing():
    book = notebook(tide="high at noon", pier="four")
    assert book.listing() == "Notes:\n- tide: high at noon\n- pier: four"
    assert book.items() == (("tide", "high at noon"), ("pier", "four"))


@pytest.mark.parametrize("key", [" 7 ", "7", "\t7\n"])
def test_keys_that_differ_in_blanks_only_are_one_key(key):
    book = Notebook().note("7", "seven")
    assert book.read(key) == Note(key="7", summary="seven")
    with pytest.raises(ToolError, match="updateNote"):
        book.note(key, "again")


def test_keys_in_composed_and_decomposed_form_are_one_key_and_cases_are_two():
    book = Notebook().note("caf\u00e9", "x").note("CAF\u00c9", "y")
    assert book.read("cafe\u0301").summary == "x"
    assert [key for key, _ in book.items()] == ["caf\u00e9", "CAF\u00c9"]


def test_line_breaks_in_keys_and_summaries_cannot_forge_a_line_of_the_listing():
    book = Notebook().note("a\n- b", "one\n- c: two\u2028- d: three\x85- e: four")
    assert book.listing() == "Notes:\n- a - b: one - c: two - d: three - e: four"
    assert len(book.listing().splitlines()) == 2


def test_append_puts_content_on_a_new_line_and_an_empty_append_changes_nothing():
    book = notebook(log="x").update("log", UpdateMode.OVERWRITE, "ab")
    assert book.update("log", UpdateMode.APPEND, "cd").read("log").content == "ab\ncd"
    assert book.update("log", UpdateMode.APPEND, "") == book
    assert Notebook().note("k", "s").update("k", UpdateMode.APPEND, "first").read("k").content == "first"


def test_overwrite_replaces_what_is_given_and_nothing_else():
    book = notebook(log="old", other="o")
    assert book.update("log", UpdateMode.OVERWRITE, "new").read("log") == Note(key="log", summary="old", content="new")
    assert book.update("log", UpdateMode.OVERWRITE, None, "s").read("log").content == "content of log"
    assert book.update("log", UpdateMode.OVERWRITE, None, "s").items() == (("log", "s"), ("other", "o"))


def test_delete_removes_the_note_and_its_key_is_free_again():
    book = notebook(a="1", b="2").update(" a ", UpdateMode.DELETE)
    assert book.items() == (("b", "2"),)
    assert book.note("a", "3").items() == (("b", "2"), ("a", "3"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda book: book.note("", "s"), "key is empty"),
        (lambda book: book.note(" \n", "s"), "key is empty"),
        (lambda book: book.note("k", " "), "summary is empty"),
        (lambda book: book.note("k" * (MAX_KEY_CHARS + 1), "s"), "81 characters; at most 80"),
        (lambda book: book.note("k", "s" * (MAX_SUMMARY_CHARS + 1)), "at most 400"),
        (lambda book: book.note("k", "s", "c" * (MAX_CONTENT_CHARS + 1)), "at most 40000"),
        (lambda book: book.note("log", "s"), "exists already"),
        (lambda book: book.update("lgo", UpdateMode.APPEND, "x"), "there are 'log'"),
        (lambda book: book.update("log", UpdateMode.APPEND), "new_content, new_summary"),
        (lambda book: book.update("log", UpdateMode.APPEND, "c" * MAX_CONTENT_CHARS), "at most 40000"),
        (lambda book: book.delete("x" * 9000), "no note is called"),
        (lambda book: book.read("lgo"), "no note is called 'lgo'"),
        (lambda book: Notebook().read("log"), "no notes yet"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_short_line_and_changes_nothing(change, words):
    book = notebook(log="x")
    with pytest.raises(ToolError, match=words) as error:
        change(book)
    assert len(str(error.value)) < 300
    assert book == notebook(log="x")


def test_the_error_for_an_unknown_key_stays_short_among_many_notes():
    book = Notebook()
    for number in range(50):
        book = book.note(f"{number} {'k' * 70}", "s")
    with pytest.raises(ToolError) as error:
        book.read("x" * 500)
    assert "the newest are" in str(error.value)
    assert "'49 " in str(error.value)
    assert len(str(error.value)) <= 300


KEYS = st.sampled_from(["a", "b", " a", "b ", "c c", "c  c"])
TEXTS = st.text(alphabet="xy \n", max_size=4)


@given(st.lists(st.tuples(st.booleans(), KEYS, st.sampled_from(UpdateMode), TEXTS, TEXTS), max_size=20))
def test_any_sequence_of_changes_agrees_with_a_plain_dict(steps):
    book, model = Notebook(), {}
    for is_note, key, mode, content, summary in steps:
        name, line = " ".join(key.split()), " ".join(summary.split())
        allowed = (name in model) != is_note and (line or (mode is UpdateMode.DELETE and not is_note))
        try:
            changed = book.note(key, summary, content) if is_note else book.update(key, mode, content, summary)
        except ToolError:
            assert not allowed
            continue
        assert allowed
        book = changed
        if is_note or mode is UpdateMode.OVERWRITE:
            model[name] = (line, content)
        elif mode is UpdateMode.APPEND:
            model[name] = (line, "\n".join(filter(None, [model[name][1], content])))
        else:
            del model[name]
    assert book.items() == tuple((name, line) for name, (line, _) in model.items())
    assert all(book.read(name).content == content for name, (_, content) in model.items())
    assert len(book.listing().split("\n")) == max(1, len(model) + bool(model))
