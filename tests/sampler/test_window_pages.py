"""Layers with a window keep the pages that their window can still see, and nothing else changes."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from tiny import Held
from whole_rows import row_logprobs, row_states

from jaxrl_async.config import schema
from jaxrl_async.interop.jetstream import fixed_tables
from jaxrl_async.mesh import make_slices
from jaxrl_async.model.decoder import TokenRows, init_params, output_head
from jaxrl_async.model.logprobs import logits_of
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.sampler.device.engine_spec import EngineSpec
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import kv_plan
from jaxrl_async.types import Completion, Partial, Request, SamplingParams

pytestmark = pytest.mark.full

VOCAB, WINDOW, PAGE, LONGEST = 40, 6, 4, 96


def spec_of(family: str, layers: int) -> ModelSpec:
    shape = schema.ArchitectureSection(
        family=family, layers=layers, width=16, heads=4, kv_heads=2, head_dim=8, mlp=24,
        window=WINDOW,
    )  # fmt: skip
    return ModelSpec.from_architecture(shape, VOCAB)


def params_of(spec: ModelSpec) -> dict:
    return jax.tree.map(
        lambda w: w + 0.3 * jax.random.normal(jax.random.key(w.size), w.shape),
        init_params(spec, jax.random.key(0)),
    )


GEMMA, MISTRAL = spec_of("gemma3_text", 6), spec_of("mistral", 2)
"""Five of six layers have a window; both have one."""
PARAMS = {GEMMA: params_of(GEMMA), MISTRAL: params_of(MISTRAL)}


def sampler_of(
    spec: ModelSpec, pages: int | None = None, mesh: Mesh | None = None, **changes: object
) -> Sampler:
    """A sampler of so many pages, each of the layers of one group."""
    section = schema.SamplerSection(
        slots=4, reserve=0, max_length=LONGEST, max_new_tokens=80, block=2, page_tokens=PAGE
    ).model_copy(update=changes)
    if pages is not None:
        of_page = kv_plan(spec, section, "float32", mesh=mesh).page_bytes / 2**20
        section = section.model_copy(update={"kv_memory_mib": (pages + 0.5) * of_page})
    return Sampler((spec, PARAMS[spec]), section=section, mesh=mesh)


def request(number: int, length: int = 8, **changes: object) -> Request:
    prompt = np.random.default_rng(number).integers(0, VOCAB, length).astype(np.int32)
    base = {"token_ids": prompt, "max_new_tokens": 80, "key": (number, 0)}
    return Request(request_id=f"r{number}", **{**base, **changes})


def assert_as_trained(
    spec: ModelSpec, requests: Sequence[Request], done: Sequence[Completion]
) -> None:
    """Each log-prob is the trainer's."""
    for asked, one in zip(requests, done, strict=True):
        ids = np.zeros((1, LONGEST), np.int32)
        whole = np.concatenate([asked.token_ids, one.token_ids])
        ids[0, : len(whole)] = whole
        rows = TokenRows(*map(jnp.asarray, (ids, np.arange(LONGEST)[None], np.ones_like(ids))))
        trained = row_logprobs(spec, PARAMS[spec], rows)[0]
        begin = len(asked.token_ids)
        np.testing.assert_allclose(one.logprobs, trained[begin : len(whole)], atol=1e-5, rtol=0)


def assert_whole(sampler: Sampler) -> None:
    """No page is held but by the store."""
    batch = sampler.loop.batch
    sampler.between_blocks(batch.check_integrity)
    cache = batch.cache
    assert cache.pages.num_free + len(cache.prefixes.held) == cache.pages.count


