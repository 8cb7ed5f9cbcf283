"""The sampler: whatever the neighbours, slots, swaps and cancellations, a request's tokens are its
own."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import Script
from whole_rows import logprobs_of

from jaxrl_async.config import schema
from jaxrl_async.errors import Closed, RolloutError, WeightsError
from jaxrl_async.mesh import make_slices
from jaxrl_async.model.decoder import DecoderSettings, init_params
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.rollout.env import SingleTurn
from jaxrl_async.rollout.episode import SavedEpisode, begin_groups, play_group
from jaxrl_async.rollout.quorum import Quota
from jaxrl_async.sampler.batch.finish import ended
from jaxrl_async.sampler.probe import Probe
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings
from jaxrl_async.testing.fakes import make_prompt
from jaxrl_async.types import (
    Completion,
    EpisodeLimits,
    Request,
    SamplingParams,
    StopReason,
    VersionedParams,
)

pytestmark = pytest.mark.full

SPEC = ModelSpec.from_architecture(
    schema.ArchitectureSection(layers=2, width=32, heads=4, kv_heads=2, head_dim=8, mlp=64), 48
)
PARAMS = init_params(SPEC, jax.random.key(0))
OTHER = init_params(SPEC, jax.random.key(1))
SECTION = schema.SamplerSection(slots=4, max_length=64, max_new_tokens=32, block=4)


@pytest.fixture
def sampler() -> Iterator[Sampler]:
    sampler = Sampler((SPEC, PARAMS), section=SECTION)
    yield sampler
    sampler.close()


def request(number: int, **changes: object) -> Request:
    random = np.random.default_rng(number)
    base: dict = {
        "request_id": f"g{number}/m0/t0",
        "token_ids": random.integers(0, 48, random.integers(3, 20)).astype(np.int32),
        "max_new_tokens": int(random.integers(4, 30)),
        "key": (number, 0),
    }
    return Request(**{**base, **changes})


def mixed() -> list[Request]:
    """Greedy, plain and truncated requests of many lengths, more than there are slots."""
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, top_k=8),
        SamplingParams(top_p=0.8, min_p=0.02),
    ]
    return [request(i, sampling=kinds[i % 4]) for i in range(14)]


def assert_same(first: Completion, second: Completion) -> None:
    assert first.token_ids.tolist() == second.token_ids.tolist()
    np.testing.assert_allclose(first.logprobs, second.logprobs, atol=1e-5)


def test_a_request_alone_gives_what_it_gives_in_a_crowd(sampler: Sampler) -> None:
    crowd = sampler.generate(mixed())
    for req, together in zip(mixed(), crowd, strict=True):
        assert_same(together, sampler.generate([req])[0])


def test_the_same_requests_run_twice_give_the_same_bits(sampler: Sampler) -> None:
    for first, second in zip(sampler.generate(mixed()), sampler.generate(mixed()), strict=True):
        assert first.token_ids.tolist() == second.token_ids.tolist()
        assert first.logprobs.tobytes() == second.logprobs.tobytes()


def test_members_of_a_group_differ_and_share_one_prefill(sampler: Sampler) -> None:
    prompt = request(1).token_ids
    requests = [request(1, key=(1, m), max_new_tokens=20, token_ids=prompt) for m in range(4)]
    sampled = {tuple(c.token_ids) for c in sampler.generate(requests)}
    assert len(sampled) == 4
    assert sampler.stats().prefill_tokens == len(prompt)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_a_full_forward_pass(sampler: Sampler, temperature: float) -> None:
    requests = [request(i, sampling=SamplingParams(temperature=temperature)) for i in range(5)]
    for req, done in zip(requests, sampler.generate(requests), strict=True):
        ids = np.concatenate([req.token_ids, done.token_ids])
        logprobs = logprobs_of(SPEC, PARAMS, ids, DecoderSettings(temperature=temperature))
        np.testing.assert_allclose(done.logprobs, logprobs[len(req.token_ids) :], atol=1e-5)


def test_a_swap_in_mid_sequence_marks_each_token_with_the_weights_of_its_logits() -> None:
    source = Script([VersionedParams(version=3, params=OTHER)])
    sampler = Sampler((SPEC, PARAMS), section=SECTION, weights=source)
    req = request(5, max_new_tokens=24, sampling=SamplingParams(temperature=0.0))
    done = sampler.generate([req])[0]
    compiled = sampler.stats().compiled_programs
    versions = done.versions.tolist()
    swap = versions.index(3)
    assert 0 < swap < 24 and versions == [0] * swap + [3] * (24 - swap)
    assert source.went_live == [3]
    assert (swap - 1) % SECTION.block == 0, "the first token after a swap has old logits"
    old = Sampler((SPEC, PARAMS), section=SECTION)
    assert done.token_ids[:swap].tolist() == old.generate([req])[0].token_ids[:swap].tolist()
    old.close()
    source.updates.append(VersionedParams(version=4, params=PARAMS))
    assert set(sampler.generate([req])[0].versions.tolist()) == {4}
    assert sampler.stats().compiled_programs == compiled, "a swap must not recompile"
    assert sampler.stats().swaps == 2
    sampler.close()


def test_weights_that_disagree_on_the_probe_stop_the_sampler_with_a_reason() -> None:
    probe = Probe(token_ids=np.arange(8, dtype=np.int32), tolerance=1e-3)
    wrong = VersionedParams(version=1, params=OTHER, probe_logprobs=jnp.zeros(7))
    settings = SamplerSettings(probe=probe)
    sampler = Sampler((SPEC, PARAMS), section=SECTION, weights=Script([wrong]), settings=settings)
    with pytest.raises(WeightsError, match="probe"):
        sampler.generate([request(1, max_new_tokens=30)])
    assert isinstance(sampler.error, WeightsError)
    sampler.close()


def test_a_request_whose_end_raises_fails_alone(monkeypatch) -> None:
    sampler = Sampler((SPEC, PARAMS), section=SECTION)
    requests = [request(i, max_new_tokens=6, stop_token_ids=()) for i in range(2)]
    sampler.generate(requests[:1])
    gone = []

    def fails_on_the_second(batch, sequence):
        gone.append(sequence)
        if len(gone) == 2:
            raise RuntimeError("injected")
        return ended(batch, sequence)

    monkeypatch.setattr("jaxrl_async.sampler.decode_loop.ended", fails_on_the_second)
    futures = sampler.start_many([replace(w, request_id=f"again {w.request_id}") for w in requests])
    assert len(futures[0].result(timeout=60).token_ids) == 6
    with pytest.raises(RuntimeError, match="injected"):
        futures[1].result(timeout=60)
    assert len(sampler.generate(requests)) == 2 and sampler.stats().failed == 1
    sampler.between_blocks(sampler.loop.batch.check_integrity)
    sampler.close()


def test_a_stop_token_ends_a_completion_and_is_its_last_token(sampler: Sampler) -> None:
    req = request(2, max_new_tokens=30, sampling=SamplingParams(temperature=0.0))
    free = sampler.generate([req])[0]
    stop = int(free.token_ids[5])
    first = free.token_ids.tolist().index(stop)
    again = request(2, max_new_tokens=30, sampling=req.sampling, stop_token_ids=(stop,))
    stopped = sampler.generate([again])[0]
    assert stopped.token_ids.tolist() == free.token_ids[: first + 1].tolist()
    assert (stopped.stop, free.stop) == (StopReason.EOS, StopReason.LENGTH)


def test_forced_lengths_ignore_stop_tokens(sampler: Sampler) -> None:
    req = request(2, forced_length=17, stop_token_ids=tuple(range(8)))
    assert len(sampler.generate([req])[0].token_ids) == 17


def test_prompt_and_answer_may_fill_the_slot(sampler: Sampler) -> None:
    req = request(3, token_ids=np.arange(48, dtype=np.int32) % 48, max_new_tokens=16)
    done = sampler.generate([req])[0]
    assert len(done.token_ids) == 16 and done.stop is StopReason.LENGTH


def test_an_answer_that_cannot_be_so_long_is_refused_not_cut(sampler: Sampler) -> None:
    """With the setting's name, and what would fit."""
    with pytest.raises(RolloutError, match=r"sampler.max_length \(64\). Ask for at most 16"):
        sampler.generate([request(3, token_ids=np.zeros(48, np.int32), max_new_tokens=20)])
    for field in ("max_new_tokens", "forced_length"):
        with pytest.raises(RolloutError, match=rf"{field} is 33, more than sampler.max_new_tokens"):
            sampler.generate([request(3, **{field: 33})])


