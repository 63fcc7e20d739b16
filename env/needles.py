"""Needle sentences: what they look like, what their keys and values are made of, and how to read them back.

A needle gives one key a value ("The secret number of the crimson lantern is 48213."), its question asks for
the value of one key. The sentence form follows RULER's single-needle tasks (arXiv 2404.06654, section 3.1); the
wording and the word lists are our own. Words and values are split into a training and an evaluation side that
share nothing, so a model is always evaluated on keys made of words, and on values, that it never trained on.
"""

from __future__ import annotations

import functools
import random
import re
import zlib
from dataclasses import dataclass
from typing import Literal

ValueKind = Literal["number", "word", "uuid"]
Split = Literal["train", "eval"]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words(
    """
    amber ancient autumn azure bitter blank bold brave breezy brief bright brisk broad bronze calm careful
    casual cheerful clean clear clever cloudy coastal cold copper coral cosmic cozy crimson crisp curious curved
    dapper daring dark deep distant double dusty eager early earnest eastern elegant empty even fancy fast
    feathered festive fine firm flat floral fluffy fond formal fragile fresh friendly frosty gentle giant gilded
    glad glossy golden graceful grand gray green handy happy hidden hollow honest humble icy idle indigo inner
    ivory jade jolly keen kind large late lavender leafy level light lively lofty lone long loud lucky lunar
    magenta marble maroon mellow merry mild misty modern modest narrow native neat nimble noble northern oblong
    ochre olive opal open orange outer pale patient pearly plain polished proper proud purple quick quiet rapid
    rare rocky round royal ruby rustic salty sandy scarlet serene shady sharp shiny short silent silver simple
    sleek slender smooth snowy soft solar solid southern spare square steady steep sturdy sunny swift tall teal
    tender thin tidy tiny tranquil turquoise upper vast velvet violet vivid warm western wide wild windy winter
    wise wooden woolen young
    """
)
"""First words of keys: distinct, lower case."""

NOUNS = _words(
    """
    acorn anchor anvil apple apron arrow badge bagel ball balloon bamboo banner barn barrel basket beacon bell
    bench bicycle blanket boat book bottle bowl branch brick bridge broom brush bucket button cabin cactus camera
    candle canoe canvas carpet cart castle cavern cedar cello chair chest chimney church circle clock cloud clover
    coat comet compass cottage cradle crane crayon crown cup curtain cushion desk diamond dolphin door dragon drum
    eagle easel elm engine falcon farm feather fence ferry fiddle flag flask flower flute forest fork fountain
    fox garden gate glacier glove goose grape guitar hammer harp hat hill horse island jacket jar kettle key kite
    ladder lake lamp lantern leaf lemon letter lily lock map maple mask meadow medal mill mirror mitten moon
    mountain mug needle nest notebook oak oar orchard organ otter owl paddle page palace parcel parrot path
    peach pebble pen pencil piano pigeon pillow pine pipe planet plate pocket pond poplar pot prism puzzle quilt
    rabbit raft ribbon ring river robin roof rope rose saddle sail scarf shell ship
    """
)
"""Second words of keys: distinct, lower case, none of them an adjective above."""

VALUE_WORDS = _words(
    """
    almond antler atlas avocado banjo barley basil beaver biscuit blossom bonnet butter camel caramel carrot
    cashew celery cherry chestnut cinnamon cobalt cobweb cocoa coffee cricket crystal daisy desert donkey dune
    elbow emerald fabric fennel fern finger flannel fossil garlic ginger granite hazel heron honey iris ivy
    jasmine jelly juniper kelp kitten lagoon lemur lentil linen lizard lotus magnet mango maize melon mint moose
    mustard nectar nickel nutmeg oasis onion orchid oyster panda papaya parsley pepper plum pollen pony potato
    prairie pumpkin quartz radish raisin rhubarb saffron sapphire sesame spinach sparrow squash sunset swan
    thistle thunder timber tomato topaz tulip tundra turnip valley vanilla walnut willow yarn zebra
    """
)
"""Values of the kind "word": distinct, lower case, none of them a key word above."""

_LISTED = frozenset((*ADJECTIVES, *NOUNS, *VALUE_WORDS))

KIND_NOUNS: dict[ValueKind, str] = {"number": "number", "word": "word", "uuid": "code"}
"""What a value of each kind is called in the sentences."""