def test_four_times_the_sequences_fit_where_five_of_six_layers_have_a_window() -> None:
    """Of 96 tokens, 24 pages of the layer that sees everything, and of five others four each."""
    section = schema.SamplerSection(
        slots=None, max_length=LONGEST, block=2, page_tokens=PAGE, reserve=0, kv_memory_mib=1
    )
    plan = kv_plan(GEMMA, section, "float32")
    assert plan.page_bytes == 2 * PAGE * GEMMA.kv_heads * GEMMA.head_dim * 4, "of one layer"
    of_all_tokens = plan.layout.keeping_all.pages_of(LONGEST, PAGE, 2)
    assert (plan.pages_of(LONGEST), of_all_tokens) == (24 + 5 * 4, 24 * 6)
    longer = plan.layout.keeping_all.pages_of(4096, PAGE, 2) / plan.pages_of(4096)
    assert longer == pytest.approx(5.89, abs=0.01), "and nearly six times of 4,096"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        *(
            pytest.param(more, marks=pytest.mark.exhaustive)
            for more in (
                {"cpu_kernels": False},
                {"attention": "ragged"},
                {"prefill_chunk": 7, "cpu_kernels": False},
            )
        ),
    ],
)
def test_four_long_answers_have_room_where_one_had(settings) -> None:
    """150 pages hold one sequence of all layers' tokens, or four that keep their windows."""
    sampler, requests = sampler_of(GEMMA, 150, **settings), [request(i) for i in range(3)]
    requests.append(request(3, 60, max_new_tokens=36))  # a prompt of ten windows
    held = []
    round_of = sampler.loop.round

    def counted(batch: object) -> bool:
        there = batch.slots.tables[:, 1:] < batch.cache.pages.count
        held.append(int(there.sum(axis=2).max()))
        return round_of(batch)

    sampler.loop.round = counted
    done = sampler.generate(requests)
    assert sampler.loop.batch.cache.pages.count == 150 and sampler.stats().preempted == 0
    assert max(held) == 4, "pages of a layer with a window"
    assert_whole(sampler)
    sampler.close()
    assert_as_trained(GEMMA, requests, done)


@pytest.mark.exhaustive
def test_two_long_answers_fit_the_pages_of_their_windows() -> None:
    """Where all layers have a window: each has 22 pages of tokens, of which it needs four."""
    sampler, requests = sampler_of(MISTRAL, 10), [request(0), request(1)]
    done = sampler.generate(requests)
    assert sampler.loop.batch.cache.pages.count == 10 and sampler.stats().preempted == 0
    assert_whole(sampler)
    sampler.close()
    assert_as_trained(MISTRAL, requests, done)


def saved_in_flight(sampler: Sampler) -> Partial:
    """Save a request in the middle of its answer."""
    held = Held(sampler, 41)
    sampler.start_many([request(0)])
    (saved,) = held.meanwhile(lambda: sampler.save("r0", with_kv=True))
    return saved


