"""Both forms of decode attention, and every way through the pages, give the same tokens."""

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heard_compiles import compiles_of_samplers
from remote_side import eventually
from tiny import OTHER, PARAMS, SECTION, SPEC, Script, make_sampler, request
from whole_rows import logprobs_of

from jaxrl_async.config import schema
from jaxrl_async.cpu.kernel_library import SAMPLING, kernels_are_there
from jaxrl_async.mesh import make_slices
from jaxrl_async.model import decoder, kernels
from jaxrl_async.model.attention import ragged_paged_reference
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.ports.weights import FIXED_WEIGHTS
from jaxrl_async.sampler.batch import prefill, shapes
from jaxrl_async.sampler.batch.decoding import context_widths
from jaxrl_async.sampler.compile_ahead import compile_all
from jaxrl_async.sampler.device import decode
from jaxrl_async.sampler.device.engine import Engine
from jaxrl_async.sampler.device.sampling import Mix
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings
from jaxrl_async.testing.interpreted import interpreted_kernels
from jaxrl_async.types import LogitShaping, LogprobRequest, SamplingParams, VersionedParams

CROWDED = {"slots": 16, "page_tokens": 4, "block": 2, "prefill_chunk": 64, "kv_memory_mib": 0.2}
"""Pages for few of the slots, so that sequences are preempted."""
REQUESTS = [request(i, request_id=f"r{i}") for i in range(12)]


def needs_cpu_kernels() -> None:
    if not kernels_are_there(SAMPLING):
        pytest.skip("needs g++ or clang++ and a processor with AVX2")


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    sampler = make_sampler(prefix_cache=False, reserve=0.0)
    tokens = [c.token_ids.tolist() for c in sampler.generate(REQUESTS)]
    sampler.close()
    return tokens


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [
        {"reserve": 1.0, "block": 16},
        {"cpu_kernels": False},
        *(
            pytest.param(settings, marks=[pytest.mark.full, pytest.mark.exhaustive])
            for settings in (
                {"attention": "ragged", "prefill_chunk": 7, "page_tokens": 8, "block": 3},
                {"attention": "ragged", "prefill_chunk": 300, "page_tokens": 8},
                {"prefill_chunk": 7, "page_tokens": 8, "block": 3},
            )
        ),
    ],
)
def test_every_setting_draws_the_same_tokens(settings, wanted) -> None:
    sampler = make_sampler(**settings)
    assert [c.token_ids.tolist() for c in sampler.generate(REQUESTS)] == wanted
    sampler.between_blocks(sampler.loop.batch.check_integrity)
    sampler.close()


def random_waves(sampler: Sampler, waves: int, *, seed: int = 0) -> None:
    """Draw answers for groups, later turns, and prompts in several rounds; some are preempted."""
    rng = np.random.default_rng(seed)
    for wave in range(waves):
        prompts = [rng.integers(0, 30, rng.integers(1, 40)) for _ in range(rng.integers(1, 6))]
        requests = [
            request(
                100 * wave + i,
                token_ids=prompts[i % len(prompts)].astype(np.int32),
                request_id=f"w{wave}.{i}",
                sampling=SamplingParams(temperature=float(rng.integers(0, 2))),
            )
            for i in range(int(rng.integers(1, 24)))
        ]
        sampler.generate(requests)


@pytest.mark.full
def test_with_the_cpus_own_kernels_no_traffic_needs_more_than_ten_programs() -> None:
    """By XLA's attention each width of context and each padding has programs of its own."""
    needs_cpu_kernels()
    compiled = {}
    for own in (True, False):
        sampler = make_sampler(cpu_kernels=own, **CROWDED)
        assert sampler.engine.spec.cpu_attention == own == sampler.engine.spec.cpu_products
        before = sampler.engine.num_compiled
        random_waves(sampler, 6 if own else 2)
        compiled[own] = sampler.engine.num_compiled - before
        sampler.close()
    assert compiled[True] <= 10 < compiled[False], compiled


