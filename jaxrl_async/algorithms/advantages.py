"""Advantage estimators: from the rewards of a whole step to one number per token. NumPy only.

    StepData (groups, rewards, token rewards, values) ──estimator──> StepAdvantages

An estimator gets all groups of the step together, since some normalise over the batch. It computes
in float64 and returns float32 arrays `[length]` that are 0 at tokens that were not generated. All
handle edge cases alike: equal values (a group of one, equal rewards) are normalised to exactly 0
despite rounding, and the reward of an episode without generated tokens is lost. Groups may differ
in size.

Each reward is credited to a generated token: the sequence's reward to the last one; the reward of a
token to itself, or, if it was not generated (a tool's reply), to the last generated token before
it. Rewards before the first generated token are not credited. Estimators of one number per sequence
use its return: its reward plus the rewards credited to its tokens.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxrl_async.algorithms.registry import Above0, AtLeast0, Finite, Registry, Share, Whole, rule
from jaxrl_async.config import function_facts
from jaxrl_async.config.schema import Choice, arguments_of, name_of
from jaxrl_async.errors import ConfigError
from jaxrl_async.types import BoolArray, Episode, EpisodeGroup, FloatArray, StopReason

Doubles = NDArray[np.float64]
PerToken = tuple[tuple[FloatArray, ...], ...]  # per group, per episode: [length] float32


@dataclass(frozen=True, slots=True, kw_only=True)
class StepData:
    """The input of an estimator: one step's groups and rewards.

    Two groups, of two episodes and of one:
        groups = (g0, g1)   rewards = ([1., 0.], [1.])   token_rewards = ((a0, None), (b0,))
    """

    groups: tuple[EpisodeGroup, ...]
    rewards: tuple[Doubles, ...]  # per group [episodes] float64, of the sequences after shaping
    token_rewards: tuple[tuple[FloatArray | None, ...], ...] | None = (
        None  # per episode [length]: process rewards and -beta * KL of generated tokens
    )
    values: tuple[tuple[FloatArray, ...], ...] | None = (
        None  # per episode [length]: a critic's value of the state before token t
    )
    last_values: tuple[Doubles, ...] | None = (
        None  # per group [episodes] float64: a critic's value of the state after the last token
    )
    compared: tuple[BoolArray, ...] | None = (
        None  # per group [episodes]: episodes that algorithm.baseline compares; None: all
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAdvantages:
    """The output of an estimator: the targets of policy and critic."""

    advantages: PerToken  # 0 where not generated
    returns: PerToken | None = None  # the critic's targets, 0 where not generated; None: no critic


AdvantageFn = Callable[..., StepAdvantages]  # (StepData, **settings) -> StepAdvantages


class AdvantageFacts(NamedTuple):
    """The facts that an advantage estimator declares."""

    level: Literal["token", "sequence"] | None = "sequence"
    """"token": a separate number per token; "sequence": one number for all tokens of an episode.

    Both use token_rewards (`returns_of` adds them up), so a KL in the rewards is subtracted from
    these. None: unknown; the KL is subtracted from the sequences' rewards.
    """
    needs: tuple[Literal["values"], ...] = ()  # a critic's values
    compared_in_group: bool = False  # 0 for a group of one, also with token rewards
    divided_in_group: bool = False  # by the spread or the mean of the group's rewards
    centered_in_step: bool = False  # 0 for a step of one answer, undiscounted
    part_weights: str | None = None  # name of the argument that weighs the parts of the reward


advantage: Registry[AdvantageFn, AdvantageFacts] = Registry(
    "advantage", "algorithm.advantage", AdvantageFacts, assumed=AdvantageFacts(level=None)
)


def needs_critic(choice: Choice) -> bool:
    """Return whether the chosen estimator needs a critic's values."""
    return "values" in advantage.facts(choice).needs


def step_data(
    groups: Sequence[EpisodeGroup], values: Sequence[Sequence[FloatArray]] | None = None
) -> StepData:
    """Return the step's data from its scores, before shaping."""
    has_token_rewards = any(s.by_token is not None for g in groups for s in g.scores)
    return StepData(
        groups=tuple(groups),
        rewards=tuple(np.array([s.reward for s in g.scores], np.float64) for g in groups),
        token_rewards=tuple(tuple(s.by_token for s in g.scores) for g in groups)
        if has_token_rewards
        else None,
        values=None if values is None else tuple(tuple(of_group) for of_group in values),
    )


