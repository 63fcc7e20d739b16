"""Trains the tiny byte-level BPE that ships in `statelm_jax/assets/tiny/`.

Run once; its product is committed, and from the same training text it makes the same bytes (a test reruns it).
What goes in:

1. English prose that every Python carries, the language reference in `pydoc_data.topics`, and needle sentences over
   the task generator's word lists, each word so seldom that it is spelled in pieces that many words share: a token
   that only held-out words used would never be trained.
2. The environment's protocol: calls, result headers, notes listings, with numbers and keys varied. Its constant
   stretches, such as `,"call_id":`, and the most frequent words become whole tokens (`ignore_merges` finds them
   without a chain of merges, whose links would be tokens that nothing else uses).

How the pre-tokenizer cuts, and why:

* every digit stands alone, so that a number is copied digit by digit;
* compact JSON stays together with the keys that it encloses, but not with the text or the number that is a value;
* the most frequent words stay whole. Of any other word the first letter, with the blank before it, stands apart:
  ` crimson`, `"crimson` and `Crimson` then share all pieces but the first, so a model that copies a key out of a
  sentence into a call need not learn to spell it anew.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from statelm_jax.config import TOOL_NAMES
from statelm_jax.env import needles

ASSETS = Path(__file__).resolve().parent.parent / "statelm_jax" / "assets"
VOCAB_SIZE = 1_024
WHOLE_WORDS = 128
SENTENCES_PER_WORD = 10
PROTOCOL_ROUNDS = 100
MERGED_LINES = 500
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

CONTROL = (  # (text, special), the flags as in Qwen3
    ("<|endoftext|>", True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
    ("<think>", False),
    ("</think>", False),
)

LINE_WORDS = ("The", "What", "Notes", "Tools")
"""Words that begin lines, so that no blank stands before them."""

STRETCH = re.compile(r'"|\n.|.\n|: ')
"""Tells a stretch of the protocol from the words in it."""

JSON_RUN = (  # a maximal run of compact JSON around its keys
    r'(?:\n(?=\{"))?'
    r'(?:"name":"[A-Za-z]+"|"[A-Za-z_]+":|(?<=:)(?:true|false|null)|[{}\[\],:"])+'
    r"(?:(?<=\})\n)?"
)


def build() -> tuple[str, str]:
    """(tokenizer.json, sha256 of the training text)."""
    texts, protocol = [*prose(), *needle_sentences()], list(protocol_lines())
    split = pre_tokenizers.Split(Regex(split_pattern()), "isolated")
    whole = whole_tokens(split, protocol)
    pieces = sorted(
        piece for text in [*texts, *protocol[:MERGED_LINES]] for piece in _cut(split, text) if piece not in whole
    )
    trained = _train(pieces, VOCAB_SIZE - len(CONTROL) - len(whole))
    trained.pre_tokenizer = pre_tokenizers.Sequence([split, BYTE_LEVEL])
    spec = json.loads(trained.to_str())
    spec["model"]["ignore_merges"] = True
    for piece in whole:
        spelled = _cut(BYTE_LEVEL, piece)[0]
        if spelled in spec["model"]["vocab"]:
            raise ValueError(f"{piece!r} would get two ids: it is a product of merges as well")
        spec["model"]["vocab"][spelled] = len(spec["model"]["vocab"])
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    for text, special in CONTROL:
        token = AddedToken(text, normalized=False, special=special)
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([token])
    return tokenizer.to_str(pretty=True), hashlib.sha256("\0".join([*texts, *protocol]).encode()).hexdigest()


def _train(pieces: list[str], size: int) -> Tokenizer:
    """A BPE of `size` ids, all bytes among them, over pieces that are cut already."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = BYTE_LEVEL
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer


def _cut(pre_tokenizer: pre_tokenizers.PreTokenizer, text: str) -> list[str]:
    return [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]


def whole_tokens(split: pre_tokenizers.PreTokenizer, protocol: list[str]) -> list[str]:
    """Pieces that get a token of their own: stretches that stand in every round of the protocol, and frequent words."""
    counts = collections.Counter(piece for line in protocol for piece in _cut(split, line))
    stretches = sorted(
        piece for piece, count in counts.items() if count >= PROTOCOL_ROUNDS / 4 and STRETCH.search(piece)
    )
    return [*stretches, *LINE_WORDS, *(f" {word}" for word in frequent_words())]


def split_pattern() -> str:
    """The regular expression whose matches are the pre-tokens."""
    whole_words = "|".join([*LINE_WORDS, *frequent_words()])
    return "|".join(
        (
            r"\p{N}",
            r"\n-(?= )|: (?=\p{N})",  # the notes listing
            JSON_RUN,
            r"(?:system|user|assistant)\n",  # the frame of every message
            rf"(?: |(?<!\p{{L}}))(?:{whole_words})(?!\p{{L}})",
            r" \p{L}|(?<!\p{L})\p{L}|\p{L}+",
            r" ?[^\s\p{L}\p{N}]+",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    )


def frequent_words() -> list[str]:
    """Words that stay whole: tools, and frequent ones of the prose and of the tasks, but none of a key or a value."""
    keys = {*needles.ADJECTIVES, *needles.NOUNS, *needles.VALUE_WORDS}
    counts = collections.Counter(re.findall(r"\b[a-z]{2,}\b", " ".join(prose())))
    frequent = [word for word, _ in counts.most_common() if word not in keys]
    return list(dict.fromkeys([*TOOL_NAMES, "secret", "number", "word", "code", "found", *frequent[:WHOLE_WORDS]]))


def prose() -> Iterator[str]:
    """The paragraphs of the language reference that read like sentences, with single blanks."""
    for name in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[name]):
            text = " ".join(paragraph.replace("*", "").split())
            if text.endswith((".", ":")) and text.count(" ") >= 5 and "::=" not in text and ">>>" not in text:
                yield text


