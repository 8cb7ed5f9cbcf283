"""The plan's arithmetic on examples worked by hand, and what it refuses."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.config.schema import Config
from jaxrl_async.errors import ConfigError, DataError
from jaxrl_async.plan.__main__ import main
from jaxrl_async.plan.chips import CHIPS, parse_chips, parse_slice
from jaxrl_async.plan.cost import Collective
from jaxrl_async.plan.lengths import assumed, mean_context, read_lengths
from jaxrl_async.plan.pipeline import Histogram
from jaxrl_async.plan.timing import Timing, decode_account, gradient_account

CONFIG = "model: {architecture: {vocab: 512}, dtype: bfloat16}\nsampler: {max_length: 256}\n"


# ---- chips


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("v5e-8", "v5e:2x4"),
        ("v5e-32", "v5e:4x8"),
        ("v5e-256", "v5e:16x16"),
        ("v6e-16", "v6e:4x4"),
        ("v5p-4", "v5p:2x2x1"),
        ("v5p-8", "v5p:2x2x2"),
        ("v5p-128", "v5p:4x4x8"),
        ("v5p:4x4x12", "v5p:4x4x12"),
        ("v5litepod-16", "v5e:4x4"),
    ],
)
def test_a_name_is_a_topology(name, topology):
    assert parse_slice(name).topology == topology


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v9-8", "unknown topology 'v9-8'"),
        ("v5e", "GENERATION-CHIPS"),
        ("v5e-eight", "neither a number of chips nor a shape"),
        ("v5e-0", "neither a number"),
        ("v5e-48", "the next lower one is v5e-32"),
        ("v5e-512", "at most 256"),
        ("v5e-2", "slices of 2 chips do not exist.* v5e-1 or v5e-4"),
        ("v5p:4x4", "has 2 sides, and v5p slices have 3: give v5p-16"),
        ("v5e:2x2x2", "has 3 sides, and v5e slices have 2: give v5e-8"),
    ],
)
def test_an_unknown_topology_is_refused_with_a_way_out(name, message):
    with pytest.raises(ConfigError, match=message):
        parse_slice(name)


def test_samplers_may_be_any_number_of_chips():
    for count in (48, 2):
        chip, found = parse_chips(f"v5e-{count}")
        assert (chip.generation, found) == ("v5e", count)


def test_a_device_has_its_share_of_a_chip():
    v7, v5e = CHIPS["tpu7x"], CHIPS["v5e"]
    assert parse_slice("tpu7x-4").num_devices == 8
    assert parse_slice("v4-4").num_devices == 4, "two cores are one device"
    assert v7.peak_flops == pytest.approx(2307e12 / 2)
    assert v5e.peak_flops / v5e.clock_hz == pytest.approx(4 * 2 * 128**2, rel=0.01), "four units"


def test_a_group_on_one_side_of_the_slice_has_that_sides_links():
    v5p, v5e = parse_slice("v5p:4x4x4"), parse_slice("v5e-32")
    assert v5p.link_share(64) == 1
    assert v5p.link_share(4) == pytest.approx(1 / 3)
    assert v5e.link_share(32) == 0.5, "sides below 16 are no rings"


# ---- lengths


def test_a_running_sequence_is_longer_than_the_mean():
    """Of one answer of 1 token and one of 3: 4 steps, at 0, 0, 1, 2 drawn tokens; n^2 / 2 is the
    same without the half token of a step."""
    assert mean_context(Histogram(values=(1.0, 3.0), weights=(1.0, 1.0)), 10) == 10 + 10 / 8


def test_a_histogram_is_read_and_cut_off(tmp_path):
    file = tmp_path / "lengths.json"
    file.write_text('{"10": 3, "50": 1, "90": 1}')
    found = read_lengths(file, 40)
    assert found.values == (10, 40) and found.weights == (0.6, 0.4)
    file.write_text("[8, 8, 16]")
    assert read_lengths(file, 100).mean == pytest.approx(32 / 3)


def test_a_runs_ledger_tells_its_lengths(tmp_path):
    lines = [
        {"fate": "admitted", "group": 0},
        {"fate": "trained", "group": 0, "lengths": [4, 6], "use": 1},
        {"fate": "trained", "group": 0, "lengths": [4, 6], "use": 2},
        {"fate": "dropped", "group": 1, "lengths": [20, 20]},
    ]
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    found = read_lengths(tmp_path, 100)
    assert found.values == (4, 6, 20) and found.weights == (0.25, 0.25, 0.5)


def test_many_lengths_become_few_with_the_same_mean(tmp_path):
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps(list(range(1, 1001))))
    found = read_lengths(file, 10_000)
    assert len(found.values) <= 64 and found.mean == pytest.approx(500.5, abs=0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "no length has a weight above 0"),
        ('"7"', "no length has a weight above 0"),
        ('{"-3": 1}', "not a length and a weight"),
        ('{"3": "many"}', "not a length and a weight"),
        ("[1, null]", "not a length and a weight"),
        (f'{{"3": {"9" * 400}}}', "3: 99.* is not a length and a weight"),
        (f"[{'9' * 400}]", "not a length and a weight"),
        ('{"3": 1e308, "4": 1e308}', "too large"),
        ("[" * 100_000, "not JSON: .*recursion"),
    ],
)
def test_a_bad_lengths_file_is_refused(tmp_path, text, message):
    file = tmp_path / "lengths.json"
    file.write_text(text)
    with pytest.raises(DataError, match=message):
        read_lengths(file, 100)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"fate": "trained", "lengths": null}',
            "line 2 of .* has lengths None: they must be",
        ),
        ('{"fate": "trained", "lengths": ["a"]}', "line 2 of .* has lengths .'a'."),
        ('{"fate": "trained", "lengths": "12"}', "line 2"),
        (f'{{"fate": "trained", "lengths": [{"9" * 400}]}}', "line 2 of .* has lengths .9999"),
        ("[" * 100_000, "line 2 of .* is not a line of a ledger"),
    ],
)
def test_a_bad_line_of_a_ledger_is_named(tmp_path, line, message):
    good = '{"fate": "trained", "lengths": [4]}'
    (tmp_path / "ledger.jsonl").write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(DataError, match=message):
        read_lengths(tmp_path, 100)


def test_a_torn_line_of_a_ledger_is_left_out(tmp_path):
    good = '{"fate": "trained", "lengths": [4]}'
    (tmp_path / "ledger.jsonl").write_text(f"{good}\n{good[:20]}")
    assert read_lengths(tmp_path, 100).values == (4,)


def test_a_missing_lengths_file_and_an_empty_run_are_refused(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        read_lengths(tmp_path / "none.json", 100)
    with pytest.raises(DataError, match="no answers in"):
        read_lengths(tmp_path, 100)


def test_the_assumed_tail_ends_at_the_longest_answer():
    found = assumed(1000)
    assert max(found.values) == 1000 and 350 < found.mean < 450


# ---- time, memory, advice: these modules need JAX


def test_a_collectives_time_is_bytes_over_links_and_the_way_round():
    from jaxrl_async.plan.timing import HOP_S, collective_s

    talk = Collective(kind="all-gather", axes="fsdp", group=64, num_bytes=6e9, times=10)
    assert collective_s(talk, parse_slice("v5p-64")) == pytest.approx(6e9 / 600e9 + 320 * HOP_S)


def test_memory_counts_what_lies_beside_a_program():
    from jaxrl_async.plan.compiled import Compiled
    from jaxrl_async.plan.hbm import trainer_memory

    def program(name, **more):
        return Compiled(name=name, side="trainer", **{"fits": True, "code_bytes": 1.0, **more})

    def memory(gradient):
        return trainer_memory(
            [gradient, program("update", temp_bytes=2), program("cast", temp_bytes=9)],
            params=10, gradients=10, optimizer=20, reference=0, transfer=5, usable=100,
        )  # fmt: skip

    found = memory(program("gradient", temp_bytes=30))
    assert found.moment == "gradient" and found.total_bytes == 10 + 10 + 20 + 5 + 30 + 3
    assert found.largest == "activations and temporaries" and found.fits
    refused = memory(program("gradient", fits=False, needed_bytes=90, code_bytes=0))
    assert not refused.fits and refused.total_bytes == 90 + 20 + 5 + 2


@pytest.mark.parametrize(
    ("name", "beside"),
    [
        ("gradient", {"optimiser": 20, "weights in transfer": 5}),
        ("update", {"reference": 10, "weights in transfer": 5}),
        ("cast", {"optimiser": 20, "reference": 10}),
    ],
)
def test_a_refused_program_s_own_arguments_are_counted_once(name, beside):
    from jaxrl_async.plan.compiled import Compiled
    from jaxrl_async.plan.hbm import trainer_memory

    programs = [
        Compiled(name=n, side="trainer", fits=n != name, needed_bytes=500.0 * (n == name))
        for n in ("gradient", "update", "cast")
    ]
    found = trainer_memory(
        programs, params=10, gradients=10, optimizer=20, reference=10, transfer=5, usable=100
    )
    assert found.moment == name and found.total_bytes == 500 + sum(beside.values())


def test_a_refused_swap_holds_both_weights_and_lies_beside_the_cache():
    from jaxrl_async.plan.compiled import Compiled
    from jaxrl_async.plan.hbm import sampler_memory

    programs = [
        Compiled(name=n, side="sampler", fits=n != "prepare", needed_bytes=50.0 * (n == "prepare"))
        for n in ("prepare", "prefill", "decode")
    ]
    found = sampler_memory(programs, weights=20, sent=20, pages=7, state=1, usable=30)
    assert found.moment == "prepare" and found.total_bytes == 50 + 7 + 1


def test_an_adapter_lies_beside_its_base_which_is_unpacked_before_there_is_a_cache():
    from jaxrl_async.plan.compiled import Compiled
    from jaxrl_async.plan.hbm import sampler_memory, together_on_a_chip, trainer_memory

    def programs(side, *names):
        return [Compiled(name=n, side=side, fits=True, temp_bytes=3.0) for n in names]

    def sampler(pages):
        own = programs("sampler", "prepare", "prefill", "decode")
        return sampler_memory(own, weights=20, sent=2, pages=pages, state=1, usable=100)

    assert sampler(pages=40).total_bytes == 20 + 2 * 2 + 40 + 1 + 3
    begins = sampler(pages=7)
    assert begins.moment == "prepare" and begins.total_bytes == 20 + 20 + 3
    trainer = trainer_memory(
        programs("trainer", "gradient", "update", "cast"),
        params=2, gradients=2, optimizer=4, reference=0, base=20, transfer=2, usable=100,
    )  # fmt: skip
    assert trainer.total_bytes == 2 + 2 + 4 + 20 + 2 + 3
    both = together_on_a_chip(trainer, sampler(pages=40), "sampler")
    assert both.total_bytes == trainer.total_bytes + 20 + 40 + 1
    assert both.kinds["sampler: KV cache"] == 40


def test_a_refusal_for_memory_is_distinguished_from_another():
    from jaxrl_async.plan.compiled import needed_bytes

    used = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.5G of 15.75G hbm."
    wants = "RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (400.00M) exceeds"
    assert needed_bytes(used) == 20.5 * 2**30
    assert needed_bytes(wants) == 400 * 2**20
    assert needed_bytes("INTERNAL: something else (3.0G)") is None


def test_less_kv_memory_is_advised_by_the_setting_that_is_too_much():
    """Of 4 GiB on each of 8 devices, which hold 8 GiB twice over tensor=2, half is too much."""
    from types import SimpleNamespace

    from jaxrl_async.plan.advice import advice
    from jaxrl_async.plan.hbm import Memory

    where = SimpleNamespace(num_devices=8, chip=CHIPS["v5e"])
    kinds = {"KV cache": 4.0 * 2**30}
    side = SimpleNamespace(
        memory=Memory(kinds=kinds, moment="decode", usable_bytes=2.0 * 2**30), where=where
    )
    fine = SimpleNamespace(memory=Memory(kinds={}, moment="", usable_bytes=1.0), where=where)
    found = SimpleNamespace(trainer=fine, sampler=side, spec=SimpleNamespace(vocab=512))
    lines = advice(found, Config(sampler={"kv_memory_mib": 8192}, mesh={"sampler": {"tensor": 2}}))
    assert any("kv_memory_mib=4014 " in line for line in lines), lines

    kinds |= {"KV cache": 2.01 * 2**30, "weights": 1.99 * 2**30}  # all of it, and no room left
    lines = advice(found, Config(sampler={"kv_memory_mib": 4116}))
    assert not any("kv_memory_mib" in line for line in lines), lines


def test_bfloat16_is_advised_with_what_it_takes_to_save_memory():
    """Masters cost as much again as they save: only without them weights in bfloat16 are less."""
    from types import SimpleNamespace

    from jaxrl_async.plan.advice import advice
    from jaxrl_async.plan.hbm import Memory

    def notes(given: dict[str, float], **sections: object) -> list[str]:
        kinds = {name: n * 2**30 for name, n in given.items()}
        side = SimpleNamespace(
            memory=Memory(kinds=kinds, moment="update", usable_bytes=1.0),
            where=SimpleNamespace(num_devices=1, chip=CHIPS["v5e"]),
        )
        fine = SimpleNamespace(
            memory=Memory(kinds={}, moment="decode", usable_bytes=1.0), where=side.where
        )
        spec = SimpleNamespace(vocab=512)
        found = SimpleNamespace(trainer=side, sampler=fine, spec=spec)
        return [line for line in advice(found, Config(**sections)) if "rounding" in line]

    wide = {"parameters": 4.0, "optimiser": 8.0, "resting reference": 4.0}
    (line,) = notes(wide)
    assert "4.00 GiB  model.param_dtype=bfloat16 with trainer.rounding=stochastic" in line
    narrow = {"parameters": 2.0, "optimiser": 12.0}
    (line,) = notes(narrow, model={"param_dtype": "bfloat16"})
    assert "4.00 GiB  trainer.rounding=stochastic" in line
    stochastic = {"trainer": {"rounding": "stochastic"}, "model": {"param_dtype": "bfloat16"}}
    assert not notes({"parameters": 2.0, "optimiser": 8.0}, **stochastic)


def test_a_layer_with_a_window_reads_the_pages_that_hold_it():
    """gpt-oss: half of the layers read 3 pages of 64 tokens, which hold 128 wherever they begin."""
    from jaxrl_async.config.schema import ArchitectureSection
    from jaxrl_async.model.spec import ModelSpec
    from jaxrl_async.plan.plan import read_tokens

    sizes = ArchitectureSection(family="gpt_oss", layers=4, window=128)
    spec = ModelSpec.from_architecture(sizes, 64)
    assert read_tokens(spec, 64, 2000.0) == (2000 + 3 * 64) / 2
    assert read_tokens(spec, 64, 100.0) == 100, "no longer than the context"


def test_a_row_takes_the_pages_that_its_windows_keep():
    """Pages of 64 tokens: 32 and a part for all of 2,048, and two behind a window of 128 beside its
    own and one ahead."""
    from jaxrl_async.config.schema import ArchitectureSection
    from jaxrl_async.model.kv_layout import layout_of
    from jaxrl_async.model.spec import ModelSpec
    from jaxrl_async.plan.plan import pages_at
    from jaxrl_async.sampler.batch.kv_budget import MemoryPlan

    spec = ModelSpec.from_architecture(
        ArchitectureSection(family="gpt_oss", layers=4, window=128), 100
    )
    kv = MemoryPlan(
        slots=1, reserve=0, pages=99, page_tokens=64, page_bytes=1,
        layout=layout_of(spec.kinds), block=16,
    )  # fmt: skip
    assert pages_at(kv, 2048.0) == 33 + 4 and pages_at(kv, 64.0) == 2 + 2


def test_the_experts_products_take_their_bytes_or_their_flops():
    from jaxrl_async.plan.compiled import Compiled
    from jaxrl_async.plan.cost import Cost, Kernel
    from jaxrl_async.plan.timing import timing

    few, many = (
        Kernel(name="ragged-dot-none", times=1, flops=f, num_bytes=819e6) for f in (1, 197e12)
    )
    took = [
        timing(
            Compiled(name="decode", side="sampler", fits=True, cost=Cost(kernels=(one,))),
            parse_slice("v5e-4"),
        )
        for one in (few, many)
    ]
    assert took[0].compute_s == took[0].products_s == pytest.approx(1e-3 / 0.8)
    assert took[1].products_s == pytest.approx(2.0, rel=0.01), "half of the peak"
    assert took[1].kernels_s == 0


@pytest.mark.parametrize(
    ("kernels", "read"),
    [
        (("draw_token",), False),
        (("draw_truncated", "ragged-dot-none"), False),
        (("draw_token", "ragged_paged_attention_kernel"), True),
        (("draw_token", "decode_on_pages"), True),
        (("draw_token", "latent_on_pages"), True),
        (("attend_pages",), True),
    ],
)
def test_the_cache_is_read_by_attentions_kernel_and_not_by_the_one_that_draws(kernels, read):
    """Where decoding gathers the pages, that is among the instructions, and so is its time."""
    from jaxrl_async.plan.compiled import Compiled
    from jaxrl_async.plan.cost import Cost, Kernel
    from jaxrl_async.plan.timing import timing

    cost = Cost(kernels=tuple(Kernel(name=name, times=1, flops=0) for name in kernels))
    done = Compiled(name="decode", side="sampler", fits=True, cost=cost)
    took = timing(done, parse_slice("v5e-4"), cache_bytes=819e6)
    assert took.kernels_s == (pytest.approx(1e-3 / 0.8) if read else 0)
    assert took.roofline_s == (pytest.approx(1e-3) if read else 0)


@pytest.mark.parametrize(("flops", "seconds"), [(1e9, 1e-3 / 0.8), (0.197e12, 1e-3 / 0.5)])
def test_kernels_on_the_pages_read_or_compute_whichever_takes_longer(flops, seconds):
    """1 ms at HBM's bandwidth of a v5e, and nothing or 1 ms at its peak."""
    from jaxrl_async.plan.compiled import Compiled
    from jaxrl_async.plan.cost import Cost, Kernel
    from jaxrl_async.plan.plan import DecodeLoad
    from jaxrl_async.plan.timing import timing

    found = Kernel(name="latent_on_pages", times=1, flops=0)
    done = Compiled(name="decode", side="sampler", fits=True, cost=Cost(kernels=(found,)))
    kernel = Kernel(name="on_pages", times=1, flops=flops / 16, width=640)
    load = DecodeLoad(rows=1, context=100.0, read_bytes=819e6 / 16, kernel=kernel)
    took = timing(done, parse_slice("v5e-4"), *load.of_block(16))
    assert took.kernels_s == pytest.approx(seconds)
    assert took.peak_s == pytest.approx(flops / 197e12)
    assert took.roofline_s == pytest.approx(1e-3)


