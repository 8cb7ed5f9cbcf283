"""The memory that a run needs on its devices, and checks that they have it. It is calculated, not
measured. Activations and the programs' temporaries are not included; `jaxrl-async plan` adds them.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_async.config.schema import Config, ModelSection, NamedTeacher, WeightsSection
from jaxrl_async.config.seats_section import resident_snapshots
from jaxrl_async.errors import ConfigError
from jaxrl_async.host import more_of_a_gpu
from jaxrl_async.mesh import Slices
from jaxrl_async.model.frozen_base import base_bytes, form_of
from jaxrl_async.model.hf import load_spec
from jaxrl_async.model.lora import lora_of, trained_table
from jaxrl_async.model.spec import ModelSpec, num_in, num_weights
from jaxrl_async.sampler.batch.kv_budget import MemoryPlan
from jaxrl_async.sampler.setup import kv_plan
from jaxrl_async.trainer.optimizer import optimizer_bytes

SMALLER = (
    "Lower sampler.slots or sampler.max_length, set sampler.kv_memory_mib to the free memory, or "
    "use more devices."
)


def trainer_bytes(config: Config, spec: ModelSpec) -> float:
    """Return the bytes that the trainer keeps on all its devices together: weights, their gradient,
    the optimizer's state, the weights in transfer, a reference and teachers that follow the policy.
    The kinds are as in
    plan.hbm, without activations and programs."""
    dtype = jnp.dtype(config.model.param_dtype)
    lora, form = lora_of(spec, config.model.lora), form_of(config.model.lora)
    trained = _num_trained(config.model, spec)
    offloaded = "optimizer" in config.trainer.offload
    kept = dtype.itemsize + (0 if offloaded else optimizer_bytes(config.trainer, dtype))
    held = trained * (dtype.itemsize + kept)
    if lora is not None:
        held += base_bytes(spec, form, dtype)
    sent = in_transfer_bytes(config.model, config.weights, spec) if config.run.job == "rl" else 0
    refers = config.holds_reference and lora is None and "reference" not in config.trainer.offload
    reference = num_weights(spec) * dtype.itemsize if refers else 0
    follow = sum(teacher.policy is not None for teacher in config.named_teachers.values())
    return float(held + sent + reference + follow * trained * dtype.itemsize)


def in_transfer_bytes(model: ModelSection, weights: WeightsSection, spec: ModelSpec) -> float:
    """Return the bytes of one version, or of an adapter, in transfer to a sampler: the trainer's
    copy of it. A colocated sampler gets that same copy."""
    return float(_num_trained(model, spec) * _sent_itemsize(model, weights))


def both_bytes(config: Config, spec: ModelSpec, mesh: Mesh | None = None) -> float:
    """Return the bytes that trainer and sampler keep on the same devices of one process together;
    weights in transfer count once. mesh: see sampler_bytes."""
    return _trainer_alone_bytes(config, spec) + sampler_bytes(config, spec, mesh)


def _trainer_alone_bytes(config: Config, spec: ModelSpec) -> float:
    """Return the bytes that a colocated trainer keeps per process in addition to the sampler."""
    processes = config.mesh.trainer.num_devices // config.mesh.sampler.num_devices
    sent = in_transfer_bytes(config.model, config.weights, spec)
    return (trainer_bytes(config, spec) - sent) / processes


def sampler_bytes(config: Config, spec: ModelSpec, mesh: Mesh | None = None) -> float:
    """Return the bytes that a sampler keeps on all its devices together: weights, the next weights
    in transfer, the KV cache, logits, and copies of pages if decoding uses them.

    mesh: the sampler's; None: as on the first device of this process.
    """
    dtype = jnp.dtype(config.model.computes_in)
    form, itemsize = form_of(config.model.lora), _sent_itemsize(config.model, config.weights)
    base = num_weights(spec) * itemsize if form is None else base_bytes(spec, form, dtype)
    arriving = in_transfer_bytes(config.model, config.weights, spec)
    plan = _kv_of(config, spec, mesh)
    logits = 4 * spec.vocab * (2 * plan.slots + plan.reserve)  # of slots and rows
    return float(base + arriving + plan.kv_bytes + plan.copy_bytes + logits)


def teachers_bytes(model: ModelSection, teachers: Mapping[str, NamedTeacher]) -> float:
    """Return the bytes of the teachers on the first sampler's devices (teachers.NAME.chips)."""
    itemsize = jnp.dtype(model.computes_in).itemsize
    paths = [teacher.path for teacher in teachers.values() if teacher.chips == "sampler"]
    return float(sum(num_weights(load_spec(Path(p))) * itemsize for p in paths if p is not None))


