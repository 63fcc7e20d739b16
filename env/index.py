"""Chunks and search of a document: the room's front door, and the store that episodes share.

`DocumentStore` keeps what is dear to make (tokens, chunk tables, search indexes), each made once per text however many
episodes read it. Everything it hands out is immutable. The parts: `documents` (tokens, chunks), `words` (what a word
is), `postings` (where words are), `search` (what a query means, BM25), `highlights`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from statelm_jax.env.documents import (
    Border,
    Chunk,
    Document,
    OffsetTokenizer,
    check_chunk_sizes,
    chunk_document,
    text_digest,
)
from statelm_jax.env.search import Hit, SearchBackend, SearchIndex, SearchResult, split_keywords

__all__ = [
    "Chunk",
    "Document",
    "DocumentStore",
    "Hit",
    "OffsetTokenizer",
    "SearchBackend",
    "SearchIndex",
    "SearchResult",
    "check_chunk_sizes",
    "chunk_document",
    "split_keywords",
]

T = TypeVar("T")


class DocumentStore:
    """Documents by content, with their chunk tables and search indexes, the least recently used dropped first.

    Whatever is dropped is made again when asked for, and what an episode holds stays valid. One lock guards the store:
    threads of one process may share it, and nothing is made twice at the same time.

    Args:
      tokenizer: Counts and cuts all documents of this store.
      max_tokens: Bound on what is kept, in tokens of the document; the document, each chunk table and each search
        index count as one document length each. The default takes some 600 MB. One entry is kept in any case.
      make_index: Builds the search backend of a chunk table.
    """

    def __init__(
        self,
        tokenizer: OffsetTokenizer,
        max_tokens: int = 32_000_000,
        make_index: Callable[[Sequence[Chunk]], SearchBackend] = SearchIndex,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._make_index = make_index
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._tokens = 0
        self._lock = threading.RLock()

    def get(self, text: str) -> Document:
        """The document of a text; tokenised on first sight."""
        return self._get(text_digest(text), lambda: Document.from_text(text, self._tokenizer), None)

    def chunks(
        self, document: Document, chunk_size: int, overlap: int = 0, border: Border = "token"
    ) -> tuple[Chunk, ...]:
        """The document's chunk table. `ToolError` when the sizes make no sense (see `chunk_document`)."""
        key = (document.digest, chunk_size, overlap, border, "chunks")
        return self._get(key, lambda: chunk_document(document, chunk_size, overlap, border), document)

    def index(self, document: Document, chunk_size: int, overlap: int = 0, border: Border = "token") -> SearchBackend:
        """The search index over that chunk table; built on first use, so episodes that only read never pay for it."""
        key = (document.digest, chunk_size, overlap, border, "index")
        return self._get(key, lambda: self._make_index(self.chunks(document, chunk_size, overlap, border)), document)

    def _get(self, key: Hashable, make: Callable[[], T], document: Document | None) -> T:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][0]
            value = make()
            owner = value if isinstance(value, Document) else document
            tokens = owner.total_tokens if owner is not None else 0
            self._kept[key] = value, tokens
            self._tokens += tokens
            while self._tokens > self._max_tokens and len(self._kept) > 1:
                self._tokens -= self._kept.popitem(last=False)[1][1]
            return value