def test_a_decode_steps_load_is_that_of_its_rows_at_the_mean_context():
    """8 rows of 100 tokens, of a prompt and half of an answer, in two layers."""
    from types import SimpleNamespace

    import jax
    import jax.numpy as jnp

    from jaxrl_async.config.schema import ArchitectureSection
    from jaxrl_async.model.kv_layout import layout_of
    from jaxrl_async.model.spec import ModelSpec
    from jaxrl_async.plan.cost import Kernel
    from jaxrl_async.plan.plan import load_of
    from jaxrl_async.sampler.batch.kv_budget import MemoryPlan

    config = Config(data={"max_prompt_tokens": 100}, sampler={"max_length": 400})
    spec = ModelSpec.from_architecture(ArchitectureSection(family="deepseek_v3", layers=2), 100)
    kv = MemoryPlan(
        slots=8, reserve=0, pages=999, page_tokens=32, page_bytes=1,
        layout=layout_of(spec.kinds), block=16,
    )  # fmt: skip
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    pages = [jax.ShapeDtypeStruct((999, 32, 640), jnp.bfloat16, sharding=one)] * 2
    pair = Kernel(name="on_pages", times=2, flops=1000.0, width=640)
    held = SimpleNamespace(kv=kv, state=SimpleNamespace(kv=pages), pair_kernel=pair)
    load = load_of(config, spec, held, Histogram.constant(100))
    assert (load.rows, load.context) == (8, 50 + 100 / 2)
    assert load.read_bytes == pytest.approx(8 * 100 * 2 * 640 * 2)
    assert load.kernel.flops == pytest.approx(8 * 100 * 1000)
    assert load.kernel.width == 640
    held.pair_kernel = None
    assert load_of(config, spec, held, Histogram.constant(100)).kernel is None


