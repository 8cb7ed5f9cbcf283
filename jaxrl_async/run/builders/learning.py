"""The update of the policy, and the models that advise it or train alongside it."""

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_async.algorithms.advantages import needs_critic
from jaxrl_async.algorithms.corrections import correction_of, weighs
from jaxrl_async.algorithms.objective import SAME_FACTORS, TaskFactors
from jaxrl_async.config.model_section import BalanceSection
from jaxrl_async.config.schema import (
    AlgorithmSection,
    Choice,
    Config,
    CriticSection,
    ModelSection,
    NamedTasks,
    NamedTeacher,
    SamplerSection,
    name_of,
)
from jaxrl_async.config.userfile import is_own
from jaxrl_async.data.prompts import FittingPairs
from jaxrl_async.data.records import OwnRecords
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import ConfigError
from jaxrl_async.later import Later
from jaxrl_async.mesh import TRAINER_RULES, Slices, shardings
from jaxrl_async.metrics.console import Console
from jaxrl_async.model.attention import has_cpu_kernels
from jaxrl_async.model.frozen_base import restored_params
from jaxrl_async.model.hf import load_spec
from jaxrl_async.model.lora import Lora, lora_of
from jaxrl_async.model.moe import id_dtype
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec, Params
from jaxrl_async.run.builders.frozen_weights import cut_vocabulary, reference_params
from jaxrl_async.run.builders.initial_policy import load_policy
from jaxrl_async.run.folder import Paths
from jaxrl_async.run.lockstep import Lockstep
from jaxrl_async.run.signals import Stop
from jaxrl_async.run.warm_start import nothing_meanwhile, warm_pairs, warm_start
from jaxrl_async.tasks.task import NO_TASK, Task
from jaxrl_async.trainer.frozen_models import copied
from jaxrl_async.trainer.learner import Companions, Learner, LearnerSettings
from jaxrl_async.trainer.learning_settings import LearningSettings
from jaxrl_async.trainer.logprob_pass import LogprobPass
from jaxrl_async.trainer.objectives.policy_objective import PolicyObjective, policy_update
from jaxrl_async.trainer.objectives.supervised_objective import supervised_update
from jaxrl_async.trainer.token_columns import Routing, SamplerColumns
from jaxrl_async.trainer.update import Update
from jaxrl_async.trainer.update_programs import TrainState
from jaxrl_async.types import BoolArray, SamplingParams

if TYPE_CHECKING:
    from jaxrl_async.model import heads
    from jaxrl_async.trainer import critic as critics
    from jaxrl_async.trainer import named_teachers, pair_credit
else:
    heads = Later("jaxrl_async.model.heads")
    critics = Later("jaxrl_async.trainer.critic")
    named_teachers = Later("jaxrl_async.trainer.named_teachers")
    pair_credit = Later("jaxrl_async.trainer.pair_credit")

log = logging.getLogger(__name__)

MAX_LAGS = 32
"""Maximum number of lags whose divergence is reported separately."""


def make_step(
    config: Config,
    spec: ModelSpec,
    slices: Slices,
    total_steps: int,
    teacher_spec: ModelSpec | None = None,
    unmatched: BoolArray | None = None,
) -> Update[PolicyObjective]:
    """Make the policy's compiled update; its arguments as `policy_update`'s."""
    return policy_update(
        spec,
        learning(config, slices, lora_of(spec, config.model.lora)),
        pair_credit.pair_algorithm(config.algorithm) if config.pairs else config.algorithm,
        total_steps=total_steps,
        temperature=config.temperature,
        teacher=config.teacher,
        teacher_spec=teacher_spec,
        num_lags=min(config.staleness.max_staleness + 1, MAX_LAGS),
        factors=task_factors(config.named_tasks),
        tasks=tuple(config.named_tasks),
        unmatched=unmatched,
    )


def task_factors(tasks: NamedTasks) -> TaskFactors:
    """Return the factors of the loss's terms by task; None for those that are 1."""
    policy = tuple(task.loss_weight for task in tasks.values())
    kl = tuple(task.kl_weight for task in tasks.values())
    return TaskFactors(*(f if any(x != 1 for x in f) else None for f in (policy, kl)))


