"""A whole sampler that decodes and prefills on the pages by the GPU's kernel, or the TPU's of
latent attention, in Pallas' interpreter: it draws what the sampler of a CPU draws."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from heard_compiles import compiles_of_samplers
from tiny import Held

from jaxrl_async.config import schema
from jaxrl_async.model import gpu_pages
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.latent_pages import attend_latent_pages
from jaxrl_async.model.spec import ModelSpec, Params
from jaxrl_async.ports.weights import FIXED_WEIGHTS
from jaxrl_async.sampler.batch import shapes
from jaxrl_async.sampler.batch.decoding import context_widths
from jaxrl_async.sampler.compile_ahead import compile_all
from jaxrl_async.sampler.device import decode, prefilling
from jaxrl_async.sampler.device.engine import Engine
from jaxrl_async.sampler.device.engine_spec import EngineSpec
from jaxrl_async.sampler.device.sampling import Mix
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings, kv_plan
from jaxrl_async.types import Request, SamplingParams

pytestmark = pytest.mark.full

VOCAB = 40
SECTION = schema.SamplerSection(
    slots=4, reserve=0.25, max_length=64, max_new_tokens=32, block=4, page_tokens=4,
    prefill_chunk=16,
)  # fmt: skip


def model(family: str, **more: object) -> tuple[ModelSpec, Params]:
    """A model whose weights make its answers differ; windows are shorter than its prompts."""
    sizes = {"layers": 2, "width": 16, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp": 24}
    shape = schema.ArchitectureSection(family=family, **{**sizes, **more})
    spec = ModelSpec.from_architecture(shape, VOCAB)
    params = init_params(spec, jax.random.key(0))
    return spec, jax.tree.map(
        lambda w: w + 0.3 * jax.random.normal(jax.random.key(w.size), w.shape), params
    )


@pytest.fixture
def interpreted(monkeypatch):
    def kernel(spec: EngineSpec) -> partial:
        if spec.on_gpu:
            return partial(gpu_pages.attend_pages, mesh=spec.mesh, interpret=True)
        return partial(attend_latent_pages, rank=spec.model.latent.rank, interpret=True)

    for module in (decode, prefilling):
        monkeypatch.setattr(module, "ragged_kernel", kernel)


def make_pair(
    family: str,
    pages: int | None = None,
    settings: SamplerSettings | None = None,
    on: str = "gpu",
    **changes: object,
) -> tuple[Sampler, Sampler]:
    """The same sampler twice: on a CPU, and by the kernel of this platform; pages: of each, if
    few."""
    of_model = ("window", "experts", "kv_heads", "layers")
    spec, params = model(family, **{n: changes.pop(n) for n in of_model if n in changes})
    section = SECTION.model_copy(update=changes)
    settings = SamplerSettings() if settings is None else settings
    if pages is not None:
        of_page = kv_plan(spec, section, settings.dtype).page_bytes / 2**20
        section = section.model_copy(update={"kv_memory_mib": (pages + 0.5) * of_page})
    plain = Sampler((spec, params), section=section, settings=settings)
    platform: dict = {"ragged": True, f"on_{on}": True}
    engine = Engine(replace(plain.engine.spec, cpu_attention=False, **platform))
    setup = replace(plain.setup, engine=engine)
    return plain, Sampler.from_setup(setup, engine.prepare(params), 0, FIXED_WEIGHTS)


def greedy(number: int, length: int, **changes: object) -> Request:
    prompt = np.random.default_rng(number).integers(0, VOCAB, length).astype(np.int32)
    base = {"token_ids": prompt, "max_new_tokens": 12, "key": (number, 0)}
    return Request(
        request_id=f"r{number}", sampling=SamplingParams(temperature=0.0), **{**base, **changes}
    )


def answers(sampler: Sampler) -> list[list[int]]:
    """What it draws for prompts of one and several rounds, a group of one prompt, and a later turn
    of each."""
    group = greedy(7, 21).token_ids
    requests = [
        *(greedy(i, n) for i, n in enumerate((3, 30, 9, 17, 5))),
        *(greedy(10 + i, 1, token_ids=group) for i in range(3)),
    ]
    first = sampler.generate(requests)
    later = [
        greedy(
            100 + i,
            1,
            token_ids=np.concatenate([w.token_ids, c.token_ids, [1, 2, 3]]).astype(np.int32),
            max_new_tokens=8,
        )
        for i, (w, c) in enumerate(zip(requests, first, strict=True))
    ]
    second = sampler.generate(later)
    sampler.between_blocks(sampler.loop.batch.check_integrity)
    return [c.token_ids.tolist() for c in (*first, *second)]


EXHAUSTIVE = [pytest.mark.full, pytest.mark.exhaustive]


@pytest.mark.parametrize(
    "case",
    [
        {"family": "qwen3", "pages": 18},
        *(
            pytest.param(case, marks=EXHAUSTIVE)
            for case in (
                {"family": "gpt_oss", "window": 5, "experts": 4, "pages": 26},
                {"family": "qwen3", "kv_heads": 1, "block": 16},
                {"family": "gemma3_text", "window": 5, "layers": 6, "pages": 90},
                {"family": "gemma2", "window": 7, "page_tokens": 8},
                {"family": "qwen3_next", "layers": 4, "experts": 4},
                {"family": "deepseek_v3", "experts": 4, "kv_heads": 4, "pages": 18},
                {"family": "deepseek_v3", "experts": 4, "kv_heads": 4, "pages": 18, "on": "tpu"},
            )
        ),
    ],
    ids=lambda case: (
        f"{case['family']}{'' if 'pages' in case else ' with room'}"
        f"{' on a TPU' if 'on' in case else ''}"
    ),
)
def test_it_draws_the_same_tokens(case, interpreted) -> None:
    plain, sampler = make_pair(**case)
    wanted, got = answers(plain), answers(sampler)
    preempted = sampler.stats().preempted
    plain.close()
    sampler.close()
    assert got == wanted
    assert preempted > 0 or "pages" not in case
    assert sampler.engine.spec.prefills_in_pages == (case["family"] != "qwen3_next")


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["gemma2", "qwen3"])
def test_a_prompt_loses_no_token_of_a_window_where_a_round_takes_several_programs(
    family, interpreted, monkeypatch
) -> None:
    """Programs of 4 tokens and more, and no page beyond those that a prompt keeps: 31 tokens are 16
    and 15 where they are divided, and the later ones see what is before the last three pages."""
    monkeypatch.setattr(shapes, "FILLED_TOKENS", 4)
    plain, sampler = make_pair(family, window=7, prefill_chunk=64, prefix_cache=False)
    for length in (31, 27, 45):
        request = [greedy(length, length)]
        assert sampler.generate(request)[0].token_ids.tolist() == (
            plain.generate(request)[0].token_ids.tolist()
        ), length
    plain.close()
    sampler.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "case",
    [
        {"family": "qwen3"},
        {"family": "gemma3_text", "window": 5},
        {"family": "deepseek_v3", "experts": 4, "kv_heads": 4, "on": "tpu"},
    ],
    ids=lambda case: case["family"],
)
def test_no_traffic_needs_a_program_that_was_not_compiled_ahead(
    case, interpreted, monkeypatch
) -> None:
    """Two numbers of rows with one width of context, on a TPU two, and one sampling; a prefill of
    each size, also where layers have a window, of 128 and 300 tokens, there of 256 as well; and one
    insert."""
    monkeypatch.setattr(shapes, "MAX_SEQUENCES", 8)
    mixes = (Mix(), Mix(greedy=True))
    plain, sampler = make_pair(
        **case, pages=200, settings=SamplerSettings(mixes=mixes), slots=16, prefill_chunk=300
    )
    plain.close()
    engine, prepared = sampler.engine, sampler.loop.weights.prepared
    widths = context_widths(engine.spec)
    assert widths == ((8, 16) if "on" in case else (16,))
    with compiles_of_samplers() as names:
        made = compile_all(engine, prepared, engine.init_decode_state(), 300, mixes, seed=0)
        assert [name for name, _ in names].count("generate") == 2 * len(widths)
        prefills = 3 if any(engine.spec.windows) else 2
        assert made == len(names) == 2 * len(widths) + prefills + 1
        answers(sampler)
        assert len(names) == made
    sampler.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize("saves", [0, 1])
@pytest.mark.parametrize(
    "case",
    [
        {"family": "gemma3_text", "window": 5, "layers": 6},
        {"family": "deepseek_v3", "experts": 4, "kv_heads": 4, "on": "tpu"},
    ],
    ids=lambda case: case["family"],
)
def test_kv_that_one_form_saved_the_other_restores(case, saves, interpreted) -> None:
    request = greedy(3, 9, max_new_tokens=24)
    pair = make_pair(**case, prefix_cache=False)
    wanted = pair[0].generate([request])[0].token_ids.tolist()
    first, second = pair[saves], pair[1 - saves]
    held = Held(first, 10)
    future = first.start_many([request])[0]
    (saved,) = held.meanwhile(lambda: first.save(request.request_id))
    assert future.result().token_ids.tolist() == wanted
    assert saved.kv is not None and len(saved.token_ids) >= 10
    before = second.stats().prefill_tokens
    assert second.resume([saved])[0].token_ids.tolist() == wanted
    assert second.stats().prefill_tokens - before == 1, "the last token alone is computed again"
    for sampler in pair:
        sampler.close()
