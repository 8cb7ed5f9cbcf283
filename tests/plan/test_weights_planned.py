"""How a plan counts weights to samplers in processes, and traffic between slices."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl_async.config.schema import Config
from jaxrl_async.plan.__main__ import main
from jaxrl_async.plan.chips import CHIPS, parse_slice
from jaxrl_async.plan.cost import BETWEEN_SLICES, Collective, cost_of
from jaxrl_async.plan.hlo import parse
from jaxrl_async.plan.pace import pace_of
from jaxrl_async.plan.plan import between_slices
from jaxrl_async.plan.timing import collective_s
from jaxrl_async.plan.transport_rates import transfer_of

SEND = """HloModule m, entry_computation_layout={{(f32[256,1024]{{1,0}})->f32[256,1024]{{1,0}}}}

ENTRY %main (p: f32[256,1024]) -> f32[256,1024] {{
  %p = f32[256,1024]{{1,0}} parameter(0)
  %after-all = token[] after-all()
  %send = (f32[256,1024]{{1,0}}, u32[], token[]) send(%p, %after-all), channel_id=2, is_host_transfer=true, frontend_attributes={{_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_target="{target}",_xla_megascale_transfer_type="{kind}"}}
  %recv = (f32[256,1024]{{1,0}}, u32[], token[]) recv(%after-all), channel_id=1, is_host_transfer=true, frontend_attributes={{_xla_host_transfer_handler_name="xla_megascale_runtime"}}
  ROOT %out = f32[256,1024]{{1,0}} copy(%p)
}}
"""  # noqa: E501
MIB = 2.0**20


@pytest.mark.parametrize(
    ("kind", "target", "slices", "sent"),
    [
        ("ALL_REDUCE", "{1,2}x{0:3}", 2, MIB),  # half of it, twice
        ("ALL_REDUCE", "{1:4}x{0:3}", 4, 1.5 * MIB),
        ("REDUCE_SCATTER", "{1,2,3,4}x{0:3}", 4, 0.75 * MIB),
        ("ALL_GATHER", "{1:3}x{0:3}", 3, 2 * MIB),  # its share to both others
    ],
)
def test_what_goes_between_slices_is_counted_as_the_compiler_writes_it(kind, target, slices, sent):
    program, chip = parse(SEND.format(kind=kind, target=target)), CHIPS["v5e"]
    cost = cost_of(program, {"data": 2, "fsdp": 4}, pace_of(chip))
    name = kind.lower().replace("_", "-")
    assert cost.collectives == (
        Collective(kind=name, axes=BETWEEN_SLICES, group=slices, num_bytes=sent, times=1.0),
    )
    assert collective_s(cost.collectives[0], parse_slice("v5e-32")) == pytest.approx(sent / 3.1e9)


def test_several_slices_are_so_many_chips_and_links_are_within_one():
    one = parse_slice("v5e-64")
    two = replace(one, count=2)
    assert (two.num_chips, two.num_devices) == (128, 128)
    assert (two.name, two.topology) == ("2 x v5e-64", "2 x v5e:8x8")
    assert two.link_share(64) == one.link_share(64)


def mesh(devices, hosts):
    each = devices // hosts
    made = [SimpleNamespace(process_index=n // each) for n in range(devices)]
    return SimpleNamespace(size=devices, devices=np.array(made, object))


def places(*, trainer, sampler, samplers, chip="v5p-8"):
    """trainer, sampler: (devices, hosts)."""
    where = parse_slice(chip)
    slices = SimpleNamespace(trainer=mesh(*trainer), sampler=mesh(*sampler))
    return SimpleNamespace(trainer=where, sampler=where, num_samplers=samplers, slices=slices)


def config(**remote):
    return Config(mesh={"samplers_in": "external"}, remote=remote)


def test_weights_go_at_the_rate_that_was_measured_and_the_network_is_the_bound():
    where = places(trainer=(32, 8), sampler=(4, 1), samplers=6)
    seconds, tree = transfer_of(config(), where, 22e9)
    assert tree.trainer_bytes_per_s == pytest.approx(8 * 2.2e9)
    assert tree.sampler_bytes_per_s == pytest.approx(2.2e9) and tree.fanout == 2
    # four samplers get it from two, each of which sends two copies: 1.1 GB/s
    assert seconds == pytest.approx(20.0 + 22e9 / 32 / 8e9 + 22e9 / 4 / 8e9 + 0.02)
    bound_s, at_bound = transfer_of(config(), where, 22e9, measured=False)
    assert at_bound.sampler_bytes_per_s == pytest.approx(4 * 6.2e9) and bound_s < seconds


def test_a_slow_network_is_what_counts():
    where = places(trainer=(1, 1), sampler=(1, 1), samplers=1, chip="v5e-1")
    rate = transfer_of(config(), where, 1e9)[1].sampler_bytes_per_s
    assert rate == 2.2e9
    slow = SimpleNamespace(chip=replace(parse_slice("v5e-1").chip, dcn_bytes_per_s=1e9), count=1)
    where.trainer = where.sampler = slow
    assert transfer_of(config(), where, 1e9)[1].sampler_bytes_per_s == 1e9


def test_samplers_that_span_hosts_pass_nothing_on():
    """The 70B plan: 16 samplers of two hosts each, 141 GB: 2.26 TB a version from the trainer."""
    where = places(trainer=(128, 32), sampler=(8, 2), samplers=16)
    seconds, tree = transfer_of(config(), where, 141e9)
    assert tree.fanout == 16 and tree.fanout * tree.num_bytes == pytest.approx(2.256e12)
    # 32 processes of 2.2 GB/s, 16 copies: 4.4 GB/s to each, as much as its two processes take
    assert seconds == pytest.approx(141 / 4.4 + 141 / 128 / 8 + 141 / 8 / 8 + 0.01)


def test_from_device_to_device_nothing_was_measured_and_the_bound_is_taken():
    where = places(trainer=(32, 8), sampler=(4, 1), samplers=6)
    device = config(transfer="device")
    assert transfer_of(device, where, 22e9)[1].fanout == 6, "each pulls from the trainer"
    assert transfer_of(device, where, 22e9) == transfer_of(device, where, 22e9, measured=False)


def test_a_step_between_slices_is_its_micro_batches_and_its_updates():
    def program(name, *sent):
        talks = tuple(
            Collective(kind="all-reduce", axes=axes, group=2, num_bytes=n, times=1)
            for axes, n in sent
        )
        return SimpleNamespace(name=name, cost=SimpleNamespace(collectives=talks))

    programs = (
        program("gradient", (BETWEEN_SLICES, 2e9), ("fsdp", 7e9)),
        program("update", (BETWEEN_SLICES, 1e9)),
        program("cast"),
    )
    side = SimpleNamespace(where=replace(parse_slice("v5e-32"), count=2), programs=programs)
    run = Config(algorithm={"epochs": 2, "minibatches": 3})
    found = between_slices(run, side, SimpleNamespace(micro_batches=15))
    assert found.slices == 2 and found.bytes_of_device == 15 * 2 * 2e9 + 2 * 3 * 1e9
    assert found.seconds == pytest.approx(66e9 / 3.1e9)
    one = SimpleNamespace(where=parse_slice("v5e-32"), programs=programs)
    assert between_slices(run, one, SimpleNamespace(micro_batches=15)) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-slices", "0"], "give 1 or more"),
        (["--num-slices", "2", "--write", "x"], "leave out --write"),
        (["--num-slices", "2"], "Set mesh.samplers_in=external"),
    ],
)
def test_several_slices_that_cannot_be_planned_are_refused(tmp_path, capsys, words, message):
    file = tmp_path / "c.yaml"
    file.write_text("model: {architecture: {vocab: 512}}\n")
    assert main([str(file), "--topology", "v5e-8", *words]) == 2
    assert message in capsys.readouterr().err