def test_a_sampler_without_settings_draws_as_much_as_is_asked_within_the_models_length() -> None:
    with Sampler((replace(SPEC, max_positions=300), PARAMS)) as sampler:
        req = request(3, max_new_tokens=200, stop_token_ids=())
        assert len(sampler.generate([req])[0].token_ids) == 200
        with pytest.raises(RolloutError, match=r"max_length \(300\)"):
            sampler.generate([request(3, max_new_tokens=299)])


def test_samples_of_one_prompt_differ_unless_their_keys_are_equal() -> None:
    prompt = np.arange(5, dtype=np.int32)
    requests = [Request(request_id=f"s{i}", token_ids=prompt, max_new_tokens=12) for i in range(4)]
    sampled = []
    for _ in range(2):  # the keys come from the seed and a counter
        with Sampler((SPEC, PARAMS), section=SECTION) as sampler:
            both = [*sampler.generate(requests), *sampler.generate(requests)]
            assert len({tuple(c.token_ids) for c in both}) == 8
            same = [replace(w, key=(0, 0)) for w in requests]
            assert len({tuple(c.token_ids) for c in sampler.generate(same)}) == 1
        sampled.append([c.token_ids.tolist() for c in both])
    assert sampled[0] == sampled[1]


def test_a_prompt_that_fits_no_slot_is_refused_by_name(sampler: Sampler) -> None:
    with pytest.raises(RolloutError, match=r"g9/m0/t0.*64 tokens"):
        sampler.generate([request(9, token_ids=np.zeros(64, np.int32))])
    assert len(sampler.generate([request(1)])) == 1, "and the sampler goes on"