@pytest.mark.parametrize(
    ("generation", "length", "published"),
    [
        pytest.param("v5p", 2048, 0.27, id="axlearn, JAX's kernel in blocks of 512"),
        pytest.param("tpu7x", 8192, 0.249, id="tokamax, microbenchmarks.pdf"),
        pytest.param("tpu7x", 4096, 0.206, id="tokamax, microbenchmarks.pdf, shorter"),
    ],
)
def test_splash_attentions_share_is_near_what_others_published(generation, length, published):
    from jaxrl_async.plan.attention_rates import splash_share

    assert splash_share(generation, length, 128) == pytest.approx(published, rel=0.3)


@given(st.sampled_from(sorted(CHIPS)), st.integers(1, 10**6), st.integers(1, 512))
def test_longer_rows_and_wider_heads_bring_splash_nearer_to_the_peak(generation, length, width):
    from jaxrl_async.plan.attention_rates import splash_share

    share = splash_share(generation, length, width)
    assert 0.03 < share < 0.8
    assert splash_share(generation, 2 * length, width) >= share
    assert splash_share(generation, length, 2 * width) >= share


def test_splash_takes_its_flops_at_the_share_of_its_chip():
    from jaxrl_async.plan.compiled import Compiled
    from jaxrl_async.plan.cost import Cost, Kernel
    from jaxrl_async.plan.timing import timing

    kernel = Kernel(name="splash_mha_fwd", times=1, flops=197e12, length=8192, width=128)
    done = Compiled(name="gradient", side="trainer", fits=True, cost=Cost(kernels=(kernel,)))
    took = timing(done, parse_slice("v5e-4"))
    assert took.kernels_s == pytest.approx(1 / 0.555, rel=0.01) and took.peak_s == 1


