"""Log-probs of prompts and of named tokens, against float64 and the trainer's function."""

from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import mesh_of
from heard_compiles import compiles_of_samplers
from test_adapters import adapter, alone, lora, make
from tiny import OTHER, PARAMS, SPEC, VOCAB, Held, Script, make_sampler, request
from whole_rows import logprobs_of, row_states

from jaxrl_async.config import schema
from jaxrl_async.errors import RolloutError
from jaxrl_async.model.decoder import next_logits, output_head
from jaxrl_async.model.spec import ModelSpec, Weight, weight_table
from jaxrl_async.sampler.batch.prefill import Sizes, make_chunk, prefill_sizes
from jaxrl_async.sampler.device import token_scores
from jaxrl_async.sampler.device.program_arguments import ScoreArgs
from jaxrl_async.sampler.device.sampling import likeliest
from jaxrl_async.sampler.partial import load_partial, save_partial
from jaxrl_async.sampler.router.router import Router
from jaxrl_async.sampler.setup import SamplerSettings, build_setup
from jaxrl_async.types import (
    Completion,
    LogprobRequest,
    Partial,
    PositionLogprobs,
    Request,
    SamplingParams,
    StopReason,
    VersionedParams,
)

LOGPROBS = LogprobRequest(prompt=True, top=5, ids=(3, 7))
CLOSE = 1e-5


@lru_cache(maxsize=256)
def _distributions(ids: bytes, other: bool) -> np.ndarray:
    tokens = np.frombuffer(ids, np.int32)
    row, n = np.zeros((1, 64), np.int32), len(tokens)
    row[0, :n] = tokens
    there = (np.arange(64) < n).astype(np.int32)[None]
    params = OTHER if other else PARAMS
    hidden = row_states(SPEC, params, row, np.arange(64)[None], there)
    logits = np.asarray(hidden @ output_head(SPEC, params), np.float64)[0, :n]
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def distributions(ids: np.ndarray, other: bool = False) -> np.ndarray:
    """Return the log-probs of every token after each of these, [n, vocab] float64."""
    return _distributions(np.ascontiguousarray(ids, np.int32).tobytes(), other)


def check(found: PositionLogprobs, wanted: np.ndarray, tokens: np.ndarray, req: LogprobRequest):
    """Compare log-probs with those of float64 distributions [n, vocab]."""
    n = np.arange(len(tokens))
    order = np.argsort(-wanted, axis=-1, kind="stable")[:, : req.top]
    assert found.top_ids.tolist() == order.tolist()
    for ours, theirs in (
        (found.logprobs, wanted[n, tokens]),
        (found.top_logprobs, np.take_along_axis(wanted, order, -1)),
        (found.id_logprobs, wanted[:, list(req.ids)]),
    ):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs, atol=CLOSE, rtol=0)


def rows(found: PositionLogprobs, begin: int) -> PositionLogprobs:
    """Return the positions from `begin` on."""
    names = ("logprobs", "top_ids", "top_logprobs", "id_logprobs")
    return replace(found, **{name: getattr(found, name)[begin:] for name in names})


def check_prompt(asked: Request, done: Completion, other: bool = False) -> None:
    """Compare a prompt's log-probs with float64; those that are not wanted are NaN."""
    found, req, ids = done.prompt_logprobs, asked.logprobs, asked.token_ids
    assert found is not None and req is not None and len(found.logprobs) == len(ids)
    first = max(req.start, 1)
    assert np.isnan(found.logprobs[:first]).all() and (found.top_ids[:first] == -1).all()
    assert np.isnan(found.top_logprobs[:first]).all() and np.isnan(found.id_logprobs[:first]).all()
    check(rows(found, first), distributions(ids, other)[first - 1 : -1], ids[first:], req)


