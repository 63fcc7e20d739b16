"""The sampler against the plainest generation there is: the whole context through the model for every token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from statelm_jax.config import ModelConfig, SamplerConfig, SamplingConfig
from statelm_jax.model import Qwen3
from statelm_jax.sampler import Sampler, draw, keep_likely
from statelm_jax.types import Action, ActionStop, Request

VOCAB = 61
STOP = 7
WINDOW = 80  # decoding reads 64 or 80 positions
BUCKETS = (4, 12)
REPLY = 5
SLOTS = 3
MODEL = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rope_theta=10_000.0,
)

Oracle = Callable[[Sequence[int], int], tuple[list[int], list[float]]]


def new_model(seed: int) -> Qwen3:
    return Qwen3(MODEL, rngs=nnx.Rngs(seed))


def new_sampler(
    model: Qwen3, *, buckets: tuple[int, ...] = BUCKETS, rows: tuple[int, ...] = (1, SLOTS), **sampling
) -> Sampler:
    config = SamplerConfig(
        slots=SLOTS,
        cache_tokens=WINDOW,
        prefill_buckets=buckets,
        prefill_rows=rows,
        decode_steps=3,
        sampling=SamplingConfig(**sampling),
    )
    return Sampler(model, config, (STOP,))


def oracle_of(model: Qwen3) -> Oracle:
    """Greedy generation without a cache: ids and log-probs."""
    graphdef, params = nnx.split(model)

    @jax.jit
    def log_probs(params, tokens_1T, length):
        model = nnx.merge(graphdef, params)
        index_1T = jnp.arange(WINDOW, dtype=jnp.int32)[None]
        hidden_1TD = model(tokens_1T, index_1T, jnp.where(index_1T < length, length, 0))
        return nnx.log_softmax(model.logits(hidden_1TD)[0, length - 1])

    def generate(prompt: Sequence[int], max_new: int) -> tuple[list[int], list[float]]:
        ids, logps = list(prompt), []
        while len(logps) < max_new and (not logps or ids[-1] != STOP):
            padded = np.zeros((1, WINDOW), np.int32)
            padded[0, : len(ids)] = ids
            logp_V = np.asarray(log_probs(params, padded, len(ids)))
            ids.append(int(logp_V.argmax()))
            logps.append(float(logp_V[ids[-1]]))
        return ids[len(prompt) :], logps

    return generate


def ask(episode: int, prompt: Sequence[int], *, seed: int = 0, max_new: int = REPLY) -> Request:
    ids = np.asarray(prompt, np.int32)
    return Request(episode=episode, turn=1, prompt=ids, messages=(), max_new_tokens=max_new, seed=seed)


def run(sampler: Sampler, requests: Sequence[Request]) -> dict[int, Action]:
    """All answers by episode; the last answers first, exceptions raised."""
    for request in requests:
        sampler.submit(request)
    answers: dict[int, Action] = {}
    while pairs := sampler.collect():
        for episode, action in pairs:
            assert not isinstance(action, Exception), action
            assert episode not in answers
            answers[episode] = action
    assert answers.keys() == {request.episode for request in requests}
    return answers


def same(action: Action, expected: tuple[list[int], list[float]]) -> None:
    ids, logps = expected
    assert action.token_ids.tolist() == ids
    assert action.logprobs is not None
    np.testing.assert_allclose(action.logprobs, logps, atol=1e-4, rtol=0)


def random_prompt(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(8, VOCAB, length).tolist()


@pytest.fixture(scope="module")
def model() -> Qwen3:
    return new_model(0)


@pytest.fixture(scope="module")
def oracle(model: Qwen3) -> Oracle:
    return oracle_of(model)


@pytest.fixture(scope="module")
def greedy(model: Qwen3) -> Sampler:
    sampler = new_sampler(model)
    sampler.warm_up()
    return sampler


@pytest.fixture
def sampler(greedy: Sampler) -> Sampler:
    """The greedy sampler with nothing cached and nothing open."""
    for episode in range(100):
        greedy.release(episode)
    greedy.forget()
    return greedy


@pytest.fixture(scope="module")
def warm(model: Qwen3) -> Sampler:
    sampler = new_sampler(model, buckets=(12,), rows=(SLOTS,), temperature=1.0, top_p=0.95, top_k=40)
    sampler.warm_up()
    return sampler


# --- the same as without a cache ---------------------------------------------------------------------------------


@st.composite
def rounds_of_edits(draw) -> list[list[tuple[int, int, int, int]]]:
    """Rounds of (episode, tokens kept, tokens cut after them, tokens appended), more episodes than slots."""
    edit = st.tuples(st.integers(0, 4), st.integers(0, 40), st.integers(0, 12), st.integers(1, 14))
    one_round = st.lists(edit, min_size=1, max_size=3, unique_by=lambda edit: edit[0])
    return draw(st.lists(one_round, min_size=2, max_size=5))


@settings(max_examples=10)
@given(rounds=rounds_of_edits(), seed=st.integers(0, 99))
def test_batched_replies_over_context_edits_equal_the_forward_without_a_cache(greedy, oracle, rounds, seed):
    rng = np.random.default_rng(seed)
    contexts: dict[int, list[int]] = {}
    for edits in rounds:
        requests = []
        for episode, keep, cut, append in edits:
            old = contexts.get(episode, [])
            edited = [*old[:keep], *old[keep + cut :]][: WINDOW - REPLY - append]
            contexts[episode] = edited + random_prompt(rng, append)
            requests.append(ask(episode, contexts[episode]))
        answers = run(greedy, requests)
        for request in requests:
            action = answers[request.episode]
            same(action, oracle(request.prompt.tolist(), REPLY))
            assert action.cached_tokens + action.prefilled_tokens == len(request.prompt)
            contexts[request.episode] += action.token_ids.tolist()
    for episode in contexts:
        greedy.release(episode)


def test_every_prompt_length_across_the_bucket_borders_gives_the_oracles_reply(sampler, oracle):
    rng = np.random.default_rng(1)
    for length in range(1, WINDOW - 1):
        prompt = random_prompt(rng, length)
        (action,) = run(sampler, [ask(0, prompt, max_new=2)]).values()
        same(action, oracle(prompt, 2))


def test_a_prompt_may_fill_the_cache_to_its_last_token(sampler, oracle):
    prompt = random_prompt(np.random.default_rng(2), WINDOW - 4)
    same(run(sampler, [ask(0, prompt, max_new=4)])[0], oracle(prompt, 4))


def test_batched_equals_single_prompt(sampler):
    rng = np.random.default_rng(3)
    requests = [ask(episode, random_prompt(rng, length)) for episode, length in enumerate((3, 17, 30, 9, 24))]
    together = run(sampler, requests)
    for request in requests:
        sampler.forget()
        alone = run(sampler, [request])[request.episode]
        same(together[request.episode], (alone.token_ids.tolist(), np.asarray(alone.logprobs).tolist()))


def test_the_next_turn_computes_only_what_follows_the_common_prefix(sampler, oracle):
    rng = np.random.default_rng(4)
    first = random_prompt(rng, 20)
    reply = run(sampler, [ask(0, first)])[0].token_ids.tolist()
    grown = [*first, *reply, *random_prompt(rng, 3)]
    action = run(sampler, [ask(0, grown)])[0]
    assert action.cached_tokens == len(first) + len(reply) - 1  # the last token drawn never entered the cache
    cut = [*grown[:6], *grown[15:]]
    action = run(sampler, [ask(0, cut)])[0]
    assert 6 <= action.cached_tokens < len(cut)
    assert action.cached_tokens == 6 + (cut[6] == grown[6])
    same(action, oracle(cut, REPLY))


def test_the_same_prompt_again_computes_its_last_token_only(sampler, oracle):
    prompt = random_prompt(np.random.default_rng(5), 19)
    run(sampler, [ask(0, prompt)])
    action = run(sampler, [ask(0, prompt)])[0]
    assert (action.cached_tokens, action.prefilled_tokens) == (18, 1)
    same(action, oracle(prompt, REPLY))


def test_an_episode_whose_slot_was_taken_over_is_computed_anew(sampler, oracle):
    rng = np.random.default_rng(6)
    prompts = {episode: random_prompt(rng, 15) for episode in range(4)}
    for episode in range(4):  # episode 3 takes the slot of episode 0, idle for longest
        run(sampler, [ask(episode, prompts[episode])])
    kept = run(sampler, [ask(1, prompts[1])])[1]
    assert kept.cached_tokens == 14
    robbed = run(sampler, [ask(0, prompts[0])])[0]
    assert robbed.cached_tokens == 0
    same(robbed, oracle(prompts[0], REPLY))


def test_a_freed_prefix_serves_another_episode(sampler, oracle):
    prompt = random_prompt(np.random.default_rng(7), 20)
    run(sampler, [ask(0, prompt)])
    sampler.release(0)
    other = [*prompt[:12], *prompt[:5]]
    action = run(sampler, [ask(1, other)])[1]
    assert action.cached_tokens >= 12
    same(action, oracle(other, REPLY))


# --- compilation -------------------------------------------------------------------------------------------------


def test_nothing_compiles_after_warm_up_whatever_the_edits_and_lengths(sampler):
    compiled = sampler.compiled
    assert compiled == len(BUCKETS) * 2 + 2
    rng = np.random.default_rng(8)
    context: dict[int, list[int]] = {}
    for _ in range(64):
        episodes = rng.choice(5, size=rng.integers(1, 5), replace=False).tolist()
        requests = []
        for episode in episodes:
            old = context.get(episode, [])
            keep = int(rng.integers(0, len(old) + 1))
            new = [*old[:keep], *random_prompt(rng, int(rng.integers(1, 20)))][: WINDOW - REPLY]
            context[episode] = new
            requests.append(ask(episode, new, max_new=int(rng.integers(1, WINDOW - len(new) + 1)) % REPLY + 1))
        run(sampler, requests)
    assert sampler.compiled == compiled


# --- the distribution that is sampled ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 0.0},
        {"temperature": 1.0, "top_p": 1e-9},
        {"temperature": 1e-6},
        {"temperature": 0.7, "top_p": 1e-9, "top_k": 5},
    ],
)
def test_a_distribution_with_one_likely_token_gives_the_argmax_with_a_finite_log_prob(sampling):
    logits_RV = jnp.asarray(np.random.default_rng(9).normal(size=(6, VOCAB)) * 4, jnp.float32)
    seed_R = jnp.arange(6, dtype=jnp.int32)
    token_R, logp_R = draw(logits_RV, seed_R, jnp.zeros_like(seed_R), SamplingConfig(**sampling))
    assert token_R.tolist() == logits_RV.argmax(-1).tolist()
    assert np.isfinite(logp_R).all()


def test_greedy_log_probs_are_those_of_the_untouched_distribution():
    logits_RV = jnp.asarray(np.random.default_rng(10).normal(size=(4, VOCAB)), jnp.float32)
    seed_R = jnp.zeros(4, jnp.int32)
    token_R, logp_R = draw(logits_RV, seed_R, seed_R, SamplingConfig(temperature=0.0))
    expected = np.asarray(nnx.log_softmax(logits_RV))[np.arange(4), np.asarray(token_R)]
    np.testing.assert_allclose(logp_R, expected, atol=1e-6)


@given(top_k=st.integers(0, 8), top_p=st.floats(0.05, 1.0), seed=st.integers(0, 999))
def test_the_nucleus_is_the_smallest_set_of_likely_tokens_that_reaches_top_p(top_k, top_p, seed):
    logit_V = np.random.default_rng(seed).normal(size=8).astype(np.float32) * 2
    kept = np.isfinite(np.asarray(keep_likely(jnp.asarray(logit_V)[None], SamplingConfig(top_k=top_k, top_p=top_p))[0]))
    order = np.argsort(-logit_V)[: top_k or None]
    mass = np.exp(logit_V[order]) / np.exp(logit_V[order]).sum()
    size = next((n for n in range(1, len(order) + 1) if mass[:n].sum() >= top_p), len(order))
    if min(abs(mass[:n].sum() - top_p) for n in range(1, len(order) + 1)) > 1e-5:  # else rounding decides
        assert sorted(np.flatnonzero(kept).tolist()) == sorted(order[:size].tolist())


def test_sampled_log_probs_are_those_of_the_distribution_that_was_drawn_from():
    sampling = SamplingConfig(temperature=0.5, top_k=2)
    logits_RV = jnp.asarray([[3.0, 2.0, 1.0, 0.0]] * 64)
    seed_R = jnp.arange(64, dtype=jnp.int32)
    token_R, logp_R = draw(logits_RV, seed_R, jnp.zeros_like(seed_R), sampling)
    likely = 1 / (1 + math.exp(-2.0))
    expected = np.where(np.asarray(token_R) == 0, math.log(likely), math.log(1 - likely))
    assert set(token_R.tolist()) == {0, 1}
    np.testing.assert_allclose(logp_R, expected, atol=1e-5)


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(warm):
    rng = np.random.default_rng(11)
    prompt = random_prompt(rng, 20)
    warm.forget()
    alone = run(warm, [ask(0, prompt, seed=5, max_new=8)])[0].token_ids.tolist()
    warm.release(0)
    for round_ in range(3):
        others = [ask(episode, random_prompt(rng, 5 + 7 * episode), seed=episode, max_new=3) for episode in (1, 2, 3)]
        mine = ask(9 + round_, prompt, seed=5, max_new=8)
        answers = run(warm, [*others[:round_], mine, *others[round_:]])
        assert answers[9 + round_].token_ids.tolist() == alone
        for episode in answers:
            warm.release(episode)


def test_different_seeds_draw_different_tokens(warm):
    prompt = random_prompt(np.random.default_rng(12), 10)
    requests = [ask(episode, prompt, seed=episode, max_new=6) for episode in range(6)]
    replies = {tuple(action.token_ids.tolist()) for action in run(warm, requests).values()}
    for episode in range(6):
        warm.release(episode)
    assert len(replies) == 6


# --- how replies end ---------------------------------------------------------------------------------------------


def test_a_stop_id_ends_the_reply_and_is_its_last_id(sampler, oracle):
    rng = np.random.default_rng(13)
    prompts = (random_prompt(rng, 10) for _ in range(1_000))
    prompt, expected = next((p, o[0]) for p in prompts if STOP in (o := oracle(p, 6))[0][1:5])
    action = run(sampler, [ask(0, prompt, max_new=6)])[0]
    assert action.stop is ActionStop.STOP
    assert action.token_ids.tolist() == expected
    assert expected.index(STOP) == len(expected) - 1 < 5
    first = run(sampler, [ask(0, [*prompt, *expected[:-1]], max_new=6)])[0]  # the prefill draws it already
    assert (first.token_ids.tolist(), first.stop) == ([STOP], ActionStop.STOP)


@pytest.mark.parametrize("limit", [1, 2, 4, 7])
def test_a_reply_without_a_stop_id_ends_at_the_limit(sampler, oracle, limit):
    rng = np.random.default_rng(14)
    prompts = (random_prompt(rng, 10) for _ in range(1_000))
    prompt, (ids, logps) = next((p, o) for p in prompts if STOP not in (o := oracle(p, limit))[0])
    action = run(sampler, [ask(0, prompt, max_new=limit)])[0]
    assert action.stop is ActionStop.LENGTH
    same(action, (ids, logps))


def test_long_and_short_replies_do_not_wait_for_each_other(sampler, oracle):
    rng = np.random.default_rng(15)
    prompts = (random_prompt(rng, 9) for _ in range(1_000))
    long = next(p for p in prompts if len(oracle(p, 20)[0]) == 20)
    short = next(prompts)
    sampler.submit(ask(0, long, max_new=20))
    sampler.submit(ask(1, short, max_new=2))
    (pair,) = sampler.collect()
    assert pair[0] == 1
    sampler.submit(ask(2, short, max_new=2))
    answers = dict(sampler.collect())
    assert 2 in answers
    while 0 not in answers:
        answers |= dict(sampler.collect())
    same(answers[0], oracle(long, 20))


# --- life of weights, requests and slots -------------------------------------------------------------------------


def test_update_drops_what_was_cached_with_the_old_weights(sampler, model, oracle):
    prompt = random_prompt(np.random.default_rng(16), 12)
    compiled = sampler.compiled
    sampler.update(new_model(1))
    before = run(sampler, [ask(0, prompt)])[0]
    sampler.update(model)
    action = run(sampler, [ask(0, prompt)])[0]
    assert action.cached_tokens == 0
    same(action, oracle(prompt, REPLY))
    assert before.token_ids.tolist() != action.token_ids.tolist()
    assert sampler.compiled == compiled


def test_update_is_refused_while_replies_are_being_written(sampler, model):
    sampler.submit(ask(0, [8, 9], max_new=20))
    sampler.submit(ask(1, [8, 9], max_new=1))
    assert [episode for episode, _ in sampler.collect()] == [1]
    with pytest.raises(RuntimeError, match="being written"):
        sampler.update(model)


@pytest.mark.parametrize(("prompt", "max_new"), [([9] * WINDOW, 1), ([9] * (WINDOW - 2), 3), ([], 4), ([9, 10], 0)])
def test_a_request_that_cannot_be_served_is_answered_with_its_error_and_the_others_go_on(
    sampler, oracle, prompt, max_new
):
    sampler.submit(ask(0, [9, 10, 11]))
    sampler.submit(ask(1, prompt, max_new=max_new))
    answers: dict[int, Action | Exception] = {}
    while pairs := sampler.collect():
        answers |= dict(pairs)
    assert isinstance(answers[1], ValueError)
    good = answers[0]
    assert isinstance(good, Action)
    same(good, oracle([9, 10, 11], REPLY))


def test_release_frees_the_slot_even_of_an_open_request(sampler, oracle):
    for episode in range(3):
        sampler.submit(ask(episode, [8 + episode] * 5, max_new=30))
    sampler.submit(ask(3, [20] * 5, max_new=3))  # has to wait
    sampler.submit(ask(4, [21] * 5, max_new=3))  # is given up while it waits
    sampler.release(4)
    sampler._prefill_rows(sampler._admit())
    sampler.release(1)
    answers: dict[int, Action | Exception] = {}
    while pairs := sampler.collect():
        answers |= dict(pairs)
    assert sorted(answers) == [0, 2, 3]
    waited = answers[3]
    assert isinstance(waited, Action)
    same(waited, oracle([20] * 5, 3))


def test_collect_without_requests_is_empty(sampler):
    assert list(sampler.collect()) == []