def _num_trained(model: ModelSection, spec: ModelSpec) -> int:
    return num_in(trained_table(spec, lora_of(spec, model.lora)))


def _sent_itemsize(model: ModelSection, weights: WeightsSection) -> int:
    return int(jnp.dtype(weights.dtype or model.computes_in).itemsize)


def _kv_of(config: Config, spec: ModelSpec, mesh: Mesh | None) -> MemoryPlan:
    keeps, dtype = config.algorithm.keep_routing, jnp.dtype(config.model.computes_in)
    return kv_plan(spec, config.sampler, dtype, mesh=mesh, keep_routing=keeps)


# ---- checks


def check_memory(needed_bytes: float, mesh: Mesh, what: str, remedy: str) -> None:
    """Raise ConfigError if the mesh certainly has less memory: an array that is too large may end
    the process instead of failing."""
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        available = mesh.size * (device.memory_stats() or {}).get("bytes_limit", needed_bytes)
    if needed_bytes > available:
        more = more_of_a_gpu() if device.platform == "gpu" else ""
        raise ConfigError(
            f"{what} would take {needed_bytes / 2**30:,.1f} GiB at least, and the mesh has "
            f"{available / 2**30:,.1f} GiB. {more}{remedy}"
        )


def check_devices_hold(config: Config, spec: ModelSpec, slices: Slices) -> None:
    """Raise ConfigError if the devices certainly have less memory than a run keeps there; samplers
    in separate processes check theirs themselves (check_sampler_fits)."""
    if config.mesh.remote or config.sampler.engine != "native":
        return
    trainer = _trainer_alone_bytes(config, spec) if slices.colocated else 0.0
    check_sampler_fits(config, spec, slices.sampler, trainer)


def check_sampler_fits(
    config: Config, spec: ModelSpec, mesh: Mesh, trainer_bytes: float = 0.0
) -> None:
    """Raise ConfigError if a sampler's devices certainly have less memory than it keeps, in
    addition to what the trainer alone keeps there. On a CPU, whose memory other programs use too,
    only the KV cache counts."""
    opponents = resident_snapshots(config.players)
    also = f", with {opponents} opponents (seats)" if opponents else ""
    taught = teachers_bytes(config.model, config.named_teachers)
    also += f", with {taught / 2**30:,.1f} GiB of teachers" if taught else ""
    if mesh.devices.flat[0].platform == "cpu":
        kv = _kv_of(config, spec, mesh).kv_bytes * (1 + opponents)
        return check_memory(kv, mesh, f"the KV cache of a sampler{also}", SMALLER)
    needed, plan = sampler_bytes(config, spec, mesh) * (1 + opponents), _kv_of(config, spec, mesh)
    copies = ""
    if plan.copy_bytes:
        copies = f", {plan.copy_bytes / 2**30:,.1f} GiB of them copies of pages that decode"
    trains = f", with {trainer_bytes / 2**30:,.1f} GiB of the trainer" if trainer_bytes else ""
    what = (
        f"a sampler ({plan.kv_bytes / 2**30:,.1f} GiB of KV cache, weights, logits{copies}){also}"
        f"{trains}"
    )
    return check_memory(needed + taught + trainer_bytes, mesh, what, SMALLER)