def check_answer(asked: Request, done: Completion) -> None:
    """Compare the log-probs of generated tokens with the distributions that they are sampled
    from."""
    req, found = asked.logprobs, done.top_logprobs
    assert req is not None and found is not None
    ids, begin = np.concatenate([asked.token_ids, done.token_ids]), len(asked.token_ids)
    how = asked.sampling
    logits = distributions(ids)[begin - 1 : -1] / (how.temperature or 1.0)
    wanted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_array_equal(found.logprobs, done.logprobs)
    if not how.truncates:
        check(found, wanted, done.token_ids, req)
    elif how.temperature:  # of those that are kept, renormalised
        assert (found.top_logprobs[:, 0] > wanted.max(-1) - CLOSE).all()
        assert (np.isneginf(found.id_logprobs) | (found.id_logprobs <= 0)).all()
        kept = np.exp(found.top_logprobs.astype(np.float64)).sum(-1)
        assert (kept < 1 + CLOSE).all()


def scoring(number: int, **more: object) -> Request:
    """A request that only scores."""
    return request(number, **{"max_new_tokens": 0, "logprobs": LOGPROBS, **more})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prefill_chunk": 7, "page_tokens": 8, "cpu_kernels": False},
        *(
            pytest.param(settings, marks=[pytest.mark.full, pytest.mark.exhaustive])
            for settings in (
                {"prefill_chunk": 7, "page_tokens": 8},
                {"attention": "ragged", "page_tokens": 8},
                {"attention": "ragged", "prefill_chunk": 7, "page_tokens": 8, "block": 3},
            )
        ),
    ],
)
def test_every_way_of_a_prefill_gives_the_log_probs_of_the_definition(settings) -> None:
    asked = [
        request(i, logprobs=LOGPROBS, max_new_tokens=0 if i % 2 else 6, stop_token_ids=())
        for i in range(8)
    ]
    with make_sampler(**settings) as sampler:
        for one, done in zip(asked, sampler.generate(asked), strict=True):
            check_prompt(one, done)
            trained = logprobs_of(SPEC, PARAMS, one.token_ids)
            ours = done.prompt_logprobs.logprobs[1:]
            np.testing.assert_allclose(ours, trained[1:], atol=CLOSE, rtol=0)
            if one.max_new_tokens:
                check_answer(one, done)
            else:
                assert done.stop is StopReason.LENGTH and not len(done.token_ids)
                assert done.top_logprobs is None
        stats = sampler.stats()
        assert stats.scored_tokens == sum(len(one.token_ids) - 1 for one in asked)
        assert stats.truncated == 4, "requests that only score are not cut off"
        sampler.between_blocks(sampler.loop.batch.check_integrity)


@pytest.mark.full
def test_generated_tokens_have_log_probs_of_their_own_distribution() -> None:
    """Tempered, greedy (of the untempered one) and truncated, in one batch with plain requests."""
    hot = SamplingParams(temperature=1.7)
    kinds = (hot, SamplingParams(temperature=0.0), SamplingParams(temperature=0.7, top_k=4))
    req = LogprobRequest(top=6, ids=(3, 7, 11))
    asked = [
        request(i, sampling=kinds[i % 3], logprobs=req, max_new_tokens=8, stop_token_ids=())
        for i in range(6)
    ]
    with make_sampler() as sampler:
        done = sampler.generate([*asked, request(20)])
    for one, found in zip(asked, done, strict=False):
        check_answer(one, found)
    kept = done[2].top_logprobs.top_logprobs
    assert np.isfinite(kept[:, :4]).all() and np.isneginf(kept[:, 4:]).all()
    np.testing.assert_allclose(np.exp(kept.astype(np.float64)).sum(-1), 1, atol=1e-5)
    assert done[-1].top_logprobs is None


def random_requests(seed: int, count: int) -> list[Request]:
    """Requests that score, generate, or both, some of them with equal prompts."""
    rng, found = np.random.default_rng(seed), []
    prompts = [rng.integers(0, VOCAB, rng.integers(1, 40)).astype(np.int32) for _ in range(6)]
    for i in range(count):
        ids = prompts[int(rng.integers(6))]
        req = LogprobRequest(
            prompt=bool(rng.integers(2)),
            start=int(rng.integers(len(ids) + 1)) if rng.integers(2) else 0,
            top=int(rng.choice([0, 1, 5, 20])),
            ids=tuple(rng.integers(0, VOCAB, rng.integers(4)).tolist()),
        )
        plain = rng.integers(3) == 0
        found.append(
            request(
                i,
                request_id=f"r{seed}.{i}",
                token_ids=ids,
                logprobs=None if plain else req,
                max_new_tokens=0 if req.prompt and not plain and rng.integers(2) else 12,
            )
        )
    return found


