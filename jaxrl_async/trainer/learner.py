"""One step of learning: scored groups in, updated weights and a report out. No thread, no clock.

    groups ──shape──> pack ──> passes: proximal, reference, teacher, values
                        │                     │
                        │      rewards ──advantage──> advantages, returns
                        v                     v
              mini-batches ──update──> policy      critic, reference, teacher, coefficients follow

Everything that changes from step to step is in `Learner.tree` (arrays) and `Learner.numbers`.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxrl_async.algorithms.advantages import AdvantageFn, StepData, step_data
from jaxrl_async.algorithms.aggregate import token_mean
from jaxrl_async.algorithms.columns import COLUMNS, Columns, Source, names_of
from jaxrl_async.algorithms.entropy import active_entropy_coefficient, next_entropy_coefficient
from jaxrl_async.algorithms.kl import next_coefficient
from jaxrl_async.algorithms.losses import token_inputs
from jaxrl_async.algorithms.objective import Coefficients, mean_report
from jaxrl_async.algorithms.shaping import Shaped, ShapingFn, shape
from jaxrl_async.config import schema
from jaxrl_async.config.userfile import is_own
from jaxrl_async.mesh import DEVICE, HOST, NO_DEVICE_LOCK, in_memory
from jaxrl_async.trainer.critic import Critic
from jaxrl_async.trainer.distill import teacher_advantages
from jaxrl_async.trainer.flops import forward_flops
from jaxrl_async.trainer.logprob_pass import LogprobPass, ProbePass
from jaxrl_async.trainer.objectives.critic_objective import CriticData
from jaxrl_async.trainer.objectives.policy_objective import PolicyData, PolicyObjective
from jaxrl_async.trainer.optimizer import rounded_tree
from jaxrl_async.trainer.pack import (
    Pair,
    deal,
    moved,
    pack_groups,
    places_of,
    repacked,
    unpacked,
    with_advantages,
)
from jaxrl_async.trainer.token_columns import Routing
from jaxrl_async.trainer.update import Frozen, TrainState, Update
from jaxrl_async.types import EpisodeGroup, FloatArray, IntArray, PackedBatch

log = logging.getLogger(__name__)

EMA_SEED = 1
"""Of the random bits that round a moving reference in bfloat16."""
NEEDS_COVARIANCE = ("clip_cov", "kl_cov")
"""Losses that look at TokenInputs.covariance_rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Companions:
    """What may learn or advise beside the policy; None: it is not there."""

    own_pass: LogprobPass | None = None  # of the policy's and the reference's architecture
    reference: Any = None  # parameters at the start of the run
    teacher: Any = None  # parameters at the start of the run
    teacher_pass: LogprobPass | None = None
    critic: Critic | None = None
    critic_state: TrainState | None = None
    pairs: Iterator[Pair] | None = None  # worked answers to mix in


class Part(NamedTuple):
    """What one update learns from; [rows, length] each."""

    batch: PackedBatch
    columns: Columns
    values: FloatArray | None = None  # these three: of a critic
    returns: FloatArray | None = None
    critic_weights: FloatArray | None = None


