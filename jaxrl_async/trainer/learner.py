"""One step of learning: scored groups in, updated weights and a report out. No thread, no clock.

    groups ──shape──> pack ──> passes: proximal, reference, teacher, values
                        │                     │
                        v                     v
                   PackedStep ────────────> credit: advantages, returns
                                              │
              mini-batches <──────────────────┘
                   └──update──> policy, critic      reference, teacher, coefficients follow

Everything that changes from step to step is in `Learner.tree` (arrays) and `Learner.numbers`.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from jaxrl_async.algorithms.advantages import advantage, step_data
from jaxrl_async.algorithms.aggregate import token_mean
from jaxrl_async.algorithms.columns import Columns
from jaxrl_async.algorithms.kl import next_coefficient
from jaxrl_async.algorithms.objective import (
    Coefficients,
    active_entropy_coefficient,
    coefficients_of,
    mean_report,
    next_entropy_coefficient,
    pass_columns,
)
from jaxrl_async.algorithms.shaping import (
    ShapingFn,
    bounded,
    compare_unmasked,
    shape,
    shaping,
    within_age,
)
from jaxrl_async.config import schema
from jaxrl_async.config.algorithm_section import AlgorithmSection, PairsSection
from jaxrl_async.config.schema import Choice, name_of
from jaxrl_async.config.userfile import is_own
from jaxrl_async.later import Later
from jaxrl_async.mesh import NO_DEVICE_LOCK, DeviceGuard
from jaxrl_async.model.lora import joined
from jaxrl_async.model.spec import Params
from jaxrl_async.trainer.credit import Credit, PassResults
from jaxrl_async.trainer.flops import forward_flops
from jaxrl_async.trainer.frozen_models import FrozenModels
from jaxrl_async.trainer.logprob_pass import LogprobPass, ProbePass
from jaxrl_async.trainer.objectives.policy_objective import PolicyData, PolicyObjective
from jaxrl_async.trainer.pack import Pair
from jaxrl_async.trainer.step_data import (
    PackedStep,
    StepRows,
    TokenView,
    deal,
    pack_step,
    shown_episodes,
    views_of,
)
from jaxrl_async.trainer.token_columns import NO_SAMPLER_COLUMNS, SamplerColumns
from jaxrl_async.trainer.update import Update
from jaxrl_async.trainer.update_programs import Frozen, TrainState
from jaxrl_async.types import EpisodeGroup, FloatArray, IntArray, PackedBatch
from jaxrl_async.user_arguments import read_only_arguments

if TYPE_CHECKING:
    from jaxrl_async.algorithms import answer_pairs
    from jaxrl_async.trainer import component_gradients, pair_credit
    from jaxrl_async.trainer.critic import Critic
    from jaxrl_async.trainer.named_teachers import NamedTeachers
    from jaxrl_async.trainer.objectives import critic_objective
    from jaxrl_async.trainer.pair_credit import PairCredit
else:
    answer_pairs = Later("jaxrl_async.algorithms.answer_pairs")
    component_gradients = Later("jaxrl_async.trainer.component_gradients")
    critic_objective = Later("jaxrl_async.trainer.objectives.critic_objective")
    pair_credit = Later("jaxrl_async.trainer.pair_credit")


class SteeredCoefficients:
    """The coefficients of the next update. Without targets they are constant."""

    def __init__(self, algorithm: AlgorithmSection, start: Coefficients) -> None:
        """start: as configured."""
        self.current, self._algorithm = start, algorithm
        self._entropy = float(algorithm.entropy_coefficient)  # while the entropy is too low

    def numbers(self) -> dict[str, float]:
        """Return the numbers that change from step to step and do not follow from its number."""
        kl, entropy, _ = self.current
        return {"kl": float(kl), "entropy": float(entropy), "steered_entropy": self._entropy}

    def restore(self, numbers: Mapping[str, float]) -> None:
        """Continue from `numbers`; coefficients without a target stay as configured."""
        kl, entropy, _ = self.current
        if self._algorithm.kl_target is not None:
            kl = numbers["kl"]
        if self._algorithm.entropy_target is not None:
            entropy, self._entropy = numbers["entropy"], numbers["steered_entropy"]
        self.current = self.current._replace(kl=kl, entropy=entropy)

    def at(self, step: int) -> Coefficients:
        """Return the coefficients of a step, from 0; loss components' coefficients depend on it."""
        return self.current._replace(losses=coefficients_of(self._algorithm, step).losses)

    def steer(self, report: Mapping[str, float]) -> None:
        """Move them towards their targets, if the step measured finite KL and entropy."""
        algorithm = self._algorithm
        divergence = report.get("policy/kl_reference", math.nan)
        if algorithm.kl_target is not None and math.isfinite(divergence):
            kl = next_coefficient(
                self.current.kl,
                divergence,
                target=algorithm.kl_target,
                horizon=algorithm.kl_horizon,
            )
            self.current = self.current._replace(kl=kl)
        entropy = report.get("policy/entropy", math.nan)
        if algorithm.entropy_target is not None and math.isfinite(entropy):
            target = algorithm.entropy_target
            self._entropy = next_entropy_coefficient(
                self._entropy, entropy, target=target, step=algorithm.entropy_step
            )
            active = active_entropy_coefficient(self._entropy, entropy, target=target)
            self.current = self.current._replace(entropy=active)


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Companions:
    """Models and data that a step uses in addition to the policy; None: absent."""

    own_pass: LogprobPass | None = None  # of the policy's and the reference's architecture
    base: Params | None = None  # frozen weights below an adapter; None: all weights are trained
    reference: Params | None = None  # at the start of the run; whole weights or an adapter
    teacher: Params | None = None  # at the start of the run
    teacher_pass: LogprobPass | None = None
    teachers: "NamedTeachers | None" = None  # by name
    critic: "Critic | None" = None
    critic_state: TrainState | None = None
    pairs: Iterator[Pair] | None = None  # demonstrations to mix in

    @property
    def asks_reference(self) -> bool:
        """Whether a teacher gives the reference's log-probs."""
        return self.teachers is not None and self.teachers.reference is not None