@pytest.mark.full
@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_gives_what_each_request_gets_alone(seed: int) -> None:
    asked = random_requests(seed, 40)
    crowded = {"kv_memory_mib": 6 * 16 * 2 * 2 * 2 * 8 * 4 / 2**20, "prefill_chunk": 23}
    with make_sampler() as roomy, make_sampler(**crowded) as sampler:
        for one, done in zip(asked, sampler.generate(asked), strict=True):
            (single,) = roomy.generate([one])
            assert done.token_ids.tolist() == single.token_ids.tolist()
            for name in ("prompt_logprobs", "top_logprobs"):
                ours, theirs = getattr(done, name), getattr(single, name)
                assert (ours is None) == (theirs is None)
                if ours is not None:
                    assert ours.top_ids.tolist() == theirs.top_ids.tolist()
                    for field in ("logprobs", "top_logprobs", "id_logprobs"):
                        values = getattr(ours, field), getattr(theirs, field)
                        np.testing.assert_allclose(*values, atol=CLOSE, rtol=0)
            if one.logprobs is not None and one.logprobs.prompt:
                check_prompt(one, done)
        assert sampler.stats().preempted > 0
        sampler.between_blocks(sampler.loop.batch.check_integrity)


@pytest.mark.full
def test_requests_without_a_wish_run_the_programs_that_they_had() -> None:
    plain = [request(i) for i in range(4)]
    with make_sampler(prefix_cache=False) as sampler:
        before = sampler.generate(plain)
        sampler.generate([scoring(5), request(6, logprobs=LogprobRequest(top=2))])
        with compiles_of_samplers() as heard:
            after = sampler.generate(
                [replace(one, request_id=f"again {i}") for i, one in enumerate(plain)]
            )
        assert heard == []
    for one, other in zip(before, after, strict=True):
        assert one.top_logprobs is one.prompt_logprobs is None
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


@pytest.mark.full
def test_a_score_needs_no_slot_and_waits_for_no_answer() -> None:
    """All slots are taken by answers that have begun; more of them wait."""
    with make_sampler(reserve=0.0) as sampler:
        held = Held(sampler, 8)
        long = [request(i, max_new_tokens=24, stop_token_ids=()) for i in range(4)]
        waiting = [request(10 + i, max_new_tokens=24, stop_token_ids=()) for i in range(4)]
        answers = sampler.start_many([*long, *waiting])
        futures: list = []
        held.meanwhile(lambda: futures.extend(sampler.start_many([scoring(20), scoring(21)])))
        for number, future in zip((20, 21), futures, strict=True):
            check_prompt(scoring(number), future.result(60))
        assert not all(answer.done() for answer in answers), "they did not wait for answers"
        assert all(len(future.result(60).token_ids) == 24 for future in answers)


def test_members_of_a_group_share_a_scored_prefill() -> None:
    prompt = np.arange(40, dtype=np.int32)
    asked = [
        request(
            i, token_ids=prompt, logprobs=LOGPROBS, max_new_tokens=4 * (i < 3), stop_token_ids=()
        )
        for i in range(5)
    ]
    with make_sampler() as sampler:
        for one, done in zip(asked, sampler.generate(asked), strict=True):
            check_prompt(one, done)
            assert len(done.token_ids) == one.max_new_tokens
        assert sampler.stats().scored_tokens == 39