class Learner:
    """Owns the policy's train state and its companions'. Used by the trainer's thread alone."""

    def __init__(
        self,
        step: Update[PolicyObjective],
        state: TrainState,
        *,
        algorithm: schema.AlgorithmSection,
        advantage: AdvantageFn,
        row_length: int,
        shapings: Sequence[ShapingFn] = (),
        companions: Companions | None = None,
        teacher: schema.TeacherSection | None = None,
        reference: schema.ReferenceSection | None = None,
        critic_warmup: int = 0,
        mask_vocab: int | None = None,
        routing: Routing | None = None,
        offload_reference: bool = False,
        seed: int = 0,
    ) -> None:
        """mask_vocab, routing: as in pack.pack. critic_warmup: steps in which only the critic
        learns. offload_reference: it lies in the host's memory, and its log-probs are taken
        beforehand."""
        companions = companions or Companions()
        self._step, self.state, self._with = step, state, companions
        self._objective = step.objective
        self._probe = ProbePass(step.objective.spec, step.settings)
        self._algorithm, self._advantage, self._shapings = algorithm, advantage, shapings
        self._teacher = teacher or schema.TeacherSection()
        self._moves = reference or schema.ReferenceSection()
        self._row_length, self._critic_warmup, self._seed = row_length, critic_warmup, seed
        self._mask_vocab, self._routing, self._pairs_taken = mask_vocab, routing, 0
        self._offloads = offload_reference
        self.reference, self.teacher = self._stored(companions.reference), companions.teacher
        self.critic_state = companions.critic_state
        self.coefficients: Coefficients = step.objective.recipe.coefficients
        self._needs_covariance = needs_covariance(algorithm.loss)
        self._takes_reference = takes_reference(algorithm, offloads=offload_reference)
        self._missed = 0  # most mini-batches that a step could not make
        self._entropy = float(algorithm.entropy_coefficient)  # while the entropy is too low
        self._follow = jax.jit(_moved_average, donate_argnums=(0,), static_argnums=(3,))

    # ---- what a checkpoint holds

    def tree(self) -> dict[str, Any]:
        """All arrays that change from step to step."""
        held = {
            "train": self.state,
            "reference": self.reference,
            "critic": self.critic_state,
            "teacher": self.teacher if self._teacher.source == "self" else None,
        }
        return {name: part for name, part in held.items() if part is not None}

    def numbers(self) -> dict[str, float]:
        """All numbers that do."""
        return {
            **_floats(self.coefficients),
            "steered_entropy": self._entropy,
            "pairs_taken": float(self._pairs_taken),
        }

    def restore(self, tree: Mapping[str, Any], numbers: Mapping[str, float]) -> None:
        """What `tree` and `numbers` gave."""
        self.state = tree["train"]
        self.reference = tree.get("reference", self.reference)
        self.critic_state = tree.get("critic", self.critic_state)
        self.teacher = tree.get("teacher", self.teacher)
        algorithm, kl, entropy = self._algorithm, *self.coefficients
        if algorithm.kl_target is not None:
            kl = numbers["kl"]
        if algorithm.entropy_target is not None:
            entropy, self._entropy = numbers["entropy"], numbers["steered_entropy"]
        self.coefficients = Coefficients(kl=kl, entropy=entropy)
        while self._with.pairs is not None and self._pairs_taken < int(numbers["pairs_taken"]):
            next(self._with.pairs)
            self._pairs_taken += 1

    @property
    def params(self) -> Any:
        """The policy's weights; the next `learn` donates them."""
        return self.state.params

    def probe(self, token_ids: IntArray) -> Any:
        """The policy's log-probs of a fixed sequence, as logprob_pass.ProbePass."""
        return self._probe(self.state.params, token_ids)

    # ---- one step

    def learn(
        self,
        groups: Sequence[EpisodeGroup],
        version: int,
        device_lock: AbstractContextManager[Any] = NO_DEVICE_LOCK,
    ) -> dict[str, float]:
        """Learn from the groups, drawn for the step that makes version + 1; the report.

        The keys are explained in metrics.metric.METRICS.
        """
        shaped = shape(step_data(groups), self._shapings)
        batch = pack_groups(
            shaped.data.groups,
            None,
            self._row_length,
            masks=shaped.masks,
            pairs=self._pairs(),
            mask_vocab=self._mask_vocab,
            routing=self._routing,
        )
        found = self._look(batch, device_lock)
        data, told = self._credited(shaped, batch, found)
        learnt = self._advantage(data)
        batch = with_advantages(batch, learnt.advantages)
        batch, gap = self._advised(batch, found)
        columns = self._columns(batch, found, device_lock)
        returns = None
        if learnt.returns is not None:
            returns = with_advantages(batch, learnt.returns).advantages
        stats = self._update(
            Part(batch, columns, found.get("values"), returns), version, device_lock
        )
        passes = len(found.keys() - {"last_values"})  # which come with the values
        stats["train/flops"] += passes * forward_flops(self._objective.spec, batch)
        self._after(stats, version)
        return {**shaped.counts, **told, **gap, **stats}

    def _pairs(self) -> list[Pair]:
        """The next worked answers, where some are mixed in."""
        if self._with.pairs is None:
            return []
        self._pairs_taken += self._algorithm.supervised_batch
        return [next(self._with.pairs) for _ in range(self._algorithm.supervised_batch)]

    def _look(
        self, batch: PackedBatch, device_lock: AbstractContextManager[Any]
    ) -> dict[str, FloatArray]:
        """Everything that a forward pass has to say of the batch beforehand, as far as needed."""
        has, found = self._with, {}
        algorithm = self._algorithm
        refers = self.reference is not None
        advised = self._teacher.source != "none" and self._teacher.form == "advantage"
        takes = takes_proximal(algorithm, refers=refers)
        if has.own_pass is not None and takes:
            own, logprobs = self.state.params, has.own_pass.logprobs
            found["proximal"] = logprobs(own, batch, device_lock, replays=True)
        if has.own_pass is not None and refers and self._takes_reference:
            found["reference"] = has.own_pass.logprobs(self._fetched(), batch, device_lock)
        if has.teacher_pass is not None and advised:
            found["teacher"] = has.teacher_pass.logprobs(self.teacher, batch, device_lock)
        if has.critic is not None and self.critic_state is not None:
            looked = has.critic.values(self.critic_state.params, batch, device_lock)
            found["values"], found["last_values"] = looked
        return found

    def _credited(
        self, shaped: Shaped, batch: PackedBatch, found: Mapping[str, FloatArray]
    ) -> tuple[StepData, dict[str, float]]:
        """The step's data with the critic's values, and the KL taken off the rewards."""
        data, told = shaped.data, dict[str, float]()
        if "values" in found:
            values, last = (unpacked(batch, found[k]) for k in ("values", "last_values"))
            data = replace(
                data,
                values=_by_group(values, data.groups),
                last_values=_ends(_by_group(last, data.groups)),
            )
        if "reference" in found and self._algorithm.kl_in == "reward":
            penalty = self.coefficients.kl * self._divergence(batch, found)
            data, told = _less(data, batch, penalty, self._algorithm.advantage)
        return data, told

    def _divergence(self, batch: PackedBatch, found: Mapping[str, FloatArray]) -> FloatArray:
        """algorithm.kl's estimate at each learnt token, of the weights at the start of the step."""
        x = token_inputs(
            {
                "policy_logprobs": found["proximal"],
                "reference_logprobs": found["reference"],
                "entropy": np.zeros(batch.mask.shape),
                **{n: getattr(batch, n) for n in names_of(Source.PACK) if COLUMNS[n].in_loss},
            }
        )
        return np.asarray(self._objective.recipe.kl(x), np.float32)

    def _advised(
        self, batch: PackedBatch, found: Mapping[str, FloatArray]
    ) -> tuple[PackedBatch, dict[str, float]]:
        """Advantages with the teacher's, distill.teacher_advantages."""
        if "teacher" not in found:
            return batch, {}
        section = self._teacher
        drew, teacher = batch.behavior_logprobs, found["teacher"]
        told = batch.mask & np.isfinite(drew - teacher)  # a foreign sampler may tell no log-prob
        if self._with.teacher_pass is not None:
            told &= batch.token_ids < self._with.teacher_pass.spec.vocab
        gap = -np.asarray(teacher_advantages(drew, teacher, told))
        advantages = section.rewards * batch.advantages - section.coefficient * gap
        mean = float(gap[batch.mask].mean(dtype=np.float64)) if batch.mask.any() else 0.0
        return (
            replace(batch, advantages=advantages.astype(np.float32)),
            {"policy/teacher_gap": mean},
        )

    def _columns(
        self,
        batch: PackedBatch,
        found: Mapping[str, FloatArray],
        device_lock: AbstractContextManager[Any],
    ) -> Columns:
        looked = {"proximal_logprobs": "proximal", "reference_logprobs": "reference"}
        columns: Columns = {name: found[k] for name, k in looked.items() if k in found}
        if self._needs_covariance:
            rank = covariance_rank(found["proximal"], batch.advantages, batch.mask)
            columns["covariance_rank"] = rank
        teacher, has = self._teacher, self._with
        if has.teacher_pass is not None and teacher.form == "loss" and teacher.top_k:
            if teacher.top_of == "student" and has.own_pass is not None:
                ids, _ = has.own_pass.top(self.state.params, batch, device_lock)
                logprobs = has.teacher_pass.logprobs_at(self.teacher, batch, ids, device_lock)
            else:
                ids, logprobs = has.teacher_pass.top(self.teacher, batch, device_lock)
            columns |= {"teacher_ids": ids, "teacher_logprobs": logprobs}
        return columns

    def _update(
        self, step: Part, version: int, device_lock: AbstractContextManager[Any]
    ) -> dict[str, float]:
        """Every mini-batch of every epoch: the policy, then the critic."""
        reports, of_critic = [], []
        critic = self._with.critic
        warming = critic is not None and version < self._critic_warmup
        whole_teacher = self._teacher.form == "loss" and not self._teacher.top_k
        looked_up = "reference_logprobs" in step.columns
        frozen = Frozen(
            reference=None if looked_up else self.reference,
            teacher=self.teacher if whole_teacher else None,
        )
        algorithm = self._algorithm
        missing = 0
        for epoch in range(algorithm.epochs):
            many, parts = self._parts(step, (self._seed, version, epoch))
            missing += algorithm.minibatches - many
            for index, part in enumerate(parts):
                done = epoch * algorithm.minibatches + index * algorithm.minibatches / many
                if not warming:
                    at = self._asked(version - self._first_step) + done
                    data = PolicyData(part.batch, part.columns, version, self.coefficients)
                    self.state, stats = self._step.update(
                        self.state, data, frozen, device_lock=device_lock, at=at
                    )
                    reports.append(stats)
                if critic is not None and part.returns is not None:
                    assert part.values is not None and self.critic_state is not None
                    of_part = CriticData(part.batch, part.values, part.returns, part.critic_weights)
                    self.critic_state, stats = critic.step.update(
                        self.critic_state,
                        of_part,
                        device_lock=device_lock,
                        at=self._asked(version) + done,
                    )
                    of_critic.append(stats)
        if warming:
            data = PolicyData(step.batch, step.columns, version, self.coefficients)
            told = self._step.measure(self.state.params, data, frozen, device_lock=device_lock)
            reports.append({**told, "train/skipped": 0.0, "train/flops": 0.0})
        self._tell_of_missing(missing)
        retries = sum(r.get("faults/oom_retries", 0.0) for r in (*reports, *of_critic))
        return {
            **mean_report(reports),
            **mean_report(of_critic, tokens="critic/tokens"),
            "faults/oom_retries": retries,
            "train/updates": 0.0 if warming else float(len(reports)),
            "train/missing_updates": float(missing),
            **({"critic/warming": float(warming)} if critic is not None else {}),
        }

    @property
    def _first_step(self) -> int:
        """In which the policy learns: its learning rate's course begins there."""
        return self._critic_warmup if self._with.critic is not None else 0

    def _asked(self, steps: int) -> int:
        """Updates that the configuration asks for in so many steps; the learning rate follows
        them, whatever number was really made."""
        return steps * self._algorithm.epochs * self._algorithm.minibatches

    def _parts(self, step: Part, seed: Sequence[int]) -> tuple[int, Iterator[Part]]:
        """The mini-batches of one epoch: of the step's sequences, each in rows of its own. Their
        number; and each when it is asked for, since sampling masks make them large.

        Each token weighs what it does in the whole step, times the number of parts: the mean of
        their gradients is the step's, whatever part a sequence is in.
        """
        if self._algorithm.minibatches == 1:
            return 1, iter([step])
        dealt = deal(step.batch, self._algorithm.minibatches, seed)
        times = len(dealt)
        step = step._replace(columns=step.columns | self._objective.weights(step.batch, times))
        if step.returns is not None:
            step = step._replace(critic_weights=token_mean(step.batch) * np.float32(times))
        parts = (_part_at(step, places_of(step.batch, sequences)) for sequences in dealt)
        return times, parts

    def _tell_of_missing(self, missing: int) -> None:
        """Once for every number that is larger than those before."""
        if missing > self._missed:
            self._missed = missing
            log.warning(
                "a step makes %d updates fewer than algorithm.epochs and algorithm.minibatches "
                "(%d) ask for: it has fewer sequences to learn from. Lower algorithm.minibatches, "
                "or raise algorithm.groups_per_step or group_size.",
                missing,
                self._algorithm.minibatches,
            )

    # ---- what follows the policy

    def _steer(self, stats: Mapping[str, float]) -> None:
        """Coefficients towards their targets; a step that measured nothing leaves them."""
        algorithm = self._algorithm
        divergence = _measured(stats, "policy/kl_reference")
        if algorithm.kl_target is not None and divergence is not None:
            kl = next_coefficient(
                self.coefficients.kl,
                divergence,
                target=algorithm.kl_target,
                horizon=algorithm.kl_horizon,
            )
            self.coefficients = self.coefficients._replace(kl=kl)
        entropy = _measured(stats, "policy/entropy")
        if algorithm.entropy_target is not None and entropy is not None:
            target = algorithm.entropy_target
            self._entropy = next_entropy_coefficient(
                self._entropy, entropy, target=target, step=algorithm.entropy_step
            )
            active = active_entropy_coefficient(self._entropy, entropy, target=target)
            self.coefficients = self.coefficients._replace(entropy=active)

    def _after(self, stats: dict[str, float], version: int) -> None:
        """Steer the coefficients, and let reference and teacher follow."""
        moves = self._moves
        if self.reference is not None:
            stats["policy/kl_coefficient"] = float(self.coefficients.kl)
        if self._objective.recipe.has_entropy:
            stats["policy/entropy_coefficient"] = float(self.coefficients.entropy)
        if not stats.get("critic/warming"):
            self._steer(stats)
        if self.reference is not None and moves.ema:
            followed = self._follow(
                self._fetched(), self.state.params, np.int32(version), moves.ema
            )
            self.reference = self._stored(followed)
        if self.reference is not None and _is_due(version, moves.refresh_every):
            self.reference = self._stored(copied(self.state.params))
        if self._teacher.source == "self" and _is_due(version, self._teacher.refresh_every):
            self.teacher = copied(self.state.params)

    def _stored(self, reference: Any) -> Any:
        """The reference where it lies between two uses."""
        return in_memory(HOST, reference) if self._offloads else reference

    def _fetched(self) -> Any:
        """The reference where programs can use it."""
        return in_memory(DEVICE, self.reference) if self._offloads else self.reference


