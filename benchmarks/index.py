"""Search over a document of two million tokens: time and memory to build, time per query, recall of quotations.

    python -m benchmarks.index [--json]

The text is the novels of the folder that STATELM_DATA names, repeated until it is long enough (without it: Python's
own language reference, repeated). The tokenizer is Qwen3's where it is in the cache, else the package's small one.
Times are wall times on this machine, and `peak_mb` is the peak of the whole process (interpreter, tokenizer and text
included) after the build. The last line is one JSON object:

* `build_s` = `tokenize_s` + `index_s` (chunks of 4,000 tokens and their index).
* `query_ms_p50`, `query_ms_p99`: seeded queries of five kinds in equal parts (word, phrase of two words, three
  keywords, word with a hyphen, quotation of 12 words), drawn from the text by frequency; 20 hits with highlights.
* `vs_rank_bm25_build`, `vs_rank_bm25_query`: how many times longer rank_bm25 takes, from the chunks' texts to an index
  (ours has positions, too) and from one or three words to the best 20 chunks, no highlights. Null when not installed.
* `recall_at_1`: quotations of 12 words from the novels, each once, whose chunk comes first. Null without the novels.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import random
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from statelm_jax.env.index import Chunk, DocumentStore, SearchBackend
from statelm_jax.env.words import find_words, fold
from statelm_jax.tokenizer import TINY_FOLDER, Tokenizer

TOKENS = 2_000_000
CHUNK_TOKENS = 4_000
HITS = 20
QUERIES_PER_KIND = 200
QUOTATIONS = 500
QUOTATION_WORDS = 12
QWEN3_FOLDER = Path.home() / ".cache" / "statelm_jax" / "tests" / "qwen3-tokenizer"

T = TypeVar("T")


def measure(tokens: int = TOKENS) -> dict[str, Any]:
    """All figures, as described at the head of this module."""
    folder = QWEN3_FOLDER if (QWEN3_FOLDER / "tokenizer.json").is_file() else TINY_FOLDER
    tokenizer = Tokenizer.load(folder)
    source, novels = _source()
    text = _repeated(source, tokens, tokenizer)
    store = DocumentStore(tokenizer)
    document, tokenize_s = _timed(lambda: store.get(text))
    index, index_s = _timed(lambda: store.index(document, CHUNK_TOKENS))
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    chunks = store.chunks(document, CHUNK_TOKENS)
    queries = _queries(chunks, random.Random(0))
    query_ms = [1e3 * _timed(lambda query=query: index.search(query, HITS))[1] for query in queries]
    repeats = len(text) / len(source)
    return {
        "text": f"{'six novels' if novels else 'Python language reference'}, repeated {repeats:.2f} times",
        "tokenizer": "qwen3" if folder == QWEN3_FOLDER else "tiny",
        "tokens": document.total_tokens,
        "chunks": len(chunks),
        "build_s": tokenize_s + index_s,
        "tokenize_s": tokenize_s,
        "index_s": index_s,
        "peak_mb": peak_mb,
        "query_ms_p50": float(np.percentile(query_ms, 50)),
        "query_ms_p99": float(np.percentile(query_ms, 99)),
        **_against_rank_bm25(chunks, queries, index, index_s),
        "recall_at_1": _recall(store, source) if novels else None,
    }


def _source() -> tuple[str, bool]:
    """The text that is repeated, and whether it is the novels."""
    data = os.environ.get("STATELM_DATA")
    novels = sorted((Path(data) / "novels").glob("*.txt")) if data else []
    if novels:
        return "\n\n".join(path.read_text(encoding="utf-8") for path in novels), True
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)), False


def _repeated(source: str, tokens: int, tokenizer: Tokenizer) -> str:
    """About `tokens` tokens of the source, over and over."""
    pieces = [source[i : i + 50_000] for i in range(0, len(source), 400_000)]
    rate = sum(len(tokenizer.encode(piece)) for piece in pieces) / sum(map(len, pieces))
    characters = int(tokens / rate)
    return (source * (characters // len(source) + 1))[:characters]


def _queries(chunks: Sequence[Chunk], rng: random.Random) -> list[tuple[str, ...]]:
    def words(n: int) -> list[str]:
        while True:
            found = rng.choice(chunks).text.split()
            if len(found) > n:
                start = rng.randrange(len(found) - n)
                taken = found[start : start + n]
                if all(len(find_words(word).starts) for word in taken):
                    return taken

    kinds: list[Callable[[], tuple[str, ...]]] = [
        lambda: tuple(words(1)),
        lambda: (" ".join(words(2)),),
        lambda: tuple(words(1)[0] for _ in range(3)),
        lambda: ("-".join(words(2)),),
        lambda: (" ".join(words(QUOTATION_WORDS)),),
    ]
    queries = [kind() for _ in range(QUERIES_PER_KIND) for kind in kinds]
    rng.shuffle(queries)
    return queries


def _against_rank_bm25(
    chunks: Sequence[Chunk], queries: Sequence[tuple[str, ...]], index: SearchBackend, index_s: float
) -> dict[str, float | None]:
    if importlib.util.find_spec("rank_bm25") is None:
        return {"vs_rank_bm25_build": None, "vs_rank_bm25_query": None}
    from rank_bm25 import BM25Okapi

    def build() -> BM25Okapi:
        return BM25Okapi([_words(chunk.text) for chunk in chunks])

    def best(query: tuple[str, ...]) -> np.ndarray:
        return np.argsort(-other.get_scores([word for keyword in query for word in _words(keyword)]))[:HITS]

    other, other_build_s = _timed(build)
    plain = [query for query in queries if all(len(_words(keyword)) == 1 for keyword in query)]
    theirs = [_timed(lambda query=query: best(query))[1] for query in plain]
    ours = [_timed(lambda query=query: index.search(query, HITS, 0))[1] for query in plain]
    return {
        "vs_rank_bm25_build": other_build_s / index_s,
        "vs_rank_bm25_query": float(np.median(theirs) / np.median(ours)),
    }


def _words(text: str) -> list[str]:
    found = find_words(text)
    return [fold(text[start:end]) for start, end in zip(found.starts.tolist(), found.ends.tolist(), strict=True)]


def _recall(store: DocumentStore, source: str) -> float:
    document = store.get(source)
    chunks, index = store.chunks(document, CHUNK_TOKENS), store.index(document, CHUNK_TOKENS)
    rng = random.Random(1)
    right = 0
    for chunk in itertools.islice(itertools.cycle(chunks), QUOTATIONS):
        words = chunk.text.split()
        start = rng.randrange(max(1, len(words) - QUOTATION_WORDS - 1)) + 1  # the first word may be cut
        hits, _ = index.search([" ".join(words[start : start + QUOTATION_WORDS])], 1)
        right += bool(hits) and hits[0].chunk_id == chunk.chunk_id
    return right / QUOTATIONS


def _timed(run: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    value = run()
    return value, time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table (unless --json) and the JSON line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.index", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="length of the document (default: %(default)s)")
    given = parser.parse_args(argv)
    figures = measure(given.tokens)
    if not given.json:
        table = Table("figure", "value", title="Search index")
        for name, value in figures.items():
            shown = "not measured" if value is None else f"{value:,.3f}" if isinstance(value, float) else str(value)
            table.add_row(name, shown)
        Console().print(table)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