def test_stored_kv_is_used_before_the_first_scored_position_alone() -> None:
    """Pages of 16: position 33 is predicted by token 32, and two pages hold those before it."""
    prompt = np.arange(1, 44, dtype=np.int32) % VOCAB
    with make_sampler() as sampler:
        sampler.generate([request(0, token_ids=prompt)])
        for start, wanted in ((0, 0), (1, 0), (17, 16), (32, 16), (33, 32), (43, 32)):
            before = sampler.stats()
            req = replace(LOGPROBS, start=start)
            one = scoring(1, token_ids=prompt, logprobs=req)
            check_prompt(one, sampler.generate([one])[0])
            after = sampler.stats()
            assert after.prefix_hit_tokens - before.prefix_hit_tokens == wanted
            assert after.scored_tokens - before.scored_tokens == 43 - max(start, 1)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["continue", "recompute", "restart", "drain"])
def test_all_log_probs_of_a_prompt_are_by_one_version(mode: str) -> None:
    """New weights arrive while a long prompt is computed, 3 tokens a round."""
    prompt = np.arange(1, 41, dtype=np.int32)
    source = Script([VersionedParams(version=1, params=OTHER)], after=4)
    settings = {"prefill_chunk": 3, "on_new_weights": mode, "block": 1}
    with make_sampler(weights=source, **settings) as sampler:
        asked = [scoring(1, token_ids=prompt), request(2, token_ids=prompt, logprobs=LOGPROBS)]
        for one, done in zip(asked, sampler.generate(asked), strict=True):
            version = done.prompt_logprobs.version
            assert version == (0 if mode == "drain" else 1)
            check_prompt(one, done, other=version == 1)
        sampler.between_blocks(sampler.loop.batch.check_integrity)


@pytest.mark.full
def test_a_request_is_scored_with_its_adapter() -> None:
    given = [adapter(SPEC, lora(SPEC), seed) for seed in (1, 2)]
    prompt, names = scoring(0).token_ids, ("", "a", "b")
    asked = [scoring(i, adapter=names[i % 3], token_ids=prompt) for i in range(6)]
    with make() as sampler:
        for name, one in zip("ab", given, strict=True):
            sampler.adapters.load(name, one)
        found = [done.prompt_logprobs.logprobs for done in sampler.generate(asked)]
        (plain, *_) = sampler.generate([scoring(7, token_ids=prompt)])
    check_prompt(asked[0], plain)
    for i, one in enumerate(asked[1:3]):
        (wanted,) = alone("llama", given[i], [one])
        np.testing.assert_allclose(
            found[i + 1][1:], wanted.prompt_logprobs.logprobs[1:], atol=CLOSE, rtol=0
        )
    assert np.abs(found[0] - found[1])[1:].max() > 0.01 < np.abs(found[1] - found[2])[1:].max()


def test_a_saved_request_keeps_its_log_probs(tmp_path) -> None:
    one = request(
        1, logprobs=LOGPROBS, max_new_tokens=24, stop_token_ids=(), sampling=SamplingParams()
    )
    with make_sampler() as sampler:
        held, future = Held(sampler, 8), sampler.start_many([one])[0]
        (saved,) = held.meanwhile(lambda: sampler.save(one.request_id))
        wanted = future.result(60)
    save_partial(saved, tmp_path / "partial")
    with make_sampler() as sampler:
        (done,) = sampler.resume([load_partial(tmp_path / "partial")])
        assert sampler.stats().scored_tokens == 0, "it has them"
        with pytest.raises(RolloutError, match="it wants log-probs of named tokens"):
            sampler.resume([replace(saved, top_logprobs=None)])
        (again,) = sampler.resume([replace(saved, prompt_logprobs=None)])
    assert done.token_ids.tolist() == wanted.token_ids.tolist()
    for found in (done, again):
        check_prompt(one, found)
        check_answer(one, found)


@pytest.mark.full
def test_a_router_scores_through_any_of_its_samplers() -> None:
    asked = random_requests(9, 12)
    with Router([make_sampler(), make_sampler()]) as router:
        for one, done in zip(asked, router.generate(asked), strict=True):
            if one.logprobs is not None and one.logprobs.prompt:
                check_prompt(one, done)