def _measured(stats: Mapping[str, float], key: str) -> float | None:
    """The number where there is a finite one."""
    value = stats.get(key)
    return value if value is not None and math.isfinite(value) else None


def _floats(coefficients: Coefficients) -> dict[str, float]:
    return {k: float(v) for k, v in coefficients._asdict().items()}


def needs_covariance(loss: schema.Choice) -> bool:
    """Whether a loss looks at TokenInputs.covariance_rank, or may do so."""
    name = schema.name_of(loss)
    return name in NEEDS_COVARIANCE or is_own(name)


def takes_proximal(algorithm: schema.AlgorithmSection, *, refers: bool) -> bool:
    """Whether the policy's own log-probs are taken before the updates. refers: there is a
    reference."""
    several = algorithm.epochs * algorithm.minibatches > 1
    in_reward = algorithm.kl_in == "reward" and refers
    return several or in_reward or needs_covariance(algorithm.loss)


def takes_reference(algorithm: schema.AlgorithmSection, *, offloads: bool) -> bool:
    """Whether the reference's log-probs are taken once, before the updates, where there is one: the
    rewards need them, or they would be taken once in each epoch, or it is not on the device."""
    several = algorithm.epochs > 1 and schema.name_of(algorithm.kl) != "full"
    return algorithm.kl_in == "reward" or several or offloads