@pytest.fixture
def compiled_now():
    with compiles_of_samplers() as names:
        yield names


GREEDY_TOO = (Mix(), Mix(greedy=True))


@pytest.mark.full
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("many_logits", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_what_is_compiled_ahead_is_all_that_traffic_needs(
    many_logits, placed, monkeypatch, compiled_now
) -> None:
    """With a large vocabulary, inserts of few slots have programs of their own."""
    needs_cpu_kernels()
    monkeypatch.setattr(prefill, "MANY_LOGITS", 1 if many_logits else 2**21)
    crowded = {**CROWDED, "slots": 32 if many_logits else 24, "prefill_chunk": 300}
    crowded["kv_memory_mib"] = 0.06
    mesh = make_slices(schema.MeshSection()).sampler if placed else None
    sampler = make_sampler(**crowded, mesh=mesh)
    engine, prepared = sampler.engine, sampler.loop.weights.prepared
    state = engine.init_decode_state()
    made = compile_all(engine, prepared, state, 300, GREEDY_TOO, seed=0)
    assert made == len(compiled_now) == (14 if many_logits else 10)
    random_waves(sampler, 12, seed=1)
    assert sampler.stats().preempted > 0
    assert len(compiled_now) == made
    sampler.close()


@pytest.mark.full
@pytest.mark.parametrize("placed", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("many_logits", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_on_a_tpu_no_traffic_needs_a_program_that_was_not_compiled_ahead(
    many_logits, placed, monkeypatch, compiled_now
) -> None:
    """Blocks have one sampling for all and two widths of context, prompts are prefilled on the
    pages, and an insert writes no tokens, and is of few slots."""
    monkeypatch.setattr(prefill, "MANY_LOGITS", 1 if many_logits else 2**21)
    monkeypatch.setattr(shapes, "MAX_SEQUENCES", 8)
    changes = {"attention": "ragged", "page_tokens": 2, "kv_memory_mib": 0.35}
    changes["slots"] = 24 if many_logits else 16  # an engine of its own: nothing is compiled yet
    mesh = make_slices(schema.MeshSection()).sampler if placed else None
    settings = SamplerSettings(mixes=GREEDY_TOO)
    changes |= {"prefill_chunk": 300, "mesh": mesh, "settings": settings}
    sampler = make_sampler(**{**CROWDED, **changes})
    engine, prepared = sampler.engine, sampler.loop.weights.prepared
    made = compile_all(engine, prepared, engine.init_decode_state(), 300, GREEDY_TOO, seed=0)
    assert context_widths(engine.spec) == (8, 32), "half a block of the kernel, and all"
    names = [name for name, _ in compiled_now]
    assert names.count("generate") == 2 * 2, "of 4 rows and all"
    assert names.count("prefill_in_pages") == 2, "of 128 and 300 tokens"
    assert made == len(names) == 6 + (2 if many_logits else 1)
    random_waves(sampler, 6, seed=1)
    assert sampler.stats().preempted > 0
    assert len(compiled_now) == made
    sampler.close()


@pytest.mark.full
def test_a_sampler_compiles_beside_its_first_blocks_what_it_will_need(compiled_now) -> None:
    needs_cpu_kernels()
    settings = SamplerSettings(mixes=GREEDY_TOO, name="early")
    sampler = make_sampler(**{**CROWDED, "slots": 20}, settings=settings)
    sampler.generate([request(0, request_id="first")])
    eventually(lambda: "early compiles" not in {t.name for t in threading.enumerate()})
    known = list(compiled_now)
    assert len(known) == 1 + 2 + 2 * 2, "a prefill, its inserts, and blocks of few rows and all"
    random_waves(sampler, 6, seed=1)
    assert compiled_now == known
    sampler.close()


@pytest.mark.full
def test_possible_kinds_of_sampling_are_compiled_from_the_start(compiled_now) -> None:
    needs_cpu_kernels()
    kinds = (Mix(), Mix(top=8), Mix(shaped=True))
    settings = SamplerSettings(mixes=kinds[:1], possible=kinds, name="warm")
    sampler = make_sampler(**{**CROWDED, "slots": 22}, settings=settings)
    sampler.start()
    eventually(lambda: len(compiled_now) > 6)
    eventually(lambda: "warm compiles" not in {t.name for t in threading.enumerate()})
    known = list(compiled_now)
    assert len(known) == 1 + 2 + 3 * 2, "a prefill, its inserts, and blocks of few rows and all"
    random = [request(i, request_id=f"r{i}", sampling=SamplingParams()) for i in range(30)]
    shaped = [replace(r, shaping=LogitShaping(bias=((3, 2.0),))) for r in random]
    sampler.generate(random)
    sampler.generate([replace(r, logprobs=LogprobRequest(top=5)) for r in random])
    sampler.generate(shaped)
    sampler.generate(shaped[:1])
    assert compiled_now == known
    sampler.close()


@pytest.mark.full
def test_a_sampler_that_is_closed_compiles_no_more(compiled_now, monkeypatch) -> None:
    needs_cpu_kernels()
    held, real = threading.Event(), Engine.compile_generate

    def slow(*args, **kwargs):
        held.wait(20)
        real(*args, **kwargs)

    monkeypatch.setattr(Engine, "compile_generate", slow)
    settings = SamplerSettings(mixes=GREEDY_TOO, name="closed")
    sampler = make_sampler(**{**CROWDED, "slots": 28}, settings=settings)
    sampler.generate([request(0, request_id="first")])
    closing = threading.Thread(target=sampler.close)
    closing.start()
    eventually(lambda: sampler.loop._lifetime.closed)
    held.set()
    closing.join()
    assert "closed compiles" not in {t.name for t in threading.enumerate()}
    assert len(compiled_now) < 7


FORGETS = """
import gc, threading
import jax, jax.numpy as jnp
from tiny import PARAMS, SECTION, SPEC, request
from jaxrl_async.sampler.device.engine import Engine
from jaxrl_async.sampler.device.sampling import Mix
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings

begun, real = threading.Event(), Engine.compile_prefill
def long(x):
    for _ in range(600):
        x = jnp.sin(x @ x)
    return x
def noted(*args):
    lowered = jax.jit(long).lower(jnp.ones((8, 8)))
    begun.set()
    lowered.compile()
    return real(*args)
Engine.compile_prefill = noted
settings = SamplerSettings(mixes=(Mix(), Mix(greedy=True)), name="forgotten")
sampler = Sampler((SPEC, PARAMS), section=SECTION, settings=settings)
sampler.generate([request(0, request_id="first")])
print(begun.wait(60))
del sampler
gc.collect()
"""


@pytest.mark.full
def test_a_program_that_forgets_its_sampler_ends_while_it_compiles(tmp_path) -> None:
    """A thread in the compiler at the interpreter's end would abort the process."""
    needs_cpu_kernels()
    (tmp_path / "forgets.py").write_text(FORGETS)
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parent.parent)]),
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    done = subprocess.run(
        [sys.executable, str(tmp_path / "forgets.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n", "it was compiling"


@pytest.mark.full
def test_a_sampler_that_fails_leaves_no_thread(monkeypatch) -> None:
    needs_cpu_kernels()
    settings = SamplerSettings(mixes=GREEDY_TOO, name="failing")
    sampler = make_sampler(**{**CROWDED, "slots": 36}, settings=settings)
    sampler.generate([request(0, request_id="first")])
    assert "failing compiles" in {t.name for t in threading.enumerate()}

    def broken(*args, **kwargs):
        raise MemoryError("no room")

    monkeypatch.setattr(sampler.loop.batch, "start_block", broken)
    with pytest.raises(MemoryError):
        sampler.generate([request(1, request_id="second")])
    eventually(
        lambda: not {"failing compiles", "failing"} & {t.name for t in threading.enumerate()}
    )
    sampler.close()


@pytest.mark.full
def test_the_kernel_reads_no_rows_behind_the_last_that_runs(monkeypatch) -> None:
    seen: list[int] = []

    def noted(*args):
        jax.debug.callback(lambda count: seen.append(int(count[0])), args[5])
        return ragged_paged_reference(*args)

    monkeypatch.setattr(decode, "ragged_kernel", lambda _: noted)
    sampler = make_sampler(attention="ragged", slots=8, reserve=0.0, page_tokens=32)
    lengths = [3, 9]
    sampler.generate(
        [
            request(i, forced_length=n, max_new_tokens=n, request_id=f"n{i}")
            for i, n in enumerate(lengths)
        ]
    )
    jax.effects_barrier()
    sampler.close()
    assert set(seen) == {1, 2} and len(seen) > SPEC.layers


@pytest.mark.full
def test_rows_are_taken_over_in_mid_block() -> None:
    lengths = [2, 3, 16, 16, 5, 5, 4, 4]
    requests = [
        request(i, forced_length=n, max_new_tokens=n, request_id=f"f{i}")
        for i, n in enumerate(lengths)
    ]
    sampler = make_sampler(reserve=1.0, block=16)
    done = sampler.generate(requests)
    stats = sampler.stats()
    assert [len(c.token_ids) for c in done] == lengths
    assert stats.blocks == 1, "four rows drew eight answers in one block"
    sampler.close()


@pytest.mark.full
def test_many_that_begin_at_once_are_inserted_in_turns(monkeypatch) -> None:
    """On a TPU, so many at a time as a chunk has prompts at most; each follower's last page is a
    copy."""
    prompt = np.arange(19, dtype=np.int32)
    members = [request(i, token_ids=prompt, request_id=f"m{i}") for i in range(8)]
    sampled = []
    for attention in ("gathered", "ragged"):
        inserts, real = [], Engine.insert

        def noted(self, prefix, state, args, inserts=inserts, real=real):
            inserts.append(len(args.slots))
            return real(self, prefix, state, args)

        monkeypatch.setattr(shapes, "MAX_SEQUENCES", 3)
        monkeypatch.setattr(Engine, "insert", noted)
        sampler = make_sampler(attention=attention, slots=8, reserve=0.0, page_tokens=16)
        sampled.append([c.token_ids.tolist() for c in sampler.generate(members)])
        sampler.between_blocks(sampler.loop.batch.check_integrity)
        sampler.close()
        monkeypatch.setattr(Engine, "insert", real)
    assert inserts == [3, 3, 3] and sampled[0] == sampled[1]


@pytest.mark.exhaustive
def test_ragged_kv_can_be_saved_and_swapped() -> None:
    kinds = {"on_new_weights": "recompute"}
    both = []
    for attention in ("gathered", "ragged"):
        source = Script([VersionedParams(version=1, params=OTHER)], after=3)
        sampler = make_sampler(attention=attention, weights=source, **kinds)
        both.append([c.token_ids.tolist() for c in sampler.generate(REQUESTS)])
        sampler.close()
    assert both[0] == both[1]


@pytest.mark.full
@pytest.mark.exhaustive
def test_a_ragged_sampler_over_two_devices() -> None:
    section = SECTION.model_copy(update={"attention": "ragged"})
    mesh = make_slices(schema.MeshSection(sampler=schema.AxesSection(tensor=2))).sampler
    sampler = Sampler((SPEC, PARAMS), section=section, mesh=mesh)
    one = make_sampler()
    for a, b in zip(sampler.generate(REQUESTS[:4]), one.generate(REQUESTS[:4]), strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
    sampler.close()
    one.close()


@pytest.mark.full
@pytest.mark.parametrize("calls", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_the_tpu_kernel_itself_draws_the_same_tokens(calls, wanted, monkeypatch) -> None:
    """Prefills and the whole decode loop with the Pallas kernel in interpret mode; page tables that
    are too large for its scalar memory are divided among calls of eight rows."""
    if calls == 2:
        monkeypatch.setattr(kernels, "RAGGED_TABLE_BYTES", 1)
    changes = {"attention": "ragged", "slots": 8 * calls, "prefill_chunk": 32}
    section = SECTION.model_copy(update=changes)  # in interpret mode one grid step must do all
    plain = Sampler((SPEC, PARAMS), section=section)
    engine = Engine(replace(plain.engine.spec, ragged=True, on_tpu=True))
    setup = replace(plain.setup, engine=engine)
    sampler = Sampler.from_setup(setup, engine.prepare(PARAMS), 0, FIXED_WEIGHTS)
    with interpreted_kernels():
        done = sampler.generate(REQUESTS if calls == 2 else REQUESTS[:4])
        sampler.close()
    assert [c.token_ids.tolist() for c in done] == wanted[: len(done)]


def interpreted_tokens(sampler: Sampler, params: Any, **changes: Any) -> list[list[int]]:
    """What a sampler like this one draws with an engine so changed, its kernels interpreted."""
    engine = Engine(replace(sampler.engine.spec, **changes))
    setup = replace(sampler.setup, engine=engine)
    with (
        interpreted_kernels(),
        Sampler.from_setup(setup, engine.prepare(params), 0, FIXED_WEIGHTS) as other,
    ):
        return [c.token_ids.tolist() for c in other.generate(REQUESTS[:4])]


@pytest.mark.full
def test_the_kernel_that_draws_draws_the_same_tokens(wanted) -> None:
    with Sampler((SPEC, PARAMS), section=SECTION) as plain:
        assert interpreted_tokens(plain, PARAMS, samples_by_kernel=True) == wanted[:4]


@pytest.mark.full
@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["gemma3_text", "qwen3"])
def test_wide_heads_decode_on_the_pages_by_a_kernel_of_our_own(family: str) -> None:
    shape = schema.ArchitectureSection(
        family=family, layers=2, width=32, heads=4, kv_heads=2, head_dim=256, mlp=32, window=9
    )
    spec = ModelSpec.from_architecture(shape, SPEC.vocab)
    params = decoder.init_params(spec, jax.random.key(0))
    with Sampler((spec, params), section=SECTION) as plain:
        wanted = [c.token_ids.tolist() for c in plain.generate(REQUESTS[:4])]
    ragged = SECTION.model_copy(update={"attention": "ragged"})
    with Sampler((spec, params), section=ragged) as pages:
        assert interpreted_tokens(pages, params, on_tpu=True) == wanted


@pytest.mark.full
def test_bfloat16_products_of_a_model_in_bfloat16_change_nothing() -> None:
    settings, answers = SamplerSettings(dtype=jnp.bfloat16), []
    for matmul in ("full", "bfloat16"):
        with make_sampler(matmul=matmul, settings=settings) as sampler:
            answers.append(sampler.generate([request(0, sampling=SamplingParams(temperature=0))]))
    assert answers[0][0].token_ids.tolist() == answers[1][0].token_ids.tolist()


@pytest.mark.exhaustive
def test_bfloat16_products_are_close_and_told_apart_by_their_log_probs() -> None:
    requests = [request(i, request_id=f"b{i}", sampling=SamplingParams()) for i in range(4)]
    sampler = make_sampler(matmul="bfloat16")
    errors = []
    for req, done in zip(requests, sampler.generate(requests), strict=True):
        logprobs = logprobs_of(SPEC, PARAMS, np.concatenate([req.token_ids, done.token_ids]))
        errors.append(np.abs(done.logprobs - logprobs[len(req.token_ids) :]).max())
    sampler.close()
    assert 1e-5 < max(errors) < 0.1