def test_a_prefills_ragged_kernel_takes_its_flops_as_splash_going_forward():
    from jaxrl_async.plan.attention_rates import splash_share
    from jaxrl_async.plan.compiled import Compiled
    from jaxrl_async.plan.cost import Cost, Kernel
    from jaxrl_async.plan.timing import timing

    done = Compiled(name="prefill", side="sampler", fits=True, cost=Cost(flops=394e12))
    kernel = Kernel(name="ragged", times=2, flops=197e12, length=8192, width=128)
    took = timing(done, parse_slice("v5p-8"), ragged=kernel)
    assert splash_share("v5p", 8192, 128) > 0.5 > splash_share("v5p", 8192, 128, backward=True)
    assert took.kernels_s == pytest.approx(197e12 / 459e12 / 0.555, rel=0.01)
    assert took.peak_s == pytest.approx(591e12 / 459e12), "its products count at the peak, too"


def test_what_a_prefill_makes_lies_beside_the_pages_that_it_writes_to():
    from jaxrl_async.plan.compiled import Compiled
    from jaxrl_async.plan.hbm import sampler_memory

    own = [
        Compiled(name=name, side="sampler", fits=True, output_bytes=out, alias_bytes=aliased)
        for name, out, aliased in (("prepare", 0, 0), ("decode", 0, 0), ("prefill", 45, 40))
    ]
    found = sampler_memory(own, weights=20, sent=20, pages=40, state=1, usable=100)
    assert found.moment == "prefill" and found.total_bytes == 20 + 20 + 40 + 1 + 5


