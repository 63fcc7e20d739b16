"""Words of a text for search: where they are, and what they are called. One rule for documents and queries.

A word follows the default word boundaries of Unicode (UAX #29): letters, digits and the marks on them run
together; an apostrophe, a full stop or a middle dot between two letters (`can't`, `e.g`), and a full stop, a
comma or an apostrophe between two digits (`3,141.59`), join them. It departs from that rule in four places, each
where the rule would hide a word from the query a reader types:

* an underscore joins only between two letters or digits (`foo_bar`): `_Pequod_`, set in italics, is `Pequod`;
* a colon never joins (`key:value` is two words);
* all numbers count, superscripts and fractions included;
* scripts that are written without blanks (Chinese characters, kana, Bopomofo, Yi, Thai, Lao, Khmer, Burmese, Tai)
  give one word per character, with the marks on it; consecutive characters have consecutive positions, so that
  any substring of such a text is a phrase.

`fold` names a word: compatibility forms, case and accents are levelled, and an English possessive `'s` is dropped.
There is no other stemming and there are no stop words.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

OTHER, LETTER, DIGIT, SPACELESS, EXTEND, CONNECT, MID_LETTER, MID_BOTH, MID_DIGIT = range(9)
_TABLE_SIZE = 0x40000  # above lie only tags, variation selectors and private characters

_MID_LETTER = "\u00b7\u0387\u055f\u05f4\u2027"
_MID_BOTH = ".'\u2018\u2019\u2024\ufe52\uff07\uff0e"
_MID_DIGIT = ",;\u037e\u0589\u060c\u060d\u066c\u07f8\u2044\ufe10\ufe14\uff0c\uff1b"
_SPACELESS_RANGES = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x1950, 0x19DF),  # Tai Le, New Tai Lue
    (0x1A20, 0x1AAF),  # Tai Tham
    (0x2E80, 0x2FDF),  # CJK radicals
    (0x3005, 0x3007),
    (0x3021, 0x312F),  # numerals, kana, Bopomofo
    (0x31A0, 0x31FF),
    (0x3400, 0x4DBF),  # Chinese characters
    (0x4E00, 0xA4CF),  # Chinese characters, Yi
    (0xA9E0, 0xA9FF),
    (0xAA60, 0xAADF),
    (0xF900, 0xFAFF),
    (0xFF66, 0xFF9D),  # halfwidth kana
    (0x1AFF0, 0x1B16F),  # kana supplements
    (0x20000, 0x3FFFF),
)
_APOSTROPHES = {ord(mark): "'" for mark in "\u2018\u2019\u02bc\uff07"}
_STROKED = str.maketrans(
    {"æ": "ae", "œ": "oe", "ø": "o", "đ": "d", "ð": "d", "ħ": "h", "ı": "i", "ł": "l", "ŋ": "n", "þ": "th", "ŧ": "t"}
)
"""Letters that Unicode does not decompose but that a plain keyboard writes without the stroke."""


class Words(NamedTuple):
    """The words of one text, in order.

    Attributes:
      starts: int64 (W,), first character of each word.
      ends: int64 (W,), one past the last character.
      spaceless: bool (W,), whether the word is one character of a script written without blanks.
    """

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    spaceless: NDArray[np.bool_]


def find_words(text: str) -> Words:
    """The words of `text`, in one vectorised pass (about 20 million characters a second)."""
    classes, where = _classes(text)
    if not len(classes):
        empty = np.zeros(0, np.int64)
        return Words(empty, empty, np.zeros(0, bool))
    before = np.concatenate(([OTHER], classes[:-1]))
    after = np.concatenate((classes[1:], [OTHER]))
    letters = (before == LETTER) & (after == LETTER)
    digits = (before == DIGIT) & (after == DIGIT)
    inside = ((before == LETTER) | (before == DIGIT)) & ((after == LETTER) | (after == DIGIT))
    joins = (
        ((classes == CONNECT) & inside)
        | ((classes == MID_LETTER) & letters)
        | ((classes == MID_BOTH) & (letters | digits))
        | ((classes == MID_DIGIT) & digits)
    )
    running = (classes == LETTER) | (classes == DIGIT) | joins
    edges = np.diff(running, prepend=False, append=False)
    single = classes == SPACELESS
    is_start = single | (edges[:-1] & running)
    is_last = single | (edges[1:] & running)
    ends = np.append(where[1:], len(text))[is_last]
    return Words(where[is_start], ends, single[is_start])


def fold(word: str) -> str:
    """The name under which a word is indexed and looked up.

    Compatibility forms are decomposed (NFKD) and case is folded; then accents go (combining marks of class 200 and
    up, and the points of Hebrew and Arabic) while marks that make another letter stay (Indic vowel signs, Thai tones,
    kana voicing); stroked letters and ligatures lose the stroke (ł, ø, æ); what is left is composed (NFC). At last
    a possessive 's is dropped. `Łódź`, `ŁÓDŹ` and `lodz` are one word; so are `café's` and `CAFE`.
    """
    if word.isascii():
        folded = word.lower()
    else:
        decomposed = unicodedata.normalize("NFKD", word.translate(_APOSTROPHES)).casefold()
        decomposed = unicodedata.normalize("NFKD", decomposed)
        kept = "".join(char for char in decomposed if not _is_accent(char))
        folded = unicodedata.normalize("NFC", kept.translate(_STROKED))
    return folded.removesuffix("'s")


def _is_accent(char: str) -> bool:
    combining = unicodedata.combining(char)
    return combining >= 200 or 10 <= combining <= 35 or unicodedata.category(char) == "Cf"


def _classes(text: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The class of every character that is not a mark on another, and where it is."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    classes = _class_table()[np.minimum(codes, _TABLE_SIZE - 1)]
    classes[(codes >= 0xE0000) & (codes < 0xE0200)] = EXTEND
    bases = classes != EXTEND
    if bases.all():
        return classes, np.arange(len(classes))
    return classes[bases], np.flatnonzero(bases)


@lru_cache(maxsize=1)
def _class_table() -> NDArray[np.uint8]:
    """The class of every code point, from its general category."""
    by_category = {"L": LETTER, "N": DIGIT, "M": EXTEND}
    exact = {"Cf": EXTEND, "Pc": CONNECT, "Nl": LETTER}
    categories = [unicodedata.category(chr(code)) for code in range(_TABLE_SIZE)]
    table = np.array([exact.get(name, by_category.get(name[0], OTHER)) for name in categories], np.uint8)
    for first, last in _SPACELESS_RANGES:
        part = table[first : last + 1]
        # Radicals are symbols by category; digits of these scripts (Thai, Lao) run together like any others.
        part[(part == LETTER) | ((part == OTHER) & (first == 0x2E80))] = SPACELESS
    for marks, value in ((_MID_LETTER, MID_LETTER), (_MID_BOTH, MID_BOTH), (_MID_DIGIT, MID_DIGIT)):
        table[[ord(mark) for mark in marks]] = value
    table[0xFF9E:0xFFA0] = EXTEND  # halfwidth voicing marks belong to the kana before them
    table[0x200B] = OTHER  # zero width space: a border that nobody sees
    table.setflags(write=False)
    return table