@pytest.mark.full
def test_a_vocabulary_divided_over_a_mesh_gives_the_same() -> None:
    with make_sampler(mesh=mesh_of(tensor=2)) as sampler:
        asked = [scoring(1), request(2, logprobs=LOGPROBS, sampling=SamplingParams())]
        done = sampler.generate(asked)
    for one, found in zip(asked, done, strict=True):
        check_prompt(one, found)
    check_answer(asked[1], done[1])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"logprobs": LogprobRequest(top=129)}, "logprobs.top must be a whole number from 0 to 48"),
        ({"logprobs": LogprobRequest(ids=(48,))}, "logprobs.ids must be .* from 0 to 47, not 48"),
        ({"logprobs": LogprobRequest(ids=(1,) * 129)}, "at most 128 token ids"),
        ({"logprobs": LogprobRequest(prompt=1)}, "logprobs.prompt must be True or False"),
        ({"logprobs": LogprobRequest(start=-1)}, "logprobs.start must be a whole number from 0"),
        ({"logprobs": 5}, "logprobs must be a LogprobRequest"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number from 1"),
        ({"max_new_tokens": 0, "logprobs": LogprobRequest(top=1)}, "from 1"),
    ],
)
def test_what_no_sampler_can_score_is_refused(changes: dict, problem: str) -> None:
    with make_sampler() as sampler, pytest.raises(RolloutError, match=problem):
        sampler.generate([request(1, **changes)])


def test_a_prompt_that_is_only_scored_may_fill_the_sampler() -> None:
    whole = scoring(1, token_ids=np.arange(64, dtype=np.int32) % VOCAB)
    with make_sampler() as sampler:
        check_prompt(whole, sampler.generate([whole])[0])
        one = scoring(2, token_ids=whole.token_ids[:1])
        assert np.isnan(sampler.generate([one])[0].prompt_logprobs.logprobs).all()
        with pytest.raises(RolloutError, match="the prompt has 65 tokens"):
            sampler.generate([replace(whole, token_ids=np.zeros(65, np.int32))])


