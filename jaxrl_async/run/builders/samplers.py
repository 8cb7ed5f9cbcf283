"""The samplers with their router, and the channel that brings the weights to them."""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxrl_async.buffer.replay import ReplayBuffer
from jaxrl_async.config.schema import Config, FaultsSection, ModelSection, WeightsSection
from jaxrl_async.mesh import SAMPLER_RULES, TRAINER_RULES, Rules, Slices, shapes_on, shardings
from jaxrl_async.metrics.fault_counts import AwakeClock
from jaxrl_async.model.frozen_base import base_shapes, base_table, check_groups, form_of, sent_base
from jaxrl_async.model.lora import Lora, adapter_table, as_sent, combined, lora_of
from jaxrl_async.model.quantize import quantize, quantized_table
from jaxrl_async.model.spec import ModelSpec, Params, Weight, weight_table
from jaxrl_async.outages import Outages
from jaxrl_async.ports.generate import Generate, Replica
from jaxrl_async.ports.weights import Publisher
from jaxrl_async.run.builders.constraints import constrained
from jaxrl_async.run.builders.inputs import Inputs
from jaxrl_async.run.optional_parts import JoinedSamplers, SamplerProcesses
from jaxrl_async.run.signals import Stop
from jaxrl_async.sampler.device.sampling import Mix
from jaxrl_async.sampler.probe import Probe, probe_tokens, rounding_share
from jaxrl_async.sampler.router.router import Elastic, Router
from jaxrl_async.sampler.router.supervise import RestartLimits
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings
from jaxrl_async.types import IntArray, VersionedParams
from jaxrl_async.weights.channel import WeightChannel
from jaxrl_async.weights.local import Conversion, Push

if TYPE_CHECKING:
    from jaxrl_async.run.replay.player import ReplayedBuffer, RunSchedule

AWAKE_S = 5.0
"""Maximum time between two checks of the samplers that counts against them, seconds: a suspended
process does not make a sampler hang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The samplers, and how the trainer's weights reach them."""

    router: Router
    channel: WeightChannel
    publisher: Publisher  # the trainer's side of the channel
    probe: IntArray | None  # tokens on which both sides compare log-probs; None: no comparison
    members: JoinedSamplers | None = None  # from other processes; None: all are threads here
    processes: SamplerProcesses | None = None  # started by the run; None: none
    named: Generate | None = None  # for one of several runs: samples with its adapter

    @property
    def generate(self) -> Generate:
        """The target of the run's requests."""
        return self.router if self.named is None else self.named

    def close(self) -> None:
        """Stop the samplers, unless other runs share them. Idempotent."""
        if self.named is None:
            self.router.close()

    def wait_for_samplers(self, stop: Stop) -> None:
        """Wait until the run has the samplers that it needs to begin. Raises RolloutError."""
        if self.members is None:
            return
        if self.processes is None:
            self.members.wait_for_least(stop)
        else:
            self.members.wait_for_least(stop, self.processes.look)

    def begin_to_dismiss(self) -> None:
        """Refuse samplers that join from now on. Idempotent."""
        if self.members is not None:
            self.members.begin_close()

    def dismiss(self) -> None:
        """Notify samplers in separate processes that the run has ended. Idempotent."""
        if self.members is not None:
            self.members.close()
        if self.processes is not None:
            self.processes.close()


class GivingUp:
    """Flag of a stopping run that no longer waits for answers: no sampler is left, a service is
    unavailable, or SIGTERM leaves no time for slow environments, agents or remote samplers. Once
    set it stays set: the wait for live weights and the evaluation that follows are abandoned
    together."""

    def __init__(
        self, stop: Stop, router: Router, end_sessions: Callable[[], None], outages: Outages
    ) -> None:
        """end_sessions: called once when the flag is set, to notify agents why they are cut off."""
        self._stop, self._router, self._outages = stop, router, outages
        self._given_up = False
        self._end_sessions = end_sessions

    def __call__(self) -> bool:
        """Return whether to stop waiting."""
        hurries = self._stop.is_set() and (
            self._stop.preempted or not self._router.living or self._outages.active
        )
        if hurries and not self._given_up:
            self._given_up = True
            self._end_sessions()
        return self._given_up


@dataclass(frozen=True, slots=True, kw_only=True)
class SentWeights:
    """The weights as they are sent to a sampler."""

    table: Any  # tree of Weight: names, shapes and logical axes
    conversion: Conversion  # makes them from the trainer's
    lowered: Any  # as ShapeDtypeStructs

    def on(self, mesh: Mesh, rules: Rules) -> Any:
        """Return the arrays as ShapeDtypeStructs with the shardings of a role on a mesh."""
        return shapes_on(self.lowered, shardings(self.table, mesh, rules))

    def push(self, trainer: Mesh, sampler: Mesh) -> Push:
        """Compile their transfer from the trainer to one sampler."""
        return Push(
            shardings(self.table, trainer, TRAINER_RULES),
            shardings(self.table, sampler, SAMPLER_RULES),
            dtype=self.conversion.dtype,
            convert=self.conversion.convert,
        )

    def pushes(self, slices: Slices) -> list[Push]:
        """Compile their transfer to each sampler of these slices."""
        return [self.push(slices.trainer, mesh) for mesh in slices.samplers]