# ---- one number per sequence, from its group alone


@advantage
def reinforce(data: StepData) -> StepAdvantages:
    """r_i: no baseline. Williams 1992."""
    return _per_sequence(data, returns_of(data))


@advantage(compared_in_group=True, divided_in_group=True)
def group_normalized(
    data: StepData, *, epsilon: Above0 = 1e-6, floor: AtLeast0 = 0.0
) -> StepAdvantages:
    """(r_i - mean(r)) / (max(std(r), floor) + epsilon): GRPO. std is the population's, over G.

    Shao et al. 2024 (DeepSeekMath, arXiv:2402.03300), sec. 4.1.2, outcome supervision, without the
    floor. Without it, a difference of 0.001 between wrong answers of different lengths weighs as
    much as a difference of 1 between correct and wrong. With a floor of 0.1 it weighs 0.01 of that.
    """
    return _per_sequence(data, [_standardized(r, epsilon, floor) for r in returns_of(data)])


@advantage(compared_in_group=True)
def group_mean(data: StepData) -> StepAdvantages:
    """r_i - mean(r): Dr. GRPO, without the division that favours very easy and very hard prompts.

    Liu et al. 2025 (arXiv:2503.20783), sec. 3.2.
    """
    return _per_sequence(data, [_centered(r) for r in returns_of(data)])


@advantage(compared_in_group=True)
def kimi(data: StepData) -> StepAdvantages:
    """r_i - mean(r): Kimi k1.5, eq. 3, where the empirical mean estimates tau log Z.

    Team Kimi 2025 (arXiv:2501.12599), sec. 2.3.2. The second term of that gradient,
    -tau / 2 * grad (log policy - log behavior)^2 of the whole sequence, depends on the policy being
    trained. It therefore belongs to the loss or the KL, with tau as its coefficient.
    """
    return group_mean(data)


@advantage(compared_in_group=True)
def rloo(data: StepData) -> StepAdvantages:
    """r_i - mean of the other members' rewards = G / (G - 1) * (r_i - mean(r)).

    Kool et al. 2019; Ahmadian et al. 2024 (arXiv:2402.14740).
    """
    returns = returns_of(data)
    return _per_sequence(data, [_centered(r) * len(r) / max(len(r) - 1, 1) for r in returns])


@advantage(compared_in_group=True)
def opo(data: StepData) -> StepAdvantages:
    """r_i - sum_j l_j r_j / sum_j l_j, l the generated tokens: the minimum-variance baseline.

    Hao et al. 2025 (arXiv:2505.23585), sec. 3.2: a sequence's squared gradient grows with length.
    """
    pairs = zip(data.groups, returns_of(data), strict=True)
    return _per_sequence(data, [_centered(r, weights=_lengths(g)) for g, r in pairs])


@advantage(compared_in_group=True, divided_in_group=True)
def maxrl(data: StepData) -> StepAdvantages:
    """(r_i - mean(r)) / mean(r), 0 where no reward is above 0: hard prompts weigh 1 / pass rate.

    Tajwar et al. 2026 (arXiv:2602.02710): the mean gradient of the successes minus that over all.
    For rewards of 0 and 1.
    """
    return _per_sequence(data, [_centered(r) / _positive(r.mean()) for r in returns_of(data)])


@advantage(compared_in_group=True)
@rule(
    "k must be at most algorithm.group_size, and what a downsample keeps",
    lambda k, group_size: k <= group_size,
)
def pass_at_k(data: StepData, *, k: Whole = 4, threshold: Finite = 0.5) -> StepAdvantages:
    """Reward that any of k answers is correct; analytic over all subsets of the group.

    With N answers, M of them wrong, R = 1 - C(M, k) / C(N, k) and sigma = sqrt(R (1 - R)):
        correct  (1 - R) / sigma
        wrong    (1 - R - C(M - 1, k - 1) / C(N - 1, k - 1)) / sigma
    and 0 where sigma is 0. Chen et al. 2025 (arXiv:2508.10751), sec. 2.4, eq. 14 and 15. An answer
    is correct if its reward is above `threshold`. In a group of fewer than k, k is the group size.
    """
    rights = [r > threshold for r in returns_of(data)]
    return _per_sequence(data, [_pass_at_k(right, min(k, len(right))) for right in rights])


