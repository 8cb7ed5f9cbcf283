"""From a configuration to parts that know nothing of each other. The only file that knows every
class."""

import asyncio
import functools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_async.algorithms.advantages import check_weights, needs_critic
from jaxrl_async.algorithms.corrections import correction_of, weighs
from jaxrl_async.algorithms.pacing import Bounds
from jaxrl_async.algorithms.preflight import check_algorithm, with_correction
from jaxrl_async.algorithms.shaping import has_signal
from jaxrl_async.buffer.ledger import Ledger
from jaxrl_async.buffer.replay import ReplayBuffer
from jaxrl_async.buffer.select import RANKS
from jaxrl_async.codec import loads
from jaxrl_async.config.schema import Config, FaultsSection
from jaxrl_async.data.addition import addition_tokenizer
from jaxrl_async.data.curriculum import Curriculum, make_stream
from jaxrl_async.data.prompts import FittingPairs, PromptStream, eval_prompts, warm_start_pairs
from jaxrl_async.data.tokenizer import (
    Tokenizer,
    check_same_tokens,
    check_vocabulary,
    load_tokenizer,
)
from jaxrl_async.errors import ConfigError, RolloutError
from jaxrl_async.mesh import (
    NO_DEVICE_LOCK,
    SAMPLER_RULES,
    TRAINER_RULES,
    DeviceLock,
    Slices,
    make_slices,
    shardings,
)
from jaxrl_async.metrics.console import Console
from jaxrl_async.metrics.fault_counts import AwakeClock, FaultCounts
from jaxrl_async.metrics.recorder import Recorder
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.heads import load_critic, with_head
from jaxrl_async.model.hf import check_params, load_spec
from jaxrl_async.model.moe import check_experts
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.quantize import quantize, quantized_table
from jaxrl_async.model.spec import ModelSpec, Weight, check_positions, num_weights, weight_table
from jaxrl_async.ports import Scorer
from jaxrl_async.rollout.env import GuardedEnvs, SingleTurn
from jaxrl_async.rollout.evaluate import EvalResult, evaluate
from jaxrl_async.rollout.rollout_loop import RolloutLoop
from jaxrl_async.run.checkpoint.rollout_state import (
    NOTHING_YET,
    ROLLOUT_KINDS,
    local_share,
    reopened,
    resuming_if_possible,
    save,
)
from jaxrl_async.run.checkpoint.store import Checkpoints, check_resumed
from jaxrl_async.run.exact import check_routing, keeps_masks, routing_of
from jaxrl_async.run.folder import Paths
from jaxrl_async.run.lockstep import Lockstep, SharedSource
from jaxrl_async.run.rates import Counters, Observer, measured_peak_flops
from jaxrl_async.run.replay.player import OrderedPrompts, Replay, ReplayedBuffer
from jaxrl_async.run.replay.recording import Recording, header_of, read_schedule
from jaxrl_async.run.signals import Stop
from jaxrl_async.run.start import skip_absent_tpu
from jaxrl_async.run.warm_start import warm_start
from jaxrl_async.run.watchdog import Reading, Watchdog
from jaxrl_async.sampler.router.router import Router
from jaxrl_async.sampler.router.supervise import RestartLimits
from jaxrl_async.sampler.sampler import Probe, Sampler, kv_plan
from jaxrl_async.scorers.guard import GuardedScorer
from jaxrl_async.scorers.reward_model import (
    FUNCTION,
    MODEL,
    RewardModelScorer,
    load_reward_model,
)
from jaxrl_async.scorers.rewards import make_scorer
from jaxrl_async.scorers.trial import try_once
from jaxrl_async.trainer.critic import make_critic
from jaxrl_async.trainer.learner import Companions, Learner, LearnerSettings, copied
from jaxrl_async.trainer.learning_settings import LearningSettings
from jaxrl_async.trainer.logprob_pass import LogprobPass
from jaxrl_async.trainer.objectives.policy_objective import PolicyObjective, policy_update
from jaxrl_async.trainer.objectives.supervised_objective import supervised_update
from jaxrl_async.trainer.optimizer import optimizer_bytes
from jaxrl_async.trainer.token_columns import SamplerColumns
from jaxrl_async.trainer.trainer import Outlets, Trainer, TrainerSettings, probe_tokens
from jaxrl_async.trainer.update import TrainState, Update
from jaxrl_async.types import EpisodeGroup, Prompt, SamplingParams
from jaxrl_async.weights.channel import WeightChannel
from jaxrl_async.weights.local import Push

log = logging.getLogger(__name__)