def with_shared_prefixes(config: Config, policy: Policy, mesh: Mesh, *, images: bool) -> Config:
    """Return the configuration with trainer.share_prefixes chosen, if it is null.

    Prefixes are not shared if another model may keep states that prefixes lack, nor if experts are
    balanced: shared tokens would count once in their load.

    mesh: the trainer's. images: whether prompts have images.
    """
    trainer = config.trainer
    if trainer.share_prefixes is not None:
        return config
    others = [load_spec(Path(path)) for path in config.teacher_folders.values()]
    if needs_critic(config.algorithm.advantage) and config.critic_settings.path is not None:
        others.append(load_spec(Path(config.critic_settings.path)))
    attends = all(spec.delta is None for spec in (policy.spec, *others))
    counts_once = config.model.balance == BalanceSection()
    saves = config.algorithm.group_size > 1 and attends and counts_once and not images
    computes = trainer.cpu_kernels and config.model.attention == "auto" and mesh.size == 1
    there = computes and has_cpu_kernels(mesh.devices.flat[0], config.model.computes_in)
    chosen = trainer.model_copy(update={"share_prefixes": saves and there})
    return config.model_copy(update={"trainer": chosen})


def learning(config: Config, slices: Slices, lora: Lora | None = None) -> LearningSettings:
    """Return the settings shared by all models that train on the trainer's slice.

    lora: the policy's adapter; None: all weights are trained.
    """
    return LearningSettings(
        mesh=slices.trainer,
        rules=TRAINER_RULES,
        trainer=config.trainer,
        row_length=config.row_length,
        dtype=jnp.dtype(config.model.computes_in),
        param_dtype=jnp.dtype(config.model.param_dtype),
        remat=config.model.remat,
        attention=config.model.attention,
        lora=lora,
        balance=config.model.balance,
        temperatures=config.task_temperatures,
    )


def make_learner(
    config: Config,
    policy: Policy,
    slices: Slices,
    tokenizer: Tokenizer,
    keep_mask: bool = False,
    own: OwnRecords | None = None,
    unmatched: BoolArray | None = None,
) -> Learner:
    """Make the policy's learner with the models that advise it or train alongside it. Raises
    ConfigError.

    Args:
        config: the whole configuration.
        policy: it is trained.
        slices: the trainer's is used.
        tokenizer: encodes demonstrations.
        keep_mask: whether sampling masks come with the tokens.
        own: a task's records, for demonstrations.
        unmatched: [vocab] tokens that a teacher's tokenizer has not; None: these are not compared.
    """
    algorithm, teacher = config.algorithm, config.teacher
    all_rewards = (section.reward.process for section in config.by_task.values())
    process = next((one for one in all_rewards if one is not None), None)  # tasks have one max_age
    updates = algorithm.epochs * algorithm.minibatches  # updates in a step
    warming = config.critic_settings.warmup_steps if needs_critic(algorithm.advantage) else 0
    learns = max(config.run.steps - warming, 1)
    teacher_spec = policy.spec
    if teacher is not None and teacher.path is not None:
        teacher_spec = _cut_spec(teacher.path, policy)
    step = make_step(config, policy.spec, slices, learns * updates, teacher_spec, unmatched)
    state = step.init(policy.trained)
    reference = None
    if config.holds_reference:
        path = config.reference_settings.path
        reference = reference_params(config.model, "reference.path", path, policy, slices)
    _warn_of_anchor(algorithm)
    mixes = algorithm.mixes
    companions = Companions(
        base=base_of(policy),
        own_pass=_pass(
            config,
            policy.spec,
            slices,
            0 if teacher is None else teacher.top_k,
            teacher_spec.vocab,
        ),
        reference=reference,
        pairs=warm_pairs(config, tokenizer, own) if mixes else None,
        **_teachers(config, policy, slices, state),
        **_critic(config, policy, slices, config.run.steps * updates),
    )
    settings = LearnerSettings(
        algorithm=algorithm,
        row_length=config.row_length,
        teacher=teacher,
        reference=config.reference_settings,
        pairs=config.pairs,
        offload_reference="reference" in config.trainer.offload,
        process_max_age=None if process is None else process.max_age,
        critic_warmup=config.critic_settings.warmup_steps,
        sampler_columns=SamplerColumns(
            mask_vocab=policy.spec.vocab if keep_mask else None,
            masks_all=all(c.sampler.truncates for c in config.by_task.values()) or not keep_mask,
            routing=routing_of(policy.spec) if algorithm.keep_routing else None,
            images=tokenizer.images,
        ),
        tasks=tuple(config.named_tasks) if trains_differently(config) else (),
        seed=config.run.seed,
        views_every=config.metrics.samples_every,
    )
    return Learner(step, state, settings, companions)