def _pass_at_k(right: NDArray[np.bool_], k: int) -> Doubles:
    size, wrong = len(right), int(np.count_nonzero(~right))
    all_wrong = comb(wrong, k) / comb(size, k)
    if all_wrong in (0.0, 1.0):
        return np.zeros(size)
    others_wrong = comb(wrong - 1, k - 1) / comb(size - 1, k - 1)
    sigma = np.sqrt(all_wrong * (1 - all_wrong))
    return np.asarray(np.where(right, all_wrong, all_wrong - others_wrong) / sigma, np.float64)


@advantage(compared_in_group=True, divided_in_group=True)
@rule("lowest must be at most highest", lambda lowest, highest: lowest <= highest)
def grpo_lead(
    data: StepData,
    *,
    threshold: Finite = 0.5,
    lowest: AtLeast0 = 0.4,
    highest: AtLeast0 = 1.5,
    middle: Share = 0.75,
    steepness: AtLeast0 = 10.0,
    epsilon: Above0 = 1e-6,
) -> StepAdvantages:
    """Scale GRPO's by w(rho) where above 0, else by w(1 - rho); rho is the group's pass rate.

    w(rho) = lowest + (highest - lowest) / (1 + exp(steepness (rho - middle))): a correct answer
    weighs more on a hard prompt. Zhang & Zuo 2025 (GRPO-LEAD, arXiv:2504.09696), difficulty-aware
    reweighting; the paper's length-dependent reward is the shaping `concise`.
    """

    def of_group(rewards: Doubles) -> Doubles:
        values, passed = _standardized(rewards, epsilon), float(np.mean(rewards > threshold))
        rates = np.where(values > 0, passed, 1 - passed)
        weight = lowest + (highest - lowest) / (1 + np.exp(steepness * (rates - middle)))
        return np.asarray(values * weight, np.float64)

    return _per_sequence(data, [of_group(r) for r in returns_of(data)])


# ---- over the batch


@advantage(centered_in_step=True)
def batch_mean(data: StepData) -> StepAdvantages:
    """r_i - mean(r) over all answers of the step, without a division, for one answer per prompt.

    FlashREINFORCE, Hu, Zhang, Zhang et al. 2026 ("Critic-Free Single-Rollout Asynchronous RL for
    Agentic Language Models"); see the loss flash_reinforce.
    """
    returns = returns_of(data)
    return _per_sequence(data, _cut(_centered(np.concatenate([np.zeros(0), *returns])), returns))


@advantage(level="token", centered_in_step=True)
def reinforce_pp(data: StepData, *, gamma: Share = 1.0, epsilon: Above0 = 1e-8) -> StepAdvantages:
    """Return-to-go of token and sequence rewards, normalised over all tokens of the step.

    A_t = r - beta sum_{i >= t} KL(i), then (A - mean) / std over the batch: Hu et al. 2025
    (REINFORCE++, arXiv:2501.03262), eq. 8 to 10. Designed for one answer per prompt.
    """
    return _per_token(data, _normalized(_to_go(data, gamma), epsilon))


@advantage(compared_in_group=True)
def reinforce_pp_baseline(data: StepData, *, epsilon: Above0 = 1e-8) -> StepAdvantages:
    """r_i - mean(r) in the group, then normalised over all tokens of the step.

    Hu et al. 2025 (REINFORCE++, arXiv:2501.03262), the variant for several answers per prompt.
    """
    lengths = [_lengths(g) for g in data.groups]
    values = [
        [np.full(int(n), a) for n, a in zip(of_group, _centered(r), strict=True)]
        for of_group, r in zip(lengths, returns_of(data), strict=True)
    ]
    return _per_token(data, _normalized(values, epsilon))