@pytest.mark.parametrize(("flops", "seconds"), [(0.0, 1e-3 / 0.8), (0.394e12, 2e-3 / 0.5)])
def test_a_step_takes_as_long_in_the_simulation_as_it_was_estimated(flops, seconds):
    """What the pages' kernels take, to read or to compute, is a part of both."""
    from types import SimpleNamespace

    from jaxrl_async.plan.cost import Kernel
    from jaxrl_async.plan.plan import Decode, DecodeLoad, pipeline_of

    places = SimpleNamespace(sampler=parse_slice("v5e-8"), num_samplers=4)
    kernel = Kernel(name="on_pages", times=1, flops=flops, width=640)
    load = DecodeLoad(rows=10, context=100.0, read_bytes=819e6, kernel=kernel)
    decode = Decode(load=load, step_s=5e-3, account={}, prefill_token_s=1e-6, tokens_per_s=1e3)
    learning = SimpleNamespace(step_s=1.0, tokens=1000.0)
    lengths = Histogram.constant(50)
    found = pipeline_of(Config(), places, learning, decode, 0.1, lengths).samplers
    context_s = found.context_token_s * load.rows * load.context
    assert context_s == pytest.approx(seconds)
    assert found.step_s[0] + context_s == pytest.approx(decode.step_s)