@pytest.mark.full
def test_the_likeliest_are_those_of_a_whole_sort_also_where_many_are_equal() -> None:
    rng = np.random.default_rng(0)
    for vocab, k in ((48, 5), (3000, 8), (3001, 8), (5000, 8), (40_000, 128)):
        logits = rng.integers(-3, 3, (7, vocab)).astype(np.float32)
        logits[0], logits[1, 5:] = 0, -np.inf
        logits[2] = rng.normal(size=vocab)
        logits[3:5] = 0  # the largest in blocks of their own, and one after equal ones
        logits[3, np.arange(k) * (vocab // k)], logits[4, -1] = np.arange(1, k + 1), 5
        ids, values = likeliest(jnp.asarray(logits), k)
        wanted = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
        assert np.asarray(ids).tolist() == wanted.tolist()
        assert np.asarray(values).tolist() == np.take_along_axis(logits, wanted, -1).tolist()


def test_the_head_is_applied_to_a_few_tokens_at_a_time(monkeypatch) -> None:
    """23 of 30 tokens are scored, 8 at a time: the last of four turns is left out."""
    monkeypatch.setattr(token_scores, "MOST_LOGITS", 8 * VOCAB)
    rng, n, count = np.random.default_rng(0), 30, 23
    x = rng.normal(size=(n, 32)).astype(np.float32)
    indices, targets = rng.permutation(n), rng.integers(0, VOCAB, n)
    rows, ids = rng.integers(0, 3, n), rng.integers(0, VOCAB, (3, 8))
    given = ScoreArgs(*(v.astype(np.int32) for v in (indices, np.array(count), targets, rows, ids)))
    with make_sampler(cpu_kernels=False) as sampler:
        spec, weights = sampler.engine.spec, sampler.engine.prepare(PARAMS)
    found = token_scores.token_scores(spec, weights, jnp.asarray(x), given, 8)
    logits = np.asarray(next_logits(SPEC, weights.params, jnp.asarray(x)), np.float64)[indices]
    wanted = (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[:count]
    ours = PositionLogprobs(
        logprobs=np.asarray(found.logprobs),
        top_ids=np.asarray(found.named.top_ids),
        top_logprobs=np.asarray(found.named.top_logprobs),
        id_logprobs=np.asarray(found.named.id_logprobs),
    )
    order = np.argsort(-wanted, axis=-1)[:, :8]
    assert ours.part(slice(count)).top_ids.tolist() == order.tolist()
    for values, expected in (
        (ours.logprobs, wanted[np.arange(count), targets[:count]]),
        (ours.top_logprobs, np.take_along_axis(wanted, order, -1)),
        (ours.id_logprobs, np.take_along_axis(wanted, ids[rows[:count]], -1)),
    ):
        np.testing.assert_allclose(values[:count], expected, atol=CLOSE, rtol=0)
    assert not ours.logprobs[24:].any(), "the fourth turn has no token to score"


@pytest.mark.full
@pytest.mark.parametrize("kernels", [True, False])
def test_the_logits_of_a_long_prompt_are_never_in_memory_together(kernels: bool) -> None:
    """4,096 tokens of 151,936 have 2.3 GiB of logits in float32. A scoring prefill has 64 MiB of
    them at a time, and what computes the largest and the sums of these."""
    vocab = 151_936
    sizes = schema.ArchitectureSection(layers=1, width=32, heads=4, kv_heads=2, head_dim=8, mlp=64)
    spec = ModelSpec.from_architecture(sizes, vocab)
    section = schema.SamplerSection(
        slots=2, max_length=4096, max_new_tokens=8, prefill_chunk=4096, cpu_kernels=kernels
    )
    engine = build_setup(spec, section, None, 0, SamplerSettings()).engine
    table = weight_table(spec)
    params = jax.tree.map(
        lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float32),
        table,
        is_leaf=lambda w: isinstance(w, Weight),
    )
    weights = jax.eval_shape(engine.programs.prepare, params)
    size = (prefill_sizes(engine.spec, 4096) or [Sizes(1, 4096, 4096, 0)])[-1]
    chunk = make_chunk([], size, engine.spec).args
    n = len(chunk.token_ids)
    given = np.zeros(n, np.int32)
    scored = ScoreArgs(
        given, np.int32(n), given, given, np.zeros((len(chunk.lengths), 8), np.int32)
    )
    state = jax.eval_shape(engine.programs.empty)
    lowered = engine.programs.score.lower(weights, state.kv, chunk, (), scored, top=32)
    memory = lowered.compile().memory_analysis()
    of_attention = 0 if kernels else 4 * 4096**2 * 4 * 3  # XLA's own holds scores of 4 heads
    assert n == 4096 and memory.temp_size_in_bytes < 3 * 2**26 + of_attention


def test_a_continued_answer_and_a_prompt_of_the_same_tokens_are_scored_apart() -> None:
    """The answer was saved without log-probs of its prompt; its resumed request asks for them."""
    asked = request(4, max_new_tokens=8, stop_token_ids=(), sampling=SamplingParams())
    req = LogprobRequest(prompt=True)
    with make_sampler() as sampler:
        (done,) = sampler.generate([asked])
        saved = Partial(request=replace(asked, logprobs=req), seed=0, **done.first(5, 0).columns)
        whole = np.concatenate([asked.token_ids, done.token_ids[:5]])
        fresh = request(5, token_ids=whole, logprobs=req)
        for order in ([saved, fresh], [fresh, saved]):
            answers = dict(zip(map(id, order), sampler.resume(order), strict=True))
            check_prompt(saved.request, answers[id(saved)])
            check_prompt(fresh, answers[id(fresh)])


@pytest.mark.full
def test_cancelled_scores_leave_nothing_behind() -> None:
    with make_sampler(prefill_chunk=2) as sampler:
        futures = sampler.start_many([scoring(i) for i in range(12)])
        for future in futures[::2]:
            future.cancel()
        for number in range(1, 12, 2):
            check_prompt(scoring(number), futures[number].result(60))
        sampler.between_blocks(sampler.loop.batch.check_integrity)
        assert not sampler.loop.batch.admitted and not len(sampler.loop.batch.queue)