NO_COMPANIONS = Companions()


T = TypeVar("T")


def _read_only(function: Callable[..., T], choice: Choice) -> Callable[..., T]:
    """Return a host-side function of the step's data; a user's function cannot change the data."""
    return read_only_arguments(function) if is_own(name_of(choice)) else function


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """Settings of a learner that its update's objective does not have."""

    algorithm: schema.AlgorithmSection
    row_length: int
    teacher: schema.TeacherSection | None = None
    reference: schema.ReferenceSection = field(default_factory=schema.ReferenceSection)
    pairs: PairsSection | None = None  # trained in place of advantages
    offload_reference: bool = False  # to host memory; its pass then precedes the updates
    process_max_age: int | None = None  # max age of process rewards, versions; None: any
    critic_warmup: int = 0  # first steps, which train only the critic
    sampler_columns: SamplerColumns = NO_SAMPLER_COLUMNS
    tasks: tuple[str, ...] = ()  # names of several that train differently; (): one, or alike
    seed: int = 0  # of the mini-batches and of pairs
    views_every: int = 0  # interval at which `views` are kept, versions; 0: never


def _frozen_models(settings: LearnerSettings, companions: Companions) -> FrozenModels:
    """Return the models that a step reads and does not train."""
    following = None if companions.teachers is None else companions.teachers.following
    return FrozenModels(
        companions.reference,
        companions.teacher,
        moves=settings.reference,
        teaches=settings.teacher,
        offload_reference=settings.offload_reference,
        teachers={} if following is None else following.params,
        follows={} if following is None else following.moves,
    )


def _credit(
    settings: LearnerSettings, companions: Companions, objective: PolicyObjective
) -> "Credit | PairCredit":
    """Return the conversion of scores to advantages. Raises ConfigError."""
    algorithm = settings.algorithm
    columns = pass_columns(
        algorithm,
        refers=companions.reference is not None or companions.asks_reference,
        offloads=settings.offload_reference or companions.asks_reference,
    )
    if settings.pairs is not None:
        return pair_credit.PairCredit.of(settings.pairs, columns, settings.seed, objective.weights)
    teacher_pass = companions.teacher_pass
    estimator = advantage.resolve(algorithm.advantage)
    return Credit(
        algorithm=algorithm,
        teacher=settings.teacher,
        advantage=_read_only(estimator, algorithm.advantage),
        level=advantage.facts_of(estimator).level,
        kl=objective.recipe.kl,
        columns=columns,
        teacher_vocab=None if teacher_pass is None else teacher_pass.spec.vocab,
        kl_factors=objective.factors.kl,
    )