def copied(params: Any) -> Any:
    """A copy on the same devices that no step donates."""
    return jax.tree.map(jnp.copy, params)


def covariance_rank(
    logprobs: FloatArray, advantages: FloatArray, mask: NDArray[np.bool_]
) -> FloatArray:
    """As losses.TokenInputs.covariance_rank: 0 for the learnt token with the largest one.

    (log policy - mean) (A - mean) over the learnt tokens of the step: Cui et al. 2025
    (arXiv:2505.22617), eq. 10. Ties keep the order of the tokens. 1 outside the mask.
    """
    rank = np.ones(mask.shape, np.float32)
    logs, values = logprobs[mask].astype(np.float64), advantages[mask].astype(np.float64)
    if len(logs):
        covariance = (logs - logs.mean()) * (values - values.mean())
        order = np.argsort(-covariance, kind="stable")
        places = np.empty(len(order))
        places[order] = np.arange(len(order))
        rank[mask] = places / len(order)
    return rank


def _moved_average(reference: Any, params: Any, version: Any, ema: float) -> Any:
    """ema * reference + (1 - ema) * params. In bfloat16 such a step would mostly be lost to
    rounding: there it is rounded at random, so that the mean is right."""

    def mixed(old: Any, new: Any) -> Any:
        return ema * old.astype(jnp.float32) + (1 - ema) * new.astype(jnp.float32)

    found = jax.tree.map(mixed, reference, params)
    if (dtype := jax.tree.leaves(reference)[0].dtype) == jnp.float32:
        return found
    return rounded_tree(jax.random.fold_in(jax.random.key(EMA_SEED), version), found, dtype)