PROBE_LENGTH = 16
"""Tokens of the sequence that trainer and sampler compare log-probs on."""
MAX_CPU_DEVICES = 256
"""Most devices that a CPU is made to look like."""
MAX_LAGS = 32
"""Lags whose divergence is reported one by one."""
AWAKE_S = 5.0
"""Longest time between two looks at the samplers that counts as theirs, seconds."""
CACHE_FOLDER = ".jax_cache"
"""JAX's persistent compilation cache, beside the runs."""


Claim = Callable[[Config], tuple[Config, Paths]]
"""Makes or finds the run's folder, and holds it; the configuration with run.resume settled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything that a run consists of, introduced to each other."""

    config: Config
    paths: Paths
    policy: Policy
    trainer: Trainer
    sampler: Router
    rollouts: RolloutLoop
    buffer: ReplayBuffer
    schedule: Recording | Replay
    ledger: Ledger
    channel: WeightChannel
    recorder: Recorder | None  # None: another process writes
    checkpoints: Checkpoints
    console: Console
    observer: Observer
    watchdog: Watchdog

    def save_policy(self) -> Path:
        """Write the newest weights as a Hugging Face directory; the folder."""
        self.policy.with_params(self.trainer.learner.params).save_pretrained(self.paths.policy)
        return self.paths.policy


