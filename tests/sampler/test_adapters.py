"""Several adapters beside one base: each request is drawn with its own, whatever decodes beside it,
and whatever is loaded, swapped and unloaded meanwhile."""

import asyncio
import dataclasses
from contextlib import nullcontext
from functools import lru_cache, partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import PARAMS, SECTION, SPEC, VOCAB, Held, request

from jaxrl_async.config import schema
from jaxrl_async.config.lora_section import LoraSection
from jaxrl_async.errors import ConfigError, RolloutError, WeightsError
from jaxrl_async.mesh import make_mesh
from jaxrl_async.model.adapter_stack import AdapterRoom
from jaxrl_async.model.decoder import TokenRows, init_params, init_table
from jaxrl_async.model.logprobs import token_logprobs
from jaxrl_async.model.lora import Lora, adapter_table, joined, lora_of, merged
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.sampler.adapter_sources import AdapterChange
from jaxrl_async.sampler.adapters import AdapterChanges
from jaxrl_async.sampler.batch.adapter_slots import AdapterSlots, LoadedAdapter
from jaxrl_async.sampler.probe import Probe
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings, kv_plan
from jaxrl_async.sampler.swap import SwapCheck
from jaxrl_async.types import Completion, SamplingParams

MOE = ModelSpec.from_architecture(
    schema.ArchitectureSection(
        family="qwen3_moe", layers=2, width=32, heads=4, kv_heads=2, head_dim=8, mlp=32, experts=4
    ),
    VOCAB,
)
SPECS = {"llama": SPEC, "qwen3_moe": MOE}
ROOM = AdapterRoom(places=8, rank=4)
NAMES = tuple("abcdefgh")


@lru_cache(maxsize=4)
def base(family: str):
    return PARAMS if family == "llama" else init_params(MOE, jax.random.key(0))


def lora(spec: ModelSpec, rank: int = 4, targets="all-linear") -> Lora:
    found = lora_of(spec, LoraSection(rank=rank, alpha=8, targets=targets))
    assert found is not None
    return found


def adapter(spec: ModelSpec, how: Lora, seed: int):
    """An adapter that changes what is drawn."""
    made = init_table(adapter_table(spec, how), jax.random.key(seed), np.float32)
    grown = jax.tree.map(lambda x: x + 0.2 * jax.random.normal(jax.random.key(seed), x.shape), made)
    return how, grown


def make(family: str = "llama", room: AdapterRoom | None = ROOM, mesh=None, **changes) -> Sampler:
    section = SECTION.model_copy(update=changes)
    policy = (SPECS[family], base(family))
    return Sampler(policy, section=section, mesh=mesh, settings=SamplerSettings(adapters=room))


def req(number: int, name: str = "", **more):
    return request(number, request_id=f"{name}/{number}", adapter=name, **more)


def alone(family: str, given: tuple, requests: list) -> list[Completion]:
    """What a sampler draws whose weights have this one adapter added."""
    params = merged(SPECS[family], given[0], base(family), given[1])
    with Sampler((SPECS[family], params), section=SECTION) as sampler:
        return sampler.generate([dataclasses.replace(w, adapter="") for w in requests])


def same(one: Completion, other: Completion) -> None:
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert one.stop == other.stop
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.full
@pytest.mark.exhaustive
@pytest.mark.parametrize("family", [pytest.param("llama"), "qwen3_moe"])
def test_eight_adapters_in_one_block_draw_what_each_draws_alone(family: str) -> None:
    spec = SPECS[family]
    ranks = (4, 1, 4, 2, 3, 4, 4, 4)
    made = {
        n: adapter(spec, lora(spec, r, ("q_proj", "down_proj") if n == "c" else "all-linear"), i)
        for i, (n, r) in enumerate(zip(NAMES, ranks, strict=True))
    }
    with make(family, slots=12) as sampler:
        for name, one in made.items():
            assert sampler.adapters.load(name, one) == 0
        requests = [req(i, name) for i in range(3) for name in ("", *NAMES)]
        mixed = dict(zip([w.request_id for w in requests], sampler.generate(requests), strict=True))
    differ = {tuple(mixed[f"{n}/1"].token_ids.tolist()) for n in ("", *NAMES)}
    assert len(differ) == 9, "each draws something of its own"
    some = NAMES if family == "llama" else NAMES[:3]
    for name in some:
        of_it = [w for w in requests if w.adapter == name]
        for w, expected in zip(of_it, alone(family, made[name], of_it), strict=True):
            same(mixed[w.request_id], expected)
    with Sampler((spec, base(family)), section=SECTION) as plain:
        for done in plain.generate([w for w in requests if not w.adapter]):
            same(mixed[done.request_id], done)