def _shapings(settings: LearnerSettings) -> tuple[ShapingFn, ...]:
    """Return the functions that shape rewards, in order. Raises ConfigError."""
    chosen = tuple(
        bounded(_read_only(shaping.resolve(choice), choice), choice)
        for choice in settings.algorithm.shaping
    )
    if settings.pairs is None:
        return chosen
    how, seed = settings.pairs.choose, settings.seed
    return (*chosen, partial(answer_pairs.keep_paired, how=how, seed=seed))


class Demonstrations:
    """The demonstrations that are mixed in. A resumed run continues after those it has taken."""

    def __init__(self, pairs: Iterator[Pair] | None, per_step: int) -> None:
        """pairs: None: none are mixed in. per_step: number that one step takes."""
        self._pairs, self._per_step, self.taken = pairs, per_step, 0

    def of_step(self) -> list[Pair]:
        """Take those of one step."""
        pairs = self._pairs
        return [] if pairs is None else [self._next(pairs) for _ in range(self._per_step)]

    def skip_to(self, taken: float) -> None:
        """Skip the first ones, until this number has been taken."""
        while self._pairs is not None and self.taken < taken:
            self._next(self._pairs)

    def _next(self, pairs: Iterator[Pair]) -> Pair:
        self.taken += 1
        return next(pairs)


