"""What the tiny model is trained on, stage by stage: copying, then the expert's snapshots.

Masked snapshots carry few target tokens, too few to grow the attention heads that copy (induction heads), and
everything the tiny StateLM does is copying: ids, keys and values that stand in its context. So it first learns to
copy random tokens, which is dense, and then what to copy where, from the expert. Both are token trees and go through
the same train step. A batch is a function of the step alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from statelm_jax.batch import Packing, TreeBatch, make_batch, pack
from statelm_jax.chat import ChatFormat
from statelm_jax.env.documents import Document
from statelm_jax.token_tree import WeightedSnapshot, build_tree, weigh
from statelm_jax.types import Message, Role, Task, TokenIds, Trajectory

BatchAt = Callable[[int], TreeBatch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stretch of training: `steps` steps of one kind of batch."""

    name: str
    steps: int
    batch_at: BatchAt


class Curriculum:
    """Stages one after the other; `batch_at` and `label_at` take the step of the whole run."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = tuple(stages)

    @property
    def steps(self) -> int:
        """Steps of all stages together."""
        return sum(stage.steps for stage in self._stages)

    def batch_at(self, step: int) -> TreeBatch:
        """The batch of a step of the run."""
        stage, within = self._at(step)
        return stage.batch_at(within)

    def label_at(self, step: int) -> str:
        """The stage that a step of the run belongs to."""
        return self._at(step)[0].name

    def _at(self, step: int) -> tuple[Stage, int]:
        for stage in self._stages:
            if step < stage.steps:
                return stage, step
            step -= stage.steps
        return self._stages[-1], self._stages[-1].steps + step


def copy_batches(tokens: int, *, rows: int, row_tokens: int, longest: int, seed: int) -> BatchAt:
    """Rows of random tokens in which one segment repeats to the end; every repeated token is a target.

    Args:
      tokens: Ids are drawn from 0..tokens-1.
      rows: B.
      row_tokens: T.
      longest: Segments have 3 to this many tokens.
      seed: With the step, decides everything.
    """

    def batch_at(step: int) -> TreeBatch:
        rng = np.random.default_rng((seed, step))
        tokens_BT = np.empty((rows, row_tokens), np.int32)
        weight_BT = np.zeros((rows, row_tokens), np.float32)
        for tokens_T, weight_T in zip(tokens_BT, weight_BT, strict=True):
            size = int(rng.integers(3, longest + 1))
            tokens_T[:] = np.resize(rng.integers(0, tokens, size), row_tokens)
            weight_T[size + 1 :] = 1.0
        index_T = np.arange(row_tokens, dtype=np.int32)
        weight_BR = weight_BT[:, 1:]
        return TreeBatch(
            tokens_BT=tokens_BT,
            position_BT=np.tile(index_T, (rows, 1)),
            parent_BT=np.tile(index_T - 1, (rows, 1)),
            end_BT=np.full((rows, row_tokens), row_tokens, np.int32),
            target_BR=np.tile(index_T[1:], (rows, 1)),
            weight_BR=weight_BR,
            advantage_BR=np.zeros_like(weight_BR),
            sampler_logprob_BR=np.zeros_like(weight_BR),
            denominator=np.asarray(weight_BR.sum(), np.float32),
        )

    return batch_at


def packed_batches(packing: Packing, *, rows: int, seed: int) -> BatchAt:
    """Rows of a packing, shuffled anew in every epoch; rows left over at an epoch's end wait for the next one."""
    per_epoch = max(len(packing.rows) // rows, 1)

    def batch_at(step: int) -> TreeBatch:
        epoch, index = divmod(step, per_epoch)
        order = np.random.default_rng((seed, epoch)).permutation(len(packing.rows))
        chosen = order[index * rows : (index + 1) * rows]
        return make_batch([packing.rows[i] for i in chosen], packing, rows)

    return batch_at


def expert_packing(
    trajectories: Sequence[Trajectory],
    *,
    row_tokens: int,
    weights: Mapping[str, float],
    keep: Mapping[str, float],
    seed: int,
) -> Packing:
    """The experts' snapshots as packed token trees, one tree per trajectory.

    Args:
      trajectories: Finished episodes.
      row_tokens: T.
      weights: Tool -> weight of its tokens; 1 where not listed.
      keep: Tool -> share of its snapshots that are kept, for steps that are many and alike; 1 where not listed.
      seed: Decides which are kept.
    """
    trees = []
    for trajectory in trajectories:
        rng = np.random.default_rng((seed, *trajectory.task_id.encode()))
        snapshots = [
            weigh(snapshot, multiplier=weights.get(turn.tool or "", 1.0), name=f"{trajectory.task_id}#{turn.turn}")
            for snapshot, turn in zip(trajectory.snapshots, trajectory.turns, strict=True)
            if rng.random() < keep.get(turn.tool or "", 1.0)
        ]
        trees.append(build_tree(snapshots))
    return pack(trees, row_tokens)


# --- the full-context twin -----------------------------------------------------------------------------------

TWIN_PROMPT = "Answer from the text."


def twin_prompt(chat: ChatFormat, question: str, document: Document, window: int, reply: int) -> TokenIds:
    """A plain question about a text, with as much of the text's beginning as the window holds beside a reply."""
    system = chat.message_ids(Message(msg_id=None, role=Role.SYSTEM, text=TWIN_PROMPT))

    def ids(text: str) -> TokenIds:
        user = chat.message_ids(Message(msg_id=None, role=Role.USER, text=f"{text}\n\n{question}"))
        return np.concatenate([system, user, chat.header_ids])

    room = window - reply - len(ids(""))
    size = min(room, document.total_tokens)
    while True:  # a cut text may encode to a few tokens more than it had
        text = document.text if size == document.total_tokens else document.text[: int(document.starts[size])]
        prompt = ids(text)
        if len(prompt) + reply <= window or size == 0:
            return prompt
        size = max(size - max(len(prompt) + reply - window, 1), 0)


def twin_reply(key: str, value: str) -> str:
    """What the twin answers: key before value, so that the look-up is a copy, as for the StateLM."""
    return f"{key}: {value}"


def twin_answer(reply: str) -> str | None:
    """The value in a reply of the twin; None where it has no such form."""
    key, separator, value = reply.partition(": ")
    return value.strip() if separator and key else None


def twin_packing(
    tasks: Sequence[Task],
    needles_of: Callable[[str], Sequence[tuple[str, str]]],
    chat: ChatFormat,
    documents: Callable[[str], Document],
    *,
    window: int,
    reply: int,
    row_tokens: int,
) -> Packing:
    """Questions about every needle of every document that the window holds; those of one document share its text."""
    trees = []
    for task in tasks:
        document = documents(task.document)
        snapshots = []
        asked = str(task.facts["key"])
        for key, value in needles_of(task.document):
            question = task.question.replace(asked, key)
            prompt = twin_prompt(chat, question, document, window, reply)
            action = chat.encode_reply(twin_reply(key, value), ())
            weight = np.ones(len(action), np.float64)
            snapshots.append(WeightedSnapshot(prompt=prompt, action=action, weight_A=weight, name=task.task_id))
        trees.append(build_tree(snapshots))
    return pack(trees, row_tokens)