@advantage(compared_in_group=True, divided_in_group=True, part_weights="weights")
def gdpo(
    data: StepData, *, weights: Mapping[str, Finite] | None = None, epsilon: Above0 = 1e-6
) -> StepAdvantages:
    """Normalise each named part in its group, then their weighted sum over the step.

    A_i = sum_k w_k (r_k,i - mean(r_k)) / std(r_k), then (A - mean) / std over all episodes: Liu et
    al. 2026 (arXiv:2601.05242). Weights default to 1. The part `shaping` is what shaping added to
    the reward. The part `tokens` is the sum of token rewards, less the rewards in named parts
    (such as rewards of an environment's turns). A reward without parts is the part `reward`. A
    weight of a part that no score of the step names has no effect; `check_weights` checks the names
    before the run.
    """
    per_group = zip(data.groups, data.rewards, _earned_by_tokens(data), strict=True)
    named = [_parts(*of_group) for of_group in per_group]
    sums = [
        np.sum([(weights or {}).get(n, 1.0) * _standardized(v, epsilon) for n, v in p.items()], 0)
        for p in named
    ]
    flat = _standardized(np.concatenate([np.zeros(0), *sums]), epsilon)
    return _per_sequence(data, _cut(flat, sums))


def check_weights(choice: Choice, parts: Collection[str]) -> None:
    """Raise ConfigError if the estimator weighs a part that the reward does not have."""
    argument = advantage.facts(choice).part_weights
    if argument is None:
        return
    known = {*(parts or {"reward"}), "shaping", "tokens"}
    unknown = sorted(set(arguments_of(choice).get(argument) or {}) - known)
    if unknown:
        name = name_of(choice)
        raise ConfigError(
            f"algorithm.advantage: advantage {name!r}: the reward has no part {unknown[0]!r} (it "
            f"has: {', '.join(sorted(known))}). Correct its weights."
        )


def _parts(group: EpisodeGroup, rewards: Doubles, of_tokens: Doubles) -> dict[str, Doubles]:
    """Return each part of the group's returns, [episodes]; 0 where a score does not name it."""
    names = sorted({name for s in group.scores for name in s.parts})
    shaped = rewards - np.array([s.reward for s in group.scores])
    parts = {n: np.array([s.parts.get(n, 0.0) for s in group.scores]) for n in names}
    named = np.array([s.named_of_tokens for s in group.scores])
    unnamed = np.where(np.isclose(of_tokens, named, rtol=1e-6), 0.0, of_tokens - named)
    extra = {"shaping": shaped if names else np.zeros(0), "tokens": unnamed}
    return (parts or {"reward": rewards}) | {n: v for n, v in extra.items() if v.any()}


# ---- one number per token


@advantage(level="token", divided_in_group=True)
def discounted(
    data: StepData, *, gamma: Share = 1.0, turn_gamma: Share = 1.0, epsilon: Above0 = 1e-6
) -> StepAdvantages:
    """Normalise the discounted return-to-go over all generated tokens of the group. No critic.

    G_t = r_t + gamma G_{t+1}, with gamma * turn_gamma across a tool's reply, so a turn's reward
    reaches the tokens that led to it. DeepSeekMath (arXiv:2402.03300), sec. 4.1.3, sums the same
    way.
    """
    returns = _to_go(data, gamma, turn_gamma)
    return _per_token(data, [_normalized([of_group], epsilon)[0] for of_group in returns])


@advantage(level="token", centered_in_step=True)
def discounted_batch(
    data: StepData, *, gamma: Share = 1.0, turn_gamma: Share = 1.0, epsilon: Above0 = 1e-6
) -> StepAdvantages:
    """Normalise the discounted return-to-go over all generated tokens of the step; see
    `discounted`."""
    return _per_token(data, _normalized(_to_go(data, gamma, turn_gamma), epsilon))