@pytest.mark.full
@pytest.mark.exhaustive
def test_on_a_mesh_they_draw_the_same() -> None:
    one = adapter(SPEC, lora(SPEC), 3)
    requests = [req(i, "a" if i % 2 else "") for i in range(4)]
    mesh = make_mesh(schema.AxesSection(tensor=2), jax.devices()[:2])
    done = []
    for where in (None, mesh):
        with make(room=AdapterRoom(places=2, rank=4), mesh=where) as sampler:
            sampler.adapters.load("a", one)
            done.append(sampler.generate(requests))
    for here, there in zip(*done, strict=True):
        same(here, there)


def long(number: int, name: str):
    free = {"sampling": SamplingParams(), "stop_token_ids": (), "max_new_tokens": 24}
    return req(number, name, token_ids=np.arange(1, 18, dtype=np.int32) + number, **free)


def swapped_midway(mode: str):
    """Two adapters decode; one of them is swapped between two blocks, or not."""
    made = {n: adapter(SPEC, lora(SPEC), i) for i, n in enumerate(("a", "b", "new"))}
    answers = []
    for swaps in (False, True):
        with make(on_new_weights=mode) as sampler:
            for name in ("a", "b"):
                sampler.adapters.load(name, made[name])
            held = Held(sampler, 4)
            futures = sampler.start_many([long(i, n) for i, n in enumerate(("a", "b", "a", "b"))])
            load = partial(sampler.adapters.load, "a", made["new"], version=5)
            assert held.meanwhile(*[load] * swaps) == [5] * swaps
            done = [f.result(60) for f in futures]
            after = sampler.generate([long(9, "a"), long(9, "b")])
            answers.append((done, after, sampler.stats()))
    return made, *answers


@pytest.mark.full
@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["continue", "recompute", "drain", "restart"])
def test_a_swap_of_one_changes_no_bit_of_the_others(mode: str) -> None:
    made, (before, _, _), (done, after, stats) = swapped_midway(mode)
    assert stats.swaps == 1
    for i in (1, 3):
        assert set(done[i].versions.tolist()) == {0}
        assert done[i].token_ids.tolist() == before[i].token_ids.tolist()
        if mode in ("continue", "recompute"):  # others keep their rows
            np.testing.assert_array_equal(done[i].logprobs, before[i].logprobs)
        else:
            np.testing.assert_allclose(done[i].logprobs, before[i].logprobs, atol=2e-5)
    versions = [set(done[i].versions.tolist()) for i in (0, 2)]
    expected = {"continue": {0, 5}, "recompute": {0, 5}, "drain": {0}, "restart": {5}}[mode]
    assert versions == [expected] * 2
    assert set(after[0].versions.tolist()) == {5} and set(after[1].versions.tolist()) == {0}
    (fresh,) = alone("llama", made["new"], [long(9, "a")])
    same(after[0], fresh)
    if mode == "restart":
        same(done[0], alone("llama", made["new"], [long(0, "a")])[0])
    if mode == "drain":
        same(done[0], before[0])