class Learner:
    """Owns the train states of the policy and the critic. Used only by the trainer's thread."""

    def __init__(
        self,
        step: Update[PolicyObjective],
        state: TrainState,
        settings: LearnerSettings,
        companions: Companions = NO_COMPANIONS,
    ) -> None:
        """state: of the trained weights; for an adapter, companions.base holds the frozen ones."""
        self._step, self.state, self._settings, self._companions = step, state, settings, companions
        self._base = companions.base
        self._algorithm, self._teacher = settings.algorithm, settings.teacher
        self._objective, self._probe = step.objective, ProbePass(step.objective.spec, step.settings)
        self._shapings = _shapings(settings)
        self._demonstrations = Demonstrations(companions.pairs, self._algorithm.supervised_batch)
        self.views: list[TokenView] = []  # of the last step, if it keeps them
        self.frozen = _frozen_models(settings, companions)
        self.critic_state = companions.critic_state
        self.coefficients = SteeredCoefficients(
            self._algorithm, self._objective.recipe.coefficients
        )
        self.credit = _credit(settings, companions, step.objective)
        components = self._algorithm.components
        self._gradients = None
        if any(one.gradient_every for one in components.values()):
            self._gradients = component_gradients.ComponentGradients(step, components)
        self._max_missing = 0  # maximum number of updates that a step lacked

    # ---- state in a checkpoint

    def tree(self) -> dict[str, Any]:
        """Return all arrays that change from step to step."""
        held = {"train": self.state, "critic": self.critic_state, **self.frozen.tree()}
        return {name: part for name, part in held.items() if part is not None}

    def numbers(self) -> dict[str, float]:
        """Return all numbers that change from step to step."""
        return {**self.coefficients.numbers(), "pairs_taken": float(self._demonstrations.taken)}

    def restore(self, tree: Mapping[str, Any], numbers: Mapping[str, float]) -> None:
        """Continue from `tree` and `numbers` of a checkpoint."""
        self.state = tree["train"]
        self.critic_state = tree.get("critic", self.critic_state)
        self.frozen.restore(tree)
        self.coefficients.restore(numbers)
        self._demonstrations.skip_to(numbers["pairs_taken"])

    @property
    def params(self) -> Params:
        """The policy's trained weights, all or an adapter's; the next `learn` donates them."""
        return self.state.params

    def whole(self, part: Params) -> Params:
        """Return the parameters of a pass: whole weights, or an adapter joined to the base."""
        return joined(self._step.settings.lora, self._base, part)

    def probe(self, token_ids: IntArray) -> Any:
        """Return the policy's log-probs of a fixed sequence, as logprob_pass.ProbePass."""
        return self._probe(self.whole(self.params), token_ids)

    # ---- one step

    def learn(
        self,
        groups: Sequence[EpisodeGroup],
        version: int,
        device_lock: DeviceGuard = NO_DEVICE_LOCK,
    ) -> dict[str, float]:
        """Train on the groups, in the step that makes version + 1; return the report.

        metrics.metric.METRICS describes its keys.
        """
        groups, of_process = within_age(groups, version, self._settings.process_max_age)
        shaped = shape(step_data(groups), self._shapings)
        if self._algorithm.baseline == "unmasked":
            shaped = compare_unmasked(shaped)
        step = pack_step(
            shaped,
            self._settings.row_length,
            pairs=self._demonstrations.of_step(),
            sampler_columns=self._settings.sampler_columns,
            share_prefixes=bool(self._step.settings.trainer.share_prefixes),
            tasks=self._settings.tasks,
        )
        results = self.run_passes(step.batch, device_lock)
        num_passes = results.num_passes
        results, of_teachers = self._ask_teachers(step, results, device_lock)
        step, credit_report = self.credit(step, results, self.coefficients.current.kl)
        self.views = self._token_views(step, groups, results, version, device_lock)
        report = self._update(step, version, device_lock)
        self._report_pairs(report, credit_report)
        report["train/flops"] += num_passes * forward_flops(self._objective.spec, step.batch)
        report["train/flops"] += of_teachers.pop("teacher/flops", 0.0)
        self._steer_and_follow(report, version)
        return {**of_process, **shaped.counts, **of_teachers, **credit_report, **report}

    def _ask_teachers(
        self, step: PackedStep, results: PassResults, device_lock: DeviceGuard
    ) -> tuple[PassResults, dict[str, float]]:
        """Add the named teachers' log-probs to the passes' results; also return their report."""
        teachers, section = self._companions.teachers, self._teacher
        if teachers is None:
            return results, {}
        own = {name: partial(self.whole, part) for name, part in self.frozen.teachers.items()}
        advice = teachers(step, device_lock, own)
        if advice.reference is not None:
            results = results._replace(reference=advice.reference)
        if section is None or section.source != "teachers":
            return results, advice.report
        if section.form == "loss":
            return results._replace(top_k=advice.columns), advice.report
        return results._replace(teachers_gap=advice.gap), advice.report

    def _token_views(
        self,
        step: PackedStep,
        groups: Sequence[EpisodeGroup],
        results: PassResults,
        version: int,
        device_lock: DeviceGuard,
    ) -> list[TokenView]:
        """Return the values of the step's first tokens, if the step is to be shown.

        Their log-probs need one more pass over these few sequences, unless they are known. Its
        program is compiled once, and `train/flops` does not count it.
        """
        every, own = self._settings.views_every, self._companions.own_pass
        if own is None or not every or (version + 1) % every:
            return []

        def logprobs_of(batch: PackedBatch) -> FloatArray:
            return own.logprobs(self.whole(self.params), batch, device_lock, replays=True)

        return views_of(step, shown_episodes(groups), results.proximal, logprobs_of)

    def _report_pairs(self, report: dict[str, float], of_pairs: dict[str, float]) -> None:
        """Replace the token loss in the report by the pairs' loss, if pairs are trained."""
        loss = of_pairs.pop("train/policy_loss", None)
        if loss is not None:
            weight = self._objective.recipe.policy
            report["train/loss"] += weight * (loss - report["train/policy_loss"])
            report["train/policy_loss"] = loss

    def run_passes(
        self, batch: PackedBatch, device_lock: DeviceGuard = NO_DEVICE_LOCK
    ) -> PassResults:
        """Run the forward passes that the step needs before its update."""
        has, columns, results = self._companions, self.credit.columns, PassResults()
        if has.own_pass is not None and "proximal_logprobs" in columns:
            policy = self.whole(self.params)
            proximal = has.own_pass.logprobs(policy, batch, device_lock, replays=True)
            results = results._replace(proximal=proximal)
        reads = "reference_logprobs" in columns and self.frozen.reference is not None
        if has.own_pass is not None and reads:
            reference = has.own_pass.logprobs(
                self.whole(self.frozen.loaded_reference()), batch, device_lock
            )
            results = results._replace(reference=reference)
        section = self._teacher
        if has.teacher_pass is not None and section is not None and section.form == "advantage":
            teacher = has.teacher_pass.logprobs(self._teacher_params, batch, device_lock)
            results = results._replace(teacher=teacher)
        if has.critic is not None and self.critic_state is not None:
            values, last = has.critic.values(self.critic_state.params, batch, device_lock)
            results = results._replace(values=values, last_values=last)
        if has.teacher_pass is not None and self._top_k_of is not None:
            top_k = self._run_top_k(has.teacher_pass, batch, device_lock)
            results = results._replace(top_k=top_k)
        return results

    @property
    def _top_k_of(self) -> str | None:
        """Model whose likeliest tokens the loss compares; None: it compares none."""
        section = self._teacher
        compares = section is not None and section.form == "loss" and section.top_k
        return section.top_k_of if section is not None and compares else None

    @property
    def _teacher_params(self) -> Params:
        """The teacher's parameters for a pass; an adapter is joined to the base."""
        return self.whole(self.frozen.teacher)

    def _run_top_k(
        self, teacher_pass: LogprobPass, batch: PackedBatch, device_lock: DeviceGuard
    ) -> Columns:
        """Return the teacher's log-probs of its k likeliest tokens, or of the student's."""
        own_pass = self._companions.own_pass
        if self._top_k_of == "student" and own_pass is not None:
            ids, _ = own_pass.top(self.whole(self.params), batch, device_lock)
            logprobs = teacher_pass.logprobs_at(self._teacher_params, batch, ids, device_lock)
        else:
            ids, logprobs = teacher_pass.top(self._teacher_params, batch, device_lock)
        return {"teacher_ids": ids, "teacher_logprobs": logprobs}

    def _update(self, step: PackedStep, version: int, device_lock: DeviceGuard) -> dict[str, float]:
        """Train the policy, then the critic, on each mini-batch of each epoch; return the report.

        While the critic warms up, the policy is only measured.
        """
        policy_reports, critic_reports = [], []
        warming = self._companions.critic is not None and version < self._settings.critic_warmup
        frozen, norms = self._frozen_of(step), dict[str, float]()
        if self._gradients is not None and not warming:
            data = self._policy_data(step.rows, version)
            norms = self._gradients.norms(version, self.params, data, frozen, device_lock)
        algorithm, missing = self._algorithm, 0
        first = 0 if self._companions.critic is None else self._settings.critic_warmup
        for epoch in range(algorithm.epochs):
            made, parts = self.mini_batches(step, (self._settings.seed, version, epoch))
            missing += algorithm.minibatches - made
            for index, part in enumerate(parts):
                done = epoch * algorithm.minibatches + index * algorithm.minibatches / made
                if not warming:
                    at = self._updates_in(version - first) + done
                    data = self._policy_data(part, version)
                    self.state, report = self._step.update(
                        self.state, data, frozen, device_lock=device_lock, at=at
                    )
                    policy_reports.append(report)
                if part.critic:
                    at = self._updates_in(version) + done
                    critic_reports.append(self._update_critic(part, at, device_lock))
        if warming:
            data = self._policy_data(step.rows, version)
            report = self._step.measure(self.params, data, frozen, device_lock=device_lock)
            policy_reports.append({**report, "train/skipped": 0.0, "train/flops": 0.0})
        self._warn_of_missing(missing)
        reports = (*policy_reports, *critic_reports)
        return {
            **norms,
            **counted_once(mean_report(policy_reports), 1 if warming else algorithm.epochs),
            **counted_once(mean_report(critic_reports, "critic/tokens"), algorithm.epochs),
            "faults/oom_retries": sum(r.get("faults/oom_retries", 0.0) for r in reports),
            "train/updates": 0.0 if warming else float(len(policy_reports)),
            "train/missing_updates": float(missing),
            **({"critic/warming": float(warming)} if self._companions.critic is not None else {}),
        }

    def _policy_data(self, rows: StepRows, version: int) -> PolicyData:
        return PolicyData(rows.batch, rows.columns, version, self.coefficients.at(version))

    def _frozen_of(self, step: PackedStep) -> Frozen:
        """Return the frozen weights of the step's policy updates."""
        section = self._teacher
        compares_all = section is not None and section.form == "loss" and not section.top_k
        looked_up = "reference_logprobs" in step.rows.columns
        return Frozen(
            reference=None if looked_up else self.frozen.reference,
            teacher=self.frozen.teacher if compares_all else None,
            base=self._base,
        )

    def _update_critic(
        self, part: StepRows, at: float, device_lock: DeviceGuard
    ) -> dict[str, float]:
        """Train the critic on one mini-batch's returns."""
        critic = self._companions.critic
        assert critic is not None and self.critic_state is not None
        values, returns = part.critic["values"], part.critic["returns"]
        data = critic_objective.CriticData(part.batch, values, returns, part.critic.get("weights"))
        self.critic_state, report = critic.step.update(
            self.critic_state, data, device_lock=device_lock, at=at
        )
        return report

    def _updates_in(self, steps: int) -> int:
        """Return the configured number of updates in these steps.

        The learning rate follows it, even if steps make fewer updates.
        """
        return steps * self._algorithm.epochs * self._algorithm.minibatches

    def mini_batches(self, step: PackedStep, seed: Sequence[int]) -> tuple[int, Iterator[StepRows]]:
        """Return the number of one epoch's mini-batches, and a lazy iterator over them.

        Each packs some of the step's sequences into separate rows. A token's weight is that in the
        whole step times the number of mini-batches: the mean of their gradients is the gradient of
        the step, for any assignment of sequences.
        """
        number = self._algorithm.minibatches
        if number == 1:
            return 1, iter([step.rows])
        dealt = deal(step.batch, number, seed)
        times = len(dealt)
        columns = step.rows.columns
        columns = columns | self._objective.weights(step.batch, times, columns)
        critic = step.rows.critic
        if critic:
            critic = critic | {"weights": token_mean(step.batch) * np.float32(times)}
        rows = StepRows(step.batch, columns, critic)
        return times, (rows.at(step.index.select(part)) for part in dealt)

    def _warn_of_missing(self, missing: int) -> None:
        """Warn each time that a step lacks more updates than any step before."""
        if missing > self._max_missing:
            self._max_missing = missing
            log.warning(
                "a step makes %d updates fewer than algorithm.epochs and algorithm.minibatches "
                "(%d) ask for: it has fewer sequences to learn from. Lower algorithm.minibatches, "
                "or raise algorithm.groups_per_step or group_size.",
                missing,
                self._algorithm.minibatches,
            )

    def _steer_and_follow(self, report: dict[str, float], version: int) -> None:
        """Report and adapt the coefficients; update reference and teacher from the policy."""
        if self.frozen.reference is not None or self._companions.asks_reference:
            report["policy/kl_coefficient"] = float(self.coefficients.current.kl)
        if self._objective.recipe.has_entropy:
            report["policy/entropy_coefficient"] = float(self.coefficients.current.entropy)
        weights = self.coefficients.at(version).losses
        for name, weight in zip(self._algorithm.components, weights, strict=True):
            report[f"loss_coefficient/{name}"] = float(weight)
        if not report.get("critic/warming"):
            self.coefficients.steer(report)
        self.frozen.follow(self.params, version)


COUNTS = ("train/tokens", "train/sequences", "supervised/tokens", "critic/tokens")
"""Counts of an epoch, which trains on every token of the step once."""


def counted_once(report: Mapping[str, float], epochs: int) -> dict[str, float]:
    """Return a report over several epochs with its COUNTS divided by them: each token counts
    once."""
    return {
        key: x / epochs if key in COUNTS or key.startswith("loss_tokens/") else x
        for key, x in report.items()
    }
