"""What a sampler process is built of, from the trainer's Welcome: model, mesh, and the way of the
weights. Each process of a sampler over several hosts builds the same."""

import dataclasses
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from pydantic import ValidationError

from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.config.schema import AxesSection, Config
from jaxrl_async.errors import ConfigError, MeshError, printable
from jaxrl_async.mesh import (
    SAMPLER_RULES,
    check_collective,
    have_threads_for_collectives,
    make_mesh,
    skip_absent_accelerators,
    spans_processes,
)
from jaxrl_async.model.frozen_base import form_of
from jaxrl_async.model.hf import load_params
from jaxrl_async.model.moe import check_experts
from jaxrl_async.model.own_code import OwnCode, is_loaded
from jaxrl_async.model.own_spec import check_own
from jaxrl_async.model.spec import ModelSpec, Params
from jaxrl_async.remote.weights.base_delivery import BaseBringer
from jaxrl_async.remote.weights.protocols import Fetching
from jaxrl_async.remote.weights.receiver import WeightReceiver
from jaxrl_async.remote.weights.transport_choice import make_fetching
from jaxrl_async.remote.weights.verification import SoundFetching
from jaxrl_async.remote.wire.messages import Welcome
from jaxrl_async.remote.wire.secret import LEAST_BYTES, SECRET_VARIABLE, is_strong
from jaxrl_async.remote.wire.session_port import Session
from jaxrl_async.run.builders.device_memory import check_sampler_fits
from jaxrl_async.run.builders.samplers import (
    sampler_settings,
    sent_once,
    sent_weights,
    uses_one_thread,
)
from jaxrl_async.sampler.intake import NO_FOLLOWERS, Followers
from jaxrl_async.sampler.setup import SamplerSetup, build_setup
from jaxrl_async.weights.manifest import manifest_of

