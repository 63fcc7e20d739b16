"""The sampler: a `Policy` that keeps every episode's KV cache in a slot and reuses it across context edits.

The life of one `collect`:

1. Queued requests get slots. An episode keeps its slot between turns; when none is free, the slot that has been idle
   for longest is taken over (its episode is prefilled anew when it comes back).
2. For each new request the longest common prefix of the cached ids and the prompt stays; what follows it is
   prefilled, several rows at a time, in shapes from the bucket table. The last prefill of a row samples its
   first token.
3. All open rows decode together on the device until a share of them has finished or `decode_steps` have passed.
4. Finished replies are handed out; the others go on in the next `collect`, joined by whatever was submitted since.

Nothing here depends on the lengths of prompts and edits but the bucket that is picked, so nothing compiles after
`warm_up`. A row's tokens depend on its prompt, its seed and the parameters, never on its neighbours.

The sampler and the batch builder are the two places where host and device meet: transfers are explicit.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from statelm_jax.config import SamplerConfig, SamplingConfig
from statelm_jax.model import Cache, Qwen3, new_cache
from statelm_jax.types import Action, ActionStop, Request, TokenIds


class Decoding(NamedTuple):
    """Device state of all slots while they decode. S slots, M = `decode_steps`.

    Attributes:
      token_S: The newest token of each slot; its keys and values are not in the cache yet.
      position_S: Its position.
      room_S: Tokens the slot may still write; 0 for a slot that is not decoding.
      seed_S: Request seeds.
      drawn_S: Tokens drawn so far for this reply, which makes each draw's random key.
      out_SM, logp_SM: Tokens drawn in this call and their log-probs.
      count_S: How many of them are valid.
      step: Steps taken in this call.
    """

    token_S: jax.Array
    position_S: jax.Array
    room_S: jax.Array
    seed_S: jax.Array
    drawn_S: jax.Array
    out_SM: jax.Array
    logp_SM: jax.Array
    count_S: jax.Array
    step: jax.Array


def draw(logits_RV, seed_R, drawn_R, sampling: SamplingConfig):
    """One token per row and its log-prob under the distribution it was drawn from.

    Greedy (temperature 0) gives the log-prob under the untouched distribution. The random key of a draw is a function
    of the request's seed and the number of tokens drawn before it, nothing else.

    Returns:
      token_R int32, logp_R float32.
    """
    if sampling.temperature == 0.0 or sampling.top_k == 1 or sampling.top_p == 0.0:
        token_R = jnp.argmax(logits_RV, axis=-1).astype(jnp.int32)
    else:
        logits_RV = keep_likely(logits_RV / jnp.float32(sampling.temperature), sampling)
        key_R = jax.vmap(lambda seed, drawn: jax.random.fold_in(jax.random.key(seed), drawn))(seed_R, drawn_R)
        token_R = jax.vmap(jax.random.categorical)(key_R, logits_RV).astype(jnp.int32)
    logp_RV = jax.nn.log_softmax(logits_RV, axis=-1)
    return token_R, jnp.take_along_axis(logp_RV, token_R[:, None], axis=-1)[:, 0]


def keep_likely(logits_RV, sampling: SamplingConfig):
    """Logits with -inf outside the top-k and the top-p nucleus; the most likely token is always kept."""
    if sampling.top_k == 0 and sampling.top_p >= 1.0:
        return logits_RV
    V = logits_RV.shape[-1]
    sorted_RV = jnp.sort(logits_RV, axis=-1, descending=True)
    keep_RV = jnp.ones_like(sorted_RV, dtype=bool)
    if sampling.top_k:
        keep_RV &= jnp.arange(V)[None] < sampling.top_k
    if sampling.top_p < 1.0:
        # A token stays while the mass before it is below top_p, so the nucleus is the smallest set that reaches it.
        mass_RV = jax.nn.softmax(jnp.where(keep_RV, sorted_RV, -jnp.inf), axis=-1)
        keep_RV &= jnp.cumsum(mass_RV, axis=-1) - mass_RV < sampling.top_p
    keep_RV = keep_RV.at[:, 0].set(True)
    least_R1 = jnp.min(jnp.where(keep_RV, sorted_RV, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits_RV >= least_R1, logits_RV, -jnp.inf)


@dataclass(slots=True, eq=False)
class _Slot:
    """Host side of one cache slot. `ids[:length]` are the tokens whose keys and values are in the cache."""

    ids: TokenIds
    length: int = 0
    episode: int | None = None
    request: Request | None = None
    cached: int = 0
    reply: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    idle_since: int = 0


class Sampler:
    """Batched generation with prefix reuse; implements `statelm_jax.types.Policy`.

    Args:
      model: The policy's model. Its parameters are held until `update` replaces them.
      config: Slots, buckets and the sampling distribution.
      stop_ids: Ids that end a reply (kept as its last id).

    Attributes:
      seconds: Wall time by part: `prefill`, `decode`, `warm_up`.
      slots: Episodes whose cache is held at once.
    """

    def __init__(self, model: Qwen3, config: SamplerConfig, stop_ids: Collection[int]) -> None:
        self._graphdef, self._params = nnx.split(model)
        self._config = config
        self._model_config = model.config
        self._dtype = jnp.dtype(model.compute.compute_dtype)
        self._cache = new_cache(model.config, config.slots, config.cache_tokens, self._dtype)
        self._slots = [_Slot(ids=np.zeros(config.cache_tokens, np.int32)) for _ in range(config.slots)]
        self._queue: list[Request] = []
        self._refused: list[tuple[int, Exception]] = []
        self._clock = 0
        self.seconds = {"prefill": 0.0, "decode": 0.0, "warm_up": 0.0}
        stops = jnp.asarray(sorted(stop_ids), jnp.int32)
        self._prefill = jax.jit(partial(_prefill, self._graphdef, config.sampling), donate_argnums=(1,))
        decode = partial(_decode, self._graphdef, config, stops)
        self._decode = jax.jit(decode, donate_argnums=(1, 2), static_argnums=(3,))
        self._stop_ids = frozenset(int(i) for i in stop_ids)
        self.slots = config.slots
        # Contexts are mostly far from full: a second decode program reads only the first half of the cache.
        half = min(-(-config.cache_tokens // 128) * 64, config.cache_tokens)
        self._lengths = sorted({half, config.cache_tokens})

    # --- Policy ----------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request; it is looked at by the next `collect`."""
        limit = self._config.cache_tokens
        if len(request.prompt) + request.max_new_tokens > limit:
            size = f"{len(request.prompt)} + {request.max_new_tokens} tokens"
            self._refused.append((request.episode, ValueError(f"{size} do not fit a cache of {limit} per slot")))
        elif len(request.prompt) == 0 or request.max_new_tokens < 1:
            self._refused.append((request.episode, ValueError("a request needs a prompt and room for a token")))
        else:
            self._queue.append(request)

    def collect(self) -> Sequence[tuple[int, Action | Exception]]:
        """Run until at least one open request is answered; empty when none is open."""
        done: list[tuple[int, Action | Exception]] = list(self._refused)
        self._refused.clear()
        while not done and (self._queue or any(slot.request for slot in self._slots)):
            self._prefill_rows(self._admit())
            done += self._finished()
            if not done or any(slot.request for slot in self._slots):
                self._decode_rows()
                done += self._finished()
        return done

    def release(self, episode: int) -> None:
        """The episode is over; its slot is free. Its cached prefix still serves whoever comes next."""
        self._queue = [request for request in self._queue if request.episode != episode]
        for slot in self._slots:
            if slot.episode == episode:
                slot.episode, slot.request = None, None

    # --- weights and programs --------------------------------------------------------------------------------

    def update(self, model: Qwen3) -> None:
        """Take new parameters. Everything cached was computed with the old ones, so all of it is dropped."""
        if any(slot.request for slot in self._slots):
            raise RuntimeError("parameters cannot change while replies are being written")
        _, self._params = nnx.split(model)
        self.forget()

    def forget(self) -> None:
        """Drop every cached prefix: the next prompts are computed from their first token."""
        for slot in self._slots:
            if slot.request is None:
                slot.length = 0

    def warm_up(self) -> int:
        """Compile every program once, without touching any slot. Returns how many there are."""
        start = time.perf_counter()
        for rows in self._config.prefill_rows:
            for tokens in self._config.prefill_buckets:
                self._run_prefill([], rows, tokens)
        for length in self._lengths:
            self._decode_rows(length)
        self.seconds["warm_up"] += time.perf_counter() - start
        return self.compiled

    @property
    def compiled(self) -> int:
        """Programs compiled so far; constant after `warm_up`."""
        programs: tuple[Any, ...] = (self._prefill, self._decode)
        return sum(program._cache_size() for program in programs)

    @property
    def cache_bytes(self) -> int:
        """Device memory that the cache takes."""
        return sum(x.nbytes for x in self._cache)

    # --- one round -------------------------------------------------------------------------------------------

    def _admit(self) -> list[_Slot]:
        """Give slots to queued requests, first come first served; returns the slots that have to be prefilled."""
        admitted = []
        for request in list(self._queue):
            slot = self._slot_for(request)
            if slot is None:
                continue
            self._queue.remove(request)
            shared = _common_prefix(slot.ids[: slot.length], request.prompt)
            # The last prompt token is always computed: its hidden state gives the first new token.
            slot.length = min(shared, len(request.prompt) - 1)
            slot.episode, slot.request = request.episode, request
            slot.cached, slot.reply, slot.logps = slot.length, [], []
            slot.ids[: len(request.prompt)] = request.prompt
            admitted.append(slot)
        return admitted

    def _slot_for(self, request: Request) -> _Slot | None:
        """The episode's own slot, else a free one, else the one idle for longest; None when all are at work."""
        for slot in self._slots:
            if slot.episode == request.episode:
                return slot
        idle = [slot for slot in self._slots if slot.request is None]
        if not idle:
            return None
        free = [slot for slot in idle if slot.episode is None]
        if free:
            return max(free, key=lambda slot: _common_prefix(slot.ids[: slot.length], request.prompt))
        return min(idle, key=lambda slot: slot.idle_since)

    def _prefill_rows(self, slots: list[_Slot]) -> None:
        """Compute all prompt tokens that are not cached, and draw each row's first token."""
        start = time.perf_counter()
        while slots:
            slots.sort(key=_missing)
            rows = next((r for r in self._config.prefill_rows if r >= len(slots)), self._config.prefill_rows[-1])
            batch = slots[:rows]
            tokens = next((t for t in self._config.prefill_buckets if t >= _missing(batch[-1])), None)
            self._run_prefill(batch, rows, tokens or self._config.prefill_buckets[-1])
            slots = [slot for slot in slots if _missing(slot)]
        self.seconds["prefill"] += time.perf_counter() - start

    def _run_prefill(self, batch: list[_Slot], rows: int, tokens: int) -> None:
        C = self._config.cache_tokens
        token_RT = np.zeros((rows, tokens), np.int32)
        position_RT = np.full((rows, tokens), C, np.int32)
        slot_R, last_R, seed_R = (np.zeros(rows, np.int32) for _ in range(3))
        for row, slot in enumerate(batch):
            assert slot.request is not None
            size = min(_missing(slot), tokens)
            token_RT[row, :size] = slot.ids[slot.length : slot.length + size]
            position_RT[row, :size] = np.arange(slot.length, slot.length + size)
            slot_R[row], last_R[row], seed_R[row] = self._slots.index(slot), size - 1, slot.request.seed
        arrays = jax.device_put((token_RT, position_RT, slot_R, last_R, seed_R))
        self._cache, first_R, logp_R = self._prefill(self._params, self._cache, *arrays)
        first_R, logp_R = jax.device_get((first_R, logp_R))
        for row, slot in enumerate(batch):
            slot.length += last_R[row] + 1
            if not _missing(slot):
                slot.reply, slot.logps = [int(first_R[row])], [float(logp_R[row])]

    def _decode_rows(self, length: int | None = None) -> None:
        """Let all open rows write on, on the device, reading the first `length` positions (by default: enough)."""
        start = time.perf_counter()
        S, M = self._config.slots, self._config.decode_steps
        token_S, position_S, room_S, seed_S, drawn_S, count_S = (np.zeros(S, np.int32) for _ in range(6))
        for i, slot in enumerate(self._slots):
            if slot.request is not None:
                token_S[i], position_S[i] = slot.reply[-1], slot.length
                room_S[i] = slot.request.max_new_tokens - len(slot.reply)
                seed_S[i], drawn_S[i] = slot.request.seed, len(slot.reply)
        arrays = (
            *(token_S, position_S, room_S, seed_S, drawn_S),
            *(np.zeros((S, M), np.int32), np.zeros((S, M), np.float32), count_S, np.int32(0)),
        )
        if length is None:
            needed = max((slot.length + M for slot in self._slots if slot.request is not None), default=0)
            length = next((n for n in self._lengths if n >= needed), self._lengths[-1])
        self._cache, state = self._decode(self._params, self._cache, Decoding(*jax.device_put(arrays)), length)
        out_SM, logp_SM, count_S = jax.device_get((state.out_SM, state.logp_SM, state.count_S))
        for i, slot in enumerate(self._slots):
            if slot.request is not None and count_S[i]:
                drawn = [int(token) for token in out_SM[i, : count_S[i]]]
                # Each drawn token was drawn after the one before it entered the cache.
                entered = [slot.reply[-1], *drawn[:-1]]
                slot.ids[slot.length : slot.length + len(entered)] = entered
                slot.length += len(entered)
                slot.reply += drawn
                slot.logps += [float(logp) for logp in logp_SM[i, : count_S[i]]]
        self.seconds["decode"] += time.perf_counter() - start

    def _finished(self) -> list[tuple[int, Action | Exception]]:
        """Hand out the replies that are complete; their slots become idle."""
        done: list[tuple[int, Action | Exception]] = []
        for slot in self._slots:
            request = slot.request
            if request is None or not slot.reply:
                continue
            stopped = slot.reply[-1] in self._stop_ids
            if not stopped and len(slot.reply) < request.max_new_tokens:
                continue
            action = Action(
                token_ids=np.asarray(slot.reply, np.int32),
                logprobs=np.asarray(slot.logps, np.float32),
                stop=ActionStop.STOP if stopped else ActionStop.LENGTH,
                cached_tokens=slot.cached,
                prefilled_tokens=len(request.prompt) - slot.cached,
            )
            self._clock += 1
            slot.request, slot.idle_since = None, self._clock
            done.append((request.episode, action))
        return done