@pytest.mark.full
def test_no_kv_goes_from_one_adapter_to_another() -> None:
    """Nor from one version to the next; within one it is found again, and shared in a group."""
    prompt = {"token_ids": np.arange(1, 34, dtype=np.int32), "max_new_tokens": 3}
    made = {n: adapter(SPEC, lora(SPEC), i) for i, n in enumerate(("a", "b", "new"))}
    with make() as sampler:
        for name in ("a", "b"):
            sampler.adapters.load(name, made[name])
        for name in ("", "a", "b"):
            sampler.generate([req(1, name, **prompt)])
        assert sampler.stats().prefix_hit_tokens == 0
        again = sampler.generate([req(1, "a", **prompt)])
        assert sampler.stats().prefix_hit_tokens == 32
        same(again[0], alone("llama", made["a"], [req(1, "a", **prompt)])[0])
        before = sampler.stats().prefill_tokens
        group = [req(2 + m, n, **prompt) for n in ("a", "b") for m in range(2)]
        sampler.adapters.load("a", made["new"])
        sampler.generate(group)
        assert sampler.stats().prefill_tokens - before == 33 + 1, "a's new KV, and b's last token"
        sampler.adapters.unload("b")
        sampler.adapters.load("b", made["new"])
        assert sampler.adapters.loaded() == {"a": 1, "b": 1}, "no version of a name comes twice"
        hits = sampler.stats().prefix_hit_tokens
        sampler.generate([req(1, "b", **prompt)])
        assert sampler.stats().prefix_hit_tokens == hits
        sampler.between_blocks(sampler.loop.batch.check_integrity)


@pytest.mark.full
@pytest.mark.exhaustive
def test_a_saved_request_goes_on_with_its_adapter() -> None:
    made = {n: adapter(SPEC, lora(SPEC), i) for i, n in enumerate(("a", "b"))}
    with make(block=2, prefix_cache=False) as sampler:
        for name, one in made.items():
            sampler.adapters.load(name, one)
        (whole,) = sampler.generate([long(1, "a")])
        held = Held(sampler, 1)
        future = sampler.start_many([long(1, "a")])[0]
        (saved,) = held.meanwhile(lambda: sampler.save("a/1", stop=True))
        future.result(60)
        assert saved.request.adapter == "a" and saved.kv is not None
        before = sampler.stats().prefill_tokens
        (done,) = sampler.resume([saved])
        assert sampler.stats().prefill_tokens - before == 1, "its KV was restored"
        same(done, whole)
        sampler.adapters.load("a", made["b"])
        (other,) = sampler.resume([saved])
        assert set(other.versions[len(saved.token_ids) :].tolist()) == {1}


@pytest.mark.full
def test_names_and_adapters_are_checked_where_they_come_in() -> None:
    one = adapter(SPEC, lora(SPEC), 0)
    with make(room=AdapterRoom(places=1, rank=4)) as sampler:
        with pytest.raises(RolloutError, match="'x' is not loaded here; loaded are: none"):
            sampler.generate([req(1, "x")])
        sampler.adapters.load("a", one)
        with pytest.raises(RolloutError, match="loaded are: a"):
            sampler.generate([req(1, "x")])
        with pytest.raises(RolloutError, match="adapter must be text"):
            sampler.generate([dataclasses.replace(req(1), adapter=3)])
        with pytest.raises(ConfigError, match="all 1 places are taken, by a"):
            sampler.adapters.load("b", one)
        with pytest.raises(ConfigError, match="rank 5, but the maximum rank is 4"):
            sampler.adapters.load("b", adapter(SPEC, lora(SPEC, 5), 0))
        with pytest.raises(ConfigError, match="version 0 is not newer than version 0"):
            sampler.adapters.load("a", one, version=0)
        poisoned = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(np.nan), one[1])
        with pytest.raises(ConfigError, match="not finite"):
            sampler.adapters.load("a", (one[0], poisoned))
        with pytest.raises(ConfigError, match="belongs to another model"):
            bad = jax.tree.map(lambda x: x[:1], one[1])
            sampler.adapters.load("a", (one[0], bad))
        for scale in (np.inf, 1e300, np.nan):
            with pytest.raises(ConfigError, match="not finite"):
                grown = dataclasses.replace(one[0], scale=scale)
                sampler.adapters.load("a", (grown, one[1]))
        for version in ("1", -1, 1.0, 2**31, True):
            with pytest.raises(ConfigError, match="version must be a whole number"):
                sampler.adapters.load("a", one, version=version)
        with pytest.raises(ConfigError, match="has no probe to compare"):
            sampler.adapters.load("a", one, probe_logprobs=np.zeros(7, np.float32))
        with pytest.raises(RolloutError, match="1 to 256 printable"):
            sampler.adapters.load("", one)
        with pytest.raises(RolloutError, match="'b' is not loaded"):
            sampler.adapters.unload("b")
        assert sampler.adapters.loaded() == {"a": 0}
    with make(room=None) as sampler:
        with pytest.raises(RolloutError, match="no places for adapters"):
            sampler.generate([req(1, "a")])
        with pytest.raises(ConfigError, match="no places for adapters"):
            sampler.adapters.load("a", one)
    settings = SamplerSettings(adapters=ROOM)
    with pytest.raises(ConfigError, match="base that never changes"):
        Sampler((SPEC, PARAMS), section=SECTION, settings=settings, weights=_changing())
    with pytest.raises(ConfigError, match="takes a policy without an adapter"):
        Sampler((SPEC, joined(one[0], PARAMS, one[1])), section=SECTION, settings=settings)


