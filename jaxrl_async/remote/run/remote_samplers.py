"""Samplers in separate processes: the router and the weight channel that they join, and the
processes if the run starts them itself."""

import hashlib
import itertools
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxrl_async.buffer.replay import ReplayBuffer
from jaxrl_async.config.schema import Config
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import ConfigError
from jaxrl_async.mesh import TRAINER_RULES, shardings
from jaxrl_async.metrics.json_logs import LOGS_VARIABLE
from jaxrl_async.model.spec import ModelSpec, Params
from jaxrl_async.remote.run.host_offers import HostOffers, PartPublisher
from jaxrl_async.remote.run.local_samplers import LocalSamplers
from jaxrl_async.remote.run.members import Invitation, Members
from jaxrl_async.remote.run.sent_tokenizer import sent_tokenizer
from jaxrl_async.remote.sampler.rendezvous import broadcast_text
from jaxrl_async.remote.weights.outbox import WeightOutbox
from jaxrl_async.remote.weights.protocols import Offering
from jaxrl_async.remote.weights.transport_choice import make_offering
from jaxrl_async.remote.wire.secret import SECRET_VARIABLE, new_secret, read_secret
from jaxrl_async.remote.wire.tls import read_tls
from jaxrl_async.run.builders.devices import compile_cache_folder
from jaxrl_async.run.builders.inputs import Inputs
from jaxrl_async.run.builders.samplers import (
    Sampling,
    SentWeights,
    make_router,
    run_probe_ids,
    sampler_settings,
    sent_once,
    sent_weights,
)
from jaxrl_async.run.lockstep import Lockstep
from jaxrl_async.run.pinning import devices_of_sampler
from jaxrl_async.sampler.request_checks import RequestCheck
from jaxrl_async.sampler.router.router import Elastic
from jaxrl_async.sampler.setup import kv_plan, limits_of
from jaxrl_async.types import IntArray, VersionedParams
from jaxrl_async.weights.channel import WeightChannel
from jaxrl_async.weights.local import PrivateCopy
from jaxrl_async.weights.manifest import manifest_of

LOGS = "samplers"
"""Folder within the run's folder for the output of the processes that the run starts."""

log = logging.getLogger(__name__)


def make_remote_sampling(
    config: Config,
    inputs: Inputs,
    weights: VersionedParams,
    gate: ReplayBuffer,
    lockstep: Lockstep,
    folder: Path,
    closing: ExitStack,
    base: Params | None = None,
) -> Sampling:
    """Create the router and the weight channel that samplers join; the first process listens for
    them.

    Args:
        config: remote, mesh, sampler, weights, faults, and the seed.
        inputs: the policy's spec, the slices, and the counts of faults.
        weights: of the policy, on the trainer's slice.
        gate: notified when a version is live in every sampler.
        lockstep: the processes of the trainer.
        folder: the run's folder.
        closing: ends processes, connections and offers, also if a later step fails.
        base: frozen base weights of an adapter, on the trainer's slice; sent once to each sampler.
            None: `weights` are all weights.

    Raises ConfigError in all processes of the trainer if the secrets in their environments differ.
    """
    faults, spec = inputs.faults, inputs.spec
    settings = sampler_settings(config, spec, run_probe_ids(inputs))
    sent = sent_weights(config.weights, config.model, spec)
    given_secret = read_secret()
    secret = _agreed_secret(given_secret, lockstep)
    outbox = make_outbox(config, inputs, sent, lockstep, secret)
    channel = WeightChannel(
        remote=outbox, on_live=gate.set_live, version=weights.version, count=faults.add
    )
    closing.callback(channel.close)
    channel.begin(weights.params, base=_base_to_send(config, inputs, base))
    check = RequestCheck(
        limits_of(spec, config.sampler, config.run.seed, settings), itertools.count()
    )
    elastic = Elastic(check=check, wait_s=config.remote_settings.wait_s)
    router = make_router(config.faults, (), faults.add, elastic=elastic)
    probe = settings.probe_tokens
    if not lockstep.plays:
        return Sampling(
            router=router, channel=channel, publisher=PartPublisher(channel), probe=probe
        )
    members = Members(
        invitation(config, spec, run_probe_ids(inputs), inputs.tokenizer),
        channel,
        outbox,
        router,
        check,
        secret=secret,
        tls=read_tls(config.remote_settings),
        count=faults.add,
        own_secret=b"" if given_secret or config.mesh.samplers_in == "processes" else secret,
    )
    closing.callback(members.close)
    members.announce(folder)
    processes = None
    if config.mesh.samplers_in == "processes":
        processes = local_samplers(config, members, secret, folder / LOGS, faults.add)
    sampling = Sampling(
        router=router,
        channel=channel,
        publisher=channel,
        probe=probe,
        members=members,
        processes=processes,
    )
    closing.callback(sampling.dismiss)
    if processes is not None:
        processes.start()
    return sampling


