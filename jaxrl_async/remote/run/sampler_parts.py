"""Parts of a sampler process, built from the trainer's Welcome: model, mesh and weight transfer.
Each process of a sampler on several hosts builds the same parts."""

import dataclasses
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from jax.sharding import Mesh
from pydantic import ValidationError

from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.config.schema import AxesSection, Config
from jaxrl_async.errors import ConfigError, MeshError, printable
from jaxrl_async.mesh import (
    SAMPLER_RULES,
    check_collective,
    make_mesh,
    reserve_collective_threads,
    skip_absent_accelerators,
    spans_processes,
)
from jaxrl_async.model.frozen_base import form_of
from jaxrl_async.model.hf import load_params
from jaxrl_async.model.moe import check_experts
from jaxrl_async.model.own_code import OwnCode, is_loaded
from jaxrl_async.model.own_spec import check_own
from jaxrl_async.model.spec import ModelSpec, Params
from jaxrl_async.remote.run.sent_tokenizer import ReceivedTokenizer
from jaxrl_async.remote.weights.base_delivery import BaseLoader
from jaxrl_async.remote.weights.protocols import Fetching
from jaxrl_async.remote.weights.receiver import WeightReceiver
from jaxrl_async.remote.weights.transport_choice import make_fetching
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

TLS_FILES = {"tls_certificate", "tls_key", "tls_authority"}
"""Connection settings that differ on each side."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerParts:
    """The contents of the trainer's Welcome, on this process's devices."""

    welcome: Welcome
    config: Config
    spec: ModelSpec
    mesh: Mesh
    target: Params  # weights of each version, as ShapeDtypeStructs with shardings
    base: Params | None = None  # base weights of an adapter, sent once, likewise

    def setup(self, followers: Followers = NO_FOLLOWERS) -> SamplerSetup:
        """Return the setup of the sampler. followers: its other processes, if this one leads."""
        sent = self.welcome.tokenizer
        settings = replace(
            sampler_settings(self.config, self.spec, self.welcome.probe_ids),
            one_thread=uses_one_thread(self.mesh, colocated=False),
            followers=followers,
            tokenizer=None if sent is None else ReceivedTokenizer(sent),
        )
        check_sampler_fits(self.config, self.spec, self.mesh)
        return build_setup(self.spec, self.config.sampler, self.mesh, self.welcome.seed, settings)

    def receiver(
        self, session: Session, own: RemoteSection, *, host: str, secret: bytes
    ) -> tuple[WeightReceiver, str]:
        """Start fetching the weights offered on a session. Returns the receiver and the address at
        which this process relays weights.

        Args:
            session: receives the offers.
            own: this side's certificates, and its port if set.
            host: this machine's address for other samplers.
            secret: to be proved by connections.
        """
        own_settings = own.model_dump(include=TLS_FILES | ({"data_port"} & own.model_fields_set))
        fetching = make_fetching(
            self.config.remote_settings.model_copy(update=own_settings),
            self.target,
            host=host,
            advertise=host,
            secret=secret,
        )
        base = None if self.base is None else self._frozen_base(self.base, fetching)
        receiver = WeightReceiver(session, fetching, base=base)
        return receiver, fetching.address

    def _frozen_base(self, target: Params, fetching: Fetching) -> BaseLoader:
        """Return the loader of the base. It reads model.path if this machine has it and the base is
        sent in its stored form."""
        path = self.config.model.path
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

        return BaseLoader(fetching.for_base(target), read if readable else None)


def parts_of(welcome: Welcome) -> SamplerParts:
    """Read a Welcome, and create the sampler's mesh on the devices of this JAX world. Raises
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
        raise _version_error(error) from None


def check_code(welcome: Welcome, secret: bytes) -> None:
    """Raise ConfigError if the model's layers are a class in a file on this machine that this user
    has not approved, since the file would be executed.

    secret: proved by the trainer; empty: none.
    """
    own = sent_own(welcome.spec)
    if own is None or is_strong(secret) or is_loaded(own):
        return
    named = printable(f"{own.file}:{own.name}")
    raise ConfigError(
        f"the trainer names {named} as the model's layers, but has not proved a "
        "strong shared secret: the file is not executed. Set the environment variable "
        f"{SECRET_VARIABLE} to the same {LEAST_BYTES} characters or more there and here, or read "
        f"the file and name it here: --decoder {named}"
    )


def claim_sampler_devices(axes: Mapping[str, int], processes: int = 1) -> None:
    """Request the CPU devices of this process's part of a slice, before JAX's CPU backend is first
    used. It has no effect if an accelerator is the default backend."""
    skip_absent_accelerators()
    needed = math.prod(axes.values())
    if needed > 1:
        reserve_collective_threads()
    try:
        jax.config.update("jax_num_cpu_devices", max(1, needed // processes))
    except RuntimeError:
        log.info("JAX is already initialized; the slice uses the existing devices")


def sampler_mesh(axes: Mapping[str, int]) -> Mesh:
    """Return the mesh of a sampler on the devices of this JAX world. Raises MeshError if there are
    too few, or if the TPU compiler refuses the mesh."""
    if not jax.distributed.is_initialized():
        claim_sampler_devices(axes)
    needed, devices = math.prod(axes.values()), jax.devices()
    if len(devices) < needed:
        shape = ", ".join(f"{axis}={size}" for axis, size in axes.items() if size > 1)
        raise MeshError(
            f"the sampler's slice needs {needed} devices ({shape}), but this machine has "
            f"{len(devices)}: {devices[0].platform}. Set --mesh, such as tensor={len(devices)}, "
            "or change mesh.sampler of the run."
        )
    mesh = make_mesh(AxesSection(**axes), devices[:needed])
    if devices[0].platform == "tpu":
        check_collective(mesh, "--mesh")
    return mesh


def sent_spec(fields: Mapping[str, object]) -> ModelSpec:
    """Return the model that a Welcome describes. Raises ConfigError."""
    spec = _spec_of(fields)
    check_own(spec)
    return spec


def sent_own(fields: Mapping[str, object]) -> OwnCode | None:
    """Return the user's layer class named in a Welcome, or None. Raises ConfigError."""
    own = _spec_of(fields).own
    if own is not None and not all(isinstance(t, str) for t in dataclasses.astuple(own)):
        raise _version_error(TypeError("the class of its layers"))
    return own


def _spec_of(fields: Mapping[str, object]) -> ModelSpec:
    try:
        return ModelSpec.from_fields(fields)
    except (KeyError, TypeError, ValueError) as error:
        raise _version_error(error) from None


def _version_error(error: Exception) -> ConfigError:
    return ConfigError(
        f"what the trainer sent cannot be read ({error}). Run the same version of jaxrl_async on "
        "both sides."
    )
