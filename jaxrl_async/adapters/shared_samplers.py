"""The samplers that several runs share: one base, and an adapter slot for each run.

run NAME ──publish──> its WeightChannel ──> slot NAME of each sampler, swapped independently
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jaxrl_async.adapters.adapter_generate import AdapterGenerate
from jaxrl_async.buffer.replay import ReplayBuffer
from jaxrl_async.config.schema import Config
from jaxrl_async.mesh import Slices
from jaxrl_async.model.adapter_stack import AdapterRoom
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.run.builders.devices import Locks
from jaxrl_async.run.builders.inputs import Inputs
from jaxrl_async.run.builders.rollouts import SharedSampling
from jaxrl_async.run.builders.samplers import (
    Sampling,
    make_channel,
    make_router,
    sampler_settings,
    sent_whole,
    uses_one_thread,
)
from jaxrl_async.run.replay.player import ReplayedBuffer
from jaxrl_async.sampler.router.router import Router
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.types import IntArray, VersionedParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSamplers:
    """The samplers of several runs, behind one router."""

    slices: Slices
    spec: ModelSpec
    samplers: Sequence[Sampler]
    router: Router
    probe_ids: IntArray | None  # tokens on which all runs' adapters are checked; None: no check

    def of_run(self, name: str) -> SharedSampling:
        """Return a function that adds the run of this name: its adapter gets a slot in each
        sampler and a separate channel."""

        def add_run(
            own: Config,
            inputs: Inputs,
            weights: VersionedParams,
            gate: ReplayBuffer | ReplayedBuffer,
        ) -> Sampling:
            pushes, channel = make_channel(
                own, self.spec, self.slices, weights.version, gate, inputs.faults.add
            )
            for sampler, push in zip(self.samplers, pushes, strict=True):
                first = push(weights.params)
                sampler.adapters.follow(name, first, weights.version, channel.subscribe())
            return Sampling(
                router=self.router,
                channel=channel,
                publisher=channel,
                probe=self.probe_ids,
                named=AdapterGenerate(name, self.router),
            )

        return add_run


def make_shared_samplers(
    config: Config,
    base: Policy,
    slices: Slices,
    locks: Locks,
    count: Callable[[str, int], None],
    probe_ids: IntArray,
) -> SharedSamplers:
    """Make the samplers with the base alone, and slots for the adapters of config.runs.

    Args:
        config: the shared configuration, including config.runs.
        base: on the trainer's slice, in the form that model.lora specifies.
        slices: device slices of trainer and samplers.
        locks: locks of the devices.
        count: called to count faults.
        probe_ids: tokens on which adapters are checked (run_probe_ids of any run).
    """
    lora, spec = config.model.lora, base.spec
    assert lora is not None, "a rule asks for it"
    settings = replace(
        sampler_settings(config, spec, probe_ids),
        device_lock=locks.sampler,
        tokenizer=base.tokenizer,
        adapters=AdapterRoom(places=len(config.runs), rank=lora.rank, targets=lora.targets),
    )
    several = len(slices.samplers) > 1
    whole = sent_whole(config.weights, config.model, spec)
    samplers = [
        Sampler(
            (spec, whole.push(slices.trainer, mesh)(base.params)),
            section=config.sampler,
            mesh=mesh,
            seed=config.run.seed,
            settings=replace(
                settings,
                one_thread=uses_one_thread(mesh, colocated=slices.colocated),
                name=f"sampler-{i}" if several else "sampler",
            ),
        )
        for i, mesh in enumerate(slices.samplers)
    ]
    router = make_router(config.faults, samplers, count, same_adapters=True)
    return SharedSamplers(
        slices=slices,
        spec=spec,
        samplers=samplers,
        router=router,
        probe_ids=settings.probe_tokens,
    )