def _missing(slot: _Slot) -> int:
    """Prompt tokens of the slot's request that are not in the cache yet."""
    assert slot.request is not None
    return max(len(slot.request.prompt) - slot.length, 0)


def _common_prefix(a: TokenIds, b: TokenIds) -> int:
    size = min(len(a), len(b))
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if differs.size else size


# --- programs ------------------------------------------------------------------------------------------------


def _prefill(graphdef, sampling: SamplingConfig, params, cache: Cache, token_RT, position_RT, slot_R, last_R, seed_R):
    """Extend R slots by up to T tokens; draw one token after position `last_R` of each row."""
    model: Qwen3 = nnx.merge(graphdef, params)
    hidden_RTD, cache = model.extend(token_RT, position_RT, slot_R, cache)
    hidden_RD = jnp.take_along_axis(hidden_RTD, last_R[:, None, None], axis=1)[:, 0]
    first_R, logp_R = draw(model.logits(hidden_RD), seed_R, jnp.zeros_like(seed_R), sampling)
    return cache, first_R, logp_R


def _decode(graphdef, config: SamplerConfig, stop_ids, params, cache: Cache, state: Decoding, length: int):
    """Up to `decode_steps` tokens for every slot with room, or until enough of the rows have finished."""
    model: Qwen3 = nnx.merge(graphdef, params)
    C = config.cache_tokens
    open_at_start = jnp.sum(state.room_S > 0)
    enough = jnp.maximum(jnp.ceil(open_at_start * config.handover_share), 1).astype(jnp.int32)

    def going(carry):
        _, state = carry
        finished = open_at_start - jnp.sum(state.room_S > 0)
        return (state.step < config.decode_steps) & (finished < enough) & (open_at_start > 0)

    def step(carry):
        cache, state = carry
        open_S = state.room_S > 0
        position_S1 = jnp.where(open_S, state.position_S, C)[:, None]
        hidden_S1D, cache = model.extend(state.token_S[:, None], position_S1, None, cache, length=length)
        token_S, logp_S = draw(model.logits(hidden_S1D[:, 0]), state.seed_S, state.drawn_S, config.sampling)
        token_S = jnp.where(open_S, token_S, state.token_S)
        stopped_S = jnp.any(token_S[:, None] == stop_ids[None], axis=1)
        state = Decoding(
            token_S=token_S,
            position_S=state.position_S + open_S,
            room_S=jnp.where(open_S & ~stopped_S, state.room_S - 1, 0),
            seed_S=state.seed_S,
            drawn_S=state.drawn_S + open_S,
            out_SM=state.out_SM.at[:, state.step].set(token_S),
            logp_SM=state.logp_SM.at[:, state.step].set(logp_S),
            count_S=state.count_S + open_S,
            step=state.step + 1,
        )
        return cache, state

    return jax.lax.while_loop(going, step, (cache, state))
