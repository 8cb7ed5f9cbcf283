"""The plan's arithmetic on examples worked by hand, and what it refuses."""

import json

import pytest

from jaxrl_async.config.schema import Config
from jaxrl_async.errors import ConfigError, DataError
from jaxrl_async.plan.__main__ import main
from jaxrl_async.plan.chips import CHIPS, parse_chips, parse_slice
from jaxrl_async.plan.cost import Collective
from jaxrl_async.plan.lengths import assumed, mean_context, read_lengths
from jaxrl_async.plan.simulate import Histogram

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
    ("name", "said"),
    [
        ("v9-8", "unknown topology 'v9-8'"),
        ("v5e", "GENERATION-CHIPS"),
        ("v5e-eight", "neither a number of chips nor a shape"),
        ("v5e-0", "neither a number"),
        ("v5e-48", "the next below is v5e-32"),
        ("v5e-512", "256 at most"),
    ],
)
def test_an_unknown_topology_is_refused_with_a_way_out(name, said):
    with pytest.raises(ConfigError, match=said):
        parse_slice(name)


def test_samplers_may_be_any_number_of_chips():
    chip, count = parse_chips("v5e-48")
    assert (chip.generation, count) == ("v5e", 48)


def test_a_device_has_its_share_of_a_chip():
    v7, v5e = CHIPS["tpu7x"], CHIPS["v5e"]
    assert parse_slice("tpu7x-4").num_devices == 8
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
    ("text", "said"),
    [
        ("{", "no JSON"),
        ("[]", "no length with a weight above 0"),
        ('"7"', "no length with a weight above 0"),
        ('{"-3": 1}', "no length and weight"),
        ('{"3": "many"}', "no length and weight"),
        ("[1, null]", "no length and weight"),
    ],
)
def test_a_bad_lengths_file_is_refused(tmp_path, text, said):
    file = tmp_path / "lengths.json"
    file.write_text(text)
    with pytest.raises(DataError, match=said):
        read_lengths(file, 100)


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
    from jaxrl_async.plan.memory import trainer_memory

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


def test_a_refusal_for_memory_is_told_from_another():
    from jaxrl_async.plan.compiled import needed_bytes

    used = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.5G of 15.75G hbm."
    wants = "RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (400.00M) exceeds"
    assert needed_bytes(used) == 20.5 * 2**30
    assert needed_bytes(wants) == 400 * 2**20
    assert needed_bytes("INTERNAL: something else (3.0G)") is None


def test_model_flops_are_six_for_a_weight_and_token():
    from jaxrl_async.model.spec import ModelSpec
    from jaxrl_async.plan.whole import model_flops
    from jaxrl_async.trainer.step import num_matmul_params

    spec = ModelSpec.from_architecture(Config().model.architecture, 512)
    per_token = 6 * num_matmul_params(spec) + 6 * spec.layers * spec.heads * spec.head_dim * 100
    assert model_flops(spec, 1000, 100) == pytest.approx(1000 * per_token)


# ---- the command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--topology", "v9-8"], "unknown topology"),
        (["--topology", "v5e-4", "mesh.trainer.fspd=2"], "fspd"),
        (["--topology", "v5e-4", "--sampler-topology", "v5e-x"], "neither a number"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(tmp_path, capsys, arguments, said):
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    assert main([str(file), *arguments]) == 2
    assert said in capsys.readouterr().err


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

    from jaxrl_async.plan.memory import Memory
    from jaxrl_async.plan.whole import best_splits

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