def sent_weights(section: WeightsSection, model: ModelSection, spec: ModelSpec) -> SentWeights:
    """Return the part of the policy that is sent to samplers, and its types."""
    dtype, lora = jnp.dtype(model.computes_in), lora_of(spec, model.lora)
    if lora is not None:
        adapter_dtype = dtype if section.eight_bits else jnp.dtype(section.dtype or dtype)
        return _sent_adapter(adapter_dtype, spec, lora)
    return sent_whole(section, model, spec)


def _sent_adapter(dtype: DTypeLike, spec: ModelSpec, lora: Lora) -> SentWeights:
    table = adapter_table(spec, lora)
    full = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, dtype), table, is_leaf=_is_weight)
    conversion = Conversion(dtype=dtype, convert=functools.partial(as_sent, lora, dtype=dtype))
    return SentWeights(
        table=table, conversion=conversion, lowered=jax.eval_shape(conversion.copied, full)
    )


def sent_once(section: WeightsSection, model: ModelSection, spec: ModelSpec) -> SentWeights | None:
    """Return the weights that are sent once to each sampler before an adapter; None: all weights
    are trained."""
    return None if lora_of(spec, model.lora) is None else sent_whole(section, model, spec)


def sent_whole(section: WeightsSection, model: ModelSection, spec: ModelSpec) -> SentWeights:
    """Return all weights as they are sent to samplers: once, if an adapter is trained."""
    dtype, table = jnp.dtype(model.computes_in), weight_table(spec)
    form = form_of(model.lora)
    if form is not None:
        base_dtype = jnp.dtype(section.dtype or dtype)
        convert = functools.partial(sent_base, dtype=base_dtype)
        lowered = base_shapes(spec, form, base_dtype)
        conversion = Conversion(dtype=base_dtype, convert=convert)
        return SentWeights(table=base_table(table, form), conversion=conversion, lowered=lowered)
    full = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, dtype), table, is_leaf=_is_weight)
    if section.eight_bits is None:
        sent, conversion = table, Conversion(dtype=jnp.dtype(section.dtype or dtype))
    else:
        convert = functools.partial(quantize, table, kind=section.eight_bits, dtype=dtype)
        sent, conversion = quantized_table(table), Conversion(dtype=dtype, convert=convert)
    return SentWeights(
        table=sent, conversion=conversion, lowered=jax.eval_shape(conversion.copied, full)
    )


def arrived(
    section: WeightsSection, model: ModelSection, spec: ModelSpec, mesh: Mesh
) -> tuple[Any, Any]:
    """Return the shapes of a version at a sampler, and of the base that is sent once; None: every
    version has all weights. Raises ConfigError."""
    check_groups(spec, form_of(model.lora), mesh, "mesh.sampler")
    sent, once = sent_weights(section, model, spec), sent_once(section, model, spec)
    return sent.on(mesh, SAMPLER_RULES), None if once is None else once.on(mesh, SAMPLER_RULES)


def _is_weight(node: object) -> bool:
    return isinstance(node, Weight)


def sampler_settings(
    config: Config, spec: ModelSpec, probe_ids: IntArray | None = None
) -> SamplerSettings:
    """Return the settings that all samplers of a run share, on any machine.

    probe_ids: run_probe_ids of the run; None: this process does not know its prompts.
    """
    return SamplerSettings(
        dtype=jnp.dtype(config.model.computes_in),
        keep_routing=config.algorithm.keep_routing,
        probe=make_probe(config, spec, probe_ids) if config.weights.probe else None,
        mixes=requested_mixes(config) if config.sampler.compile_ahead else (),
    )


def run_probe_ids(inputs: Inputs) -> IntArray:
    """Return the tokens on which a run's trainer and samplers compare log-probs: tokens of its
    held-out prompts, which are the same in every process."""
    return probe_tokens([prompt.token_ids for prompt in inputs.held_out], inputs.spec.vocab)


def make_probe(config: Config, spec: ModelSpec, token_ids: IntArray | None) -> Probe:
    """Return the probe of all samplers of a run, with its tolerance for rounding."""
    weights, model, matmul = config.weights, config.model, config.sampler.matmul
    narrow = "bfloat16" in (model.computes_in, weights.dtype, matmul)
    sent = sent_weights(weights, model, spec).conversion
    return Probe(
        token_ids=probe_tokens((), spec.vocab) if token_ids is None else token_ids,
        rounding=rounding_share(
            dtype="bfloat16" if narrow else model.computes_in,
            rounded_to=weights.eight_bits or ("int8" if matmul == "int8" else None),
            platform=jax.default_backend(),
            layers=spec.layers,
        ),
        tolerance=weights.probe_tolerance,
        as_trained=sent.convert is None and sent.dtype == jnp.dtype(model.param_dtype),
    )