def trains_differently(config: Config) -> bool:
    """Return whether the loss depends on the task of a token."""
    components = config.algorithm.components.values()
    limited = any(component.tasks is not None for component in components)
    weighed = task_factors(config.named_tasks) != SAME_FACTORS
    return limited or bool(config.task_temperatures) or weighed


def _warn_of_anchor(algorithm: AlgorithmSection) -> None:
    """Log that a proximal anchor without a correction ignores the samplers' staleness."""
    if algorithm.anchor == "proximal" and not weighs(correction_of(algorithm)):
        log.warning(
            "algorithm.anchor=proximal without a weighing correction: the difference between the "
            "policy that generated a token and the one at the start of the step is ignored. Set "
            "algorithm.correction, such as {truncate: {cap: 5.0}}."
        )


def base_of(policy: Policy) -> Params | None:
    """Return the weights that the policy's adapter changes; None: all weights are trained."""
    return None if policy.lora is None else policy.params


def _cut_spec(path: str, policy: Policy) -> ModelSpec:
    """Return the spec of a teacher's directory, with no more tokens than the policy has (see
    cut_vocabulary)."""
    spec = load_spec(Path(path))
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
        temperature=config.temperature,
        top_k=top_k,
        top_vocab=top_vocab,
    )


def _teachers(config: Config, policy: Policy, slices: Slices, state: TrainState) -> dict[str, Any]:
    """Make what teachers say, or the one teacher on these chips. Raises ConfigError."""
    section = config.teacher
    top_k = 0 if section is None else section.top_k

    def passing(spec: ModelSpec) -> LogprobPass:
        if top_k >= spec.vocab:
            raise ConfigError(
                f"teacher.top_k ({top_k}) must be below the vocabulary ({spec.vocab}); 0 "
                "uses all tokens."
            )
        return _pass(config, spec, slices, top_k)

    def loaded(path: str, adapter: str | None = None) -> tuple[Params, LogprobPass]:
        other = load_policy(config.model, path, slices, adapter=adapter).merged()
        spec = _cut_spec(path, policy)
        params = cut_vocabulary(other.spec, other.params, spec, slices.trainer)
        return params, passing(spec)

    fields: dict[str, Any] = {}
    distils = section is not None and section.source == "teachers"
    if config.named_teachers:
        if distils:
            passing(policy.spec)
        fields["teachers"] = named_teachers.NamedTeachers(
            top_k=top_k if distils else 0,
            local={
                name: named_teachers.LocalTeacher(*loaded(teacher.path, teacher.adapter))
                for name, teacher in config.named_teachers.items()
                if teacher.path is not None and not teacher.is_queried
            },
            aligned=any(t.tokenizer is not None for t in config.named_teachers.values()),
            reference=config.reference_settings.teacher if config.refers else None,
            following=_following(
                config.named_teachers, state, functools.partial(passing, policy.spec)
            ),
        )
    if section is not None and section.source == "self":
        fields |= {"teacher": copied(state.params), "teacher_pass": passing(policy.spec)}
    elif section is not None and section.path is not None:
        params, teacher_pass = loaded(section.path)
        fields |= {"teacher": params, "teacher_pass": teacher_pass}
    return fields


def _following(
    teachers: Mapping[str, NamedTeacher], state: TrainState, make_pass: Callable[[], LogprobPass]
) -> "named_teachers.FollowingTeachers | None":
    """Return the teachers by name that are the policy; None: no teacher is."""
    moves = {name: t.policy for name, t in teachers.items() if t.policy is not None}
    if not moves:
        return None
    params = {name: copied(state.params) for name in moves}
    return named_teachers.FollowingTeachers(params, moves, make_pass())


