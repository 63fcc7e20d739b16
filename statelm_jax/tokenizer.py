"""Text to ids and back, over the `tokenizers` library.

The library's tokenizer is built from a tokenizer.json whose added tokens were taken out. To this twin `<tool_call>` is
a handful of ordinary tokens like any other text, so no text, wherever it comes from, can become a control token.
Control tokens enter a sequence as ids alone (`chat.py`), and only `decode` knows how they are spelled.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from statelm_jax.errors import UserError
from statelm_jax.types import TokenIds

ASSETS = Path(__file__).resolve().parent / "assets"
TINY_FOLDER = ASSETS / "tiny"
"""The small tokenizer that ships with the package (made by scripts/make_tiny_tokenizer.py)."""

REPLACEMENT = "\ufffd"

_SURROGATE = re.compile("[\ud800-\udfff]")
_PROBE = "Aé \U0001fab8 7\n"  # stable under NFC; lost by a vocabulary that does not cover every byte


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlTokens:
    """The ids of the control tokens of Qwen3's chat format."""

    endoftext: int
    im_start: int
    im_end: int
    tool_call: int
    tool_call_end: int
    tool_response: int
    tool_response_end: int
    think: int
    think_end: int


CONTROL_TEXTS = {
    "endoftext": "<|endoftext|>",
    "im_start": "<|im_start|>",
    "im_end": "<|im_end|>",
    "tool_call": "<tool_call>",
    "tool_call_end": "</tool_call>",
    "tool_response": "<tool_response>",
    "tool_response_end": "</tool_response>",
    "think": "<think>",
    "think_end": "</think>",
}
"""Field of `ControlTokens` -> how Qwen3 spells the token."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokenizer:
    """A byte-level tokenizer with Qwen3's control tokens. Build it with `load`.

    Attributes:
      control: Ids of the control tokens.
      added_ids: Ids of all added tokens, the control tokens among them; `encode` never returns one.
      stop_ids: Ids that end a reply: im_end, endoftext, and every end-of-sequence id that
        generation_config.json, config.json or tokenizer_config.json beside the tokenizer names.
      vocab_size: One more than the largest id.
      fingerprint: sha256 of tokenizer.json, in hex.
      chat_template: The folder's Jinja chat template; None when it has none.
      source: The tokenizer.json that was read.
    """

    control: ControlTokens
    added_ids: frozenset[int]
    stop_ids: frozenset[int]
    vocab_size: int
    fingerprint: str
    chat_template: str | None
    source: Path
    _added: Mapping[int, str]
    _plain: tokenizers.Tokenizer

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a folder that holds tokenizer.json, or of that file itself.

        Raises:
          UserError: missing, broken, not byte-level, or without Qwen3's control tokens.
        """
        path = Path(path)
        source = path / "tokenizer.json" if path.is_dir() else path
        try:
            raw = source.read_bytes()
        except OSError:
            raise UserError(f"tokenizer not found: {source} (give a folder that holds tokenizer.json)") from None
        plain, added = _plain_twin(raw, source)
        control = _control_tokens(added, source)
        config = _read_json(source.with_name("tokenizer_config.json"))
        eos = _named_eos(config, added)
        for name in ("generation_config.json", "config.json"):
            eos |= _eos_ids(_read_json(source.with_name(name)), source.with_name(name))
        return cls(
            control=control,
            added_ids=frozenset(added.values()),
            stop_ids=frozenset({control.im_end, control.endoftext} | eos),
            vocab_size=max(*plain.get_vocab().values(), *added.values()) + 1,
            fingerprint=hashlib.sha256(raw).hexdigest(),
            chat_template=_chat_template(source.parent, config),
            source=source,
            _added={id_: text for text, id_ in added.items()},
            _plain=plain,
        )

    def encode(self, text: str) -> TokenIds:
        """Ids of plain text, never an added token's. Lone surrogates become replacement characters."""
        return self.encode_batch([text])[0]  # twice as fast as the library's `encode`, which also finds offsets

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """`encode` of each text, on all cores."""
        encodings = self._plain.encode_batch_fast([_clean(text) for text in texts], add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def encode_with_offsets(self, text: str) -> tuple[TokenIds, NDArray[np.int64]]:
        """(ids, starts): where in `text`, in characters, each token begins.

        `starts` never falls and begins with 0, so the slices between neighbouring starts join to the text
        exactly. Tokens that begin inside one character share its start.
        """
        encoding = self._plain.encode(_clean(text), add_special_tokens=False)
        starts = np.array([start for start, _ in encoding.offsets], np.int64)
        return np.array(encoding.ids, np.int32), starts

    def decode(self, ids: Iterable[int] | NDArray[Any]) -> str:
        """The text of any ids: control tokens as spelled; a replacement mark for broken UTF-8 and for an unknown id."""
        parts: list[str] = []
        plain: list[int] = []
        for token in ids.tolist() if isinstance(ids, np.ndarray) else map(int, ids):
            if token in self._added or not 0 <= token < self.vocab_size:
                parts += self._plain.decode(plain), self._added.get(token, REPLACEMENT)
                plain.clear()
            else:
                plain.append(token)
        return "".join(parts) + self._plain.decode(plain)

    def save(self, folder: str | Path) -> None:
        """Copy what a reader needs into `folder`: tokenizer.json byte for byte, template, and the stop set."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name in (self.source.name, "tokenizer_config.json", "chat_template.jinja"):
            if self.source.with_name(name).is_file():
                target = "tokenizer.json" if name == self.source.name else name
                shutil.copyfile(self.source.with_name(name), folder / target)
        generation = _read_json(self.source.with_name("generation_config.json"))
        generation["eos_token_id"] = sorted(self.stop_ids)
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def _clean(text: str) -> str:
    """Lone surrogates cannot be encoded as UTF-8; one character for one keeps offsets."""
    return _SURROGATE.sub(REPLACEMENT, text)


def _plain_twin(raw: bytes, source: Path) -> tuple[tokenizers.Tokenizer, dict[str, int]]:
    """(the tokenizer without its added tokens, ids of the added tokens by text)."""
    try:
        spec = json.loads(raw)
        added = {token["content"]: int(token["id"]) for token in spec["added_tokens"]}
        # Some vocabularies list the added tokens as well; with `ignore_merges` their spelling would then be one token.
        spec["model"]["vocab"] = {text: id_ for text, id_ in spec["model"]["vocab"].items() if text not in added}
        spec |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        plain = tokenizers.Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # the library raises bare Exception for a malformed file
        reason = " ".join(str(error).split())[:120]
        raise UserError(f"cannot read tokenizer {source}: {reason}; is it a byte-level BPE tokenizer.json?") from None
    text = _PROBE + "".join(added)
    ids = plain.encode(text, add_special_tokens=False).ids
    if plain.decode(ids) != text or not set(ids).isdisjoint(added.values()):
        raise UserError(f"tokenizer {source} does not round-trip plain text; use a byte-level BPE tokenizer.json")
    return plain, added


def _control_tokens(added: dict[str, int], source: Path) -> ControlTokens:
    missing = [text for text in CONTROL_TEXTS.values() if text not in added]
    if missing:
        raise UserError(f"tokenizer {source} has no control token {missing[0]}; use a Qwen3 tokenizer.json")
    return ControlTokens(**{name: added[text] for name, text in CONTROL_TEXTS.items()})


def _read_json(path: Path) -> dict[str, Any]:
    """The object in an optional file; empty when there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"cannot read {path}: it holds no JSON object")
    return value


def _eos_ids(config: dict[str, Any], path: Path) -> set[int]:
    """End-of-sequence ids of a config file: one id, a list of ids, null, or absent."""
    eos = config.get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(isinstance(id_, int) and not isinstance(id_, bool) and id_ >= 0 for id_ in ids):
        raise UserError(f"{path}: eos_token_id must be an id or a list of ids, not {str(eos)[:60]}")
    return set(ids)


def _named_eos(config: dict[str, Any], added: dict[str, int]) -> set[int]:
    """tokenizer_config.json names its end-of-sequence token by text (or by an object that holds the text)."""
    eos = config.get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    ids = {added[text]} if isinstance(text, str) and text in added else set()
    return ids | _eos_ids(config, Path("tokenizer_config.json"))


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The folder's chat template: its own file goes before the one in tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