def _changing():
    class Changing:
        pass

    return Changing()


@pytest.mark.full
@pytest.mark.exhaustive
def test_an_adapter_in_use_is_unloaded_after_its_last_request() -> None:
    one = adapter(SPEC, lora(SPEC), 0)
    with make(block=1) as sampler:
        sampler.adapters.load("a", one)
        futures = sampler.start_many([long(i, "a") for i in range(6)])
        with pytest.raises(TimeoutError, match="nothing has changed"):
            sampler.adapters.unload("a", timeout_s=0.0)
        assert sampler.adapters.loaded() == {"a": 0}, "it takes requests again"
        sampler.adapters.unload("a")
        assert all(f.done() and len(f.result().token_ids) == 24 for f in futures)
        with pytest.raises(RolloutError, match="not loaded"):
            sampler.generate([req(1, "a")])


def test_two_unloads_of_one_adapter_take_no_requests_until_both_are_answered() -> None:
    slots, check = AdapterSlots(2), SwapCheck(SPEC, np.float32, None, nullcontext())
    slots.put(LoadedAdapter(name="a", slot=1))
    changes = AdapterChanges(None, check, slots, mode="continue", device_lock=nullcontext())
    first, second = (AdapterChange(name="a", params=None) for _ in range(2))
    changes.stage(first)
    changes.stage(second)
    changes.withdraw(second)
    with pytest.raises(RolloutError, match="being unloaded"):
        slots.check("a", "request")
    changes.withdraw(first)
    slots.check("a", "request")


def test_a_request_that_was_checked_before_its_adapter_left_is_refused_not_lost() -> None:
    """An unload waits for what is queued; what comes later must not be."""
    with make(room=AdapterRoom(places=1, rank=4, targets=["q_proj"])) as sampler:
        sampler.adapters.load("a", adapter(SPEC, lora(SPEC, targets=("q_proj",)), 0))
        start = sampler.lifetime.start

        def leaves_meanwhile() -> None:
            sampler.setup.adapter_slots.leave("a", leaving=True)
            start()

        sampler.lifetime.start = leaves_meanwhile
        with pytest.raises(RolloutError, match="being unloaded"):
            sampler.start_many([req(1), req(1, "a")])
        assert not sampler.loop.inbox.requests(), "all or none"


MODES = ("continue", "recompute", "drain", "restart")
steps = st.lists(
    st.tuples(
        st.sampled_from(("ask", "ask", "ask", "swap", "unload", "cancel", "group")),
        st.sampled_from(NAMES[:3]),
        st.integers(0, 11),
    ),
    min_size=4,
    max_size=14,
)


@pytest.mark.full
def test_a_probe_refuses_an_adapter_that_computes_something_else() -> None:
    one = adapter(SPEC, lora(SPEC), 0)
    ids = np.arange(1, 9, dtype=np.int32)
    params = merged(SPEC, one[0], PARAMS, one[1])
    rows = TokenRows(ids[None], np.arange(8)[None], np.ones_like(ids)[None])
    right = np.asarray(token_logprobs(SPEC, params, rows).logprobs[0, 1:])
    chosen = SamplerSettings(adapters=ROOM, probe=Probe(token_ids=ids, tolerance=1e-3))
    with Sampler((SPEC, PARAMS), section=SECTION, settings=chosen) as sampler:
        with pytest.raises(WeightsError, match="the sampler's log-probs on the probe"):
            sampler.adapters.load("a", one, probe_logprobs=right + 0.1)
        with pytest.raises(ConfigError, match=r"numbers of shape \(7,\)"):
            sampler.adapters.load("a", one, probe_logprobs=right[:3])
        assert sampler.adapters.loaded() == {}
        sampler.adapters.load("a", one, probe_logprobs=right)
        assert sampler.adapters.loaded() == {"a": 0}