def test_what_most_of_the_time_goes_to_is_named_with_its_share():
    time = Timing(
        compute_s=1.0, products_s=0.5, peak_s=0.4, kernels_s=2.0, hidden_s=0.5, exposed_s=1.0,
        roofline_s=1.0,
    )  # fmt: skip
    assert time.largest == "attention" and time.largest_share == pytest.approx(2 / 4)


# ---- the command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "v9-8"], "unknown topology"),
        (["--topology", "v5e-4", "mesh.trainer.fspd=2"], "fspd"),
        (["--topology", "v5e-4", "--sampler-topology", "v5e-x"], "neither a number"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(tmp_path, capsys, arguments, message):
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    assert main([str(file), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_bad_lengths_file_ends_the_command(tmp_path, capsys):
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    assert main([str(file), "--topology", "v5e-4", "--lengths", str(tmp_path / "none")]) == 1
    assert "Give a run's folder" in capsys.readouterr().err


def test_without_the_compiler_the_command_names_what_to_install(tmp_path, capsys, monkeypatch):
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main([str(file), "--topology", "v5e-4"]) == 1
    assert "pip install 'jax[tpu]==" in capsys.readouterr().err


def test_chips_go_where_both_sides_are_equally_fast():
    """64 chips, of 8 a sampler; a trainer's chip gives 30 tokens/s, a sampler 200."""
    from types import SimpleNamespace

    from jaxrl_async.plan.hbm import Memory
    from jaxrl_async.plan.plan import best_splits

    places = SimpleNamespace(
        trainer=parse_slice("v5e-32"), sampler=parse_slice("v5e-8"), num_samplers=4
    )
    learning, decode = SimpleNamespace(tokens_per_s=32 * 30), SimpleNamespace(tokens_per_s=200)
    kinds = {"parameters": 1.0, "optimiser": 2.0, "activations and temporaries": 5.0}
    memory = Memory(kinds=kinds, moment="gradient", usable_bytes=11.0)
    best, *others = best_splits(places, memory, learning, decode)
    assert (best.trainer_chips, best.samplers, best.answer_tokens_per_s) == (32, 4, 800)
    (other,) = others  # on 8 chips the state alone would be 12
    assert (other.trainer_chips, other.samplers, other.answer_tokens_per_s) == (16, 6, 480)


def test_where_the_time_goes_sums_to_all_of_it_and_begins_with_what_is_useful():
    time = Timing(
        compute_s=0.6, products_s=0.4, peak_s=0.35, kernels_s=0.1, hidden_s=0.75, exposed_s=0.05,
        roofline_s=0.5,
    )  # fmt: skip
    assert time.estimate_s == pytest.approx(0.8)
    gradient = gradient_account(time, 0.3)
    assert gradient["model"] == pytest.approx(0.3 / 0.8)
    assert gradient["communication"] == pytest.approx(0.1 / 0.8)
    decode = decode_account(time, 16, weights_s=0.02, cache_s=0.005, host_s=0.2)
    assert decode["weights"] + decode["KV cache"] == pytest.approx(0.4 / 1.0)
    assert sum(gradient.values()) == pytest.approx(1) and sum(decode.values()) == pytest.approx(1)