_EVAL_STRIDE = 4
"""Every fourth word, and about every fourth value, belongs to the evaluation side."""

_ATTRIBUTE = r"secret\s+(?:number|word|code)\s+of\s+the"
_KEY = r"[\w'-]+(?:\s+[\w'-]+){0,3}"
_NEEDLE = re.compile(rf"\bThe\s+{_ATTRIBUTE}\s+({_KEY}?)\s+is\s+([\w-]+)\.", re.IGNORECASE)
_QUESTION = re.compile(rf"(?:what(?:\s+is|'s)\s+)?the\s+{_ATTRIBUTE}\s+({_KEY})\s*\?*", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needle:
    """One key and its value, with the sentence that states it and the question that asks for it."""

    kind: ValueKind
    key: str
    value: str

    @property
    def sentence(self) -> str:
        """The statement that is hidden in a document."""
        return f"The secret {KIND_NOUNS[self.kind]} of the {self.key} is {self.value}."

    @property
    def question(self) -> str:
        """The question whose answer is `value`."""
        return f"What is the secret {KIND_NOUNS[self.kind]} of the {self.key}?"


def find_needles(text: str) -> list[tuple[str, str]]:
    """(key, value) of every whole needle sentence in `text`, in order of appearance.

    Line breaks inside a sentence do no harm; keys come back with single spaces.
    """
    return [(" ".join(key.split()), value) for key, value in _NEEDLE.findall(text)]


def without_needles(text: str) -> str:
    """`text` with its needle sentences cut out, so that it can serve as a haystack."""
    return _NEEDLE.sub("", text)


def question_key(question: str) -> str | None:
    """The key that a needle question asks for; None when it is no needle question."""
    match = _QUESTION.fullmatch(question.strip())
    return " ".join(match[1].split()) if match else None


@functools.cache
def words_of(words: tuple[str, ...], split: Split) -> tuple[str, ...]:
    """The part of a word list that belongs to one side."""
    return tuple(word for index, word in enumerate(words) if (index % _EVAL_STRIDE == 0) == (split == "eval"))


def draw_keys(rng: random.Random, count: int, split: Split, made_up: float = 0.0) -> list[str]:
    """`count` distinct keys "adjective noun" of one side, in random order; `made_up` as in `draw_word`."""
    adjectives, nouns = words_of(ADJECTIVES, split), words_of(NOUNS, split)
    if count > len(adjectives) * len(nouns) // 2:
        raise ValueError(f"{count} keys asked for, but the {split} words give only {len(adjectives) * len(nouns)}")
    keys: dict[str, None] = {}
    while len(keys) < count:
        words = [draw_word(rng, words, split, made_up) for words in (ADJECTIVES, NOUNS)]
        keys[" ".join(words)] = None
    return list(keys)


def draw_value(rng: random.Random, kind: ValueKind, digits: int, split: Split, made_up: float = 0.0) -> str:
    """A value of one side. Numbers have `digits` digits and no leading zero; uuids are random (version 4)."""
    if kind == "word":
        return draw_word(rng, VALUE_WORDS, split, made_up)
    while True:
        value = str(rng.randrange(10 ** (digits - 1), 10**digits)) if kind == "number" else _uuid4(rng)
        if (zlib.crc32(value.encode()) % _EVAL_STRIDE == 0) == (split == "eval"):
            return value


def draw_word(rng: random.Random, words: tuple[str, ...], split: Split, made_up: float = 0.0) -> str:
    """A word of one side of a list, or, with probability `made_up`, one that is on no list.

    A made-up word is the beginning of one word and the end of another. A model that met only listed words would learn
    to spell them; to write a made-up one it has to copy.
    """
    side = words_of(words, split)
    if not made_up or rng.random() >= made_up:
        return rng.choice(side)
    while True:
        head, tail = rng.choice(side), rng.choice(side)
        word = head[: rng.randint(1, len(head))] + tail[rng.randrange(len(tail)) :]
        if 3 <= len(word) <= 12 and word not in _LISTED:
            return word


def _uuid4(rng: random.Random) -> str:
    bits = rng.getrandbits(128) & ~(0xF << 76) & ~(0x3 << 62) | (0x4 << 76) | (0x2 << 62)
    digits = f"{bits:032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