def assemble(
    config: Config,
    claim: Claim,
    stop: Stop,
    console: Console,
    lockstep: Lockstep,
    closing: ExitStack,
) -> Parts:
    """Build every part, warm-start the policy or restore it; nothing runs yet.

    What can be looked at is looked at before the run's folder is claimed. closing: takes what is
    to be closed on every way out.
    """
    config = with_correction(config)
    claim_devices(config)
    file = config.run.replay_schedule
    recorded = None if file is None else read_schedule(Path(file), config)
    check_algorithm(config.algorithm, config.teacher)
    tokenizer, faults = make_tokenizer(config), FaultCounts()
    slices = make_slices(config.mesh)
    spec = check_model(config, tokenizer, slices)
    check_frozen(config)
    collective = config.reward.model is not None and slices.trainer.size > 1
    device_lock = DeviceLock() if slices.colocated or collective else NO_DEVICE_LOCK
    saving = DeviceLock() if lockstep.count > 1 else NO_DEVICE_LOCK
    held_out = eval_prompts(config.data, tokenizer)
    scorer, judge = (
        guarded(config.faults, one, faults)
        for one in make_scorers(config, tokenizer, held_out, slices, device_lock)
    )
    envs = GuardedEnvs(
        SingleTurn,
        timeout_s=config.faults.env_timeout_s,
        vocab_size=tokenizer.vocab_size,
        count=faults.add,
    )
    check_routing(config, spec)
    keep_mask = keeps_masks(config)
    check_advisers(config, spec, tokenizer)
    plan = kv_plan(spec, config.sampler, jnp.dtype(config.model.dtype))
    check_fits(
        plan.pages * plan.page_bytes,
        slices.sampler,
        "the KV cache of a sampler",
        "Lower sampler.slots or sampler.max_length, or set sampler.kv_memory_mib to what there is.",
    )
    parts = {MODEL} if config.reward.model is not None else set[str]()
    if config.reward.weights:
        where = f"reward.function = {config.reward.function!r}"
        found = try_once(judge, held_out[0], tokenizer.encode, where).parts
        parts |= found.keys() or ({FUNCTION} if parts else set())
    if config.algorithm.signal_part and config.algorithm.signal_part not in parts:
        raise ConfigError(
            f"algorithm.signal_part = {config.algorithm.signal_part!r}: the reward has no such "
            f"part (it has: {', '.join(sorted(parts)) or 'none'}). Correct it."
        )
    check_weights(config.algorithm.advantage, parts)
    if len(held_out) < lockstep.count:
        raise ConfigError(
            f"{len(held_out)} held-out problems are too few for {lockstep.count} processes, which "
            "answer a part each. Raise data.addition.eval_size or data.jsonl.eval_size."
        )
    prompts = make_stream(config.data, tokenizer, config.run.seed, lockstep.index, lockstep.count)
    pairs = warm_start_pairs(config, tokenizer) if config.warm_start.steps else None

    config, paths = claim(config)
    checkpoints = closing.enter_context(open_checkpoints(config, paths))
    resume_asked, warmed = config.run.resume, dict[str, float]()
    config = resuming_if_possible(config, checkpoints)
    policy = make_policy(config, spec, tokenizer, slices)
    if not config.run.resume and pairs is not None:
        policy, warmed = warm_started(
            config, policy, slices, pairs, paths, resume_asked, console, stop, lockstep
        )
    stop.answer = "stopping after this step and saving"
    learner = make_learner(config, policy, slices, tokenizer, keep_mask)
    version, whole, was, numbers = 0, NOTHING_YET, NOTHING_YET, None
    if config.run.resume:
        saved = checkpoints.restore(None, learner.tree())
        check_resumed(saved, config, checkpoints.directory)
        learner.restore(saved.state, saved.loop["numbers"])
        assert saved.rollouts is not None, "every checkpoint of rl has them"
        whole = loads(saved.rollouts, ROLLOUT_KINDS)
        version, numbers = saved.step, saved.loop["trainer"]
        was = local_share(whole, lockstep)
        prompts.restore(saved.loop["prompts"][lockstep.index])
    recorder, ledger = None, Ledger()
    if lockstep.writes:
        recorder = make_recorder(config, paths, version if resume_asked else None)
        closing.callback(recorder.close)
        if warmed:
            recorder.log(0, warmed)
        ledger = reopened(paths.ledger, whole, version, resume_asked)
    closing.callback(ledger.close)
    kept = ledger if lockstep.count == 1 else Ledger(keep=True)
    recording = Recording(
        paths.schedule if lockstep.count == 1 else None, header_of(config, version)
    )
    replay = None if recorded is None else Replay(recorded, recording)
    schedule = replay or recording
    buffer = ReplayBuffer(
        groups_per_step=config.algorithm.groups_per_step // lockstep.count,
        max_staleness=config.staleness.max_staleness,
        lookahead=config.staleness.lookahead,
        when_too_old=config.staleness.when_too_old,
        overcommit=config.staleness.overcommit,
        reuse=config.buffer.reuse,
        rank=RANKS[config.buffer.select],
        has_signal=functools.partial(
            has_signal,
            part=config.algorithm.signal_part,
            least_std=config.algorithm.signal_std,
        )
        if config.algorithm.dynamic_sampling
        else None,
        max_resampled=config.algorithm.max_resampled,
        ledger=kept,
        note=schedule.write,
    )
    shared = None
    if lockstep.count > 1:
        shared = SharedSource(buffer, lockstep, stop, kept, ledger)
    weighed = isinstance(prompts, Curriculum)
    gate = buffer if replay is None else ReplayedBuffer(buffer, replay, curriculum=weighed)
    stream: PromptStream | OrderedPrompts = (
        OrderedPrompts(prompts, recording, replay, next_group=was.buffer.next_group)
        if isinstance(prompts, Curriculum)
        else prompts
    )
    buffer.restore(was.buffer, version)
    pushes = [make_push(config, policy.spec, slices.trainer, mesh) for mesh in slices.samplers]
    channel = WeightChannel(
        pushes,
        on_live=gate.set_live,
        version=version,
        checksum=config.weights.checksum,
        count=faults.add,
    )
    probe = probe_tokens(policy.spec.vocab, PROBE_LENGTH) if config.weights.probe else None
    sampler = make_samplers(
        config,
        slices,
        channel,
        [(policy.spec, push(learner.params)) for push in pushes],
        replay,
        faults,
        schedule=schedule,
        version=version,
        probe=None
        if probe is None
        else Probe(token_ids=probe, tolerance=config.weights.probe_tolerance),
        device_lock=device_lock if slices.colocated else saving,
    )
    sampling = SamplingParams(
        temperature=config.sampler.temperature,
        top_k=config.sampler.top_k,
        top_p=config.sampler.top_p,
        min_p=config.sampler.min_p,
    )
    limits: dict[str, Any] = {
        "stop_token_ids": tokenizer.eos_ids,
        "max_new_tokens": config.sampler.max_new_tokens,
        "max_length": config.sampler.max_length,
    }
    rollouts = RolloutLoop(
        stream,
        sampler,
        scorer,
        gate,
        group_size=config.algorithm.group_size,
        sampling=sampling,
        keep_mask=keep_mask,
        keep_routing=config.algorithm.keep_routing,
        observe=stream.observe,
        resumed=was.groups,
        make_env=envs,
        max_failures=config.faults.max_failures,
        **limits,
    )
    observer = Observer(
        lambda: Counters(
            at_s=time.perf_counter(),
            sampler=sampler.stats(),
            channel=channel.stats(),
            buffer=buffer.stats(),
            gate_wait_s=rollouts.stats().gate_wait_s,
            living=sampler.living,
            faults={**faults.read(), "failed_groups": rollouts.stats().failures},
        ),
        peak_flops=(
            config.metrics.peak_flops or measured_peak_flops(slices.trainer.local_devices[0])
        )
        * slices.trainer.size,
        share=lockstep.gather_json,
    )
    outlets = Outlets(
        evaluate=functools.partial(
            run_evaluation,
            sampler,
            held_out[lockstep.index :: lockstep.count],
            judge,
            lockstep,
            count=faults.add,
            make_env=envs,
            sampling=SamplingParams(temperature=config.eval.temperature),
            **limits,
        ),
        report=functools.partial(report, config, observer, recorder, console, tokenizer, stream),
        save=functools.partial(
            save, config, checkpoints, prompts, buffer, rollouts, ledger, shared, lockstep, saving
        ),
        should_stop=stop.is_set if shared is None else shared.is_set,
        should_hurry=lambda: stop.preempted if shared is None else shared.preempted,
    )
    trainer = Trainer(
        learner=learner,
        source=shared or gate,
        publisher=channel,
        outlets=outlets,
        settings=TrainerSettings(
            total_steps=config.run.steps,
            eval_every=config.eval.every,
            save_every=config.checkpoint.every,
            max_skipped_steps=config.trainer.max_skipped_steps,
            pacing=make_pacing(config),
            probe=probe,
        ),
        device_lock=device_lock,
    )
    if numbers is not None:
        trainer.restore(version, numbers)
    watchdog = Watchdog(
        lambda: reading(trainer, sampler, rollouts, buffer, channel, (scorer, judge), envs),
        limit_s=config.faults.watchdog_s,
        stacks=paths.stacks,
        clock=AwakeClock(time.monotonic, most_s=max(1.0, config.faults.watchdog_s / 10)),
    )
    return Parts(
        config=config,
        paths=paths,
        policy=policy,
        trainer=trainer,
        sampler=sampler,
        rollouts=rollouts,
        buffer=buffer,
        schedule=schedule,
        ledger=ledger,
        channel=channel,
        recorder=recorder,
        checkpoints=checkpoints,
        console=console,
        observer=observer,
        watchdog=watchdog,
    )