def needle_sentences() -> Iterator[str]:
    """Every key word and value word a few times."""
    rng = random.Random(0)
    for _ in range(SENTENCES_PER_WORD):
        adjectives, nouns, words = (
            rng.sample(part, len(part)) for part in (needles.ADJECTIVES, needles.NOUNS, needles.VALUE_WORDS)
        )
        for adjective, noun, word in itertools.zip_longest(adjectives, nouns, words, fillvalue="number"):
            yield f"The secret word of the {adjective} {noun} is {word}."


def protocol_lines() -> Iterator[str]:
    """Calls and results of every tool, framed as between two control tokens."""
    rng = random.Random(0)
    for _ in range(PROTOCOL_ROUNDS):
        key, other = (f"{rng.choice(needles.ADJECTIVES)} {rng.choice(needles.NOUNS)}" for _ in range(2))
        yield from ("system\n", f"user\nWhat is the secret number of the {key}?", "user\n", "assistant\n")
        call, tokens, value = rng.randrange(1, 500), rng.randrange(9, 9_999), rng.randrange(10**4, 10**5)
        for tool, arguments, fields, body in _turns(rng, call, key, other, value, tokens):
            yield f'\n{{"name":"{tool}","arguments":{{{arguments}}}}}\n'
            yield f'\n{{"msg_id":{call + 1},"call_id":{call}{fields}}}\n{body}'
        yield f'\n{{"msg_id":{call + 1},"call_id":{call},"error":"{key}"}}\n'
        yield f'\n{{"deleted":"1-{call}"}}\n'
        yield f'\n{{"name":"finish","arguments":{{"key":"{key}","answer":"not found"}}}}\n'


def _turns(
    rng: random.Random, call: int, key: str, other: str, value: int, tokens: int
) -> Iterator[tuple[str, str, str, str]]:
    """(tool, arguments, fields of the result's header, body of the result) of every tool."""
    chunks = rng.randrange(2, 500)
    chunk = rng.randrange(chunks)
    notes = f"Notes:\n- {other}: {value}\n- {key}: {value}\n"
    built = f',"total_chunks":{chunks},"first_chunk_id":0,"last_chunk_id":{chunks - 1}'
    read = f',"chunk_id":{chunk},"reading_progress":"{chunk + 1}/{chunks}","more":{rng.choice(("true", "false"))}'
    deleted = f',"deleted":"1-{call + 1}","freed_tokens":{tokens}'
    budget = f',"context_window":{tokens},"context_tokens":{tokens},"reserve_tokens":{tokens},"tokens_left":{tokens}'
    yield "analyzeText", "", f',"total_tokens":{tokens}', ""
    yield "loadDocument", "", f',"total_tokens":{tokens}', "The "
    yield "buildIndex", "", built, ""
    yield "buildIndex", f'"chunk_size":{chunk}', built, ""
    yield "readChunk", '"enable_scan":true', read, "The "
    yield "readChunk", f'"chunk_id":{chunk}', read, "The "
    yield (
        "searchEngine",
        f'"keyword":"{key}"',
        f',"chunk_ids":[{chunk},{chunks}],"total":2',
        f"chunk {chunk}, score 2.345:\n- ",
    )
    yield "searchEngine", f'"keyword":"{key}"', ',"chunk_ids":[],"total":0,"message":"none"', ""
    yield "note", f'"key":"{key}","summary":"{value}"', "", notes
    yield "readNote", f'"key":"{key}"', f',"key":"{key}","summary":"{value}"', ""
    yield "updateNote", f'"key":"{key}","mode":"overwrite","new_summary":"{value}"', "", notes
    yield "deleteContext", f'"last_id":{call - 1}', deleted, notes
    yield "deleteContext", f'"msg_id":{call - 1}', deleted, "Notes: none\n"
    yield "deleteContext", f'"msg_id":"1-{call - 1}"', deleted + ',"no_op":true', notes
    yield "checkBudget", "", budget + f',"turns_left":{chunk}', ""
    yield "finish", f'"key":"{key}","answer":"{value}"', ',"finished":true', ""
    yield "finish", f'"answer":"{value}"', ',"finished":true', ""


def config(digest: str) -> str:
    """tokenizer_config.json: what Hugging Face needs to use the tokenizer, and which training text made it."""
    template = (ASSETS / "chat_template.jinja").read_text(encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
        "training_text_sha256": digest,
    }
    return json.dumps(settings, indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    """Write both files."""
    tokenizer, digest = build()
    folder = ASSETS / "tiny"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(config(digest), encoding="utf-8")
    print(f"{folder}: {VOCAB_SIZE} ids, training text {digest[:12]}")


if __name__ == "__main__":
    main()