@advantage(level="token", needs=("values",))
def gae(
    data: StepData,
    *,
    gamma: Share = 1.0,
    lam: Share = 0.95,
    whiten: bool = True,
    epsilon: Above0 = 1e-8,
    bootstrap: bool = False,
) -> StepAdvantages:
    """A_t = sum_l (gamma lam)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t: PPO's.

    Schulman et al. 2015 (arXiv:1506.02438), eq. 16; arXiv:1707.06347, eq. 11. Time runs over
    generated tokens only; V after the last token is 0. returns = A + V. `whiten` then normalises A
    over the step. Raises ConfigError without a critic's values.

    bootstrap: after the last token of an episode truncated with StopReason.LENGTH, V is the
    critic's value (Pardo et al. 2018, arXiv:1712.00378, sec. 2.2). Use it if the limit exists only
    in training and the reward covers only the tokens so far. By default the limit is part of the
    task: the sequence's reward judges the truncated answer, and V after it is 0.
    """
    if data.values is None:
        raise ConfigError(
            "advantage 'gae' needs a critic's values, but the run has no critic. Choose another "
            "advantage (group_normalized), or train a critic."
        )
    values = [
        [np.asarray(v, np.float64)[e.drawn] for e, v in zip(g.episodes, of_group, strict=True)]
        for g, of_group in zip(data.groups, data.values, strict=True)
    ]
    ends = _bootstrapped(data) if bootstrap else [np.zeros(len(g.episodes)) for g in data.groups]
    deltas = [
        [
            r + gamma * np.append(v[1:], end) - v if len(v) else v
            for r, v, end in zip(*all_three, strict=True)
        ]
        for all_three in zip(_earned(data), values, ends, strict=True)
    ]
    steps = [[np.full(len(v), gamma * lam) for v in of_group] for of_group in values]
    raw = _regrouped(_discounted_sums(_flat(deltas), _flat(steps)), deltas)
    returns = [
        [a + v for a, v in zip(*both, strict=True)] for both in zip(raw, values, strict=True)
    ]
    done = _per_token(data, _normalized(raw, epsilon) if whiten else raw)
    return StepAdvantages(advantages=done.advantages, returns=_per_token(data, returns).advantages)


advantage.check_known(function_facts.NEEDS_VALUES, lambda facts: "values" in facts.needs)
advantage.check_known(function_facts.COMPARED_IN_GROUP, lambda facts: facts.compared_in_group)
advantage.check_known(function_facts.DIVIDED_IN_GROUP, lambda facts: facts.divided_in_group)
advantage.check_known(function_facts.CENTERED_IN_STEP, lambda facts: facts.centered_in_step)
advantage.check_known(function_facts.WEIGHS_PARTS, lambda facts: facts.part_weights is not None)


def _bootstrapped(data: StepData) -> list[Doubles]:
    """Return the value of the state after each episode's last token: 0 unless truncated."""
    assert data.last_values is not None, "a critic's values need the values after the last token"
    cut = [[e.stop is StopReason.LENGTH for e in g.episodes] for g in data.groups]
    return [np.where(c, v, 0.0) for c, v in zip(cut, data.last_values, strict=True)]


# ---- numbers of a group


def _centered(values: Doubles, weights: Doubles | None = None) -> Doubles:
    """Subtract the (weighted) mean; exactly 0 if all are equal, despite the mean's rounding."""
    if not len(values) or np.all(values == values[0]):
        return np.zeros_like(values)
    if weights is None or not weights.any():
        return np.asarray(values - values.mean(), np.float64)
    return np.asarray(values - np.dot(weights, values) / weights.sum(), np.float64)


def _standardized(values: Doubles, epsilon: float, floor: float = 0.0) -> Doubles:
    """Return (values - mean) / (max(std, floor) + epsilon), std of the population.

    Exactly 0 if all are equal.
    """
    centered = _centered(values)
    return centered / (max(values.std(), floor) + epsilon) if centered.any() else centered


def _positive(mean: float) -> float:
    """Return the mean as a divisor: infinity if it is not above 0."""
    return mean if mean > 0 else float("inf")


def _lengths(group: EpisodeGroup) -> Doubles:
    """Return the episodes' numbers of generated tokens."""
    return np.array([e.num_drawn for e in group.episodes], np.float64)


# ---- numbers per generated token: per group, per episode [sampled] float64

PerSampled = Sequence[Sequence[Doubles]]


def returns_of(data: StepData) -> list[Doubles]:
    """Add up each sequence's reward and its tokens' rewards; per group [episodes]."""
    return [r + t for r, t in zip(data.rewards, _earned_by_tokens(data), strict=True)]


def _earned_by_tokens(data: StepData) -> list[Doubles]:
    """Sum the token rewards credited to each episode's generated tokens; per group [episodes]."""
    extra = data.token_rewards or tuple((None,) * len(g.episodes) for g in data.groups)
    return [
        np.array([_earned_in(e, 0.0, rewards).sum() for e, rewards in zip(*both, strict=True)])
        for both in zip((g.episodes for g in data.groups), extra, strict=True)
    ]


