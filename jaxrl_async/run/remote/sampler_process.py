"""A sampler in a process of its own: it joins a run, draws until it is told to go, and leaves.

dial ──Welcome──> engine ──the first weights──> Sampler ──Live──> requests, weights
  ^                                                        │
  └────────── the trainer is gone: it may come again ──────┘
SIGTERM, Ctrl-C, Leave: what is running is handed back to the trainer, and the process ends
"""

import logging
import math
import os
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import jax
from jax.sharding import Mesh

import jaxrl_async
from jaxrl_async.config.schema import AxesSection, Config
from jaxrl_async.errors import ConfigError, Disconnected, JaxrlError, MeshError
from jaxrl_async.mesh import AXES, SAMPLER_RULES, make_mesh, shardings
from jaxrl_async.model.spec import ModelSpec, RopeScaling
from jaxrl_async.ports import Session
from jaxrl_async.run.builders.samplers import (
    SentWeights,
    sampler_settings,
    sent_weights,
    uses_one_thread,
)
from jaxrl_async.run.signals import Stop
from jaxrl_async.run.start import skip_absent_tpu
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.wire.messages import Hello, Leave, Welcome

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""How often a sampler looks whether it was asked to stop, seconds."""


class Outcome(StrEnum):
    """Why a sampler no longer serves a run."""

    FINISHED = "finished"  # the trainer told it to go
    LOST = "lost"  # the connection to the trainer
    STOPPED = "stopped"  # by a signal


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """What a sampler process is started with."""

    address: str  # of the trainer: HOST:PORT, file:PATH or a run's folder
    name: str  # "": the machine's name and the process id
    axes: Mapping[str, int]  # of its slice; {}: as mesh.sampler of the run says
    wait_s: float  # longest time without a trainer
    once: bool  # end when the trainer is gone, rather than wait for it


def claim_sampler_devices(axes: Mapping[str, int]) -> list[jax.Device]:
    """Ask JAX's CPU backend, before its first use, for the devices of a slice; return those that
    there are. Raises MeshError if they are too few."""
    skip_absent_tpu()
    needed = math.prod(axes.values())
    if needed > 1:
        os.environ.setdefault("PJRT_NPROC", "32")  # CPU collectives hang with fewer threads
    try:
        jax.config.update("jax_num_cpu_devices", needed)
    except RuntimeError:
        log.info("JAX was started before; the slice uses the devices that are there")
    devices = jax.devices()
    if len(devices) < needed:
        shape = ", ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1)
        raise MeshError(
            f"the sampler's slice needs {needed} devices ({shape}), and this process has "
            f"{len(devices)}: {devices[0].platform}. Give --mesh other axes, such as "
            f"tensor={len(devices)}, or change mesh.sampler of the run."
        )
    return devices[:needed]


def spec_of(fields: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a Welcome describes. Raises ConfigError."""
    try:
        scaling = fields.get("rope_scaling")
        spec = ModelSpec(**fields)
        return replace(spec, rope_scaling=None if scaling is None else RopeScaling(**scaling))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the trainer's model cannot be read ({error}). Run the same version of jaxrl_async on "
            "both sides."
        ) from None