# ---- faults


def guarded(section: FaultsSection, scorer: Scorer, faults: FaultCounts) -> GuardedScorer:
    """The scorer with a time limit, retries, and a check of what it gives."""
    return GuardedScorer(
        scorer,
        timeout_s=section.scorer_timeout_s,
        retries=section.scorer_retries,
        backoff_s=section.backoff_s,
        count=faults.add,
    )


def reading(
    trainer: Trainer,
    sampler: Router,
    rollouts: RolloutLoop,
    buffer: ReplayBuffer,
    channel: WeightChannel,
    scorers: Sequence[GuardedScorer],
    envs: GuardedEnvs,
) -> Reading:
    """What every part is at now, for the watchdog."""
    of_samplers, of_rollouts, of_buffer = sampler.stats(), rollouts.stats(), buffer.stats()
    return Reading(
        version=trainer.version,
        trainer=trainer.doing,
        trainer_s=time.perf_counter() - trainer.since,
        blocks=of_samplers.blocks + of_samplers.prefill_tokens,
        requests=sampler.num_waiting,
        living=sampler.living,
        groups=of_rollouts.groups + of_rollouts.failures,
        playing=of_rollouts.active,
        score_s=max(s.oldest_s() for s in scorers),
        env_s=envs.oldest_s(),
        published=channel.published_version,
        live=channel.live_version,
        ready=of_buffer.ready,
        slots_free=max(0, of_buffer.capacity - of_buffer.active),
    )


def open_checkpoints(config: Config, paths: Paths) -> Checkpoints:
    """Of the run itself; a warm start has its own."""
    section = config.checkpoint
    return Checkpoints(paths.checkpoints, section.keep, verify=section.verify)


def make_recorder(config: Config, paths: Paths, resume_step: int | None) -> Recorder:
    """What a run writes down; from this step on where it was resumed."""
    return Recorder(paths.root, tensorboard=config.metrics.tensorboard, resume_step=resume_step)


# ---- devices


def claim_devices(config: Config) -> None:
    """Before JAX's first use: ask the CPU backend for as many devices as the mesh needs.

    Without effect where an accelerator is the default backend, where XLA_FLAGS says how many, or
    where they would be too many to emulate: make_slices says so.
    """
    skip_absent_tpu()
    if config.mesh.num_devices > MAX_CPU_DEVICES:
        return
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    if max(config.mesh.trainer.num_devices, config.mesh.sampler.num_devices) > 1:
        os.environ.setdefault("PJRT_NPROC", "32")  # CPU collectives hang with fewer threads
    try:
        processes = config.distributed.num_processes or 1
        jax.config.update("jax_num_cpu_devices", config.devices_of_process(processes))
    except RuntimeError:  # JAX runs already (a notebook): make_slices says if there are too few
        log.info("JAX was started before; the mesh uses the devices that are there")


def make_push(config: Config, spec: ModelSpec, trainer: Mesh, sampler: Mesh) -> Push:
    """The compiled transfer of the policy's weights to one sampler."""
    section, dtype = config.weights, jnp.dtype(config.model.dtype)
    table = sent = weight_table(spec)
    convert = None
    if section.eight_bits is not None:
        sent = quantized_table(table)
        convert = functools.partial(quantize, table, kind=section.eight_bits, dtype=dtype)
    return Push(
        shardings(sent, trainer, TRAINER_RULES),
        shardings(sent, sampler, SAMPLER_RULES),
        dtype=jnp.dtype(section.dtype or dtype),
        convert=convert,
    )