TLS_FILES = {"tls_certificate", "tls_key", "tls_authority"}
"""Settings of a connection that each side has its own of."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerParts:
    """What the trainer's Welcome says, on this process's devices."""

    welcome: Welcome
    config: Config
    spec: ModelSpec
    mesh: Mesh
    target: Params  # what each version brings, as ShapeDtypeStructs with shardings
    base: Params | None = None  # what comes once, if that is an adapter, likewise

    def setup(self, followers: Followers = NO_FOLLOWERS) -> SamplerSetup:
        """Return the setup of the sampler. followers: its other processes, where this one leads."""
        settings = replace(
            sampler_settings(self.config, self.spec, self.welcome.probe_ids),
            one_thread=uses_one_thread(self.mesh, colocated=False),
            followers=followers,
        )
        check_sampler_fits(self.config, self.spec, self.mesh)
        return build_setup(self.spec, self.config.sampler, self.mesh, self.welcome.seed, settings)

    def receiver(
        self, session: Session, own: RemoteSection, *, host: str, secret: bytes
    ) -> tuple[WeightReceiver, str]:
        """Begin to fetch what is offered on a session; return also the address at which this
        process passes weights on.

        Args:
            session: on which the offers come.
            own: names this side's certificates, and its port if it was given one.
            host: of this machine, as other samplers reach it.
            secret: that connections prove.
        """
        given = own.model_dump(include=TLS_FILES | ({"data_port"} & own.model_fields_set))
        fetching = make_fetching(
            self.config.remote.model_copy(update=given),
            self.target,
            host=host,
            advertise=host,
            secret=secret,
        )
        layout = manifest_of(self.target).layout_hash
        base = None if self.base is None else self._frozen_base(self.base, fetching)
        receiver = WeightReceiver(session, fetching, layout_hash=layout, base=base)
        return receiver, fetching.address

    def _frozen_base(self, target: Params, fetching: Fetching) -> BaseBringer:
        """Return what brings the base: from model.path if this machine has it, and it is sent as it
        is stored."""
        path, layout = self.config.model.path, manifest_of(target).layout_hash
        readable = (
            path is not None
            and Path(path).is_dir()
            and self.config.weights.eight_bits is None
            and form_of(self.config.model.lora) is None
            and not spans_processes(self.mesh)
        )

        def read() -> Params:
            assert path is not None
            where = jax.tree.map(lambda x: x.sharding, target)
            return load_params(path, self.spec, where, jax.tree.leaves(target)[0].dtype)

        return BaseBringer(
            SoundFetching(fetching=fetching.for_base(target), layout_hash=layout),
            read if readable else None,
        )


def parts_of(welcome: Welcome) -> SamplerParts:
    """Read a Welcome, and lay the sampler's mesh over the devices of this JAX world. Raises
    ConfigError and MeshError."""
    config = config_of(welcome)
    spec, mesh = sent_spec(welcome.spec), sampler_mesh(welcome.mesh)
    check_experts(spec, mesh, "--mesh")
    sent = sent_weights(config.weights, config.model, spec)
    base = sent_once(config.weights, config.model, spec)
    return SamplerParts(
        welcome=welcome,
        config=config,
        spec=spec,
        mesh=mesh,
        target=sent.on(mesh, SAMPLER_RULES),
        base=None if base is None else base.on(mesh, SAMPLER_RULES),
    )


def config_of(welcome: Welcome) -> Config:
    """Return the run's configuration. Raises ConfigError if the trainer's version differs."""
    try:
        return Config.model_validate(welcome.config)
    except ValidationError as error:
        raise _other_version(error) from None


def check_code(welcome: Welcome, secret: bytes) -> None:
    """Raise ConfigError if the model's layers are a class in a file of this machine, which would be
    executed, and nobody whom this user trusts named it.

    secret: that the trainer has proved; empty: none.
    """
    own = sent_own(welcome.spec)
    if own is None or is_strong(secret) or is_loaded(own):
        return
    named = printable(f"{own.file}:{own.name}")
    raise ConfigError(
        f"the trainer names {named} as the model's layers, and has not proved a "
        "secret of its user: the file is not executed. Set the environment variable "
        f"{SECRET_VARIABLE} to the same {LEAST_BYTES} characters or more there and here, or read "
        f"the file and name it here: --decoder {named}"
    )


def claim_sampler_devices(axes: Mapping[str, int], processes: int = 1) -> None:
    """Ask JAX's CPU backend, before its first use, for this process's part of a slice; without
    effect if an accelerator is the default backend."""
    skip_absent_accelerators()
    needed = math.prod(axes.values())
    if needed > 1:
        have_threads_for_collectives()
    try:
        jax.config.update("jax_num_cpu_devices", max(1, needed // processes))
    except RuntimeError:
        log.info("JAX was started before; the slice uses the devices that are there")


def sampler_mesh(axes: Mapping[str, int]) -> Mesh:
    """Return the mesh of a sampler on the devices of this JAX world. Raises MeshError if they are
    too few, or if the TPU compiler refuses them."""
    if not jax.distributed.is_initialized():
        claim_sampler_devices(axes)
    needed, devices = math.prod(axes.values()), jax.devices()
    if len(devices) < needed:
        shape = ", ".join(f"{axis}={size}" for axis, size in axes.items() if size > 1)
        raise MeshError(
            f"the sampler's slice needs {needed} devices ({shape}), and there are {len(devices)} "
            f"here: {devices[0].platform}. Give --mesh other axes, such as tensor={len(devices)}, "
            "or change mesh.sampler of the run."
        )
    mesh = make_mesh(AxesSection(**axes), devices[:needed])
    if devices[0].platform == "tpu":
        check_collective(mesh, "--mesh")
    return mesh


def sent_spec(fields: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a Welcome describes. Raises ConfigError."""
    try:
        spec = ModelSpec.from_fields(fields)
    except (KeyError, TypeError, ValueError) as error:
        raise _other_version(error) from None
    check_own(spec)
    return spec


def sent_own(fields: Mapping[str, Any]) -> OwnCode | None:
    """Return the user's class that a Welcome names; None: it names none. Raises ConfigError."""
    try:
        own = ModelSpec.from_fields(fields).own
        if own is not None and not all(isinstance(t, str) for t in dataclasses.astuple(own)):
            raise TypeError("the class of its layers")
    except (KeyError, TypeError, ValueError) as error:
        raise _other_version(error) from None
    return own


def _other_version(error: Exception) -> ConfigError:
    return ConfigError(
        f"what the trainer sent cannot be read ({error}). Run the same version of jaxrl_async on "
        "both sides."
    )