def _earned(data: StepData) -> PerSampled:
    """Return the reward credited to each generated token."""
    extra = data.token_rewards or tuple((None,) * len(g.episodes) for g in data.groups)
    return [
        [_earned_in(*one) for one in zip(g.episodes, rewards.tolist(), of_group, strict=True)]
        for g, rewards, of_group in zip(data.groups, data.rewards, extra, strict=True)
    ]


def _earned_in(episode: Episode, reward: float, token_rewards: FloatArray | None) -> Doubles:
    """Return the rewards credited to an episode's generated tokens: [sampled]."""
    count = episode.num_drawn
    if not count:
        return np.zeros(0)
    earned = np.zeros(count)
    if token_rewards is not None:
        earner = np.cumsum(episode.drawn) - 1  # -1: before the first generated token, not credited
        credited = np.asarray(token_rewards, np.float64)[earner >= 0]
        np.add.at(earned, earner[earner >= 0], credited)
    earned[-1] += reward
    return earned


def _to_go(data: StepData, gamma: float, turn_gamma: Share = 1.0) -> PerSampled:
    """Return the discounted sum of the rewards of each generated token and those after it."""
    earned = _earned(data)
    discounts = [_discounts(e, gamma, turn_gamma) for g in data.groups for e in g.episodes]
    return _regrouped(_discounted_sums(_flat(earned), discounts), earned)


def _discounts(episode: Episode, gamma: float, turn_gamma: float) -> Doubles:
    """Return the discount from each generated token to the next one."""
    gaps = np.diff(np.flatnonzero(episode.drawn), append=0)
    return np.where(gaps > 1, gamma * turn_gamma, gamma).astype(np.float64)


def _discounted_sums(terms: Sequence[Doubles], discounts: Sequence[Doubles]) -> list[Doubles]:
    """Return y_t = terms_t + discounts_t * y_{t+1}, for all sequences together, from the end."""
    shape = max((len(x) for x in terms), default=0), len(terms)
    y, d = np.zeros(shape), np.zeros(shape)
    for i, (x, of_x) in enumerate(zip(terms, discounts, strict=True)):
        y[: len(x), i], d[: len(x), i] = x, of_x
    for t in range(shape[0] - 2, -1, -1):
        y[t] += d[t] * y[t + 1]
    return [y[: len(x), i] for i, x in enumerate(terms)]


def _normalized(values: PerSampled, epsilon: float) -> PerSampled:
    """Return (values - mean) / (std + epsilon) over all tokens; exactly 0 if all are equal."""
    flat = np.concatenate([np.zeros(0), *_flat(values)])
    return _regrouped(_cut(_standardized(flat, epsilon), _flat(values)), values)


def _cut(flat: Doubles, like: Sequence[Doubles]) -> list[Doubles]:
    """Split an array into pieces of the lengths in `like`."""
    return np.split(flat, np.cumsum([len(v) for v in like], dtype=np.int64))[:-1]


def _flat(values: PerSampled) -> list[Doubles]:
    """List the episodes of all groups."""
    return [v for of_group in values for v in of_group]


def _regrouped(flat: Sequence[Doubles], like: PerSampled) -> PerSampled:
    """Group a flat list of episodes as `like`."""
    rest: Iterator[Doubles] = iter(flat)
    return [[next(rest) for _ in of_group] for of_group in like]


# ---- assignment to tokens


def _per_sequence(data: StepData, values: Sequence[Doubles]) -> StepAdvantages:
    """Give each generated token its episode's value; values: per group [episodes]."""
    return StepAdvantages(
        advantages=tuple(
            tuple(
                np.where(e.drawn, v, 0.0).astype(np.float32)
                for e, v in zip(group.episodes, of_group.tolist(), strict=True)
            )
            for group, of_group in zip(data.groups, values, strict=True)
        )
    )


def _per_token(data: StepData, values: PerSampled) -> StepAdvantages:
    """Give each generated token its own value."""
    return StepAdvantages(
        advantages=tuple(
            tuple(_at_sampled(e, v) for e, v in zip(group.episodes, of_group, strict=True))
            for group, of_group in zip(data.groups, values, strict=True)
        )
    )


def _at_sampled(episode: Episode, values: Doubles) -> FloatArray:
    """Return an array [length] with these values at the generated tokens, else 0."""
    result = np.zeros(len(episode.token_ids), np.float32)
    result[episode.drawn] = values
    return result