@lru_cache(maxsize=16)
def weights(name: str):
    """All versions of a name are alike, so that a request's tokens do not depend on the moment."""
    return adapter(SPEC, lora(SPEC), NAMES.index(name))


@lru_cache(maxsize=64)
def expected(name: str, number: int, member: int) -> Completion:
    (done,) = reference(name).generate([request(number, key=(number, member))])
    return done


@lru_cache(maxsize=4)
def reference(name: str) -> Sampler:
    params = merged(SPEC, weights(name)[0], PARAMS, weights(name)[1]) if name else PARAMS
    return Sampler((SPEC, params), section=SECTION)


async def play(sampler: Sampler, plan: list) -> list[tuple[str, int, int, Completion]]:
    waiting: list[tuple[str, int, int, asyncio.Future]] = []
    answers = []
    for i, (what, name, number) in enumerate(plan):
        loaded = sampler.adapters.loaded()
        if what == "swap" or (what != "unload" and name not in loaded):
            await asyncio.to_thread(sampler.adapters.load, name, weights(name))
        elif what == "unload" and name in loaded:
            leaving = asyncio.create_task(asyncio.to_thread(sampler.adapters.unload, name))
            await leaving
        if what in ("swap", "unload"):
            continue
        members = 3 if what == "group" else 1
        names = (name, "") if what == "ask" else (name,)
        asked = [
            request(number, request_id=f"{i}/{n}/{m}", key=(number, m), adapter=n)
            for n in names
            for m in range(members)
        ]
        futures = sampler.submit_many(asked)
        if what == "cancel":
            await asyncio.sleep(0.002)
            futures.pop().cancel()
        waiting += [(a.adapter, number, a.key[1], f) for a, f in zip(asked, futures, strict=False)]
        if len(waiting) > 9:
            answers += [(n, k, m, await f) for n, k, m, f in waiting[:3]]
            del waiting[:3]
    return answers + [(n, k, m, await f) for n, k, m, f in waiting]


@pytest.mark.full
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mode", "more"),
    [*((mode, {}) for mode in MODES), ("continue", {"attention": "ragged"})],
)
def test_in_any_traffic_each_draws_what_its_adapter_draws_alone(
    mode: str, more: dict[str, str]
) -> None:
    padding = 16 if more else 1  # of a TPU's heads, to 128
    room = AdapterRoom(places=3, rank=4)
    places = kv_plan(SPEC, SECTION, "float32", room).places_bytes
    crowded = make(
        room=room,
        kv_memory_mib=(places + padding * 6 * 16 * 2 * 2 * 2 * 8 * 4) / 2**20,
        prefill_chunk=24,
        on_new_weights=mode,
        **more,
    )

    @settings(max_examples=8, deadline=None, derandomize=True)
    @given(plan=steps)
    def holds(plan: list) -> None:
        for name, number, member, done in asyncio.run(play(crowded, plan)):
            same(done, expected(name, number, member))
            assert (np.diff(done.versions) >= 0).all()
        crowded.between_blocks(crowded.loop.batch.check_integrity)

    with crowded:
        holds()
        stats = crowded.stats()
        assert stats.preempted > 0 and stats.swaps > 0 and stats.prefix_hit_tokens > 0
        assert stats.cancelled > 0


@pytest.mark.full
@pytest.mark.exhaustive
def test_nothing_is_compiled_after_the_first_adapter_has_answered() -> None:
    made = [adapter(SPEC, lora(SPEC, r), r) for r in (1, 2, 3, 4)]
    with make() as sampler:
        compiled = []
        for i in range(8):
            sampler.adapters.load(f"n{i}", made[i % 4])
            sampler.generate([req(3, f"n{i}", sampling=SamplingParams())])
            compiled.append(sampler.engine.num_compiled)
        sampler.adapters.load("n1", made[0])
        sampler.adapters.unload("n2")
        sampler.adapters.load("other", made[1])
        sampler.generate([req(3, "other", sampling=SamplingParams())])
        assert {*compiled, sampler.engine.num_compiled} == {compiled[0]}