@pytest.mark.exhaustive
@pytest.mark.parametrize("spec", [GEMMA, MISTRAL])
def test_a_saved_request_brings_the_kv_of_its_windows(spec) -> None:
    """To a sampler with the same pages; with others it is prefilled again."""
    first = sampler_of(spec)
    (whole,) = first.generate([request(0)])
    saved = saved_in_flight(first)
    first.close()
    tokens = len(saved.request.token_ids) + len(saved.token_ids)
    windowed = [i for i, kind in enumerate(spec.kinds) if kind.window]
    assert saved.kv_page_tokens == PAGE and saved.kv.shape[2] == tokens
    assert not saved.kv[windowed, :, : tokens - WINDOW - 2 * PAGE].any(), "hidden"
    assert saved.kv[windowed, :, -WINDOW:].all()
    for page_tokens, computed in ((PAGE, 1), (8, tokens)):
        second = sampler_of(spec, page_tokens=page_tokens)
        (done,) = second.resume([saved])
        assert second.stats().prefill_tokens == computed
        assert_whole(second)
        forks = second.fork(saved, 3)
        assert len({tuple(f.token_ids.tolist()) for f in forks}) == 3
        assert_as_trained(spec, [request(0)] * 3, forks)
        assert_whole(second)
        second.close()
        assert done.token_ids.tolist() == whole.token_ids.tolist()
        np.testing.assert_allclose(done.logprobs, whole.logprobs, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("spec", [GEMMA, MISTRAL])
def test_prompts_that_go_on_or_begin_alike_are_found(spec) -> None:
    sampler = sampler_of(spec, prefill_chunk=16)
    first = request(0, 50, max_new_tokens=10)
    (done,) = sampler.generate([first])
    ids = np.concatenate([first.token_ids, done.token_ids, np.int32([1, 2])])
    later = request(1, token_ids=ids, max_new_tokens=5)
    answers = sampler.generate([later])
    assert sampler.stats().prefix_hit_tokens == 60, "all whole pages of prompt and answer"
    alike = request(2, token_ids=np.append(ids[:30], ids[:9]), max_new_tokens=5)
    answers += sampler.generate([alike])
    assert sampler.stats().prefix_hit_tokens == 60 + 28, "pages that the first prompt had passed"
    branched = request(3, token_ids=np.append(ids[:56], ids[:9]), max_new_tokens=5)
    answers += sampler.generate([branched])
    assert_whole(sampler)
    stats = sampler.stats()
    sampler.close()
    assert stats.prefix_hit_tokens + stats.prefix_hidden_tokens >= 60 + 28 + 48
    assert_as_trained(spec, [later, alike, branched], answers)


def test_the_pages_of_a_slot_of_jetstreams_are_written_again_once_they_are_hidden() -> None:
    spec = EngineSpec(
        model=GEMMA, slots=2, max_length=LONGEST, pages=100, page_tokens=PAGE, block=3
    )
    tables = fixed_tables(spec)
    assert tables.shape == (2, 6, 24) and tables.max() == 2 * (24 + 5 * 4) - 1
    assert len(np.unique(tables[:, 0])) == 48 and len(np.unique(tables[0, 1])) == 4
    for end in range(4, 24):  # what a block fills, and what its first token sees
        assert len(np.unique(tables[:, :, end - 4 : end])) == 2 * 6 * 4


@pytest.mark.exhaustive
@pytest.mark.parametrize("attention", ["gathered", "ragged"])
def test_samplers_over_two_devices_keep_the_same_pages(attention) -> None:
    """Pages are divided over KV heads; tables are the host's."""
    mesh = make_slices(schema.MeshSection(sampler=schema.AxesSection(tensor=2))).sampler
    sampler = sampler_of(GEMMA, 150, mesh=mesh, attention=attention)
    requests = [request(i) for i in range(3)]
    done = sampler.generate(requests)
    assert sampler.stats().preempted == 0
    assert_whole(sampler)
    sampler.close()
    assert_as_trained(GEMMA, requests, done)


@pytest.mark.exhaustive
def test_crowded_traffic_draws_what_a_greedy_loop_of_the_trainer_draws() -> None:
    """Groups, short and long ones, later turns, preempted again and again: each token is the most
    likely one after those before it, in a full pass of the trainer's decoder."""
    sampler = sampler_of(GEMMA, 80, prefill_chunk=10, reserve=0.5, slots=3)
    random, greedy = np.random.default_rng(5), SamplingParams(temperature=0.0)
    requests: list[Request] = []
    answers: list[Completion] = []
    for wave in range(4):
        new = []
        for number in range(4):
            length = int(random.integers(3, 40))
            prompt = random.integers(0, VOCAB, length).astype(np.int32)
            if wave and number < 2:  # goes on from an answer, or begins like its prompt
                before = 4 * wave - 4 + number
                prompt = np.concatenate([requests[before].token_ids, answers[before].token_ids])
                prompt = np.append(prompt[: 60 - 20 * number], [3, 5]).astype(np.int32)
            room = LONGEST - len(prompt)
            new += [
                request(
                    100 * wave + number, token_ids=prompt, sampling=greedy, key=(number, member),
                    max_new_tokens=min(room, 6 + 17 * member),
                )
                for member in range(1 + number % 3)
            ]  # fmt: skip
        answers += sampler.generate(
            [dataclasses.replace(one, request_id=f"{wave}/{i}") for i, one in enumerate(new)]
        )
        requests += new
        assert_whole(sampler)
    stats = sampler.stats()
    sampler.close()
    assert stats.preempted > 0 and stats.prefix_hit_tokens > 0
    assert_as_trained(GEMMA, requests, answers)
    head = output_head(GEMMA, PARAMS[GEMMA])
    for asked, one in zip(requests, answers, strict=True):
        ids = np.zeros((1, LONGEST), np.int32)
        whole = np.concatenate([asked.token_ids, one.token_ids])
        ids[0, : len(whole)] = whole
        rows = ids, np.arange(LONGEST)[None], np.ones_like(ids)
        hidden = row_states(GEMMA, PARAMS[GEMMA], *map(jnp.asarray, rows))
        likely = np.argmax(logits_of(hidden, head, GEMMA.scales)[0], axis=-1)
        begin = len(asked.token_ids)
        assert one.token_ids.tolist() == likely[begin - 1 : len(whole) - 1].tolist()