def requested_mixes(config: Config) -> tuple[Mix, ...]:
    """Return the sampling modes of a run's requests: for training, and for evaluations."""
    sections = [one.sampler for one in config.by_task.values()]
    mixes = [Mix(one.truncates, one.temperature == 0, config.keeps_masks) for one in sections]
    if config.eval.every:
        mixes.append(Mix(greedy=config.eval.temperature == 0))
    for one in config.named_evals.values():
        mixes.append(Mix(one.top_k > 0 or one.top_p < 1, one.temperature == 0))
    return tuple(dict.fromkeys(mixes))


def settings_here(config: Config, inputs: Inputs, mesh: Mesh) -> SamplerSettings:
    """Return the settings of a sampler on a mesh of this process."""
    settings = sampler_settings(config, inputs.spec, run_probe_ids(inputs))
    mixes = settings.mixes
    for part in inputs.tasks.values():
        mixes = constrained(mixes, part.play.task)
    return replace(
        settings,
        images=inputs.tokenizer.images,
        tokenizer=inputs.tokenizer,
        mixes=mixes,
        one_thread=uses_one_thread(mesh, colocated=inputs.slices.colocated),
    )


def uses_one_thread(mesh: Mesh, *, colocated: bool) -> bool:
    """Return whether a sampler computes on one core: XLA's own threads cost more than they gain
    while a trainer computes, too."""
    return bool(mesh.devices.flat[0].platform == "cpu") and mesh.size == 1 and not colocated


def make_channel(
    config: Config,
    spec: ModelSpec,
    slices: Slices,
    version: int,
    gate: "ReplayBuffer | ReplayedBuffer",
    count: Callable[[str], None],
) -> tuple[list[Push], WeightChannel]:
    """Make the channel to samplers on the meshes of slices, and the push to each of them.

    Args:
        config: weights, model.
        spec: the policy's.
        slices: devices of the trainer and the samplers.
        version: the samplers' initial version.
        gate: notified when a version is live in every sampler.
        count: called with the name of each fault.
    """
    pushes = sent_weights(config.weights, config.model, spec).pushes(slices)
    channel = WeightChannel(
        pushes,
        on_live=gate.set_live,
        version=version,
        checksum=config.weights.checksum,
        count=count,
    )
    return pushes, channel


def make_sampling(
    config: Config,
    inputs: Inputs,
    weights: VersionedParams,
    schedule: "RunSchedule",
    gate: "ReplayBuffer | ReplayedBuffer",
    base: Params | None = None,
) -> Sampling:
    """Make the samplers with the policy's weights, and the channel for later versions.

    Args:
        config: sampler, weights, faults, and the seed.
        inputs: the policy's spec, the slices with their locks, and the counts of faults.
        weights: the policy's, on the trainer's slice.
        schedule: records, or prescribes, which weights each sampler takes after which block.
        gate: notified when a version is live in every sampler.
        base: weights that an adapter changes, on the trainer's slice, sent once; None: `weights`
            are all weights.
    """
    slices, spec = inputs.slices, inputs.spec
    pushes, channel = make_channel(config, spec, slices, weights.version, gate, inputs.faults.add)

    def first(push: Push, mesh: Mesh) -> Params:
        own = push(weights.params)
        if base is None:
            return own
        whole = sent_whole(config.weights, config.model, spec)
        return combined(whole.push(slices.trainer, mesh)(base), own)

    samplers = [
        Sampler(
            (spec, first(push, mesh)),
            section=config.sampler,
            mesh=mesh,
            seed=config.run.seed,
            weights=channel.subscribe(),
            version=weights.version,
            settings=replace(
                settings_here(config, inputs, mesh),
                schedule=schedule,
                device_lock=inputs.locks.sampler,
                name=f"sampler-{i}" if len(pushes) > 1 else "sampler",
            ),
        )
        for i, (push, mesh) in enumerate(zip(pushes, slices.samplers, strict=True))
    ]
    router = make_router(config.faults, samplers, inputs.faults.add, recorded=schedule.sampler_of)
    probe = run_probe_ids(inputs) if config.weights.probe else None
    return Sampling(router=router, channel=channel, publisher=channel, probe=probe)


def make_router(
    section: FaultsSection,
    samplers: Sequence[Replica],
    count: Callable[[str, int], None],
    *,
    recorded: Callable[[str], int | None] | None = None,
    elastic: Elastic | None = None,
    same_adapters: bool = False,
) -> Router:
    """Put the samplers behind a router, which restarts those that fail.

    Args:
        section: conditions of failure, and limits of restarts.
        samplers: the samplers at the start.
        count: counts handled faults.
        recorded: in a replay, returns the number of the sampler for a request.
        elastic: for samplers that join and leave; None: the samplers are fixed.
        same_adapters: whether all samplers have the adapters that requests name.
    """
    awake = AwakeClock(time.monotonic, most_s=AWAKE_S)
    return Router(
        samplers,
        limits=RestartLimits.of(section),
        count=count,
        clock=awake,
        recorded=recorded,
        elastic=elastic,
        same_adapters=same_adapters,
    )