def make_samplers(
    config: Config,
    slices: Slices,
    channel: WeightChannel,
    policies: Sequence[Any],
    replay: Replay | None,
    faults: FaultCounts,
    **common: Any,
) -> Router:
    """The samplers behind a router, which looks after them. On a CPU each uses one core: XLA's own
    threads cost more than they bring where trainer and samplers compute side by side."""
    on_cpu = slices.sampler.devices.flat[0].platform == "cpu"
    samplers = [
        Sampler(
            policy,
            section=config.sampler,
            mesh=mesh,
            seed=config.run.seed,
            dtype=jnp.dtype(config.model.dtype),
            weights=channel.subscribe(),
            one_thread=on_cpu and mesh.size == 1 and not slices.colocated,
            keep_routing=config.algorithm.keep_routing,
            name=f"sampler-{i}" if len(policies) > 1 else "sampler",
            **common,
        )
        for i, (policy, mesh) in enumerate(zip(policies, slices.samplers, strict=True))
    ]
    section = config.faults
    limits = RestartLimits(
        restarts=section.sampler_restarts,
        backoff_s=section.backoff_s,
        hang_s=section.sampler_hang_s,
        nonfinite_in_a_row=section.nonfinite_in_a_row,
    )
    awake = AwakeClock(time.monotonic, most_s=AWAKE_S)
    recorded = None if replay is None else replay.home
    return Router(samplers, limits=limits, count=faults.add, clock=awake, recorded=recorded)


def check_fits(needed_bytes: int, mesh: Mesh, what: str, remedy: str) -> None:
    """Raise ConfigError where the mesh certainly cannot hold so much: too large an array may end
    the process instead of failing."""
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        there = mesh.size * (device.memory_stats() or {}).get("bytes_limit", needed_bytes)
    if needed_bytes > there:
        raise ConfigError(
            f"{what} would take {needed_bytes / 2**30:,.1f} GiB at least, and the mesh has "
            f"{there / 2**30:,.1f} GiB. {remedy}"
        )


