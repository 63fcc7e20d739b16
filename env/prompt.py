"""The built-in system prompt: how to work through a document that does not fit into the context."""

from __future__ import annotations

from statelm_jax.config import EnvConfig

_OPENING = """\
You answer a question about a document that you cannot see. You reach it only through tools, and it may be far longer \
than your context window of {window} tokens. Everything that you write and everything that a tool returns stays in \
the context and takes up room until you delete it, so keep what matters in notes and delete the rest.

How to work:"""

_STEPS: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset({"analyzeText"}), "Call analyzeText to see how long the document is."),
    (frozenset({"loadDocument"}), "If it fits easily into the room that is left, loadDocument shows it whole."),
    (frozenset({"buildIndex"}), "Otherwise cut it into chunks with buildIndex."),
    (
        frozenset({"searchEngine"}),
        "If the question names something to look for, use searchEngine with a few telling words, then read the "
        "chunks that it finds.",
    ),
    (
        frozenset({"readChunk"}),
        "If the whole text matters, or no search helps, scan it: readChunk with enable_scan true, again and again, "
        "until more is false.",
    ),
    (
        frozenset({"note", "updateNote"}),
        "After each chunk, write down at once what may help with the question: note under a new key, updateNote to "
        "correct or extend. A note must make sense without the text it came from.",
    ),
    (
        frozenset({"deleteContext"}),
        "Then delete what is used up with deleteContext: chunks and search results that you have read, and your own "
        "messages about them. What was deleted is shown as one short line with its ids; the notes remain.",
    ),
    (frozenset({"checkBudget"}), "When in doubt about the room that is left, call checkBudget."),
    (
        frozenset({"finish"}),
        'As soon as you know the answer, call finish. If the whole document does not hold it, answer "not found".',
    ),
)

_CLOSING = """\
Call one tool per reply. If a call fails, its result says why: mend the call, do not repeat it unchanged."""


def system_prompt(config: EnvConfig) -> str:
    """The prompt of a run: its own, or the built-in one with the steps that its tools allow."""
    if config.system_prompt is not None:
        return config.system_prompt
    steps = [text for tools, text in _STEPS if tools & set(config.tools)]
    numbered = [f"{number}. {text}" for number, text in enumerate(steps, 1)]
    return "\n".join([_OPENING.format(window=f"{config.context_window:,}"), *numbered, "", _CLOSING])