def _critic(config: Config, policy: Policy, slices: Slices, updates: int) -> dict[str, Any]:
    """Make a critic if the advantage needs its values."""
    if not needs_critic(config.algorithm.advantage):
        return {}
    section, spec = config.critic_settings, policy.spec
    if section.path is None:
        backbone = restored_params(spec, policy.params)
        params = heads.with_head(spec, backbone, "value", jax.random.key(config.run.seed))
    else:
        where = functools.partial(shardings, mesh=slices.trainer, rules=TRAINER_RULES)
        spec, params = heads.load_critic(section.path, where, jnp.dtype(config.model.param_dtype))
    critic = critics.make_critic(
        spec,
        replace(learning(config, slices), balance=BalanceSection()),  # balance is the policy's
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
    meanwhile: Callable[[], None] = nothing_meanwhile,
) -> tuple[Policy, dict[str, float]]:
    """Train the policy on demonstrations for warm_start.steps updates; return it, and the metrics
    for the run's first line. Arguments as warm_start's."""
    step = supervised_update(
        policy.spec,
        learning(config, slices),
        learning_rate=config.warm_start.learning_rate,
        total_steps=config.warm_start.steps,
    )
    params, metrics = warm_start(
        config,
        step,
        pairs,
        policy.params,
        paths,
        resume=resume,
        console=console,
        stop=stop,
        lockstep=lockstep,
        meanwhile=meanwhile,
    )
    return policy.with_params(params), metrics


# ---- log-probs of exactly the distribution that tokens were sampled from


def sampling_params(section: SamplerSection) -> SamplingParams:
    """Return the distribution that tokens are sampled from."""
    return SamplingParams(
        temperature=section.temperature,
        top_k=section.top_k,
        top_p=section.top_p,
        min_p=section.min_p,
    )


def keeps_masks(config: Config, task: Task = NO_TASK) -> bool:
    """Return whether sampling masks are trained with; log if they are missing or useless. They are
    also kept for the constraints of a task, and, if keep_sampling_mask says so, of a program's
    calls. Raises ConfigError if a constraint does not fit the loss."""
    s, keeps = config.sampler, config.algorithm.keep_sampling_mask
    if task.constraint is not None and keeps is not False and config.pairs is None:
        if config.compares_whole_distributions:
            raise ConfigError(
                "the task has a constraint, whose answers are sampled from a part of the "
                "vocabulary, and algorithm.kl=full or teacher.form=loss compare all of it. Set "
                "algorithm.kl=k3 and teacher.form=advantage, or accept a biased ratio with "
                "algorithm.keep_sampling_mask=false."
            )
        return True
    if keeps and task.program is not None:
        return True
    if task.constraint is not None and config.pairs is None:
        log.warning(
            "the task's constraint limits what is sampled, while the trainer computes log-probs "
            "over the whole vocabulary: the ratio is biased, see mismatch/mean. Set "
            "algorithm.keep_sampling_mask=null."
        )
    if keeps and not s.truncates:
        log.info(
            "algorithm.keep_sampling_mask has no effect: sampler.top_k, top_p and min_p keep the "
            "whole vocabulary"
        )
    if s.truncates and not config.keeps_masks and config.pairs is None:
        log.warning(
            "sampler.top_k=%d, top_p=%g, min_p=%g truncate the distribution of sampled tokens, "
            "while the trainer computes log-probs over the whole vocabulary: the ratio is biased, "
            "see mismatch/mean. Set algorithm.keep_sampling_mask=null.",
            s.top_k,
            s.top_p,
            s.min_p,
        )
    return config.keeps_masks


def check_critic(critic: CriticSection, advantage: Choice, steps: int) -> None:
    """Raise ConfigError if the settings of a critic do not fit a user's own advantage.

    The configuration's rules check the built-in ones: their needs are known without files.
    """
    if not is_own(name_of(advantage)):
        return
    where = f"algorithm.advantage = {name_of(advantage)!r}"
    needed = needs_critic(advantage)
    if not needed and critic != CriticSection():
        raise ConfigError(
            f"critic.* has no effect: {where} needs no critic. Leave it out, or declare the "
            'need at the function: @declare(level="token", needs=("values",)).'
        )
    if needed and critic.warmup_steps >= steps:
        raise ConfigError(
            f"critic.warmup_steps ({critic.warmup_steps}) leaves none of run.steps ({steps}) to "
            "train the policy. Lower it, or raise run.steps."
        )


def check_routing(algorithm: AlgorithmSection, model: ModelSection, spec: ModelSpec) -> None:
    """Raise ConfigError if algorithm.keep_routing is set for a model without experts."""
    if algorithm.keep_routing and not spec.experts:
        raise ConfigError(
            f"algorithm.keep_routing=true needs a mixture of experts, but the {spec.family} model "
            f"({model.path or 'model.architecture'}) is dense: its tokens are not routed. "
            "Set algorithm.keep_routing=false."
        )


def routing_of(spec: ModelSpec) -> Routing:
    """Return the shape and type of the expert ids of a mixture of experts."""
    return Routing(spec.layers, spec.experts_per_token, id_dtype(spec.experts))