def test_cancelling_frees_the_slot_for_others(sampler: Sampler) -> None:
    async def scenario() -> list[Completion]:
        doomed = sampler.submit_many([request(i, max_new_tokens=32) for i in range(8)])
        for future in doomed:
            future.cancel()
        return await asyncio.gather(*sampler.submit_many([request(20 + i) for i in range(4)]))

    done = asyncio.run(scenario())
    for i, completion in enumerate(done):
        assert_same(completion, sampler.generate([request(20 + i)])[0])


def test_what_a_cancelled_request_had_drawn_is_counted(sampler: Sampler) -> None:
    tokens = np.arange(5, dtype=np.int32)
    (future,) = sampler.start_many(
        [request(1, forced_length=32, max_new_tokens=32, token_ids=tokens)]
    )

    def cancel_once_drawn() -> int:
        sampled = sum(len(p.token_ids) for p in sampler.loop.unfinished())
        return sampled if sampled and future.cancel() else 0

    while not (sampled := sampler.between_blocks(cancel_once_drawn)):
        assert not future.done(), "a command comes between two blocks"
    sampler.generate([request(2)])
    stats = sampler.stats()
    assert (stats.cancelled, stats.cancelled_tokens) == (1, sampled)


def test_with_a_slot_for_each_member_the_first_to_end_are_the_same_each_time() -> None:
    """Which ones depends on their answers alone: the sampler counts blocks, not time."""
    prompt = make_prompt(3)
    limits = EpisodeLimits(
        sampling=SamplingParams(), stop_token_ids=(1, 2, 3), max_new_tokens=30, max_length=60
    )

    async def play(sampler: Sampler) -> list[list[int]]:
        asked = [("g3", prompt, [SavedEpisode()] * 4)]
        (members,) = begin_groups(sampler, SingleTurn, asked, limits)
        quota = Quota(wanted=2, least=2)
        episodes = await play_group(
            sampler, prompt, members, label="g3", limits=limits, quota=quota
        )
        return [e.token_ids.tolist() for e in episodes]

    sampled = []
    for _ in range(2):
        sampler = Sampler((SPEC, PARAMS), section=SECTION)
        sampled.append(asyncio.run(play(sampler)))
        sampler.close()
    assert sampled[0] == sampled[1] and len(sampled[0]) == 2


def test_closing_wakes_who_still_waits() -> None:
    sampler = Sampler((SPEC, PARAMS), section=SECTION)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            sampler.generate([request(i, max_new_tokens=32) for i in range(200)])
        except Closed as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not sampler.stats().blocks:
        pass
    sampler.close()
    thread.join(30)
    assert len(errors) == 1
    with pytest.raises(Closed):
        sampler.generate([request(1)])


@pytest.mark.exhaustive
def test_a_sampler_sharded_over_four_devices_draws_the_same_tokens(sampler: Sampler) -> None:
    mesh = make_slices(schema.MeshSection(sampler=schema.AxesSection(tensor=4))).sampler
    sharded = Sampler((SPEC, PARAMS), section=SECTION, mesh=mesh)
    for one, many in zip(sampler.generate(mixed()), sharded.generate(mixed()), strict=True):
        assert_same(one, many)
    sharded.close()


@pytest.mark.exhaustive
def test_a_thousand_requests_leave_nothing_behind(sampler: Sampler) -> None:
    threads = threading.active_count()
    done = sampler.generate([request(i, max_new_tokens=3) for i in range(1000)])
    stats = sampler.stats()
    assert len(done) == stats.requests_done == 1000
    assert not sampler.loop.batch.admitted and not sampler.loop.batch.queue
    sampler.loop.batch.check_integrity()
    assert threading.active_count() <= threads + 1
    assert stats.used_slot_steps == sum(len(c.token_ids) for c in done)


def test_a_sampler_that_starts_again_compiles_nothing() -> None:
    """Else each one that died would leave programs in memory."""
    requests = [request(i) for i in range(3)]
    for attempt in range(2):
        seen: list[str] = []

        def record(event: str, seconds: float, seen: list[str] = seen, **_: object) -> None:
            seen.append(event)

        jax.monitoring.register_event_duration_secs_listener(record)
        try:
            sampler = Sampler((SPEC, PARAMS), section=SECTION.model_copy(update={"slots": 3}))
            sampler.generate(requests)
            sampler.close()
        finally:
            jax.monitoring.unregister_event_duration_listener(record)
        compiled = [event for event in seen if "backend_compile" in event]
        assert bool(compiled) == (attempt == 0), "the same programs serve the second"
