"""The channel over the real transports: from the trainer's mesh to that of each sampler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from remote_side import eventually

from jaxrl_async.config import schema
from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.config.schema import AxesSection
from jaxrl_async.mesh import SAMPLER_RULES, TRAINER_RULES, make_slices, shapes_on, shardings
from jaxrl_async.model.quantize import quantize, quantized_table
from jaxrl_async.model.spec import Weight
from jaxrl_async.remote.weights.outbox import WeightOutbox
from jaxrl_async.remote.weights.receiver import WeightReceiver
from jaxrl_async.remote.weights.remote_link import RemoteEnd
from jaxrl_async.remote.weights.transport_choice import make_fetching, make_offering
from jaxrl_async.testing.session_pair import session_pair
from jaxrl_async.weights.channel import WeightChannel
from jaxrl_async.weights.local import Conversion, PrivateCopy

pytestmark = pytest.mark.full

TABLE = {
    "embed": Weight(shape=(16, 8), axes=("vocab", "embed"), init="ones", hf="e"),
    "layers": {
        "wq": Weight(
            shape=(2, 8, 4, 4), axes=("layers", "embed", "heads", "head_dim"), init="ones", hf="q"
        ),
        "norm": Weight(shape=(2, 8), axes=("layers", "embed"), init="ones", hf="n"),
    },
}


def values(version):
    key = jax.random.key(version)
    return {
        "embed": jax.random.normal(key, (16, 8)),
        "layers": {"wq": jax.random.normal(key, (2, 8, 4, 4)), "norm": jnp.full((2, 8), version)},
    }


def meshes(trainer, sampler):
    section = schema.MeshSection(trainer=AxesSection(**trainer), sampler=AxesSection(**sampler))
    return make_slices(section)


@pytest.mark.parametrize("transfer", ["tcp", "shared_memory"])
@pytest.mark.parametrize(
    ("trainer", "sampler", "dtype", "kind"),
    [
        ({"fsdp": 4}, {"tensor": 2}, "bfloat16", None),
        ({"fsdp": 2}, {"data": 2, "tensor": 2}, "float32", "int8"),
    ],
)
def test_samplers_get_what_the_trainer_would_compute_for_them(
    transfer, trainer, sampler, dtype, kind
):
    slices = meshes(trainer, sampler)
    sent = quantized_table(TABLE) if kind else TABLE

    def convert(params):
        return quantize(TABLE, params, kind=kind, dtype=jnp.dtype(dtype))

    section = RemoteSection(transfer=transfer, fanout=1)
    source = shardings(TABLE, slices.trainer, TRAINER_RULES)
    copy = PrivateCopy(
        shardings(sent, slices.trainer, TRAINER_RULES),
        Conversion(dtype=jnp.dtype(dtype), convert=convert if kind else None),
    )
    offering = make_offering(section, run=f"test-{transfer}-{dtype}")
    outbox = WeightOutbox(copy, offering, section)
    channel = WeightChannel(remote=outbox)
    channel.begin(jax.device_put(values(0), source))
    target = shapes_on(
        jax.eval_shape(copy, values(0)), shardings(sent, slices.sampler, SAMPLER_RULES)
    )
    pairs, receivers = [], []
    try:
        for name in ("a", "b"):
            pair = session_pair(sampler=name)
            fetching = make_fetching(section, target)
            receiver = WeightReceiver(pair.sampler, fetching)
            pairs.append(pair)
            receivers.append(receiver)
            RemoteEnd(pair.trainer, fetching.address, channel.exchange, outbox)
            found = [receiver.first(60)]
            receiver.live(0)
        channel.publish(1, jax.device_put(values(1), source))
        for receiver in receivers:
            eventually(lambda r=receiver: r.staged is not None)
            found.append(receiver.poll())
            receiver.live(1)
        channel.wait_live(1, 60)
        traffic = channel.stats().remote
        assert traffic.transfers == 4 and traffic.repeats == 0
        assert (traffic.passed_bytes > 0) == (transfer == "tcp")
    finally:
        for pair, receiver in zip(pairs, receivers, strict=True):
            pair.close()
            receiver.close()
        channel.close()
    for update in found:
        wanted = jax.device_get(copy(jax.device_put(values(update.version), source)))
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(update.params), wanted)
        jax.tree.map(
            lambda x, goal: x.sharding.is_equivalent_to(goal.sharding, x.ndim) or pytest.fail(""),
            update.params,
            target,
        )