def _base_to_send(config: Config, inputs: Inputs, base: Params | None) -> Params | None:
    """Return the frozen base in the dtypes that samplers get; it is copied only to convert
    dtypes."""
    sent = sent_once(config.weights, config.model, inputs.spec)
    if base is None or sent is None:
        return None
    if manifest_of(base) == manifest_of(sent.lowered):
        return base
    where = shardings(sent.table, inputs.slices.trainer, TRAINER_RULES)
    return PrivateCopy(where, sent.conversion)(base)


def invitation(
    config: Config,
    spec: ModelSpec,
    probe_ids: IntArray,
    tokenizer: Tokenizer | None = None,
) -> Invitation:
    """Return the configuration that a joining sampler gets and must match."""
    dtype, keeps = jnp.dtype(config.model.computes_in), config.algorithm.keep_routing
    plan = kv_plan(spec, config.sampler, dtype, keep_routing=keeps)
    return Invitation(
        config=config,
        spec=spec,
        capacity=plan.slots + plan.reserve,
        probe_ids=probe_ids,
        tokenizer=None if tokenizer is None else sent_tokenizer(tokenizer),
    )


def make_outbox(
    config: Config,
    inputs: Inputs,
    sent: SentWeights,
    lockstep: Lockstep,
    secret: bytes,
) -> WeightOutbox:
    """Create the outbox that offers the weights to other processes.

    Args:
        config: remote, mesh, weights, and the run's name.
        inputs: the slices, and the counts of faults.
        sent: the policy's weights that are sent.
        lockstep: the processes of the trainer; each offers its own part.
        secret: to be proved by connections for weights.
    """
    remote, faults = config.remote_settings, inputs.faults
    offering: Offering = make_offering(
        remote,
        run=config.run.name,
        secret=secret,
        local_samplers=config.mesh.samplers_in == "processes" or lockstep.count == 1,
        separate_machines=config.mesh.samplers_in == "external",
        all_agree=lambda has: all(lockstep.gather_json(has)),
    )
    if lockstep.count > 1:
        offering = HostOffers(
            offering,
            index=lockstep.index,
            count=lockstep.count,
            timeout_s=remote.transfer_timeout_s,
        )
    copy = PrivateCopy(shardings(sent.table, inputs.slices.trainer, TRAINER_RULES), sent.conversion)
    return WeightOutbox(
        copy,
        offering,
        remote,
        checksum=config.weights.checksum,
        count=faults.add,
    )


def local_samplers(
    config: Config,
    members: Members,
    secret: bytes,
    logs: Path,
    count: Callable[[str], None],
) -> LocalSamplers:
    """Create the sampler processes of this machine, without starting them.

    Args:
        config: mesh, remote and faults.
        members: the run's side that they join.
        secret: to be proved by them.
        logs: folder of their output.
        count: called with the name of each fault.
    """
    cores = sorted(os.sched_getaffinity(0))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = None if visible is None else visible.split(",")
    platform = jax.default_backend()
    return LocalSamplers(
        address=str(members.local_address),
        placements=[
            devices_of_sampler(config.mesh, platform, index, cores=cores, gpus=gpus)
            for index in range(config.mesh.samplers)
        ],
        faults=config.faults,
        secret=secret.decode(),
        logs=logs,
        environment={
            "JAX_COMPILATION_CACHE_DIR": compile_cache_folder(),
            LOGS_VARIABLE: config.run.logs,
        },
        count=count,
        traced=config.metrics.spans,
    )


def _agreed_secret(own: bytes, lockstep: Lockstep) -> bytes:
    """Return the environment's secret or, if no process of the trainer has one, one generated for
    this start of the run. It is the same in all processes. Raises ConfigError in all if the secrets
    differ."""
    hashes = lockstep.gather_json(hashlib.sha256(own).hexdigest() if own else "")
    if len(set(hashes)) > 1:
        have = [index for index, digest in enumerate(hashes) if digest]
        raise ConfigError(
            f"the {len(hashes)} processes of the trainer have different secrets: {SECRET_VARIABLE} "
            f"is set in processes {have}; set it to the same value in all, or in none"
        )
    if own:
        return own
    if lockstep.count == 1:
        return new_secret()
    generated = "" if lockstep.index else new_secret().decode()
    return broadcast_text(generated, leads=not lockstep.index).encode()