def _is_due(version: int, every: int) -> bool:
    """Whether the step that makes version + 1 ends a period."""
    return every > 0 and (version + 1) % every == 0


def _part_at(step: Part, places: NDArray[np.int64]) -> Part:
    """The sequences at these places of a step's rows, with all that was found out about them."""
    columns = {n: moved(c, places, COLUMNS[n].fill) for n, c in step.columns.items()}
    of_critic = [None if c is None else moved(c, places) for c in step[2:]]
    return Part(repacked(step.batch, places), columns, *of_critic)


def _ends(values: tuple[tuple[NDArray[Any], ...], ...]) -> tuple[NDArray[np.float64], ...]:
    """Of each episode its last number: per group [episodes]; 0 where it has no token."""
    return tuple(
        np.array([v[-1] if len(v) else 0.0 for v in of_group], np.float64) for of_group in values
    )


def _by_group(
    sequences: Sequence[NDArray[Any]], groups: Sequence[EpisodeGroup]
) -> tuple[tuple[NDArray[Any], ...], ...]:
    """One flat list, in pack's order, as a tuple per group; what follows (worked answers) is
    left out."""
    rest = iter(sequences)
    return tuple(tuple(next(rest) for _ in g.episodes) for g in groups)


def _less(
    data: StepData, batch: PackedBatch, penalty: FloatArray, advantage: schema.Choice
) -> tuple[StepData, dict[str, float]]:
    """Rewards less a penalty per token, once: from the tokens, which every estimator here looks at;
    for a user's own, which may look at the sequences alone, from these."""
    of_tokens = _by_group(unpacked(batch, penalty), data.groups)
    sums = [np.array([p.sum(dtype=np.float64) for p in g]) for g in of_tokens]
    flat = np.concatenate(sums)
    told = {"reward/kl": float(flat.mean()) if len(flat) else 0.0}
    if is_own(schema.name_of(advantage)):
        rewards = tuple(r - s for r, s in zip(data.rewards, sums, strict=True))
        return replace(data, rewards=rewards), told
    before = data.token_rewards or tuple((None,) * len(g) for g in of_tokens)
    less = tuple(
        tuple(-p if old is None else old - p for old, p in zip(*both, strict=True))
        for both in zip(before, of_tokens, strict=True)
    )
    return replace(data, token_rewards=less), told