def keep_compiled_programs(folder: Path) -> None:
    """JAX's persistent compilation cache, shared by all runs in the folder; without effect where
    JAX_COMPILATION_CACHE_DIR says another."""
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    jax.config.update("jax_compilation_cache_dir", str(folder.resolve()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


# ---- policy


def make_tokenizer(config: Config) -> Tokenizer:
    """The configured directory's, the model's, or the embedded task's own."""
    folder = config.data.tokenizer or config.model.path
    if folder is not None:
        return load_tokenizer(folder)
    if config.data.source != "addition":
        raise ConfigError(
            f"data.source={config.data.source} needs a tokenizer: set data.tokenizer or "
            "model.path to a "
            "Hugging Face directory."
        )
    return addition_tokenizer()


def check_model(config: Config, tokenizer: Tokenizer, slices: Slices) -> ModelSpec:
    """What the policy is, by its directory or the configuration, and whether it fits the devices
    and the tokenizer; no weight is read. Raises CheckpointError, ConfigError, DataError."""
    dtype = jnp.dtype(config.model.param_dtype)
    if config.model.path is not None:
        spec = load_spec(Path(config.model.path))
        check_lengths(config, spec, config.model.path)
        check_params(config.model.path, spec)
    else:
        spec = ModelSpec.from_architecture(
            config.model.architecture,
            config.model.architecture.vocab or _rounded(tokenizer.vocab_size),
        )
        spec = replace(spec, max_positions=max(spec.max_positions, config.row_length))
    beside = 0 if "optimizer" in config.trainer.offload else optimizer_bytes(config.trainer, dtype)
    check_fits(
        num_weights(spec) * (dtype.itemsize + beside),
        slices.trainer,
        "the policy with what its optimizer keeps",
        "Choose a smaller model, or give mesh.trainer more devices.",
    )
    check_experts(spec, slices.trainer, "mesh.trainer")
    for mesh in slices.samplers:
        check_experts(spec, mesh, "mesh.sampler")
    check_vocabulary(tokenizer, spec.vocab, config.model.path or "model.architecture")
    return spec


def make_policy(config: Config, spec: ModelSpec, tokenizer: Tokenizer, slices: Slices) -> Policy:
    """The policy at the start, on the trainer's slice: from model.path, or with random weights."""
    if config.model.path is not None:
        return _load(config, config.model.path, slices, tokenizer)
    make = jax.jit(
        functools.partial(init_params, spec, dtype=jnp.dtype(config.model.param_dtype)),
        out_shardings=shardings(weight_table(spec), slices.trainer, TRAINER_RULES),
    )
    return Policy(spec, make(jax.random.key(config.run.seed)), tokenizer)


def check_lengths(config: Config, spec: ModelSpec, where: str) -> None:
    """Raise ConfigError where the job makes longer sequences than the model at `where` was made
    for: episodes up to sampler.max_length, examples up to a row."""
    check_positions(spec, config.sampler.max_length, "sampler.max_length", where)
    mixes = config.warm_start.steps or config.algorithm.supervised_coefficient
    if config.run.job != "rl" or mixes:
        check_positions(spec, config.row_length, "trainer.row_length", where)


def _rounded(vocab_size: int, multiple: int = 8) -> int:
    """A vocabulary that tensor axes divide."""
    return -(-vocab_size // multiple) * multiple


def make_step(
    config: Config,
    spec: ModelSpec,
    slices: Slices,
    total_steps: int,
    teacher_spec: ModelSpec | None = None,
) -> Update[PolicyObjective]:
    """Make the policy's compiled update."""
    return policy_update(
        spec,
        learning(config, slices),
        config.algorithm,
        total_steps=total_steps,
        temperature=config.sampler.temperature,
        teacher=config.teacher,
        teacher_spec=teacher_spec,
        num_lags=min(config.staleness.max_staleness + 1, MAX_LAGS),
    )


def learning(config: Config, slices: Slices) -> LearningSettings:
    """Return what everything that learns on the trainer's slice has in common."""
    return LearningSettings(
        mesh=slices.trainer,
        rules=TRAINER_RULES,
        trainer=config.trainer,
        row_length=config.row_length,
        dtype=jnp.dtype(config.model.dtype),
        param_dtype=jnp.dtype(config.model.param_dtype),
        remat=config.model.remat,
        attention=config.model.attention,
    )


def make_learner(
    config: Config,
    policy: Policy,
    slices: Slices,
    tokenizer: Tokenizer,
    keep_mask: bool = False,
) -> Learner:
    """The policy's update with everything that learns or advises beside it. Raises ConfigError."""
    algorithm, teacher = config.algorithm, config.teacher
    asked = algorithm.epochs * algorithm.minibatches  # updates in a step
    warming = config.critic.warmup_steps if needs_critic(algorithm.advantage) else 0
    learns = max(config.run.steps - warming, 1)
    teacher_spec = _teacher_spec(config, policy)
    step = make_step(config, policy.spec, slices, learns * asked, teacher_spec)
    state = step.init(policy.params)
    reference = None
    if algorithm.kl_coefficient > 0:
        reference = reference_params(
            config, "reference.path", config.reference.path, policy, slices
        )
    if algorithm.anchor == "proximal" and not weighs(correction_of(algorithm)):
        log.warning(
            "algorithm.anchor=proximal without a weighing correction: what lies between the policy "
            "that drew a token and the one at the start of the step is left out. Set "
            "algorithm.correction, such as {truncate: {cap: 5.0}}."
        )
    mixes = algorithm.supervised_coefficient > 0
    companions = Companions(
        own_pass=_pass(config, policy.spec, slices, teacher.top_k, teacher_spec.vocab),
        reference=reference,
        pairs=warm_start_pairs(config, tokenizer) if mixes else None,
        **_teacher(config, policy, slices, state),
        **_critic(config, policy, slices, config.run.steps * asked),
    )
    settings = LearnerSettings(
        algorithm=algorithm,
        row_length=config.row_length,
        teacher=teacher,
        reference=config.reference,
        offload_reference="reference" in config.trainer.offload,
        critic_warmup=config.critic.warmup_steps,
        sampler_columns=SamplerColumns(
            mask_vocab=policy.spec.vocab if keep_mask else None,
            routing=routing_of(policy.spec) if algorithm.keep_routing else None,
        ),
        seed=config.run.seed,
    )
    return Learner(step, state, settings, companions)


def _teacher_spec(config: Config, policy: Policy) -> ModelSpec:
    """With no more tokens than the policy has, as cut_vocabulary leaves them."""
    if config.teacher.path is None:
        return policy.spec
    spec = load_spec(Path(config.teacher.path))
    return replace(spec, vocab=min(spec.vocab, policy.spec.vocab))


def _pass(
    config: Config,
    spec: ModelSpec,
    slices: Slices,
    top_k: int = 0,
    top_vocab: int | None = None,
) -> LogprobPass:
    return LogprobPass(
        spec,
        learning(config, slices),
        temperature=config.sampler.temperature,
        top_k=top_k,
        top_vocab=top_vocab,
    )


def _load(config: Config, path: str, slices: Slices, tokenizer: Tokenizer | None = None) -> Policy:
    """A policy's directory on the trainer's slice. Raises CheckpointError."""
    return Policy.from_pretrained(
        path,
        mesh=slices.trainer,
        rules=TRAINER_RULES,
        dtype=jnp.dtype(config.model.param_dtype),
        tokenizer=tokenizer,
    )


def reference_params(
    config: Config, key: str, path: str | None, policy: Policy, slices: Slices
) -> Any:
    """Frozen weights of the policy's kind, from a directory that `key` names or the policy's own.

    Raises CheckpointError, ConfigError.
    """
    if path is None:
        return copied(policy.params)
    other = _load(config, path, slices)
    if not other.spec.is_like(policy.spec):
        raise ConfigError(
            f"{key}={path} is another kind of model than the policy: {other.spec} and "
            f"{policy.spec}. A reference is an older policy, with the same config.json; null takes "
            "the policy at the start. A model of another shape can be a teacher (teacher.path)."
        )
    return other.params


def check_frozen(config: Config) -> None:
    """Look at every directory of frozen weights before anything is trained. CheckpointError,
    ConfigError."""
    refers = config.algorithm.kl_coefficient > 0
    of_policies = [
        config.teacher.path,
        config.reference.path if refers else None,
        config.preference.reference,
    ]
    for path in [*of_policies, config.critic.path]:
        if path is None:
            continue
        spec = load_spec(Path(path))
        if path in of_policies:  # a critic's weights end in another head
            check_params(path, spec)
        check_lengths(config, spec, path)


def check_shared_tokens(
    spec: ModelSpec, tokenizer: Tokenizer, path: str, vocab: int, setting: str
) -> None:
    """Raise ConfigError where ids mean other tokens to the model in `path` than to the policy, or
    may do so: the vocabularies of one family are padded to different sizes."""
    sizes = (
        f"{setting}={path} has a vocabulary of {vocab} tokens and the policy one of {spec.vocab}"
    )
    if (Path(path) / "tokenizer.json").is_file():
        common = min(vocab, spec.vocab)
        check_same_tokens(tokenizer, path, common, f"{setting}={path}")
        if vocab != spec.vocab:
            log.info("%s; the first %d, which both have, are compared", sizes, common)
    elif vocab != spec.vocab:
        raise ConfigError(
            f"{sizes}, and without a tokenizer.json nobody knows whether they speak of the same "
            "tokens. Put the model's tokenizer there, or choose one of the same family."
        )
    else:
        log.info(
            "%s=%s has no tokenizer.json: its tokens are taken for the policy's", setting, path
        )


def check_advisers(config: Config, spec: ModelSpec, tokenizer: Tokenizer) -> None:
    """Compare the tokens of teacher and critic with the policy's. ConfigError."""
    paths = {"teacher.path": config.teacher.path, "critic.path": config.critic.path}
    for setting, path in paths.items():
        if path is not None:
            vocab = load_spec(Path(path)).vocab
            check_shared_tokens(spec, tokenizer, path, vocab, setting)


def cut_vocabulary(spec: ModelSpec, params: Any, fewer: ModelSpec, mesh: Mesh) -> Any:
    """The weights of a model without its last tokens, so that the others share all probability.
    fewer: its spec, but for the vocabulary."""
    if spec == fewer:
        return params
    table = weight_table(fewer)

    def cut(weight: Weight, values: Any) -> Any:
        return values[tuple(slice(n) for n in weight.shape)]

    def cut_all(given: Any) -> Any:
        return jax.tree.map(cut, table, given, is_leaf=lambda w: isinstance(w, Weight))

    return jax.jit(cut_all, out_shardings=shardings(table, mesh, TRAINER_RULES))(params)


def _teacher(config: Config, policy: Policy, slices: Slices, state: TrainState) -> dict[str, Any]:
    section = config.teacher
    if section.source == "none":
        return {}
    if section.source == "self":
        spec, params = policy.spec, copied(state.params)
    else:
        assert section.path is not None
        other = _load(config, section.path, slices)
        spec = _teacher_spec(config, policy)
        params = cut_vocabulary(other.spec, other.params, spec, slices.trainer)
    if section.top_k >= spec.vocab:
        raise ConfigError(
            f"teacher.top_k ({section.top_k}) must be below the vocabulary ({spec.vocab}); 0 looks "
            "at all tokens."
        )
    return {"teacher": params, "teacher_pass": _pass(config, spec, slices, section.top_k)}


def _critic(config: Config, policy: Policy, slices: Slices, updates: int) -> dict[str, Any]:
    """A critic exists exactly where the advantage needs its values."""
    if not needs_critic(config.algorithm.advantage):
        return {}
    section, spec = config.critic, policy.spec
    if section.path is None:
        params = with_head(spec, policy.params, "value", jax.random.key(config.run.seed))
    else:
        where = functools.partial(shardings, mesh=slices.trainer, rules=TRAINER_RULES)
        spec, params = load_critic(section.path, where, jnp.dtype(config.model.param_dtype))
    critic = make_critic(
        spec,
        learning(config, slices),
        learning_rate=section.learning_rate,
        total_steps=updates,
        clip=section.clip,
    )
    return {"critic": critic, "critic_state": critic.step.init(params)}


def warm_started(
    config: Config,
    policy: Policy,
    slices: Slices,
    pairs: FittingPairs,
    paths: Paths,
    resume: bool,
    console: Console,
    stop: Stop,
    lockstep: Lockstep,
) -> tuple[Policy, dict[str, float]]:
    """The policy after a short supervised training on worked answers, run.warm_start; what the
    run's first line of metrics says of it."""
    step = supervised_update(
        policy.spec,
        learning(config, slices),
        learning_rate=config.warm_start.learning_rate,
        total_steps=config.warm_start.steps,
    )
    params, told = warm_start(
        config,
        step,
        pairs,
        policy.params,
        paths,
        resume=resume,
        console=console,
        stop=stop,
        lockstep=lockstep,
    )
    return policy.with_params(params), told


def make_pacing(config: Config) -> Bounds | None:
    """What the staleness aimed at is adapted to; None: it is max_staleness."""
    section = config.staleness
    if section.adapt == "none":
        return None
    return Bounds(
        target=section.ess_target, lowest=config.lowest_limit, highest=section.max_staleness
    )


# ---- rewards


def make_scorers(
    config: Config,
    tokenizer: Tokenizer,
    held_out: Sequence[Prompt],
    slices: Slices,
    device_lock: Any,
) -> tuple[Scorer, Scorer]:
    """What scores the training, and the evaluation: there the functions alone, where there are
    some. held_out: they may ask for the columns of these records."""
    section = config.reward
    function = make_scorer(section, tokenizer.decode, held_out) if section.weights else None
    if section.model is None:
        assert function is not None, "the schema refuses a run without any reward"
        return function, function
    model = load_reward_model(section, config.model, tokenizer, slices.trainer, device_lock)
    check_lengths(config, load_spec(Path(section.model)), f"reward.model={section.model}")
    both = RewardModelScorer(
        model,
        function=function,
        function_weight=section.function_weight,
        model_weight=section.model_weight,
    )
    return both, function or both


# ---- what the trainer's results go to


def run_evaluation(
    sampler: Router,
    held_out: Any,
    scorer: Scorer,
    lockstep: Lockstep,
    *,
    count: Callable[[str], None],
    **limits: Any,
) -> Mapping[str, float]:
    """Accuracy, where the reward says what is right, and reward on the held-out prompts with the
    weights that are live now; each process answers its part. Where the scorer or an environment
    fails for good, there are no numbers: with holes they would not be comparable."""
    start = time.perf_counter()
    result: EvalResult | None = None
    try:
        result = asyncio.run(evaluate(sampler, held_out, scorer, **limits))
    except RolloutError as error:
        count("failed_evaluations")
        log.warning("an evaluation is left out: %s", error)
    if not all(lockstep.gather_json(result is not None)) or result is None:
        return {"time/eval_s": time.perf_counter() - start}
    graded = any(lockstep.gather_json(result.accuracy is not None))
    told = {
        **({"eval/accuracy": result.accuracy or 0.0} if graded else {}),
        "eval/reward": result.mean_reward,
        "eval/length_mean": result.mean_length_tokens,
        "eval/truncated_share": result.truncated_share,
    }
    return {
        **lockstep.mean(told, result.num_prompts),
        "time/eval_s": time.perf_counter() - start,
    }


def report(
    config: Config,
    observer: Observer,
    recorder: Recorder | None,
    console: Console,
    tokenizer: Tokenizer,
    prompts: PromptStream | OrderedPrompts,
    version: int,
    values: Mapping[str, float],
    groups: Sequence[EpisodeGroup],
) -> None:
    """One step's line in metrics.jsonl, on the screen, and sometimes sample completions."""
    values = observer.complete(values)
    if recorder is None:
        return
    if groups:
        values |= prompts.measures(1 + max(g.ticket.group for g in groups))
    recorder.log(version, values)
    every = config.metrics.samples_every
    if groups and every and version % every == 0:
        recorder.samples(version, sample_records(groups[:2], tokenizer))
    console.phase("training")
    console.step(version, values)


def sample_records(groups: Sequence[EpisodeGroup], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The first two episodes of some groups, for people."""
    return [
        {
            "prompt": group.prompt.text,
            "completion": tokenizer.decode(episode.token_ids[episode.drawn]),
            "reference": group.prompt.reference,
            "reward": score.reward,
            "parts": dict(score.parts),
            "length": episode.num_drawn,
            "stop": episode.stop.value,
            "group": group.ticket.group,
        }
        for group in groups
        for episode, score in list(zip(group.episodes, group.scores, strict=True))[:2]
    ]
